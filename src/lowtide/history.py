# SPDX-License-Identifier: Apache-2.0
"""A History: what somebody else's file says about memory, in lowtide's terms.

Events count from 1 in the order of the file; event 0 is the moment before, so a block
that starts there was in memory already. Lifetimes are half open, [start, stop), and a
stop of -1 says that the file does not show the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.trace import BLOCKS as BLOCKS

OPERATIONS = np.dtype(
    [
        ("name", "i4"),  # index into History.names
        ("event", "i8"),  # the last event before it
        ("seconds", "f8"),  # nan when unknown
    ]
)

USES = np.dtype(
    [
        ("block", "i4"),  # index into History.blocks
        ("event", "i8"),
        ("op", "i4"),  # index into History.ops, -1 when unknown
        ("writes", "?"),
    ]
)

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Blocks and what else a file knows about them."""

    source: str  # what kind of file it was
    device: str  # whose memory: "cuda:0", "cpu", or "" where the file does not say
    events: int  # of the file, without event 0
    blocks: NDArray[np.void]  # dtype BLOCKS, in order of start
    names: tuple[str, ...]  # of operators and places, each once
    label: NDArray[np.int32]  # of each block, into `names`; -1: none
    groups: tuple[str, ...]  # blocks of different groups must share no bytes
    group: NDArray[np.int32]  # of each block
    ops: NDArray[np.void]
    uses: NDArray[np.void]
    seconds: NDArray[np.float64]  # of each event, from 1; or empty
    reserved_bytes: int  # peak an allocator took from the device; 0: unknown
    steps: int  # optimizer steps that are marked in the file
    notes: tuple[str, ...]

    @property
    def starts(self) -> Ints:
        """The events at which blocks are allocated."""
        return self.blocks["start"].astype(np.int64)

    @property
    def stops(self) -> Ints:
        """The events from which blocks are gone; later than all where never."""
        stops = self.blocks["stop"].astype(np.int64)
        stops[stops < 0] = self.events + 1
        return stops

    @property
    def live_curve(self) -> Ints:
        """The live bytes after each event, event 0 included."""
        change = np.zeros(self.events + 2, np.int64)
        np.add.at(change, self.starts, self.blocks["bytes"])
        np.subtract.at(change, self.stops, self.blocks["bytes"])
        return np.cumsum(change)[:-1]

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are alive at once."""
        return int(self.live_curve.max())

    def name_of(self, block: int) -> str:
        """Tell where a block comes from, or "" where the file does not."""
        label = int(self.label[block])
        return self.names[label] if label >= 0 else ""
