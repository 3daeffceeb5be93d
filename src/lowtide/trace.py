"""A Trace: what one iteration did to memory, as bulk arrays.

Times are seconds, sizes bytes, positions operator indices counted from the start of
the iteration; lifetimes are half open, [saved, first_use).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

OPS = np.dtype(
    [
        ("seconds", "f8"),  # time in the operator itself
        ("live", "i8"),  # live bytes at its start, as they were under the budget
        ("need", "i8"),  # bytes it needed above `live`
        ("managed", "i8"),  # of the live bytes, those of saved tensors in memory
        ("absent", "i8"),  # bytes of saved tensors that were not in memory
    ]
)

VALUES = np.dtype(
    [
        ("bytes", "i8"),
        ("saved", "i4"),  # operator index at which it was first saved
        ("first_use", "i4"),  # operator index of its first use, -1 when never used
        ("seconds", "f8"),  # to compute it again from saved or lasting values
        ("replayable", "?"),
        ("scratch", "i8"),  # largest bytes one operator of that replay touches
    ]
)

BLOCKS = np.dtype(
    [
        ("bytes", "i8"),  # as requested
        ("start", "i8"),  # event at which it is allocated; events count from 0
        ("stop", "i8"),  # event at which it is released, -1 when never
        ("start_op", "i4"),  # operator that runs then, -1 when none or unknown
        ("stop_op", "i4"),
    ]
)


@dataclass(frozen=True, slots=True)
class Trace:
    """One observed iteration: its operators and its saved values, in order."""

    ops: NDArray[np.void]  # dtype OPS
    values: NDArray[np.void]  # dtype VALUES
    key: int  # hash of the sequence of saved values

    @property
    def plain_peak_bytes(self) -> int:
        """Peak live bytes of this iteration had nothing left memory."""
        if len(self.ops) == 0:
            return 0
        ops = self.ops
        return int((ops["live"] + ops["absent"] + ops["need"]).max())

    @property
    def seconds(self) -> float:
        """Time spent in operators."""
        return float(self.ops["seconds"].sum())
