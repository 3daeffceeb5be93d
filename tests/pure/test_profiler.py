# SPDX-License-Identifier: Apache-2.0
"""Chrome traces of PyTorch's profiler."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import FileError
from lowtide.recorder.profiler import parse_profile
from tests.pure.foreign import MIB, memory, mutate, operator, profile, refusal


def test_blocks_and_operators() -> None:
    history = parse_profile(json.dumps(profile()))
    assert (history.source, history.device) == ("profiler trace", "cpu")
    assert history.events == 4
    assert history.blocks.tolist() == [
        (3 * MIB, 0, 4, -1, 1),
        (4 * MIB, 1, 2, 0, 1),  # at one time, the lower number is earlier
        (MIB, 3, -1, 1, -1),
    ]
    assert [history.name_of(i) for i in range(3)] == [
        "",
        "aten::addmm",
        "AddmmBackward0",
    ]
    names = [history.names[i] for i in history.ops["name"]]
    assert names == ["aten::linear", "AddmmBackward0"]
    assert history.ops["event"].tolist() == [0, 1]
    assert history.ops["seconds"].tolist() == pytest.approx([30e-6, 10e-6])
    assert history.seconds.tolist() == pytest.approx([0, 41.5e-6, 41.5e-6, 44.5e-6])


def test_accelerators_come_first_and_kernels_give_the_time() -> None:
    content = profile()
    there = {"Device Type": 1, "Device Id": 0, "Total Reserved": 20 * MIB}
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 9, "ts": 90}
    content["traceEvents"] += [
        memory(30.0, 0x5000, 512, 9, **there),
        {**kernel, "dur": 5.0, "args": {"External id": 2}},
        {**kernel, "dur": 7.0, "args": {"External id": 1}},
    ]
    history = parse_profile(json.dumps(content))
    assert history.device == "cuda:0"
    assert history.reserved_bytes == 20 * MIB
    assert history.notes == ("other devices in this file: cpu",)
    assert history.ops["seconds"].tolist() == pytest.approx([12e-6, 0])
    assert parse_profile(json.dumps(content), device="cpu").events == 4
    with pytest.raises(FileError, match="no memory of device tpu; there is: cpu, cuda"):
        parse_profile(json.dumps(content), device="tpu")


def test_threads_have_operators_of_their_own() -> None:
    content = profile()
    other = memory(14.0, 0x7000, 100, 8)
    content["traceEvents"].append({**other, "tid": 8})
    history = parse_profile(json.dumps(content))
    (i,) = [i for i, n in enumerate(history.blocks["bytes"]) if n == 100]
    assert (history.name_of(i), history.blocks["start_op"][i]) == ("", -1)


def test_steps_and_failures_are_counted() -> None:
    content = profile()
    step = {"ph": "X", "cat": "user_annotation", "name": "Optimizer.step#SGD.step"}
    content["traceEvents"] += [
        {**step, "ts": 60.0, "dur": 1.0},
        {"name": "[OutOfMemory]"},
    ]
    history = parse_profile(json.dumps(content))
    assert history.steps == 1
    assert history.notes == ("the device ran out of memory 1 times",)


def test_a_bare_list_of_events() -> None:
    assert parse_profile(json.dumps(profile()["traceEvents"])).events == 4


def only(*events: Any) -> str:
    return json.dumps({"traceEvents": list(events)})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no list 'traceEvents'"),
        ('{"traceEvents": [', "is no whole JSON"),
        (b"\xff\xfe\xff", "is no whole JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("3", "has no list 'traceEvents'"),
        ("{}", "has no list 'traceEvents'"),
        ('{"a": 1} 2', "has no list 'traceEvents'"),
        ('{"traceEvents": [1, 2]', "'}' is missing at character 22"),
        ('{"traceEvents": [1, 2]} x', "something follows its end"),
        ('{"traceEvents": [1 2]}', "']' is missing at character 19"),
        (only(), "has no memory events: record it with"),
        (only(operator("x", 1, 2, 3)), "has no memory events"),
        (only(memory(1.0, 5, 5, 1), {"name": "[memory]", "args": 5}), "no object"),
        (only(memory(1.0, -5, 5, 1)), "-5 is no address"),
        (only(memory(1.0, 5, 1 << 60, 1)), f"has a block of {1 << 60} bytes"),
        (only(memory("x", 5, 5, 1)), "'ts' is no time"),
        (only(memory("nan", 5, 5, 1)), "'ts' is no time"),
        (only(memory(1e300, 5, 5, 1)), "'ts' is no time"),
        (only({"name": "[memory]", "args": {"Addr": 1}}), "size is no whole"),
        (only(memory(1.0, 5, 5, 1), operator("x", 1, None, 3)), "'dur' is no time"),
    ],
)
def test_reasons(text: Any, why: str) -> None:
    with pytest.raises(FileError, match=why):
        parse_profile(text)


bounded = settings(deadline=None, max_examples=150)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["Addr", "Bytes", "args", "x"]), inner)
    ),
    max_leaves=5,
)
keys = ("name", "ph", "cat", "pid", "tid", "ts", "dur", "args")


@bounded
@given(changes=st.lists(st.tuples(st.integers(0, 7), st.sampled_from(keys), values)))
def test_any_values(changes: list[tuple[int, str, Any]]) -> None:
    content = profile()
    for i, key, value in changes:
        content["traceEvents"][i][key] = value
    assert refusal(parse_profile, json.dumps(content)).isprintable()


@bounded
@given(seed=st.integers(0, 10**9))
def test_mutations(seed: int) -> None:
    text = mutate(json.dumps(profile()).encode(), seed)
    assert refusal(parse_profile, text).isprintable()
