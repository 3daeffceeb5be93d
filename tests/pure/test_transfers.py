# SPDX-License-Identifier: Apache-2.0
"""The disk lane keeps every byte, whatever the disk, the caller and fork do."""

import ctypes
import errno
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lowtide.errors import SpillError
from lowtide.runtime.jobs import Track
from lowtide.runtime.spill import DiskCalls, spill_directory
from lowtide.runtime.transfers import DiskLane, Read

PATIENCE_SECONDS = 60  # for what a broken lane would never do
MANY = 200_000  # bytes, 48 pages and a part

_memories: list[mmap.mmap] = []  # of this test; a lane does not keep memory alive


class Block:
    """Own memory at a chosen distance from a page's start."""

    def __init__(
        self, n_bytes: int, *, shift: int = 0, fill: int | None = None
    ) -> None:
        self._memory = mmap.mmap(-1, shift + n_bytes + 4096)
        _memories.append(self._memory)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.address = base + shift
        self.n_bytes = n_bytes
        self._shift = shift
        if fill is not None:
            self.set(random.Random(fill).randbytes(n_bytes))

    def set(self, content: bytes) -> None:
        self._memory[self._shift : self._shift + len(content)] = content

    def content(self) -> bytes:
        return self._memory[self._shift : self._shift + self.n_bytes]

    def behind(self) -> bytes:
        """Look at what lies behind the block, which nobody may touch."""
        return self._memory[self._shift + self.n_bytes :]


class Gate:
    """Hold a system call back until told."""

    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call
        self.entered = threading.Event()
        self.open = threading.Event()
        self.offsets: list[int] = []

    def __call__(
        self, descriptor: int, views: Sequence[memoryview], offset: int
    ) -> int:
        self.offsets.append(offset)
        self.entered.set()
        assert self.open.wait(PATIENCE_SECONDS)
        return self._call(descriptor, views, offset)


