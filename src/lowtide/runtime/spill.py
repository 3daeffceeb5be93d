# SPDX-License-Identifier: Apache-2.0
"""The spill file: where it lies, and how bytes move between it and memory.

The file has no name from birth, so that nothing is left of it when the process dies,
however it dies. It is opened with O_DIRECT where the file system permits: bytes then
go between memory and disk without the page cache, which would be memory too.

Direct transfers need pages: offsets, lengths and addresses are multiples of 4096. A
block that starts on a page moves without a copy; only its last, partial page takes a
detour through a spare one, in the same system call. Any other block is copied through
a bounce buffer piece by piece.
"""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from lowtide.errors import SpillError
from lowtide.runtime.extents import PAGE, Extent, whole_pages
from lowtide.runtime.extents import Bytes as Bytes

_log = logging.getLogger("lowtide")

Address: TypeAlias = int

_BOUNCE: Bytes = 4 * 2**20
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")
_WRITABLE = 0x200  # PyBUF_WRITE

IN_MEMORY = (
    "the spill directory {directory} is kept in memory ({kind}): what is spilled "
    "there frees none. Name a directory on a local disk with spill_dir=, --spill-dir "
    "or LOWTIDE_SPILL_DIR."
)

_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype = ctypes.py_object
_view.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCalls:
    """Name the system calls in use, so that tests can make them fail."""

    open: Callable[..., int] = os.open
    pwritev: Callable[[int, Sequence[memoryview], int], int] = os.pwritev
    preadv: Callable[[int, Sequence[memoryview], int], int] = os.preadv


class SpillFile:
    """Move bytes between memory and an open file without a name."""

    def __init__(self, directory: Path, calls: DiskCalls) -> None:
        """Make the file.

        Raises:
            OSError: the directory is missing, read-only, full...
        """
        self._calls = calls
        self.descriptor = _open_nameless(directory, calls)
        self.direct = _set_direct(self.descriptor, True)

    def shrink(self, n_bytes: Bytes) -> None:
        """Give what lies beyond so many bytes back to the file system."""
        with suppress(OSError):  # it would only have been tidier
            os.ftruncate(self.descriptor, n_bytes)

    def close(self) -> None:
        """Give the descriptor back, and with it the file."""
        os.close(self.descriptor)

    def write(
        self,
        extents: Sequence[Extent],
        address: Address,
        n_bytes: Bytes,
        spare: "Spare",
    ) -> None:
        """Write a block of memory to its extents.

        Raises:
            OSError: as the system says; what was written then does not count.
        """
        for offset, start, length in _pieces(extents, address, n_bytes):
            spare.load(start, length)
            self._move(self._calls.pwritev, spare.around(start, length), offset)

    def read(
        self,
        extents: Sequence[Extent],
        address: Address,
        n_bytes: Bytes,
        spare: "Spare",
    ) -> None:
        """Read extents into a block of memory.

        Raises:
            OSError: as the system says; the block's contents are then undefined.
        """
        for offset, start, length in _pieces(extents, address, n_bytes):
            self._move(self._calls.preadv, spare.around(start, length), offset)
            spare.unload(start, length)

    def _move(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        views: list[memoryview],
        offset: Bytes,
    ) -> None:
        """Repeat a call that may do less than asked until all is done."""
        idle = 0
        while views:
            try:
                moved = call(self.descriptor, views, offset)
            except OSError as error:
                # Direct transfers may be refused as late as here, by file systems
                # that want larger pages; then the page cache has to help.
                if error.errno != errno.EINVAL or not self.direct:
                    raise
                self.direct = False
                _set_direct(self.descriptor, False)
                continue
            moved -= moved % PAGE  # the next direct call has to start on a page
            idle = idle + 1 if moved == 0 else 0
            if idle == 2:  # once may be a full disk, and the next call says so
                raise OSError(errno.EIO, "the system moved no bytes")
            offset += moved
            views = _after(views, moved)


