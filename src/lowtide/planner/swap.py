# SPDX-License-Identifier: Apache-2.0
"""AutoSwap as published (Zhang et al., arXiv 1903.06631); ours is in `unstalled.py`.

Windows are chosen by score until the load would meet the limit if copies took no time;
then one queue out (by start) and one back (by stop, from the end) are laid on the
clock, and where the limit would be broken on the way, the program stalls. With `slips`,
what the code behind the published figures does is repeated: copies back take no time,
and an exceeded limit is looked for in the wrong cell.

    load |    _____
         | __/     \\__ limit        out  |==a==|==b==|
         |/           \\             in             |==b==|==a==|
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from lowtide.planner.candidates import (
    WEIGHED,
    CopyCost,
    Recording,
    Windows,
    peak_windows,
    rank,
    standardised,
)
from lowtide.planner.weights import Weights, best_weights


@dataclass(frozen=True, slots=True)
class Swapping:
    """Windows in which variables are absent, and what that leads to."""

    windows: Windows
    stall_seconds: float  # per iteration
    peak_bytes: int  # of the scheduled load


def autoswap(
    recording: Recording,
    score: str,
    limit_bytes: int,
    *,
    costs: CopyCost | None = None,
    slips: bool = False,
    may_stall: bool = True,
    seed: int = 0,
) -> Swapping:
    """Plan as AutoSwap does for a limit, choosing by a score (see candidates.py).

    "BO" looks for the weighted sum of scores that stalls least at this limit; `seed` is
    that search's. It needs Optuna, unless one score alone does not stall at all.

    `may_stall`: "stick to limit", stalls where the limit demands it. Otherwise "no
    overhead": the copies take their time, and `peak_bytes` is what that leads to.
    """
    costs = costs or CopyCost()
    windows = peak_windows(recording, any_access=slips)
    if score != "BO":
        order = rank(
            score,
            recording,
            windows,
            costs,
            limit_bytes=limit_bytes,
            as_published=slips,
        )
        return _ordered(recording, windows[order], limit_bytes, costs, slips, may_stall)
    scores = standardised(
        recording, windows, costs, limit_bytes=limit_bytes, as_published=slips
    )

    def weighed(weights: Weights) -> Swapping:
        order = np.argsort(-(np.array(weights) @ scores), kind="stable")
        return _ordered(recording, windows[order], limit_bytes, costs, slips, may_stall)

    def cost(weights: Weights) -> float:
        plan = weighed(weights)
        return plan.stall_seconds if may_stall else float(plan.peak_bytes)

    alone = [tuple(map(float, row)) for row in np.eye(len(WEIGHED))]
    return weighed(best_weights(cost, alone, seed=seed))


def _ordered(
    recording: Recording,
    ordered: Windows,
    limit_bytes: int,
    costs: CopyCost,
    slips: bool,
    may_stall: bool,
) -> Swapping:
    """Take windows in order, and lay their copies on the clock."""
    chosen = select(recording, ordered, limit_bytes)
    if not may_stall:
        clock = _Clock(recording, costs, sys.maxsize, slips=False)
        clock.out(chosen)
        clock.back()  # what is not out before it has to return has never left
        return Swapping(chosen, 0.0, clock.peak_bytes)
    clock = _Clock(recording, costs, limit_bytes, slips)
    stall = clock.out(chosen) + clock.back()
    return Swapping(chosen, stall, clock.peak_bytes)


def select(recording: Recording, ordered: Windows, limit_bytes: int) -> Windows:
    """Take windows in order until the load, with instant copies, meets the limit."""
    load, period = recording.load.copy(), recording.period
    for taken, window in enumerate(ordered, 1):
        load[window["start"] + period : window["stop"] + period] -= window["bytes"]
        if load[period : 2 * period].max() <= limit_bytes:
            return ordered[:taken]
    return ordered


class _Clock:
    """The published schedule: positions of events at which copies end and begin."""

    def __init__(
        self, recording: Recording, costs: CopyCost, limit_bytes: int, slips: bool
    ) -> None:
        self.times = recording.events["seconds"]
        self.load = recording.load.copy()
        self.period = recording.period
        self.costs = costs
        self.limit = limit_bytes
        self.slips = slips
        self.gone: list[tuple[int, int, int, int]] = []  # start, stop, bytes, done

    @property
    def peak_bytes(self) -> int:
        return int(self.load[self.period : 2 * self.period].max())

    def out(self, chosen: Windows) -> float:
        """Lay the copies out on the clock, first start first; returns the stalls."""
        stall, free = 0.0, -self.period
        for window in chosen[np.argsort(chosen["start"], kind="stable")]:
            start, stop, size = _fields(window)
            begin = max(start, free)
            ends = self._time(begin) + float(self.costs.out(size))
            done = int(np.searchsorted(self.times, ends)) - self.period
            done = min(done, stop - 1 if self.slips else stop)
            self._add(done, stop, -size)
            first, _ = self._breach(0, self.period)
            if 0 <= first <= done:
                # the breached moment waits for the copy
                self._add(first - 1, done + (1 if self.slips else 0), -size)
                done = first - 1
            if done < stop:
                stall += max(0.0, ends - self._time(done))
            free = done
            self.gone.append((start, stop, size, done))
        return stall

    def back(self) -> float:
        """Lay the copies back on the clock, last stop first; returns the stalls."""
        stall, bound = 0.0, 2 * self.period - 1
        for start, stop, size, done in sorted(self.gone, key=lambda gone: -gone[1]):
            need = min(stop, bound)
            begins = self._time(need) - float(self.costs.back(size))
            if self.slips:  # compares with the iteration before: it never moves
                need = max(need, start)
            else:
                need = int(np.searchsorted(self.times, begins, "right")) - 1
                need = max(need - self.period, min(done, stop))
            self._add(need, stop, size)
            _, last = self._breach(need, stop)
            if last >= need:
                self._add(need, last + 1, -size)
                stall += self._time(last) - begins
                if not self.slips:  # they forget that it moved
                    need = last + 1
            elif not self.slips:
                stall += max(0.0, self._time(need) - begins)
            bound = need
        return stall

    def _time(self, event: int) -> float:
        return float(self.times[event + self.period])

    def _add(self, start: int, stop: int, size: int) -> None:
        self.load[start + self.period : stop + self.period] += size

    def _breach(self, start: int, stop: int) -> tuple[int, int]:
        """Find the first and the last event of a range above the limit; -1: none."""
        if self.slips:
            return self._slipped_breach()
        low = max(start, 0)
        middle = self.load[low + self.period : min(stop, self.period) + self.period]
        above = np.flatnonzero(middle > self.limit)
        return (low + int(above[0]), low + int(above[-1])) if len(above) else (-1, -1)

    def _slipped_breach(self) -> tuple[int, int]:
        """Look through the whole iteration and one event more, as their code does.

        A breach at the first event passes for none, and so does a single one for the
        last; otherwise the last is given one too early.
        """
        above = np.flatnonzero(
            self.load[self.period : 2 * self.period + 1] > self.limit
        )
        if len(above) == 0:
            return -1, -1
        first, last = int(above[0]), int(above[-1])
        if first == self.period:
            return -1, last - 1
        return (first if first > 0 else -1), (last - 1 if last > first else -1)


def _fields(window: np.void) -> tuple[int, int, int]:
    return int(window["start"]), int(window["stop"]), int(window["bytes"])
