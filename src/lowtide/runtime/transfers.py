# SPDX-License-Identifier: Apache-2.0
"""The disk lane: blocks of memory go to the spill file and come back, meanwhile.

One thread writes and one reads, so that a read somebody waits for never stands behind
a queue of writes; within a queue the one that is waited for goes first. More threads
gain nothing: one large direct transfer fills a disk by itself. The threads hold the
interpreter's lock only between transfers.

A copy's extent is held by the copy until `free`, and by each read of it until that is
done; when nobody holds it, it is used again. `free` may be called at any moment, from
weak-reference callbacks too: it never waits for a lock.

Around a fork the lane stands still: a direct transfer into private memory while the
process forks may land in the wrong one of the two. The child forgets the lane.
"""

import atexit
import copy as copying
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from lowtide.errors import SpillError
from lowtide.runtime.extents import Extents
from lowtide.runtime.jobs import Copy as Copy
from lowtide.runtime.jobs import Job as Job
from lowtide.runtime.jobs import Read as Read
from lowtide.runtime.jobs import Seconds, Track
from lowtide.runtime.pacing import Allowance
from lowtide.runtime.spill import (
    IN_MEMORY,
    Address,
    Bytes,
    DiskCalls,
    Spare,
    SpillFile,
    memory_file_system,
    spill_directory,
)
from lowtide.units import format_bytes

_JUDGED: Bytes = 64 * 2**20  # to move before a directory may be called slow
_SLOW = 100e6  # bytes a second