class Spare:
    """Own the buffers of one thread for bytes that cannot move directly.

    A block that starts on a page uses the spare only for its last, partial page.
    """

    def __init__(self) -> None:
        self._buffer = mmap.mmap(-1, _BOUNCE)
        self._bytes = memoryview(self._buffer)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))

    def around(self, start: Address, length: Bytes) -> list[memoryview]:
        """Name the page-aligned buffers that stand for a piece of memory."""
        direct = _direct_bytes(start, length)
        views = [_view(start, direct, _WRITABLE)] if direct else []
        rest = whole_pages(length - direct)
        return [*views, self._bytes[:rest]] if rest else views

    def load(self, start: Address, length: Bytes) -> None:
        """Copy in what `around` does not take from its place."""
        direct = _direct_bytes(start, length)
        ctypes.memmove(self._address, start + direct, length - direct)

    def unload(self, start: Address, length: Bytes) -> None:
        """Copy out what `around` did not put in its place."""
        direct = _direct_bytes(start, length)
        ctypes.memmove(start + direct, self._address, length - direct)


def spill_directory(directory: Path | None, *, warn: bool = True) -> Path:
    """Choose where to spill: as asked, or the first place that is really a disk.

    Looks at $LOWTIDE_SPILL_DIR, which counts as asked, then at $TMPDIR, /var/tmp and
    the current directory. Warns, if so wished, when what was asked for lies in memory.

    Raises:
        SpillError: nothing was asked for, and no place will do.
    """
    named = os.environ.get("LOWTIDE_SPILL_DIR")
    asked = directory or (Path(named) if named else None)
    if asked is not None:
        kind = memory_file_system(asked)
        if kind and warn:
            _log.warning("lowtide: %s", IN_MEMORY.format(directory=asked, kind=kind))
        return asked
    temporary = os.environ.get("TMPDIR")
    places = [Path(temporary)] if temporary else []
    places += [Path("/var/tmp"), Path.cwd()]
    for place in places:
        writable = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
        if writable and not memory_file_system(place):
            return place
    tried = ", ".join(str(place) for place in places)
    raise SpillError(
        f"choosing a spill directory (tried {tried}: missing, read-only or in memory)"
    )


def memory_file_system(directory: Path) -> str | None:
    """Tell which file system keeps a directory in memory; None for a disk."""
    try:
        device = os.stat(directory).st_dev
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
    except OSError:
        return None  # opening the spill file says what is wrong
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        fields = line.split()
        kind = fields[fields.index("-") + 1]
        if fields[2] == wanted and kind in _MEMORY_FILE_SYSTEMS:
            return kind
    return None


def _open_nameless(directory: Path, calls: DiskCalls) -> int:
    """Open a new file that no directory lists."""
    flags = os.O_RDWR | os.O_CLOEXEC
    unsupported = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)
    try:
        return calls.open(directory, flags | os.O_TMPFILE | os.O_EXCL, 0o600)
    except OSError as error:
        if error.errno not in unsupported:
            raise
    # An old kernel or a file system without such files: unlink it at once.
    name = Path(directory, f".lowtide-{secrets.token_hex(8)}")
    descriptor = calls.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(name)
    return descriptor


def _set_direct(descriptor: int, wanted: bool) -> bool:
    """Bypass the page cache, or not; tell whether it is bypassed now."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    flags = flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    except OSError:
        return False  # not on this file system
    return wanted


def _pieces(
    extents: Sequence[Extent], address: Address, n_bytes: Bytes
) -> Iterator[tuple[Bytes, Address, Bytes]]:
    """Split a block at its extents, and at the bounce buffer's size if it needs one.

    Yields the offset in the file, the address in memory, and the length.
    """
    for offset, room in extents:
        rest = min(room, n_bytes)
        n_bytes -= rest
        while rest > 0:
            length = rest if address % PAGE == 0 else min(rest, _BOUNCE)
            yield offset, address, length
            offset, address, rest = offset + length, address + length, rest - length


def _direct_bytes(start: Address, length: Bytes) -> Bytes:
    """Count the bytes of a piece that move without a copy."""
    return 0 if start % PAGE else length - length % PAGE


def _after(views: list[memoryview], moved: Bytes) -> list[memoryview]:
    """Drop what was moved from the front of the buffers."""
    while views and moved >= len(views[0]):
        moved -= len(views[0])
        views = views[1:]
    return [views[0][moved:], *views[1:]] if moved else views
