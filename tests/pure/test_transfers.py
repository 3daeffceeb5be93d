# SPDX-License-Identifier: Apache-2.0
"""What goes out to the disk comes back, or the caller is told."""

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from lowtide.errors import SpillError
from lowtide.runtime.extents import whole_pages
from lowtide.runtime.jobs import Track
from lowtide.runtime.spill import DiskCalls, spill_directory
from lowtide.runtime.transfers import DiskLane, Read
from tests.pure.blocks import MANY, Block, Gate, failing, round_trip

pytestmark = pytest.mark.filterwarnings("ignore:the spill directory")

# What goes out comes back.


@pytest.mark.parametrize("n_bytes", [1, 4095, 4096, 4097, 65_536, MANY, 9_000_001])
@pytest.mark.parametrize("out", [0, 64, 4032])
@pytest.mark.parametrize("back", [0, 64])
def test_every_size_and_alignment_returns(
    make: Callable[..., DiskLane], n_bytes: int, out: int, back: int
) -> None:
    block = Block(n_bytes, shift=out, fill=n_bytes)
    before = block.content()
    assert round_trip(make(), block, back) == before
    assert block.content() == before


def test_nothing_is_a_block_too(make: Callable[..., DiskLane]) -> None:
    lane = make()
    copy = lane.write(0, 0)
    assert copy.wait() >= 0
    lane.read(copy, 0).wait()
    assert lane.used_bytes == 0


def test_many_blocks_at_once_keep_apart(make: Callable[..., DiskLane]) -> None:
    lane = make()
    rng = random.Random(7)
    held: list[tuple[object, bytes]] = []
    for i in range(200):
        block = Block(rng.randrange(1, 300_000), shift=rng.choice([0, 64]), fill=i)
        copy = lane.write(block.address, block.n_bytes)
        target = Block(block.n_bytes)
        assert lane.read(copy, target.address).wait() >= 0
        assert target.content() == block.content()
        held.append((copy, block.content()))
        if len(held) > 20:
            old, content = held.pop(rng.randrange(len(held)))
            again = Block(len(content), shift=64)
            lane.read(old, again.address).wait()  # type: ignore[arg-type]
            assert again.content() == content
            lane.free(old)  # type: ignore[arg-type]
    for copy, _ in held:
        lane.free(copy)  # type: ignore[arg-type]
    assert lane.used_bytes == 0


def test_scattered_extents_return_in_order(make: Callable[..., DiskLane]) -> None:
    lane = make(limit_bytes=16 * 4096)
    small = [Block(2 * 4096, fill=i) for i in range(8)]
    copies = [lane.write(block.address, block.n_bytes) for block in small]
    for copy in copies[::2]:
        copy.wait()
        lane.free(copy)
    assert (
        round_trip(lane, Block(8 * 4096 - 5, fill=99), 64)
        == Block(8 * 4096 - 5, fill=99).content()
    )
    assert lane.file_bytes <= 16 * 4096


def test_totals_count_payload(make: Callable[..., DiskLane]) -> None:
    lane = make()
    round_trip(lane, Block(MANY, fill=1))
    assert (lane.written_bytes, lane.read_bytes) == (MANY, MANY)
    assert lane.file_bytes == 49 * 4096
    assert lane.queued_write_seconds() == lane.queued_read_seconds() == 0


# Disks that misbehave.


@pytest.mark.parametrize("step", [4096, 5000, 20_000])
@pytest.mark.parametrize("shift", [0, 64])
def test_short_writes_and_reads_go_on(
    make: Callable[..., DiskLane], step: int, shift: int
) -> None:
    def cut(call: Callable[..., int]) -> Callable[..., int]:
        return lambda descriptor, views, offset: min(
            step, call(descriptor, views, offset)
        )

    lane = make(calls=DiskCalls(pwritev=cut(os.pwritev), preadv=cut(os.preadv)))
    block = Block(MANY, shift=shift, fill=3)
    assert round_trip(lane, block, shift) == block.content()


def test_a_call_that_moves_nothing_is_an_error(make: Callable[..., DiskLane]) -> None:
    lane = make(calls=DiskCalls(pwritev=lambda *_: 100))
    with pytest.raises(SpillError, match=r"writing 195\.3 KiB failed") as caught:
        lane.write(Block(MANY).address, MANY).wait()
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_leaves_memory_and_lane_usable(
    make: Callable[..., DiskLane], disk: Path, number: int
) -> None:
    lane = make(calls=DiskCalls(pwritev=failing(number, times=1)))
    block = Block(MANY, fill=5)
    copy = lane.write(block.address, MANY)
    with pytest.raises(SpillError, match=r"writing 195\.3 KiB failed in") as caught:
        copy.wait()
    assert caught.value.errno == number
    assert caught.value.filename == str(disk)
    assert copy.done
    assert copy.failed
    assert block.content() == Block(MANY, fill=5).content()
    assert lane.used_bytes == 0
    lane.free(copy)
    assert round_trip(lane, block) == block.content()