def failing(number: int, times: int) -> Callable[..., int]:
    """Make a write that fails so many times before it works."""
    left = [times]

    def pwritev(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return os.pwritev(descriptor, views, offset)

    return pwritev


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Give a directory; tests of the lane accept one in memory."""
    return tmp_path


@pytest.fixture(autouse=True)
def _accept_memory() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the spill directory")
        yield


@pytest.fixture
def make(disk: Path) -> Iterator[Callable[..., DiskLane]]:
    lanes: list[DiskLane] = []

    def make_lane(**arguments: object) -> DiskLane:
        lanes.append(DiskLane(disk, **arguments))  # type: ignore[arg-type]
        return lanes[-1]

    yield make_lane
    for lane in lanes:
        lane.close()
    _memories.clear()


def round_trip(lane: DiskLane, block: Block, shift: int = 0) -> bytes:
    copy = lane.write(block.address, block.n_bytes)
    copy.wait()
    target = Block(block.n_bytes, shift=shift)
    behind = target.behind()
    lane.read(copy, target.address).wait()
    assert target.behind() == behind
    lane.free(copy)
    return target.content()


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


# Orders of events.


def test_a_read_waits_for_a_slow_write(make: Callable[..., DiskLane]) -> None:
    gate = Gate(os.pwritev)
    lane = make(calls=DiskCalls(pwritev=gate))
    block, target = Block(MANY, fill=1), Block(MANY)
    copy = lane.write(block.address, MANY)
    read = lane.read(copy, target.address)
    assert gate.entered.wait(PATIENCE_SECONDS)
    assert not copy.done
    assert not read.done
    assert lane.queued_write_seconds() > 0
    gate.open.set()
    assert read.wait() > 0
    assert copy.done
    assert target.content() == block.content()


def test_a_moving_write_may_be_given_back(make: Callable[..., DiskLane]) -> None:
    gate = Gate(os.pwritev)
    lane = make(calls=DiskCalls(pwritev=gate))
    block = Block(MANY, fill=1)
    copy = lane.write(block.address, MANY)
    assert gate.entered.wait(PATIENCE_SECONDS)
    lane.free(copy)
    assert not copy.done
    assert lane.used_bytes > 0
    gate.open.set()
    copy.wait()
    assert not copy.failed
    assert lane.used_bytes == 0


def test_a_queued_write_is_dropped_when_given_back(
    make: Callable[..., DiskLane],
) -> None:
    gate = Gate(os.pwritev)
    lane = make(calls=DiskCalls(pwritev=gate))
    block = Block(MANY, fill=1)
    first, second, third = (lane.write(block.address, MANY) for _ in range(3))
    assert gate.entered.wait(PATIENCE_SECONDS)
    lane.free(second)
    assert second.done
    assert second.wait() == 0
    gate.open.set()
    third.wait()
    first.wait()
    assert lane.written_bytes == 2 * MANY
    with pytest.raises(ValueError, match="was given back"):
        lane.read(second, block.address)


def test_a_read_keeps_what_is_given_back_meanwhile(
    make: Callable[..., DiskLane],
) -> None:
    gate = Gate(os.pwritev)
    lane = make(calls=DiskCalls(pwritev=gate))
    blocks = [Block(MANY, fill=i) for i in range(2)]
    copies = [lane.write(block.address, MANY) for block in blocks]
    targets = [Block(MANY) for _ in blocks]
    reads = [
        lane.read(copy, target.address)
        for copy, target in zip(copies, targets, strict=True)
    ]
    for copy in copies:
        lane.free(copy)
    gate.open.set()
    for read, block, target in zip(reads, blocks, targets, strict=True):
        read.wait()
        assert target.content() == block.content()
    assert lane.used_bytes == 0


def test_the_read_that_is_waited_for_goes_first(make: Callable[..., DiskLane]) -> None:
    gate = Gate(os.preadv)
    lane = make(calls=DiskCalls(preadv=gate))
    block = Block(4096, fill=1)
    copies = [lane.write(block.address, 4096) for _ in range(5)]
    for copy in copies:
        copy.wait()
    target = Block(5 * 4096)
    reads = [
        lane.read(copy, target.address + 4096 * i) for i, copy in enumerate(copies)
    ]
    assert gate.entered.wait(PATIENCE_SECONDS)
    waiter = threading.Thread(target=reads[4].wait)
    lane._hurry(reads[4])
    waiter.start()
    gate.open.set()
    for read in reads:
        read.wait()
    waiter.join()
    assert [offset // 4096 for offset in gate.offsets] == [0, 4, 1, 2, 3]


def test_a_write_that_a_read_waits_for_goes_first(
    make: Callable[..., DiskLane],
) -> None:
    gate = Gate(os.pwritev)
    lane = make(calls=DiskCalls(pwritev=gate))
    block = Block(4096, fill=1)
    copies = [lane.write(block.address, 4096) for _ in range(4)]
    assert gate.entered.wait(PATIENCE_SECONDS)
    read = lane.read(copies[3], Block(4096).address)
    lane._hurry(read)
    gate.open.set()
    for copy in copies:
        copy.wait()
    assert [offset // 4096 for offset in gate.offsets] == [0, 3, 1, 2]


def test_giving_back_never_waits_for_the_lock(make: Callable[..., DiskLane]) -> None:
    lane = make()
    block = Block(MANY, fill=1)
    copy = lane.write(block.address, MANY)
    copy.wait()
    with lane._lock:  # as when the garbage collector runs inside the lane
        lane.free(copy)
    assert lane.used_bytes == 0


def test_giving_back_twice_is_once(make: Callable[..., DiskLane]) -> None:
    lane = make()
    block = Block(MANY, fill=1)
    copy, other = (lane.write(block.address, MANY) for _ in range(2))
    copy.wait()
    other.wait()
    lane.free(copy)
    lane.free(copy)
    assert lane.used_bytes == 49 * 4096


def test_errors_do_not_hold_the_callers_frames(make: Callable[..., DiskLane]) -> None:
    class Tensor:
        pass

    lane = make(calls=DiskCalls(pwritev=failing(errno.EIO, times=1)))
    copy = lane.write(Block(1).address, 1)

    def caller() -> "weakref.ref[Tensor]":
        tensor = Tensor()
        with pytest.raises(SpillError):
            copy.wait()
        return weakref.ref(tensor)

    alive = caller()
    assert copy.failed
    assert alive() is None


# Ends.


def test_close_leaves_nothing(disk: Path) -> None:
    before = open_descriptors(), threading.active_count()
    for _ in range(5):
        lane = DiskLane(disk)
        assert round_trip(lane, Block(MANY, fill=1)) == Block(MANY, fill=1).content()
        lane.close()
        lane.close()
    assert (open_descriptors(), threading.active_count()) == before
    assert list(disk.iterdir()) == []
    with pytest.raises(SpillError, match="the spill file is closed"):
        lane.write(0, 0)


def test_close_fails_what_is_queued_and_finishes_what_moves(
    make: Callable[..., DiskLane],
) -> None:
    gate = Gate(os.pwritev)
    lane = make(calls=DiskCalls(pwritev=gate))
    block = Block(MANY, fill=1)
    moving, queued = (lane.write(block.address, MANY) for _ in range(2))
    read = lane.read(queued, Block(MANY).address)
    late = lane.read(moving, Block(MANY).address)
    assert gate.entered.wait(PATIENCE_SECONDS)
    closer = threading.Thread(target=lane.close)
    closer.start()
    for job in (queued, read):
        with pytest.raises(SpillError, match="the spill file is closed"):
            job.wait()
    gate.open.set()
    closer.join(PATIENCE_SECONDS)
    moving.wait()
    with pytest.raises(SpillError, match="the spill file is closed"):
        late.wait()


def test_an_unused_lane_makes_no_file_and_no_thread(disk: Path) -> None:
    before = open_descriptors(), threading.active_count()
    lane = DiskLane(disk)
    assert (open_descriptors(), threading.active_count()) == before
    lane.close()


def test_a_killed_process_leaves_no_file(disk: Path) -> None:
    script = """
import sys, os, signal, mmap, ctypes, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from lowtide.runtime.transfers import DiskLane
memory = mmap.mmap(-1, 1 << 20)
lane = DiskLane(Path(sys.argv[1]))
lane.write(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1 << 20).wait()
assert lane.written_bytes == 1 << 20
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script, str(disk)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert list(disk.iterdir()) == []


def test_a_program_may_end_without_closing(disk: Path) -> None:
    script = """
import sys, mmap, ctypes, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from lowtide.runtime.transfers import DiskLane
memory = mmap.mmap(-1, 1 << 20)
lane = DiskLane(Path(sys.argv[1]))
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
copies = [lane.write(address, 1 << 20) for _ in range(50)]
raise SystemExit(7)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(disk)],
        check=False,
        timeout=PATIENCE_SECONDS,
        capture_output=True,
    )
    assert (done.returncode, done.stderr) == (7, b"")


# Forks.


def in_child(act: Callable[[], bool]) -> bool:
    """Fork, and tell whether the child found that all was well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if act() else 2
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def test_the_child_of_a_fork_forgets_and_the_parent_goes_on(
    make: Callable[..., DiskLane],
) -> None:
    lane = make()
    block, target = Block(MANY, fill=1), Block(MANY)
    copy = lane.write(block.address, MANY)
    copy.wait()

    def child() -> bool:
        lane.free(copy)
        lane.close()
        lane.forget()
        try:
            lane.write(block.address, MANY)
        except SpillError:
            return threading.active_count() == 1
        return False

    assert in_child(child)
    lane.read(copy, target.address).wait()
    assert target.content() == block.content()
    assert round_trip(lane, block) == block.content()


def test_a_fork_waits_for_what_moves_and_fails_the_rest_in_the_child(
    make: Callable[..., DiskLane],
) -> None:
    gate = Gate(os.pwritev)
    lane = make(calls=DiskCalls(pwritev=gate))
    block = Block(MANY, fill=1)
    moving, queued = (lane.write(block.address, MANY) for _ in range(2))
    target = Block(MANY)
    read = lane.read(queued, target.address)
    assert gate.entered.wait(PATIENCE_SECONDS)
    threading.Timer(0.05, gate.open.set).start()
    assert in_child(lambda: moving.done and queued.failed and read.failed)
    read.wait()
    assert target.content() == block.content()


def test_forget_fails_even_what_was_moving(make: Callable[..., DiskLane]) -> None:
    gate = Gate(os.pwritev)
    lane = make(calls=DiskCalls(pwritev=gate))
    block = Block(MANY, fill=1)
    copy = lane.write(block.address, MANY)
    read = lane.read(copy, Block(MANY).address)
    assert gate.entered.wait(PATIENCE_SECONDS)
    twin = DiskLane.__new__(DiskLane)  # what a child has: the state, not the threads
    twin.__dict__.update(lane.__dict__)
    twin._file = None
    twin._writes, twin._reads = Track("writing"), Track("reading")
    twin._writes.active = lane._writes.active
    twin.forget()
    for job in (copy, read):
        assert job.done
        assert job.failed
    gate.open.set()


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
        "lowtide.runtime.spill._memory_file_system",
        lambda directory: "tmpfs" if directory in in_memory else None,
    )


def test_what_was_asked_for_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted(monkeypatch, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        with pytest.warns(RuntimeWarning, match="kept in memory"):
            assert spill_directory(tmp_path) == tmp_path
        monkeypatch.setenv("LOWTIDE_SPILL_DIR", str(tmp_path))
        with pytest.warns(RuntimeWarning, match="kept in memory"):
            assert spill_directory(None) == tmp_path


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


def test_shared_memory_is_recognised() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("this machine has no /dev/shm")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        with pytest.warns(
            RuntimeWarning, match=r"/dev/shm is kept in memory \(tmpfs\)"
        ):
            spill_directory(Path("/dev/shm"))


def test_a_read_knows_its_size(make: Callable[..., DiskLane]) -> None:
    lane = make()
    block = Block(10, fill=1)
    read = lane.read(lane.write(block.address, 10), Block(10).address)
    assert isinstance(read, Read)
    assert read.n_bytes == 10
    read.wait()
