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

from lowtide.runtime.extents import Extent, Extents, whole_pages
from lowtide.runtime.rounds import Rounds, Ticket
from lowtide.runtime.spill import Address, Bytes

_WASTE = 8  # a kept slab may be larger than asked for by one part in so many


class Pinner(Protocol):
    """Lock memory, so that a device can copy from and to it by itself."""

    def pin(self, address: Address, n_bytes: Bytes) -> str | None:
        """Pin a range of memory; return why that is refused, if it is."""

    def unpin(self, address: Address) -> None:
        """Unpin a range that was pinned."""


class Slab:
    """Own a block of host memory, or have a part of one; it begins on a page."""

    __slots__ = ("_memory", "address", "extent", "n_bytes", "pinned", "ticket")

    def __init__(
        self, n_bytes: Bytes, *, within: Slab | None = None, offset: Bytes = 0
    ) -> None:
        if within is None:
            self._memory = mmap.mmap(-1, n_bytes)
            start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        else:
            self._memory, start = within._memory, within.address
        self.address: Address = start + offset
        self.n_bytes = n_bytes
        self.pinned: bool = within is not None and within.pinned
        self.extent = None if within is None else Extent(offset, n_bytes)
        self.ticket: Ticket | None = None


class Slabs:
    """Hand out slabs within a limit, and keep those that come back.

    Whoever gives a slab back must be done with it: no copy may be under way. Once
    steps ask for the same, their slabs are parts of one block, where a plan puts them.
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
        self._rounds = Rounds()
        self._block: Slab | None = None  # that plans are followed in
        self._parts = Extents()  # of the block

    def begin_step(self) -> None:
        """Note that a step begins: it may ask for the same as those before it."""
        self._rounds.begin()
        height, limit = self._rounds.height_bytes, self.limit_bytes
        block = self._block
        if height == (block.n_bytes if block else 0) or self._parts.used_bytes > 0:
            return
        self._drop_block()
        # Beside the block there must be room for what diverges from the plan.
        if limit is not None and self.used_bytes + 2 * height > limit:
            return
        self._shrink(0, 0)
        self._block = self._make(height)

    def take(self, n_bytes: Bytes) -> Slab | None:
        """Return a slab of at least so many bytes; None if the limit forbids it.

        One slab at a time is let through whatever the limit: copies to the disk and
        back have to pass somewhere.
        """
        wanted = max(whole_pages(n_bytes), 1 << 12)
        slab = self._part(wanted) or self._reuse(wanted) or self._fresh(wanted)
        if slab is not None:
            slab.ticket = self._rounds.ask(wanted)
            self.used_bytes += slab.n_bytes
        return slab

    def give(self, slab: Slab) -> None:
        """Take a slab back."""
        self.used_bytes -= slab.n_bytes
        if slab.ticket is not None:
            self._rounds.end(slab.ticket)
            slab.ticket = None
        if slab.extent is not None:
            self._parts.free((slab.extent,))
            return
        self._slabs[id(slab)] = slab
        insort(self._kept, (slab.n_bytes, id(slab)))

    def close(self) -> None:
        """Let go of every slab that was given back."""
        self._shrink(0, 0)
        if self._parts.used_bytes == 0:
            self._drop_block()

    def _part(self, wanted: Bytes) -> Slab | None:
        """Give the planned part of the block, where it is free."""
        offset, block = self._rounds.offset(wanted), self._block
        if block is None or offset is None or offset + wanted > block.n_bytes:
            return None
        if not self._parts.claim(Extent(offset, wanted)):
            return None
        return Slab(wanted, within=block, offset=offset)

    def _fresh(self, wanted: Bytes) -> Slab | None:
        limit = self.limit_bytes
        if limit is not None and self.used_bytes + wanted > limit:
            if self.used_bytes > 0:
                return None
            limit = wanted
        self._shrink(limit, wanted)
        if limit is not None and self.held_bytes + wanted > limit:
            if self._parts.used_bytes > 0:
                return None
            self._drop_block()
        return self._make(wanted)

    def _drop_block(self) -> None:
        if self._block is not None:
            self._release(self._block)
            self._block = None

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
            self._release(self._slabs.pop(key))

    def _release(self, slab: Slab) -> None:
        self.held_bytes -= slab.n_bytes
        if slab.pinned:
            self._pinner.unpin(slab.address)
