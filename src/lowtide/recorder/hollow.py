# SPDX-License-Identifier: Apache-2.0
"""Tensors that take no memory: their bytes are addresses that nobody ever touched.

One large range of addresses is reserved, without memory behind it, and handed out in
turn; the system puts a page there only where something writes. What reads finds zeros.
So a hollow tensor is an ordinary CPU tensor to PyTorch and to the program, whatever its
size, as long as nobody computes with it. At the end of the range handing out begins
anew at its start: two tensors may share addresses then, which hold nothing anyway.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any, cast

import torch

from lowtide.errors import LowtideError

_ALIGNMENT = 4096
_NO_RESERVE = 0x4000  # Linux; `mmap` names it from Python 3.13 on only
_LARGEST, _SMALLEST = 1 << 46, 1 << 36  # 64 TiB down to 64 GiB of addresses

_cpu = torch.device("cpu")
_storage = torch._C._construct_storage_from_data_pointer


class HollowMemory:
    """A range of addresses that stays empty."""

    def __init__(self) -> None:
        self.size = _LARGEST
        while True:
            start = _reserve(self.size)
            if start is not None:
                break
            self.size //= 4
            if self.size < _SMALLEST:
                raise LowtideError(
                    "the system grants no range of addresses for a recording without "
                    "memory: it limits address space (ulimit -v) or forbids "
                    "overcommitment (vm.overcommit_memory=2)."
                )
        self.start = start
        self.stop = start + self.size
        self._next = start

    def storage(self, n_bytes: int) -> torch.UntypedStorage:
        """Make a storage of at least one byte."""
        room = -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
        if room > self.size:
            raise LowtideError(
                f"a tensor of {n_bytes} bytes is larger than all addresses that the "
                f"system grants ({self.size} bytes)."
            )
        if self._next + room > self.stop:
            self._next = self.start
        address, self._next = self._next, self._next + room
        made: Any = _storage(address, _cpu, n_bytes)
        return cast(torch.UntypedStorage, made)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor is hollow."""
        return self.start <= tensor.untyped_storage().data_ptr() < self.stop


def _reserve(size: int) -> int | None:
    system = ctypes.CDLL(None, use_errno=True).mmap
    system.restype = ctypes.c_void_p
    system.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    address = system(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    failed = address is None or address == ctypes.c_void_p(-1).value
    return None if failed else int(address)


@cache
def hollow_memory() -> HollowMemory:
    """Return the range of this process; it costs nothing to leave it in place."""
    return HollowMemory()
