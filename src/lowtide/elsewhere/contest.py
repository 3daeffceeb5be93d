# SPDX-License-Identifier: Apache-2.0
"""The fastest way to run a recorded iteration within a budget, found by trying.

The joint planner goes by a model of the iteration; this runs what it proposes on the
simulator, beside what the published policies would do, and takes what ends first. Of a
published policy's run only *what* left and how is taken over, as a plan that `auto`
follows with its own order and prefetching; only where that does not help, the run
itself. With `hosting`, parameters and optimizer state may live on the host besides.
What keeps to a budget keeps to every larger one, so results found for less memory stay
in the contest: more memory never makes the winner slower.

Cost: about ten simulated iterations a budget, each O(operators + actions).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.plan import KEEP, RECOMPUTE, SWAP
from lowtide.planner.planner import EFFORT, Frontier
from lowtide.planner.recompute import Lineage
from lowtide.planner.schedule import Allowed
from lowtide.scheduler.director import RULES, Lanes, Rules
from lowtide.scheduler.scheduler import DROP
from lowtide.simulator.forecast import forecast, managed_versions, parents_of
from lowtide.simulator.hosting import Hosted, host, hostable
from lowtide.simulator.simulator import PATIENCE, Outcome, planned_budget, simulate
from lowtide.trace import Graph

AUTO, KEEPING = "auto", "keep"
RIVALS = ("msps", "dtr", "delta", "delta-knapsack")
HOSTING = "auto, parameters and optimizer state on the host"
_AIMS = (1.0, 0.97, 0.93)  # of the budget: what plans are asked for
_HOSTED = (1, 2, 3)  # thirds of what lasts that live on the host
_NEEDLESS = 1.02  # a slow-down at which that is not tried
_RIVALRY = 1.5  # times the best slow-down so far: a policy slower than that is given up
_LEAST_LANE = 0.1  # of the link that is planned with, whatever else it carries


@dataclass(frozen=True, slots=True)
class Codes:
    """What `auto` follows of a plan (simulator.Plan)."""

    codes: NDArray[np.int8]
    reads: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Result:
    """One run in the contest."""

    outcome: Outcome
    found_by: str  # "auto", "like msps", or the policy that ran itself
    ran: str  # the policy that the simulator ran
    plan: Codes | None  # what `auto` followed; None: a policy ran itself
    hosted: Hosted | None = None  # what lives on the host


class Contest:
    """All that was tried for one iteration, by budget."""

    def __init__(
        self,
        graph: Graph,
        lanes: Lanes,
        *,
        rivals: Sequence[str] = RIVALS,
        effort: int = EFFORT,
        hosting: bool = False,
    ) -> None:
        self.graph = graph
        self.lanes = lanes
        self.rivals = tuple(rivals)
        self._rows = {v: i for i, v in enumerate(managed_versions(graph))}
        self._effort = effort
        self._frontier = self._frontier_of(RULES[AUTO])
        self._results: list[Result] = []
        self._hosting = hosting and lanes.open
        self._hosts: list[tuple[Hosted, Frontier]] = []

    def _frontier_of(self, rules: Rules, hosted: Hosted | None = None) -> Frontier:
        # the simulator does not let copies disturb the compute
        allowed = Allowed(swap=rules.swap, recompute=rules.recompute, copy_tax=0.0)
        trace, lanes = forecast(self.graph), self.lanes
        if hosted is not None:
            trace.ops["live"] -= hosted.away_bytes(self.graph, lanes)
            both = lanes.write + lanes.read
            busy = hosted.moved_bytes / (both * self.graph.seconds)
            left = max(1 - busy, _LEAST_LANE)
            lanes = Lanes(lanes.write * left, lanes.read * left)
        return Frontier(
            trace,
            lanes,
            allowed,
            lineage=Lineage.of(parents_of(self.graph)),
            effort=self._effort,
        )

    def _hosted(self) -> list[tuple[Hosted, Frontier]]:
        """Let more and more of what lasts live on the host."""
        if not self._hosts:
            names = hostable(self.graph)
            for part in _HOSTED:
                some = names[: -(-len(names) * part // max(_HOSTED))]
                hosted = host(self.graph, some, self.lanes)
                frontier = self._frontier_of(RULES[AUTO], hosted)
                self._hosts.append((hosted, frontier))
        return self._hosts

    def at(self, budget_bytes: int, *, enough: float = 0.0) -> Result:
        """Return the fastest run that keeps to a budget, or one that does not.

        `enough`: a slow-down at which the search ends.
        """
        for result in self._tries(budget_bytes):
            self._results.append(result)
            outcome = result.outcome
            if outcome.fits and outcome.slowdown <= enough:
                break
        return self.best(budget_bytes) or self._results[-1]

    def plan_for(self, policy: str, budget_bytes: int) -> Codes | None:
        """Plan for a policy that follows a plan, within what it may do."""
        rules = RULES[policy]
        if not rules.planned or policy == KEEPING:
            return None
        found = self._frontier_of(rules).at(planned_budget(self.graph, budget_bytes))
        return Codes(found.codes, found.reads)

    def best(self, budget_bytes: int) -> Result | None:
        """Return the fastest run so far that keeps to a budget."""
        return min(
            (
                result
                for result in self._results
                if result.outcome.fits and result.outcome.peak_bytes <= budget_bytes
            ),
            key=_merit,
            default=None,
        )

    def _tries(self, budget: int) -> Iterator[Result]:
        seen: set[bytes] = set()
        if self.graph.plain_peak_bytes <= budget:
            outcome = simulate(self.graph, KEEPING, budget, self.lanes)
            yield Result(outcome, AUTO, KEEPING, None)
            return
        for aim in _AIMS:
            found = self._frontier.at(planned_budget(self.graph, int(aim * budget)))
            plan = Codes(found.codes, found.reads)
            key = plan.codes.tobytes() + plan.reads.tobytes()
            if key not in seen:
                seen.add(key)
                yield self._follow(plan, budget, AUTO)
        for rival in self.rivals:
            best = self.best(budget)
            patience = PATIENCE if best is None else _RIVALRY * best.outcome.slowdown
            outcome = simulate(self.graph, rival, budget, self.lanes, patience=patience)
            yield Result(outcome, rival, rival, None)
            if outcome.fits:
                yield self._follow(self._imitate(outcome), budget, f"like {rival}")

        if self._hosting:
            yield from self._host_tries(budget)

    def _host_tries(self, budget: int) -> Iterator[Result]:
        """Try to have what lasts on the host, where that is not needless."""
        best = self.best(budget)
        if best is not None and best.outcome.slowdown < _NEEDLESS:
            return
        for hosted, frontier in self._hosted():
            for aim in _AIMS[1:]:
                found = frontier.at(planned_budget(self.graph, int(aim * budget)))
                plan = Codes(found.codes, found.reads)
                outcome = simulate(
                    self.graph, AUTO, budget, self.lanes, plan=plan, hosted=hosted
                )
                yield Result(outcome, HOSTING, AUTO, plan, hosted)

    def _follow(self, plan: Codes, budget: int, found_by: str) -> Result:
        outcome = simulate(self.graph, AUTO, budget, self.lanes, plan=plan)
        return Result(outcome, found_by, AUTO, plan)

    def _imitate(self, outcome: Outcome) -> Codes:
        """Take over how each value left first."""
        codes = np.full(len(self._rows), KEEP, np.int8)
        for _, action, version in reversed(outcome.actions):
            codes[self._rows[version]] = RECOMPUTE if action == DROP else SWAP
        return Codes(codes, np.full(len(codes), -1, np.int32))


def _merit(result: Result) -> tuple[float, int, int]:
    """Order by time; of the same, by what is moved and by memory."""
    outcome = result.outcome
    moved = outcome.written_bytes + outcome.read_bytes
    return round(outcome.seconds, 9), moved, outcome.peak_bytes
