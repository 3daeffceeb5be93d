"""Director: keep a value, swap it or recompute it, judged alone.

For an iteration not seen before, as DELTA does (swap both ways against one replay), but
with measured seconds on both sides. Iterations that repeat are planned whole, by
planner.planner.
"""

from __future__ import annotations

from dataclasses import dataclass

KEEP, SWAP, RECOMPUTE = 0, 1, 2

_SMALL = 32 << 10  # bytes below which moving a value is not worth an action


@dataclass(frozen=True, slots=True)
class Lanes:
    """What the lower tier can do: bytes per second each way; 0 where there is none."""

    write: float
    read: float

    @property
    def open(self) -> bool:
        """Whether anything can be swapped at all."""
        return self.write > 0 and self.read > 0


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
