# SPDX-License-Identifier: Apache-2.0
"""The extents of the spill file never overlap, leak or exceed their limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.runtime.extents import PAGE, Extent, Extents, whole_pages

# A step asks for bytes, or gives back one of the pieces that are held.
steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 20 * PAGE)),
        st.tuples(st.just("give"), st.integers(0, 100)),
    ),
    max_size=60,
)


def pages(extents: tuple[Extent, ...]) -> set[int]:
    return {
        page
        for offset, length in extents
        for page in range(offset // PAGE, (offset + length) // PAGE)
    }


@given(steps=steps, limit=st.none() | st.integers(0, 60 * PAGE))
def test_extents_keep_their_promises(
    steps: list[tuple[str, int]], limit: int | None
) -> None:
    extents = Extents(limit)
    held: list[tuple[Extent, ...]] = []
    for action, number in steps:
        used = sum(len(pages(piece)) for piece in held) * PAGE
        assert extents.used_bytes == used
        if action == "give" and held:
            extents.free(held.pop(number % len(held)))
        if action == "take":
            piece = extents.allocate(number)
            if piece is None:  # refused exactly when there is no room
                assert limit is not None
                assert used + whole_pages(number) > limit
                assert extents.used_bytes == used
                continue
            assert sum(length for _, length in piece) == whole_pages(number)
            assert all(offset % PAGE == length % PAGE == 0 for offset, length in piece)
            assert all(pages(piece).isdisjoint(pages(other)) for other in held)
            held.append(piece)
            end = max((offset + length for offset, length in piece), default=0)
            assert end <= extents.file_bytes
            assert limit is None or extents.file_bytes <= limit
    for piece in held:
        extents.free(piece)
    assert extents.used_bytes == 0
    size = extents.file_bytes
    assert size == 0 or extents.allocate(size) == (Extent(0, size),)
    assert extents.file_bytes == size


def test_the_first_hole_that_fits_is_used() -> None:
    extents = Extents()
    pieces = [extents.allocate(n * PAGE) for n in (1, 4, 1, 2, 1)]
    for i in (1, 3):
        piece = pieces[i]
        assert piece is not None
        extents.free(piece)
    assert extents.allocate(2 * PAGE) == (Extent(PAGE, 2 * PAGE),)
    assert extents.allocate(3 * PAGE) == (Extent(9 * PAGE, 3 * PAGE),)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_neighbours_join(order: tuple[int, ...]) -> None:
    extents = Extents()
    pieces = [extents.allocate(2 * PAGE) for _ in range(4)]
    for i in order:
        piece = pieces[i]
        assert piece is not None
        extents.free(piece)
    assert extents.allocate(6 * PAGE) == (Extent(0, 6 * PAGE),)


def test_a_large_piece_is_scattered_only_at_the_limit() -> None:
    extents = Extents(8 * PAGE)
    pieces = [extents.allocate(PAGE) for _ in range(6)]
    for piece in pieces[::2]:
        assert piece is not None
        extents.free(piece)
    assert extents.allocate(2 * PAGE) == (Extent(6 * PAGE, 2 * PAGE),)
    assert extents.allocate(2 * PAGE) == (Extent(0, PAGE), Extent(2 * PAGE, PAGE))
    assert extents.allocate(2 * PAGE) is None
