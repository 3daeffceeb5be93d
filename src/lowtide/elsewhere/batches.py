# SPDX-License-Identifier: Apache-2.0
"""The largest batch that runs within a budget, by doubling and bisection.

A batch runs plainly where its peak keeps to the budget, and with lowtide where some
plan does and is not slower than is allowed. Both are taken to be true up to some batch
and false from there on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lowtide.elsewhere.contest import Contest
from lowtide.planner.planner import EFFORT
from lowtide.scheduler.director import Lanes
from lowtide.trace import Graph

MOST = 1 << 20

Make = Callable[[int], Graph]  # an iteration of a batch, with the device's times


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The largest batches, 0 where not even one sample fits."""

    plain: int
    ours: int
    slowdown: float  # of ours, against the same batch in ample memory
    found_by: str

    @property
    def ratio(self) -> float | None:
        """Ours over plain; None where plain does not run at all."""
        return self.ours / self.plain if self.plain else None


def largest(runs: Callable[[int], bool], start: int = 1, finest: float = 0.0) -> int:
    """Find the largest number for which something runs; 0: not even for one.

    Arguments:
        runs: true up to some number, false from there on.
        start: where to begin.
        finest: how exactly to find it, as a part of it; 0: exactly.
    """
    low, high = 0, max(start, 1)
    while high <= MOST and runs(high):
        low, high = high, 2 * high
    return _between(runs, low, high, finest)


def near(runs: Callable[[int], bool], guess: int, finest: float = 0.0) -> int:
    """Find what `largest` finds, from a good guess: in steps that double."""
    high = max(guess, 1)
    step = max(1, high // 16)
    if runs(high):
        low, high = high, high + step
        while high <= MOST and runs(high):
            step *= 2
            low, high = high, high + step
    else:
        low = max(high - step, 0)
        while low > 0 and not runs(low):
            step *= 2
            low, high = max(low - step, 0), low
    return _between(runs, low, high, finest)


def _between(
    runs: Callable[[int], bool], low: int, high: int, finest: float = 0.0
) -> int:
    """Halve the way between a number that runs and one that does not."""
    while high - low > max(1, int(finest * low)):
        middle = (low + high) // 2
        if runs(middle):
            low = middle
        else:
            high = middle
    return low


def max_batch(
    make: Make,
    budget_bytes: int,
    lanes: Lanes,
    *,
    most_slowdown: float,
    finest: float = 0.0,
    effort: int = EFFORT,
    progress: Callable[[str], None] = lambda _: None,
) -> Batches:
    """Find the largest batch without and with lowtide.

    Arguments:
        make: records, or makes up, an iteration of a batch.
        budget_bytes: memory for tensors.
        lanes: the link to the host.
        most_slowdown: against the same batch in ample memory.
        finest: how exactly to find the batches, as a part of them; 0: exactly.
        effort: of the planner, for each batch.
        progress: told what is tried.
    """

    def fits(batch: int) -> bool:
        progress(f"batch {batch} as it is")
        return make(batch).plain_peak_bytes <= budget_bytes

    found: dict[int, tuple[float, str]] = {0: (1.0, "")}

    def runs(batch: int) -> bool:
        progress(f"batch {batch} with a plan")
        contest = Contest(make(batch), lanes, effort=effort)
        result = contest.at(budget_bytes, enough=most_slowdown)
        outcome = result.outcome
        found[batch] = (outcome.slowdown, result.found_by)
        return outcome.fits and outcome.slowdown <= most_slowdown

    plain = largest(fits, finest=finest)
    ours = largest(runs, max(2 * plain, 1), finest)
    if ours not in found:
        runs(ours)
    slowdown, found_by = found[ours]
    return Batches(plain=plain, ours=ours, slowdown=slowdown, found_by=found_by)
