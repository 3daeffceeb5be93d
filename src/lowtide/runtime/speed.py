# SPDX-License-Identifier: Apache-2.0
"""Measure this machine as torch sees it: arithmetic, memory, and the disk lane.

Each figure is the best of a few tries, since other work on the machine can only make
one slower. The disk is measured through the lane that copies saved tensors, in copies
of the usual size.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lowtide.hardware import MEASURED, Hardware
from lowtide.runtime.devices import total_memory
from lowtide.runtime.kinds import measure_kinds
from lowtide.runtime.overheads import measure_overheads
from lowtide.runtime.transfers import DiskLane

_TRIES = 5
_MATMUL_SIZE = {"float32": 1024, "float64": 1024, "bfloat16": 512}
_STREAM_ELEMENTS = 1 << 25  # 128 MiB an array: larger than caches
_COPY_BYTES = 32 << 20
_COPIES = 8

Say = Callable[[str], None]


def measure_machine(say: Say, *, directory: Path | None = None) -> Hardware:
    """Measure this machine's processor, memory and disk, in some seconds.

    Arguments:
        say: told what is being measured.
        directory: where the spill file would lie; None chooses as a budget does.

    Raises:
        SpillError: there is no disk to write to.
    """
    flops = {}
    for dtype, n in _MATMUL_SIZE.items():
        say(f"multiplying matrices of {dtype}")
        flops[dtype] = _measure_matmul(getattr(torch, dtype), n)
    say("streaming through memory")
    memory_bandwidth = _measure_memory()
    say("writing to the disk and reading back")
    disk_write, disk_read = _measure_disk(directory)
    say("timing operators of each kind")
    kinds = measure_kinds()
    say("keeping budgets of small networks")
    overheads = measure_overheads()
    threads = torch.get_num_threads()
    machine = Hardware(
        name=MEASURED,
        memory_bytes=total_memory(),
        flops=flops,
        memory_bandwidth=memory_bandwidth,
        to_host=disk_write,  # what the CPU spills goes to the disk
        from_host=disk_read,
        host_bytes=total_memory(),
        disk_write=disk_write,
        disk_read=disk_read,
        source=f"measured with torch {torch.__version__}, {threads} threads, "
        f"{platform.machine()}, {platform.system()}",
        launch=_measure_launch(),
        overheads=overheads,
    )
    return machine.calibrated(kinds)


def _best(act: Callable[[], object]) -> float:
    act()
    seconds = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start)
    return max(min(seconds), 1e-9)


def _measure_matmul(dtype: torch.dtype, n: int) -> float:
    a, b = torch.ones(n, n, dtype=dtype), torch.ones(n, n, dtype=dtype)
    out = torch.empty(n, n, dtype=dtype)
    return 2 * n**3 / _best(lambda: torch.mm(a, b, out=out))


def _measure_memory() -> float:
    a, b = torch.ones(_STREAM_ELEMENTS), torch.ones(_STREAM_ELEMENTS)
    out = torch.empty(_STREAM_ELEMENTS)
    return 3 * out.nbytes / _best(lambda: torch.add(a, b, out=out))


def _measure_launch() -> float:
    a, out = torch.ones(16), torch.empty(16)

    def act() -> None:
        for _ in range(1000):
            torch.add(a, a, out=out)

    return _best(act) / 1000


def _measure_disk(directory: Path | None) -> tuple[float, float]:
    memory = mmap.mmap(-1, _COPY_BYTES)
    memory.write(b"\xa5" * _COPY_BYTES)
    first = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(first)
    lane = DiskLane(directory)
    try:
        start = time.perf_counter()
        copies = [lane.write(address, _COPY_BYTES) for _ in range(_COPIES)]
        for copy in copies:
            copy.wait()
        middle = time.perf_counter()
        for copy in copies:
            lane.read(copy, address).wait()
        end = time.perf_counter()
    finally:
        lane.close()
        del first
        memory.close()
    moved = _COPIES * _COPY_BYTES
    return moved / (middle - start), moved / (end - middle)
