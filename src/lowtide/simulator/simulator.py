"""Execute a recorded iteration under a budget and a policy, on a virtual clock.

The scheduler is the run time's own, and so are the order of events and the refusals
(`simulator.machine`); only torch is missing. No fragmentation, no contention between
copies and compute, no time for the decisions themselves (these are measured in real
seconds and reported beside). The model of the world is the run time's: what leaves
memory are saved values, once nobody but autograd holds them, and needs are known before
an operator runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import thread_time
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lowtide.scheduler.director import RULES, SWAP, Lanes, Rules
from lowtide.scheduler.scheduler import Scheduler
from lowtide.simulator.buffers import Buffer, Clock, Operator, build
from lowtide.simulator.forecast import managed_bytes, managed_versions
from lowtide.simulator.hosting import Hosted
from lowtide.simulator.machine import Machine, OutOfMemory
from lowtide.simulator.watch import Watch, WatchedBuffer
from lowtide.trace import Graph

_FILLING = 0.6  # of the budget: above it, copies start without a plan
_TIGHT = 0.99  # of the budget: what a plan aims for
PATIENCE = 10.0  # plain steps after which a run is given up as thrashing


class Plan(Protocol):
    """What is followed of a plan: a row for each saved value, as in `forecast`."""

    @property
    def codes(self) -> NDArray[np.int8]:
        """Keep, swap or recompute."""

    @property
    def reads(self) -> NDArray[np.int32]:
        """Before which operator a copy in begins; -1: nothing is read back."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened to one iteration."""

    policy: str
    budget_bytes: int
    fits: bool  # it ran to its end within the budget
    thrashed: bool  # given up: it took more than ten times the plain seconds
    peak_bytes: int
    final_bytes: int  # live at the end
    counted_bytes: int  # the same, summed over what is in memory
    plain_seconds: float
    seconds: float  # as far as it got
    replay_seconds: float
    exposed_seconds: float  # waited for copies
    room_seconds: float  # of these, for copies out to be complete
    replayed_operators: int
    written_bytes: int
    read_bytes: int
    decisions: int  # actions tried under pressure
    deciding_seconds: float  # real processor seconds, in the scheduler
    evaluations: int  # of scores, by the policies that have one
    victims: int  # chosen by these
    actions: tuple[tuple[int, str, int], ...]  # (position, action, version)
    failed_at: int  # operator that did not fit, -1: none

    @property
    def slowdown(self) -> float:
        """Seconds over those of the plain iteration."""
        return self.seconds / self.plain_seconds if self.plain_seconds else 1.0


