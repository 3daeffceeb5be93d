# SPDX-License-Identifier: Apache-2.0
"""The simulated timeline, worked out by hand; operators take a second each."""

import numpy as np
import pytest

from lowtide.plan import KEEP, RECOMPUTE, SWAP
from lowtide.planner.planner import Frontier
from lowtide.planner.recompute import Lineage
from lowtide.planner.schedule import Allowed, Outcome, Timetable
from tests.pure.iterations import CLOSED, MIB, SLOW, Link, Value, trace_of

FREE = Allowed(copy_tax=0.0)


def run(
    values: list[Value],
    loads: list[int],
    codes: list[int],
    budget: int,
    link: Link = SLOW,
    lineage: Lineage | None = None,
) -> Outcome:
    trace = trace_of(values, [load * MIB for load in loads])
    table = Timetable(trace, link, FREE, lineage)
    (outcome,) = table.run(np.array(codes, np.int8), budget * MIB)
    return outcome


PEAK = [2, 2, 2, 2, 4, 2, 2, 2, 2, 2]  # a value of 2 is always there
WIDE = [Value(2 * MIB, 0, 9, 0.5)]


def test_a_copy_beside_the_operators_costs_no_time() -> None:
    # out in [1, 3), back in [7, 9)
    outcome = run(WIDE, PEAK, [SWAP], 2)
    assert outcome.valid
    assert outcome.exposed_seconds == 0
    assert outcome.step_seconds == 10
    assert outcome.peak_bytes == 2 * MIB


def test_a_copy_still_costs_its_tax() -> None:
    trace = trace_of(WIDE, [load * MIB for load in PEAK])
    table = Timetable(trace, SLOW, Allowed(copy_tax=0.25))
    (outcome,) = table.run(np.array([SWAP], np.int8), 2 * MIB)
    assert outcome.copy_seconds == 1.0
    assert outcome.step_seconds == 11.0


def test_an_operator_waits_until_a_write_makes_room() -> None:
    # written in [1, 5), needed away at operator 4, which begins at 4
    values = [Value(4 * MIB, 0, 9)]
    outcome = run(values, [4, 4, 4, 4, 6, 4, 4, 4, 4, 4], [SWAP], 4)
    assert outcome.exposed_seconds == pytest.approx(1 + 0)  # back by 6 + 4 = 10 = use


def test_an_operator_waits_for_its_read() -> None:
    # room only after operator 7: read in [8, 10), used at 9
    outcome = run(WIDE, [2, 2, 2, 2, 4, 4, 4, 4, 2, 2], [SWAP], 2)
    assert outcome.exposed_seconds == 1


def test_a_read_begins_in_mid_operator_when_a_write_makes_room() -> None:
    # a goes in [1, 2.5), c in [4, 5.5); a is read back as soon as c has gone
    values = [Value(3 * MIB, 0, 7), Value(3 * MIB, 3, -1)]
    fast = Link(2.0 * MIB, 1.0 * MIB)
    outcome = run(values, [3, 3, 5, 6, 6, 6, 6, 6, 3], [SWAP, SWAP], 3, fast)
    # operator 2 (2 MiB beside a) begins at 2.5, c is saved at 4.5 and gone by 6
    assert outcome.valid
    assert outcome.step_seconds > 9


def test_a_value_used_before_it_is_written_never_left() -> None:
    values = [Value(8 * MIB, 0, 4)]
    outcome = run(values, [8, 8, 8, 8, 8], [SWAP], 8)
    assert outcome.exposed_seconds == 0
    assert outcome.peak_bytes == 8 * MIB


def test_a_replay_costs_its_seconds_and_no_waiting() -> None:
    outcome = run(WIDE, PEAK, [RECOMPUTE], 2, CLOSED)
    assert outcome.valid
    assert outcome.replay_seconds == 0.5
    assert outcome.step_seconds == 10.5
    assert outcome.exposed_seconds == 0


def test_a_value_never_used_again_is_dropped_for_nothing() -> None:
    outcome = run([Value(2 * MIB, 0, -1, 5.0)], PEAK, [RECOMPUTE], 2, CLOSED)
    assert outcome.step_seconds == 10


def test_what_is_not_away_counts() -> None:
    outcome = run(WIDE, PEAK, [KEEP], 3)
    assert not outcome.valid
    assert outcome.excess_bytes == MIB


SHARE = 3  # as RECOMPUTE, but it stays once it was computed for another


