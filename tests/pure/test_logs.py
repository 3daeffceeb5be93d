# SPDX-License-Identifier: Apache-2.0
"""Logs of AutoSwap's author and of DTR, and iterations in them."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import FileError
from lowtide.recorder.files import read_history
from lowtide.recorder.logs import parse_autoswap, parse_dtr
from lowtide.recorder.steady import find_iteration
from tests.pure.foreign import MIB, autoswap, autoswap_csv, call, dtr, mutate, refusal

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("LOWTIDE_DATA", ROOT.parent / "shared" / "data"))


def test_the_first_form() -> None:
    history = parse_autoswap(autoswap())
    assert history.events == 25
    assert history.blocks[["bytes", "start", "stop"]].tolist()[:4] == [
        (MIB, 1, -1),
        (2 * MIB, 2, 4),
        (MIB // 2, 3, 6),
        (MIB, 5, 7),
    ]
    assert history.seconds.tolist()[:3] == pytest.approx([0, 0.001, 0.002])
    assert history.peak_bytes == 3 * MIB + MIB // 2


def test_the_second_form_has_uses() -> None:
    history = parse_autoswap(autoswap_csv())
    assert history.blocks[["bytes", "start", "stop"]].tolist() == [
        (256, 0, -1),  # read, never allocated: was there
        (4096, 1, 5),
    ]
    assert history.uses[["block", "event", "writes"]].tolist() == [
        (1, 2, True),
        (0, 3, False),
        (1, 4, False),
    ]
    assert history.seconds.tolist() == pytest.approx([0, 0.001, 0.002, 0.003, 0.004])


def test_a_release_of_nothing_known_is_noted() -> None:
    history = parse_autoswap("Free 0x1 5\n")
    assert history.notes == ("1 blocks of unknown size are released",)


def test_an_iteration_is_cut_out() -> None:
    history = parse_autoswap(autoswap())
    iteration = find_iteration(history.blocks)
    assert iteration is not None
    assert iteration.period == 6
    assert iteration.staying_bytes == MIB
    assert sorted(history.blocks["bytes"][iteration.chosen].tolist()) == [
        MIB // 2,
        MIB,
        2 * MIB,
    ]
    assert iteration.starts.min() == 0


def test_chance_repeats_are_no_iteration() -> None:
    lines = [f"Malloc {i} {size} 0" for i, size in enumerate([8] * 5 + [*range(90)])]
    assert find_iteration(parse_autoswap("\n".join(lines)).blocks) is None


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no data in {DATA}")
@pytest.mark.parametrize(
    ("name", "events", "peak", "stays"),
    [("alex", 188, 178.88, 143.33), ("vgg", 1020, 640.70, 223.45)],
)
def test_the_published_figures(
    name: str, events: int, peak: float, stays: float
) -> None:
    history = read_history(DATA / "autoswap" / f"memInfo_{name}.text")
    iteration = find_iteration(history.blocks)
    assert iteration is not None
    assert iteration.period == events
    assert round(history.peak_bytes / MIB, 2) == peak
    assert round(iteration.staying_bytes / MIB, 2) == stays


def test_dtr() -> None:
    history = parse_dtr(dtr())
    rows = history.blocks.tolist()
    assert rows == [
        (4096, 0, -1, -1, -1),  # w, from before the annotation START
        (1000, 3, 11, 0, 2),  # y, whose last name is z
        (1000, 9, 12, 2, 2),  # v after its mutation
    ]
    assert [history.names[i] for i in history.ops["name"]] == [
        "aten::mm",
        "aten::view",
        "aten::add_",
    ]
    assert history.ops["seconds"].tolist() == pytest.approx([2e-6, 1e-8, 3e-8])
    assert history.uses[["block", "op"]].tolist() == [(0, 0), (1, 1), (1, 2), (0, 2)]
    assert history.name_of(2) == "aten::add_"
    assert history.notes == ()


def test_dtr_copies_and_unknown_names() -> None:
    lines: list[dict[str, Any]] = [
        call("f", ["a"], ["nowhere"], 1),
        {"INSTRUCTION": "MEMORY", "NAME": "a", "MEMORY": 8},
        {"INSTRUCTION": "ALIAS", "NAME": "a", "ALIAS": -1},
        call("g", ["b"], ["a"], 1),
        {"INSTRUCTION": "MEMORY", "NAME": "b", "MEMORY": 16.0},
        {"INSTRUCTION": "ALIAS", "NAME": "b", "ALIAS": -1},
        {"INSTRUCTION": "COPY_FROM", "DST": "a", "SRC": "b"},  # the first a goes
        {"INSTRUCTION": "RELEASE", "NAME": "b"},  # a holds it still
        {"INSTRUCTION": "RELEASE", "NAME": "b"},
        {"INSTRUCTION": "RELEASE", "NAME": "a"},
    ]
    history = parse_dtr("\n".join(map(json.dumps, lines)))
    assert history.blocks[["bytes", "start", "stop"]].tolist() == [
        (8, 3, 7),
        (16, 6, 10),
    ]
    assert history.notes == ("2 names come from nowhere, e.g. b",)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it has no lines"),
        ("Malloc 0x1 5", "its line 1 reads 'Malloc 0x1 5'"),
        ("Malloc 0x1 -5 0", "its line 1 reads"),
        ("Malloc 0x1 5 0\nMalloc 0x2 x 0", "its line 2 reads"),
        (f"Malloc 0x1 {1 << 51} 0", "its line 1 reads"),
        (f"Malloc 0x1 {'9' * 5000} 0", "its line 1 reads"),
        (f"Malloc 0x1 1 {'9' * 400}", "its line 1 reads"),
        ("Alloc 0x1 5 0", "its line 1 reads"),
        ("7", "its line 1 reads ''"),
        ("\n".join(f"Malloc {i} {1 << 50} 0" for i in range(1025)), "more bytes than"),
    ],
)
def test_autoswap_reasons(text: str, why: str) -> None:
    with pytest.raises(FileError, match=why):
        parse_autoswap(text)


def one(**fields: Any) -> str:
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it has no instructions"),
        ("{", "its line 1 is no JSON"),
        ("[" * 100_000, "its line 1 is no JSON"),
        ("3", "an instruction is no object, in line 1"),
        (one(INSTRUCTION="JUMP"), "an instruction is unknown, in line 1"),
        (one(INSTRUCTION=[]), "an instruction is unknown"),
        (one(INSTRUCTION="RELEASE"), "has no 'NAME'"),
        (one(INSTRUCTION="CALL", NAME="f", ARGS=3, TIME=1), "no list 'ARGS'"),
        (one(INSTRUCTION="CALL", NAME="f", ARGS=[3], TIME=1), "has no name"),
        (one(INSTRUCTION="CALL", NAME="f", ARGS=[], TIME=-1), "-1 is no TIME"),
        (one(INSTRUCTION="MEMORY", NAME="f", MEMORY="x"), "MEMORY is no whole"),
        (one(INSTRUCTION="MEMORY", NAME="f", MEMORY=1 << 52), "is no MEMORY"),
    ],
)
def test_dtr_reasons(text: str, why: str) -> None:
    with pytest.raises(FileError, match=why):
        parse_dtr(text)


bounded = settings(deadline=None, max_examples=150)
words = st.sampled_from(["Malloc", "Free", "Read", "0x1", "0x2", "5", "7", "-1", "x"])


@bounded
@given(st.lists(st.lists(words, max_size=5)))
def test_any_words(lines: list[list[str]]) -> None:
    text = "\n".join(" ".join(line) for line in lines)
    assert refusal(parse_autoswap, text).isprintable()


@bounded
@given(st.text(max_size=100))
def test_any_text(text: str) -> None:
    assert refusal(parse_autoswap, text).isprintable()
    assert refusal(parse_dtr, text).isprintable()


INSTRUCTIONS = {"CALL", "MUTATE", "CONSTANT", "MEMORY", "ALIAS", "COPY", "COPY_FROM"}
INSTRUCTIONS |= {"RELEASE", "ANNOTATE"}
names = st.sampled_from("abc")
numbers = st.integers(-2, 9) | st.sampled_from(["1", "x"])
instructions = st.fixed_dictionaries(
    {
        "INSTRUCTION": st.sampled_from(sorted(INSTRUCTIONS)),
        "NAME": names,
        "ARGS": st.lists(names, max_size=3),
        "MUTATE": st.lists(st.integers(0, 2), max_size=2),
        "TIME": st.integers(0, 9),
        "MEMORY": st.integers(0, 9),
        "ALIAS": st.integers(-1, 2),
        "DST": names,
        "SRC": names,
        "ANNOTATION": st.sampled_from(["START", "BACKWARD"]),
    }
)


def test_an_argument_mutated_twice_by_one_operator_is_renewed_once() -> None:
    text = "\n".join(
        json.dumps(line)
        for line in [
            {"INSTRUCTION": "CONSTANT", "NAME": "a"},
            {"INSTRUCTION": "MEMORY", "NAME": "a", "MEMORY": 8},
            {
                **{"INSTRUCTION": "MUTATE", "NAME": "add_", "TIME": 1},
                **{"ARGS": ["a", "a"], "MUTATE": [0, 0, 1]},
            },
        ]
    )
    history = parse_dtr(text)
    assert len(history.blocks) == 2
    assert (history.starts < history.stops).all()


@bounded
@given(st.lists(instructions, max_size=30))
def test_any_instructions_give_lives_that_make_sense(
    lines: list[dict[str, Any]],
) -> None:
    text = "\n".join(map(json.dumps, lines))
    if refusal(parse_dtr, text):
        return
    history = parse_dtr(text)
    assert (history.starts < history.stops).all()
    assert (history.live_curve >= 0).all()
    assert (history.uses["block"] < len(history.blocks)).all()
    assert (np.diff(history.blocks["start"]) >= 0).all()


@bounded
@given(seed=st.integers(0, 10**9))
def test_mutations(seed: int) -> None:
    for parse, text in ((parse_autoswap, autoswap()), (parse_dtr, dtr())):
        changed = mutate(text.encode(), seed).decode(errors="replace")
        assert refusal(parse, changed).isprintable()
