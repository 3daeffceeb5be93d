# SPDX-License-Identifier: Apache-2.0
"""The file format `.tide`: named NumPy tables and a little JSON, never a pickle.

    +--------+---------+-----------+--------------+------------+
    | magic  | version | CRC of    | bytes of the | bytes of   |   32 bytes,
    | 8      | u32     | the index | index, u64   | the file   |   little-endian
    +--------+---------+-----------+--------------+------------+
    | index: JSON {"kind", "written_by", "meta", "tables"}     |
    +----------------------------------------------------------+
    | tables, each from a multiple of 64 bytes on, raw         |
    +----------------------------------------------------------+

The index holds for each table its name, columns, shape, offset and CRC. Reading checks
every size against the size of the file before anything is allocated, then the CRCs, so
a damaged, cut or hostile file gives a TideError and nothing else. Writing goes to
another name first: at the end there is the whole new file, or the old one.

A `Tide` is the content of one file. `to_tide` and `from_tide` turn the frozen
dataclasses that lowtide's nouns are into it and back: arrays become tables, all other
fields JSON.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from lowtide.errors import FileError

VERSION = 1
MAGIC = b"\x89TIDE\r\n\x1a"  # bytes that a transfer as text would change

_HEAD = struct.Struct("<8sIIQQ")
_ALIGNMENT = 64
_INDEX_LIMIT = 1 << 24
_DIMENSIONS = 4
_COLUMNS = 256
_SCALARS = frozenset({*(k + n for k in "iu" for n in "1248"), "f4", "f8", "b1"})

T = TypeVar("T")
Table = NDArray[Any]


class TideError(FileError):
    """Refuse a file that is no whole `.tide` file that this version reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tide:
    """What one file holds."""

    kind: str  # "trace", "plan", "timeline", ...
    tables: Mapping[str, Table] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    written_by: str = ""


def write_tide(path: str | os.PathLike[str], tide: Tide) -> None:
    """Write a file, or replace one, as a whole.

    Raises:
        TideError: the content cannot be written as such a file; nothing was changed.
        OSError: the system refused; nothing was changed.
    """
    try:
        head, index, tables = _encode(tide)
    except TideError as error:
        raise TideError(f"cannot be written: {error.why}", path=path) from None
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with draft.open("xb") as file:
            file.write(head + index)
            for start, table in tables:
                file.write(b"\0" * (start - file.tell()))
                file.write(_raw(table))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def read_tide(path: str | os.PathLike[str]) -> Tide:
    """Read a whole file.

    Raises:
        TideError: it is not one, damaged, cut, or of a newer format; says which.
        OSError: the system refused.
    """
    try:
        with open(path, "rb") as file:
            return _decode(file, os.fstat(file.fileno()).st_size)
    except TideError as error:
        raise TideError(error.why, path=path) from None


def is_tide(beginning: bytes) -> bool:
    """Tell from its first bytes whether a file means to be a `.tide` file."""
    return beginning.startswith(MAGIC)


def to_tide(kind: str, value: Any, *, written_by: str = "") -> Tide:
    """Turn a dataclass of arrays and plain values into the content of a file.

    Fields that are arrays become tables of their names. Of the others, numbers, text,
    None, dataclasses, and tuples and dictionaries of these can be kept.
    """
    tables = {}
    meta = {}
    for name in (f.name for f in fields(value)):
        content = getattr(value, name)
        if isinstance(content, np.ndarray):
            tables[name] = content
        else:
            meta[name] = _plain(content)
    return Tide(kind=kind, tables=tables, meta=meta, written_by=written_by)


