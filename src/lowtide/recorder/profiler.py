# SPDX-License-Identifier: Apache-2.0
"""Read the Chrome traces of PyTorch's profiler, for what they say about memory.

`torch.profiler.profile(profile_memory=True)` and `export_chrome_trace` write JSON with
one event of the name "[memory]" for each allocation (bytes above zero) and release
(below). They are ordered by time, and at one time by their number. A block belongs to
the innermost operator of its thread that spans the moment. Blocks of the CPU that were
there before the profile began have no release in it and so do not show.

Operators are the outermost ones of each thread. Their time is that of the kernels that
they started, where the file names these, and else the host's.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Generator, Iterator
from typing import Any

from lowtide.errors import FileError
from lowtide.history import History
from lowtide.recorder.lives import Lives, few, printable, whole

SOURCE = "profiler trace"

_KINDS = {0: "cpu", 1: "cuda"}
_BACKWARD = "autograd::engine::evaluate_function: "

Thread = tuple[Any, Any]


def parse_profile(text: str | bytes, *, device: str | None = None) -> History:
    """Read a trace.

    Arguments:
        text: the JSON.
        device: whose memory to look at, as in "cuda:0"; None: the one that allocates
            most, of accelerators first.

    Raises:
        FileError: it is no such trace, was recorded without memory, or is damaged.
    """
    try:
        reader = _Reader(_each_event(text if isinstance(text, str) else text.decode()))
    except RecursionError:
        raise FileError("is no profiler trace: it is nested too deeply") from None
    except ValueError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"is no whole JSON: {printable(str(error))}") from None
    return reader.read(device)


class _Reader:
    def __init__(self, events: Iterator[dict[str, Any]]) -> None:
        self.memory: list[_Change] = []
        self.spans: dict[Thread, list[_Span]] = {}
        self.kernels: dict[Any, float] = {}  # seconds, by the operator that started it
        self.failures = self.steps = 0
        for event in events:
            self._take(event)
        if not self.memory:
            raise FileError(
                "has no memory events: record it with profile(profile_memory=True)"
            )
        self.memory.sort(key=lambda change: (change.at, change.number))
        _nest(self.spans)

    def _take(self, event: dict[str, Any]) -> None:
        name, category = event.get("name"), event.get("cat")
        if name == "[memory]":
            self.memory.append(_Change(event))
        elif category == "cpu_op" and event.get("ph") == "X":
            self.spans.setdefault(_thread(event), []).append(_Span(event))
        elif category == "kernel":
            key = _key(_args(event).get("External id"))
            duration = max(0.0, _microseconds(event, "dur")) / 1e6
            self.kernels[key] = self.kernels.get(key, 0.0) + duration
        elif name == "[OutOfMemory]":
            self.failures += 1
        elif event.get("ph") == "X" and str(name).startswith("Optimizer.step"):
            self.steps += 1

    def read(self, wanted: str | None) -> History:
        taken: dict[str, int] = {}
        for change in self.memory:
            taken[change.device] = taken.get(change.device, 0) + max(0, change.bytes)
        device = wanted
        if device is None:
            device = max(taken, key=lambda name: (name != "cpu", taken[name]))
        if device not in taken:
            known = few(taken)
            raise FileError(f"holds no memory of device {device}; there is: {known}")
        changes = [change for change in self.memory if change.device == device]
        lives = Lives()
        operators = _Operators(self.spans, self.kernels)
        for change in changes:
            lives.event += 1
            op, label = operators.at(change, lives)
            if change.bytes > 0:
                lives.allocate(change.address, change.bytes, label=label, op=op)
            elif change.bytes < 0:
                lives.release(change.address, -change.bytes, op=op)
        operators.finish(lives)
        return lives.history(
            source=SOURCE,
            device=device,
            seconds=[(change.at - changes[0].at) / 1e6 for change in changes],
            reserved_bytes=max(change.reserved for change in changes),
            steps=self.steps,
            notes=self._notes(taken, device),
        )

    def _notes(self, taken: dict[str, int], device: str) -> tuple[str, ...]:
        notes = []
        others = taken.keys() - {device}
        if others:
            notes.append(f"other devices in this file: {few(others)}")
        if self.failures:
            notes.append(f"the device ran out of memory {self.failures} times")
        return tuple(notes)


class _Change:
    """One "[memory]" event."""

    __slots__ = ("address", "at", "bytes", "device", "number", "reserved", "thread")

    def __init__(self, event: dict[str, Any]) -> None:
        args = _args(event)
        self.at = _microseconds(event, "ts")
        self.thread = _thread(event)
        self.address = whole(args.get("Addr"), "address", high=1 << 64)
        self.bytes = whole(args.get("Bytes"), "size", low=-(1 << 63))
        self.number = whole(args.get("Ev Idx", 0), "number of an event")
        reserved = args.get("Total Reserved", 0)
        self.reserved = max(0, whole(reserved, "Total Reserved", low=-(1 << 63)))
        kind = whole(args.get("Device Type"), "Device Type", high=1 << 16)
        ordinal = whole(args.get("Device Id", -1), "Device Id", low=-1, high=1 << 16)
        self.device = _KINDS.get(kind, f"device type {kind}")
        if ordinal >= 0:
            self.device += f":{ordinal}"


class _Span:
    """One operator of one thread."""

    __slots__ = ("external", "index", "name", "outer", "start", "stop")

    def __init__(self, event: dict[str, Any]) -> None:
        self.start = _microseconds(event, "ts")
        self.stop = self.start + max(0.0, _microseconds(event, "dur"))
        self.name = str(event.get("name")).removeprefix(_BACKWARD)
        self.external = _args(event).get("External id")
        self.outer: _Span | None = None
        self.index = -1  # among the operators of the history


class _Operators:
    """Walk through the operators beside the changes, and tell each once it begins."""

    def __init__(
        self, spans: dict[Thread, list[_Span]], kernels: dict[Any, float]
    ) -> None:
        self._todo = {thread: spans[thread][::-1] for thread in spans}
        self._open: dict[Thread, list[_Span]] = {thread: [] for thread in spans}
        self._seconds = _seconds_of(spans, kernels)
        self._order = sorted(
            (span for row in spans.values() for span in row if span.outer is None),
            key=lambda span: span.start,
            reverse=True,
        )

    def at(self, change: _Change, lives: Lives) -> tuple[int, str]:
        """Return the outermost operator at a change, and the innermost one's name."""
        self._begin(change.at, lives)
        todo = self._todo.get(change.thread, [])
        stack = self._open.setdefault(change.thread, [])
        while todo and todo[-1].start <= change.at:
            span = todo.pop()
            while stack and stack[-1].stop <= span.start:
                stack.pop()
            stack.append(span)
        while stack and stack[-1].stop < change.at:
            stack.pop()
        return (stack[0].index, stack[-1].name) if stack else (-1, "")

    def finish(self, lives: Lives) -> None:
        """Tell of the operators after the last change."""
        self._begin(math.inf, lives)

    def _begin(self, until: float, lives: Lives) -> None:
        while self._order and self._order[-1].start <= until:
            span = self._order.pop()
            seconds = self._seconds[id(span)]
            before = max(0, lives.event - 1) if until < math.inf else lives.event
            span.index = lives.add_op(span.name, seconds, event=before)


