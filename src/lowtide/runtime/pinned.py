# SPDX-License-Identifier: Apache-2.0
"""Slabs of host memory that copies from a device land in, pinned where that works.

A slab is as large as what it holds, in whole pages: torch's own pinned allocator
rounds up to a power of two, which nearly doubles large ones. Pinning takes longer
than many a copy, so slabs are kept and used again; training asks for the same sizes
at every step, and after the first nothing is pinned any more. Where pinning is
refused (no privilege, a limit on locked memory, WSL) slabs are pageable from then on:
copies become slower, nothing else changes.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_left, insort
from typing import Protocol

from lowtide.runtime.spill import Address, Bytes, whole_pages

_WASTE = 8  # a kept slab may be larger than asked for by one part in so many


class Pinner(Protocol):
    """Lock memory, so that a device can copy from and to it by itself."""

    def pin(self, address: Address, n_bytes: Bytes) -> str | None:
        """Pin a range of memory; return why that is refused, if it is."""

    def unpin(self, address: Address) -> None:
        """Unpin a range that was pinned."""


class Slab:
    """Own a block of host memory; it begins on a page."""

    __slots__ = ("_memory", "address", "n_bytes", "pinned")

    def __init__(self, n_bytes: Bytes) -> None:
        self._memory = mmap.mmap(-1, n_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.n_bytes = n_bytes
        self.pinned = False


class Slabs:
    """Hand out slabs within a limit, and keep those that come back.

    Whoever gives a slab back must be done with it: no copy may be under way.
    """

    def __init__(self, pinner: Pinner, limit_bytes: Bytes | None) -> None:
        self._pinner = pinner
        self.limit_bytes = limit_bytes
        self.used_bytes: Bytes = 0
        self.held_bytes: Bytes = 0  # with those kept for later
        self.pins = 0  # calls so far
        self.refused: str | None = None  # why nothing is pinned any more
        self._kept: list[tuple[Bytes, int]] = []  # sizes and keys, ascending
        self._slabs: dict[int, Slab] = {}

    def take(self, n_bytes: Bytes) -> Slab | None:
        """Return a slab of at least so many bytes; None if the limit forbids it.

        One slab at a time is let through whatever the limit: copies to the disk and
        back have to pass somewhere.
        """
        wanted = max(whole_pages(n_bytes), 1 << 12)
        slab = self._reuse(wanted)
        if slab is None:
            limit = self.limit_bytes
            if limit is not None and self.used_bytes + wanted > limit:
                if self.used_bytes > 0:
                    return None
                limit = wanted
            self._shrink(limit, wanted)
            slab = self._make(wanted)
        self.used_bytes += slab.n_bytes
        return slab

    def give(self, slab: Slab) -> None:
        """Take a slab back."""
        self.used_bytes -= slab.n_bytes
        self._slabs[id(slab)] = slab
        insort(self._kept, (slab.n_bytes, id(slab)))

    def close(self) -> None:
        """Let go of every slab that was given back."""
        self._shrink(0, 0)

    def _reuse(self, wanted: Bytes) -> Slab | None:
        i = bisect_left(self._kept, (wanted, 0))
        if i == len(self._kept) or self._kept[i][0] > wanted + wanted // _WASTE:
            return None
        _, key = self._kept.pop(i)
        return self._slabs.pop(key)

    def _make(self, n_bytes: Bytes) -> Slab:
        slab = Slab(n_bytes)
        self.held_bytes += n_bytes
        if self.refused is None:
            self.pins += 1
            self.refused = self._pinner.pin(slab.address, n_bytes)
            slab.pinned = self.refused is None
        return slab

    def _shrink(self, limit: Bytes | None, wanted: Bytes) -> None:
        """Let kept slabs go, the smallest first, until so many bytes more fit."""
        while self._kept and limit is not None and self.held_bytes + wanted > limit:
            _, key = self._kept.pop(0)
            slab = self._slabs.pop(key)
            self.held_bytes -= slab.n_bytes
            if slab.pinned:
                self._pinner.unpin(slab.address)
