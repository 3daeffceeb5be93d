# SPDX-License-Identifier: Apache-2.0
"""Memory to move, and system calls that are slow or fail, for tests of the lane."""

import ctypes
import mmap
import os
import random
import threading
from collections.abc import Callable, Sequence

from lowtide.runtime.transfers import DiskLane

PATIENCE_SECONDS = 60  # for what a broken lane would never do
MANY = 200_000  # bytes, 48 pages and a part

memories: list[mmap.mmap] = []  # of this test; a lane does not keep memory alive


class Block:
    """Own memory at a chosen distance from a page's start."""

    def __init__(
        self, n_bytes: int, *, shift: int = 0, fill: int | None = None
    ) -> None:
        self._memory = mmap.mmap(-1, shift + n_bytes + 4096)
        memories.append(self._memory)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.address = base + shift
        self.n_bytes = n_bytes
        self._shift = shift
        if fill is not None:
            self.set(random.Random(fill).randbytes(n_bytes))

    def set(self, content: bytes) -> None:
        self._memory[self._shift : self._shift + len(content)] = content

    def content(self) -> bytes:
        return self._memory[self._shift : self._shift + self.n_bytes]

    def behind(self) -> bytes:
        """Look at what lies behind the block, which nobody may touch."""
        return self._memory[self._shift + self.n_bytes :]


class Gate:
    """Hold a system call back until told."""

    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call
        self.entered = threading.Event()
        self.open = threading.Event()
        self.offsets: list[int] = []

    def __call__(
        self, descriptor: int, views: Sequence[memoryview], offset: int
    ) -> int:
        self.offsets.append(offset)
        self.entered.set()
        assert self.open.wait(PATIENCE_SECONDS)
        return self._call(descriptor, views, offset)


def failing(number: int, times: int) -> Callable[..., int]:
    """Make a write that fails so many times before it works."""
    left = [times]

    def pwritev(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return os.pwritev(descriptor, views, offset)

    return pwritev


def round_trip(lane: DiskLane, block: Block, shift: int = 0) -> bytes:
    copy = lane.write(block.address, block.n_bytes)
    copy.wait()
    target = Block(block.n_bytes, shift=shift)
    behind = target.behind()
    lane.read(copy, target.address).wait()
    assert target.behind() == behind
    lane.free(copy)
    return target.content()