class _Run:
    """One iteration under way."""

    def __init__(
        self,
        graph: Graph,
        rules: Rules,
        budget: int,
        lanes: Lanes,
        seed: int,
        plan: Plan | None,
        watch: Watch | None,
        hosted: Hosted | None,
    ) -> None:
        self.graph = graph
        self.rules = rules
        self.budget = budget
        self.patience = PATIENCE
        self.clock = Clock()
        self.watch = watch
        kind = Buffer if watch is None else WatchedBuffer
        self.operators, self.buffers = build(graph, self.clock, kind)
        self.visits = {} if hosted is None else hosted.visits
        for i in self.visits:
            self.buffers[i].resident = False
            self.buffers[i].copied = 0.0
        if watch is not None:
            watch.begin(self.buffers)
        self.scheduler: Scheduler[Buffer] = Scheduler(
            rules, lanes, force=False, seed=seed
        )
        self.machine = Machine(budget, lanes, self.scheduler, self.buffers, self.clock)
        self.load = graph.live_bytes + graph.needs - managed_bytes(graph)
        uses = graph.versions["first_use"]
        self.backward = int(
            np.where(uses < 0, len(self.operators), uses).min(initial=0)
        )
        self.codes: dict[int, int] = {}  # by version
        self.reads: dict[int, int] = {}
        if plan is not None and rules.planned:
            rows = managed_versions(graph)
            self.codes = dict(zip(rows, plan.codes.tolist(), strict=True))
            self.reads = dict(zip(rows, plan.reads.tolist(), strict=True))
        self._visited: dict[int, list[tuple[Buffer, int]]] = {}  # by its last operator
        self._begin_visits()
        self._dying: dict[int, list[Buffer]] = {}
        self._settling: dict[int, list[Buffer]] = {}
        for i in managed_versions(graph):
            self._settling.setdefault(self.buffers[i].held, []).append(self.buffers[i])
        for buffer in self.buffers:
            self._dying.setdefault(buffer.dead, []).append(buffer)
        # Autograd unpacks a value for its last use, and holds it until it is done.
        self._taken: dict[int, list[Buffer]] = {}
        last: dict[int, int] = {}
        for version, _, use in graph.saves.tolist():
            last[version] = max(last.get(version, -1), use)
        for i in managed_versions(graph):
            use, buffer = last.get(i, -1), self.buffers[i]
            if 0 <= use < buffer.dead - 1:
                self._taken.setdefault(use, []).append(buffer)

    def _begin_visits(self) -> None:
        """Tell the scheduler of what lives on the host, all of it away."""
        for i, visits in self.visits.items():
            buffer = self.buffers[i]
            buffer.next_use = visits[0].first
            buffer.managed = True
            self.scheduler.saved(buffer, SWAP, visits[0].due)
            self.scheduler.left(buffer, swapped=True)
            self.load -= buffer.nbytes
            for number, visit in enumerate(visits):
                self._visited.setdefault(visit.last, []).append((buffer, number))

    def _end_visit(self, buffer: Buffer, number: int) -> None:
        """Look forward to the next visit; what was changed has to be written out."""
        visits = self.visits[buffer.index]
        again = visits[number + 1] if number + 1 < len(visits) else None
        last = len(self.operators)
        buffer.next_use = last if again is None else again.first
        if visits[number].changed:
            buffer.copied = None
        due = last if again is None else again.due
        self.scheduler.visited(buffer, due, changed=visits[number].changed)

    def _go_home(self) -> None:
        """Wait until all that lives on the host is there."""
        machine = self.machine
        for i in self.visits:
            buffer = self.buffers[i]
            machine.start_write(buffer)
            if buffer.copied is not None:
                machine.wait(buffer.copied, for_room=True)

    def run(self) -> tuple[int, bool]:
        """Run every operator; returns the one that failed, and whether it thrashed."""
        limit = self.patience * self.graph.seconds
        for operator in self.operators:
            if self.clock.now > limit:
                return -1, True
            try:
                self._step(operator)
            except OutOfMemory:
                return operator.index, False
        self._go_home()
        return -1, False

    def _step(self, operator: Operator) -> None:
        machine, scheduler = self.machine, self.scheduler
        machine.position = operator.index
        scheduler.now = self.clock.now
        for parent in operator.inputs:
            parent.locks += 1
        for parent in operator.inputs:
            machine.bring_back(parent)
            scheduler.touched(parent)
        for buffer in self._taken.get(operator.index, ()):
            machine.bring_back(buffer)
            buffer.locks += 1
        assert all(parent.resident for parent in operator.inputs)
        fresh = sum(b.nbytes for b in operator.outputs if b.reuses < 0)
        need = fresh + operator.workspace
        machine.room(need)
        self._copy_ahead(need)
        machine.touch_peak(need)
        self.clock.now += operator.seconds
        scheduler.now = self.clock.now
        if self.watch is not None:
            self.watch.operator(operator)
        for buffer in operator.outputs:
            buffer.alive = buffer.resident = True
            machine.live += buffer.nbytes
        for parent in operator.inputs:
            parent.locks -= 1
        for buffer in self._dying.get(operator.index + 1, ()):
            machine.bury(buffer)
        machine.touch_peak(0)
        for buffer, number in self._visited.get(operator.index, ()):
            self._end_visit(buffer, number)
        machine.land()
        for buffer in self._settling.get(operator.index + 1, ()):
            if buffer.alive:
                i = buffer.index
                machine.adopt(buffer, self.codes.get(i), self.reads.get(i, -1))

    def _copy_ahead(self, need: int) -> None:
        """Start copies out that were planned, and copies in that fit."""
        machine, scheduler = self.machine, self.scheduler
        if scheduler.to_write and (self.codes or machine.live > _FILLING * self.budget):
            machine.early_writes()
        ahead = self.reads or self.visits or machine.position >= self.backward
        if scheduler.absent and ahead:
            start = thread_time()
            awaited = scheduler.returns(machine.position)
            machine.tally.deciding += thread_time() - start
            for value in awaited:
                if value.arrives is not None:
                    continue
                if value.nbytes > self._room_ahead(value, need):
                    return
                machine.start_read(value)

    def _room_ahead(self, value: Buffer, need: int) -> int:
        """Return the bytes that a copy in may take until it is used."""
        machine, position = self.machine, self.machine.position
        now = self.budget - machine.live - need
        if not self.rules.planned or self.reads.get(value.index, -1) >= 0:
            return now  # as published: it fits at this moment; or the plan has room
        until = max(value.next_use, position) + 1
        load = int(self.load[position:until].max())
        return min(now, self.budget - load - machine.managed - machine.arriving)


def planned_budget(graph: Graph, budget_bytes: int) -> int:
    """Return what a plan aims for: a little less, where anything moves at all."""
    if graph.plain_peak_bytes <= budget_bytes:
        return budget_bytes
    return int(_TIGHT * budget_bytes)


def simulate(
    graph: Graph,
    policy: str,
    budget_bytes: int,
    lanes: Lanes,
    *,
    plan: Plan | None = None,
    seed: int = 0,
    watch: Watch | None = None,
    hosted: Hosted | None = None,
    patience: float = PATIENCE,
) -> Outcome:
    """Run one iteration of a graph under a budget.

    Arguments:
        graph: a recorded or made-up iteration.
        policy: one of `scheduler.director.RULES`.
        budget_bytes: what may be live at any moment.
        lanes: bytes per second out and in; `Lanes(0, 0)` where nothing can be copied.
        plan: of this iteration, for a policy that follows one; where None, each value
            is judged alone, as in an iteration not seen before.
        seed: of the "random" policy.
        watch: collects what an allocator would be asked for.
        hosted: parameters and optimizer state that live on the host.
        patience: slow-down from which the iteration is given up as thrashing.
    """
    run = _Run(graph, RULES[policy], budget_bytes, lanes, seed, plan, watch, hosted)
    run.patience = patience
    failed_at, thrashed = run.run()
    machine, ranked = run.machine, run.scheduler.ranked
    tally = machine.tally
    return Outcome(
        policy=policy,
        budget_bytes=budget_bytes,
        fits=failed_at < 0 and not thrashed and tally.peak <= budget_bytes,
        thrashed=thrashed,
        peak_bytes=tally.peak,
        final_bytes=machine.live,
        counted_bytes=machine.counted(),
        plain_seconds=graph.seconds,
        seconds=run.clock.now,
        replay_seconds=tally.replay_seconds,
        exposed_seconds=tally.exposed,
        room_seconds=tally.for_room,
        replayed_operators=tally.replayed,
        written_bytes=tally.written,
        read_bytes=tally.read,
        decisions=tally.decisions,
        deciding_seconds=tally.deciding,
        evaluations=ranked.evaluations if ranked is not None else 0,
        victims=ranked.chosen if ranked is not None else 0,
        actions=tuple(machine.actions),
        failed_at=failed_at,
    )
