# SPDX-License-Identifier: Apache-2.0
"""Read CUDA memory snapshots: what `torch.cuda.memory._dump_snapshot` writes.

Such a file is a pickle, and a pickle is a program. Here it is read in two steps. A scan
over the whole stream allows only operations that build dictionaries, lists, numbers,
text and pairs of numbers, with lengths that lie within the file; anything else, every
operation that could name or call a function among them, is refused before a single
object is made. What is left is given to Python's unpickler, whose way to functions is
blocked once more.

A snapshot holds the segments and blocks at its end and, for each device, the last
events before it. So blocks that are there at the end and were not allocated in these
events were there before them, and so were those whose release has no allocation.
Memory can be used again when a release is completed, not when it is requested.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any, NoReturn

from lowtide.errors import FileError
from lowtide.history import History
from lowtide.recorder.lives import Lives, few, printable, whole

SOURCE = "CUDA memory snapshot"

_ALLOCATES, _RELEASES = {"alloc"}, {"free_completed", "free"}
_GROWS, _SHRINKS = {"segment_alloc", "segment_map"}, {"segment_free", "segment_unmap"}
_HELD = {"active_allocated", "active_pending_free", "active_awaiting_free"}
_IN_TORCH = ("/torch/", "/site-packages/", "/dist-packages/")


def parse_snapshot(data: bytes, *, device: int | None = None) -> History:
    """Read a snapshot.

    Arguments:
        data: the pickle.
        device: whose memory to look at; None: the device with the most of it.

    Raises:
        FileError: it is no snapshot, is damaged, or could run code.
    """
    snapshot = _unpickle(data)
    if isinstance(snapshot, list):  # of torch.cuda.memory_snapshot(): no events
        snapshot = {"segments": snapshot}
    return _Reader(snapshot, len(data)).read(device)


class _Reader:
    def __init__(self, snapshot: Any, n_bytes: int) -> None:
        top = _fields(snapshot, "it")
        self.segments = [_fields(s, "a segment") for s in _list(top, "segments")]
        self.traces = _list(top, "device_traces", optional=True)
        self.annotations = _list(top, "external_annotations", optional=True)
        # A few bytes may name one list many times; no true file has so many entries.
        self.entries_left = n_bytes
        self.places: dict[int, str] = {}
        self.lives = Lives()

    def read(self, wanted: int | None) -> History:
        reserved: dict[int, int] = {}
        for segment in self.segments:
            ordinal = whole(segment.get("device", 0), "device", high=1 << 16)
            size = whole(segment.get("total_size"), "segment's total_size")
            reserved[ordinal] = reserved.get(ordinal, 0) + size
        for ordinal, trace in enumerate(self.traces):
            if not isinstance(trace, list):
                raise FileError("is no memory snapshot: a device's events are no list")
            if trace:
                reserved.setdefault(ordinal, 0)
        notes = []
        device = wanted
        if device is None:
            device = max(reserved, key=lambda k: (reserved[k], -k), default=0)
        elif device not in reserved:
            known = few(reserved) or "none"
            raise FileError(f"holds nothing of device {device}; there is: {known}")
        others = reserved.keys() - {device}
        if others:
            notes.append(f"other devices in this file: {few(others)}")
        seconds, peak = self._replay(device, reserved[device] if reserved else 0, notes)
        self._add_blocks_at_end(device)
        return self.lives.history(
            source=SOURCE,
            device=f"cuda:{device}",
            seconds=seconds,
            reserved_bytes=peak,
            steps=self._count_steps(device),
            notes=tuple(notes),
        )

    def _replay(
        self, device: int, reserved_at_end: int, notes: list[str]
    ) -> tuple[list[float], int]:
        """Go through the events; give their times and the peak of what is reserved."""
        trace = self.traces[device] if device < len(self.traces) else []
        actions = {_action(entry) for entry in trace}
        releases = _RELEASES
        if "free_requested" in actions and not actions & _RELEASES:
            releases = {"free_requested"}
            notes.append("completed releases are not in this file, only requested ones")
        seconds: list[float] = []
        reserved = highest = 0
        failures = 0
        for entry in trace:
            event, action = entry, _action(entry)
            self._count()
            self.lives.event += 1
            if action in _ALLOCATES or action in releases:
                self._apply(event, allocates=action in _ALLOCATES)
            elif action in _GROWS or action in _SHRINKS:
                size = whole(event.get("size"), "segment's size")
                reserved += size if action in _GROWS else -size
                highest = max(highest, reserved)
            elif action == "oom":
                failures += 1
            seconds.append(whole(event.get("time_us", 0), "time_us") / 1e6)
        if failures:
            notes.append(f"the device ran out of memory {failures} times")
        times = [s - seconds[0] for s in seconds] if any(seconds) else []
        return times, max(reserved_at_end, reserved_at_end - reserved + highest)

    def _apply(self, event: dict[str, Any], *, allocates: bool) -> None:
        address = whole(event.get("addr"), "block's address", high=1 << 64)
        size = whole(event.get("size"), "block's size")
        act = self.lives.allocate if allocates else self.lives.release
        label = self._place(event) if allocates else ""
        act(address, size, label=label, group=_group(event, "pool_id"), op=-1)

    def _add_blocks_at_end(self, device: int) -> None:
        """Add what is there at the end and was not allocated in the events."""
        for segment in self.segments:
            if segment.get("device", 0) != device:
                continue
            group = _group(segment, "segment_pool_id")
            address = whole(segment.get("address"), "segment's address", high=1 << 64)
            for entry in _list(segment, "blocks"):
                block = _fields(entry, "a block")
                self._count()
                size = whole(block.get("size"), "block's size", low=1)
                at = whole(block.get("address", address), "address", high=1 << 64)
                held = str(block.get("state")) in _HELD
                if held and at not in self.lives.live:
                    self._add_existing(block, at, size, group)
                address = at + size

    def _add_existing(
        self, block: dict[str, Any], address: int, size: int, group: str
    ) -> None:
        history = block.get("history")  # of PyTorch 2.0
        if isinstance(history, list) and history:
            block = {**_fields(history[-1], "a block's history"), **block}
        asked = block.get("requested_size", block.get("real_size", size))
        asked = whole(asked, "block's requested_size")
        place = self._place(block)
        self.lives.add_existing(address, asked, label=place, group=group)

    def _place(self, event: dict[str, Any]) -> str:
        """Name the first line of the user's own that an allocation comes from."""
        frames = event.get("frames")
        if not isinstance(frames, list) or not frames:
            return ""
        known = self.places.get(id(frames))
        if known is None:
            self._count(len(frames))
            known = self.places[id(frames)] = _name_place(frames)
        return known

    def _count_steps(self, device: int) -> int:
        steps = 0
        for entry in self.annotations:
            mark = _fields(entry, "an annotation")
            name = mark.get("name")
            steps += (
                mark.get("stage") == "START"
                and mark.get("device", device) == device
                and isinstance(name, str)
                and name.startswith("Optimizer.step")
            )
        return steps

    def _count(self, n: int = 1) -> None:
        self.entries_left -= n
        if self.entries_left < 0:
            raise FileError("is no memory snapshot: more entries than it has bytes")


