"""The ledger: whose bytes are in memory, and the actions that move them.

It performs what the scheduler chooses and refuses what would be wrong: a storage that
anyone else holds is neither copied out nor dropped, a value modified since it was
saved is neither, and nothing is dropped that could not be computed again. Lineage of
dropped values is pinned, so that what a replay starts from stays.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from lowtide.errors import SpillError
from lowtide.recorder.key import quiet
from lowtide.recorder.storages import StorageTable
from lowtide.recorder.values import Value, bytes_of, recoverable
from lowtide.runtime.pacing import NOTICED, Lead, flight_limit
from lowtide.runtime.pins import (
    hold_old_bytes,
    pin_parents,
    spoil_unpacked,
    unpin_parents,
)
from lowtide.scheduler.scheduler import DROP, RELEASE, WAIT, WRITE, Scheduler

if TYPE_CHECKING:
    from lowtide.runtime.devices import Counter
    from lowtide.runtime.lanes import Lane
    from lowtide.runtime.streams import Streams

_log = logging.getLogger("lowtide")


class Ledger:
    """Bytes of saved tensors: in memory, on a lower tier, or to be computed again."""

    def __init__(
        self,
        budget: int,
        counter: Counter,
        lane: Lane | None,
        scheduler: Scheduler[Value],
        table: StorageTable,
    ) -> None:
        self.budget = budget
        self.counter = counter
        self.lane = lane
        self.scheduler = scheduler
        if lane is not None:
            scheduler.allows = lane.allows
        self.table = table
        self.orphans: deque[Value] = deque()
        self.flights: list[tuple[Any, Value, torch.Tensor]] = []
        self.flight_bytes = 0
        self.holding: list[Value] = []  # those that have had a `hold` lately
        self.managed = 0  # bytes of saved values in memory
        self.absent = 0  # bytes of saved values out of memory
        self.arriving = 0  # bytes of those that are being read ahead
        self.lead = Lead()
        self.device = "cpu"  # where what comes back goes
        self.streams: Streams | None = None  # of that device, where it has any
        # frees all that can be freed, where a device is out of memory
        self.starved: Callable[[], None] = lambda: None
        self.alive: set[Value] = set()  # values with saved tensors
        self.exposed = 0.0  # seconds spent waiting for copies
        self.deciding = 0.0  # seconds spent on what leaves and what returns
        self.replay: Callable[[Value], None]
        self.replay_fits: Callable[[Value], bool] = lambda _: True
        self.short: Callable[[str, int], None] = lambda what, needed: None
        self.postpone: Callable[[Value], None] = lambda value: None  # a read ahead
        # a read that came late: the seconds waited, and whether it was begun ahead
        self.hasten: Callable[[Value, float, bool], None] = lambda *_: None
        self.swapped: set[Value] = set()  # values that left so in this iteration
        self.dropped: set[Value] = set()
        self.verifier: Any = None
        self.replaying: list[dict[int, int]] = []  # reads left, by id, per replay
        self.complaints: dict[str, str] = {}

    # -- births and deaths ------------------------------------------------------

    def adopt(self, value: Value) -> None:
        """Take charge of a value that autograd has just saved for the first time."""
        value.ledger = self
        self.alive.add(value)
        self.managed += value.nbytes

    def drain(self) -> None:
        """Settle what has happened since: dead values and finished copies."""
        for _ in range(len(self.orphans)):
            value = self.orphans.popleft()
            if value.saved or value not in self.alive:
                continue
            if self._replay_needs(value):
                self.orphans.append(value)  # its bytes may be all that is left of it
            else:
                self._bury(value)
        if self.flights:
            self._land()

    def end_iteration(self) -> None:
        """Forget what left memory, and who held bytes for others and does no more."""
        self.swapped.clear()
        self.dropped.clear()
        self.holding = [value for value in self.holding if value.hold is not None]

    def surplus(self) -> int:
        """Count the bytes that are in memory for lowtide alone: nobody saved them.

        These are what dropped values will be computed from, and dead values whose copy
        is still being written.
        """
        held = {
            v
            for v in self.holding
            if v.hold is not None and v not in self.alive and not v.held_by_others()
        }
        dead = {v for _, v, _ in self.flights if v not in self.alive}
        return sum(value.nbytes for value in held | dead)

    def _replay_needs(self, value: Value) -> bool:
        """Say whether a replay that is under way has yet to read a value."""
        return any(uses.get(id(value), 0) > 0 for uses in self.replaying)

    def _bury(self, value: Value) -> None:
        self.alive.discard(value)
        self.scheduler.gone(value)
        if value.away:
            self.absent -= value.nbytes
            value.away = False
        else:
            self.managed -= value.nbytes
        if value.dropped:
            value.dropped = False
            self._unpin(value)
        if value.pins and value.op is None:
            return  # dropped descendants still start from these bytes
        self._discard(value)

    def _discard(self, value: Value) -> None:
        """Give back everything held for a value that nobody wants."""
        value.base = value.hold = None
        value.transfer = None
        self._stop_reading(value)
        if value.copy is not None:
            if self.lane is not None:
                self.lane.free(value.copy)
            value.copy = None

    def _land(self) -> None:
        """Note copies that have finished; their memory may go from now on."""
        still = []
        for copy, value, tensor in self.flights:
            if not copy.done:
                still.append((copy, value, tensor))
                continue
            self.flight_bytes -= value.nbytes
            if value.transfer is tensor:
                value.transfer = None
            if value.copy is not copy:
                continue
            if copy.failed:
                self._copy_failed(value)
            elif value in self.alive:
                self.scheduler.copied(value)
        self.flights = still

    def _copy_failed(self, value: Value) -> None:
        assert self.lane is not None
        assert value.copy is not None
        try:
            value.copy.wait()
        except SpillError as error:
            self.complain("spill", f"swapping stopped: {error}")
        self.lane.free(value.copy)
        value.copy = None
        value.plan = 0

    def complain(self, key: str, text: str) -> None:
        """Say one thing of each kind, at once and in the report."""
        if key not in self.complaints:
            _log.warning("lowtide: %s", text)
            self.complaints[key] = text

    # -- room -------------------------------------------------------------------

    def make_room(self, need: int) -> bool:
        """Free memory until `need` more bytes fit; False where they cannot."""
        live, limit = self.counter.live, self.budget - need
        if live.value <= limit:
            return True
        self.drain()
        if live.value <= limit:
            return True
        for action, value in self.scheduler.victims(live.value - limit):
            self._perform(action, value)
            if live.value <= limit:
                return True
        self._wait_flights()
        self.drain()
        if live.value > limit:
            self._cancel_reads(limit)
        return live.value <= limit

    def require(self, need: int, what: str) -> None:
        """Free memory that lowtide itself is about to take; tell where it cannot."""
        start, waited = perf_counter(), self.exposed
        fits = self.make_room(need)
        self.deciding += perf_counter() - start - (self.exposed - waited)
        if not fits:
            self.short(what, self.counter.live.value + need)

    def _cancel_reads(self, limit: int) -> None:
        """Give up prefetches, the latest wanted first."""
        reading = [v for v in self.alive if v.reading is not None]
        for value in sorted(reading, key=lambda v: v.next_use, reverse=True):
            if self.counter.live.value <= limit:
                return
            self.lead.cancelled(value.next_use)
            self.postpone(value)
            self._stop_reading(value)

    def _stop_reading(self, value: Value) -> None:
        """Give up a read ahead, if there is one; its target must outlive it."""
        if value.reading is not None:
            self._wait(value.reading[0])
            value.reading = None
            self.arriving -= value.nbytes

    def _wait_flights(self) -> None:
        """Wait for every copy in flight; memory of dead values goes with it."""
        for copy, _, _ in list(self.flights):
            self._wait(copy)

    def _wait(self, transfer: Any) -> None:
        with suppress(SpillError):  # _land or the caller deals with a failed copy
            self.exposed += transfer.wait()

    def _perform(self, action: str, value: Value) -> bool:
        if action == RELEASE:
            return self.release(value)
        if action == DROP:
            return self.drop(value)
        if action == WRITE:
            return self.start_write(value) and self._finish(value)
        assert action == WAIT
        return self._finish(value)

    def _finish(self, value: Value) -> bool:
        """Wait for a value's copy and let its memory go."""
        if value.copy is None:
            return False
        self._wait(value.copy)
        self._land()
        return value.clean and self.release(value)

    def force(self) -> None:
        """Release everything that may be released, whatever the budget."""
        self.drain()
        for action, value in self.scheduler.forced():
            self._perform(action, value)

    # -- actions ----------------------------------------------------------------

    def movable(self, value: Value) -> bool:
        """Say whether a value may leave: untouched, and held by nobody else."""
        if value not in self.alive or not value.resident:
            return False
        if value.kept_because is not None:
            return False
        if value.foreign:
            value.kept_because = "in memory of NumPy, a file or another process"
            self.scheduler.gone(value)
            return False
        if value.held_by_others():
            return False
        for saved in list(value.saved.values()):
            alias = saved.alias
            if alias is not None and alias._version != saved.version:
                value.kept_because = "modified in place after it was saved"
                self.scheduler.gone(value)
                return False
        return True

    def start_write(self, value: Value) -> bool:
        """Begin to copy a value out; its memory stays until the copy is done."""
        if self.lane is None or value.copy is not None or not self.movable(value):
            return False
        storage = value.storage()
        if storage is None:
            return False
        with quiet():
            tensor = bytes_of(storage)
        try:
            copy = self.lane.write(storage.data_ptr(), value.nbytes)
        except SpillError as error:
            self.complain("spill", f"swapping stopped: {error}")
            self.scheduler.write_started(value)
            return False
        value.copy = copy
        value.transfer = tensor
        self.flights.append((copy, value, tensor))
        self.flight_bytes += value.nbytes
        self.scheduler.write_started(value)
        return True

    def release(self, value: Value) -> bool:
        """Let go of a value's memory; its copy on the lower tier remains."""
        if not value.clean or not self.movable(value):
            return False
        self._leave(value, swapped=True)
        return True

    def drop(self, value: Value) -> bool:
        """Let go of a value's memory; it will be computed again."""
        if value.copy is not None or value.reading is not None:
            return False
        if self._replay_needs(value):
            return False
        if value.op is None or not self.movable(value):
            return False
        if not recoverable(value) or not self.replay_fits(value):
            return False
        value.dropped = True
        self._pin(value)
        self._leave(value, swapped=False)
        return True

    def _leave(self, value: Value, *, swapped: bool) -> None:
        if self.verifier is not None:
            self.verifier.leaving(value)
        value.transfer = None
        if self.streams is not None and (storage := value.storage()) is not None:
            self.streams.keep(storage)
        value.release_memory()
        value.away = True
        self.managed -= value.nbytes
        self.absent += value.nbytes
        (self.swapped if swapped else self.dropped).add(value)
        self.scheduler.left(value, swapped=swapped)

    def early_writes(self) -> None:
        """Start planned copies of values that nobody else holds any more."""
        if self.lane is None:
            return
        limit = flight_limit(self.budget, self.lane.write_bandwidth)
        for value in self.scheduler.early_writes():
            if self.flight_bytes > limit:
                return
            self.start_write(value)

    # -- returns ----------------------------------------------------------------

    def bring_back(self, value: Value) -> None:
        """Have a value's bytes in memory, by whichever way it left."""
        if value.resident:
            return
        if value.reading is not None:
            self._finish_read(value, ahead=True)
            return
        if value.copy is not None:
            if not value.copy.done:
                self._wait(value.copy)
            self.require(value.nbytes, "reading a saved tensor back")
            self.start_read(value, self.allocate(value.nbytes))
            self._finish_read(value, ahead=False)
            return
        self.replay(value)

    def read_ahead(self, value: Value) -> bool:
        """Begin to read a value early; False where the device has no memory for it."""
        try:
            tensor = self._empty(value.nbytes)
        except torch.OutOfMemoryError:
            return False
        self.start_read(value, tensor)
        return True

    def allocate(self, n_bytes: int) -> torch.Tensor:
        """Set memory aside, after making room as never before if there is none."""
        try:
            return self._empty(n_bytes)
        except torch.OutOfMemoryError:
            pass  # outside, so that the error's frames let go of their tensors
        self.starved()
        return self._empty(n_bytes)

    def _empty(self, n_bytes: int) -> torch.Tensor:
        with quiet():
            return torch.empty(n_bytes, dtype=torch.uint8, device=self.device)

    def start_read(self, value: Value, tensor: torch.Tensor) -> None:
        """Begin to read a swapped value into memory that was set aside for it."""
        assert self.lane is not None
        assert value.copy is not None
        read = self.lane.read(value.copy, tensor.data_ptr())
        value.reading = (read, tensor)
        self.arriving += value.nbytes

    def _finish_read(self, value: Value, *, ahead: bool) -> None:
        read, tensor = value.reading
        value.reading = None
        self.arriving -= value.nbytes
        try:
            waited = read.wait()
        except SpillError as error:
            del tensor
            self._lost(value, error)
            return
        self.exposed += waited
        self.late(value, waited, ahead)
        self.install(value, tensor)

    def late(self, value: Value, waited: float, ahead: bool) -> None:
        """Learn, where a value was waited for, to read it back earlier."""
        if waited > NOTICED:
            self.lead.late(waited)
            self.hasten(value, waited, ahead)

    def _lost(self, value: Value, error: SpillError) -> None:
        """A copy cannot be read: compute its value again, if that is possible."""
        may = self.scheduler.rules.recompute and value.op is not None
        if not may or not recoverable(value):
            raise error
        self.complain("lost", f"what could not be read is computed again: {error}")
        assert self.lane is not None
        self.lane.free(value.copy)
        value.copy = None
        value.dropped = True
        self._pin(value)
        self.replay(value)

    def install(self, value: Value, tensor: torch.Tensor) -> None:
        """Make `tensor`'s storage hold the value's bytes from now on."""
        if self.verifier is not None:
            self.verifier.returned(value, tensor)
        value.base = tensor
        self.table.bind(tensor.untyped_storage(), value)
        if value.dropped:
            value.dropped = False
            self._unpin(value)
        if value.away:
            value.away = False
            self.absent -= value.nbytes
            self.managed += value.nbytes
            self.scheduler.returned(value)

    # -- lineage ----------------------------------------------------------------

    def _pin(self, value: Value) -> None:
        """Keep what a value that is about to be dropped is made from."""
        self.holding += pin_parents(value)

    def _unpin(self, value: Value) -> None:
        """Let go of what a value that is back, or gone, was made from."""
        for source in unpin_parents(value):
            if not source.saved and source.ledger is self:
                self._discard(source)

    def before_write(self, value: Value) -> None:
        """A storage is about to be overwritten: save what its old value owes."""
        if value.writing:
            self._wait(value.copy)  # what goes to disk must be the old value
        hold_old_bytes(value)
        if value.hold is not None:
            self.holding.append(value)
        spoil_unpacked(value)
        if value in self.alive:
            value.kept_because = (
                value.kept_because or "modified in place after it was saved"
            )
            self.scheduler.gone(value)
