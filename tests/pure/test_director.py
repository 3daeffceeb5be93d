# SPDX-License-Identifier: Apache-2.0
"""The director's decisions, worked out by hand, and what holds for all of them."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lowtide.scheduler.director import (
    KEEP,
    RECOMPUTE,
    RULES,
    SWAP,
    Lanes,
    assign,
    judge,
)
from lowtide.trace import OPS, VALUES, Trace

MIB = 1 << 20
CLOSED = Lanes(0.0, 0.0)
SLOW = Lanes(1.0 * MIB, 1.0 * MIB)  # bytes a second
FAST = Lanes(1e6 * MIB, 1e6 * MIB)
HOURS = 1e4  # seconds: no replay may take that long
PLANNING = [name for name, rules in RULES.items() if name != "keep" and rules.planned]

exhaustive = settings(max_examples=40, deadline=None, derandomize=True, database=None)


@dataclass(frozen=True)
class Row:
    """One saved value; away it frees its bytes at operators saved + 1 to use - 1."""

    bytes: int
    saved: int
    use: int  # -1: never
    seconds: float | None = None  # to compute it again; None: impossible

    def spans(self, n_ops: int) -> range:
        return range(self.saved + 1, n_ops if self.use < 0 else self.use)


def trace_of(rows: Iterable[Row], loads: Iterable[int], absent: int = 0) -> Trace:
    """Make a trace of one-second operators that load memory as given (bytes)."""
    table = [
        (row.bytes, row.saved, row.use, row.seconds or 0.0, row.seconds is not None, 0)
        for row in rows
    ]
    ops = [(1.0, load - absent, 0, 0, absent) for load in loads]
    return Trace(np.array(ops, dtype=OPS), np.array(table, dtype=VALUES), key=0)


def hill(n_ops: int, peak_bytes: int, at: int) -> list[int]:
    """Load that rises and falls by 1 MiB an operator."""
    return [peak_bytes - abs(op - at) * MIB for op in range(n_ops)]


def planned_loads(rows: list[Row], loads: list[int], plan: Iterable[int]) -> list[int]:
    """Work out, operator by operator, what memory holds under a plan."""
    left = list(loads)
    for row, code in zip(rows, plan, strict=True):
        for op in row.spans(len(loads)) if code != KEEP else ():
            left[op] -= row.bytes
    return left


def away_bytes(rows: list[Row], plan: Iterable[int]) -> int:
    return sum(row.bytes for row, code in zip(rows, plan, strict=True) if code != KEEP)


# One value alone.


@pytest.mark.parametrize(
    ("policy", "lanes", "replay_seconds", "choice"),
    [
        ("auto", SLOW, 0.01, RECOMPUTE),  # 8 MiB out and back: 16 s
        ("auto", SLOW, 100.0, SWAP),
        ("auto", FAST, 0.01, SWAP),  # 16 us
        ("auto", SLOW, None, SWAP),
        ("auto", CLOSED, 100.0, RECOMPUTE),
        ("auto", CLOSED, None, KEEP),
        ("keep", FAST, 0.0, KEEP),
        ("swap-only", SLOW, 0.0, SWAP),
        ("swap-only", CLOSED, 0.0, KEEP),
        ("recompute-only", FAST, HOURS, RECOMPUTE),
        ("recompute-only", FAST, None, KEEP),
    ],
)
def test_one_value_takes_the_cheaper_way_that_is_open(
    policy: str, lanes: Lanes, replay_seconds: float | None, choice: int
) -> None:
    assert judge(8 * MIB, replay_seconds, lanes, RULES[policy]) == choice


@pytest.mark.parametrize("policy", RULES)
@pytest.mark.parametrize("nbytes", [0, 1, 1024])
def test_a_small_value_alone_stays(policy: str, nbytes: int) -> None:
    for lanes in (CLOSED, SLOW, FAST):
        assert judge(nbytes, 0.0, lanes, RULES[policy]) == KEEP
        assert judge(nbytes, None, lanes, RULES[policy]) == KEEP


# A whole iteration, by hand.


@pytest.mark.parametrize("policy", RULES)
def test_without_pressure_everything_stays(policy: str) -> None:
    rows = [Row(2 * MIB, 0, 9, 0.0), Row(2 * MIB, 1, -1, 0.0)]
    trace = trace_of(rows, hill(10, 8 * MIB, at=5))
    assert trace.plain_peak_bytes == 8 * MIB
    for budget in (8 * MIB, 9 * MIB, 1 << 40):
        assert assign(trace, budget, FAST, RULES[policy]).tolist() == [KEEP, KEEP]


def test_an_iteration_that_saved_nothing_has_an_empty_plan() -> None:
    assert assign(trace_of([], [MIB]), 0, FAST, RULES["auto"]).tolist() == []
    assert assign(trace_of([], []), 0, FAST, RULES["auto"]).tolist() == []
    rows = [Row(MIB, 0, -1)]
    assert assign(trace_of(rows, []), 0, FAST, RULES["auto"]).tolist() == [KEEP]


def test_the_farthest_next_use_is_swapped_first() -> None:
    rows = [Row(2 * MIB, 2, 7), Row(2 * MIB, 0, 9), Row(2 * MIB, 1, 8)]
    trace = trace_of(rows, hill(10, 8 * MIB, at=5))
    rules = RULES["swap-only"]
    assert assign(trace, 7 * MIB, FAST, rules).tolist() == [KEEP, SWAP, KEEP]
    assert assign(trace, 6 * MIB, FAST, rules).tolist() == [KEEP, SWAP, KEEP]
    assert assign(trace, 5 * MIB, FAST, rules).tolist() == [KEEP, SWAP, SWAP]
    assert assign(trace, 3 * MIB, FAST, rules).tolist() == [SWAP, SWAP, SWAP]
    assert assign(trace, 0, FAST, rules).tolist() == [SWAP, SWAP, SWAP]


def test_a_value_that_is_never_used_again_counts_as_farthest() -> None:
    rows = [Row(2 * MIB, 0, 9), Row(2 * MIB, 1, -1)]
    plan = assign(
        trace_of(rows, hill(10, 8 * MIB, at=5)), 7 * MIB, FAST, RULES["swap-only"]
    )
    assert plan.tolist() == [KEEP, SWAP]


def test_only_values_alive_at_the_peak_leave_for_it() -> None:
    rows = [Row(2 * MIB, 0, 4), Row(2 * MIB, 1, 8), Row(2 * MIB, 6, 9)]
    loads = [MIB] * 5 + [8 * MIB] + [MIB] * 4
    plan = assign(trace_of(rows, loads), 7 * MIB, FAST, RULES["swap-only"])
    assert plan.tolist() == [KEEP, SWAP, KEEP]


def test_two_peaks_need_two_values() -> None:
    rows = [Row(2 * MIB, 0, 4), Row(2 * MIB, 5, 9)]
    loads = [8 * MIB if op in (2, 7) else MIB for op in range(10)]
    plan = assign(trace_of(rows, loads), 6 * MIB, FAST, RULES["swap-only"])
    assert plan.tolist() == [SWAP, SWAP]


def test_without_lanes_the_cheapest_replay_per_byte_goes_first() -> None:
    rows = [
        Row(2 * MIB, 0, 9, 2.0),  # 1 s per MiB
        Row(2 * MIB, 1, 8, 1.0),  # 0.5
        Row(1 * MIB, 2, 7, 0.9),  # 0.9
        Row(2 * MIB, 3, 7),
    ]
    trace = trace_of(rows, hill(10, 8 * MIB, at=5))
    for policy, lanes in [("recompute-only", FAST), ("auto", CLOSED)]:
        rules = RULES[policy]
        plan = assign(trace, 7 * MIB, lanes, rules)
        assert plan.tolist() == [KEEP, RECOMPUTE, KEEP, KEEP]
        plan = assign(trace, 5 * MIB, lanes, rules)
        assert plan.tolist() == [KEEP, RECOMPUTE, RECOMPUTE, KEEP]
        plan = assign(trace, 0, lanes, rules)
        assert plan.tolist() == [RECOMPUTE, RECOMPUTE, RECOMPUTE, KEEP]


def test_lanes_that_hide_every_copy_are_preferred_to_dear_replays() -> None:
    rows = [Row(2 * MIB, 0, 9, 5.0), Row(2 * MIB, 1, 8, 5.0)]
    trace = trace_of(rows, hill(10, 8 * MIB, at=5))
    assert assign(trace, 4 * MIB, FAST, RULES["auto"]).tolist() == [SWAP, SWAP]


def test_what_lanes_cannot_hide_is_recomputed_cheapest_first() -> None:
    # 4 s to write and 5 s to read at 1 MiB a second: at most 4 of the 8 MiB
    rows = [Row(MIB, 0, 18 - i, 0.01 * (i + 1)) for i in range(8)]
    loads = [2 * MIB] * 5 + [16 * MIB] + [2 * MIB] * 4
    plan = assign(trace_of(rows, loads), 8 * MIB, SLOW, RULES["auto"])
    assert KEEP not in plan
    assert (plan == SWAP).sum() * MIB <= 4 * MIB
    n_recomputed = int((plan == RECOMPUTE).sum())
    assert (plan[:n_recomputed] == RECOMPUTE).all()


def test_waiting_for_a_copy_is_preferred_to_a_replay_that_takes_longer() -> None:
    rows = [Row(MIB, 0, 9, HOURS) for _ in range(8)]
    loads = [2 * MIB] * 5 + [16 * MIB] + [2 * MIB] * 4
    plan = assign(trace_of(rows, loads), 8 * MIB, SLOW, RULES["auto"])
    assert (plan == SWAP).all()


def test_a_value_used_at_once_gains_nothing_by_leaving() -> None:
    rows = [Row(4 * MIB, 4, 5, 0.0), Row(4 * MIB, 5, 6, 0.0)]
    trace = trace_of(rows, hill(10, 8 * MIB, at=5))
    for policy in PLANNING:
        assert assign(trace, 0, FAST, RULES[policy]).tolist() == [KEEP, KEEP]


# Whatever the iteration.


@st.composite
def iterations(draw: st.DrawFn) -> tuple[list[Row], list[int]]:
    """Draw saved values and a load that contains them (bytes per operator)."""
    n_ops = draw(st.integers(6, 14))
    rows = []
    for _ in range(draw(st.integers(1, 7))):
        saved = draw(st.integers(0, n_ops - 2))
        use = draw(st.integers(saved + 1, n_ops - 1) | st.just(-1))
        size = draw(st.sampled_from([1024, MIB // 4, MIB, 2 * MIB, 3 * MIB, 8 * MIB]))
        seconds = draw(st.none() | st.sampled_from([0.0, 0.01, 0.1, 1.0, 9.0]))
        rows.append(Row(size, saved, use, seconds))
    other = st.integers(0, 8).map(lambda n: n * MIB // 2)
    loads = draw(st.lists(other, min_size=n_ops, max_size=n_ops))
    for row in rows:
        for op in [row.saved, *row.spans(n_ops)]:
            loads[op] += row.bytes
    return rows, loads


lanes_of_all_speeds = st.sampled_from([CLOSED, SLOW, Lanes(4.0 * MIB, MIB / 2), FAST])
shares = st.floats(0, 1.1)  # of the load's peak


def movable(row: Row, n_ops: int, policy: str, lanes: Lanes) -> bool:
    """Say whether a policy can take a value away for an operator's time at least."""
    rules = RULES[policy]
    if row.bytes < MIB // 4 or len(row.spans(n_ops)) < 2:
        return False
    can_replay = rules.recompute and row.seconds is not None
    return can_replay or (rules.swap and lanes.open)


