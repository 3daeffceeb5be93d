"""The checker finds every fault, and names both blocks."""

import numpy as np
import pytest

from lowtide.planner.check import check_placement
from tests.pure.lives import blocks_of


def test_accepts_blocks_that_share_bytes_or_time_but_not_both() -> None:
    blocks = blocks_of((0, 2, 10), (1, 3, 10), (2, 4, 10))
    assert check_placement(blocks, np.array([0, 10, 0]), height_bytes=20) == []


def test_names_both_blocks_and_the_bytes_they_share() -> None:
    blocks = blocks_of((0, 3, 10), (1, 4, 10))
    (violation,) = check_placement(blocks, np.array([0, 6]))
    assert (violation.first.index, violation.second.index) == (0, 1)
    assert "4 bytes are in both at 1" in str(violation)
    assert "block 1 of iteration 0 (bytes [6, 16), alive in [1, 4))" in str(violation)


def test_reports_every_violation() -> None:
    blocks = blocks_of((0, 3, 10), (0, 3, 10), (0, 3, 10))
    pairs = {
        (v.first.index, v.second.index)
        for v in check_placement(blocks, np.array([0, 5, 9]))
        if v.second
    }
    assert pairs == {(0, 1), (0, 2), (1, 2)}


@pytest.mark.parametrize(
    ("offset", "rule"),
    [
        (-8, "lies below 0"),
        (4, "its offset is no multiple of 8"),
        (24, "ends above the height of 30"),
    ],
)
def test_reports_a_block_out_of_place(offset: int, rule: str) -> None:
    (violation,) = check_placement(
        blocks_of((0, 1, 8)), np.array([offset]), height_bytes=30, alignment=8
    )
    assert violation.rule == rule
    assert violation.second is None


def test_sees_a_block_meet_itself_in_the_next_iteration() -> None:
    blocks = blocks_of((3, 9, 10))
    (violation,) = check_placement(blocks, np.array([0]), period=5)
    assert (violation.first.iteration, violation.second.iteration) == (0, 1)
    assert check_placement(blocks, np.array([[0], [10]]), period=5) == []


def test_sees_two_slots_meet_across_the_boundary() -> None:
    # The second block of an even iteration lasts into the odd one and back again.
    blocks = blocks_of((0, 2, 10), (4, 11, 10))
    assert check_placement(blocks, np.array([[0, 10], [0, 20]]), period=5) == []
    found = check_placement(blocks, np.array([[0, 10], [10, 20]]), period=5)
    assert [(v.first.index, v.second.index, v.second.iteration) for v in found] == [
        (1, 0, 1)
    ]


def test_refuses_offsets_of_other_blocks() -> None:
    with pytest.raises(ValueError, match=r"offsets have shape \(3,\); 1 blocks"):
        check_placement(blocks_of((0, 1, 8)), np.array([0, 0, 0]))
    with pytest.raises(ValueError, match="2 slots, but the blocks do not come again"):
        check_placement(blocks_of((0, 1, 8)), np.array([[0], [0]]))
