# SPDX-License-Identifier: Apache-2.0
"""What steps ask for again lies where a plan puts it: on disk, and in host memory."""

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lowtide.runtime.extents import PAGE, Extent, Extents
from lowtide.runtime.pinned import Slab, Slabs
from lowtide.runtime.rounds import Rounds, Ticket
from lowtide.runtime.transfers import DiskLane
from tests.pure.blocks import Block
from tests.virtual_lane import VirtualDriver

Held = list[tuple[Extent, ...]]
# First fit needs 8 pages: the last request does not fit into the hole of the first.
# At most 5 are held at once.
SIZES = [3, 1, 4]
LIVES = [2, 2, 1]  # requests until the release


def one_step(extents: Extents, sizes: list[int], lives: list[int], held: Held) -> None:
    """Ask for pages, each released before the request that its life reaches."""
    extents.begin_step()
    for past in held:
        extents.free(past)
    held.clear()
    due: dict[int, list[tuple[Extent, ...]]] = {}
    for i, (size, life) in enumerate(zip(sizes, lives, strict=True)):
        for past in due.pop(i, []):
            extents.free(past)
        extent = extents.allocate(size * PAGE)
        assert extent is not None
        due.setdefault(i + life, []).append(extent)
    held += [past for pasts in due.values() for past in pasts]


def test_a_plan_makes_the_file_smaller_than_first_fit_does() -> None:
    extents, held = Extents(), list[tuple[Extent, ...]]()
    for _ in range(2):
        one_step(extents, SIZES, LIVES, held)
    assert extents.file_bytes == 8 * PAGE
    extents.begin_step()
    assert extents.planned_bytes == 5 * PAGE
    for past in held:
        extents.free(past)
    held.clear()
    assert extents.shrink() == extents.planned_bytes
    for _ in range(4):
        one_step(extents, SIZES, LIVES, held)
    assert extents.file_bytes == extents.planned_bytes


def test_what_crosses_steps_alternates_and_what_stays_is_left_alone() -> None:
    rounds = Rounds()
    before: Ticket | None = None
    places: list[list[int | None]] = []
    for _ in range(7):
        rounds.begin()
        places.append([])
        tickets = []
        for n in (5, 2, 1):
            places[-1].append(rounds.offset(n * PAGE))
            tickets.append(rounds.ask(n * PAGE))
            if n == 5 and before is not None:
                rounds.end(before)
            if n == 2:
                rounds.end(tickets[-1])
        before = tickets[0]  # the last is never given back
    assert places[0] == places[1] == [None] * 3
    assert places[-1][0] != places[-2][0]
    assert places[-1][0] == places[-3][0]
    assert places[-1][2] is None
    assert rounds.height_bytes == 10 * PAGE


@given(st.data())
def test_no_byte_is_given_twice_whatever_steps_do(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 1 << 30))
    choice = random.Random(seed)
    limit = data.draw(st.none() | st.integers(8, 40).map(lambda n: n * PAGE))
    extents = Extents(limit)
    held: Held = []
    sizes = [choice.randint(1, 5) for _ in range(choice.randint(1, 8))]
    for _ in range(12):
        extents.begin_step()
        extents.shrink()
        asked = sizes if choice.random() < 0.8 else [choice.randint(1, 6)] * 3
        for size in asked:
            while held and choice.random() < 0.6:
                extents.free(held.pop(choice.randrange(len(held))))
            given = extents.allocate(size * PAGE)
            if given is None:
                assert limit is not None
                assert extents.used_bytes + size * PAGE > limit
                continue
            assert sum(length for _, length in given) == size * PAGE
            held.append(given)
        taken = sorted(extent for piece in held for extent in piece)
        assert all(sum(a) <= b.offset for a, b in pairwise(taken))
        assert sum(length for _, length in taken) == extents.used_bytes
        assert max((sum(e) for e in taken), default=0) <= extents.file_bytes
        assert limit is None or extents.file_bytes <= limit
    for given in held:
        extents.free(given)
    assert extents.used_bytes == 0


def test_the_spill_file_shrinks_to_its_plan() -> None:
    lane = DiskLane()
    blocks = [Block(size * PAGE, fill=i) for i, size in enumerate(SIZES)]
    try:
        for step in range(7):
            lane.begin_step()
            copies = []
            for i, block in enumerate(blocks):
                copy = lane.write(block.address, block.n_bytes)
                copy.wait()
                copies.append(copy)
                for j in range(i + 1):
                    if j + LIVES[j] == i + 1:
                        target = Block(blocks[j].n_bytes)
                        lane.read(copies[j], target.address).wait()
                        assert target.content() == blocks[j].content()
                        lane.free(copies[j])
            if step == 1:
                assert lane.file_bytes == 8 * PAGE
        assert lane.planned_bytes == lane.file_bytes == 5 * PAGE
    finally:
        lane.close()


# Slabs.


def take(slabs: Slabs, pages: int) -> Slab:
    slab = slabs.take(pages * PAGE)
    assert slab is not None
    return slab


def slab_step(slabs: Slabs) -> list[int]:
    slabs.begin_step()
    due: dict[int, list[Slab]] = {}
    addresses = []
    for i, (size, life) in enumerate(zip(SIZES, LIVES, strict=True)):
        for past in due.pop(i, []):
            slabs.give(past)
        slab = take(slabs, size)
        addresses.append(slab.address)
        due.setdefault(i + life, []).append(slab)
    for pasts in due.values():
        for past in pasts:
            slabs.give(past)
    return addresses


def test_slabs_become_parts_of_one_pinned_block() -> None:
    driver = VirtualDriver()
    slabs = Slabs(driver, None)
    for _ in range(2):
        slab_step(slabs)
    held = slabs.held_bytes
    pins = slabs.pins
    addresses = slab_step(slabs)
    assert slabs.pins == pins + 1
    assert slab_step(slabs) == addresses
    assert slabs.pins == pins + 1
    assert slabs.held_bytes < held
    assert slabs.held_bytes == 5 * PAGE  # no more than what is held at once
    slabs.close()
    assert slabs.held_bytes == slabs.used_bytes == 0


def test_a_request_that_diverges_gets_a_slab_of_its_own_within_the_limit() -> None:
    limit = 24 * PAGE
    slabs = Slabs(VirtualDriver(), limit)
    for _ in range(4):
        slab_step(slabs)
    slabs.begin_step()
    first = take(slabs, SIZES[0])
    other = take(slabs, 6)  # planned: 1
    assert other.address + 6 * PAGE <= first.address or other.address >= first.address
    assert slabs.held_bytes <= limit
    assert slabs.take(16 * PAGE) is None  # beyond it
    slabs.give(first)
    slabs.give(other)
    large = take(slabs, 23)  # the block makes way
    assert slabs.held_bytes <= limit
    slabs.give(large)
    slabs.close()
