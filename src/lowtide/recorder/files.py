# SPDX-License-Identifier: Apache-2.0
"""Read any file about memory: tell what it is from its beginning, never from its name.

Files may be compressed by gzip. Sizes are limited before and after that, so that no
file can make its reader take more memory than a machine has.
"""

from __future__ import annotations

import gzip
import os
import stat
import zlib
from pathlib import Path

from lowtide.errors import FileError
from lowtide.history import History
from lowtide.recorder.logs import parse_autoswap, parse_dtr
from lowtide.recorder.profiler import parse_profile
from lowtide.recorder.snapshot import parse_snapshot
from lowtide.units import format_bytes

MOST_FILE_BYTES = 1 << 30
_MOST_PICKLE_BYTES = 1 << 29  # its objects take more memory than those of others

_GZIP, _PICKLE = b"\x1f\x8b", b"\x80"
_KNOWN = (
    "a CUDA memory snapshot (torch.cuda.memory._dump_snapshot), a profiler trace "
    "(export_chrome_trace), a log of AutoSwap's author or of DTR, a .tide file"
)


def read_history(
    path: str | os.PathLike[str],
    *,
    device: str | None = None,
    most_bytes: int = MOST_FILE_BYTES,
) -> History:
    """Read a memory snapshot, a profiler trace or a log.

    Arguments:
        path: the file.
        device: whose memory to look at where a file has several: "cuda:1", "cpu".
        most_bytes: refuse a larger file, as it is and unpacked.

    Raises:
        FileError: it is none of these, or damaged; says why.
        OSError: the system refused.
    """
    try:
        return parse_history(_read(path, most_bytes), device=device)
    except FileError as error:
        raise FileError(error.why, path=path) from None


def parse_history(data: bytes, *, device: str | None = None) -> History:
    """Read what such a file holds, once it is in memory and unpacked."""
    start = data[:4096].lstrip()
    if data.startswith(_PICKLE):
        _refuse_larger(len(data), _MOST_PICKLE_BYTES)
        return parse_snapshot(data, device=_ordinal(device))
    if start.startswith((b"{", b"[")):
        if b'"INSTRUCTION"' in start.split(b"\n", 1)[0]:
            return parse_dtr(_text(data))
        return parse_profile(data, device=device)
    words = start.replace(b",", b" ").split(maxsplit=2)
    if any(word in (b"Malloc", b"Free", b"Read", b"Mutable") for word in words[:2]):
        return parse_autoswap(_text(data))
    raise FileError(f"is nothing that lowtide reads, which is: {_KNOWN}")


def _read(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    with Path(path).open("rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise FileError("is not a regular file")
        _refuse_larger(status.st_size, most_bytes)
        if status.st_size == 0:
            raise FileError("is empty")
        data = file.read(most_bytes + 1)
    if not data.startswith(_GZIP):
        return data
    try:
        with gzip.open(path) as packed:
            data = packed.read(most_bytes + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FileError(f"cannot be unpacked: {error}") from None
    _refuse_larger(len(data), most_bytes)
    return data


def _refuse_larger(n_bytes: int, most_bytes: int) -> None:
    if n_bytes > most_bytes:
        raise FileError(f"has more than {format_bytes(most_bytes)}; record fewer steps")


def _ordinal(device: str | None) -> int | None:
    if device is None:
        return None
    kind, _, ordinal = device.rpartition(":")
    if kind not in ("", "cuda") or not ordinal.isdecimal() or len(ordinal) > 4:
        raise FileError(f"is of CUDA devices; {device!r} is none, as cuda:0 is")
    return int(ordinal)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise FileError(f"is no text: byte {error.start} is none") from None