def from_tide(
    tide: Tide,
    kind: str,
    make: type[T],
    *,
    tables: Mapping[str, np.dtype[Any]],
    parts: Mapping[str, type[Any]] | None = None,
) -> T:
    """Turn the content of a file back into a dataclass.

    Arguments:
        tide: what `read_tide` gave.
        kind: what it has to be.
        make: the dataclass; tuples come back as tuples.
        tables: what columns the tables have to have.
        parts: for fields that are tuples of dataclasses, these.

    Raises:
        TideError: it is of another kind, or has other fields or columns.
    """
    if tide.kind != kind:
        raise TideError(f"holds a {tide.kind}, not a {kind}")
    known = {f.name for f in fields(make)}  # type: ignore[arg-type]
    given = tide.tables.keys() | tide.meta.keys()
    if given != known:
        odd = ", ".join(sorted(given ^ known))
        raise TideError(f"is from another version of lowtide, it differs in: {odd}")
    for name, dtype in tables.items():
        table = tide.tables.get(name)
        if table is None or table.dtype != dtype:
            why = f"is from another version of lowtide: other columns in {name!r}"
            raise TideError(why)
    values = {name: _frozen(content) for name, content in tide.meta.items()}
    try:
        for name, part in (parts or {}).items():
            values[name] = tuple(
                part(**{k: _frozen(v) for k, v in row.items()})
                for row in tide.meta[name]
            )
        return make(**dict(tide.tables), **values)
    except (TypeError, KeyError, AttributeError) as error:
        raise TideError(f"its {kind} is incomplete ({error})") from None


def _plain(content: Any) -> Any:
    if isinstance(content, tuple | list):
        return [_plain(item) for item in content]
    if isinstance(content, Mapping):
        return {str(key): _plain(item) for key, item in content.items()}
    if isinstance(content, np.generic):
        return content.item()
    if hasattr(type(content), "__dataclass_fields__"):
        return _plain(asdict(content))
    return content


def _frozen(content: Any) -> Any:
    if isinstance(content, list):
        return tuple(_frozen(item) for item in content)
    return content


def _encode(tide: Tide) -> tuple[bytes, bytes, list[tuple[int, Table]]]:
    """Give head, index, and the tables with the offset of each."""
    rows = []
    tables = []
    start = 0  # counted from the end of the index, whose size depends on it
    for name, table in tide.tables.items():
        if table.ndim > _DIMENSIONS:
            raise TideError(f"the table {name!r} has {table.ndim} dimensions")
        columns = _columns_of(name, table.dtype)
        table = np.asarray(table, _dtype_from(columns), order="C")
        rows.append(
            {
                "name": name,
                "columns": columns,
                "shape": list(table.shape),
                "offset": start,
                "crc": zlib.crc32(_raw(table)),
            }
        )
        tables.append((start, table))
        start += _up(table.nbytes)
    content = {
        "kind": tide.kind,
        "written_by": tide.written_by,
        "meta": dict(tide.meta),
        "tables": rows,
    }
    try:
        index = json.dumps(content).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TideError(f"{error}") from None
    if len(index) > _INDEX_LIMIT:
        raise TideError(f"its index has {len(index)} bytes; {_INDEX_LIMIT} are allowed")
    base = _up(_HEAD.size + len(index))
    end = _HEAD.size + len(index)
    if tables:
        end = base + tables[-1][0] + tables[-1][1].nbytes
    head = _HEAD.pack(MAGIC, VERSION, zlib.crc32(index), len(index), end)
    return head, index, [(base + at, table) for at, table in tables]


def _decode(file: BinaryIO, size: int) -> Tide:
    head = file.read(_HEAD.size)
    if not is_tide(head):
        raise TideError("is not a .tide file" if head else "is empty")
    if len(head) < _HEAD.size:
        raise TideError(
            f"is cut off: it has {size} bytes, a head alone has {_HEAD.size}"
        )
    _, version, crc, index_bytes, file_bytes = _HEAD.unpack(head)
    if version > VERSION:
        raise TideError(
            f"has format {version}, and this lowtide reads formats up to {VERSION}: "
            "install a newer lowtide"
        )
    if version < 1:
        raise TideError(f"is damaged: there is no format {version}")
    if file_bytes != size:
        word = "cut off" if size < file_bytes else "damaged"
        raise TideError(f"is {word}: it has {size} bytes and should have {file_bytes}")
    if index_bytes > min(_INDEX_LIMIT, size - _HEAD.size):
        raise TideError(f"is damaged: an index of {index_bytes} bytes in {size}")
    index = file.read(index_bytes)
    if zlib.crc32(index) != crc:
        raise TideError("is damaged: its index does not match its checksum")
    content = _parse_index(index)
    base = _up(_HEAD.size + index_bytes)
    tables: dict[str, Table] = {}
    left = size - base  # what tables may have together, since they share no bytes
    for row in content["tables"]:
        name, table = _read_table(file, row, base, size)
        left -= table.nbytes
        if left < 0:
            raise TideError("is damaged: its tables overlap")
        if name in tables:
            raise TideError(f"is damaged: it has two tables {name!r}")
        tables[name] = table
    return Tide(
        kind=content["kind"],
        tables=tables,
        meta=content["meta"],
        written_by=content["written_by"],
    )


