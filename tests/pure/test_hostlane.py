# SPDX-License-Identifier: Apache-2.0
"""The host lane above a virtual device: slabs, limits, the disk below, failures."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from lowtide.errors import SpillError
from lowtide.runtime.hostlane import HostLane
from lowtide.runtime.pinned import Slabs
from lowtide.runtime.spill import DiskCalls
from lowtide.runtime.transfers import DiskLane
from tests.pure.blocks import Block, failing
from tests.virtual_lane import VirtualDriver, Weather

pytestmark = pytest.mark.filterwarnings("ignore:the spill directory")

KIB = 1024
MIB = 1024 * KIB


def host_lane(
    seed: int = 0,
    *,
    limit_bytes: int | None = None,
    below: DiskLane | None = None,
    **weather: Any,
) -> HostLane:
    driver = VirtualDriver(seed, Weather(**weather))
    return HostLane(driver, limit_bytes=limit_bytes, below=below)


def back(lane: HostLane, copy: object, n_bytes: int) -> bytes:
    target = Block(n_bytes)
    lane.read(copy, target.address).wait()  # type: ignore[arg-type]
    return target.content()


# Copies.


@pytest.mark.parametrize("delay", [0, 3, 50])
@pytest.mark.parametrize("n_bytes", [0, 1, 4096, 100_001])
def test_what_goes_out_comes_back(delay: int, n_bytes: int) -> None:
    lane = host_lane(1, delay=delay)
    block = Block(n_bytes, fill=2)
    copy = lane.write(block.address, n_bytes)
    assert back(lane, copy, n_bytes) == block.content()
    assert copy.done
    assert not copy.failed
    lane.free(copy)
    assert lane.used_bytes == 0
    assert (lane.written_bytes, lane.read_bytes) == (n_bytes, n_bytes)
    assert lane.write_bandwidth > 0
    lane.close()


def test_a_read_waits_for_its_copy_on_the_other_stream() -> None:
    """Megatron-LM#7398: a reload that races the copy it reads corrupts a tensor."""
    for seed in range(200):
        lane = host_lane(seed)
        block = Block(5000, fill=seed)
        copy = lane.write(block.address, 5000)
        assert not copy.over
        assert back(lane, copy, 5000) == block.content()
        lane.close()


def test_a_copy_that_is_freed_under_way_gives_its_slab_back_later() -> None:
    lane = host_lane(3, delay=30)
    block = Block(5000, fill=1)
    copy = lane.write(block.address, 5000)
    lane.free(copy)
    assert lane.slabs.used_bytes > 0
    copy.wait()
    assert lane.used_bytes == 0
    lane.close()


def test_a_slab_is_not_used_again_while_a_read_needs_it() -> None:
    """torchtitan PR#2581: a pool that hands a slot out too early."""
    for seed in range(100):
        driver = VirtualDriver(seed, Weather(delay=40))
        lane = HostLane(driver, limit_bytes=8 * KIB, below=None)
        first, second = Block(8 * KIB, fill=1), Block(8 * KIB, fill=2)
        copy = lane.write(first.address, 8 * KIB)
        target = Block(8 * KIB)
        read = lane.read(copy, target.address)
        lane.free(copy)
        other = lane.write(second.address, 8 * KIB)  # waits for the one slab there is
        read.wait()
        assert target.content() == first.content()
        assert back(lane, other, 8 * KIB) == second.content()
        assert lane.slabs.pins == 1
        lane.close()


def test_a_copy_that_the_device_loses_is_told() -> None:
    lane = host_lane(1, lost_writes=1)
    copy = lane.write(Block(5000, fill=1).address, 5000)
    with pytest.raises(SpillError, match="the device lost this copy"):
        copy.wait()
    assert copy.failed
    read = lane.read(copy, Block(5000).address)
    assert read.failed
    lane.free(copy)
    assert lane.used_bytes == 0
    lane.close()


def test_a_read_behind_a_copy_that_is_lost_fails_too() -> None:
    lane = host_lane(1, lost_writes=1)
    copy = lane.write(Block(5000, fill=1).address, 5000)
    read = lane.read(copy, Block(5000).address)
    with pytest.raises(SpillError, match="the device lost this copy"):
        read.wait()
    lane.free(copy)
    assert lane.used_bytes == 0
    lane.close()


def test_a_device_that_refuses_is_told() -> None:
    lane = host_lane(1, refused=1)
    with pytest.raises(SpillError, match="the device refuses this copy"):
        lane.write(Block(5000).address, 5000)
    assert lane.used_bytes == 0
    lane.close()


# Slabs.


def test_slabs_are_as_large_as_what_they_hold() -> None:
    """pytorch#95823: 2.25 GiB of pinned memory took 4."""
    driver = VirtualDriver()
    slabs = Slabs(driver, None)
    wanted = [9 * MIB + 4 * KIB, 33 * MIB, 2 * MIB + 1, 700_001]
    held = [slabs.take(n) for n in wanted]
    assert slabs.held_bytes == sum(driver.pinned.values())
    assert slabs.held_bytes <= 1.01 * sum(wanted)
    for slab in held:
        assert slab is not None
        slabs.give(slab)
    slabs.close()
    assert driver.pinned == {}
    assert slabs.held_bytes == 0


