# SPDX-License-Identifier: Apache-2.0
"""The trade-off of an iteration: what each budget costs in time.

Budgets are parts of the plain peak, from all of it downwards, and the smallest one that
was found to run. The one worth it is the knee of the curve: where memory saved, as a
part of all that can be saved, is furthest ahead of time lost, as a part of all that can
be lost (Satopaa et al., 2011, "Finding a kneedle in a haystack").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowtide.elsewhere.contest import Contest, Result
from lowtide.scheduler.scheduler import DROP
from lowtide.simulator.forecast import managed_versions
from lowtide.trace import Graph

PARTS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1)
THRASHES = 2.0  # a slow-down from which nobody would want to run
_FINEST = 0.01  # of the plain peak: how well the smallest budget is known

Progress = Callable[[int, int], None]  # budgets tried, budgets in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One budget: what it costs, and where the saved tensors are."""

    budget_bytes: int
    peak_bytes: int
    seconds: float
    slowdown: float
    exposed_seconds: float
    replay_seconds: float
    kept_bytes: int
    swapped_bytes: int
    recomputed_bytes: int
    found_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """All budgets, the largest first."""

    plain_peak_bytes: int
    plain_seconds: float
    points: tuple[Point, ...]
    smallest_bytes: int  # the smallest budget that was found to run
    knee: int  # the point that is worth it, -1: none

    @property
    def worth_it(self) -> Point | None:
        """The knee, where there is one."""
        return self.points[self.knee] if self.knee >= 0 else None


def trade_off(
    contest: Contest,
    parts: Sequence[float] = PARTS,
    progress: Progress = lambda done, of: None,
) -> Curve:
    """Find the whole curve; takes about ten simulated iterations a budget."""
    graph, plain = contest.graph, contest.graph.plain_peak_bytes
    found: dict[int, Result] = {}
    fits, fails = plain, 0
    of = len(parts) + 6
    for done, part in enumerate(parts):
        progress(done, of)
        if _runs(found, contest, int(part * plain)):
            fits = int(part * plain)
            continue
        fails = int(part * plain)
        break
    while fits - fails > _FINEST * plain:
        progress(min(len(found), of - 1), of)
        middle = (fits + fails) // 2
        if _runs(found, contest, middle):
            fits = middle
        else:
            fails = middle
    # what was found for less memory since may be faster for more
    points = [point_of(graph, n, contest.best(n) or found[n]) for n in found]
    points.sort(key=lambda point: -point.budget_bytes)
    return Curve(
        plain_peak_bytes=plain,
        plain_seconds=graph.seconds,
        points=tuple(points),
        smallest_bytes=min(found, default=plain),
        knee=knee_of(points),
    )


def _runs(found: dict[int, Result], contest: Contest, budget: int) -> bool:
    result = contest.at(budget)
    if not result.outcome.fits:
        return False
    found[budget] = result
    return True


def point_of(graph: Graph, budget_bytes: int, result: Result) -> Point:
    """Sum a run up."""
    outcome = result.outcome
    managed = managed_versions(graph)
    sizes = graph.versions["bytes"]
    ways = ways_of(result)
    recomputed = sum(int(sizes[i]) for i, way in ways.items() if way == DROP)
    swapped = sum(int(sizes[i]) for i, way in ways.items() if way != DROP)
    return Point(
        budget_bytes=budget_bytes,
        peak_bytes=outcome.peak_bytes,
        seconds=outcome.seconds,
        slowdown=outcome.slowdown,
        exposed_seconds=outcome.exposed_seconds,
        replay_seconds=outcome.replay_seconds,
        kept_bytes=int(sizes[managed].sum()) - recomputed - swapped,
        swapped_bytes=swapped,
        recomputed_bytes=recomputed,
        found_by=result.found_by,
    )


def ways_of(result: Result) -> dict[int, str]:
    """Tell how each version that left did so first."""
    ways: dict[int, str] = {}
    for _, action, version in result.outcome.actions:
        ways.setdefault(version, action)
    return ways


def knee_of(points: Sequence[Point]) -> int:
    """Choose the point that is worth it, the largest budget first; -1: none."""
    if len(points) < 3:
        return -1
    most, least = points[0].budget_bytes, points[-1].budget_bytes
    slowest = max(min(point.slowdown, THRASHES) for point in points)
    if most <= least or slowest <= 1.0:
        return len(points) - 1

    def ahead(point: Point) -> float:
        saved = (most - point.budget_bytes) / (most - least)
        return saved - (min(point.slowdown, THRASHES) - 1.0) / (slowest - 1.0)

    return max(range(len(points)), key=lambda i: ahead(points[i]))