@exhaustive
@given(iterations(), shares, lanes_of_all_speeds, st.sampled_from([*PLANNING, "keep"]))
def test_plans_bring_down_whatever_can_be_brought_down(
    iteration: tuple[list[Row], list[int]], share: float, lanes: Lanes, policy: str
) -> None:
    rows, loads = iteration
    budget = int(share * max(loads))
    plan = assign(trace_of(rows, loads), budget, lanes, RULES[policy])
    planned = planned_loads(rows, loads, plan)
    for op, load in enumerate(loads):
        reach = sum(
            row.bytes
            for row in rows
            if movable(row, len(loads), policy, lanes) and op in row.spans(len(loads))
        )
        assert planned[op] <= max(budget, load - reach), f"operator {op}"


@exhaustive
@given(iterations(), shares, lanes_of_all_speeds, st.sampled_from(list(RULES)))
def test_plans_choose_only_what_is_possible_and_allowed(
    iteration: tuple[list[Row], list[int]], share: float, lanes: Lanes, policy: str
) -> None:
    rows, loads = iteration
    budget = int(share * max(loads))
    plan = assign(trace_of(rows, loads), budget, lanes, RULES[policy]).tolist()
    rules = RULES[policy]
    assert len(plan) == len(rows)
    for row, code in zip(rows, plan, strict=True):
        assert code in (KEEP, SWAP, RECOMPUTE)
        if code == RECOMPUTE:
            assert row.seconds is not None
            assert rules.recompute
        elif code == SWAP:
            assert rules.swap
            assert lanes.open
        if row.bytes <= 1024:
            assert code == KEEP
    if budget >= max(loads):
        assert set(plan) == {KEEP}


