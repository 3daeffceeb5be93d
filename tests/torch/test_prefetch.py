"""When swapped values are read ahead: where the plan says, or where they always fit."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lowtide.runtime.iterations import Forecast, Iterations
from lowtide.runtime.ledger import Ledger
from lowtide.runtime.pacing import Lead
from lowtide.runtime.steward import Steward
from lowtide.scheduler.director import RULES, Lanes
from lowtide.trace import OPS, VALUES, Trace

BUDGET = 100
POSITION = 4
USE = 9


def swapped(nbytes: int, slot: int) -> Any:
    return SimpleNamespace(
        nbytes=nbytes, slot=slot, next_use=USE, reading=None, clean=True
    )


def trace(values: list[Any], load: int) -> Trace:
    """Make an iteration whose operators take a hundredth of a second each."""
    ops = np.zeros(USE + 2, OPS)
    ops["seconds"], ops["live"] = 0.01, load
    return Trace(ops, np.zeros(len(values), VALUES), 1)


def iterations_with(values: list[Any], reads: list[int], load: int) -> Iterations:
    """Return iterations that are foretold: so much load from here to the use."""
    iterations = Iterations(BUDGET, Lanes(1e9, 1e9), RULES["auto"])
    iterations.slots = values
    iterations.forecast = Forecast(
        trace=trace(values, load),
        base=0,
        frontier=None,  # type: ignore[arg-type]
        told=[],
        reads=np.array(reads, np.int32),
    )
    return iterations


def started(values: list[Any], reads: list[int], *, load: int, need: int) -> list[Any]:
    """Return what is read ahead before the operator at POSITION."""
    begun: list[Any] = []
    ledger = SimpleNamespace(
        lead=Lead(),
        managed=0,
        arriving=0,
        read_ahead=lambda value: not begun.append(value),
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


def begins(iterations: Iterations, value: Any) -> int:
    """Return the operator before which a steward begins to read a value."""
    return next(at for at in range(USE + 1) if 0 <= iterations.due(value) <= at)


@pytest.mark.parametrize("copy_seconds", [0.004, 0.03, 0.055, 0.2])
def test_a_read_that_comes_late_begins_earlier_until_it_does_not(
    copy_seconds: float,
) -> None:
    value = swapped(30, 0)
    iterations = iterations_with([value], [USE - 1], 0)
    waits = []
    for _ in range(6):  # a throttled lane: every copy takes so long
        waited = copy_seconds - 0.01 * (USE - begins(iterations, value))
        waits.append(waited)
        if waited > 0:
            iterations.hasten(value, waited, begins(iterations, value) < USE)
    on_time = copy_seconds < 0.01 * USE
    late = [waited for waited in waits if waited > 0]
    assert all(after < before for before, after in pairwise(late[:2]))
    assert (waits[-1] <= 0) == on_time
    if waits[0] <= 0:
        assert begins(iterations, value) == USE - 1  # it was in time: it stays
    if not on_time:
        assert begins(iterations, value) == 0


def test_a_read_that_begins_at_its_use_is_moved_ahead_of_it() -> None:
    value = swapped(30, 0)
    iterations = iterations_with([value], [USE], 0)
    iterations.hasten(value, 0.019, False)
    assert begins(iterations, value) == USE - 3
    iterations.hasten(value, 0.019, False)  # it was due, and found no room
    assert begins(iterations, value) == USE - 3
    assert iterations.hastened == 1


def test_a_read_moves_no_earlier_than_where_its_room_was_wanted() -> None:
    value = swapped(30, 0)
    iterations = iterations_with([value], [USE - 1], 0)
    iterations.hasten(value, 0.2, True)
    assert begins(iterations, value) == 0
    iterations.postpone(value, POSITION)
    for _ in range(3):
        iterations.hasten(value, 0.2, True)
        assert begins(iterations, value) == POSITION + 1


def test_a_wait_makes_both_the_lead_and_the_planned_read_earlier() -> None:
    value, hastened = swapped(30, 0), []
    ledger = Ledger.__new__(Ledger)
    ledger.lead = Lead()
    ledger.lead.seconds = 0.1
    ledger.hasten = lambda *late: hastened.append(late)
    ledger.late(value, 1e-6, True)
    assert (ledger.lead.seconds, hastened) == (0.1, [])
    ledger.late(value, 0.05, True)
    assert ledger.lead.seconds == pytest.approx(0.2)
    assert hastened == [(value, 0.05, True)]
