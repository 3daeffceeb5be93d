# SPDX-License-Identifier: Apache-2.0
"""Keep any of lowtide's nouns in a `.tide` file, and get it back.

The header names what it is; what comes back is checked, since a file may come from
another version, or from somebody who means harm.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from lowtide.history import BLOCKS, OPERATIONS, USES, History
from lowtide.plan import ITERATIONS, NEEDS, SAVED, Learnt, Plan
from lowtide.tidefile import Tide, TideError, from_tide, read_tide, to_tide, write_tide
from lowtide.timeline import Kept, Timeline
from lowtide.trace import (
    ACCESSES,
    OPERATORS,
    OPS,
    SAVES,
    VALUES,
    VERSIONS,
    Graph,
    Trace,
)

Noun: TypeAlias = Trace | Graph | Plan | Learnt | Timeline | History
Rule: TypeAlias = tuple[Callable[[History], Any], str]

MOST_EVENTS = 1 << 31


@dataclass(frozen=True, slots=True)
class _Kind:
    make: type[Any]
    tables: Mapping[str, Any]
    parts: Mapping[str, type[Any]] = field(default_factory=dict)


KINDS: Mapping[str, _Kind] = {
    "trace": _Kind(Trace, {"ops": OPS, "values": VALUES}),
    "graph": _Kind(
        Graph,
        {
            "operators": OPERATORS,
            "versions": VERSIONS,
            "reads": ACCESSES,
            "writes": ACCESSES,
            "saves": SAVES,
        },
    ),
    "plan": _Kind(Plan, {"codes": "i1", "until": "i4", "reads": "i4"}),
    "learnt": _Kind(
        Learnt,
        {
            "iterations": ITERATIONS,
            "ops": OPS,
            "values": VALUES,
            "saved": SAVED,
            "parents": "i4",
            "codes": "i1",
            "needs": NEEDS,
        },
    ),
    "timeline": _Kind(Timeline, {}, {"kept": Kept}),
    "history": _Kind(
        History,
        {
            "blocks": BLOCKS,
            "ops": OPERATIONS,
            "uses": USES,
            "label": "i4",
            "group": "i4",
            "seconds": "f8",
        },
    ),
}


def save(path: str | os.PathLike[str], noun: Noun, *, written_by: str = "") -> None:
    """Write a noun to a file, or replace one, as a whole.

    Raises:
        TideError, OSError: it cannot be written; nothing was changed.
    """
    (kind,) = (name for name, kind in KINDS.items() if kind.make is type(noun))
    write_tide(path, to_tide(kind, noun, written_by=written_by))


def load(path: str | os.PathLike[str]) -> Noun:
    """Read what `save` wrote.

    Raises:
        TideError: the file is damaged, holds something else, or is of another version.
        OSError: the system refused.
    """
    try:
        return noun_in(read_tide(path))
    except TideError as error:
        raise TideError(error.why, path=path) from None


def noun_in(tide: Tide) -> Noun:
    """Turn the content of a file back into what it was."""
    kind = KINDS.get(tide.kind)
    if kind is None:
        known = ", ".join(KINDS)
        raise TideError(f"holds a {tide.kind!r}, which is none of: {known}")
    tables = {name: np.dtype(columns) for name, columns in kind.tables.items()}
    noun: Noun = from_tide(tide, tide.kind, kind.make, tables=tables, parts=kind.parts)
    if isinstance(noun, History):
        check_history(noun)
    return noun


def check_history(history: History) -> None:
    """Refuse a history that contradicts itself.

    Raises:
        TideError: says in what.
    """
    for holds, sentence in RULES:
        try:
            fine = bool(holds(history))
        except (TypeError, ValueError, AttributeError):
            fine = False
        if not fine:
            raise TideError(f"is damaged: {sentence}")


def _is_row(table: Any, length: int) -> bool:
    return bool(table.ndim == 1 and len(table) == length)


def _are_texts(texts: Any) -> bool:
    return isinstance(texts, tuple) and all(isinstance(text, str) for text in texts)


def _within(table: Any, low: int, high: int) -> bool:
    return bool(((table >= low) & (table < high)).all())


RULES: list[Rule] = [
    (
        lambda h: type(h.events) is int and 0 <= h.events < MOST_EVENTS,
        "its number of events is none",
    ),
    (
        lambda h: (
            isinstance(h.source, str)
            and isinstance(h.device, str)
            and type(h.steps) is int
            and type(h.reserved_bytes) is int
        ),
        "its facts are of other types",
    ),
    (
        lambda h: all(map(_are_texts, (h.names, h.groups, h.notes))) and h.groups,
        "its names are no texts",
    ),
    (
        lambda h: (
            h.blocks.ndim == h.ops.ndim == h.uses.ndim == 1
            and _is_row(h.label, len(h.blocks))
            and _is_row(h.group, len(h.blocks))
            and _is_row(h.seconds, len(h.seconds) and h.events)
        ),
        "its tables do not belong together",
    ),
    (
        lambda h: (
            _within(h.blocks["start"], 0, h.events + 1)
            and _within(h.blocks["stop"], -1, h.events + 1)
        ),
        "a block lives outside its events",
    ),
    (lambda h: (h.starts < h.stops).all(), "a block dies before it is born"),
    (
        lambda h: (
            (h.blocks["bytes"] >= 0).all()
            and float(h.blocks["bytes"].astype("f8").sum()) < 1 << 61
        ),
        "its blocks have sizes that no memory has",
    ),
    (
        lambda h: (
            _within(h.label, -1, len(h.names))
            and _within(h.group, 0, len(h.groups))
            and _within(h.ops["name"], 0, len(h.names))
            and _within(h.uses["block"], 0, len(h.blocks))
        ),
        "it names what is not there",
    ),
]
