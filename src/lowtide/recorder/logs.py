# SPDX-License-Identifier: Apache-2.0
"""Read the logs of other people's experiments.

**AutoSwap's author** (Zhang et al., arXiv 1903.06631) published calls of an allocator,
one a line, in two forms. Times are those of the host when a pointer is handed out:

    Malloc ADDRESS BYTES MILLISECONDS          Free ADDRESS MILLISECONDS
    NUMBER Malloc|Free|Read|Mutable|Layer ADDRESS BYTES NANOSECONDS

**DTR** (Kirisame et al., arXiv 2006.09616) logs the tensors of a program, one JSON
object a line: calls with their results, their times and their memory, aliases, copies
of references, releases. A storage lives until the last name for it is released. A
mutation counts as in DTR's own simulator: it makes a new storage for each tensor that
it changes. What comes before the annotation START was there already.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from lowtide.errors import FileError
from lowtide.history import History
from lowtide.recorder.lives import MOST_BYTES, Lives, printable, whole

AUTOSWAP_SOURCE = "AutoSwap log"
DTR_SOURCE = "DTR log"

_MOST_NANOSECONDS = 1 << 63
_USES = {"Read": False, "Mutable": True, "Layer": False}


def parse_autoswap(text: str) -> History:
    """Read a log of allocations and uses, in either of its two forms."""
    lives = Lives()
    times: list[int] = []
    unknown = 0
    for fields in _lines(text):
        lives.event += 1
        kind, address, size, time = _autoswap_fields(fields, lives.event)
        times.append(time)
        known = address in lives.live
        if kind == "Malloc":
            lives.allocate(address, size, op=-1)
        elif kind == "Free":
            unknown += size == 0 and not known
            lives.release(address, size, op=-1)
        else:
            row = lives.live.get(address)
            if row is None:
                row = lives.add_existing(address, size)
            lives.use(row, writes=_USES[kind])
    if not times:
        raise FileError("is no AutoSwap log: it has no lines")
    notes = (f"{unknown} blocks of unknown size are released",) if unknown else ()
    return lives.history(
        source=AUTOSWAP_SOURCE,
        seconds=[(time - times[0]) / 1e9 for time in times],
        notes=notes,
    )


def _lines(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        fields = line.replace(",", " ").split()
        if fields:
            yield fields


def _autoswap_fields(fields: list[str], line: int) -> tuple[str, str, int, int]:
    """Give kind, address, bytes (0 where it has none) and nanoseconds of a line."""
    nanoseconds = 1_000_000
    if fields[0].isdecimal():
        fields, nanoseconds = fields[1:], 1
    kind = fields[0] if fields else ""
    try:
        if nanoseconds > 1 and kind == "Free":
            _, address, time = fields
            size = "0"
        else:
            _, address, size, time = fields
        if kind not in {"Malloc", "Free", *_USES}:
            raise ValueError
        moment = _bounded(time, _MOST_NANOSECONDS) * nanoseconds
        return kind, address, _bounded(size, MOST_BYTES), moment
    except ValueError:
        start = printable(" ".join(fields))[:40]
        raise FileError(
            f"is no AutoSwap log: its line {line} reads {start!r}"
        ) from None


def _bounded(digits: str, most: int) -> int:
    number = int(digits)
    if not 0 <= number <= most:
        raise ValueError
    return number


def parse_dtr(text: str) -> History:
    """Read a log of DTR's simulator."""
    log = _Dtr()
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            instruction = json.loads(line)
        except (ValueError, RecursionError):
            raise FileError(f"is no DTR log: its line {number} is no JSON") from None
        try:
            log.perform(instruction)
        except FileError as error:
            raise FileError(f"{error.why}, in line {number}") from None
    return log.history()


