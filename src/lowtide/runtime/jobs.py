# SPDX-License-Identifier: Apache-2.0
"""What the disk lane has to do: copies out, reads back, and a queue for each.

A `Copy` or `Read` is what a caller holds: whether it is over, whether it failed, and a
way to wait for it. The other fields belong to the lane and change under its lock.
"""

import copy as copying
import threading
from collections import deque
from typing import Any, Protocol, TypeAlias

from lowtide.errors import SpillError
from lowtide.runtime.extents import Extent
from lowtide.runtime.spill import Address, Bytes

Seconds: TypeAlias = float

_FIRST_BANDWIDTH = 1e9  # bytes a second, until measured
_FIRST_WEIGHT: Bytes = 64 * 2**20  # how many bytes that first guess counts for
_HALF_LIFE: Bytes = 256 * 2**20  # after so many bytes a measurement counts half


class Waiter(Protocol):
    """Wait for jobs; the lane is the one that does."""

    def wait(self, job: Any) -> Seconds:
        """Wait for a job, and raise its error if it failed."""
        ...


class Transfer:
    """What a caller holds of bytes that are on their way."""

    __slots__ = ("_lane", "error")

    def __init__(self, lane: Waiter) -> None:
        self._lane = lane
        self.error: SpillError | None = None

    @property
    def failed(self) -> bool:
        """Tell whether the bytes did not get there."""
        return self.error is not None

    def wait(self) -> Seconds:
        """Wait until it is over; return how long that took.

        Raises:
            SpillError: the bytes did not get there. Those of a copy are where they
                were; those of the memory that was to be read into are undefined.
        """
        return self._lane.wait(self)

    def check(self) -> None:
        """Raise the error, if there is one.

        A new one each time: its traceback holds frames, and these hold tensors.
        """
        if self.error is not None:
            raise copying.copy(self.error)


class Copy(Transfer):
    """Follow a block of memory on its way to the disk, and its place there."""

    __slots__ = (
        "address",
        "done",
        "extents",
        "freed",
        "n_bytes",
        "parked",
        "reads",
        "started",
    )

    def __init__(
        self, lane: Waiter, address: Address, n_bytes: Bytes, where: tuple[Extent, ...]
    ) -> None:
        super().__init__(lane)
        self.address = address
        self.n_bytes = n_bytes
        self.done = False  # written, failed or cancelled: the memory is free to change
        self.extents = where
        self.started = False
        self.freed = False
        self.reads = 0  # that hold the extent
        self.parked: list[Read] = []  # that wait for the bytes to arrive


class Read(Transfer):
    """Follow a copy on its way back into memory."""

    __slots__ = ("address", "copy", "done", "started", "urgent")

    def __init__(self, lane: Waiter, copy: Copy, address: Address) -> None:
        super().__init__(lane)
        self.copy = copy
        self.address = address
        self.done = False
        self.started = False
        self.urgent = False

    @property
    def n_bytes(self) -> Bytes:
        """Tell how many bytes come back."""
        return self.copy.n_bytes


Job: TypeAlias = Copy | Read


class Track:
    """Keep one direction's queue, thread and speed."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        self.queue: deque[Job] = deque()
        self.active: Job | None = None
        self.thread: threading.Thread | None = None
        self.queued_bytes: Bytes = 0  # with those that are moving
        self.moved_bytes: Bytes = 0
        self._weighed_bytes: float = _FIRST_WEIGHT
        self._weighed_seconds: Seconds = _FIRST_WEIGHT / _FIRST_BANDWIDTH

    @property
    def bandwidth(self) -> float:
        """Tell the speed in bytes a second, recent transfers weighing more."""
        return self._weighed_bytes / self._weighed_seconds

    @property
    def queued_seconds(self) -> Seconds:
        """Tell how long what is queued will take."""
        return self.queued_bytes / self.bandwidth

    def measured(self, n_bytes: Bytes, seconds: Seconds) -> None:
        """Learn from a transfer."""
        kept = 0.5 ** (n_bytes / _HALF_LIFE)
        self.moved_bytes += n_bytes
        self._weighed_bytes = self._weighed_bytes * kept + n_bytes
        self._weighed_seconds = self._weighed_seconds * kept + seconds

    def put(self, job: Job, *, first: bool = False) -> None:
        """Queue a job, behind or before the others."""
        self.queued_bytes += job.n_bytes
        if first:
            self.queue.appendleft(job)
        else:
            self.queue.append(job)

    def hurry(self, job: Job) -> None:
        """Move a queued job to the front."""
        self.queue.remove(job)
        self.queue.appendleft(job)
