# SPDX-License-Identifier: Apache-2.0
"""Count the bytes that torch's CPU tensors hold.

`install` puts lowtide's allocator behind torch's CPU device, once per process and for
good (see `cpp/cpu_allocator.cc`). Its counters are atomics that Python reads and
writes in place. Without a C++ compiler a Python counter takes over: it knows only the
storages that it is told about, hence not the workspace inside operators.
"""

import ctypes
import gc
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from types import TracebackType
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from lowtide.errors import LowtideError
from lowtide.runtime.shim import NoShimError, load_shim
from lowtide.trace import BLOCKS

Bytes: TypeAlias = int

_log = logging.getLogger("lowtide")

_STRIDE = 64  # bytes from one counter to the next in the C++ struct

NO_COMPILER = (
    "counting memory in Python, because {reason}.\n"
    "It sees what operators return but not the workspace inside them, so that a "
    "budget may be exceeded by as much. To count exactly, install a C++ compiler "
    '(Debian, Ubuntu: "apt-get install g++"; Fedora: "dnf install gcc-c++"; conda: '
    '"conda install -c conda-forge gxx") or name yours in $CXX, then start again.'
)


class Cell(Protocol):
    """Hold one number that can be read and set."""

    value: int


class Reading(Protocol):
    """Hold one number that can be read."""

    @property
    def value(self) -> int: ...


class NativeCounter:
    """Read the counters of the C++ allocator, which sees every block."""

    name = "lowtide"
    sees_workspace = True

    def __init__(self, library: ctypes.CDLL) -> None:
        address: int = library.lowtide_install()
        cells = [ctypes.c_int64.from_address(address + _STRIDE * i) for i in range(4)]
        self.live: Reading = cells[0]
        self.peak: Cell = cells[1]
        self.op_peak: Cell = cells[2]
        self.op: Cell = cells[3]  # the operator that runs: set by whoever counts them
        self.library = library

    def reset_peak(self) -> None:
        """Let the peak begin anew at what is live now."""
        self.peak.value = self.live.value

    def adjust(self, n_bytes: Bytes) -> None:
        """Count bytes that live elsewhere; negative when they are gone."""
        self.library.lowtide_adjust(n_bytes)

    def adopt_storage(self, storage: torch.UntypedStorage) -> Bytes:
        """Take over a storage from before the installation; 0 if it is not torch's.

        Its block changes hands, so that its death and its resizing are seen too.
        """
        adopted: int = self.library.lowtide_adopt(storage._cdata)
        return adopted

    def block_bytes(self, address: int) -> Bytes | None:
        """Tell the size of the live block at an address; None if it is not ours."""
        found: int = self.library.lowtide_bytes(address)
        return None if found < 0 else found

    def blocks_so_far(self) -> int:
        """Count the blocks handed out or adopted since the installation."""
        blocks: int = self.library.lowtide_blocks()
        return blocks

    def trim(self) -> Bytes:
        """Give freed blocks that are kept for reuse back to the system."""
        kept: int = self.library.lowtide_trim()
        return kept

    def keep(self, limit: Bytes | None) -> None:
        """Limit live blocks and kept pages together, beside the peak of live ones.

        None sets no limit but that peak.
        """
        self.library.lowtide_keep(-1 if limit is None else limit)

    def is_current(self) -> bool:
        """Tell whether torch still allocates CPU memory through lowtide."""
        current: bool = self.library.lowtide_is_current()
        return current