@exhaustive
@given(iterations(), shares, lanes_of_all_speeds, st.sampled_from(PLANNING))
def test_plans_take_nothing_that_overlaps_no_pressure(
    iteration: tuple[list[Row], list[int]], share: float, lanes: Lanes, policy: str
) -> None:
    rows, loads = iteration
    budget = int(share * max(loads))
    plan = assign(trace_of(rows, loads), budget, lanes, RULES[policy])
    for row, code in zip(rows, plan, strict=True):
        if code != KEEP:
            assert any(loads[op] > budget for op in row.spans(len(loads)))


@exhaustive
@given(iterations(), shares, lanes_of_all_speeds, st.sampled_from(PLANNING))
def test_plans_do_not_depend_on_what_was_away_when_traced(
    iteration: tuple[list[Row], list[int]], share: float, lanes: Lanes, policy: str
) -> None:
    rows, loads = iteration
    budget = int(share * max(loads))
    traces = [trace_of(rows, loads), trace_of(rows, loads, absent=min(loads))]
    before = [(trace.ops.copy(), trace.values.copy()) for trace in traces]
    plans = [assign(trace, budget, lanes, RULES[policy]) for trace in traces]
    assert plans[0].tolist() == plans[1].tolist()
    for trace, (ops, values) in zip(traces, before, strict=True):
        assert (trace.ops == ops).all()
        assert (trace.values == values).all()