def _action(entry: Any) -> str:
    action = _fields(entry, "an event").get("action")
    if not isinstance(action, str):
        raise FileError("is no memory snapshot: an event without an action")
    return action


def _name_place(frames: list[Any]) -> str:
    best = ""
    for frame in frames:
        if not isinstance(frame, dict):
            continue
        path, line, name = (frame.get(key) for key in ("filename", "line", "name"))
        if not isinstance(path, str) or not isinstance(name, str):
            continue
        if not path.endswith(".py"):
            best = best or printable(name)
        elif not any(folder in path for folder in _IN_TORCH):
            return printable(f"{path.rpartition('/')[2]}:{line} {name}")
    return best


def _group(entry: dict[str, Any], pool_key: str) -> str:
    """Name the stream and pool: other streams and pools must not share its space."""
    stream = whole(entry.get("stream", 0), "stream", low=-(1 << 63), high=1 << 64)
    pool = entry.get(pool_key)
    if not isinstance(pool, tuple) or len(pool) != 2 or pool == (0, 0):
        return f"stream {stream}"
    return f"stream {stream}, pool {pool[0]}.{pool[1]}"


def _fields(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FileError(f"is no memory snapshot: {what} is no dictionary")
    return value


def _list(fields: dict[str, Any], name: str, *, optional: bool = False) -> list[Any]:
    value = fields.get(name, [] if optional else None)
    if not isinstance(value, list):
        raise FileError(f"is no memory snapshot: there is no list {name!r}")
    return value


class _NoFunctions(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise FileError("is refused: it names a function")

    def persistent_load(self, pid: Any, /) -> NoReturn:
        raise FileError("is refused: it names an object outside")


def _unpickle(data: bytes) -> Any:
    _scan(data)
    try:
        return _NoFunctions(io.BufferedReader(io.BytesIO(data))).load()
    except FileError:
        raise
    except Exception as error:  # whatever a damaged stream makes of the unpickler
        raise FileError(f"is damaged: {printable(str(error))}") from None


# Operations of a length that shows in their first byte or two, and pairs of numbers.
# As the first byte tells how long an operation is, there is one way only to read them.
_NUMBER = rb"(?:K.|M..|J....|\x8a(?:\x01.|\x02..|\x03...|%s))" % b"|".join(
    b"\\x%02x.{%d}" % (n, n) for n in range(4, 10)
)
_OTHER = rb"[}\])(suaeN\x88\x89\x94]|[hq\x80].|j....|G.{8}"
# Repeated so often at most, since each repetition takes memory while it matches.
_RUN = re.compile(
    rb"(?:%s%s\x86|%s|%s){0,4096}" % (_NUMBER, _NUMBER, _NUMBER, _OTHER), re.DOTALL
)
_SIZED = {0x8C: 1, 0x58: 4, 0x8D: 8}  # texts, with the bytes of their length
_SMALL = 10_000
_FRAME, _STOP, _PUT = 0x95, 0x2E, 0x72
_FIRST_BYTES = frozenset(b"KMJ\x8ahq\x80jG")  # of operations with more bytes


def _scan(data: bytes) -> None:
    """Refuse every operation that a snapshot has no use for, before any is performed.

    Pairs may hold numbers only: one inside the other, thousands deep, they would
    overflow the interpreter's stack as keys of a dictionary.
    """
    if data[:1] != b"\x80":
        raise FileError("is no memory snapshot: it does not begin as a pickle")
    # Bytes of numbers and texts count too, but in true files both together are few.
    containers = data.count(b"}") + data.count(b"]")
    if containers > _SMALL + len(data) // 8:
        raise FileError("is no memory snapshot: it is little but empty containers")
    at, end = 0, len(data)
    while True:
        match = _RUN.match(data, at)
        if match is not None and match.end() > at:
            at = match.end()
        elif at >= end:
            raise FileError(f"is cut off: its {end} bytes end within the pickle")
        elif data[at] == _STOP:
            break
        else:
            at += _check_special(data, at)
    if at + 1 != end:
        raise FileError(
            f"is damaged: {end - at - 1} bytes follow the end of the pickle"
        )


def _check_special(data: bytes, at: int) -> int:
    """Check an operation with a length or a condition; return its bytes."""
    operation = data[at]
    left = len(data) - at
    if operation in _SIZED:
        width = _SIZED[operation]
        n_bytes = int.from_bytes(data[at + 1 : at + 1 + width], "little")
        if n_bytes > left - 1 - width:
            raise FileError(f"is cut off: a text of {n_bytes} bytes in {left}")
        return 1 + width + n_bytes
    if operation == _FRAME:
        n_bytes = int.from_bytes(data[at + 1 : at + 9], "little")
        if n_bytes > left - 9:
            raise FileError(f"is cut off: a frame of {n_bytes} bytes in {left}")
        return 9
    if operation == _PUT:
        # The memo grows to this place. An object and its number take three bytes.
        if int.from_bytes(data[at + 1 : at + 5], "little") > at // 3:
            raise FileError("is damaged: it numbers more objects than it has")
        return 5
    if operation in _FIRST_BYTES and left < 10:
        raise FileError(f"is cut off: its {len(data)} bytes end within the pickle")
    raise FileError(
        f"is refused: it uses the pickle operation {bytes([operation])!r}, which no "
        "memory snapshot needs and which may run code"
    )
