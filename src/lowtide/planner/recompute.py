# SPDX-License-Identifier: Apache-2.0
"""Which saved values are computed from which: what replays share.

Where a dropped value is made from another dropped one, replaying the first replays the
second too. The planner weighs two ways (cpp/timeline.h): the second is dropped again
and computed once more for its own use, or it stays from then on and is computed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Lineage:
    """For value `i`, the saved values `parents[first[i]:first[i + 1]]` it is made from.

    Parents were saved before. With a lineage, the `seconds` of a value are those from
    its parents; without one, those from what always stays.
    """

    first: NDArray[np.int32]
    parents: NDArray[np.int32]

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> Lineage:
        """Make one from the list of each value's parents."""
        lists = [list(row) for row in rows]
        ends = np.cumsum([0, *map(len, lists)])
        flat = [parent for row in lists for parent in row]
        return cls(ends.astype(np.int32), np.array(flat, np.int32))

    @classmethod
    def none(cls, n_values: int) -> Lineage:
        """Make one in which no value needs another."""
        return cls(np.zeros(n_values + 1, np.int32), np.zeros(0, np.int32))
