# SPDX-License-Identifier: Apache-2.0
"""The joint planner: keep, swap or recompute, for all budgets of an iteration at once.

A *frontier* is a pool of plans, for every level of memory the fastest that was found
(cpp/frontier.h): greedily by cost per byte freed where the load is highest above the
level, for several prices of the copying lanes, then by local search. Which budget will
be asked for plays no part in finding them. A budget takes the fastest of all plans that
keep to it, so more memory never gets a slower plan, and a new budget costs one look at
the pool. Times are those of the simulated timeline (schedule.py).

Cost: a fixed effort, about a tenth of a second for 500 values and 1500 operators.
Weaknesses: several exchanges that help only together are found by luck, and a value
leaves for all of its window or not at all.
"""

from __future__ import annotations

import sys
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowtide.plan import KEEP, RECOMPUTE, Plan
from lowtide.planner.recompute import Lineage
from lowtide.planner.schedule import Allowed, Codes, Lanes, Outcome, Timetable
from lowtide.trace import Trace

EFFORT = 1 << 23  # operators and values looked at
_LEVELS = 64  # between the least peak of all plans and that without any
Rank: TypeAlias = tuple[int, bool, float, int]

_BATCH = 16  # plans tried at once
_BELOW = 8  # below: what still can be done where some operator cannot fit


def make_plan(
    trace: Trace,
    budget_bytes: int,
    lanes: Lanes,
    allowed: Allowed | None = None,
    *,
    lineage: Lineage | None = None,
) -> Plan:
    """Plan one iteration within a budget; a frontier is cheaper for several budgets."""
    return Frontier(trace, lanes, allowed, lineage=lineage).at(budget_bytes)


class Frontier:
    """The fastest plans found for one iteration, whatever the budget."""

    def __init__(
        self,
        trace: Trace,
        lanes: Lanes,
        allowed: Allowed | None = None,
        *,
        lineage: Lineage | None = None,
        held: NDArray[np.bool_] | None = None,
        effort: int = EFFORT,
    ) -> None:
        self.trace = trace
        self.lanes = lanes
        self.lineage = lineage or Lineage.none(len(trace.values))
        self.held = np.zeros(len(trace.values), np.bool_) if held is None else held
        self._timetable = Timetable(trace, lanes, allowed, lineage, held)
        self._effort = effort
        self._plans: Codes | None = None  # found at the first budget that needs any
        self._least = np.zeros(0)  # seconds of each with ample memory

    @property
    def searched(self) -> bool:
        """Whether any budget has asked for more than to keep everything."""
        return self._plans is not None

    @property
    def plans(self) -> Codes:
        """All plans of the pool, one a row, fastest first where memory is ample."""
        if self._plans is None:
            self._sort(self._find())
        assert self._plans is not None
        return self._plans

    def reuse(self, plans: Codes) -> None:
        """Take plans that were found before for this iteration, and search no more.

        Raises:
            ValueError: they do not suit it.
        """
        may, n = self._timetable.may, self._timetable.n_values
        if plans.ndim != 2 or plans.shape[1] != n or not len(plans):
            raise ValueError("a plan has one code a value")
        ways = np.array([0, 1, 2, 2], np.int8)
        if not ((plans >= 0) & (plans < len(ways))).all():
            raise ValueError("a plan has a code that means nothing")
        if (ways[plans] & ~may).any():
            raise ValueError("a plan moves a value that may not be moved so")
        self._sort(plans)

    def _sort(self, plans: Codes) -> None:
        ample = self._timetable.run(plans, self.trace.plain_peak_bytes)
        least = np.array([outcome.step_seconds for outcome in ample])
        order = np.argsort(least, kind="stable")
        self._plans, self._least = plans[order], least[order]

    def at(self, budget_bytes: int) -> Plan:
        """Take the fastest plan that keeps to a budget, or comes nearest to it."""
        fits_whole = budget_bytes >= self.trace.plain_peak_bytes
        codes = self._keep()[0] if fits_whole else self._fastest(budget_bytes)
        (outcome,) = self._timetable.run(codes, budget_bytes)
        until, reads = self._timetable.points(codes)
        return Plan(
            key=self.trace.key,
            budget_bytes=budget_bytes,
            codes=np.minimum(codes, RECOMPUTE),
            until=until,
            reads=reads,
            plain_peak_bytes=self.trace.plain_peak_bytes,
            peak_bytes=outcome.peak_bytes,
            plain_seconds=self.trace.seconds,
            step_seconds=outcome.step_seconds,
            exposed_seconds=outcome.exposed_seconds,
            replay_seconds=outcome.replay_seconds,
            copy_seconds=outcome.copy_seconds,
        )

    def _fastest(self, budget_bytes: int) -> Codes:
        """Look through the pool, the plans that could be fastest first."""
        plans, least = self.plans, self._least
        best: Rank = (sys.maxsize, True, 0.0, 0)
        fastest: Codes = plans[0]
        for first in range(0, len(plans), _BATCH):
            if best[:2] == (0, False) and least[first] > best[2]:
                break  # no plan from here on can be faster
            batch = plans[first : first + _BATCH]
            outcomes = self._timetable.run(batch, budget_bytes)
            p = min(range(len(batch)), key=lambda i: _rank(outcomes[i]))
            if _rank(outcomes[p]) < best:
                best, fastest = _rank(outcomes[p]), batch[p]
        return fastest

    def _keep(self) -> Codes:
        return np.full((1, self._timetable.n_values), KEEP, np.int8)

    def _find(self) -> Codes:
        levels = _levels(self._timetable.plain, self._timetable.floor())
        if len(levels) == 0:
            return self._keep()
        found, count = self._timetable.core.frontier(levels, self._effort)
        rows = found.reshape(count, self._timetable.n_values)
        return np.unique(np.concatenate([self._keep(), rows]), axis=0)


def _levels(plain: NDArray[np.int64], floor: NDArray[np.int64]) -> NDArray[np.int64]:
    """Choose levels from the lowest floor to the plain peak."""
    if len(plain) == 0:
        return np.zeros(0, np.int64)
    least, most = int(floor.max()), int(plain.max())
    below = np.linspace(int(floor.min()), least, _BELOW, endpoint=False)
    between = np.linspace(least, most, _LEVELS)
    return np.unique(np.concatenate([below, between]).astype(np.int64))


def _rank(outcome: Outcome) -> Rank:
    return (
        outcome.excess_bytes,
        outcome.stuck,
        outcome.step_seconds,
        outcome.moved_bytes,
    )
