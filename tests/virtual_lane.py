# SPDX-License-Identifier: Apache-2.0
"""A virtual device: copies that come late, out of order, or not at all.

No thread and no clock: time passes, in ticks, only when somebody asks the lane for
something, and what is drawn from the seed decides what happens in a tick. So every
schedule can be had again. Bytes move at the last possible moment, memory that is set
aside for a copy is filled with rubbish until then, and whoever touches memory that is
in use by a copy is found out: `faults` lists what was done wrong.

`VirtualLane` stands in for a whole lane. `VirtualDriver` stands in for the driver of
the host lane, with streams and events, so that all of that lane runs as on a device.
"""

import ctypes
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.errors import SpillError

BOUND = 200_000  # ticks in one run: more means that somebody waits for ever
RUBBISH = 0xA5


def content(address: int, n_bytes: int) -> bytes:
    return ctypes.string_at(address, n_bytes) if n_bytes else b""


def fill(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


@dataclass(frozen=True, slots=True)
class Weather:
    """What a device is like."""

    delay: int = 20  # ticks that a copy takes at most
    lost_writes: float = 0.0  # parts of those that begin
    lost_reads: float = 0.0
    refused: float = 0.0
    room: int | None = None  # bytes that the copies may take up together
    pinning: bool = True


CALM = Weather()


class Schedule:
    """Draws what happens, and lets time pass."""

    def __init__(self, seed: int, weather: Weather) -> None:
        self.draw = random.Random(seed)
        self.weather = weather
        self.ticks = 0

    def ticks_to_take(self) -> int:
        return self.draw.randint(0, self.weather.delay)

    def happens(self, probability: float) -> bool:
        return probability > 0 and self.draw.random() < probability

    def tick(self) -> None:
        self.ticks += 1
        assert self.ticks < BOUND, "nobody waits so long: a deadlock"


class Job:
    """One copy of a virtual lane, out or back."""

    def __init__(self, lane: "VirtualLane", address: int, n_bytes: int) -> None:
        self.lane = lane
        self.address = address
        self.n_bytes = n_bytes
        self.left = lane.schedule.ticks_to_take()
        self.over = False
        self.error: SpillError | None = None
        self.source: Job | None = None  # the copy that a read reads
        self.before = b""  # the memory as it was at the start
        self.stored: bytes | None = None
        self.reads = 0
        self.freed = False
        self.gone = False  # freed, and no longer in use

    @property
    def done(self) -> bool:
        if not self.over:
            self.lane.pass_time()
        return self.over

    @property
    def failed(self) -> bool:
        return self.error is not None

    def wait(self) -> float:
        ticks = self.lane.schedule.ticks
        while not self.over:
            self.lane.pass_time()
        if self.error is not None:
            raise SpillError("moving bytes that this test loses")
        return (self.lane.schedule.ticks - ticks) * 1e-6


class VirtualLane:
    """A lane (lowtide.runtime.lanes.Lane) with the weather that a test wants."""

    write_bandwidth = read_bandwidth = 1e9

    def __init__(self, seed: int = 0, weather: Weather = CALM) -> None:
        self.schedule = Schedule(seed, weather)
        self.under_way: list[Job] = []
        self.faults: list[str] = []
        self.lost: list[Job] = []  # reads that failed
        self.refused = 0
        self.written_bytes = self.step_written_bytes = self.read_bytes = 0
        self.used_bytes = 0
        self.overlapping = 0  # the most that were under way at once
        self.closed = False

    def write(self, address: int, nbytes: int) -> Job:
        self.pass_time()
        weather = self.schedule.weather
        full = weather.room is not None and self.used_bytes + nbytes > weather.room
        if full or self.schedule.happens(weather.refused):
            self.refused += 1
            raise SpillError("writing to a lane that this test fills")
        job = Job(self, address, nbytes)
        job.before = content(address, nbytes)
        self.used_bytes += nbytes
        self._begin(job)
        return job

    def allows(self, nbytes: int) -> bool:
        return True  # a lane that fills up without a warning is the harder one

    def read(self, copy: Job, address: int) -> Job:
        self.pass_time()
        if copy.freed:
            self.faults.append("a copy was read that had been given back")
        job = Job(self, address, copy.n_bytes)
        job.source = copy
        copy.reads += 1
        job.before = bytes([RUBBISH]) * copy.n_bytes
        fill(address, job.before)
        self._begin(job)
        return job

    def free(self, copy: Job) -> None:
        if copy.freed:
            self.faults.append("a copy was given back twice")
        copy.freed = True
        self._forget(copy)

    def begin_step(self) -> None:
        self.pass_time()

    def remarks(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        for job in list(self.under_way):
            self._end(job, SpillError("closing the lane"))
        self.closed = True

    def pass_time(self) -> None:
        """Let one tick pass: copies move on in any order, some arrive."""
        self.schedule.tick()
        jobs = list(self.under_way)
        self.schedule.draw.shuffle(jobs)
        for job in jobs:
            job.left -= self.schedule.draw.randint(0, 2)
            if job.left <= 0 and not job.over:
                self._arrive(job)

    def _begin(self, job: Job) -> None:
        self.under_way.append(job)
        self.overlapping = max(self.overlapping, len(self.under_way))

    def _arrive(self, job: Job) -> None:
        weather = self.schedule.weather
        changed = content(job.address, job.n_bytes) != job.before
        if job.source is None:
            if changed and not job.freed:
                self.faults.append("memory changed while it was copied out")
            if self.schedule.happens(weather.lost_writes):
                self._end(job, SpillError("writing what this test loses"))
                return
            job.stored = content(job.address, job.n_bytes)
            self.written_bytes += job.n_bytes
            self._end(job, None)
            return
        if not job.source.over:
            return  # it has to be written first
        if changed:
            self.faults.append("memory was used before it was read back")
        if job.source.failed or self.schedule.happens(weather.lost_reads):
            self._end(job, SpillError("reading what this test loses"))
            return
        assert job.source.stored is not None
        fill(job.address, job.source.stored)
        self.read_bytes += job.n_bytes
        self._end(job, None)

    def _end(self, job: Job, error: SpillError | None) -> None:
        job.over, job.error = True, error
        self.under_way.remove(job)
        if job.source is None:
            self._forget(job)
            return
        if error is not None:
            self.lost.append(job)
        job.source.reads -= 1
        self._forget(job.source)

    def _forget(self, copy: Job) -> None:
        """Lose what a copy held, once nobody may ask for it any more."""
        if copy.freed and copy.over and not copy.reads and not copy.gone:
            copy.stored, copy.gone = None, True
            self.used_bytes -= copy.n_bytes


class Mark:
    """An event of a virtual device: reached once so many ticks have passed."""

    def __init__(self, driver: "VirtualDriver", after: Sequence[Any]) -> None:
        self.driver = driver
        self.after = list(after)
        self.left = driver.schedule.ticks_to_take()
        self.over = False
        self.action: Any = None  # what happens when it is reached
        self.broken = False

    def query(self) -> bool:
        if not self.over:
            self.driver.pass_time()
        if self.broken:
            raise RuntimeError("the device lost this copy")
        return self.over

    def synchronize(self) -> None:
        while not self.over and not self.broken:
            self.driver.pass_time()
        if self.broken:
            raise RuntimeError("the device lost this copy")

    def seconds(self) -> float:
        assert self.over
        return 1e-4


class VirtualDriver:
    """A driver (lowtide.runtime.hostjobs.Driver) over memory of this process."""

    def __init__(self, seed: int = 0, weather: Weather = CALM) -> None:
        self.schedule = Schedule(seed, weather)
        self.marks: list[Mark] = []
        self.pinned: dict[int, int] = {}
        self.faults: list[str] = []
        self.lost = 0
        self._streams: dict[str, Mark | None] = {"out": None, "in": None}

    def ready(self) -> list[Mark]:
        return [self._mark([])]

    def copy_out(
        self, host: int, device: int, n_bytes: int, after: Sequence[Any]
    ) -> Mark:
        def move() -> None:
            fill(host, content(device, n_bytes))

        return self._copy("out", after, move, self.schedule.weather.lost_writes)

    def copy_in(
        self, device: int, host: int, n_bytes: int, after: Sequence[Any]
    ) -> Mark:
        fill(device, bytes([RUBBISH]) * n_bytes)

        def move() -> None:
            if content(device, n_bytes) != bytes([RUBBISH]) * n_bytes:
                self.faults.append("memory was used before it was read back")
            fill(device, content(host, n_bytes))

        return self._copy("in", after, move, self.schedule.weather.lost_reads)

    def pin(self, address: int, n_bytes: int) -> str | None:
        if not self.schedule.weather.pinning:
            return "operation not supported"
        assert address % 4096 == 0
        self.pinned[address] = n_bytes
        return None

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def pass_time(self) -> None:
        """Let one tick pass: what depends on nothing else may happen, in any order."""
        self.schedule.tick()
        marks = list(self.marks)
        self.schedule.draw.shuffle(marks)
        for mark in marks:
            mark.left -= self.schedule.draw.randint(0, 2)
            if mark.left > 0 or not all(m.over or m.broken for m in mark.after):
                continue
            self.marks.remove(mark)
            if mark.action is not None and any(m.broken for m in mark.after):
                mark.broken = True  # what it was to move is not there
                continue
            if mark.action is not None:
                mark.action()
            mark.over = True

    def _copy(self, stream: str, after: Sequence[Any], move: Any, loss: float) -> Mark:
        if self.schedule.happens(self.schedule.weather.refused):
            raise RuntimeError("the device refuses this copy")
        last = self._streams[stream]
        mark = self._mark([*after, last] if last is not None else after)
        if self.schedule.happens(loss):
            self.lost += 1

            def lose() -> None:
                mark.broken = True

            mark.action = lose
        else:
            mark.action = move
        return mark

    def _mark(self, after: Sequence[Any]) -> Mark:
        mark = Mark(self, after)
        self.marks.append(mark)
        return mark
