# SPDX-License-Identifier: Apache-2.0
"""Match allocations with releases by address, as they come in other people's files.

Addresses return, so a block is an address and a time. A release of what was never
allocated belongs to a block that was there before the file begins; an allocation where
something still lies means that a release is missing from the file.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np

from lowtide.errors import FileError
from lowtide.history import BLOCKS, OPERATIONS, USES, History

MOST_BYTES = 1 << 50  # of one block; more is no memory but a damaged file
MOST_TOTAL = 1 << 60
_LABEL_LENGTH = 100
_LISTED = 6


class Lives:
    """Collect blocks, operators and uses, one event after the other."""

    def __init__(self) -> None:
        self.event = 0
        self.unseen = 0  # releases that the file does not show
        self.names: dict[str, int] = {}
        self.groups: dict[str, int] = {}
        self.live: dict[Hashable, int] = {}  # where a block lies -> its row
        self._blocks: list[tuple[int, int, int, int, int]] = []
        self._stops: dict[int, tuple[int, int]] = {}  # row -> event and operator
        self._labels: list[int] = []
        self._groups: list[int] = []
        self._ops: list[tuple[int, int, float]] = []
        self._uses: list[tuple[int, int, int, bool]] = []

    def allocate(
        self, where: Hashable, size: int, *, label: str = "", group: str = "", op: int
    ) -> int:
        """Begin a block at this event; return its row."""
        if where in self.live:
            self.unseen += 1
            self.release(where, size, op=-1)
        self.live[where] = row = self._add(size, self.event, label, group, op)
        return row

    def release(
        self, where: Hashable, size: int, *, label: str = "", group: str = "", op: int
    ) -> int:
        """End a block at this event, or one that was there before; return its row."""
        row = self.live.pop(where, -1)
        if row < 0:
            row = self._add(size, 0, label, group, -1)
        self._stops[row] = (self.event, op)
        return row

    def add_existing(
        self, where: Hashable, size: int, *, label: str = "", group: str = ""
    ) -> int:
        """Tell of a block that was there before the first event and stays."""
        self.live[where] = row = self._add(size, 0, label, group, -1)
        return row

    def add_op(self, name: str, seconds: float, *, event: int | None = None) -> int:
        """Tell of an operator after this event; return its index."""
        at = self.event if event is None else event
        self._ops.append((self._name(name), at, seconds))
        return len(self._ops) - 1

    def use(self, row: int, *, op: int = -1, writes: bool = False) -> None:
        """Tell that a block is used at this event."""
        self._uses.append((row, self.event, op, writes))

    def history(
        self,
        *,
        source: str,
        device: str = "",
        seconds: list[float] | None = None,
        reserved_bytes: int = 0,
        steps: int = 0,
        notes: tuple[str, ...] = (),
    ) -> History:
        """Give all that was told, with blocks in order of their start."""
        if sum(block[0] for block in self._blocks) > MOST_TOTAL:
            raise FileError("names more bytes than any memory has")
        blocks = np.array(self._blocks, BLOCKS)
        if self._stops:
            rows = np.fromiter(self._stops, np.int64, len(self._stops))
            ends = np.array(list(self._stops.values()), np.int64)
            blocks["stop"][rows], blocks["stop_op"][rows] = ends[:, 0], ends[:, 1]
        order = np.argsort(blocks["start"], kind="stable")
        rank = np.empty(len(order), np.int32)
        rank[order] = np.arange(len(order))
        uses = np.array(self._uses, USES)
        uses["block"] = rank[uses["block"]]
        if self.unseen:
            notes += (f"{self.unseen} blocks end unseen: their releases are missing",)
        return History(
            source=source,
            device=device,
            events=self.event,
            blocks=blocks[order],
            names=tuple(self.names),
            label=np.array(self._labels, np.int32)[order],
            groups=tuple(self.groups) or ("",),
            group=np.array(self._groups, np.int32)[order],
            ops=np.array(self._ops, OPERATIONS),
            uses=uses,
            seconds=np.array(seconds or [], np.float64),
            reserved_bytes=reserved_bytes,
            steps=steps,
            notes=notes,
        )

    def _add(self, size: int, start: int, label: str, group: str, op: int) -> int:
        if not 0 <= size <= MOST_BYTES:
            raise FileError(f"has a block of {_short(size)} bytes")
        self._blocks.append((size, start, -1, op, -1))
        self._labels.append(self._name(label) if label else -1)
        self._groups.append(self.groups.setdefault(group, len(self.groups)))
        return len(self._blocks) - 1

    def _name(self, name: str) -> int:
        return self.names.setdefault(printable(name), len(self.names))


def printable(text: str) -> str:
    """Shorten a text from a file, and take out what would steer a terminal."""
    cut = text[:_LABEL_LENGTH]
    return (
        cut
        if cut.isprintable()
        else "".join(c if c.isprintable() else "?" for c in cut)
    )


def few(names: Iterable[object]) -> str:
    """List names in order, the first ones of many."""
    texts = sorted(map(str, names))
    more = f" and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
    return printable(", ".join(texts[:_LISTED])) + more


def whole(value: object, what: str, *, low: int = 0, high: int = 1 << 63) -> int:
    """Return a whole number within bounds, or refuse the file."""
    if type(value) is not int:
        raise FileError(f"is damaged: its {what} is no whole number")
    if not low <= value < high:
        raise FileError(f"is damaged: {_short(value)} is no {what}")
    return value


def _short(number: int) -> str:
    return str(number) if abs(number) < 1 << 64 else "far too many"
