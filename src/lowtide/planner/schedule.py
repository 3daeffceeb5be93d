# SPDX-License-Identifier: Apache-2.0
"""What a plan costs: one iteration on a simulated timeline (cpp/timeline.h).

The compute lane runs the operators in order and replays dropped values before their
use; the out lane writes swapped values in the order of saving, and their bytes go when
they are written; the in lane reads them back in the order of use, each as early as it
fits beside everything that runs up to its use. An operator waits for what it reads, and
for writes while memory is too full. More memory never makes the same plan slower.

An operator may exceed a budget that no plan could keep it within; the others may not.
What a replay touches must fit beside what is not saved for later, where there is
another way out for the value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lowtide import _core
from lowtide.planner.recompute import Lineage
from lowtide.trace import Trace

COPY_TAX = 0.06  # seconds of compute lost per second of a hidden copy
SMALL = 32 << 10  # bytes below which moving a value is not worth an action
LONGEST_CHAIN = 16  # values replayed for one use; longer ones count tenfold

Codes = NDArray[np.int8]


class Lanes(Protocol):
    """What the lower tier can do: bytes per second each way; 0 where there is none."""

    @property
    def write(self) -> float:
        """Bytes per second out."""

    @property
    def read(self) -> float:
        """Bytes per second back in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What a plan may choose, and how copies and replays are counted."""

    swap: bool = True
    recompute: bool = True
    swap_bytes: int | None = None  # at most, in the whole iteration; None: any amount
    copy_tax: float = COPY_TAX
    longest_chain: int = LONGEST_CHAIN


class Outcome(NamedTuple):
    """What one plan leads to under one budget; no times where it is not valid."""

    excess_bytes: int  # above what could be kept
    stuck: bool  # a replay has no room
    peak_bytes: int
    moved_bytes: int
    step_seconds: float
    exposed_seconds: float
    replay_seconds: float
    copy_seconds: float  # compute lost to copies that run beside it

    @property
    def valid(self) -> bool:
        """Whether the plan keeps to the limits."""
        return self.excess_bytes == 0 and not self.stuck


class Timetable:
    """An iteration, ready to try plans on."""

    def __init__(
        self,
        trace: Trace,
        lanes: Lanes,
        allowed: Allowed | None = None,
        lineage: Lineage | None = None,
        held: NDArray[np.bool_] | None = None,
    ) -> None:
        allowed = allowed or Allowed()
        lineage = lineage or Lineage.none(len(trace.values))
        ops, values = trace.ops, trace.values
        self.n_values = len(values)
        self.plain = trace.plain_bytes.astype(np.int64)
        last = len(ops)
        uses = values["first_use"]
        start = np.minimum(values["saved"] + 1, last).astype(np.int32)
        stop = np.where(uses < 0, last, np.minimum(uses, last)).astype(np.int32)
        movable = (values["bytes"] >= SMALL) & (stop > start + 1)
        if held is not None:  # by the program too: to move them frees nothing
            movable &= ~held
        may_swap = movable & (allowed.swap and lanes.write > 0 and lanes.read > 0)
        may_replay = movable & values["replayable"] & allowed.recompute
        if allowed.swap_bytes is not None:
            may_swap &= _dearest(values, may_swap, may_replay, allowed.swap_bytes)
        self.may = (may_swap * 1 + may_replay * 2).astype(np.int8)
        self.core = _core.simulator(
            np.ascontiguousarray(ops["seconds"]),
            self.plain,
            np.ascontiguousarray(values["bytes"]),
            start,
            np.maximum(stop, start),
            np.ascontiguousarray(values["seconds"]),
            np.where(may_swap & (uses >= 0), _replay_room(trace), 0),
            self.may,
            1 / lanes.write if may_swap.any() else 0.0,
            1 / lanes.read if may_swap.any() else 0.0,
            allowed.copy_tax,
            lineage.first,
            lineage.parents,
            allowed.longest_chain,
        )

    def run(self, plans: Codes, budget_bytes: int) -> list[Outcome]:
        """Try each row of codes under a budget."""
        rows = np.ascontiguousarray(np.atleast_2d(plans), np.int8)
        return [Outcome(*row) for row in self.core.run(rows, int(budget_bytes))]

    def floor(self) -> NDArray[np.int64]:
        """Give the least load that each operator can be brought to."""
        return self.core.floor()

    def points(self, codes: Codes) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Give (until, reads) of the plan that was tried last (see `Plan`)."""
        away = codes != 0
        return np.where(away, self.core.ends(), -1), self.core.begins()


def _dearest(
    values: NDArray[np.void],
    may_swap: NDArray[np.bool_],
    may_replay: NDArray[np.bool_],
    limit_bytes: int,
) -> NDArray[np.bool_]:
    """Choose who may be swapped where not all may: what costs most to have otherwise.

    What cannot be computed again comes first, then whatever takes longest per byte.
    """
    sizes = np.maximum(values["bytes"], 1)
    worth = np.where(may_replay, values["seconds"] / sizes, np.inf)
    chosen = np.zeros(len(values), np.bool_)
    left = limit_bytes
    for i in np.argsort(-worth, kind="stable"):
        if may_swap[i] and sizes[i] <= left:
            chosen[i] = True
            left -= int(sizes[i])
    return chosen


def _replay_room(trace: Trace) -> NDArray[np.int64]:
    """Compute what is there while each value is replayed, saved values left out."""
    ops, values = trace.ops, trace.values
    if len(ops) == 0:
        return np.zeros(len(values), np.int64)
    at_use = trace.other_bytes[np.clip(values["first_use"], 0, len(ops) - 1)]
    return np.asarray(at_use + values["scratch"], np.int64)
