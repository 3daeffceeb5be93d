# SPDX-License-Identifier: Apache-2.0
"""What an allocator would be asked for in a simulated iteration: blocks and lives.

A watched buffer notices when its bytes come and go, by whichever way. A version that
overwrites another lies in the same block. What an operator needs beside its outputs is
a block that lives while it runs. Times count such events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.simulator.buffers import Buffer, Clock, Operator

BLOCK = np.dtype([("born", "i8"), ("dead", "i8"), ("bytes", "i8")])
_PRESENCE = frozenset({"resident", "passing", "arrives"})


class WatchedBuffer(Buffer):
    """A buffer that tells a watch when it comes and goes."""

    __slots__ = ("watch",)
    watch: Watch | None

    def __init__(self, index: int, row: tuple[int, ...], clock: Clock) -> None:
        object.__setattr__(self, "watch", None)
        super().__init__(index, row, clock)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, and tell the watch of what that changes."""
        object.__setattr__(self, name, value)
        if self.watch is not None and name in _PRESENCE:
            self.watch.look(self)


class Watch:
    """Collects the blocks of one simulated iteration."""

    def __init__(self) -> None:
        self.now = 0
        self._inside: dict[int, int] = {}  # block, by version that is in memory
        self._holders: list[int] = []  # versions in each block
        self._born: list[int] = []
        self._dead: list[int] = []
        self._bytes: list[int] = []
        self._left: tuple[int, int] = (-1, -1)  # version and block of the last event
        self._running = -1

    def begin(self, buffers: Sequence[Buffer]) -> None:
        """Look at what is there before."""
        for buffer in buffers:
            assert isinstance(buffer, WatchedBuffer)
            if buffer.resident:
                self._come(buffer)
            buffer.watch = self
        self._born = [0] * len(self._born)

    def operator(self, operator: Operator) -> None:
        """Note what an operator of the program needs for itself."""
        self._running = operator.index
        self._scratch(operator.workspace)

    def look(self, buffer: Buffer) -> None:
        """Note that a buffer came or went, if it did."""
        inside = buffer.resident or buffer.passing or buffer.arrives is not None
        if inside == (buffer.index in self._inside):
            return
        if not inside:
            self._go(buffer)
            return
        op = buffer.op
        copied_in = buffer.arrives is not None or self._left[0] == buffer.index
        if op is not None and op.index != self._running and not copied_in:
            self._scratch(op.workspace)  # it is computed again
        self._come(buffer)

    def _come(self, buffer: Buffer) -> None:
        version, block = self._left
        if version == buffer.index:  # it only changed its state: it never left
            self._dead[block] = -1
            self._left = (-1, -1)
        else:
            block = self._inside.get(buffer.reuses, -1)
            if block < 0:
                block = self._new(buffer.nbytes)
        self._holders[block] += 1
        self._inside[buffer.index] = block

    def _go(self, buffer: Buffer) -> None:
        block = self._inside.pop(buffer.index)
        self._holders[block] -= 1
        if self._holders[block] == 0:
            self.now += 1
            self._dead[block] = self.now
            self._left = (buffer.index, block)

    def _new(self, n_bytes: int) -> int:
        self.now += 1
        self._left = (-1, -1)
        self._born.append(self.now)
        self._dead.append(-1)
        self._bytes.append(n_bytes)
        self._holders.append(0)
        return len(self._born) - 1

    def _scratch(self, n_bytes: int) -> None:
        if n_bytes > 0:
            block = self._new(n_bytes)
            self.now += 1
            self._dead[block] = self.now

    def blocks(self) -> NDArray[np.void]:
        """Give all blocks; what stays dies at the end."""
        rows = np.zeros(len(self._born), BLOCK)
        rows["born"], rows["bytes"] = self._born, self._bytes
        dead = np.array(self._dead, np.int64)
        rows["dead"] = np.where(dead < 0, self.now + 1, dead)
        return rows