def test_a_parent_is_computed_for_its_child_and_again_or_stays() -> None:
    values = [Value(MIB, 0, 9, 1.0), Value(MIB, 1, 5, 1.0)]
    lineage = Lineage.of([[], [0]])
    loads = [1, 2, 2, 4, 2, 2, 2, 2, 2, 2]
    shared = run(values, loads, [SHARE, RECOMPUTE], 2, CLOSED, lineage)
    assert shared.valid
    assert shared.replay_seconds == 2  # each once
    again = run(values, loads, [RECOMPUTE] * 2, 2, CLOSED, lineage)
    assert again.replay_seconds == 3
    # with little room at operator 7, the parent may not stay
    loads[7] = 3
    assert run(values, loads, [SHARE, RECOMPUTE], 2, CLOSED, lineage).excess_bytes
    assert run(values, loads, [RECOMPUTE] * 2, 2, CLOSED, lineage).valid
    # a swapped parent is read back for its child
    loads[7] = 2
    swapped = run(values, loads, [SWAP, RECOMPUTE], 2, SLOW, lineage)
    assert swapped.replay_seconds == 1
    assert swapped.valid


def test_long_chains_of_replays_count_tenfold() -> None:
    n = 24
    values = [Value(MIB, i, 2 * n - i, 0.1) for i in range(n)]
    lineage = Lineage.of([[i - 1] if i else [] for i in range(n)])
    loads = [min(op + 1, 2 * n - op + 1, n) for op in range(2 * n + 1)]
    outcome = run(values, loads, [SHARE] * (n - 1) + [RECOMPUTE], n, CLOSED, lineage)
    assert outcome.replay_seconds == pytest.approx(0.1 * n)  # 24 links, one each
    outcome = run(values, loads, [RECOMPUTE] * n, n, CLOSED, lineage)
    assert outcome.replay_seconds > 0.1 * sum(range(n)) * 3
    trace = trace_of(values, [load * MIB for load in loads])
    for share in (4, n // 2, n - 3):
        plan = Frontier(trace, CLOSED, FREE, lineage=lineage).at((n - share) * MIB)
        assert plan.fits
        assert plan.codes.max() == RECOMPUTE
        # segments: fewer seconds than to begin anew for each value
        assert plan.replay_seconds < 0.1 * share * (share + 1) / 2 + 0.2 * share


def test_a_replay_needs_room_for_what_it_touches() -> None:
    trace = trace_of(WIDE, [load * MIB for load in PEAK])
    trace.values["scratch"] = 3 * MIB
    table = Timetable(trace, SLOW, FREE)
    codes = np.array([RECOMPUTE], np.int8)
    assert table.run(codes, 2 * MIB)[0].stuck
    assert table.run(codes, 3 * MIB)[0].valid
    assert Frontier(trace, SLOW, FREE).at(2 * MIB).codes.tolist() == [SWAP]
    # without another way out it is computed again all the same
    assert Timetable(trace, CLOSED, FREE).run(codes, 2 * MIB)[0].valid


def test_the_points_of_a_plan_say_when_a_value_is_back() -> None:
    trace = trace_of(WIDE, [load * MIB for load in PEAK])
    plan = Frontier(trace, SLOW, Allowed(recompute=False)).at(2 * MIB)
    assert plan.codes.tolist() == [SWAP]
    assert plan.until.tolist() == [9]
    assert plan.reads.tolist() == [7]  # it takes two seconds


def test_a_lineage_out_of_order_is_refused() -> None:
    trace = trace_of([Value(MIB, 0, 4), Value(MIB, 1, 4)], [MIB] * 5)
    with pytest.raises(ValueError, match="before what it is made from"):
        Timetable(trace, SLOW, FREE, Lineage.of([[1], []]))


def test_a_cap_on_swaps_leaves_them_to_what_cannot_be_had_otherwise() -> None:
    # cheap to compute again, dear, and not possible at all; 2 MiB each
    values = [Value(2 * MIB, i, 9, seconds) for i, seconds in enumerate((0.1, 5, None))]
    trace = trace_of(values, [n * MIB for n in (2, 4, 6, 6, 6, 6, 6, 6, 6, 6)])
    for cap, allowed in ((0, [0, 0, 0]), (3, [0, 0, 1]), (4, [0, 1, 1]), (6, [1] * 3)):
        table = Timetable(trace, SLOW, Allowed(swap_bytes=cap * MIB))
        assert [int(may) & 1 for may in table.may] == allowed, cap
    assert [int(may) & 1 for may in Timetable(trace, SLOW).may] == [1, 1, 1]


@pytest.mark.parametrize("cap", [0, 3, 5])
def test_plans_keep_to_a_cap_on_swaps(cap: int) -> None:
    values = [Value(2 * MIB, i, 19 - i, 9.0) for i in range(6)]
    loads = [2 * min(i + 1, 6, 20 - i) * MIB for i in range(20)]
    trace = trace_of(values, loads)
    free = Frontier(trace, SLOW).at(6 * MIB)
    capped = Frontier(trace, SLOW, Allowed(swap_bytes=cap * MIB)).at(6 * MIB)
    swapped = [int((plan.codes == SWAP).sum()) * 2 for plan in (free, capped)]
    assert swapped[0] > cap
    assert swapped[1] <= cap
    assert capped.peak_bytes <= 6 * MIB
