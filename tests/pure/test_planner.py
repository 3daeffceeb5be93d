# SPDX-License-Identifier: Apache-2.0
"""The joint planner: limits kept, more memory never slower, near the optimum."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from lowtide.plan import KEEP, RECOMPUTE, SWAP, Plan
from lowtide.planner.planner import Frontier, make_plan
from lowtide.planner.recompute import Lineage
from lowtide.planner.schedule import Allowed, Timetable
from lowtide.trace import Trace
from tests.pure.iterations import (
    CLOSED,
    FAST,
    LINKS,
    MIB,
    SLOW,
    UNEVEN,
    Link,
    Value,
    trace_of,
    traces,
    trained,
    wild,
)

exhaustive = settings(max_examples=60, deadline=None, derandomize=True, database=None)
links = st.sampled_from(LINKS)
shares = st.floats(0, 1.1)  # of the plain peak
BOTH = Allowed()
QUICK = 1 << 21  # effort that is enough for a few values


def loads_under(trace: Trace, plan: Plan) -> NDArray[np.int64]:
    """Work out what memory holds, but for writes that are under way."""
    ops = trace.ops
    load = ops["live"] + ops["absent"] + ops["need"]
    for value, code, until, read in zip(
        trace.values, plan.codes, plan.until, plan.reads, strict=True
    ):
        if code == KEEP:
            continue
        back = min(until, read) if code == SWAP and read >= 0 else until
        load[value["saved"] + 1 : back] -= value["bytes"]
    return load


@exhaustive
@given(traces(), shares, links)
def test_every_operator_keeps_to_the_budget_where_any_plan_could(
    trace: Trace, share: float, link: Link
) -> None:
    budget = int(share * trace.plain_peak_bytes)
    plan = Frontier(trace, link, effort=QUICK).at(budget)
    floor = Timetable(trace, link).floor()
    load = loads_under(trace, plan)
    assert (load <= np.maximum(budget, floor)).all()
    assert plan.peak_bytes >= load.max()
    assert plan.peak_bytes <= max(budget, floor.max())
    assert plan.step_seconds >= plan.plain_seconds + plan.replay_seconds
    if budget >= trace.plain_peak_bytes:
        assert not plan.codes.any()
        assert plan.slowdown == pytest.approx(1)


@exhaustive
@given(st.data(), traces(), shares, shares, links)
def test_whatever_is_made_from_what_budgets_are_kept_and_more_is_never_slower(
    data: st.DataObject, trace: Trace, share: float, other: float, link: Link
) -> None:
    rows = [
        data.draw(st.lists(st.integers(0, i - 1), max_size=2, unique=True)) if i else []
        for i in range(len(trace.values))
    ]
    frontier = Frontier(trace, link, lineage=Lineage.of(rows), effort=QUICK)
    floor = Timetable(trace, link).floor()
    seconds = []
    for budget in sorted(int(s * trace.plain_peak_bytes) for s in (share, other)):
        plan = frontier.at(budget)
        assert (loads_under(trace, plan) <= np.maximum(budget, floor)).all()
        assert plan.step_seconds >= plan.plain_seconds + plan.replay_seconds - 1e-9
        seconds.append(plan.step_seconds)
    assert seconds[1] <= seconds[0] + 1e-9


@exhaustive
@given(traces(), shares, links, st.booleans(), st.booleans())
def test_plans_hold_only_what_is_possible_and_allowed(
    trace: Trace, share: float, link: Link, swap: bool, recompute: bool
) -> None:
    budget = int(share * trace.plain_peak_bytes)
    allowed = Allowed(swap=swap, recompute=recompute)
    plan = Frontier(trace, link, allowed, effort=QUICK).at(budget)
    for value, code in zip(trace.values, plan.codes, strict=True):
        assert code in (KEEP, SWAP, RECOMPUTE)
        assert code != SWAP or (swap and link.write > 0)
        assert code != RECOMPUTE or (recompute and value["replayable"])
        assert code == KEEP or value["bytes"] >= MIB // 4


@exhaustive
@given(traces(), shares, shares, links)
def test_more_memory_is_never_slower(
    trace: Trace, share: float, other: float, link: Link
) -> None:
    tight, loose = sorted(int(s * trace.plain_peak_bytes) for s in (share, other))
    plans = [
        Frontier(trace, link, effort=QUICK).at(budget) for budget in (tight, loose)
    ]
    assert plans[1].step_seconds <= plans[0].step_seconds + 1e-9


@exhaustive
@given(st.data(), traces(), shares, shares, links)
def test_the_same_plan_is_never_slower_with_more_memory(
    data: st.DataObject, trace: Trace, share: float, other: float, link: Link
) -> None:
    table = Timetable(trace, link)
    codes = np.array(
        [
            data.draw(st.sampled_from([c for c in (0, 1, 2) if c == 0 or may & c]))
            for may in table.may
        ],
        np.int8,
    )
    tight, loose = sorted(int(s * trace.plain_peak_bytes) for s in (share, other))
    (slow,), (fast,) = table.run(codes, tight), table.run(codes, loose)
    if slow.valid:
        assert fast.valid
        assert fast.step_seconds <= slow.step_seconds + 1e-9


# Where a greedy choice takes more away with more memory.
BIGGER_THAN_NEEDED = (
    [
        Value(3 * MIB, 1, 6, 0.0),
        Value(1 * MIB, 0, 6, 0.1),
        Value(8 * MIB, 2, 6, 9.0),
        Value(8 * MIB, 2, -1, 0.1),
    ],
    [8, 6, 27, 28, 20, 24, 16],
    (26, 27),
    SLOW,
)
ONE_TOO_MANY = (
    [
        Value(8 * MIB, 3, -1, 1.0),
        Value(8 * MIB, 5, -1, 0.0),
        Value(1 * MIB, 1, 6, 0.1),
    ],
    [4, 8, 8, 14, 10, 18, 19, 23],
    (14, 15),
    CLOSED,
)


@pytest.mark.parametrize("swap", [True, False])
@pytest.mark.parametrize("case", [BIGGER_THAN_NEEDED, ONE_TOO_MANY])
def test_where_a_greedy_choice_takes_more_away_with_more_memory(
    case: tuple[list[Value], list[int], tuple[int, int], Link], swap: bool
) -> None:
    values, loads, budgets, link = case
    trace = trace_of(values, [load * MIB for load in loads])
    frontier = Frontier(trace, link, Allowed(swap=swap))
    tight, loose = (frontier.at(budget * MIB) for budget in budgets)
    away = [int(trace.values["bytes"][p.codes > 0].sum()) for p in (tight, loose)]
    assert away[1] <= away[0]
    assert loose.step_seconds <= tight.step_seconds
    assert loose.fits
    assert tight.fits


def every_plan(table: Timetable) -> NDArray[np.int8]:
    choices = [
        [c for c in (KEEP, SWAP, RECOMPUTE) if c == 0 or m & c] for m in table.may
    ]
    return np.array(list(product(*choices)), np.int8)


def against_the_optimum(trace: Trace, link: Link, share: float) -> float:
    """Give the planned time over the least of all plans."""
    table = Timetable(trace, link)
    floor = int(table.floor().max())
    budget = int(floor + share * (trace.plain_peak_bytes - floor))
    plan = Frontier(trace, link, effort=QUICK).at(budget)
    assert plan.fits
    outcomes = table.run(every_plan(table), budget)
    least = min(o.step_seconds for o in outcomes if o.valid)
    return plan.step_seconds / least


def test_the_planner_is_close_to_the_best_of_all_plans() -> None:
    ratios = [
        against_the_optimum(wild(seed, 3 + seed % 6), LINKS[seed % 4], share)
        for seed in range(40)
        for share in (0.1, 0.5)
    ] + [
        against_the_optimum(trained(seed, 8), Link(2e9, 2e9), share)
        for seed in range(10)
        for share in (0.0, 0.3, 0.7)
    ]
    assert np.mean(np.array(ratios) <= 1.05) >= 0.95


def least_replay_seconds(trace: Trace, budget: int) -> float | None:
    """Solve the choice of what to recompute exactly, as a covering problem."""
    values, n_ops = trace.values, len(trace.ops)
    load = trace.ops["live"] + trace.ops["need"]
    movable = Timetable(trace, CLOSED).may > 0
    rows = np.zeros((n_ops, len(values)))
    for i in np.flatnonzero(movable):
        use = values["first_use"][i]
        rows[values["saved"][i] + 1 : n_ops if use < 0 else use, i] = values["bytes"][i]
    costs = np.where(values["first_use"] < 0, 0.0, values["seconds"])
    solved = milp(
        costs,
        constraints=LinearConstraint(rows, load - budget, np.inf),
        bounds=Bounds(0, 1),
        integrality=np.ones(len(values)),
    )
    return float(solved.fun) if solved.success else None


def test_recomputing_alone_is_close_to_the_covering_optimum() -> None:
    ratios = []
    for seed in range(16):
        trace = wild(seed, 30) if seed % 2 else trained(seed, 30)
        frontier = Frontier(trace, CLOSED, effort=QUICK)
        floor = int(Timetable(trace, CLOSED).floor().max())
        for share in (0.0, 0.15, 0.4, 0.8):
            budget = int(floor + share * (trace.plain_peak_bytes - floor))
            least = least_replay_seconds(trace, budget)
            assert least is not None
            plan = frontier.at(budget)
            assert plan.fits
            ratios.append(plan.step_seconds / (trace.seconds + least))
    assert min(ratios) >= 1 - 1e-9
    assert np.mean(np.array(ratios) <= 1.05) >= 0.95


def test_the_same_trace_has_the_same_plan() -> None:
    first, second = (
        make_plan(trained(3, 40), 60 * MIB, Link(1e9, 1e9)) for _ in range(2)
    )
    assert first.codes.tolist() == second.codes.tolist()
    assert first.key == 7
    assert first.step_seconds == second.step_seconds


def test_an_empty_iteration_has_an_empty_plan() -> None:
    assert make_plan(trace_of([], []), 0, FAST).codes.tolist() == []
    assert make_plan(trace_of([], [MIB]), 0, FAST).codes.tolist() == []
    plan = make_plan(trace_of([Value(MIB, 0, -1)], [MIB, MIB, MIB, MIB]), 0, UNEVEN)
    assert plan.codes.tolist() == [SWAP]