class _Dtr:
    """Names, the storages they stand for, and who still refers to these."""

    def __init__(self) -> None:
        self._lives = Lives()
        self._storages: dict[str, int] = {}  # name -> storage
        self._references: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._count = 0
        self._waiting: dict[str, int] = {}  # results whose MEMORY was told -> bytes
        self._args: list[int | None] = []  # storages of the last call's arguments
        self._op = -1
        self._op_name = ""
        self._constants: set[str] = set()
        self._unknown: set[str] = set()
        self._instructions = 0
        self._started = False

    def perform(self, instruction: Any) -> None:
        """Follow one line of the log."""
        if not isinstance(instruction, dict):
            raise FileError("is no DTR log: an instruction is no object")
        name = instruction.get("INSTRUCTION")
        act = _ACTIONS.get(name) if isinstance(name, str) else None
        if act is None:
            raise FileError("is no DTR log: an instruction is unknown")
        self._lives.event += 1
        self._instructions += 1
        act(self, instruction)

    def history(self) -> History:
        """Give what the log says."""
        if not self._instructions:
            raise FileError("is no DTR log: it has no instructions")
        notes: tuple[str, ...] = ()
        if self._unknown:
            example = printable(min(self._unknown))
            notes = (f"{len(self._unknown)} names come from nowhere, e.g. {example}",)
        return self._lives.history(source=DTR_SOURCE, notes=notes)

    def call(self, line: dict[str, Any]) -> None:
        self._begin(line)

    def mutate(self, line: dict[str, Any]) -> None:
        names = self._begin(line)
        renewed: set[str] = set()  # one operator makes one new block for each name
        for place in _list(line, "MUTATE"):
            place = whole(place, "place of an argument", high=max(1, len(names)))
            old = self._args[place] if names else None
            if old is None or names[place] not in self._storages.keys() - renewed:
                continue
            renewed.add(names[place])
            self._release(names[place])
            self._name(names[place], self._allocate(self._sizes[old], self._op))

    def constant(self, line: dict[str, Any]) -> None:
        self._constants.add(_text(line, "NAME"))

    def memory(self, line: dict[str, Any]) -> None:
        name = _text(line, "NAME")
        size = _number(line, "MEMORY", high=MOST_BYTES)
        if name in self._constants:
            self._constants.discard(name)
            self._name(name, self._allocate(size, -1))
        else:
            self._waiting[name] = size

    def alias(self, line: dict[str, Any]) -> None:
        name = _text(line, "NAME")
        if name not in self._waiting:
            return  # of a constant
        size = self._waiting.pop(name)
        place = _number(line, "ALIAS", low=-1, high=max(1, len(self._args)))
        storage = self._args[place] if 0 <= place < len(self._args) else None
        if storage is None or storage not in self._references:
            storage = self._allocate(size, self._op)
        self._name(name, storage)

    def copy(self, line: dict[str, Any]) -> None:
        storage = self._find(_text(line, "SRC"))
        if storage is not None:
            self._name(_text(line, "DST"), storage)

    def release(self, line: dict[str, Any]) -> None:
        name = _text(line, "NAME")
        if self._find(name) is not None:
            self._release(name)

    def annotate(self, line: dict[str, Any]) -> None:
        if self._started or "START" not in [str(value) for value in line.values()]:
            return
        self._started = True
        self._lives, self._op = Lives(), -1
        for storage in self._references:
            self._lives.add_existing(storage, self._sizes[storage])

    def _begin(self, line: dict[str, Any]) -> list[str]:
        """Tell of an operator and its arguments; return their names."""
        self._op_name = name = _text(line, "NAME")
        names = _list(line, "ARGS")
        seconds = _number(line, "TIME", high=_MOST_NANOSECONDS) / 1e9
        self._op = self._lives.add_op(name, seconds, event=self._lives.event - 1)
        self._args = []
        for argument in names:
            if not isinstance(argument, str):
                raise FileError("is no DTR log: an argument has no name")
            storage = self._find(argument)
            self._args.append(storage)
            if storage is not None:
                self._lives.use(self._lives.live[storage], op=self._op)
        return names

    def _find(self, name: str) -> int | None:
        storage = self._storages.get(name)
        if storage is None:
            self._unknown.add(name)
        return storage

    def _allocate(self, size: int, op: int) -> int:
        storage = self._count
        self._count += 1
        label = self._op_name if op >= 0 else "constant"
        self._lives.allocate(storage, size, label=label, op=op)
        self._sizes[storage] = size
        self._references[storage] = 0
        return storage

    def _name(self, name: str, storage: int) -> None:
        """Let a name stand for a storage, and no longer for another."""
        self._references[storage] += 1
        if name in self._storages:
            self._release(name)
        self._storages[name] = storage

    def _release(self, name: str) -> None:
        storage = self._storages.pop(name)
        self._references[storage] -= 1
        if self._references[storage] == 0:
            del self._references[storage]
            self._lives.release(storage, self._sizes[storage], op=self._op)


_ACTIONS: dict[str, Callable[[_Dtr, dict[str, Any]], None]] = {
    "CALL": _Dtr.call,
    "MUTATE": _Dtr.mutate,
    "CONSTANT": _Dtr.constant,
    "MEMORY": _Dtr.memory,
    "ALIAS": _Dtr.alias,
    "COPY": _Dtr.copy,
    "COPY_FROM": _Dtr.copy,
    "RELEASE": _Dtr.release,
    "ANNOTATE": _Dtr.annotate,
}


def _text(line: dict[str, Any], name: str) -> str:
    value = line.get(name)
    if not isinstance(value, str):
        raise FileError(f"is no DTR log: an instruction has no {name!r}")
    return value


def _list(line: dict[str, Any], name: str) -> list[Any]:
    value = line.get(name)
    if not isinstance(value, list):
        raise FileError(f"is no DTR log: an instruction has no list {name!r}")
    return value


def _number(line: dict[str, Any], name: str, *, high: int, low: int = 0) -> int:
    """Read a number, which DTR itself writes as text."""
    value = line.get(name)
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            value = None
    elif isinstance(value, float) and value.is_integer():
        value = int(value)
    return whole(value, name, low=low, high=high)
