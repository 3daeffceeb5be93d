# SPDX-License-Identifier: Apache-2.0
"""The host lane: from a device's memory to slabs of host memory, then to the disk.

The device copies by itself, beside its computation, on a stream for each direction; a
driver of a few methods starts the copies and tells when they are over. A copy starts
after what the program had queued when it was asked for, and whoever waits for it waits
on the host: from then on its memory may be used from any stream. That costs no overlap,
since what was queued meanwhile still runs.

When host memory is used up, the copies that have been there longest go on to the disk;
they come back through a slab. Nothing here has a thread of its own: whatever is called
first looks at what has arrived.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress

from lowtide.errors import SpillError
from lowtide.runtime.hostjobs import Driver, HostCopy, HostRead, Job
from lowtide.runtime.jobs import Seconds, Track
from lowtide.runtime.pinned import Slab, Slabs
from lowtide.runtime.spill import Address, Bytes
from lowtide.runtime.transfers import DiskLane
from lowtide.units import format_bytes


class HostLane:
    """Keep blocks of a device's memory on the host, and below it on the disk.

    Arguments:
        driver: copies, and pins memory.
        limit_bytes: of host memory; None: any amount.
        below: the lane to the disk, if there is one; it is closed with this one.
    """

    def __init__(
        self, driver: Driver, *, limit_bytes: Bytes | None, below: DiskLane | None
    ) -> None:
        self.driver = driver
        self.below = below
        self.slabs = Slabs(driver, limit_bytes)
        self._out, self._in = Track("copying out"), Track("copying in")
        self._moving: list[Job] = []
        self._resting: deque[HostCopy] = deque()  # in slabs, the longest there first
        self._sinking: deque[HostCopy] = deque()  # on their way to the disk
        self._freed: deque[HostCopy] = deque()
        self._closed = False
        self._lock = threading.RLock()  # autograd's threads and the program's

    # -- the lane's protocol ----------------------------------------------------

    def write(self, address: Address, nbytes: Bytes) -> HostCopy:
        """Start to copy a block out; it must stay as it is until the copy is done.

        Raises:
            SpillError: neither host nor disk has room, or the device refuses.
        """
        with self._lock:
            self._look()
            slab = self._slab(nbytes, f"copying out {format_bytes(nbytes)}")
            copy = HostCopy(self, nbytes, slab)
            try:
                copy.motion = self.driver.copy_out(
                    slab.address, address, nbytes, self.driver.ready()
                )
            except RuntimeError as error:
                self.slabs.give(slab)
                raise _refusal("copying out", nbytes, error) from error
            self._moving.append(copy)
            self._out.queued_bytes += nbytes
        return copy

    def allows(self, nbytes: Bytes) -> bool:
        """Tell whether the host, or the disk below it, has room."""
        limit = self.slabs.limit_bytes
        if limit is None or self.slabs.used_bytes + nbytes <= limit:
            return True
        return self.below is not None and self.below.allows(nbytes)

    def read(self, copy: HostCopy, address: Address) -> HostRead:
        """Start to copy back into memory that is set aside."""
        read = HostRead(self, copy, address)
        with self._lock:
            self._look()
            if copy.error is not None:
                read.error, read.over = copy.error, True
                return read
            copy.reads += 1
            try:
                if copy.slab is not None:
                    self._descend(read, copy.slab)
                else:
                    self._lift(read)
            except SpillError as error:
                self._end(read, error)
            else:
                self._moving.append(read)
                self._in.queued_bytes += copy.n_bytes
        return read

    def free(self, copy: HostCopy) -> None:
        """Give a copy's place back as soon as nothing uses it; never waits."""
        self._freed.append(copy)

    def arrived(self, job: Job) -> bool:
        """Tell whether a job is over; never waits."""
        with self._lock:
            if not job.over:
                self._advance(job)
            return job.over

    def wait(self, job: Job) -> Seconds:
        """Wait for a job; return how long that took.

        Raises:
            SpillError: it failed.
        """
        waited = 0.0
        if not job.over:
            start = time.perf_counter()
            with self._lock:
                while not job.over:
                    self._await(job)
            waited = time.perf_counter() - start
        job.check()
        return waited

    def begin_step(self) -> None:
        """Note that a step begins: limits by the step count anew."""
        with self._lock:
            self._look()
            self.slabs.begin_step()
        if self.below is not None:
            self.below.begin_step()

    def remarks(self) -> tuple[str, ...]:
        """Say where copies are slower than they could be, and why."""
        found = () if self.below is None else self.below.remarks()
        if self.slabs.refused is not None:
            text = (
                f"host memory could not be pinned ({self.slabs.refused}): copies go "
                "through pageable memory, which is slower. Raise the limit on locked "
                "memory (ulimit -l), or lower host=."
            )
            return (text, *found)
        return found

    def close(self) -> None:
        """Wait for what the device is moving, and give everything back."""
        if self._closed:
            return
        self._closed = True
        for job in list(self._moving):
            with suppress(SpillError):
                self.wait(job)
        if self.below is not None:
            self.below.close()
        for copy in (*self._resting, *self._sinking):
            if copy.slab is not None:  # nobody gave it back, after an error
                self.slabs.give(copy.slab)
                copy.slab = None
        self._sinking.clear()
        self._resting.clear()
        self.slabs.close()

    @property
    def write_bandwidth(self) -> float:
        """Tell how fast copies go out: as fast as the tier that takes them now."""
        if self.below is not None and self._full:
            return min(self._out.bandwidth, self.below.write_bandwidth)
        return self._out.bandwidth

    @property
    def read_bandwidth(self) -> float:
        """Tell how fast copies come back."""
        if self.below is not None and self._full:
            return min(self._in.bandwidth, self.below.read_bandwidth)
        return self._in.bandwidth

    @property
    def written_bytes(self) -> Bytes:
        """Tell how many bytes left the device so far."""
        return self._out.moved_bytes

    @property
    def step_written_bytes(self) -> Bytes:
        """Tell how many bytes the step that wrote most has written to the disk."""
        return 0 if self.below is None else self.below.step_written_bytes

    @property
    def read_bytes(self) -> Bytes:
        """Tell how many bytes came back to the device so far."""
        return self._in.moved_bytes

    @property
    def used_bytes(self) -> Bytes:
        """Tell how many bytes the copies take up, on host and disk."""
        with self._lock:
            self._look()
        below = 0 if self.below is None else self.below.used_bytes
        return self.slabs.used_bytes + below

    # -- what has arrived -------------------------------------------------------

    def _look(self) -> None:
        """Note what has arrived since, and take back what was freed."""
        for job in list(self._moving):
            if not job.over:
                self._advance(job)
        for copy in list(self._sinking):
            self._sunk(copy)
        for _ in range(len(self._freed)):
            self._bury(self._freed.popleft())

    def _advance(self, job: Job) -> None:
        """Move a job on if what it waits for has happened; never waits."""
        if isinstance(job, HostRead):
            if job.motion is None:
                assert job.lift is not None
                if job.lift.done:
                    self._lifted(job)
                return
            if not job.copy.over:  # which it stands behind
                self._advance(job.copy)
            if job.copy.error is not None:
                self._settle(job, job.copy.error)
                return
        assert job.motion is not None
        try:
            if job.motion.query():
                self._settle(job, None)
        except RuntimeError as error:
            self._settle(job, _refusal("copying", job.n_bytes, error))

    def _await(self, job: Job) -> None:
        """Wait for the next thing that a job waits for."""
        try:
            if job.motion is not None:
                job.motion.synchronize()
            elif isinstance(job, HostRead) and job.lift is not None:
                with suppress(SpillError):  # _lifted looks at it
                    job.lift.wait()
        except RuntimeError as error:
            self._settle(job, _refusal("copying", job.n_bytes, error))
            return
        self._advance(job)

    def _settle(self, job: Job, error: SpillError | None) -> None:
        """Note that a job that was under way is over."""
        self._moving.remove(job)
        track = self._out if isinstance(job, HostCopy) else self._in
        track.queued_bytes -= job.n_bytes
        if error is None and job.motion is not None:
            track.measured(job.n_bytes, job.motion.seconds())
        self._end(job, error)

    def _end(self, job: Job, error: SpillError | None) -> None:
        job.over, job.error = True, error
        if isinstance(job, HostCopy):
            if error is None:
                self._resting.append(job)
                return
        else:
            job.copy.reads -= 1
        if job.slab is not None:
            self.slabs.give(job.slab)
            job.slab = None

    def _bury(self, copy: HostCopy) -> None:
        """Give a freed copy's place back, or try again later."""
        copy.freed = True
        if not copy.over or copy.reads or copy in self._sinking:
            self._freed.append(copy)
            return
        if copy in self._resting:
            self._resting.remove(copy)
        if copy.slab is not None:
            self.slabs.give(copy.slab)
            copy.slab = None
        if copy.below is not None and self.below is not None:
            self.below.free(copy.below)
            copy.below = None

    # -- between host and disk --------------------------------------------------

    @property
    def _full(self) -> bool:
        limit = self.slabs.limit_bytes
        return limit is not None and self.slabs.used_bytes > 0.9 * limit

    def _slab(self, n_bytes: Bytes, action: str) -> Slab:
        """Take a slab; where there is none, let older copies sink to the disk."""
        while (slab := self.slabs.take(n_bytes)) is None:
            if not self._sink(n_bytes):
                limit = self.slabs.limit_bytes or 0
                raise SpillError(
                    action,
                    asked_bytes=n_bytes,
                    used_bytes=self.slabs.used_bytes,
                    allowed_bytes=limit,
                    limit="host",
                )
        return slab

    def _sink(self, n_bytes: Bytes) -> bool:
        """Free host memory, by waiting at last; False where that is impossible."""
        started = sum(copy.n_bytes for copy in self._sinking)
        for copy in list(self._resting):
            if started >= n_bytes or self.below is None:
                break
            if copy.reads or copy.freed:
                continue
            assert copy.slab is not None
            try:
                copy.below = self.below.write(copy.slab.address, copy.n_bytes)
            except SpillError:
                break
            self._resting.remove(copy)
            self._sinking.append(copy)
            started += copy.n_bytes
        for copy in list(self._sinking):
            assert copy.below is not None
            with suppress(SpillError):
                copy.below.wait()
            if self._sunk(copy):
                return True
        for job in list(self._moving):  # that may sink next, or has a slab of its own
            while not job.over:
                self._await(job)
            self._look()
            return True
        return False

    def _sunk(self, copy: HostCopy) -> bool:
        """Give the slab of a copy back that has reached the disk."""
        assert copy.below is not None
        if not copy.below.done or copy.reads:
            return False
        self._sinking.remove(copy)
        if copy.below.failed:
            assert self.below is not None
            self.below.free(copy.below)
            copy.below = None
            self._resting.append(copy)
            return False
        assert copy.slab is not None
        self.slabs.give(copy.slab)
        copy.slab = None
        return True

    def _lift(self, read: HostRead) -> None:
        """Start to bring a copy up from the disk."""
        assert self.below is not None
        assert read.copy.below is not None
        read.slab = self._slab(read.n_bytes, f"reading {format_bytes(read.n_bytes)}")
        read.lift = self.below.read(read.copy.below, read.slab.address)

    def _lifted(self, read: HostRead) -> None:
        assert read.lift is not None
        assert read.slab is not None
        if read.lift.error is not None:
            self._settle(read, read.lift.error)
            return
        try:
            self._descend(read, read.slab)
        except SpillError as error:
            self._settle(read, error)

    def _descend(self, read: HostRead, slab: Slab) -> None:
        """Start to copy a slab to the device."""
        after = list(self.driver.ready())
        if read.copy.motion is not None and not read.copy.over:
            after.append(read.copy.motion)
        try:
            read.motion = self.driver.copy_in(
                read.address, slab.address, read.n_bytes, after
            )
        except RuntimeError as error:
            raise _refusal("copying in", read.n_bytes, error) from error


def _refusal(action: str, n_bytes: Bytes, error: Exception) -> SpillError:
    return SpillError(f"{action} {format_bytes(n_bytes)} ({error})", limit="host")