def test_a_read_of_what_was_never_written_fails_alike(
    make: Callable[..., DiskLane],
) -> None:
    gate = Gate(failing(errno.ENOSPC, times=1))
    lane = make(calls=DiskCalls(pwritev=gate))
    block, target = Block(MANY, fill=1), Block(MANY)
    copy = lane.write(block.address, MANY)
    early = lane.read(copy, target.address)
    gate.open.set()
    with pytest.raises(SpillError, match="No space left"):
        early.wait()
    assert early.failed
    late = lane.read(copy, target.address)
    assert late.done
    assert late.failed
    assert lane.queued_read_seconds() == 0


def test_a_truncated_file_is_noticed(make: Callable[..., DiskLane]) -> None:
    lane = make(calls=DiskCalls(preadv=lambda *_: 0))
    block = Block(MANY, fill=1)
    read = lane.read(lane.write(block.address, MANY), Block(MANY).address)
    with pytest.raises(SpillError, match=r"reading 195\.3 KiB failed"):
        read.wait()


def test_an_unexpected_error_does_not_end_the_thread(
    make: Callable[..., DiskLane],
) -> None:
    def broken(*_: object) -> int:
        raise ZeroDivisionError

    lane = make(calls=DiskCalls(preadv=broken))
    block = Block(MANY, fill=1)
    copy = lane.write(block.address, MANY)
    for _ in range(2):
        with pytest.raises(SpillError, match="ZeroDivisionError"):
            lane.read(copy, Block(MANY).address).wait()


def test_a_missing_directory_may_appear_later(tmp_path: Path) -> None:
    lane = DiskLane(tmp_path / "absent")
    block = Block(MANY, fill=1)
    with pytest.raises(SpillError, match="No such file") as caught:
        lane.write(block.address, MANY).wait()
    assert caught.value.errno == errno.ENOENT
    (tmp_path / "absent").mkdir()
    assert round_trip(lane, block) == block.content()
    lane.close()


def test_a_read_only_directory_is_named(make: Callable[..., DiskLane]) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    copy = make(calls=DiskCalls(open=refuse)).write(Block(1).address, 1)
    with pytest.raises(
        SpillError, match=r"Read-only file system\. Free space there or"
    ):
        copy.wait()


def test_direct_transfers_may_be_refused_late(make: Callable[..., DiskLane]) -> None:
    lane = make(calls=DiskCalls(pwritev=failing(errno.EINVAL, times=1)))
    block = Block(MANY, fill=1)
    assert round_trip(lane, block) == block.content()


