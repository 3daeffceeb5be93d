# SPDX-License-Identifier: Apache-2.0
"""What the host lane has to do, and the driver that does it on a device.

A `HostCopy` or `HostRead` is what a caller holds: whether it is over, whether it
failed, and a way to wait for it. The other fields belong to the lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from lowtide.runtime import jobs
from lowtide.runtime.jobs import Copy as DiskCopy
from lowtide.runtime.jobs import Read as DiskRead
from lowtide.runtime.jobs import Seconds
from lowtide.runtime.pinned import Pinner, Slab
from lowtide.runtime.spill import Address, Bytes


class Event(Protocol):
    """Mark a place in a device's queue of work."""

    def query(self) -> bool:
        """Tell whether the device has got there."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Motion(Event, Protocol):
    """Follow one copy between device and host."""

    def seconds(self) -> Seconds:
        """Tell how long the copy took, once it is over."""


class Driver(Pinner, Protocol):
    """Copy between a device and the host: the one part that needs the device."""

    def ready(self) -> Sequence[Event]:
        """Mark what the program has queued, on every stream that it uses."""

    def copy_out(
        self, host: Address, device: Address, n_bytes: Bytes, after: Sequence[Event]
    ) -> Motion:
        """Start a copy to the host, once the events are reached.

        Raises:
            RuntimeError: the device refuses.
        """

    def copy_in(
        self, device: Address, host: Address, n_bytes: Bytes, after: Sequence[Event]
    ) -> Motion:
        """Start a copy to the device, once the events are reached."""


class Waiter(jobs.Waiter, Protocol):
    """Know of jobs when they are over; the lane does."""

    def arrived(self, job: Job) -> bool:
        """Tell whether a job is over; never waits."""


class HostCopy(jobs.Transfer):
    """Follow a block on its way to the host, and know where it is kept."""

    __slots__ = ("below", "freed", "motion", "n_bytes", "over", "reads", "slab")
    _lane: Waiter

    def __init__(self, lane: Waiter, n_bytes: Bytes, slab: Slab) -> None:
        super().__init__(lane)
        self.n_bytes = n_bytes
        self.slab: Slab | None = slab
        self.below: DiskCopy | None = None  # on its way to the disk, or there
        self.motion: Motion | None = None
        self.over = False
        self.freed = False
        self.reads = 0  # under way

    @property
    def done(self) -> bool:
        """Tell whether the memory is free to change."""
        return self.over or self._lane.arrived(self)


class HostRead(jobs.Transfer):
    """Follow a copy on its way back, in up to two parts."""

    __slots__ = ("address", "copy", "lift", "motion", "over", "slab")
    _lane: Waiter

    def __init__(self, lane: Waiter, copy: HostCopy, address: Address) -> None:
        super().__init__(lane)
        self.copy = copy
        self.address = address
        self.over = False
        self.lift: DiskRead | None = None  # from the disk to the slab
        self.slab: Slab | None = None  # of its own, for that
        self.motion: Motion | None = None  # from the slab to the device

    @property
    def done(self) -> bool:
        """Tell whether it is over."""
        return self.over or self._lane.arrived(self)

    @property
    def n_bytes(self) -> Bytes:
        """Tell how many bytes come back."""
        return self.copy.n_bytes


Job: TypeAlias = HostCopy | HostRead
