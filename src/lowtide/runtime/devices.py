"""How much memory there is: the machine, its cgroup, what is free now."""

from __future__ import annotations

import os
from pathlib import Path

from lowtide.errors import LowtideError, SizeError
from lowtide.units import parse_bytes

_RESERVE = 0.1  # of what is free, left to others by "auto"
_CGROUP = Path("/sys/fs/cgroup")


def resolve_device(device: str | None) -> str:
    """Return the device type to budget; only the CPU is served so far."""
    kind = "cpu" if device is None else str(device).split(":")[0]
    if kind != "cpu":
        raise LowtideError(
            f"device {device!r} is not served yet: lowtide budgets CPU memory in this "
            'version. Leave device out, or give device="cpu".'
        )
    return kind


def resolve_budget(size: int | str) -> int:
    """Turn a budget as given ("8GiB", "75%", "auto", bytes) into bytes."""
    if isinstance(size, str) and size.strip().lower() == "auto":
        return int(free_memory() * (1 - _RESERVE))
    budget = parse_bytes(size, total=total_memory())
    if budget <= 0:
        raise SizeError(size, "a budget has at least one byte")
    return budget


def resolve_limit(size: int | str, *, total: int) -> int | None:
    """Turn a limit on a lower tier into bytes; "auto" is None (no own limit)."""
    if isinstance(size, str) and size.strip().lower() == "auto":
        return None
    return parse_bytes(size, total=total)


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