def test_a_file_system_without_nameless_files(
    make: Callable[..., DiskLane], disk: Path
) -> None:
    def old(path: Path, flags: int, mode: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return os.open(path, flags, mode)

    lane = make(calls=DiskCalls(open=old))
    block = Block(MANY, fill=1)
    assert round_trip(lane, block) == block.content()
    assert list(disk.iterdir()) == []


# Limits.


def test_the_limit_is_told_with_its_numbers(make: Callable[..., DiskLane]) -> None:
    lane = make(limit_bytes=50 * 4096)
    block = Block(MANY, fill=1)
    copy = lane.write(block.address, MANY)
    with pytest.raises(SpillError, match=r"200000 bytes\) were asked for") as caught:
        lane.write(block.address, MANY)
    error = caught.value
    assert error.asked_bytes == MANY
    assert (error.used_bytes, error.allowed_bytes) == (49 * 4096, 50 * 4096)
    copy.wait()
    lane.free(copy)
    assert round_trip(lane, block) == block.content()


# Estimates.


def test_bandwidth_starts_with_a_guess_and_learns() -> None:
    track = Track("writing")
    assert track.bandwidth == pytest.approx(1e9)
    for _ in range(100):
        track.measured(50_000_000, 50_000_000 / 2.5e9)
    assert track.bandwidth == pytest.approx(2.5e9, rel=0.01)
    for _ in range(100):
        track.measured(50_000_000, 50_000_000 / 1.2e8)
    assert track.bandwidth == pytest.approx(1.2e8, rel=0.01)


def test_small_transfers_hardly_move_the_estimate() -> None:
    track = Track("reading")
    for _ in range(10):
        track.measured(4096, 1e-4)
    assert track.bandwidth == pytest.approx(1e9, rel=0.05)


def test_what_is_queued_takes_its_time(make: Callable[..., DiskLane]) -> None:
    gate = Gate(os.pwritev)
    lane = make(calls=DiskCalls(pwritev=gate))
    block = Block(MANY, fill=1)
    copies = [lane.write(block.address, MANY) for _ in range(5)]
    assert lane.queued_write_seconds() == pytest.approx(5 * MANY / 1e9)
    gate.open.set()
    for copy in copies:
        copy.wait()
    assert lane.queued_write_seconds() == 0


# Where.


def mounted(monkeypatch: pytest.MonkeyPatch, *in_memory: Path) -> None:
    """Pretend that these directories are kept in memory, and no others."""
    monkeypatch.setattr(
        "lowtide.runtime.spill.memory_file_system",
        lambda directory: "tmpfs" if directory in in_memory else None,
    )


def test_what_was_asked_for_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mounted(monkeypatch, tmp_path)
    assert spill_directory(tmp_path) == tmp_path
    assert caplog.text.count("kept in memory") == 1
    monkeypatch.setenv("LOWTIDE_SPILL_DIR", str(tmp_path))
    assert spill_directory(None, warn=False) == tmp_path
    assert caplog.text.count("kept in memory") == 1
    assert spill_directory(None) == tmp_path
    assert caplog.text.count("kept in memory") == 2


def test_a_directory_in_memory_is_not_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOWTIDE_SPILL_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    mounted(monkeypatch)
    assert spill_directory(None) == tmp_path
    mounted(monkeypatch, tmp_path)
    assert spill_directory(None) == Path("/var/tmp")
    mounted(monkeypatch, tmp_path, Path("/var/tmp"))
    assert spill_directory(None) == Path.cwd()
    mounted(monkeypatch, tmp_path, Path("/var/tmp"), Path.cwd())
    with pytest.raises(SpillError, match="choosing a spill directory"):
        spill_directory(None)


def test_shared_memory_is_recognised(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("this machine has no /dev/shm")
    spill_directory(Path("/dev/shm"))
    assert "/dev/shm is kept in memory (tmpfs)" in caplog.text


def test_a_read_knows_its_size(make: Callable[..., DiskLane]) -> None:
    lane = make()
    block = Block(10, fill=1)
    read = lane.read(lane.write(block.address, 10), Block(10).address)
    assert isinstance(read, Read)
    assert read.n_bytes == 10
    read.wait()


# Steps.


def test_a_step_that_has_written_its_share_is_refused_more(
    make: Callable[..., DiskLane],
) -> None:
    lane = make(step_limit_bytes=2 * MANY)
    block = Block(MANY, fill=1)
    for _ in range(2):
        round_trip(lane, block)
    with pytest.raises(SpillError, match="a step are in use") as caught:
        lane.write(block.address, MANY)
    assert "disk_writes=" in str(caught.value)
    assert caught.value.used_bytes == 2 * MANY
    lane.begin_step()
    assert round_trip(lane, block) == block.content()
    assert lane.step_written_bytes == 2 * MANY
    assert lane.written_bytes == 3 * MANY


def test_a_disk_that_fails_again_and_again_is_let_be_for_the_step(
    make: Callable[..., DiskLane],
) -> None:
    lane = make(calls=DiskCalls(pwritev=failing(errno.ENOSPC, times=3)))
    block = Block(MANY, fill=1)
    for _ in range(3):
        copy = lane.write(block.address, MANY)
        with pytest.raises(SpillError, match="No space left"):
            copy.wait()
        lane.free(copy)
    with pytest.raises(SpillError, match="No space left"):
        lane.write(block.address, MANY)
    lane.begin_step()
    assert round_trip(lane, block) == block.content()


def test_a_slow_directory_and_one_in_memory_are_remarked(
    make: Callable[..., DiskLane], disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = make()
    monkeypatch.setattr(
        "lowtide.runtime.transfers.memory_file_system", lambda _: "tmpfs"
    )
    assert lane.remarks() == ()
    round_trip(lane, Block(MANY, fill=1))
    assert "kept in memory" in lane.remarks()[0]
    monkeypatch.setattr("lowtide.runtime.transfers.memory_file_system", lambda _: None)
    assert lane.remarks() == ()
    lane._writes.measured(2**30, 2**30 / 20e6)
    (remark,) = lane.remarks()
    assert f"{disk} is slow: writing at 19" in remark


def test_limits_can_be_asked_for(make: Callable[..., DiskLane]) -> None:
    block = Block(MANY, fill=1)
    lane = make(step_limit_bytes=2 * MANY)
    assert lane.allows(2 * MANY)
    round_trip(lane, block)
    assert lane.remarks() == ()
    assert not lane.allows(2 * MANY)
    assert "was used up" in lane.remarks()[0]
    lane.begin_step()
    assert lane.allows(2 * MANY)
    full = make(limit_bytes=whole_pages(MANY))
    assert full.allows(MANY)
    full.write(block.address, MANY).wait()
    assert not full.allows(1)
