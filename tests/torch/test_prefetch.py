"""When swapped values are read ahead: where the plan says, or where they always fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lowtide.runtime.iterations import Forecast, Iterations
from lowtide.runtime.pacing import Lead
from lowtide.runtime.steward import Steward
from lowtide.scheduler.director import RULES, Lanes

BUDGET = 100
POSITION = 4
USE = 9


def swapped(nbytes: int, slot: int) -> Any:
    return SimpleNamespace(
        nbytes=nbytes, slot=slot, next_use=USE, reading=None, clean=True
    )


def iterations_with(values: list[Any], reads: list[int], load: int) -> Iterations:
    """Return iterations that are foretold: so much load from here to the use."""
    iterations = Iterations(BUDGET, Lanes(1e9, 1e9), RULES["auto"])
    iterations.slots = values
    iterations.forecast = Forecast(
        trace=None,  # type: ignore[arg-type]
        base=0,
        load=np.full(USE + 2, load, np.int64),
        frontier=None,  # type: ignore[arg-type]
        prefixes=[],
        reads=np.array(reads, np.int32),
    )
    return iterations


def started(values: list[Any], reads: list[int], *, load: int, need: int) -> list[Any]:
    """Return what is read ahead before the operator at POSITION."""
    begun: list[Any] = []
    ledger = SimpleNamespace(
        lead=Lead(), managed=0, arriving=0, start_read=begun.append
    )
    steward = Steward.__new__(Steward)
    vars(steward).update(
        session=SimpleNamespace(recorder=SimpleNamespace(index=POSITION + 1)),
        ledger=ledger,
        scheduler=SimpleNamespace(returns=lambda _: values),
        iterations=iterations_with(values, reads, load),
        counter=SimpleNamespace(live=SimpleNamespace(value=40)),
        budget=BUDGET,
        overrun=False,
        largest_need=50,
        _need=need,
    )
    with torch.no_grad():
        steward._prefetch()
    return begun


@pytest.mark.parametrize("load", [20, 95])
def test_what_is_due_needs_room_at_this_moment_only(load: int) -> None:
    value = swapped(30, 0)
    assert started([value], [POSITION], load=load, need=30) == [value]
    assert started([value], [POSITION - 2], load=load, need=30) == [value]
    assert started([value], [POSITION], load=load, need=31) == []


def test_what_is_not_due_must_fit_all_the_way() -> None:
    value = swapped(30, 0)
    for reads in ([-1], [POSITION + 1]):
        assert started([value], reads, load=70, need=30) == [value]
        assert started([value], reads, load=71, need=30) == []


def test_reads_ahead_share_the_room() -> None:
    first, second = swapped(20, 0), swapped(20, 1)
    reads = [POSITION, POSITION]
    assert started([first, second], reads, load=95, need=20) == [first, second]
    assert started([first, second], reads, load=95, need=21) == [first]


def test_a_read_that_was_given_up_is_planned_for_later() -> None:
    value = swapped(30, 0)
    iterations = iterations_with([value], [POSITION], 0)
    assert iterations.due(value) == POSITION
    iterations.postpone(value, POSITION)
    assert iterations.due(value) == POSITION + 1


def test_only_what_a_plan_reads_back_is_due() -> None:
    value, other = swapped(30, 0), swapped(30, 0)
    iterations = iterations_with([value], [-1], 0)
    iterations.postpone(value, POSITION)
    assert iterations.due(value) == -1
    assert iterations.due(other) == -1  # of an earlier iteration, the same slot
    iterations.forecast = None
    assert iterations.due(value) == -1
