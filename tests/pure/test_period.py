# SPDX-License-Identifier: Apache-2.0
"""Periods of event streams, against a search through all of them."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lowtide.recorder.period import (
    Period,
    Phases,
    find_period,
    least_rotation,
    tokens,
)

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("LOWTIDE_DATA", ROOT.parent / "shared" / "data"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no data in {DATA}")

exhaustive = settings(max_examples=200, deadline=None, derandomize=True, database=None)
few = st.lists(st.integers(0, 2), max_size=40)


def by_search(stream: Sequence[int], rounds: int, least: int) -> Period | None:
    """Try all endings, longest first, with the shortest period that each has."""
    n = len(stream)
    for holds in range(n, 0, -1):
        tail = stream[n - holds :]
        length = next(p for p in range(1, holds + 1) if tail[p:] == tail[: holds - p])
        if length >= least and holds >= rounds * length:
            count = holds // length
            return Period(n - count * length, length, count)
    return None


@exhaustive
@given(few, st.integers(2, 4), st.integers(1, 5))
@example([0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1], 3, 1)
def test_the_period_is_the_one_that_a_search_finds(
    stream: list[int], rounds: int, least: int
) -> None:
    assert find_period(stream, rounds=rounds, least=least) == by_search(
        stream, rounds, least
    )


@exhaustive
@given(few, st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(3, 5))
def test_what_comes_before_the_period_does_no_harm(
    before: list[int], step: list[int], rounds: int
) -> None:
    found = find_period([*before, *step * rounds])
    assert found is not None
    assert found.rounds * found.length >= rounds * len(step)
    stream = [*before, *step * rounds]
    repeated = stream[found.start :]
    assert repeated == repeated[: found.length] * found.rounds


def test_two_rounds_are_too_few() -> None:
    assert find_period([1, 2, 3] * 2) is None
    assert find_period([1, 2, 3] * 3) == Period(0, 3, 3)
    assert find_period([]) is None


def test_a_loop_at_the_end_of_an_iteration_is_not_the_iteration() -> None:
    step = [5, 6, *[7, 8] * 4]
    assert find_period(step * 4) == Period(0, 10, 4)
    assert find_period(step) == Period(2, 2, 4)
    assert find_period(step, least=3) is None


def test_tokens_know_no_addresses() -> None:
    first = [("a", 64), ("b", 32), ("a", 0), ("b", 0), ("a", 0)]
    second = [("x", 64), ("y", 32), ("x", 0), ("y", 0), ("x", 0)]
    assert tokens(first) == tokens(second) == [64, 32, -2, -2, -2]


@exhaustive
@given(st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_the_least_rotation_is_the_least(circle: list[int]) -> None:
    start = least_rotation(circle)
    rotations = [circle[i:] + circle[:i] for i in range(len(circle))]
    assert circle[start:] + circle[:start] == min(rotations)


def test_phases_keep_their_numbers_wherever_they_begin() -> None:
    phases = Phases()
    train, evaluate = [5, 1, 2, 9], [5, 1, 9]
    assert phases.number(train) == 0
    assert phases.number(evaluate) == 1
    assert phases.number(train[2:] + train[:2]) == 0
    assert phases.number([1, 2]) == 2


@needs_data
@pytest.mark.parametrize(
    ("name", "pool", "all_events"), [("alex", 188, 612), ("vgg", 1020, 3172)]
)
def test_the_published_periods_are_found(name: str, pool: int, all_events: int) -> None:
    calls: list[tuple[str, int]] = []
    for line in (DATA / "autoswap" / f"memInfo_{name}.text").read_text().splitlines():
        kind, address, *rest = line.split()
        calls.append((address, int(rest[0]) if kind == "Malloc" else 0))
    middle = calls[: len(calls) * 3 // 4]  # the run ends with what releases all
    found = find_period(tokens(middle), least=50)
    assert found is not None
    assert found.length == pool
    events: list[tuple[str, int]] = []
    path = DATA / "autoswap" / f"vec_run_5_{name}.csv"
    for line in path.read_text().splitlines():
        _, kind, address, nbytes, _ = line.split()
        events.append((address, int(nbytes) if kind == "Malloc" else 0))
    # two equal iterations, then what releases everything
    found = find_period(tokens(events[: len(events) * 7 // 8]), rounds=2, least=300)
    assert found is not None
    assert found.length == all_events