_INDEX = {"kind": str, "written_by": str, "meta": dict, "tables": list}
_ROW = {"name": str, "columns": (str, list), "shape": list, "offset": int, "crc": int}


def _parse_index(index: bytes) -> dict[str, Any]:
    try:
        content = json.loads(index)
    except (ValueError, RecursionError) as error:
        raise TideError(f"is damaged: its index is no JSON ({error})") from None
    _check_fields(content, _INDEX, "its index")
    for row in content["tables"]:
        _check_fields(row, _ROW, "a table")
    return dict(content)


def _check_fields(content: Any, wanted: Mapping[str, Any], what: str) -> None:
    if not isinstance(content, dict) or content.keys() != wanted.keys():
        raise TideError(f"is damaged: {what} does not have the fields {list(wanted)}")
    for name, kind in wanted.items():
        if not isinstance(content[name], kind) or isinstance(content[name], bool):
            raise TideError(f"is damaged: {what} has a wrong {name!r}")


def _read_table(
    file: BinaryIO, row: dict[str, Any], base: int, size: int
) -> tuple[str, Table]:
    name, shape = row["name"], row["shape"]
    dtype = _dtype_from(row["columns"])
    n_bytes = dtype.itemsize
    if len(shape) > _DIMENSIONS:
        raise TideError(f"is damaged: the table {name!r} has {len(shape)} dimensions")
    for n in shape:
        if type(n) is not int or n < 0 or n > size:
            raise TideError(f"is damaged: the table {name!r} has an impossible shape")
        n_bytes *= n
    start = base + row["offset"]
    if row["offset"] < 0 or start + n_bytes > size:
        raise TideError(f"is damaged: the table {name!r} does not lie within the file")
    file.seek(start)
    raw = file.read(n_bytes)
    if len(raw) != n_bytes or zlib.crc32(raw) != row["crc"]:
        raise TideError(f"is damaged: the table {name!r} does not match its checksum")
    # A copy, which may be written to as any array may.
    return name, np.frombuffer(bytearray(raw), dtype).reshape(shape)


def _raw(table: Table) -> memoryview:
    return table.reshape(-1).view(np.uint8).data


def _columns_of(name: str, dtype: np.dtype[Any]) -> str | list[list[str]]:
    """Describe the columns of a table, or the type of a plain one."""
    if dtype.names is None:
        return _scalar_of(name, dtype)
    return [[column, _scalar_of(name, dtype[column])] for column in dtype.names]


def _scalar_of(name: str, dtype: np.dtype[Any]) -> str:
    code = f"{dtype.kind}{dtype.itemsize}"
    if code not in _SCALARS:
        raise TideError(f"the table {name!r} has elements of type {dtype}")
    return code


def _dtype_from(columns: str | list[Any]) -> np.dtype[Any]:
    """Build a type, little-endian and packed, from columns that may be anything."""
    plain = isinstance(columns, str)
    if isinstance(columns, str):
        columns = [["", columns]]
    if not 1 <= len(columns) <= _COLUMNS:
        raise TideError(f"is damaged: a table with {len(columns)} columns")
    for column in columns:
        if (
            not isinstance(column, list)
            or len(column) != 2
            or not all(isinstance(part, str) for part in column)
            or column[1] not in _SCALARS
            or not (plain or column[0])
        ):
            raise TideError(f"is damaged: a table with a column {column!r}")
    if plain:
        dtype: np.dtype[Any] = np.dtype("<" + columns[0][1])
        return dtype
    if len({column[0] for column in columns}) < len(columns):
        raise TideError("is damaged: a table with two columns of one name")
    return np.dtype([(name, "<" + code) for name, code in columns])


def _up(n: int) -> int:
    return -(-n // _ALIGNMENT) * _ALIGNMENT
