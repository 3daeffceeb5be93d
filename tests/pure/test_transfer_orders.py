# SPDX-License-Identifier: Apache-2.0
"""The disk lane survives every order of events: waits, ends, kills and forks."""

import errno
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from lowtide.errors import SpillError
from lowtide.runtime.jobs import Track
from lowtide.runtime.spill import DiskCalls
from lowtide.runtime.transfers import DiskLane
from tests.pure.blocks import (
    MANY,
    PATIENCE_SECONDS,
    Block,
    Gate,
    failing,
    round_trip,
)

pytestmark = pytest.mark.filterwarnings("ignore:the spill directory")


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# Orders of events.


def test_a_read_waits_for_a_slow_write(make: Callable[..., DiskLane]) -> None:
    """Megatron-LM#7398: a reload that races the copy it reads, here on the disk."""
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
