# SPDX-License-Identifier: Apache-2.0
"""Lanes: what carries blocks of memory to a lower tier and back, whatever it is.

The ledger knows nothing more of a tier than this protocol. `open_lane` chooses: the
disk for budgets on the CPU's memory, pinned host memory with the disk below it for
those on a device's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from lowtide.runtime.spill import Address, Bytes
from lowtide.runtime.transfers import DiskLane

if TYPE_CHECKING:
    from lowtide.runtime.streams import Streams

Seconds: TypeAlias = float


class Lane(Protocol):
    """Carry blocks of memory out and back, beside the computation.

    A copy or read that a lane returns has `done` and `failed`, both cheap, and
    `wait()`, which returns the seconds waited and raises SpillError after a failure.
    """

    def write(self, address: Address, nbytes: Bytes) -> Any:
        """Start to copy a block out; it must stay as it is until the copy is done.

        Raises:
            SpillError: a limit forbids it, or the tier failed lately.
        """

    def allows(self, nbytes: Bytes) -> bool:
        """Tell whether limits leave room for a write; what fails shows only later."""

    def read(self, copy: Any, address: Address) -> Any:
        """Start to copy back, once the copy is complete, into memory set aside."""

    def free(self, copy: Any) -> None:
        """Give a copy's place back as soon as nothing uses it; never waits."""

    def begin_step(self) -> None:
        """Note that a step begins: limits by the step count anew."""

    def remarks(self) -> tuple[str, ...]:
        """Say what a user should know of this tier, for the report."""

    def close(self) -> None:
        """Give everything back; what is under way fails."""

    @property
    def write_bandwidth(self) -> float:
        """Tell how fast copies go out, in bytes a second."""

    @property
    def read_bandwidth(self) -> float:
        """Tell how fast copies come back, in bytes a second."""

    @property
    def written_bytes(self) -> Bytes:
        """Tell how many bytes went out so far."""

    @property
    def step_written_bytes(self) -> Bytes:
        """Tell how many bytes went out in the step that wrote most."""

    @property
    def read_bytes(self) -> Bytes:
        """Tell how many bytes came back so far."""

    @property
    def used_bytes(self) -> Bytes:
        """Tell how many bytes the copies take up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Limits of the tiers below a device; None sets none, 0 forbids a tier."""

    host_bytes: Bytes | None = None
    disk_bytes: Bytes | None = None
    disk_writes: Bytes | None = None  # a step
    directory: Path | None = None


def swap_limit(device: str, tiers: Tiers) -> Bytes | None:
    """Return how much of one iteration may leave at most; None where nothing limits it.

    Below a device's memory lies the host's, and what of it goes on to the disk is not
    known beforehand.
    """
    limits = [tiers.disk_bytes, tiers.disk_writes] if device == "cpu" else []
    return min((limit for limit in limits if limit is not None), default=None)


def open_lane(device: str, tiers: Tiers, streams: Streams | None = None) -> Lane | None:
    """Open the lane from a device to the tier below it; None where none is allowed.

    `streams` are those that the program computes on, where it is a device that has any.

    Raises:
        SpillError: no directory was named and none will do.
    """
    disk = None
    if tiers.disk_bytes != 0:
        disk = DiskLane(
            tiers.directory,
            limit_bytes=tiers.disk_bytes,
            step_limit_bytes=tiers.disk_writes,
        )
    if device == "cpu":
        return disk
    # imported here, because only a device needs them
    from lowtide.runtime.cuda import AcceleratorDriver
    from lowtide.runtime.hostlane import HostLane

    if tiers.host_bytes == 0 and disk is None:
        return None
    driver = AcceleratorDriver(device, streams)
    return HostLane(driver, limit_bytes=tiers.host_bytes, below=disk)
