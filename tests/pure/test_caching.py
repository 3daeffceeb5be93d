"""The models of other allocators follow their documented rules."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.problems import read_blocks
from lowtide.planner.pool import lower_bound
from lowtide.simulator.caching import (
    MIB,
    MODELS,
    CnMemRules,
    Rules,
    simulate_allocator,
    smallest_capacity,
)
from tests.pure.lives import blocks_of, problems

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("LOWTIDE_DATA", ROOT.parent / "shared" / "data"))


@given(problems(most=40, rounds=0), st.sampled_from(sorted(MODELS)))
@settings(max_examples=400, deadline=None)
def test_more_is_reserved_than_lives_and_what_was_reserved_suffices(
    problem: tuple[NDArray[np.void], int], model: str
) -> None:
    blocks, _ = problem
    free = simulate_allocator(blocks, MODELS[model])
    assert free.fits
    assert free.live_bytes == lower_bound(blocks)
    assert free.reserved_bytes >= free.live_bytes
    again = simulate_allocator(
        blocks, MODELS[model], capacity_bytes=free.reserved_bytes
    )
    assert again.fits
    small = simulate_allocator(
        blocks, MODELS[model], capacity_bytes=free.live_bytes - 1
    )
    assert not small.fits
    assert small.reserved_bytes < free.live_bytes


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
    ],
)
def test_the_caching_allocator_takes_segments_by_size(size: int, segment: int) -> None:
    footprint = simulate_allocator(blocks_of((0, 1, size)), MODELS["caching"])
    assert footprint.reserved_bytes == segment
    assert footprint.segments == 1


def test_small_requests_are_rounded_to_512_bytes_and_share_a_segment() -> None:
    full = blocks_of(*((0, 9, 1) for _ in range(4096)))
    assert simulate_allocator(full, MODELS["caching"]).segments == 1
    over = blocks_of(*((0, 9, 1) for _ in range(4097)))
    assert simulate_allocator(over, MODELS["caching"]).segments == 2


def test_a_large_block_keeps_a_rest_of_a_mebibyte() -> None:
    # 19 of 20 MiB are used: the last one is not worth a block, so nothing fits there.
    rows = [(0, 9, 9 * MIB), (1, 9, 10 * MIB - 512), (2, 9, 2 * MIB)]
    assert simulate_allocator(blocks_of(*rows), MODELS["caching"]).segments == 2
    # With 18 MiB used the rest is 2 MiB and 512 bytes, and serves.
    rows[1] = (1, 9, 9 * MIB - 512)
    assert simulate_allocator(blocks_of(*rows), MODELS["caching"]).segments == 1


def test_free_neighbours_are_joined_again() -> None:
    rows = [(0, 4, 6 * MIB), (1, 5, 6 * MIB), (2, 6, 6 * MIB), (7, 8, 20 * MIB)]
    footprint = simulate_allocator(blocks_of(*rows), MODELS["caching"])
    assert footprint.reserved_bytes == 20 * MIB


def test_a_full_device_gets_free_segments_back() -> None:
    # 40 MiB, then 50 MiB: the first segment is too small for the second.
    blocks = blocks_of((0, 1, 40 * MIB), (2, 3, 50 * MIB))
    assert simulate_allocator(blocks, MODELS["caching"]).reserved_bytes == 90 * MIB
    tight = simulate_allocator(blocks, MODELS["caching"], capacity_bytes=50 * MIB)
    assert tight.fits
    assert tight.reserved_bytes == 50 * MIB
    assert smallest_capacity(blocks, MODELS["caching"], resolution_bytes=1) == (
        50 * MIB
    )
    # Half of the first segment is in use: nothing can go back.
    blocks = blocks_of((0, 1, 9 * MIB), (0, 9, 9 * MIB), (2, 3, 50 * MIB))
    full = simulate_allocator(blocks, MODELS["caching"], capacity_bytes=60 * MIB)
    assert not full.fits


def test_expandable_segments_grow_where_separate_ones_would_not_join() -> None:
    # The end of the segment is free, so 50 MiB need only 20 more.
    blocks = blocks_of((0, 1, 40 * MIB), (2, 3, 50 * MIB))
    footprint = simulate_allocator(blocks, MODELS["expandable"])
    assert footprint.reserved_bytes == 60 * MIB
    # Here the end is in use.
    blocks = blocks_of((0, 2, 40 * MIB), (1, 9, 20 * MIB), (3, 4, 50 * MIB))
    footprint = simulate_allocator(blocks, MODELS["expandable"])
    assert footprint.reserved_bytes == 120 * MIB


def test_blocks_above_max_split_are_kept_whole() -> None:
    blocks = blocks_of((0, 1, 100 * MIB), (2, 9, 30 * MIB), (3, 9, 30 * MIB))
    assert simulate_allocator(blocks, Rules()).reserved_bytes == 100 * MIB
    footprint = simulate_allocator(blocks, Rules(max_split=64 * MIB))
    assert footprint.reserved_bytes == 160 * MIB


def test_old_segments_go_back_above_the_collection_threshold() -> None:
    blocks = blocks_of((0, 1, 40 * MIB), (2, 3, 50 * MIB), (4, 5, 60 * MIB))
    rules = Rules(collect_above=0.6)
    footprint = simulate_allocator(blocks, rules, capacity_bytes=200 * MIB)
    # 40 + 50 stay below 120; for 60 more the oldest goes.
    assert footprint.reserved_bytes == 110 * MIB


def test_bfc_doubles_its_regions_and_settles_for_what_is_left() -> None:
    blocks = blocks_of((0, 9, 2 * MIB), (1, 9, 3 * MIB), (2, 9, 5 * MIB))
    footprint = simulate_allocator(blocks, MODELS["bfc"])
    assert footprint.reserved_bytes == (2 + 4 + 8) * MIB
    tight = simulate_allocator(blocks, MODELS["bfc"], capacity_bytes=11 * MIB)
    assert tight.fits
    assert tight.reserved_bytes == 11 * MIB


def test_cnmem_has_a_first_segment_and_then_takes_what_is_asked() -> None:
    blocks = blocks_of((0, 9, 200 * MIB), (1, 9, 100 * MIB))
    footprint = simulate_allocator(blocks, MODELS["cnmem"])
    assert footprint.reserved_bytes == (256 + 100) * MIB


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no data in {DATA}")
@pytest.mark.parametrize(("name", "mebibytes"), [("alex", 194.6), ("vgg", 719.6)])
def test_cnmem_needs_what_was_found_for_the_published_traces(
    name: str, mebibytes: float
) -> None:
    blocks = read_blocks(DATA / "autoswap" / f"memInfo_{name}.text")
    footprint = simulate_allocator(blocks, CnMemRules(first=0))
    assert round(footprint.reserved_bytes / MIB, 1) == mebibytes
