"""Which device is budgeted, and how much memory there is: free, in all, per rank.

The machine's and its cgroup's memory count for the CPU, torch's figures for a device.
Ranks on one machine share its memory and its disk: percentages and "auto" mean this
rank's equal part of them, a number of bytes means just that, for each rank.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from lowtide.errors import LowtideError, SizeError
from lowtide.runtime import allocator
from lowtide.runtime.cuda import AcceleratorClock, AcceleratorCounter, counter_of
from lowtide.runtime.lanes import Tiers
from lowtide.runtime.spill import spill_directory
from lowtide.units import parse_bytes

_RESERVE = 0.1  # of what is free, left to others by "auto"
_CGROUP = Path("/sys/fs/cgroup")
_RANKS = (
    "LOCAL_WORLD_SIZE",  # torchrun
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)

Counter = allocator.Counter | AcceleratorCounter


def resolve_device(device: str | torch.device | None) -> str:
    """Return what is budgeted: "cpu", or an accelerator with its index, "cuda:0".

    Raises:
        LowtideError: torch has no such device, or it is not there.
    """
    try:
        place = torch.device("cpu" if device is None else device)
    except RuntimeError as error:
        raise LowtideError(f"device {device!r} is unknown to torch: {error}") from error
    if place.type == "cpu":
        return "cpu"
    found = torch.accelerator.current_accelerator()
    if found is not None and not torch.accelerator.is_available():
        found = None
    if found is None or found.type != place.type:
        there = "no accelerator" if found is None else f"{found.type!r} and no other"
        raise LowtideError(
            f"device {device!r} is not there: torch {torch.__version__} sees {there} "
            "on this machine. Leave device out to budget CPU memory."
        )
    count = torch.accelerator.device_count()
    index = place.index
    if index is None:
        index = int(_module(device).current_device())
    if index >= count:
        raise LowtideError(
            f"device {device!r} is not there: this machine has {count} of {place.type}."
        )
    return f"{place.type}:{index}"


def install_counter(device: str) -> Counter:
    """Count a device's bytes from now on, with those that exist already."""
    if device == "cpu":
        counter = allocator.install()
        allocator.adopt(counter)
        return counter
    try:
        return counter_of(device)
    except RuntimeError as error:
        raise LowtideError(
            f"torch keeps no memory figures for {device} ({error}). lowtide needs "
            "them: use torch's own allocator, not a pluggable one."
        ) from error


def resolve_budget(size: int | str, device: str = "cpu") -> int:
    """Turn a budget as given ("8GiB", "75%", "auto", bytes) into bytes."""
    if _is_auto(size):
        free = free_memory() // local_ranks() if device == "cpu" else _free(device)
        return int(free * (1 - _RESERVE))
    total = total_memory() // local_ranks() if device == "cpu" else _total(device)
    budget = parse_bytes(size, total=total)
    if budget <= 0:
        raise SizeError(size, "a budget has at least one byte")
    return budget


def resolve_tiers(
    *,
    device: str,
    host: int | str,
    disk: int | str,
    disk_writes: int | str | None,
    directory: Path | None,
) -> Tiers:
    """Turn the limits of the tiers below a device into bytes; None sets no limit."""
    ranks = local_ranks()
    if _is_auto(host):
        room = int(free_memory() * (1 - _RESERVE)) // ranks
        host_bytes = None if device == "cpu" else room
    else:
        host_bytes = parse_bytes(host, total=total_memory() // ranks)
    disk_bytes = writes = None
    if not _is_auto(disk):
        percent = isinstance(disk, str) and "%" in disk
        total = _disk_usage(directory).total // ranks if percent else 0
        disk_bytes = parse_bytes(disk, total=total)
    elif ranks > 1:
        disk_bytes = int(_disk_usage(directory).free * (1 - _RESERVE)) // ranks
    if disk_writes is not None:
        writes = parse_bytes(disk_writes)
    return Tiers(
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        disk_writes=writes,
        directory=directory,
    )


def local_ranks() -> int:
    """Return how many ranks of one job share this machine, as launchers say it."""
    for name in _RANKS:
        text = os.environ.get(name, "")
        if text.isdigit() and int(text) > 0:
            return int(text)
    return 1


def device_clock(device: str) -> AcceleratorClock | None:
    """Return what times operators where their calls return before they are done."""
    if device == "cpu":
        return None
    return AcceleratorClock(lambda: _module(device).synchronize(device))


def release_cache(device: str) -> None:
    """Let torch give back what it keeps of a device's memory for later."""
    if device != "cpu":
        _module(device).empty_cache()


def _is_auto(size: int | str) -> bool:
    return isinstance(size, str) and size.strip().lower() == "auto"


def _module(device: Any) -> Any:
    """Return torch's module of a device's kind."""
    return torch.get_device_module(device)


def _free(device: str) -> int:
    """Return a device's free bytes, with those that torch keeps for later."""
    module = _module(device)
    kept = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0] + kept)


def _total(device: str) -> int:
    return int(_module(device).mem_get_info(device)[1])


def _disk_usage(directory: Path | None) -> Any:
    """Look at the file system that a spill file would lie on."""
    # the lane says what is amiss there
    place = (directory or spill_directory(None, warn=False)).absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place)


def total_memory() -> int:
    """Return the bytes of RAM this process may use: the machine's or its cgroup's."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [n for n in _cgroup_values("memory.max", "memory.limit_in_bytes") if n > 0]
    return min([machine, *limits])


def free_memory() -> int:
    """Return the bytes of RAM that are free now, for this process."""
    free = _available()
    for limit, used in zip(
        _cgroup_values("memory.max", "memory.limit_in_bytes"),
        _cgroup_values("memory.current", "memory.usage_in_bytes"),
        strict=False,
    ):
        free = min(free, max(0, limit - used))
    return free


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _cgroup_values(v2: str, v1: str) -> list[int]:
    """Read one number of this process's cgroup and of every one above it."""
    places: list[Path] = []
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                folder = _CGROUP / path.lstrip("/")
                places += [f / v2 for f in (folder, *folder.parents)]
            elif "memory" in controllers.split(","):
                folder = _CGROUP / "memory" / path.lstrip("/")
                places += [f / v1 for f in (folder, *folder.parents)]
    except (OSError, ValueError):
        return []
    found = []
    for place in places:
        try:
            found.append(int(place.read_text()))
        except (OSError, ValueError):
            continue  # absent at this level, or "max"
    return found
