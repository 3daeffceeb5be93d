# SPDX-License-Identifier: Apache-2.0
"""The file format: what was written comes back, and anything else is refused."""

import json
import os
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as stnp

from lowtide.errors import LowtideError
from lowtide.tidefile import (
    MAGIC,
    VERSION,
    Tide,
    TideError,
    from_tide,
    read_tide,
    to_tide,
    write_tide,
)
from lowtide.timeline import Kept, Timeline
from lowtide.trace import OPS, VALUES, Trace
from tests.pure.foreign import mutate
from tests.pure.timelines import make_timeline

HEAD = struct.Struct("<8sIIQQ")

scalars = st.sampled_from(["i1", "i4", "i8", "u2", "u8", "f4", "f8", "?"])
columns = st.text("abcé", min_size=1, max_size=4)
dtypes = scalars.map(np.dtype) | st.lists(
    st.tuples(columns, scalars), min_size=1, max_size=4, unique_by=lambda c: c[0]
).map(np.dtype)
tables = stnp.arrays(
    dtypes, stnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
)
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
metas = st.recursive(
    plain,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
tides = st.builds(
    Tide,
    kind=st.text(),
    tables=st.dictionaries(st.text(), tables, max_size=4),
    meta=st.dictionaries(st.text(), metas, max_size=3),
    written_by=st.text(),
)
in_one_folder = settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@settings(in_one_folder, max_examples=25)
@given(tides)
def test_what_was_written_comes_back(tmp_path: Path, tide: Tide) -> None:
    path = tmp_path / "a.tide"
    write_tide(path, tide)
    again = read_tide(path)
    assert (again.kind, again.written_by) == (tide.kind, tide.written_by)
    assert json.dumps(again.meta) == json.dumps(tide.meta)
    assert list(again.tables) == list(tide.tables)
    for name, table in tide.tables.items():
        read = again.tables[name]
        assert (read.dtype, read.shape) == (table.dtype, table.shape)
        assert read.tobytes() == table.tobytes()
        assert read.flags.writeable
    assert os.listdir(tmp_path) == ["a.tide"]


def small_file(path: Path) -> bytes:
    ops = np.zeros(3, OPS)
    ops["seconds"] = [0.5, 0.25, 1]
    trace = Trace(ops=ops, values=np.zeros(2, VALUES), key=12)
    write_tide(path, to_tide("trace", trace, written_by="lowtide 0.1.0"))
    return path.read_bytes()


@in_one_folder
@given(seed=st.integers(0, 10**9))
def test_damage_is_noticed(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "a.tide"
    whole = small_file(path)
    damaged = mutate(whole, seed)
    path.write_bytes(damaged)
    if damaged == whole:
        return
    reason = ""
    try:
        read_tide(path)
    except TideError as error:
        reason = str(error)
    # Only bytes that nothing is read from may differ unnoticed: between the tables.
    assert reason.startswith(f"{path} ") or len(damaged) == len(whole)


@in_one_folder
@given(content=st.binary(max_size=200))
@pytest.mark.parametrize("start", [b"", MAGIC, HEAD.pack(MAGIC, 1, 0, 60, 92)])
def test_random_bytes_are_refused(tmp_path: Path, start: bytes, content: bytes) -> None:
    path = tmp_path / "a.tide"
    path.write_bytes(start + content)
    with pytest.raises(TideError):
        read_tide(path)


def forge(path: Path, index: Any, *, version: int = VERSION, more: bytes = b"") -> None:
    """Write a file with right checksums and a wrong index."""
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    base = -(-(HEAD.size + len(text)) // 64) * 64
    size = base + len(more) if more else HEAD.size + len(text)
    head = HEAD.pack(MAGIC, version, zlib.crc32(text), len(text), size)
    body = (head + text).ljust(base, b"\0") + more if more else head + text
    path.write_bytes(body)


def row(**changes: Any) -> dict[str, Any]:
    raw = zlib.crc32(b"\0" * 64)
    fields = {"name": "t", "columns": "i8", "shape": [8], "offset": 0, "crc": raw}
    return {**fields, **changes}


CRC = zlib.crc32(b"\0" * 16)


def index(*rows: Any, **changes: Any) -> dict[str, Any]:
    fields = {"kind": "trace", "written_by": "", "meta": {}, "tables": list(rows)}
    return {**fields, **changes}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (index(row(shape=[2**40])), "impossible shape"),
        (index(row(shape=[-8])), "impossible shape"),
        (index(row(shape=[True])), "impossible shape"),
        (index(row(shape=[64, 64])), "does not lie within the file"),
        (index(row(shape=[1] * 5)), "5 dimensions"),
        (index(row(offset=10**30)), "does not lie within the file"),
        (index(row(offset=-64)), "does not lie within the file"),
        (index(row(crc=0)), "does not match its checksum"),
        (index(row(columns="O8")), "a table with a column"),
        (index(row(columns=[["a", "V16"]])), "a table with a column"),
        (index(row(columns=[["a", "i8"], ["a", "i8"]])), "two columns of one name"),
        (index(row(columns=[["", "i8"]])), "a table with a column"),
        (index(row(columns=[["a", "i8", 3]])), "a table with a column"),
        (index(row(columns=[])), "0 columns"),
        (index(row(shape=[2], crc=CRC), row(shape=[2], crc=CRC)), "two tables 't'"),
        (index(*(row(name=str(i)) for i in range(50))), "its tables overlap"),
        (index({"name": "t"}), "a table does not have the fields"),
        (index(row(), meta=[]), "its index has a wrong 'meta'"),
        (index(row(name=3)), "a table has a wrong 'name'"),
        ([], "its index does not have the fields"),
        (b"{" * 100, "its index is no JSON"),
        (b"[" * 100_000, "its index is no JSON"),
        (b"\xff\xfe", "its index is no JSON"),
    ],
)
def test_hostile_files_with_right_checksums(
    tmp_path: Path, content: Any, why: str
) -> None:
    path = tmp_path / "a.tide"
    forge(path, content, more=b"\0" * 64)
    with pytest.raises(TideError, match=why):
        read_tide(path)


def test_reasons(tmp_path: Path) -> None:
    path = tmp_path / "a.tide"
    whole = small_file(path)
    cases = {
        b"": "is empty",
        b"PK\3\4": "is not a .tide file",
        whole[:20]: "is cut off: it has 20 bytes, a head alone has 32",
        whole[:-1]: f"is cut off: it has {len(whole) - 1} bytes and should have",
        whole + b"x": "is damaged: it has",
    }
    for content, why in cases.items():
        path.write_bytes(content)
        with pytest.raises(TideError, match=f"^{path} {why}"):
            read_tide(path)
    forge(path, index(), version=7)
    newer = f"has format 7, and this lowtide reads formats up to {VERSION}: install"
    with pytest.raises(TideError, match=newer):
        read_tide(path)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.tide"
    old = small_file(path)
    bad: list[Tide] = [
        Tide(kind="x", tables={"t": np.array(["text"])}),
        Tide(kind="x", tables={"t": np.array([None])}),
        Tide(kind="x", tables={"t": np.zeros((1,) * 5)}),
        Tide(kind="x", meta={"m": object()}),
    ]
    for tide in bad:
        with pytest.raises(TideError, match="cannot be written"):
            write_tide(path, tide)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["a.tide"]
    with pytest.raises(FileNotFoundError):
        write_tide(tmp_path / "no" / "such.tide", Tide(kind="x"))


def test_byte_order_and_strides_do_not_show(tmp_path: Path) -> None:
    path = tmp_path / "a.tide"
    table = np.arange(12, dtype=">i4").reshape(3, 4)[:, ::2]
    write_tide(path, Tide(kind="x", tables={"t": table}))
    read = read_tide(path).tables["t"]
    assert (read.dtype, read.tolist()) == (np.dtype("<i4"), table.tolist())


def test_a_timeline_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "a.tide"
    write_tide(path, to_tide("timeline", make_timeline()))
    tide = read_tide(path)
    again = from_tide(tide, "timeline", Timeline, tables={}, parts={"kept": Kept})
    assert again == make_timeline()


def test_another_kind_or_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tide"
    small_file(path)
    tide = read_tide(path)
    columns = {"ops": OPS, "values": VALUES}
    assert from_tide(tide, "trace", Trace, tables=columns).key == 12
    with pytest.raises(TideError, match="holds a trace, not a plan"):
        from_tide(tide, "plan", Trace, tables=columns)
    with pytest.raises(TideError, match="it differs in"):
        from_tide(tide, "trace", Timeline, tables=columns)
    with pytest.raises(TideError, match="other columns in 'ops'"):
        from_tide(tide, "trace", Trace, tables={**columns, "ops": VALUES})


def test_the_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(TideError("is empty", path="a.tide")))
    assert isinstance(error, LowtideError)
    assert (str(error), error.why, error.path) == (
        "a.tide is empty",
        "is empty",
        "a.tide",
    )
