"""Every placement is right, and none is lower than need be."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lowtide import _core
from lowtide.planner.check import check_placement
from lowtide.planner.pool import (
    BLOCK,
    POLICIES,
    LifetimeError,
    Pool,
    Search,
    live_curve,
    lower_bound,
    place_blocks,
)
from tests.pure.lives import (
    blocks_of,
    least_height_by_cp_sat,
    least_height_of_all_orders,
    problems,
    tiles,
    unrolled,
)


def faults(pool: Pool) -> list[str]:
    found = check_placement(
        pool.blocks,
        pool.offsets,
        period=pool.period,
        height_bytes=pool.height_bytes,
        alignment=pool.alignment,
    )
    return [str(violation) for violation in found]


@given(problems(), st.sampled_from([1, 1, 64, 512]), st.integers(0, 3))
@settings(max_examples=1000, deadline=None)
def test_the_checker_accepts_every_placement(
    problem: tuple[NDArray[np.void], int], alignment: int, seed: int
) -> None:
    blocks, period = problem
    pool = place_blocks(
        blocks,
        period=period,
        alignment=alignment,
        search=Search(nodes=2000, seed=seed),
    )
    assert faults(pool) == []
    assert (
        pool.height_bytes
        >= pool.lower_bound_bytes
        >= lower_bound(blocks, period=period)
    )


@given(problems(most=6, events=8, rounds=0))
@settings(max_examples=500, deadline=None)
def test_small_problems_are_placed_at_the_least_height_and_proved(
    problem: tuple[NDArray[np.void], int],
) -> None:
    blocks, _ = problem
    pool = place_blocks(blocks)
    assert pool.height_bytes == least_height_of_all_orders(blocks, 0)
    assert pool.optimal


@given(problems(most=3, events=8, rounds=2))
@settings(max_examples=500, deadline=None)
def test_small_circles_are_placed_at_the_least_height_and_proved(
    problem: tuple[NDArray[np.void], int],
) -> None:
    blocks, period = problem
    pool = place_blocks(blocks, period=period)
    assert pool.height_bytes == least_height_of_all_orders(*unrolled(blocks, period))
    assert pool.optimal


def test_the_height_is_the_optimum_of_cp_sat_in_99_percent() -> None:
    pytest.importorskip("ortools")
    random = np.random.default_rng(0)
    judged = met = 0
    for k in range(150):
        period = int(random.integers(5, 12)) if k % 3 == 0 else 0
        n = random.integers(4, 7) if period else random.integers(6, 14)
        blocks = np.zeros(n, BLOCK)
        blocks["born"] = random.integers(0, period or 10, n)
        blocks["dead"] = blocks["born"] + random.integers(1, 10, n)
        blocks["bytes"] = random.integers(1, random.choice([10, 100]), n)
        least = least_height_by_cp_sat(*unrolled(blocks, period), effort=1.0)
        if least is not None:
            judged += 1
            pool = place_blocks(blocks, period=period)
            assert pool.lower_bound_bytes <= least <= pool.height_bytes
            met += pool.height_bytes == least
    assert judged >= 100
    assert met >= 0.99 * judged


@given(problems(most=12, events=8, rounds=2), st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_a_lower_bound_is_never_above_a_placement_found_by_other_means(
    problem: tuple[NDArray[np.void], int], seed: int
) -> None:
    blocks, period = problem
    bound = place_blocks(blocks, period=period).lower_bound_bytes
    for policy in POLICIES:
        pool = place_blocks(
            blocks, period=period, policy=policy, search=Search(nodes=20, seed=seed)
        )
        assert pool.height_bytes >= bound


def test_the_same_seed_and_nodes_give_the_same_placement() -> None:
    blocks = tiles(150, seed=1)
    search = Search(nodes=20_000, seed=7)
    first, second = (place_blocks(blocks, search=search) for _ in range(2))
    assert (first.offsets == second.offsets).all()
    assert first.nodes == second.nodes >= 20_000
    assert not first.aborted


def test_more_nodes_never_give_a_higher_placement() -> None:
    blocks = tiles(150, seed=1)
    heights = [
        place_blocks(blocks, search=Search(nodes=nodes)).height_bytes
        for nodes in (0, 1000, 10_000, 100_000)
    ]
    assert heights == sorted(heights, reverse=True)


def test_the_search_stops_where_it_is_told_that_it_is_enough() -> None:
    blocks = tiles(150, seed=1)
    best = place_blocks(blocks, search=Search(nodes=50_000))
    enough = best.height_bytes + 100
    pool = place_blocks(blocks, search=Search(nodes=50_000, enough_bytes=enough))
    assert best.lower_bound_bytes < pool.height_bytes <= enough
    assert pool.nodes < best.nodes


def test_a_deadline_that_has_passed_gives_the_first_placement() -> None:
    pool = place_blocks(tiles(300, seed=1), search=Search(nodes=1 << 40, seconds=0))
    assert pool.aborted
    assert faults(pool) == []


def test_a_search_ends_when_another_thread_cancels_it() -> None:
    cancel = _core.Cancel()
    search = Search(nodes=1 << 60, cancel=cancel)
    pools: list[Pool] = []
    thread = threading.Thread(
        target=lambda: pools.append(place_blocks(tiles(300, seed=1), search=search))
    )
    thread.start()
    cancel.set()  # only possible because the search does not hold the GIL
    thread.join()
    assert pools[0].aborted
    assert faults(pools[0]) == []


def test_blocks_of_parts_that_do_not_meet_share_bytes() -> None:
    blocks = blocks_of((0, 5, 100), (2, 5, 30), (5, 9, 120), (6, 9, 10))
    assert _core.independent_parts(
        *(np.ascontiguousarray(blocks[name]) for name in ("born", "dead", "bytes"))
    ).tolist() == [0, 0, 1, 1]
    pool = place_blocks(blocks)
    assert pool.height_bytes == pool.lower_bound_bytes == 130


def test_what_crosses_iterations_alternates_between_two_places() -> None:
    # The next A is born before the last one dies: two places, but only at one time.
    blocks = blocks_of((8, 19, 100), (2, 7, 100))
    pool = place_blocks(blocks, period=10)
    assert pool.slots == 2
    assert pool.height_bytes == pool.lower_bound_bytes == 200
    doubled = place_blocks(blocks, period=10, policy="published-first-fit")
    assert doubled.height_bytes == 300


def test_one_place_is_enough_for_what_dies_before_it_is_born_again() -> None:
    pool = place_blocks(blocks_of((8, 12, 100), (2, 7, 100)), period=10)
    assert pool.slots == 1
    assert pool.height_bytes == 100


def test_the_published_pool_has_no_third_copy() -> None:
    blocks = blocks_of((0, 25, 8))
    assert place_blocks(blocks, period=10).slots == 3
    with pytest.raises(LifetimeError, match="lives 3 iterations"):
        place_blocks(blocks, period=10, policy="published-best-fit")


def test_best_fit_takes_the_smallest_hole_and_first_fit_the_lowest() -> None:
    # Two holes below the last block: 5 bytes at 0 and 3 bytes at 45, both free later.
    rows = [(0, 1, 40), (0, 9, 30), (5, 9, 35), (8, 9, 3)]
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    order = np.arange(4)
    first = _core.fit(*columns, order)
    assert first.tolist() == [0, 40, 0, 35]
    rows = [(0, 9, 5), (0, 2, 5), (0, 9, 5), (0, 2, 3), (0, 9, 5), (3, 4, 3)]
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    order = np.arange(6)
    assert _core.fit(*columns, order)[5] == 5
    assert _core.fit(*columns, order, best=True)[5] == 15


def test_sizes_and_offsets_are_multiples_of_the_alignment() -> None:
    pool = place_blocks(blocks_of((0, 2, 1), (1, 3, 513), (1, 2, 0)), alignment=512)
    assert (pool.offsets % 512 == 0).all()
    assert pool.height_bytes == pool.lower_bound_bytes == 512 + 1024


def test_nothing_needs_no_memory() -> None:
    for policy in POLICIES:
        pool = place_blocks(np.zeros(0, BLOCK), policy=policy, period=5)
        assert (pool.height_bytes, pool.lower_bound_bytes) == (0, 0)
    assert lower_bound(np.zeros(0, BLOCK)) == 0


def test_the_live_curve_sums_what_is_alive_from_each_birth_on() -> None:
    times, live = live_curve(blocks_of((0, 3, 10), (2, 5, 5), (5, 9, 1)))
    assert times.tolist() == [0, 2, 5]
    assert live.tolist() == [10, 15, 1]
    times, live = live_curve(blocks_of((0, 3, 10), (8, 12, 5)), period=10)
    assert live.tolist() == [15, 5]


@pytest.mark.parametrize(
    ("blocks", "period", "text"),
    [
        (
            blocks_of((0, 2, 1), (3, 3, 8)),
            0,
            r"block 1 \(8 bytes, alive in \[3, 3\)\) dies before it is born",
        ),
        (blocks_of((0, 2, -1)), 0, r"block 0 .* has a negative size"),
        (blocks_of((0, 2, 1), (7, 9, 1)), 5, r"block 1 .* is not born in \[0, 5\)"),
        (np.zeros(1, np.int64), 0, "the blocks have dtype int64, not BLOCK"),
    ],
)
def test_impossible_lives_are_refused(
    blocks: NDArray[np.void], period: int, text: str
) -> None:
    with pytest.raises(LifetimeError, match=text):
        place_blocks(blocks, period=period)


def test_unknown_policies_and_alignments_are_refused() -> None:
    blocks = blocks_of((0, 1, 1))
    with pytest.raises(LifetimeError, match="'best' is no policy; there are auto,"):
        place_blocks(blocks, policy="best")
    with pytest.raises(LifetimeError, match="the alignment is 0"):
        place_blocks(blocks, alignment=0)


def test_the_core_refuses_what_it_cannot_hold() -> None:
    one, big = np.array([0]), np.array([2**62])
    with pytest.raises(OverflowError, match="exceed 2"):
        _core.live_bytes(np.repeat(one, 2), np.array([1, 1]), np.repeat(big, 2))
    with pytest.raises(ValueError, match="differ in length"):
        _core.live_bytes(one, np.array([1, 2]), one + 1)
    with pytest.raises(ValueError, match="not a permutation"):
        _core.fit(one, one + 1, one + 1, one + 1)
