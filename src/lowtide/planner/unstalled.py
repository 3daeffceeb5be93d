# SPDX-License-Identifier: Apache-2.0
"""Swapping without a stall: ours, on the cost model of AutoSwap (`swap.py`).

Windows are chosen until the load meets the limit with the copies on the clock and
nothing stalled, always among those over the highest moment left: by absence, area,
start, stop or size, whichever gets lowest; then one window at a time is taken or left
while that helps. Cost: some hundred schedules of O(windows + events) each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lowtide.planner.candidates import (
    CopyCost,
    Floats,
    Recording,
    Windows,
    peak_windows,
    steady_windows,
)
from lowtide.planner.swap import Swapping

Chosen = NDArray[np.bool_]

_TRIES = 8000  # schedules in all that are tried while the limit sinks
_PATIENCE = 8  # of these without success, in windows, before less is asked for


def without_stall(
    recording: Recording,
    limit_bytes: int,
    *,
    steady: bool = True,
    costs: CopyCost | None = None,
) -> Swapping:
    """Choose windows until the load meets a limit with nothing stalled (ours).

    `steady`: any window, also over the end of the iteration; else only those over the
    peak, one a variable, as the paper has it. The limit counts as missed when
    `peak_bytes` is above it.
    """
    costs = costs or CopyCost()
    windows = (
        steady_windows(recording, costs)
        if steady
        else peak_windows(recording, any_access=False)
    )
    lanes = _Lanes(recording, costs, steady)
    return lanes.choose(windows, limit_bytes)


class _Lanes:
    """Copies on two queues beside the iteration, which comes again and again."""

    def __init__(self, recording: Recording, costs: CopyCost, steady: bool) -> None:
        self.period = recording.period
        self.times = recording.events["seconds"]
        self.load = recording.load[self.period : 2 * self.period]
        self.costs = costs
        self.steady = steady
        self.lasts = recording.seconds
        edges = self.times[self.period : 2 * self.period + 1]
        # what lasts no time counts a little, or its excess would count for nothing
        self.lengths = np.diff(edges) + self.lasts / (16 * self.period)

    def choose(self, windows: Windows, limit_bytes: int) -> Swapping:
        """Choose windows until the load meets the limit, or as low as it gets."""
        absent = np.subtract(*reversed(self._ends(windows)))
        size = windows["bytes"].astype(np.float64)
        start, stop = windows["start"], windows["stop"].astype(np.float64)
        best = np.zeros(len(windows), np.bool_)
        lowest = int(self.load.max())
        for wish in (absent, absent * size, -start, stop, -size):
            if lowest > limit_bytes:
                peak, chosen = self._over_peaks(windows, wish, limit_bytes)
                if peak < lowest:
                    lowest, best = peak, chosen
        lowest = self._exchange(windows, best, lowest, limit_bytes)
        lowest = self._sink(windows, best, lowest, limit_bytes)
        return Swapping(windows[best], 0.0, lowest)

    def _over_peaks(
        self, windows: Windows, wish: Floats, limit_bytes: int
    ) -> tuple[int, Chosen]:
        """Add windows over the highest moment left, the greatest wish first."""
        chosen = np.zeros(len(windows), np.bool_)
        useless = chosen.copy()
        load = self.load
        lowest, best = int(load.max()), chosen.copy()
        while lowest > limit_bytes:
            peak = int(load.argmax())
            over = (windows["start"] <= peak) & (windows["stop"] > peak)
            if self.steady:
                over |= windows["stop"] > peak + self.period
            over &= ~chosen & ~useless
            if not over.any():
                break
            pick = int(np.where(over, wish, -np.inf).argmax())
            chosen[pick] = True
            trial = self.schedule(windows[chosen])
            if trial is None:
                chosen[pick] = False
                useless[pick] = True
                continue
            load = trial
            if int(load.max()) < lowest:
                lowest, best = int(load.max()), chosen.copy()
        return lowest, best

    def _exchange(
        self, windows: Windows, chosen: Chosen, lowest: int, limit_bytes: int
    ) -> int:
        """Take or leave one window more while the peak falls."""
        fell = True
        while fell and lowest > limit_bytes:
            fell = False
            for i in range(len(windows)):
                chosen[i] ^= True
                trial = self.schedule(windows[chosen])
                if trial is not None and int(trial.max()) < lowest:
                    lowest, fell = int(trial.max()), True
                else:
                    chosen[i] ^= True
        return lowest

    def _sink(
        self, windows: Windows, best: Chosen, lowest: int, limit_bytes: int
    ) -> int:
        """Ask for a little less again and again, and come nearer in small steps.

        What counts on the way is not the highest moment alone but all that lies above
        what is asked for, so that several peaks can be worn away one after another.
        """
        random = np.random.default_rng(0)
        tries = 0
        step = lowest // 64
        while lowest > limit_bytes and step > lowest // 2048:
            goal = max(limit_bytes, lowest - step)
            chosen = best.copy()
            excess = self._excess(self.schedule(windows[chosen]), goal)
            since = 0
            while 0 < excess < np.inf and since < _PATIENCE * len(windows):
                tries += 1
                if tries > _TRIES:
                    return lowest
                flips = self._flips(windows, chosen, random, since)
                chosen[flips] ^= True
                load = self.schedule(windows[chosen])
                found = self._excess(load, goal)
                if found < excess:
                    excess, since = found, 0
                else:
                    chosen[flips] ^= True
                    since += 1
            if excess == 0:
                load = self.schedule(windows[chosen])
                assert load is not None
                lowest, best[:] = int(load.max()), chosen
            else:
                step //= 2
        return lowest

    def _flips(
        self, windows: Windows, chosen: Chosen, random: np.random.Generator, since: int
    ) -> NDArray[np.intp]:
        """Choose a window to take or leave; where that has not helped, two."""
        n = len(windows)
        if since < n:
            return np.array([random.integers(n)])
        taken, left = np.flatnonzero(chosen), np.flatnonzero(~chosen)
        if len(taken) == 0 or len(left) == 0:
            return np.array([random.integers(n)])
        return np.array([random.choice(taken), random.choice(left)])

    def _excess(self, load: Floats | None, goal: int) -> float:
        """Sum what lies above a goal, over time; infinite where something stalls."""
        if load is None:
            return float("inf")
        return float((np.maximum(load - goal, 0.0) * self.lengths).sum())

    def schedule(self, windows: Windows) -> Floats | None:
        """Lay out the copies; returns the load, None where something would stall."""
        begin, end = self._ends(windows)
        size = windows["bytes"]
        gone = _queue(begin, self.costs.out(size), self.lasts if self.steady else 0.0)
        back = -_queue(-end, self.costs.back(size), self.lasts if self.steady else 0.0)
        if (back < gone).any():
            return None
        return self._load(gone, back, size)

    def _ends(self, windows: Windows) -> tuple[Floats, Floats]:
        return (
            self.times[windows["start"] + self.period],
            self.times[windows["stop"] + self.period],
        )

    def _load(self, gone: Floats, back: Floats, size: NDArray[np.int64]) -> Floats:
        """Take the bytes away from the events that lie within each absence."""
        times, period = self.times, self.period
        first = np.searchsorted(times, gone) - period
        last = np.searchsorted(times, back, "right") - 1 - period
        change = np.zeros(3 * period + 1)
        some = last > first
        np.add.at(change, first[some] + period, -size[some])
        np.add.at(change, last[some] + period, size[some])
        change = np.cumsum(change[:-1])
        load = self.load + change[period : 2 * period]
        if self.steady:  # what the iterations before and after take away as well
            load = load + change[:period] + change[2 * period :]
        return np.asarray(load)


def _queue(ready: Floats, lasts: Floats, round_seconds: float) -> Floats:
    """Serve copies in the order in which they are ready; returns when each is done.

    With a round, the queue comes again every so many seconds: what is still under way
    at its end delays the next round, until that changes nothing.
    """
    done = np.zeros(len(ready))
    if len(ready) == 0:
        return done
    order = np.argsort(ready, kind="stable")
    # One is done when the latest that kept the lane busy until then was ready, and all
    # from that one on have been served.
    served = np.cumsum(lasts[order])
    busy = np.maximum.accumulate(ready[order] - (served - lasts[order]))
    carried = -np.inf
    for _ in range(3):
        done[order] = served + np.maximum(busy, carried)
        free = float(done[order[-1]])
        if round_seconds == 0 or free - round_seconds <= carried:
            break
        carried = free - round_seconds
    return done
