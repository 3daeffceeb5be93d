# SPDX-License-Identifier: Apache-2.0
"""Saved values made by hand, for the scheduler's tests."""

from dataclasses import dataclass, field

from lowtide.scheduler.director import KEEP, RULES, Lanes
from lowtide.scheduler.scheduler import Scheduler

MIB = 1 << 20
CLOSED = Lanes(0.0, 0.0)
OPEN = Lanes(100.0 * MIB, 100.0 * MIB)  # 8 MiB out and back: 0.16 s


@dataclass(eq=False)
class Item:
    """A saved value as the scheduler sees it, with every answer settable."""

    name: str = ""
    nbytes: int = 8 * MIB
    birth: int = 0
    next_use: int = -1
    plan: int = KEEP
    clean: bool = False
    writing: bool = False
    seconds: float | None = field(default=None, repr=False)

    def replay_seconds(self) -> float | None:
        return self.seconds


def scheduler_of(
    policy: str = "auto", lanes: Lanes = OPEN, *, force: bool = False, seed: int = 0
) -> Scheduler[Item]:
    return Scheduler(RULES[policy], lanes, force=force, seed=seed)


def entries(scheduler: Scheduler[Item], item: Item) -> set[str]:
    """Name the dictionaries that hold a value."""
    names = ("present", "to_write", "copied_out", "to_drop", "absent")
    return {name for name in names if id(item) in getattr(scheduler, name)}