class BlockLog:
    """Record every block that comes while inside, workspace and all: `blocks`.

    Events count allocations and releases from the start of the log. Only one log can
    record at a time.
    """

    _recording = threading.Lock()

    def __init__(self, counter: NativeCounter) -> None:
        self._library = counter.library
        self._ended: NDArray[np.void] | None = None

    def start(self) -> bool:
        """Begin to record; False where another log does already."""
        if not self._recording.acquire(blocking=False):
            return False
        if not self._library.lowtide_log_start():
            self._recording.release()
            return False
        self._ended = None
        return True

    def stop(self) -> None:
        """End the recording; `blocks` stays as it is now."""
        self._ended = self._copy(0)
        self._library.lowtide_log_stop()
        self._recording.release()

    def __enter__(self) -> "BlockLog":
        """Begin to record."""
        if not self.start():
            raise LowtideError(
                "blocks are being recorded already, and only one log at a time can: "
                "end the other one first."
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the recording."""
        self.stop()

    @property
    def events(self) -> int:
        """Count the events so far."""
        events: int = self._library.lowtide_log_events()
        return events

    @property
    def blocks(self) -> NDArray[np.void]:
        """Copy the blocks so far, of dtype BLOCKS, in the order in which they came."""
        return self._copy(0) if self._ended is None else self._ended

    def _copy(self, start: int) -> NDArray[np.void]:
        count = self._library.lowtide_log_copy(start, None, 0)
        blocks = np.zeros(count, BLOCKS)
        copied = self._library.lowtide_log_copy(start, blocks.ctypes.data, count)
        return blocks[: min(count, copied)]


class PythonCounter:
    """Count the storages it is told about, until each of them dies.

    Storages die inside weak-reference callbacks, at any moment and in any thread, so
    a callback only appends to a queue; whoever reads or adds drains it first.
    """

    name = "python"
    sees_workspace = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live_bytes = 0
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], Bytes]] = {}
        self._dead: deque[int] = deque()
        self.live: Reading = _LiveCell(self._drained)
        self.peak: Cell = ctypes.c_int64()
        self.op_peak: Cell = ctypes.c_int64()

    def reset_peak(self) -> None:
        """Let the peak begin anew at what is live now."""
        self.peak.value = self.live.value

    def adjust(self, n_bytes: Bytes) -> None:
        """Count bytes that live elsewhere; negative when they are gone."""
        with self._lock:
            self._drain()
            self._add(n_bytes)

    def track(self, storage: torch.UntypedStorage) -> Bytes:
        """Count a storage from now until it dies; 0 if it is counted already.

        A storage that was resized since is counted by its new size.
        """
        key = storage._cdata
        dead = self._dead
        with self._lock:
            self._drain()
            known = self._known.get(key)
            # The object's address may be that of one that died unnoticed, if Python
            # cleared the weak reference without calling it (at a collected cycle).
            if known is not None and known[0]() is storage:
                ref, before = known
            else:
                ref = weakref.ref(storage, lambda _: dead.append(key))
                before = 0 if known is None else known[1]
            n_bytes = storage.nbytes()
            self._known[key] = (ref, n_bytes)
            self._add(n_bytes - before)
        return n_bytes - before

    def adopt_storage(self, storage: torch.UntypedStorage) -> Bytes:
        """Count a storage from before, unless its memory is not torch's own."""
        if storage.is_shared() or not storage.resizable():
            return 0
        return self.track(storage)

    def trim(self) -> Bytes:
        """Do nothing: this counter keeps no memory."""
        return 0

    def keep(self, limit: Bytes | None) -> None:
        """Do nothing: this counter keeps no memory."""

    def _drained(self) -> Bytes:
        with self._lock:
            self._drain()
            return self._live_bytes

    def _drain(self) -> None:
        while self._dead:
            _, n_bytes = self._known.pop(self._dead.popleft(), (None, 0))
            self._live_bytes -= n_bytes

    def _add(self, n_bytes: Bytes) -> None:
        self._live_bytes += n_bytes
        self.peak.value = max(self.peak.value, self._live_bytes)
        self.op_peak.value = max(self.op_peak.value, self._live_bytes)


class _LiveCell:
    """Read the live bytes of a Python counter."""

    def __init__(self, read: Callable[[], Bytes]) -> None:
        self._read = read

    @property
    def value(self) -> Bytes:
        return self._read()


Counter: TypeAlias = NativeCounter | PythonCounter

_installing = threading.Lock()


def install() -> Counter:
    """Count torch's CPU bytes from now on; the first call installs, for good."""
    with _installing:
        return _installed()


@cache
def _installed() -> Counter:
    try:
        return NativeCounter(load_shim())
    except NoShimError as error:
        _log.warning("lowtide: %s", NO_COMPILER.format(reason=error))
        return PythonCounter()


def adopt(counter: Counter) -> Bytes:
    """Count the tensors that existed before `install`; return their bytes.

    Looks at every tensor that Python knows, at gradients and at the parts of sparse
    tensors. Memory that is not torch's (NumPy's, mapped or shared files) is left out,
    as it is when it comes later.
    """
    return sum(counter.adopt_storage(storage) for storage in _cpu_storages())


def _cpu_storages() -> Iterator[torch.UntypedStorage]:
    """Find the storages of all CPU tensors, each at least once."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        for thing in gc.get_objects():
            if not issubclass(type(thing), torch.Tensor):
                continue
            tensors = [thing]
            with suppress(RuntimeError):  # a view that autograd has given up
                if thing.is_leaf and thing.grad is not None:
                    tensors.append(thing.grad)
            for tensor in tensors:
                for part in _dense_parts(tensor):
                    if part.device.type != "cpu":
                        continue
                    try:
                        yield part.untyped_storage()
                    except RuntimeError:
                        continue  # no storage: a wrapper around tensors we meet anyway


def _dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Split a tensor into those that own its memory."""
    layout = tensor.layout
    if layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor] if layout is torch.strided else []
