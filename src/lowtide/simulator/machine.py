"""A virtual machine: memory, two copy lanes and a compute lane, on a virtual clock.

It performs the scheduler's actions as `runtime.ledger` and `runtime.replay` do with
torch, and refuses what these refuse: a value that the program still holds, that an
operator is about to read, or that could not be computed again. Copies run one after
another on their lane, beside the compute; who needs one that is not complete waits, and
the waiting counts as exposed. A replay runs the missing operators in order, keeps what
the program will still read and frees the rest at its last use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import thread_time

from lowtide.scheduler.director import Lanes
from lowtide.scheduler.scheduler import DROP, RELEASE, WAIT, WRITE, Scheduler
from lowtide.simulator.buffers import Buffer, Clock, Operator

IN_FLIGHT = 512 << 20  # bytes of write-behind that may be under way at once


class OutOfMemory(Exception):
    """Something does not fit, whatever leaves."""


@dataclass(slots=True)
class Tally:
    """What happened, in sums."""

    peak: int = 0
    exposed: float = 0.0  # seconds of waiting for copies
    for_room: float = 0.0  # of these, for copies out
    replay_seconds: float = 0.0
    replayed: int = 0  # operators
    written: int = 0  # bytes
    read: int = 0  # bytes
    decisions: int = 0  # actions tried under pressure
    deciding: float = 0.0  # real processor seconds spent in the scheduler


class Machine:
    """Memory of `budget` bytes and what is in it."""

    def __init__(
        self,
        budget: int,
        lanes: Lanes,
        scheduler: Scheduler[Buffer],
        buffers: list[Buffer],
        clock: Clock,
    ) -> None:
        self.budget = budget
        self.lanes = lanes
        self.scheduler = scheduler
        self.buffers = buffers
        self.clock = clock
        self.position = 0
        self.live = sum(buffer.nbytes for buffer in buffers if buffer.resident)
        self.managed = 0  # bytes of the scheduler's values that are in memory
        self.arriving = 0  # bytes that are being read ahead
        self.tally = Tally(peak=self.live)
        self.actions: list[tuple[int, str, int]] = []  # position, action, version
        self._flights: list[Buffer] = []  # copies out, in order
        self._write_free = 0.0  # when the lanes are next free
        self._read_free = 0.0
        self._reading: dict[int, Buffer] = {}

    # -- memory -----------------------------------------------------------------

    def take(self, nbytes: int) -> None:
        """Count bytes that are in use from now on."""
        self.live += nbytes
        self.tally.peak = max(self.tally.peak, self.live)

    def touch_peak(self, nbytes: int) -> None:
        """Count bytes that are in use for a moment."""
        self.tally.peak = max(self.tally.peak, self.live + nbytes)

    def counted(self) -> int:
        """Count what is in memory buffer by buffer: `live`, if nothing went wrong."""
        return sum(
            buffer.nbytes
            for buffer in self.buffers
            if buffer.resident or buffer.passing or buffer.arrives is not None
        )

    def room(self, need: int) -> None:
        """Free memory until `need` more bytes fit, or raise OutOfMemory."""
        limit = self.budget - need
        if self.live <= limit:
            return
        self.land()
        start = thread_time()
        victims = self.scheduler.victims(self.live - limit)
        try:
            for action, value in victims:
                self.tally.deciding += thread_time() - start
                self.tally.decisions += 1
                self.perform(action, value)
                if self.live <= limit:
                    return
                start = thread_time()
        finally:
            victims.close()  # type: ignore[attr-defined]  # it is a generator
        self._cancel_reads(limit)
        if self.live > limit:
            raise OutOfMemory

    def perform(self, action: str, value: Buffer) -> bool:
        """Do what the scheduler asks; says whether it could be done."""
        if not self._movable(value):
            return False
        if action == RELEASE:
            return value.clean and self._leave(value, action, swapped=True)
        if action == DROP:
            return (
                value.copied is None
                and self._pin(value)
                and self._leave(value, action, swapped=False)
            )
        if action == WRITE and not self.start_write(value):
            return False
        assert action in (WRITE, WAIT)
        if value.copied is None:
            return False
        self.wait(value.copied, for_room=True)
        self.land()
        return self._leave(value, action, swapped=True)

    def _movable(self, value: Buffer) -> bool:
        return (
            value.managed
            and value.resident
            and value.locks == 0
            and self.position >= value.held
        )

    def _leave(self, value: Buffer, action: str, *, swapped: bool) -> bool:
        value.resident = False
        value.dropped = not swapped
        self.live -= value.nbytes
        self.managed -= value.nbytes
        self.actions.append((self.position, action, value.index))
        self.scheduler.left(value, swapped=swapped)
        return True

    def adopt(self, value: Buffer, plan: int | None, due: int = -1) -> None:
        """Hand a value to the scheduler: nobody but autograd holds it any more."""
        value.managed = True
        self.managed += value.nbytes
        self._advance()
        self.scheduler.saved(value, plan, due)

    def bury(self, value: Buffer) -> None:
        """The program does not need a value any more."""
        value.alive = False
        if value.arrives is not None:
            self._stop_reading(value)
        if value.managed:
            if value.resident:
                self.managed -= value.nbytes
            self.scheduler.gone(value)
            value.managed = False
        if value.dropped:
            value.dropped = False
            self._unpin(value)
        if value.op is not None or not value.pins:
            self._discard(value)

    def _discard(self, value: Buffer) -> None:
        """Give back everything held for a value that nobody wants."""
        value.copied = None
        if value.resident:
            value.resident = False
            self.live -= value.nbytes

    # -- lanes ------------------------------------------------------------------

    def wait(self, until: float, *, for_room: bool = False) -> None:
        """Wait for something on a lane."""
        if until > self.clock.now:
            self.tally.exposed += until - self.clock.now
            self.tally.for_room += for_room * (until - self.clock.now)
            self.clock.now = until

    def start_write(self, value: Buffer) -> bool:
        """Queue a copy out; the memory stays until it is complete."""
        if not self.lanes.open or value.copied is not None or not self._movable(value):
            return False
        begin = max(self.clock.now, self._write_free)
        self._write_free = value.copied = begin + value.nbytes / self.lanes.write
        self._flights.append(value)
        self.tally.written += value.nbytes
        self.scheduler.write_started(value)
        return True

    def land(self) -> None:
        """Tell the scheduler of copies out that are complete."""
        while self._flights:
            value = self._flights[0]
            if value.copied is not None and not value.clean:
                return
            self._flights.pop(0)
            if value.copied is not None and value.alive:
                self.scheduler.copied(value)

    def early_writes(self) -> None:
        """Start copies that were decided ahead of any pressure."""
        flying = sum(v.nbytes for v in self._flights if v.copied is not None)
        for value in self.scheduler.early_writes():
            if flying > IN_FLIGHT:
                return
            if self.start_write(value):
                flying += value.nbytes

    def start_read(self, value: Buffer) -> None:
        """Allocate memory for a swapped value and queue its copy in."""
        assert value.copied is not None
        begin = max(self.clock.now, self._read_free, value.copied)
        self._read_free = value.arrives = begin + value.nbytes / self.lanes.read
        self._reading[value.index] = value
        self.arriving += value.nbytes
        self.tally.read += value.nbytes
        self.take(value.nbytes)

    def _stop_reading(self, value: Buffer) -> None:
        del self._reading[value.index]
        value.arrives = None
        self.arriving -= value.nbytes
        self.live -= value.nbytes

    def _cancel_reads(self, limit: int) -> None:
        """Give up prefetches, the latest wanted first."""
        reading = sorted(self._reading.values(), key=lambda v: -v.next_use)
        for value in reading:
            if self.live <= limit:
                return
            if value.locks == 0:
                self._stop_reading(value)

    # -- returns ----------------------------------------------------------------

    def bring_back(self, value: Buffer) -> None:
        """Have a value in memory, by whichever way it left."""
        if value.resident:
            return
        value.locks += 1
        try:
            if value.copied is not None:
                if value.arrives is None:
                    self.room(value.nbytes)
                    self.start_read(value)
                assert value.arrives is not None
                self.wait(value.arrives)
                self._stop_reading(value)
                self._install(value)
            else:
                self.replay(value)
        finally:
            value.locks -= 1

    def _install(self, value: Buffer) -> None:
        value.resident = True
        self.take(value.nbytes)
        self.managed += value.nbytes
        if value.dropped:
            value.dropped = False
            self._unpin(value)
        self._advance()
        self.scheduler.returned(value)

    def _advance(self) -> None:
        self.scheduler.now = self.clock.now

    # -- replay -----------------------------------------------------------------

    def replay(self, value: Buffer) -> None:
        """Compute a dropped value again, with what it needs on the way."""
        operators, uses = _missing(value)
        for operator in operators:
            for parent in operator.inputs:
                parent.locks += 1
        for operator in operators:
            self._run_again(operator, uses)

    def _run_again(self, operator: Operator, uses: dict[int, int]) -> None:
        for parent in operator.inputs:
            if parent.resident or parent.passing:
                continue
            if parent.managed:
                self.bring_back(parent)
            else:
                self._read_source(parent)
        made = sum(buffer.nbytes for buffer in operator.outputs)
        need = made + operator.workspace
        assert all(parent.resident or parent.passing for parent in operator.inputs)
        self.room(need)
        self.touch_peak(need)
        self.clock.now += operator.seconds
        self.tally.replay_seconds += operator.seconds
        self.tally.replayed += 1
        for buffer in operator.outputs:
            if buffer.dropped:
                self._install(buffer)
            elif uses.get(buffer.index) and not (buffer.resident or buffer.passing):
                buffer.passing = True
                self.take(buffer.nbytes)
        self._advance()
        for parent in operator.inputs:
            parent.locks -= 1
            uses[parent.index] -= 1
            if parent.managed and parent.resident:
                self.scheduler.touched(parent)
            if uses[parent.index] == 0 and parent.passing:
                parent.passing = False
                self.live -= parent.nbytes

    def _read_source(self, value: Buffer) -> None:
        """Read back a dead source that only dropped values want: it passes through."""
        self.room(value.nbytes)
        self.start_read(value)
        assert value.arrives is not None
        self.wait(value.arrives)
        self._stop_reading(value)
        value.passing = True
        self.take(value.nbytes)

    # -- lineage of dropped values ------------------------------------------------

    def _pin(self, value: Buffer) -> bool:
        """Keep what a value can be computed from; False where that is gone."""
        if value.op is None or not _recoverable(value):
            return False
        for parent in _to_sources(value, pin=True):
            parent.pins += 1
        return True

    def _unpin(self, value: Buffer) -> None:
        for parent in _to_sources(value, pin=False):
            parent.pins -= 1
            if parent.pins == 0 and parent.op is None and not parent.alive:
                self._discard(parent)


def _to_sources(value: Buffer, *, pin: bool) -> Iterable[Buffer]:
    """Yield everything whose pins are to change, once per child.

    The caller changes them in between, and only where that was the first pin, or the
    last one, is it followed further up.
    """
    stack = [value]
    while stack:
        op = stack.pop().op
        if op is None:
            continue
        for parent in op.inputs:
            if parent.lasting:
                continue
            yield parent
            if parent.pins == (1 if pin else 0):
                stack.append(parent)


def _recoverable(value: Buffer) -> bool:
    """Say whether a value could be computed again from what is in memory or pinned."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        op = stack.pop().op
        for parent in op.inputs if op is not None else ():
            if parent.index in seen or parent.pins or parent.lasting:
                continue
            seen.add(parent.index)
            if parent.op is not None:
                stack.append(parent)
            elif not (parent.resident or parent.copied is not None):
                return False
    return True


def _missing(value: Buffer) -> tuple[list[Operator], dict[int, int]]:
    """Gather the operators to run, in order, and how often each input is read."""
    operators: dict[int, Operator] = {}
    uses: dict[int, int] = {}
    stack = [value]
    while stack:
        op = stack.pop().op
        assert op is not None
        if op.index in operators:
            continue
        operators[op.index] = op
        for parent in op.inputs:
            uses[parent.index] = uses.get(parent.index, 0) + 1
            if not parent.at_hand:
                stack.append(parent)
    return [operators[i] for i in sorted(operators)], uses
