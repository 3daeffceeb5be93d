"""The scheduler: which saved value leaves memory, how, and when it returns.

A state machine without torch and without a clock. It is told what happens (a value
was saved, used, is gone; an operator is about to run) and answers with actions; the
runtime performs them with torch, a simulator on a virtual clock. An action may be
refused (somebody else still holds the storage): the caller says so and the scheduler
goes on to the next.

The filter takes, in this order: values whose copy is already written (releasing them
costs nothing now), planned recomputations, copies in flight (a short wait), and then
whatever frees bytes, farthest next use first. Before the next use is known, autograd
is taken to consume in reverse order, so the oldest value is farthest. The published
policies follow no plan: their filter is a score (`scheduler.ranked`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from lowtide.scheduler.director import KEEP, RECOMPUTE, SWAP, Lanes, Rules, judge
from lowtide.scheduler.farthest import Farthest
from lowtide.scheduler.lineage import Recipe
from lowtide.scheduler.policies import POLICIES
from lowtide.scheduler.ranked import Ranked

RELEASE, DROP, WRITE, WAIT = "release", "drop", "write", "wait"


class Candidate(Protocol):
    """What the scheduler needs to know of a saved value."""

    nbytes: int
    birth: int
    next_use: int
    plan: int

    @property
    def op(self) -> Recipe | None:
        """How it was made; None where it cannot be made again."""

    @property
    def clean(self) -> bool:
        """Whether a finished copy on a lower tier exists."""

    @property
    def writing(self) -> bool:
        """Whether a copy to a lower tier is in flight."""

    def replay_seconds(self) -> float | None:
        """Seconds to compute it again now; None where that cannot be done."""


V = TypeVar("V", bound=Candidate)


class Scheduler(Generic[V]):
    """Filter, director and prefetcher over the values of the current iteration."""

    def __init__(self, rules: Rules, lanes: Lanes, *, force: bool, seed: int) -> None:
        self.rules = rules
        self.lanes = lanes
        self.force = force
        self.random = random.Random(seed)
        self.present: dict[int, V] = {}  # in memory, in order of saving
        self.to_write: dict[int, V] = {}
        self.copied_out: dict[int, V] = {}  # in memory and on a lower tier
        self.to_drop: dict[int, V] = {}
        self.writing: dict[int, V] = {}  # a copy is on its way
        self.absent: dict[int, V] = {}  # swapped out, in order of leaving
        self.dropped: dict[int, V] = {}
        self.back: dict[int, V] = {}  # left before, in memory again
        self.due: dict[int, int] = {}  # where a plan reads a value back, by its id
        # whether a copy of so many bytes may be written: limits of the tier below
        self.allows: Callable[[int], bool] = lambda nbytes: True
        self.now = 0.0  # seconds of compute so far, as the caller counts them
        policy = POLICIES.get(rules.name)
        self.ranked: Ranked[V] | None = None if policy is None else Ranked(policy)
        self._farthest: Farthest[V] = Farthest()
        self._awaited: list[V] | None = None  # the same, in order of their next use

    # -- events ---------------------------------------------------------------

    def saved(self, value: V, planned: int | None, due: int = -1) -> None:
        """A value was saved for the first time.

        A plan from a trace, if there is any, says in `planned` whether it leaves, and
        in `due` before which operator its copy in is to begin; -1: as soon as it fits.
        """
        if due >= 0:
            self.due[id(value)] = due
        if self.ranked is not None:
            planned = self._react(value)
            self.ranked.enter(value, self.now, self.lanes)
        elif planned is None:
            planned = self._judge(value)
        value.plan = planned
        self._awaited = None  # what is known of later uses may have changed
        self.present[id(value)] = value
        self._farthest.add(value)
        if planned == SWAP:
            self.to_write[id(value)] = value
        elif planned == RECOMPUTE:
            self.to_drop[id(value)] = value

    def touched(self, value: V) -> None:
        """A value was read."""
        if self.ranked is not None:
            self.ranked.touch(value, self.now)

    def copied(self, value: V) -> None:
        """A value's copy on the lower tier is complete."""
        self.writing.pop(id(value), None)
        if id(value) in self.present:  # else it has died or left meanwhile
            self.copied_out[id(value)] = value

    def left(self, value: V, *, swapped: bool) -> None:
        """A value's bytes left memory."""
        self._forget(value)
        if swapped:
            self.absent[id(value)] = value
            self._awaited = None
        else:
            self.dropped[id(value)] = value
        if self.ranked is not None:
            self.ranked.leave(value, self.now, evicted=not swapped)

    def returned(self, value: V) -> None:
        """A value's bytes are in memory again."""
        self._forget(value)
        self.present[id(value)] = self.back[id(value)] = value
        self._farthest.add(value)
        if value.clean:
            self.copied_out[id(value)] = value
        if self.ranked is not None:
            self.ranked.enter(value, self.now, self.lanes)

    def visited(self, value: V, due: int, *, changed: bool) -> None:
        """A value that lives on a lower tier was used, and will be again later on."""
        self.due[id(value)] = due
        self.back.pop(id(value), None)
        self._awaited = None
        if changed:
            self.copied_out.pop(id(value), None)
            self.to_write[id(value)] = value
        self._farthest.remove(value)
        self._farthest.add(value)

    def gone(self, value: V) -> None:
        """Nobody needs the value any more, or it may not be touched."""
        self._forget(value)
        self.due.pop(id(value), None)
        if self.ranked is not None:
            self.ranked.leave(value, self.now, evicted=True)
            if not (self.present or self.absent or self.dropped):
                self.ranked.lineage.clear()

    def _forget(self, value: V) -> None:
        key = id(value)
        self.present.pop(key, None)
        self._farthest.remove(value)
        self.copied_out.pop(key, None)
        self.to_write.pop(key, None)
        self.to_drop.pop(key, None)
        self.writing.pop(key, None)
        self.dropped.pop(key, None)
        self.back.pop(key, None)
        if self.absent.pop(key, None) is not None:
            self._awaited = None

    def write_started(self, value: V) -> None:
        """A copy of the value is on its way."""
        self.to_write.pop(id(value), None)
        if id(value) in self.present:
            self.writing[id(value)] = value

    # -- actions --------------------------------------------------------------

    def early_writes(self) -> Iterator[V]:
        """Yield planned swaps whose copy has not begun, oldest first."""
        for value in list(self.to_write.values()):
            if self.allows(value.nbytes):
                yield value

    def forced(self) -> Iterator[tuple[str, V]]:
        """Yield an action for every value: the regime of the exactness tests."""
        for value in list(self.present.values()):
            if value.plan == SWAP:
                yield (RELEASE if value.clean else WRITE), value
            elif value.plan == RECOMPUTE:
                yield DROP, value

    def victims(self, short: int = 0) -> Iterator[tuple[str, V]]:
        """Yield actions that free memory, best first; each may be refused.

        `short` bytes are wanted in all, where that is known.
        """
        if self.ranked is not None:
            for value in self.ranked.victims(self.now, self.lanes, short):
                yield from self._out(value)
            return
        for value in list(self.copied_out.values()):
            if id(value) not in self.back:
                yield RELEASE, value
        for value in list(self.to_drop.values()):
            yield DROP, value
        for value in list(self.writing.values()):
            if value.writing:
                yield WAIT, value
        if self.rules.name == "keep":
            return
        if self.rules.name != "random":
            for value in self._farthest:
                yield from self._any_way(value)
            return
        present = list(self.present.values())
        self.random.shuffle(present)
        for value in present:
            yield from self._any_way(value)

    def returns(self, position: int) -> list[V]:
        """Return swapped values in the order in which they will be wanted.

        What a plan reads later than here is left out. What it reads now has its room
        in the plan, so that the caller needs to look at this moment only.
        """
        if self.ranked is not None:
            policy = self.ranked.policy
            gone = list(self.absent.values())  # in order of leaving
            return (gone[::-1] if policy.newest_first else gone)[: policy.prefetch]
        awaited = self._awaited
        if awaited is None:
            awaited = sorted(self.absent.values(), key=lambda value: value.next_use)
            self._awaited = awaited
        if self.due:
            awaited = [v for v in awaited if self.due.get(id(v), -1) <= position]
        if awaited and awaited[0].next_use < position:  # not known, or later than that
            return sorted(awaited, key=_distance)
        return awaited

    # -- choices --------------------------------------------------------------

    def _any_way(self, value: V) -> Iterator[tuple[str, V]]:
        """Yield the better way out for one value, then the other."""
        if value.clean:
            if id(value) in self.back:
                yield RELEASE, value
            return
        code = self._judge(value)
        ways = [DROP, WRITE] if code == RECOMPUTE else [WRITE, DROP]
        for way in ways:
            if way == WRITE and not (self.rules.swap and self._may_write(value)):
                continue
            if way == DROP and not self.rules.recompute:
                continue
            yield way, value

    def _out(self, value: V) -> Iterator[tuple[str, V]]:
        """Yield how a published policy's victim leaves, then the other way."""
        assert self.ranked is not None
        if value.clean:
            yield RELEASE, value
            return
        if value.writing:
            yield WAIT, value
            return
        swaps = self.ranked.policy.swap and self._may_write(value)
        if self.ranked.policy.way(value, self.lanes) == RECOMPUTE:
            ways = [DROP, WRITE] if swaps else [DROP]
        else:
            ways = [WRITE, DROP] if swaps else [DROP]
        for way in ways:
            yield way, value

    def _may_write(self, value: V) -> bool:
        return self.lanes.open and self.allows(value.nbytes)

    def _react(self, value: V) -> int:
        """Judge for a policy that plans nothing, but may copy ahead of pressure."""
        assert self.ranked is not None
        way = self.ranked.policy.way(value, self.lanes)
        if way == RECOMPUTE and value.replay_seconds() is None:
            return KEEP
        return way if self.force or (self.ranked.policy.ahead and way == SWAP) else KEEP

    def _judge(self, value: V) -> int:
        if self.rules.name == "random":
            return self.random.choice((SWAP, RECOMPUTE, KEEP))
        if self.rules.name == "keep":
            return KEEP
        seconds = value.replay_seconds() if self.rules.recompute else None
        if self.force:
            can_replay = seconds is not None
            if self.rules.swap and self.lanes.open:  # whatever the limits say
                return SWAP
            return RECOMPUTE if can_replay else KEEP
        lanes = self.lanes if self.allows(value.nbytes) else Lanes(0.0, 0.0)
        return judge(value.nbytes, seconds, lanes, self.rules)


def _distance(value: Candidate) -> tuple[int, int]:
    """Order by distance to the next use (known first), then by age."""
    return (value.next_use, -value.birth)