def _seconds_of(
    spans: dict[Thread, list[_Span]], kernels: dict[Any, float]
) -> dict[int, float]:
    """Give the time of each outermost operator."""
    seconds: dict[int, float] = {}
    for row in spans.values():
        for span in row:
            top = span.outer or span
            here = seconds.setdefault(id(top), 0.0)
            if kernels:
                seconds[id(top)] = here + kernels.get(_key(span.external), 0.0)
            elif top is span:
                seconds[id(top)] = (span.stop - span.start) / 1e6
    return seconds


def _nest(spans: dict[Thread, list[_Span]]) -> None:
    """Sort the operators of each thread, and find the outermost one around each."""
    for row in spans.values():
        row.sort(key=lambda span: (span.start, -span.stop))
        stack: list[_Span] = []
        for span in row:
            while stack and stack[-1].stop <= span.start:
                stack.pop()
            span.outer = stack[0] if stack else None
            stack.append(span)


_SPACE = re.compile(r"[ \t\n\r]*")
_DECODE = json.JSONDecoder().raw_decode


def _each_event(text: str) -> Iterator[dict[str, Any]]:
    """Give the events one by one: all of them as objects would fill the memory.

    Raises:
        ValueError: it is no JSON, or ends before its end.
    """
    at = _skip(text, 0)
    if text[at : at + 1] == "[":
        at = yield from _each_element(text, at)
    else:
        at = yield from _each_field(text, at)
    if _skip(text, at) < len(text):
        raise ValueError(f"something follows its end at character {at}")


def _each_field(text: str, at: int) -> Generator[dict[str, Any], None, int]:
    """Walk through an object, and give the elements of its list `traceEvents`."""
    found = False
    sign = text[at : at + 1]
    while sign in ("{", ","):
        at = _skip(text, at + 1)
        if text[at : at + 1] == "}":
            break
        name, at = _DECODE(text, at)
        at = _expect(text, at, ":")
        if name == "traceEvents" and text[at : at + 1] == "[":
            found = True
            at = yield from _each_element(text, at)
        else:
            _, at = _DECODE(text, at)
        at = _skip(text, at)
        sign = text[at : at + 1]
    if not found:
        raise FileError("is no profiler trace: it has no list 'traceEvents'")
    return _expect(text, at, "}")


def _each_element(text: str, at: int) -> Generator[dict[str, Any], None, int]:
    at = _skip(text, at + 1)
    if text[at : at + 1] == "]":
        return at + 1
    while True:
        value, at = _DECODE(text, at)
        if isinstance(value, dict):
            yield value
        at = _skip(text, at)
        if text[at : at + 1] != ",":
            return _expect(text, at, "]")
        at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _expect(text: str, at: int, sign: str) -> int:
    """Return where what follows a sign begins, which has to stand here."""
    at = _skip(text, at)
    if text[at : at + 1] != sign:
        raise ValueError(f"{sign!r} is missing at character {at}")
    return _skip(text, at + 1)


def _args(event: dict[str, Any]) -> dict[str, Any]:
    args = event.get("args", {})
    if not isinstance(args, dict):
        raise FileError("is no profiler trace: an event's 'args' are no object")
    return args


def _thread(event: dict[str, Any]) -> Thread:
    return _key(event.get("pid")), _key(event.get("tid"))


def _key(value: Any) -> Any:
    return value if isinstance(value, int | str) else None


def _microseconds(event: dict[str, Any], name: str) -> float:
    value = event.get(name, 0)
    if isinstance(value, str):  # some versions write numbers as text
        try:
            value = float(value)
        except ValueError:
            value = None
    if type(value) not in (int, float) or not abs(value) < 1e18:
        raise FileError(f"is no profiler trace: an event's {name!r} is no time")
    return float(value)
