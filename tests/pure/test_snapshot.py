# SPDX-License-Identifier: Apache-2.0
"""CUDA memory snapshots: what they say, and that nothing in them ever runs."""

import datetime
import os
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import FileError
from lowtide.recorder.snapshot import parse_snapshot
from tests.pure.foreign import MIB, block, event, mutate, refusal, snapshot


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_blocks(protocol: int) -> None:
    history = parse_snapshot(pickle.dumps(snapshot(), protocol=protocol))
    assert (history.source, history.device) == ("CUDA memory snapshot", "cuda:0")
    assert history.blocks[["bytes", "start", "stop"]].tolist() == [
        (3 * MIB, 0, 2),  # released, never allocated: was there
        (4 * MIB - 24, 0, -1),  # in the segments only: was there, as requested
        (6 * MIB - 24, 3, -1),
        (5 * MIB, 4, 7),  # until its release is completed, not requested
        (2 * MIB, 6, 8),
    ]
    assert history.events == 8
    assert [history.name_of(i) for i in range(5)] == [
        "",
        "",
        "train.py:53 forward",
        "train.py:53 forward",
        "at::empty_cuda",
    ]
    assert history.live_curve.tolist() == [
        n * MIB - 24 * k
        for n, k in zip(
            (7, 7, 4, 10, 15, 15, 17, 12, 10), (1, 1, 1, 2, 2, 2, 2, 2, 2), strict=True
        )
    ]
    assert history.reserved_bytes == 20 * MIB
    assert history.steps == 1
    assert history.groups == ("stream 0",)


def test_a_bare_list_of_segments() -> None:
    history = parse_snapshot(pickle.dumps(snapshot()["segments"]))
    assert history.events == 0
    assert history.peak_bytes == 10 * MIB - 48
    assert history.reserved_bytes == 20 * MIB


def test_blocks_of_pytorch_2_0() -> None:
    """There a block has no address, and its sizes stand in its history."""
    past = [{"addr": 4096, "real_size": 1000, "frames": []}]
    blocks = [
        {"size": 512, "state": "inactive"},
        {"size": 1024, "state": "active_allocated", "history": past},
        {"size": 2048, "state": "active_allocated"},
    ]
    segment = {"device": 0, "address": 4096, "total_size": 3584, "stream": 0}
    held = {"segments": [{**segment, "blocks": blocks}], "device_traces": [[]]}
    held["device_traces"] = [[event("free_completed", 4608, 7)]]
    history = parse_snapshot(pickle.dumps(held))
    assert sorted(history.blocks["bytes"].tolist()) == [7, 1000, 2048]


def test_streams_and_pools_are_groups() -> None:
    content = snapshot()
    trace = content["device_traces"][0]
    trace.append(event("alloc", 1 << 40, 7, stream=5))
    trace.append(event("alloc", 1 << 41, 9, pool_id=(0, 3)))
    history = parse_snapshot(pickle.dumps(content))
    assert history.groups == ("stream 0", "stream 5", "stream 0, pool 0.3")
    assert history.group.tolist()[-2:] == [1, 2]


def test_the_device_with_most_memory_is_chosen() -> None:
    content = snapshot()
    other = {"device": 1, "address": 0, "total_size": 90 * MIB, "stream": 0}
    blocks = [block(0, 90 * MIB, "active_allocated")]
    content["segments"].append({**other, "blocks": blocks})
    data = pickle.dumps(content)
    history = parse_snapshot(data)
    assert (history.device, history.peak_bytes) == ("cuda:1", 90 * MIB - 24)
    assert history.notes == ("other devices in this file: 0",)
    assert parse_snapshot(data, device=0).events == 8
    with pytest.raises(FileError, match=r"nothing of device 3; there is: 0, 1"):
        parse_snapshot(data, device=3)


def test_what_is_missing_is_said() -> None:
    requested = [event("alloc", 1, 8), event("free_requested", 1, 8)]
    history = parse_snapshot(dump([], requested))
    assert history.blocks["stop"].tolist() == [2]
    assert "only requested ones" in history.notes[0]
    history = parse_snapshot(dump([], [event("alloc", 1, 8), event("alloc", 1, 9)]))
    assert history.blocks["stop"].tolist() == [2, -1]
    assert "1 blocks end unseen" in history.notes[0]
    full = {"action": "oom", "size": 99, "device_free": 7, "stream": 0}
    history = parse_snapshot(dump([], [full]))
    assert history.notes == ("the device ran out of memory 1 times",)


def dump(segments: Any, trace: Any) -> bytes:
    return pickle.dumps({"segments": segments, "device_traces": [trace]})


