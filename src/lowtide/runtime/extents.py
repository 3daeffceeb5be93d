# SPDX-License-Identifier: Apache-2.0
"""Which bytes of a file, or of another large range, are in use: in whole pages.

What steps ask for in the same order gets the places that a plan has for it (see
`rounds`), as long as they are free. Anything else is placed by first fit.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from lowtide.runtime.rounds import Rounds, Ticket

Bytes: TypeAlias = int

PAGE: Bytes = 4096


def whole_pages(n_bytes: Bytes) -> Bytes:
    """Round up to whole pages."""
    return -(-n_bytes // PAGE) * PAGE


class Extent(NamedTuple):
    """Name a run of bytes; both numbers are multiples of a page."""

    offset: Bytes
    length: Bytes


class Extents:
    """Hand out parts of a range: neighbours are joined when they come back.

    A request that fits no hole extends the range; at the limit it is scattered over
    the holes, so that the limit is never missed through fragmentation.
    """

    def __init__(self, limit_bytes: Bytes | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes: Bytes = 0
        self.file_bytes: Bytes = 0  # the largest end so far, or since `shrink`
        self._end: Bytes = 0
        self._holes: list[Extent] = []  # by offset; none touches another or the end
        self._rounds = Rounds()
        self._tickets: dict[Bytes, Ticket] = {}  # by the offset of what was given

    def begin_step(self) -> None:
        """Note that a step begins: it may ask for the same as those before it."""
        self._rounds.begin()

    @property
    def planned_bytes(self) -> Bytes:
        """Tell what a step needs by its plan; 0 while there is none."""
        return self._rounds.height_bytes

    def shrink(self) -> Bytes | None:
        """Let the range end where the plan does, if it was larger; return the end."""
        planned = self.planned_bytes
        if planned == 0 or self.file_bytes <= max(planned, self._end):
            return None
        self.file_bytes = max(planned, self._end)
        return self.file_bytes

    def fits(self, n_bytes: Bytes) -> bool:
        """Tell whether the limit leaves room for so many bytes."""
        wanted, limit = whole_pages(n_bytes), self.limit_bytes
        return limit is None or self.used_bytes + wanted <= limit

    def allocate(self, n_bytes: Bytes) -> tuple[Extent, ...] | None:
        """Reserve whole pages for so many bytes; None if the limit forbids it."""
        wanted = whole_pages(n_bytes)
        if not self.fits(n_bytes):
            return None
        if wanted == 0:
            return ()
        offset = self._rounds.offset(wanted)
        ticket = self._rounds.ask(wanted)
        if offset is not None and self.claim(Extent(offset, wanted)):
            given: tuple[Extent, ...] = (Extent(offset, wanted),)
        else:
            given = self._as_it_comes(wanted)
            self.used_bytes += wanted
        self._tickets[given[0].offset] = ticket
        return given

    def claim(self, extent: Extent) -> bool:
        """Take exactly these bytes, if they are free and within the limit."""
        offset, length = extent
        stop = offset + length
        if self.limit_bytes is not None and stop > self.limit_bytes:
            return False
        if offset >= self._end:
            if offset > self._end:
                self._holes.append(Extent(self._end, offset - self._end))
            self._extend(stop)
        else:
            i = bisect_right(self._holes, Extent(offset, 1 << 62)) - 1
            if i < 0 or sum(self._holes[i]) < stop:
                return False
            hole = self._holes.pop(i)
            front = Extent(hole.offset, offset - hole.offset)
            behind = Extent(stop, sum(hole) - stop)
            self._holes[i:i] = [rest for rest in (front, behind) if rest.length > 0]
        self.used_bytes += length
        return True

    def free(self, extents: Sequence[Extent]) -> None:
        """Take back what `allocate` gave, or `claim`."""
        ticket = self._tickets.pop(extents[0].offset, None) if extents else None
        if ticket is not None:
            self._rounds.end(ticket)
        for extent in extents:
            self.used_bytes -= extent.length
            self._join(extent)
        if self._holes and sum(self._holes[-1]) == self._end:
            self._end = self._holes.pop().offset

    def _as_it_comes(self, wanted: Bytes) -> tuple[Extent, ...]:
        limit = self.limit_bytes
        for i, hole in enumerate(self._holes):
            if hole.length >= wanted:
                return (self._cut(i, wanted),)
        extents = []
        if limit is not None and self._end + wanted > limit:
            while self._holes and wanted > 0:
                extents.append(self._cut(0, min(wanted, self._holes[0].length)))
                wanted -= extents[-1].length
        if wanted > 0:
            extents.append(Extent(self._end, wanted))
            self._extend(self._end + wanted)
        return tuple(extents)

    def _extend(self, end: Bytes) -> None:
        self._end = end
        self.file_bytes = max(self.file_bytes, end)

    def _cut(self, i: int, length: Bytes) -> Extent:
        """Take the front of a hole."""
        hole = self._holes[i]
        if hole.length == length:
            del self._holes[i]
        else:
            self._holes[i] = Extent(hole.offset + length, hole.length - length)
        return Extent(hole.offset, length)

    def _join(self, extent: Extent) -> None:
        """Make a hole, one with the holes on either side."""
        i = bisect_left(self._holes, extent)
        if i < len(self._holes) and self._holes[i].offset == sum(extent):
            extent = Extent(extent.offset, extent.length + self._holes.pop(i).length)
        if i > 0 and sum(self._holes[i - 1]) == extent.offset:
            i -= 1
            before = self._holes.pop(i)
            extent = Extent(before.offset, before.length + extent.length)
        self._holes.insert(i, extent)
