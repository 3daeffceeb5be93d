# SPDX-License-Identifier: Apache-2.0
"""Nouns in files: each comes back, and none that contradicts itself."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.archive import load, noun_in, save
from lowtide.history import History
from lowtide.plan import Plan
from lowtide.recorder.logs import parse_dtr
from lowtide.tidefile import Tide, TideError, to_tide, write_tide
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
from tests.pure.foreign import dtr
from tests.pure.timelines import make_timeline


def make_plan() -> Plan:
    numbers = {f.name: 3 for f in dataclasses.fields(Plan)}
    until = np.array([4, -1], np.int32)
    tables = {"codes": np.array([1, 0], np.int8), "until": until, "reads": until}
    return Plan(**{**numbers, **tables})  # type: ignore[arg-type]


def make_graph() -> Graph:
    return Graph(
        names=("aten::mm", "aten::add"),
        operators=np.ones(2, OPERATORS),
        versions=np.zeros(3, VERSIONS),
        reads=np.zeros(1, ACCESSES),
        writes=np.zeros(0, ACCESSES),
        saves=np.zeros(1, SAVES),
    )


NOUNS = [
    Trace(ops=np.ones(3, OPS), values=np.zeros(2, VALUES), key=1 << 70),
    make_graph(),
    make_plan(),
    make_timeline(),
    parse_dtr(dtr()),
]


@pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: type(noun).__name__)
def test_nouns_come_back(noun: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.tide"
    save(path, noun, written_by="a test")
    again = load(path)
    assert type(again) is type(noun)
    for field in dataclasses.fields(noun):
        before, after = getattr(noun, field.name), getattr(again, field.name)
        if isinstance(before, np.ndarray):
            assert before.dtype == after.dtype
            assert before.tobytes() == after.tobytes()
        else:
            assert before == after


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tide"
    write_tide(path, Tide(kind="recipe"))
    with pytest.raises(TideError, match=f"^{path} holds a 'recipe', which is none of"):
        load(path)


def changed(table: np.ndarray, column: str | None, value: Any) -> np.ndarray:
    """Return a table with another last row."""
    table = table.copy()
    if column is None:
        table[-1] = value
    else:
        table[column][-1] = value
    return table


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("events", -1, "its number of events"),
        ("events", "x", "its number of events"),
        ("events", 1 << 40, "its number of events"),
        ("source", 3, "its facts are of other types"),
        ("steps", None, "its facts are of other types"),
        ("names", (3,), "its names are no texts"),
        ("notes", "text", "its names are no texts"),
        ("groups", (), "its names are no texts"),
        ("label", np.zeros(2, "i4"), "its tables do not belong together"),
        ("seconds", np.zeros(2), "its tables do not belong together"),
        ("ops", np.zeros((), "i4"), "other columns in 'ops'"),
        (("blocks", "start"), 13, "a block lives outside"),
        (("blocks", "start"), -1, "a block lives outside"),
        (("blocks", "stop"), 1 << 40, "a block lives outside"),
        (("blocks", "stop"), 5, "a block dies before it is born"),
        (("blocks", "bytes"), -1, "sizes that no memory has"),
        (("blocks", "bytes"), 1 << 62, "sizes that no memory has"),
        (("label", None), 99, "it names what is not there"),
        (("group", None), 1, "it names what is not there"),
        (("ops", "name"), -1, "it names what is not there"),
        (("uses", "block"), 3, "it names what is not there"),
    ],
)
def test_contradictions_are_refused(name: Any, value: Any, why: str) -> None:
    history = parse_dtr(dtr())
    if isinstance(name, tuple):
        name, column = name
        value = changed(getattr(history, name), column, value)
    wrong = dataclasses.replace(history, **{name: value})
    with pytest.raises(TideError, match=why):
        noun_in(to_tide("history", wrong))


plain = st.none() | st.integers() | st.floats() | st.text(max_size=3)
metas = plain | st.lists(plain, max_size=2)
FACTS = ("source", "device", "events", "names", "groups", "steps", "notes")


@given(st.dictionaries(st.sampled_from(FACTS), metas, max_size=3))
def test_any_facts_give_a_history_or_a_reason(facts: dict[str, Any]) -> None:
    tide = to_tide("history", parse_dtr(dtr()))
    meta = {**tide.meta, **facts}
    try:
        noun = noun_in(dataclasses.replace(tide, meta=meta))
    except TideError:
        return
    assert isinstance(noun, History)
    assert (noun.live_curve >= 0).all()
