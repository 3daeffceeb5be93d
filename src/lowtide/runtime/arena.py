# SPDX-License-Identifier: Apache-2.0
"""Plan the arena behind torch's CPU allocator from what iterations were seen to do.

A *cycle* runs from one boundary to the next, on one thread. Its blocks come in the same
order every time, so a request is known by the operator that makes it and by its number
within it. Two cycles with the same requests in the same operators have the same
*signature*, whatever their sizes, and share a plan: each request's place has room for
the largest size seen there (an envelope), which serves changing shapes.

    boundary       boundary       boundary       boundary
       |-- cycle 0 ---|-- cycle 1 ---|-- cycle 2 ---|--
             recorded       recorded   planned, from cycle 0 if it has its signature

A cycle is planned once the next has shown when its last blocks die. What outlives that
too (parameters, optimizer state) stays where it came to lie. What a cycle's signature
will be is guessed from those before it. A wrong guess costs page faults, never memory
and never a byte in use: see `cpp/arena.h`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowtide.planner.pool import BLOCK, Search, lower_bound, place_blocks
from lowtide.runtime.allocator import BlockLog, Bytes, NativeCounter

Ints: TypeAlias = NDArray[np.int64]
Signature: TypeAlias = tuple[int, int]  # requests, and a hash of their operators

PAGE = 4096  # bytes
PAGED_FROM = 65_536  # bytes; smaller blocks do not lie in the arena

_NO_PLAN = (1 << 64) - 1
_MOST_PLANS = 16
_SLOTS = 2  # the longest life is two cycles
_SERVED = 0.95  # of a plan's places must be asked for, or it was another cycle
_CROWDED = 0.05  # of the requests find their place taken: something lies in the way
_PATIENCE = 3  # crowded cycles in a row until the zone is moved
_GOOD = 1.0005  # times the lower bound: a placement that is looked at no longer
_NODES = 1 << 17
_SECONDS = 1.0  # for one plan, at the most
_LONGEST_LOG = 24  # cycles recorded without finding any that come again
_PAUSE = 10 * _LONGEST_LOG  # cycles until it is tried again


class Figures(ctypes.Structure):
    """What the arena counts, in bytes unless said otherwise (`cpp/arena.h`)."""

    live: int
    kept: int
    footprint: int
    asked: int
    most_asked: int
    fresh: int
    returned: int
    moved: int
    requests: int
    hits: int
    overflows: int
    busy: int
    strays: int
    signature: int
    damaged: int

    _fields_ = [
        ("live", ctypes.c_int64),  # pages in use
        ("kept", ctypes.c_int64),  # free pages that were not given back
        ("footprint", ctypes.c_int64),  # the most of both together
        ("asked", ctypes.c_int64),  # of the live bytes, those asked for
        ("most_asked", ctypes.c_int64),
        ("fresh", ctypes.c_int64),  # taken from the system so far
        ("returned", ctypes.c_int64),  # given back to it so far
        ("moved", ctypes.c_int64),  # to other addresses so far
        # of the current cycle:
        ("requests", ctypes.c_int64),
        ("hits", ctypes.c_int64),  # requests that got their planned places
        ("overflows", ctypes.c_int64),  # that were larger than planned
        ("busy", ctypes.c_int64),  # whose place was taken
        ("strays", ctypes.c_int64),  # that were not planned for
        ("signature", ctypes.c_int64),
        # of all:
        ("damaged", ctypes.c_int64),  # pages written or taken while free (debugging)
    ]


class Arena:
    """Read the arena's figures, and change its ways."""

    def __init__(self, counter: NativeCounter) -> None:
        self.counter = counter
        self._library = counter.library

    @property
    def figures(self) -> Figures:
        """Read all figures at one moment."""
        figures = Figures()
        self._library.lowtide_arena(ctypes.byref(figures))
        return figures

    def reset_footprint(self) -> None:
        """Let the footprint begin anew at what is live and kept now."""
        self._library.lowtide_arena_reset()

    def set_debug(self, on: bool) -> None:
        """Fill freed blocks with a pattern, and check it when they are used again."""
        self._library.lowtide_arena_debug(on)

    def begin(self, plan: int | None) -> None:
        """Begin a cycle of this thread, by a plan or without."""
        self._library.lowtide_plan_begin(
            _NO_PLAN if plan is None else plan, ctypes.byref(Figures())
        )

    def end(self) -> None:
        """End the last cycle; nothing is planned, and no thread is special any more."""
        self._library.lowtide_plan_end()

    def move_zone(self) -> None:
        """Let plans begin at other addresses from now on."""
        self._library.lowtide_plan_move()

    def set_plan(self, plan: int, first: Ints, pages: Ints, page: Ints) -> None:
        """Install a plan: places in pages, and where those of each operator begin."""
        columns = [np.ascontiguousarray(c, np.uint32) for c in (first, pages, page)]
        self._library.lowtide_plan_set(
            plan,
            columns[0].ctypes.data,
            len(first),
            columns[1].ctypes.data,
            columns[2].ctypes.data,
            len(pages),
        )

    def asked(self, plan: int, places: int) -> Ints:
        """Return the pages that were asked for at each place, at the most."""
        asked = np.zeros(places, np.uint32)
        self._library.lowtide_plan_asked(plan, asked.ctypes.data, places)
        return asked.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Cycle:
    """The requests of one cycle, by operator and in their order within it."""

    first: Ints  # of each operator, its first request; and one more
    pages: Ints  # of each request; 0: it is not planned for
    born: Ints  # events from the start of the cycle
    dead: Ints
    period: int  # events


