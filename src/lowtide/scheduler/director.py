"""Director: for each saved value, keep it, swap it or recompute it.

With a trace of an earlier iteration, the choice is made for the whole iteration at
once. The load curve says how many bytes must be away at each operator. Swapping is
free as far as the lanes hide it: what is written must be written before the load
peaks, what is read must be read between the peak and the end. Bytes beyond that are
recomputed, cheapest seconds per byte first, where that is cheaper than waiting for a
copy. Without a trace each value is judged alone, as DELTA does (swap both ways
against one replay), but with measured seconds on both sides.

Cost: O(values x operators) at worst in NumPy, once per trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.trace import Trace

KEEP, SWAP, RECOMPUTE = 0, 1, 2

_HIDDEN_COST = 0.06  # seconds of compute lost per second of a hidden copy
_SMALL = 32 << 10  # bytes below which moving a value is not worth an action


@dataclass(frozen=True, slots=True)
class Lanes:
    """What the lower tier can do: bytes per second each way; 0 where there is none."""

    write: float
    read: float

    @property
    def open(self) -> bool:
        """Whether anything can be swapped at all."""
        return self.write > 0


@dataclass(frozen=True, slots=True)
class Rules:
    """What a policy allows the director to choose."""

    name: str = "auto"
    swap: bool = True
    recompute: bool = True
    planned: bool = True  # else it reacts to pressure alone (scheduler.policies)


RULES = {
    "auto": Rules("auto"),
    "keep": Rules("keep", swap=False, recompute=False),
    "swap-only": Rules("swap-only", recompute=False),
    "recompute-only": Rules("recompute-only", swap=False),
    "random": Rules("random"),
    "delta": Rules("delta", planned=False),
    "delta-knapsack": Rules("delta-knapsack", planned=False),
    "dtr": Rules("dtr", swap=False, planned=False),
    "dtr-local": Rules("dtr-local", swap=False, planned=False),
    "msps": Rules("msps", swap=False, planned=False),
    "lru": Rules("lru", swap=False, planned=False),
    "size": Rules("size", swap=False, planned=False),
}


def judge(nbytes: int, replay_seconds: float | None, lanes: Lanes, rules: Rules) -> int:
    """Choose for one value alone, before any trace is known.

    `replay_seconds` is None where the value cannot be computed again.
    """
    can_swap = rules.swap and lanes.open
    can_replay = rules.recompute and replay_seconds is not None
    if nbytes < _SMALL or not (can_swap or can_replay):
        return KEEP
    if not can_swap:
        return RECOMPUTE
    if not can_replay:
        return SWAP
    assert replay_seconds is not None
    # a copy out starts early and half hides; a copy in is mostly prefetched
    copies = nbytes / lanes.write + nbytes / lanes.read
    return RECOMPUTE if replay_seconds < 0.5 * copies else SWAP


def assign(
    trace: Trace, budget_bytes: int, lanes: Lanes, rules: Rules
) -> NDArray[np.int8]:
    """Choose for every value of an iteration; returns one code per value."""
    values, ops = trace.values, trace.ops
    plan = np.zeros(len(values), dtype=np.int8)
    if len(values) == 0 or len(ops) == 0 or not rules.planned:
        return plan
    excess = ops["live"] + ops["absent"] + ops["need"] - budget_bytes
    if excess.max() <= 0:
        return plan
    chooser = _Chooser(trace, excess.astype(np.int64), lanes, rules)
    chooser.recompute_beyond_the_lanes(plan)
    chooser.cover(plan)
    return plan


class _Chooser:
    """Greedy choice over one load curve."""

    def __init__(
        self, trace: Trace, excess: NDArray[np.int64], lanes: Lanes, rules: Rules
    ) -> None:
        values = trace.values
        self.excess = excess
        self.lanes = lanes
        self.can_swap = rules.swap and lanes.open
        self.can_replay = rules.recompute
        self.bytes = values["bytes"]
        self.start = values["saved"] + 1
        last = len(excess)
        self.stop = np.where(values["first_use"] < 0, last, values["first_use"])
        self.seconds = values["seconds"]
        self.replayable = values["replayable"] & rules.recompute
        self.movable = (self.bytes >= _SMALL) & (self.stop > self.start + 1)
        self.clock = np.concatenate(([0.0], np.cumsum(trace.ops["seconds"])))

    def recompute_beyond_the_lanes(self, plan: NDArray[np.int8]) -> None:
        """Give to recomputation what the lanes cannot hide at the highest load."""
        if not self.can_replay:
            return
        peak = int(self.excess.argmax())
        short = int(self.excess[peak])
        if self.can_swap:
            first = int(self.start[self.movable].min(initial=peak))
            out = (self.clock[peak] - self.clock[min(first, peak)]) * self.lanes.write
            back = (self.clock[-1] - self.clock[peak]) * self.lanes.read
            short -= int(0.8 * max(0.0, min(out, back)))
        spans = self.movable & (self.start < peak) & (self.stop > peak)
        rates = np.where(
            spans & self.replayable, self.seconds / np.maximum(self.bytes, 1), np.inf
        )
        for i in np.argsort(rates, kind="stable"):
            if short <= 0 or not np.isfinite(rates[i]):
                break
            if self.can_swap and rates[i] > 1 / self.lanes.write:
                break  # waiting for the copy costs less than computing again
            self._take(plan, int(i), RECOMPUTE)
            short -= int(self.bytes[i])

    def cover(self, plan: NDArray[np.int8]) -> None:
        """Release more, farthest next use first, until the load fits everywhere."""
        blocked = np.zeros(len(self.excess), dtype=bool)
        for _ in range(2 * len(plan) + len(blocked)):
            load = np.where(blocked, -1, self.excess)
            peak = int(load.argmax())
            if load[peak] <= 0:
                return
            free = (plan == KEEP) & self.movable
            spans = free & (self.start <= peak) & (self.stop > peak)
            if not self.can_swap:
                spans &= self.replayable
            if not (self.can_swap or self.can_replay) or not spans.any():
                blocked[peak] = True
                continue
            self._take_one(plan, spans)

    def _take_one(self, plan: NDArray[np.int8], spans: NDArray[np.bool_]) -> None:
        if not self.can_swap:
            rates = np.where(spans, self.seconds / self.bytes, np.inf)
            self._take(plan, int(rates.argmin()), RECOMPUTE)
            return
        # among the large ones, the one whose next use is farthest
        large = spans & (self.bytes >= 0.25 * self.bytes[spans].max())
        i = int(np.where(large, self.stop, -1).argmax())
        hidden = _HIDDEN_COST * self.bytes[i] * (1 / self.lanes.write)
        cheap = self.replayable[i] and self.seconds[i] < hidden
        self._take(plan, i, RECOMPUTE if cheap else SWAP)

    def _take(self, plan: NDArray[np.int8], i: int, code: int) -> None:
        plan[i] = code
        self.excess[self.start[i] : self.stop[i]] -= self.bytes[i]
