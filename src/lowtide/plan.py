# SPDX-License-Identifier: Apache-2.0
"""A Plan: for each saved value of an iteration, whether it stays, and what that costs.

A value that does not stay is *away* during the operators [saved + 1, until): from the
one after it was saved up to the one that needs it. A swapped value is written to the
lower tier at the beginning of that window and read back from `reads` on; a recomputed
one is dropped and computed again before operator `until`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

KEEP, SWAP, RECOMPUTE = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do with every saved value of one iteration, and what that leads to."""

    key: int  # of the trace that it was made from
    budget_bytes: int
    codes: NDArray[np.int8]  # KEEP, SWAP or RECOMPUTE, in the order of saving
    until: NDArray[np.int32]  # the operator that needs the value; -1 where it stays
    reads: NDArray[np.int32]  # read back before this operator; -1 where nothing is
    plain_peak_bytes: int
    peak_bytes: int
    plain_seconds: float
    step_seconds: float  # with all that follows
    exposed_seconds: float  # waiting for copies
    replay_seconds: float
    copy_seconds: float  # compute lost to copies that run beside it

    @property
    def fits(self) -> bool:
        """Whether the planned peak is within the budget."""
        return self.peak_bytes <= self.budget_bytes

    @property
    def slowdown(self) -> float:
        """Planned time over the time of a step that keeps everything."""
        return self.step_seconds / self.plain_seconds if self.plain_seconds else 1.0


SAVED = np.dtype(
    [
        ("number", "i8"),  # of what is told of it (runtime.signature)
        ("told", "i4"),  # index into `Learnt.told`: the same in words
        ("parents", "i4"),  # how many saved values it is computed from
        ("held", "?"),  # by the program too, so that moving it frees nothing
    ]
)
ITERATIONS = np.dtype(
    [
        ("base", "i8"),  # live bytes at its first saved value
        ("write", "f8"),  # bytes per second that the plans count on
        ("read", "f8"),
        ("ops", "i4"),  # rows of each table that belong to it
        ("values", "i4"),
        ("plans", "i4"),
    ]
)
NEEDS = np.dtype([("operator", "i8"), ("bytes", "i8")])


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """The iterations that a run has learnt, with the plans of each.

    Tables hold the rows of one iteration after another.
    """

    lowtide: str  # versions
    torch: str
    device: str
    policy: str
    budget_bytes: int
    iterations: NDArray[np.void]  # dtype ITERATIONS, the latest last
    ops: NDArray[np.void]  # dtype trace.OPS
    values: NDArray[np.void]  # dtype trace.VALUES
    saved: NDArray[np.void]  # dtype SAVED, one a value
    parents: NDArray[np.int32]  # positions among the values of the iteration
    codes: NDArray[np.int8]  # of every plan, a row a value; planner.planner's codes
    needs: NDArray[np.void]  # dtype NEEDS: bytes that operators need
    told: tuple[str, ...]