# Greedy plans that begin otherwise may end worse: see the reasons.
OVERSHOOTS = pytest.mark.xfail(
    strict=True,
    reason="recomputing beyond the lanes takes another first value per budget",
)
BIGGER_THAN_NEEDED = [  # recompute the last at 27 MiB, only the first at 26 MiB
    Row(3 * MIB, 1, 6, 0.0),
    Row(1 * MIB, 0, 6, 0.1),
    Row(8 * MIB, 2, 6, 9.0),
    Row(8 * MIB, 2, -1, 0.1),
]
ONE_TOO_MANY = [  # recompute all three at 15 MiB, only the first two at 14 MiB
    Row(8 * MIB, 3, -1, 1.0),
    Row(8 * MIB, 5, -1, 0.0),
    Row(1 * MIB, 1, 6, 0.1),
]


def in_mib(*loads: int) -> list[int]:
    return [load * MIB for load in loads]


@pytest.mark.parametrize(
    "policy",
    [
        "swap-only",
        pytest.param("auto", marks=OVERSHOOTS),
        pytest.param("recompute-only", marks=OVERSHOOTS),
    ],
)
@settings(exhaustive, max_examples=100)
@example((BIGGER_THAN_NEEDED, in_mib(8, 6, 27, 28, 20, 24, 16)), 26 / 28, 27 / 28, SLOW)
@example((ONE_TOO_MANY, in_mib(4, 8, 8, 14, 10, 18, 19, 23)), 14 / 23, 15 / 23, CLOSED)
@given(iterations(), shares, shares, lanes_of_all_speeds)
def test_a_larger_budget_never_plans_more_bytes_away(
    policy: str,
    iteration: tuple[list[Row], list[int]],
    share: float,
    other_share: float,
    lanes: Lanes,
) -> None:
    rows, loads = iteration
    small, large = sorted(round(s * max(loads)) for s in (share, other_share))
    trace = trace_of(rows, loads)
    tight = assign(trace, small, lanes, RULES[policy])
    loose = assign(trace, large, lanes, RULES[policy])
    assert away_bytes(rows, loose) <= away_bytes(rows, tight)