def cycle_of(blocks: NDArray[np.void], start: int, stop: int) -> Cycle | None:
    """Find the requests of a cycle, events [start, stop), in a log; None: it has none.

    The log must cover the next cycle too: what is alive then is not planned for.
    """
    inside = (blocks["start"] >= start) & (blocks["start"] < stop)
    rows = blocks[inside & (blocks["bytes"] >= PAGED_FROM) & (blocks["start_op"] >= 0)]
    if len(rows) == 0:
        return None
    rows = rows[np.argsort(rows["start_op"], kind="stable")]
    ops = rows["start_op"].astype(np.int64)
    period = stop - start
    born = rows["start"] - start
    dead = np.minimum(rows["stop"] - start, born + _SLOTS * period)
    ends = rows["stop"] >= 0
    return Cycle(
        first=np.searchsorted(ops, np.arange(ops[-1] + 2)).astype(np.int64),
        pages=np.where(ends, -(-rows["bytes"] // PAGE), 0),
        born=born,
        dead=np.where(ends, dead, born + 1),
        period=period,
    )


@dataclass(slots=True)
class Plan:
    """One signature's plan: it alternates between tables, since blocks cross cycles."""

    signature: Signature
    cycle: Cycle
    number: int  # of its first table in the arena
    tables: int = 0
    uses: int = 0
    height: int = 0  # pages
    bound: int = 0  # pages; no placement is lower

    def place(self, arena: Arena) -> None:
        """Find a place for each request, and install the tables."""
        cycle = self.cycle
        blocks = np.zeros(len(cycle.pages), BLOCK)
        blocks["born"], blocks["dead"] = cycle.born, cycle.dead
        blocks["bytes"] = cycle.pages
        self.bound = lower_bound(blocks, period=cycle.period)
        search = Search(
            enough_bytes=int(self.bound * _GOOD), nodes=_NODES, seconds=_SECONDS
        )
        pool = place_blocks(blocks, period=cycle.period, search=search)
        self.tables, self.height = pool.slots, pool.height_bytes
        for i in range(pool.slots):
            arena.set_plan(self.number + i, cycle.first, cycle.pages, pool.offsets[i])

    def next_table(self) -> int:
        """Return the number of the table for the next cycle."""
        self.uses += 1
        return self.number + self.uses % self.tables

    def grow(self, arena: Arena) -> None:
        """Make room for the largest requests seen, and place all anew."""
        cycle = self.cycle
        pages = cycle.pages
        for i in range(self.tables):
            asked = arena.asked(self.number + i, len(pages))
            pages = np.where(cycle.pages > 0, np.maximum(pages, asked), 0)
        self.cycle = Cycle(cycle.first, pages, cycle.born, cycle.dead, cycle.period)
        self.place(arena)


class Pool:
    """Learns what cycles do, and has the arena follow plans made from it.

    Arguments:
        limit: what is live and kept together stays within it where live blocks do.
    """

    def __init__(self, counter: NativeCounter, *, limit: Bytes | None = None) -> None:
        self.counter = counter
        counter.keep(limit)
        self.arena = Arena(counter)
        self.plans: dict[Signature, Plan] = {}
        self.current: Plan | None = None
        self._log = BlockLog(counter)
        self._recording = False
        self._pause = 0  # cycles left in which nothing is recorded
        self._marks: list[tuple[int, Signature]] = []  # event at a boundary; the past
        self._history: tuple[Signature, ...] = ()
        self._followers: dict[tuple[Signature, ...], Signature] = {}
        self._crowded = 0

    def boundary(self) -> None:
        """End a cycle and begin the next."""
        past = self.arena.figures
        signature = self._recognize(past)
        if self.current is not None and past.overflows:
            self.current.grow(self.arena)
        self._clear_the_way(past)
        self._learn(signature)
        self.current = self._foresee(signature)
        self.counter.op.value = 0
        self.arena.begin(None if self.current is None else self.current.next_table())

    def close(self) -> None:
        """Follow no plan any more, and set no limit."""
        self.counter.keep(None)
        self._end_log()
        self.current = None
        self.arena.end()

    @property
    def height_bytes(self) -> Bytes:
        """Tell how high the highest plan is."""
        return PAGE * max((plan.height for plan in self.plans.values()), default=0)

    # -- which plan -------------------------------------------------------------

    def _recognize(self, past: Figures) -> Signature:
        """Say which cycle has ended: the one planned, if it was nearly that.

        More may have followed behind it, such as an evaluation.
        """
        signature, plan = (past.requests, past.signature), self.current
        if plan is None or signature in self.plans:
            return signature
        planned = past.hits + past.overflows + past.busy
        expected = np.count_nonzero(plan.cycle.pages)
        served = planned >= _SERVED * expected and planned >= past.strays
        return plan.signature if served else signature

    def _foresee(self, signature: Signature) -> Plan | None:
        """Choose the plan for the cycle that begins."""
        for n in range(1, len(self._history) + 1):
            self._followers[self._history[-n:]] = signature
        if len(self._followers) > 64 * _MOST_PLANS:
            self._followers.clear()
        self._history = (*self._history, signature)[-3:]
        for n in range(len(self._history), 0, -1):
            following = self._followers.get(self._history[-n:])
            if following in self.plans:
                return self.plans[following]
        return self.plans.get(signature, self.current)

    def _clear_the_way(self, past: Figures) -> None:
        """Move the zone of plans once something stays in their way."""
        crowded = past.busy > _CROWDED * past.requests
        self._crowded = self._crowded + 1 if crowded else 0
        if self._crowded == _PATIENCE:
            self._crowded = 0
            self.arena.move_zone()

    # -- learning ---------------------------------------------------------------

    def _learn(self, signature: Signature) -> None:
        if not self._recording:
            self._pause = max(0, self._pause - 1)
            unknown = signature not in self.plans and self._pause == 0
            if unknown and len(self.plans) < _MOST_PLANS:
                self._recording = self._log.start()
                self._marks = [(0, signature)]
            return
        self._marks.append((self._log.events, signature))
        if len(self._marks) >= 3:
            (start, _), (stop, earlier), _ = self._marks[-3:]
            if earlier not in self.plans and len(self.plans) < _MOST_PLANS:
                self._plan(earlier, start, stop)
            known = signature in self.plans and earlier in self.plans
            if known or len(self._marks) > _LONGEST_LOG:
                self._pause = 0 if known else _PAUSE
                self._end_log()

    def _plan(self, signature: Signature, start: int, stop: int) -> None:
        cycle = cycle_of(self._log.blocks, start, stop)
        if cycle is not None:
            plan = Plan(signature, cycle, _SLOTS * len(self.plans))
            plan.place(self.arena)
            self.plans[signature] = plan

    def _end_log(self) -> None:
        if self._recording:
            self._recording = False
            self._log.stop()
