# SPDX-License-Identifier: Apache-2.0
"""Small files as other programs write them, and mutations of them."""

import gzip
import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lowtide.errors import LowtideError
from lowtide.tidefile import Tide, write_tide

MIB = 1 << 20

TORCH = {"filename": "/x/site-packages/torch/nn/linear.py", "line": 134, "name": "f"}
USER = {"filename": "/home/me/train.py", "line": 53, "name": "forward"}
CPP = {"filename": "??", "line": 0, "name": "at::empty_cuda"}


def event(action: str, addr: int, size: int, **more: Any) -> dict[str, Any]:
    """Make one event of a snapshot."""
    fields = {"action": action, "addr": addr, "size": size, "stream": 0}
    return {**fields, "time_us": 1_000_000 + addr // MIB, **more}


def block(address: int, size: int, state: str, **more: Any) -> dict[str, Any]:
    """Make one block of a segment."""
    asked = {"requested_size": size - 24, "frames": []}
    return {"address": address, "size": size, "state": state, **asked, **more}


def snapshot() -> dict[str, Any]:
    """Make a snapshot: a weight from before, two passing blocks, and one that stays.

    A block of 3 MiB is released that was never allocated in the events.
    """
    frames = [CPP, TORCH, USER]
    base = 64 * MIB
    held = [
        block(base, 4 * MIB, "active_allocated"),
        block(base + 4 * MIB, 6 * MIB, "active_allocated"),
        block(base + 10 * MIB, 10 * MIB, "inactive"),
    ]
    segment = {"device": 0, "address": base, "total_size": 20 * MIB, "stream": 0}
    more = {"segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False}
    trace = [
        event("segment_alloc", base, 20 * MIB),
        event("free_completed", base + 16 * MIB, 3 * MIB),
        event("alloc", base + 4 * MIB, 6 * MIB - 24, frames=frames, pool_id=(0, 0)),
        event("alloc", base + 10 * MIB, 5 * MIB, frames=frames),
        event("free_requested", base + 10 * MIB, 5 * MIB),
        event("alloc", base + 15 * MIB, 2 * MIB, frames=[CPP, TORCH]),
        event("free_completed", base + 10 * MIB, 5 * MIB),
        event("free_completed", base + 15 * MIB, 2 * MIB),
    ]
    marks = [
        {"stage": stage, "name": "Optimizer.step#SGD.step", "device": 0, "time_us": 3}
        for stage in ("START", "END")
    ]
    return {
        "segments": [{**segment, **more, "blocks": held}],
        "device_traces": [trace, []],
        "allocator_settings": {"expandable_segments": False},
        "external_annotations": marks,
    }


def memory(ts: float, address: int, n_bytes: int, number: int, **more: Any) -> Any:
    """Make one event of a profiler trace."""
    args = {"Addr": address, "Bytes": n_bytes, "Device Type": 0, "Device Id": -1}
    args |= {"Total Allocated": 0, "Total Reserved": 0, "Ev Idx": number}
    place = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "pid": 7, "tid": 7}
    return {**place, "name": "[memory]", "ts": ts, "args": {**args, **more}}


def operator(name: str, ts: float, dur: float, number: int) -> dict[str, Any]:
    """Make one operator of a profiler trace."""
    args = {"External id": number, "Ev Idx": number}
    place = {"ph": "X", "cat": "cpu_op", "pid": 7, "tid": 7}
    return {**place, "name": name, "ts": ts, "dur": dur, "args": args}


def profile() -> dict[str, Any]:
    """Make a profiler trace: a product, its release, a block from before."""
    backward = "autograd::engine::evaluate_function: AddmmBackward0"
    events = [
        {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
        operator("aten::linear", 10.0, 30.0, 1),
        operator("aten::addmm", 12.0, 20.0, 2),
        memory(13.5, 0x1000, 4 * MIB, 3),
        operator(backward, 50.0, 10.0, 4),
        memory(55.0, 0x2000, MIB, 6),
        memory(55.0, 0x1000, -4 * MIB, 5),
        memory(58.0, 0x9000, -3 * MIB, 7),
    ]
    return {"schemaVersion": 1, "traceEvents": events, "displayTimeUnit": "ms"}


def autoswap() -> str:
    """Make a log in the author's first form: a weight, and four equal iterations."""
    lines = ["Malloc 0xa0 1048576 1000"]
    for i in range(4):
        lines += [
            f"Malloc 0xb{i} 2097152 {1001 + 10 * i}",
            f"Malloc 0xc{i} 524288 {1002 + 10 * i}",
            f"Free 0xb{i} {1003 + 10 * i}",
            f"Malloc 0xd{i} 1048576 {1004 + 10 * i}",
            f"Free 0xc{i} {1005 + 10 * i}",
            f"Free 0xd{i} {1006 + 10 * i}",
        ]
    return "\n".join(lines) + "\n"


def autoswap_csv() -> str:
    """Make a log in the author's second form, with uses."""
    rows = [
        ("Malloc", "0xa0", 4096),
        ("Mutable", "0xa0", 4096),
        ("Read", "0xee", 256),
        ("Read", "0xa0", 4096),
        ("Free", "0xa0", 4096),
    ]
    return "".join(
        f"{i} {kind} {address} {size} {10**18 + i * 10**6}\n"
        for i, (kind, address, size) in enumerate(rows)
    )


def dtr() -> str:
    """Make a log of DTR: a weight, a call, an alias, a mutation, releases."""
    lines: list[dict[str, Any]] = [
        {"INSTRUCTION": "CONSTANT", "NAME": "w"},
        {"INSTRUCTION": "MEMORY", "NAME": "w", "MEMORY": "4096"},
        {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"},
        call("aten::mm", ["y"], ["w"], 2000),
        {"INSTRUCTION": "MEMORY", "NAME": "y", "MEMORY": "1000"},
        {"INSTRUCTION": "ALIAS", "NAME": "y", "ALIAS": "-1"},
        call("aten::view", ["v"], ["y"], 10),
        {"INSTRUCTION": "MEMORY", "NAME": "v", "MEMORY": "0"},
        {"INSTRUCTION": "ALIAS", "NAME": "v", "ALIAS": "0"},
        {"INSTRUCTION": "COPY", "DST": "z", "SRC": "v"},
        {"INSTRUCTION": "RELEASE", "NAME": "y"},
        {
            "INSTRUCTION": "MUTATE",
            "NAME": "aten::add_",
            "ARGS": ["v", "w"],
            "MUTATE": [0],
            "TIME": "30",
        },
        {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "BACKWARD"},
        {"INSTRUCTION": "RELEASE", "NAME": "z"},
        {"INSTRUCTION": "RELEASE", "NAME": "v"},
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def call(name: str, results: list[str], args: list[str], time: int) -> dict[str, Any]:
    """Make one call of a DTR log."""
    fields = {"INSTRUCTION": "CALL", "NAME": name, "TIME": str(time)}
    return {**fields, "ARGS": args, "RESULT": results}


def write_all(folder: Path) -> dict[str, Path]:
    """Write one file of each kind."""
    files = {
        "snapshot.pickle": pickle.dumps(snapshot(), protocol=4),
        "trace.json": json.dumps(profile()).encode(),
        "trace.json.gz": gzip.compress(json.dumps(profile()).encode(), mtime=0),
        "memInfo.text": autoswap().encode(),
        "vec_run.csv": autoswap_csv().encode(),
        "dtr.log": dtr().encode(),
    }
    paths = {name: folder / name for name in files}
    for name, content in files.items():
        paths[name].write_bytes(content)
    paths["run.tide"] = folder / "run.tide"
    table = np.zeros(2, [("bytes", "<i8"), ("kept", "?")])
    meta = {"policy": "auto", "peak_bytes": 3 * MIB, "seconds": 0.5, "notes": []}
    by = "lowtide 0.1.0"
    tide = Tide(kind="example", tables={"values": table}, meta=meta, written_by=by)
    write_tide(paths["run.tide"], tide)
    return paths


def mutate(content: bytes, seed: int) -> bytes:
    """Damage a file: bytes changed, added, taken out or repeated, or its end cut."""
    rng = random.Random(seed)
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) or 1)
        span = slice(at, at + rng.randint(1, 16))
        kind = rng.randrange(5)
        if kind == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            data[span] = rng.randbytes(rng.randint(0, 16))
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            data[at:at] = data[span] * rng.randint(1, 4)
        else:
            data[at : at + 8] = rng.choice((b"\xff" * 8, b"\0" * 8, b"-1", b"[" * 99))
    return bytes(data)


def refusal(parse: Callable[[Any], object], content: Any) -> str:
    """Return why something is refused, or "" when it is not; other errors pass."""
    try:
        parse(content)
    except LowtideError as error:
        return str(error)
    return ""