def test_after_the_first_step_nothing_is_pinned_any_more() -> None:
    """pytorch#86097: pinning is not free."""
    slabs = Slabs(VirtualDriver(), None)
    sizes = [random.Random(1).randrange(1, MIB) for _ in range(20)]
    for _ in range(2):
        held = [slabs.take(n) for n in sizes]
        for slab in held:
            assert slab is not None
            slabs.give(slab)
        pins, kept = slabs.pins, slabs.held_bytes
    assert pins == len(sizes)
    assert slabs.held_bytes == kept
    slabs.close()


def test_kept_slabs_make_way_for_other_sizes() -> None:
    driver = VirtualDriver()
    slabs = Slabs(driver, MIB)
    slab = slabs.take(MIB)
    assert slab is not None
    slabs.give(slab)
    assert slabs.take(100 * KIB) is not None
    assert slabs.held_bytes == 100 * KIB
    assert sum(driver.pinned.values()) == 100 * KIB


def test_refused_pinning_leaves_pageable_slabs_and_one_remark() -> None:
    """unsloth#338: pinning fails on WSL."""
    lane = host_lane(1, pinning=False)
    block = Block(5000, fill=1)
    copies = [lane.write(block.address, 5000) for _ in range(5)]
    for copy in copies:
        assert back(lane, copy, 5000) == block.content()
    assert lane.slabs.pins == 1
    (remark,) = lane.remarks()
    assert "operation not supported" in remark
    lane.close()


# Limits, and the disk below.


def test_a_full_host_without_a_disk_is_told_with_its_numbers() -> None:
    lane = HostLane(VirtualDriver(), limit_bytes=64 * KIB, below=None)
    block = Block(40 * KIB, fill=1)
    copy = lane.write(block.address, 40 * KIB)
    with pytest.raises(SpillError, match="Allow more with host=") as caught:
        lane.write(block.address, 40 * KIB)
    assert caught.value.allowed_bytes == 64 * KIB
    assert caught.value.used_bytes == 40 * KIB
    copy.wait()
    lane.free(copy)
    again = lane.write(block.address, 40 * KIB)
    assert back(lane, again, 40 * KIB) == block.content()
    lane.close()


@pytest.mark.parametrize("limit", [0, 64 * KIB])
def test_what_the_host_cannot_hold_goes_on_to_the_disk(
    make: Callable[..., DiskLane], limit: int
) -> None:
    """DeepSpeed#1201: no room on the host, but on a disk."""
    lane = HostLane(VirtualDriver(5), limit_bytes=limit, below=make())
    blocks = [Block(30 * KIB, fill=i) for i in range(8)]
    copies = [lane.write(block.address, 30 * KIB) for block in blocks]
    assert lane.slabs.held_bytes <= max(limit, 32 * KIB)
    order = list(range(8))
    random.Random(1).shuffle(order)
    for i in order:
        assert back(lane, copies[i], 30 * KIB) == blocks[i].content()
        lane.free(copies[i])
    assert lane.used_bytes == 0
    assert lane.step_written_bytes > 0
    lane.close()


def test_a_disk_that_fails_leaves_the_copies_on_the_host(
    make: Callable[..., DiskLane],
) -> None:
    below = make(calls=DiskCalls(pwritev=failing(28, times=1000)))
    lane = HostLane(VirtualDriver(5), limit_bytes=64 * KIB, below=below)
    blocks = [Block(30 * KIB, fill=i) for i in range(2)]
    copies = [lane.write(block.address, 30 * KIB) for block in blocks]
    with pytest.raises(SpillError):
        lane.write(blocks[0].address, 30 * KIB)
    for copy, block in zip(copies, blocks, strict=True):
        assert back(lane, copy, 30 * KIB) == block.content()
    lane.close()


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_calls(make: Callable[..., DiskLane], seed: int) -> None:
    draw = random.Random(seed)
    weather = Weather(delay=draw.choice([0, 10, 100]), pinning=draw.random() < 0.5)
    disk = make() if seed % 2 else None
    lane = HostLane(
        VirtualDriver(seed, weather),
        limit_bytes=200 * KIB if disk else None,
        below=disk,
    )
    held: list[tuple[object, bytes]] = []
    for i in range(60):
        if held and draw.random() < 0.5:
            copy, expected = held[draw.randrange(len(held))]
            assert back(lane, copy, len(expected)) == expected
        if len(held) > 8 or (held and draw.random() < 0.3):
            copy, _ = held.pop(draw.randrange(len(held)))
            lane.free(copy)  # type: ignore[arg-type]
        block = Block(draw.randrange(1, 60 * KIB), fill=i)
        written = lane.write(block.address, block.n_bytes)
        held.append((written, block.content()))
        if draw.random() < 0.5:
            written.wait()
            block.set(bytes(block.n_bytes))  # from now on it may change
    for copy, expected in held:
        assert back(lane, copy, len(expected)) == expected
        lane.free(copy)  # type: ignore[arg-type]
    for sinking in list(lane._sinking):  # what is on its way to the disk goes then
        assert sinking.below is not None
        sinking.below.wait()
    assert lane.used_bytes == 0
    lane.close()