class DiskLane:
    """Write blocks of memory to a spill file, and read them back, on own threads.

    Arguments:
        directory: where the file lies; None chooses (see `spill_directory`).
        limit_bytes: how large the file may become; None: as large as it gets.
        step_limit_bytes: how much may be written in one step; None: any amount.
        calls: the system calls to use.

    Raises:
        SpillError: no directory was named and none will do. A directory that cannot
            be written to shows at the first write.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        limit_bytes: Bytes | None = None,
        step_limit_bytes: Bytes | None = None,
        calls: DiskCalls | None = None,
    ) -> None:
        self.directory = spill_directory(directory)
        self._calls = calls or DiskCalls()
        self._extents = Extents(limit_bytes)
        self._allowance = Allowance(step_limit_bytes)
        self._file: SpillFile | None = None
        self._writes = Track("writing")
        self._reads = Track("reading")
        self._freed: deque[Copy] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._paused = False  # for a fork
        self._closed: str | None = None  # why no job is taken any more
        atexit.register(self.close)
        _lanes.add(self)

    def write(self, address: Address, nbytes: Bytes) -> Copy:
        """Start to write a block; it must stay as it is until the copy is done.

        Raises:
            SpillError: the limit forbids it, or the lane is closed.
        """
        with self._lock:
            self._check_open("writing", nbytes)
            self._take_freed()
            self._check_allowance(nbytes)
            self._start(self._writes)
            where = self._extents.allocate(nbytes)
            if where is None:
                used, allowed = self._extents.used_bytes, self._extents.limit_bytes
                raise self._over("disk", nbytes, used, allowed)
            self._allowance.spend(nbytes)
            job = Copy(self, address, nbytes, where)
            self._writes.put(job)
            self._changed.notify_all()
        return job

    def allows(self, nbytes: Bytes) -> bool:
        """Tell whether the limits leave room for a write."""
        with self._lock:
            self._take_freed()
            return not self._allowance.over(nbytes) and self._extents.fits(nbytes)

    def read(self, copy: Copy, address: Address) -> Read:
        """Start to read a copy into memory, once it is written.

        Raises:
            SpillError: the lane is closed.
        """
        job = Read(self, copy, address)
        with self._lock:
            self._check_open("reading", copy.n_bytes)
            if copy.freed:
                raise ValueError(f"this copy of {copy.n_bytes} bytes was given back")
            if copy.failed:
                job.error, job.done = copy.error, True
                return job
            self._start(self._reads)
            copy.reads += 1
            if copy.done:
                self._reads.put(job)
            else:
                copy.parked.append(job)
            self._changed.notify_all()
        return job

    def free(self, copy: Copy) -> None:
        """Give a copy's place back, as soon as nothing uses it any more.

        A write that has not begun is dropped, unless a read needs it.
        """
        self._freed.append(copy)
        # Whoever holds the lock (this very thread, below us, if we are called by the
        # garbage collector) takes it later.
        if self._lock.acquire(blocking=False):
            try:
                self._take_freed()
            finally:
                self._lock.release()

    def wait(self, job: Job) -> Seconds:
        """Wait for a job, which goes to the front; return how long that took.

        Raises:
            SpillError: it failed.
        """
        waited = 0.0
        if not job.done:
            start = time.perf_counter()
            with self._lock:
                self._hurry(job)
                while not job.done:
                    self._changed.wait()
            waited = time.perf_counter() - start
        job.check()
        return waited

    def begin_step(self) -> None:
        """Note that a step begins.

        Its limit counts anew, failures are forgiven, and once steps ask for the same
        their copies have planned places.
        """
        with self._lock:
            self._allowance.begin_step()
            self._take_freed()
            self._extents.begin_step()
            end = self._extents.shrink()
            if end is not None and self._file is not None:
                self._file.shrink(end)

    def remarks(self) -> tuple[str, ...]:
        """Say what is amiss with the directory: in memory, or slow."""
        found = []
        kind = memory_file_system(self.directory)
        if kind and self.written_bytes:
            found.append(IN_MEMORY.format(directory=self.directory, kind=kind))
        if self._allowance.reached:
            found.append(
                f"disk_writes={format_bytes(self._allowance.limit_bytes or 0)} a step "
                "was used up: what may not be written stays, or is computed again."
            )
        for track in (self._writes, self._reads):
            if track.moved_bytes >= _JUDGED and track.bandwidth < _SLOW:
                found.append(
                    f"the spill directory {self.directory} is slow: {track.verb} at "
                    f"{format_bytes(int(track.bandwidth))} a second. Name one on a "
                    "faster local disk with spill_dir=, --spill-dir or "
                    "LOWTIDE_SPILL_DIR."
                )
        return tuple(found)

    def close(self) -> None:
        """End the threads, drop what is queued, and give the file back."""
        atexit.unregister(self.close)
        _lanes.discard(self)
        with self._lock:
            self._take_freed()
            self._drop_queued("the spill file is closed")
            self._changed.notify_all()
        for track in (self._writes, self._reads):
            if track.thread is not None:
                track.thread.join()
                track.thread = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def forget(self) -> None:
        """Leave the lane to the parent; for the child of a fork, which has no threads.

        Every job that was under way fails here.
        """
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._writes.thread = self._reads.thread = None
        self._paused = False
        for track in (self._writes, self._reads):
            if track.active is not None:
                track.put(track.active)
                track.active = None
        self.close()

    @property
    def write_bandwidth(self) -> float:
        """Tell how fast the disk writes, in bytes a second."""
        return self._writes.bandwidth

    @property
    def read_bandwidth(self) -> float:
        """Tell how fast the disk reads, in bytes a second."""
        return self._reads.bandwidth

    def queued_write_seconds(self) -> Seconds:
        """Tell how long the queued writes will take."""
        return self._writes.queued_seconds

    def queued_read_seconds(self) -> Seconds:
        """Tell how long the queued reads will take."""
        return self._reads.queued_seconds

    @property
    def written_bytes(self) -> Bytes:
        """Tell how many bytes were written so far."""
        return self._writes.moved_bytes

    @property
    def step_written_bytes(self) -> Bytes:
        """Tell how many bytes the step that wrote most has written."""
        return self._allowance.most_bytes

    @property
    def read_bytes(self) -> Bytes:
        """Tell how many bytes were read so far."""
        return self._reads.moved_bytes

    @property
    def used_bytes(self) -> Bytes:
        """Tell how many bytes of the file hold copies, in whole pages."""
        with self._lock:
            self._take_freed()
            return self._extents.used_bytes

    @property
    def file_bytes(self) -> Bytes:
        """Tell how large the file is."""
        return self._extents.file_bytes

    @property
    def planned_bytes(self) -> Bytes:
        """Tell how large the file has to be by its plan; 0 while there is none."""
        return self._extents.planned_bytes

    # Everything below that does not say otherwise runs with the lock held.

    def _check_open(self, verb: str, n_bytes: Bytes) -> None:
        if self._closed is not None:
            raise self._refusal(verb, n_bytes)

    def _check_allowance(self, n_bytes: Bytes) -> None:
        allowance = self._allowance
        if allowance.failing is not None:
            raise copying.copy(allowance.failing)
        if allowance.over(n_bytes):
            used, allowed = allowance.step_bytes, allowance.limit_bytes
            raise self._over("disk_writes", n_bytes, used, allowed)

    def _over(
        self, limit: str, n_bytes: Bytes, used: Bytes, allowed: Bytes | None
    ) -> SpillError:
        """Make the error for a write that a limit forbids."""
        return SpillError(
            f"writing {format_bytes(n_bytes)}",
            filename=str(self.directory),
            asked_bytes=n_bytes,
            used_bytes=used,
            allowed_bytes=allowed or 0,
            limit=limit,
        )

    def _refusal(self, verb: str, n_bytes: Bytes) -> SpillError:
        return self._error(verb, n_bytes, f" ({self._closed})")

    def _start(self, track: Track) -> None:
        if track.thread is not None:
            return
        try:
            thread = threading.Thread(
                target=self._serve,
                args=(track, Spare()),
                name=f"lowtide-{track.verb}",
                daemon=True,  # a program that ends in an error must not hang
            )
            thread.start()
        except (OSError, RuntimeError) as error:
            raise self._error(track.verb, 0, f" ({error})") from error
        track.thread = thread

    def _hurry(self, job: Job) -> None:
        if job.done or job.started:
            return
        if isinstance(job, Copy):
            self._writes.hurry(job)
        elif job.copy.done:
            self._reads.hurry(job)
        else:
            job.urgent = True
            self._hurry(job.copy)

    def _serve(self, track: Track, spare: Spare) -> None:
        """Do the jobs of one direction until the lane closes; without the lock."""
        while True:
            with self._lock:
                while self._paused or not track.queue:
                    if self._closed is not None:
                        return
                    self._changed.wait()
                job = track.queue.popleft()
                job.started = True
                track.active = job
            start = time.perf_counter()
            error = self._perform(job, track.verb, spare)
            seconds = time.perf_counter() - start
            with self._lock:
                track.active = None
                if error is None:
                    track.measured(job.n_bytes, seconds)
                self._finish(job, error)
                self._take_freed()
                self._changed.notify_all()
            del job  # nothing of it may outlive it in this frame

    def _perform(self, job: Job, verb: str, spare: Spare) -> SpillError | None:
        """Move the bytes; without the lock. The thread must survive any failure."""
        try:
            if isinstance(job, Read):
                assert self._file is not None  # its copy was written
                self._file.read(job.copy.extents, job.address, job.n_bytes, spare)
            else:
                if self._file is None:
                    self._file = SpillFile(self.directory, self._calls)
                self._file.write(job.extents, job.address, job.n_bytes, spare)
        except OSError as error:
            return self._error(verb, job.n_bytes, "", error.errno)
        except Exception as error:
            return self._error(verb, job.n_bytes, f" ({error!r})")
        return None

    def _finish(self, job: Job, error: SpillError | None) -> None:
        """Note that a job is over, one way or another."""
        job.error = error
        job.done = True
        if isinstance(job, Read):
            self._reads.queued_bytes -= job.n_bytes
            job.copy.reads -= 1
            self._release(job.copy)
            return
        self._writes.queued_bytes -= job.n_bytes
        if error is None and job.started:
            self._allowance.succeeded()
        elif error is not None and self._closed is None:
            self._allowance.failed(error)
        parked, job.parked = job.parked, []
        for read in parked:
            self._reads.put(read, first=read.urgent)
        if error is not None or self._closed is not None:
            for read in parked:
                self._reads.queue.remove(read)
                self._finish(read, error or self._refusal("reading", read.n_bytes))
        self._release(job)

    def _release(self, copy: Copy) -> None:
        """Give the extent back if nobody holds it."""
        if copy.done and copy.reads == 0 and (copy.freed or copy.failed):
            self._extents.free(copy.extents)
            copy.extents = ()

    def _take_freed(self) -> None:
        while self._freed:
            copy = self._freed.popleft()
            if copy.freed:
                continue
            copy.freed = True
            if copy.done:
                self._release(copy)
            elif not copy.started and copy.reads == 0:
                self._writes.queue.remove(copy)
                self._finish(copy, None)
                self._changed.notify_all()

    def _drop_queued(self, why: str) -> None:
        """Let every job fail that has not begun, and take no other."""
        self._closed = self._closed or why
        for track in (self._writes, self._reads):
            while track.queue:
                job = track.queue.popleft()
                self._finish(job, self._refusal(track.verb, job.n_bytes))

    def _error(
        self, verb: str, n_bytes: Bytes, why: str, number: int | None = None
    ) -> SpillError:
        """Make the error for a job that failed."""
        return SpillError(
            f"{verb} {format_bytes(n_bytes)}{why}",
            errno=number,
            filename=str(self.directory),
        )

    def _pause(self) -> None:
        """Let what is moving arrive, begin nothing, and keep the lock; without it."""
        self._lock.acquire()
        self._paused = True
        while self._writes.active is not None or self._reads.active is not None:
            self._changed.wait()

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._changed.notify_all()
            self._lock.release()


# The lanes that a fork has to stop, and its child to forget.
_lanes: set[DiskLane] = set()


def _each_lane(act: Callable[[DiskLane], None]) -> Callable[[], None]:
    def act_on_all() -> None:
        for lane in list(_lanes):
            act(lane)

    return act_on_all


os.register_at_fork(
    before=_each_lane(DiskLane._pause),
    after_in_parent=_each_lane(DiskLane._resume),
    after_in_child=_each_lane(DiskLane.forget),
)