class Runs:
    """Leave a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


@pytest.mark.parametrize("protocol", range(6))
def test_no_function_runs(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "ran"
    content = snapshot()
    content["device_traces"][0][0]["user_metadata"] = Runs(mark)
    with pytest.raises(FileError):
        parse_snapshot(pickle.dumps(content, protocol=protocol))
    assert not mark.exists()


@pytest.mark.parametrize(
    "value",
    [
        datetime.date(2026, 1, 1),
        {1, 2},
        frozenset({1}),
        b"bytes",
        bytearray(b"x"),
        1 << 3000,
        ((1, 2), (3, 4)),
        (1,),
        (1, 2, 3, 4),
        print,
    ],
)
def test_what_no_snapshot_holds_is_refused(value: Any) -> None:
    data = pickle.dumps({"segments": [], "more": value})
    with pytest.raises(FileError, match="uses the pickle operation"):
        parse_snapshot(data)


def test_every_other_operation_is_refused() -> None:
    allowed = set(b"}])(suaeN\x88\x89\x94G\x80hjqJKM\x8c\x58\x8d\x8a\x86\x95.r")
    operations = {op.code.encode("latin-1")[0] for op in pickletools.opcodes}
    assert allowed < operations
    for operation in set(range(256)) - allowed:
        with pytest.raises(FileError, match="uses the pickle operation"):
            parse_snapshot(b"\x80\x04" + bytes([operation]) + b"\x00" * 40 + b".")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "does not begin as a pickle"),
        (b"(dp0\n.", "does not begin as a pickle"),
        (b"\x80\x04", "is cut off"),
        (b"\x80\x04}", "is cut off"),
        (b"\x80\x04}.}", "1 bytes follow the end"),
        (b"\x80\x04}r\xff\xff\xff\x7f.", "it numbers more objects than it has"),
        (b"\x80\x04\x8d" + b"\xff" * 8 + b".", "is cut off: a text of"),
        (b"\x80\x04X\xff\xff\xff\x7fa.", "is cut off: a text of"),
        (b"\x80\x04\x95" + b"\xff" * 8 + b"}.", "is cut off: a frame of"),
        (b"\x80\x04.", "is damaged"),
        (b"\x80\x04u.", "is damaged"),
        (b"\x80\x04h\x09.", "is damaged"),
        (b"\x80\x04}}Ns.", "is damaged"),
        (b"\x80\x04X\x01\x00\x00\x00\xff.", "is damaged"),
        (b"\x80\x63}.", "is damaged"),
        (b"\x80\x04N.", "it is no dictionary"),
        (b"\x80\x04" + b"}" * 20_000 + b".", "little but empty containers"),
        (b"\x80\x04}.", "there is no list 'segments'"),
    ],
)
def test_reasons(data: bytes, why: str) -> None:
    with pytest.raises(FileError, match=why):
        parse_snapshot(data)


def seg(**changes: Any) -> dict[str, Any]:
    fields = {"device": 0, "address": 0, "total_size": 8, "stream": 0, "blocks": []}
    return {**fields, **changes}


@pytest.mark.parametrize(
    ("segments", "trace", "why"),
    [
        ([3], [], "a segment is no dictionary"),
        ([seg(total_size=-1)], [], "-1 is no segment's total_size"),
        ([seg(total_size=None)], [], "total_size is no whole number"),
        ([seg(device=1.5)], [], "device is no whole number"),
        ([seg(blocks=[7])], [], "a block is no dictionary"),
        ([seg(blocks={})], [], "no list 'blocks'"),
        ([seg(blocks=[{"size": 0}])], [], "0 is no block's size"),
        ([], [7], "an event is no dictionary"),
        ([], [{}], "an event without an action"),
        ([], [{"action": []}], "an event without an action"),
        ([], [event("alloc", 1, -5)], "-5 is no block's size"),
        ([], [event("alloc", 1, 1 << 60)], f"has a block of {1 << 60} bytes"),
        ([], [event("alloc", -1, 5)], "-1 is no block's address"),
        ([], [{"action": "alloc", "addr": 1}], "size is no whole number"),
        ([], [event("alloc", 1, 5, stream="x")], "stream is no whole number"),
        ([], [event("alloc", i, 1 << 50) for i in range(1025)], "more bytes than any"),
        ([], {}, "a device's events are no list"),
    ],
)
def test_wrong_shapes(segments: Any, trace: Any, why: str) -> None:
    with pytest.raises(FileError, match=why):
        parse_snapshot(dump(segments, trace))


def test_a_list_named_many_times_is_not_walked_many_times() -> None:
    """A few bytes for each of 2000 x 2000 blocks would keep a reader busy for hours."""
    blocks = [block(1, 8, "inactive")] * 2000
    data = pickle.dumps([seg(blocks=blocks)] * 2000)
    with pytest.raises(FileError, match="more entries than it has bytes"):
        parse_snapshot(data)


bounded = settings(deadline=None, max_examples=150)


@bounded
@given(content=st.binary(max_size=300))
@pytest.mark.parametrize("start", [b"", b"\x80\x04", b"\x80\x04}"])
def test_random_bytes(start: bytes, content: bytes) -> None:
    assert refusal(parse_snapshot, start + content).isprintable()


@bounded
@given(seed=st.integers(0, 10**9), protocol=st.sampled_from([2, 4]))
def test_mutations(seed: int, protocol: int) -> None:
    data = mutate(pickle.dumps(snapshot(), protocol=protocol), seed)
    assert refusal(parse_snapshot, data).isprintable()
