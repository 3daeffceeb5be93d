# SPDX-License-Identifier: Apache-2.0
"""What an iteration was like foretells the next one that begins the same way."""

import gc
import random
from types import SimpleNamespace

import pytest

from lowtide.recorder.values import Op, Value
from lowtide.runtime.iterations import KNOWN, Forecast, Iterations
from lowtide.scheduler.director import KEEP, RULES, SWAP, Lanes

MIB = 1 << 20
FAST = Lanes(1e12, 1e12)
STATIC = 10 * MIB  # live when an iteration begins
REMEMBERED = KNOWN


def value_of(nbytes: int, name: str = "aten::relu") -> Value:
    """Make a value of an operator without inputs: it could be computed again."""
    value = Value(None, nbytes)
    value.op = Op(None, SimpleNamespace(name=name), (), {})
    value.op.seconds = 1.0
    return value


def iterations_of(budget: int = 1 << 40, policy: str = "swap-only") -> Iterations:
    return Iterations(budget, FAST, RULES[policy])


def shape(*sizes: int) -> list[Value]:
    return [value_of(size) for size in sizes]


def save_all(
    iterations: Iterations, values: list[Value], start: int = STATIC
) -> list[int | None]:
    """Begin an iteration and save values, one before each operator."""
    iterations.begin(start)
    plans = []
    live = start
    for position, value in enumerate(values):
        plans.append(iterations.saved(value, position))
        live += value.nbytes
        iterations.ops.append((1.0, live, 0, live - start, 0))
    return plans


def backward(iterations: Iterations, values: list[Value]) -> Forecast | None:
    """Use the values in reverse, one before each operator, and end the iteration."""
    live = iterations.ops[-1][1]
    for i, value in enumerate(reversed(values)):
        iterations.use(value, len(values) + i)
        managed = sum(value.nbytes for value in values[: len(values) - i])
        iterations.ops.append((1.0, live, 0, managed, 0))
        live -= value.nbytes
    return iterations.finish()


def run(iterations: Iterations, values: list[Value], start: int = STATIC) -> Forecast:
    save_all(iterations, values, start)
    forecast = backward(iterations, values)
    assert forecast is not None
    return forecast


# One shape.


def test_a_first_iteration_is_unknown() -> None:
    iterations = iterations_of()
    values = shape(1, 2, 3)
    assert save_all(iterations, values) == [None, None, None]
    assert [value.next_use for value in values] == [-1, -1, -1]
    assert [value.slot for value in values] == [0, 1, 2]
    assert iterations.forecast is None


def test_an_iteration_is_traced_as_it_was() -> None:
    iterations = iterations_of()
    forecast = run(iterations, shape(MIB, 2 * MIB, 3 * MIB))
    values = forecast.trace.values
    assert values["bytes"].tolist() == [MIB, 2 * MIB, 3 * MIB]
    assert values["saved"].tolist() == [0, 1, 2]
    assert values["first_use"].tolist() == [5, 4, 3]
    assert values["replayable"].all()
    assert values["seconds"].tolist() == [1.0, 1.0, 1.0]
    assert len(forecast.trace.ops) == 6
    assert forecast.trace.seconds == 6.0
    assert forecast.trace.plain_peak_bytes == STATIC + 6 * MIB
    assert forecast.planned_peak == STATIC + 6 * MIB
    assert forecast.load.tolist() == [STATIC] * 6
    assert iterations.last is forecast
    assert iterations.finished == 1


def test_a_source_is_traced_as_not_replayable() -> None:
    iterations = iterations_of(budget=0, policy="recompute-only")
    values = shape(MIB, MIB, MIB)
    values[0].op = None
    forecast = run(iterations, values)
    assert forecast.trace.values["replayable"].tolist() == [False, True, True]
    assert forecast.plan[0] == KEEP


def test_the_same_shape_is_foretold_from_its_first_value() -> None:
    iterations = iterations_of()
    first = run(iterations, shape(1, 2, 3))
    values = shape(1, 2, 3)
    assert save_all(iterations, values[:1]) == [KEEP]
    assert iterations.forecast is first
    assert values[0].next_use == 5
    assert save_all(iterations, values) == [KEEP] * 3
    assert [value.next_use for value in values] == [5, 4, 3]


def test_the_plan_is_handed_out_with_each_value() -> None:
    iterations = iterations_of(budget=STATIC + 4 * MIB)
    forecast = run(iterations, shape(2 * MIB, 2 * MIB, 2 * MIB))
    plans = save_all(iterations, shape(2 * MIB, 2 * MIB, 2 * MIB))
    assert plans == forecast.plan.tolist()
    assert SWAP in plans
    assert forecast.planned_peak <= STATIC + 4 * MIB


def test_sources_get_no_plan_but_their_next_use() -> None:
    iterations = iterations_of()
    for _ in range(2):
        values = shape(1, 2)
        values[0].op = None
        plans = save_all(iterations, values)
        backward(iterations, values)
    assert plans == [None, KEEP]
    assert values[0].next_use == 3


def test_only_the_first_use_counts() -> None:
    iterations = iterations_of()
    values = shape(1, 2)
    save_all(iterations, values)
    iterations.use(values[1], 2)
    iterations.use(values[1], 7)
    forecast = backward(iterations, values)
    assert forecast is not None
    assert forecast.trace.values["first_use"].tolist() == [3, 2]


def test_uses_of_an_earlier_iterations_values_do_not_count() -> None:
    iterations = iterations_of()
    old = shape(1, 2)
    run(iterations, old)
    save_all(iterations, shape(1, 2))
    for value in old:
        iterations.use(value, 2)
    assert iterations.used == 0
    assert iterations.finish() is None


def test_an_iteration_without_backward_is_not_remembered() -> None:
    iterations = iterations_of()
    save_all(iterations, shape(1, 2, 3))
    assert iterations.finish() is None
    assert iterations.finished == 0
    assert save_all(iterations, shape(1, 2, 3)) == [None] * 3


# Several shapes.


def test_a_value_of_another_operator_or_size_is_a_difference() -> None:
    iterations = iterations_of()
    run(iterations, shape(1, 2))
    assert save_all(iterations, [value_of(1), value_of(2, "aten::exp")]) == [KEEP, None]
    assert save_all(iterations, shape(1, 3)) == [KEEP, None]
    assert save_all(iterations, [value_of(1, "aten::exp")]) == [None]


def test_a_difference_from_everything_known_ends_the_foretelling() -> None:
    iterations = iterations_of()
    run(iterations, shape(1, 2, 3))
    values = shape(1, 2, 9, 3)
    assert save_all(iterations, values) == [KEEP, KEEP, None, None]
    assert iterations.forecast is None
    assert [value.next_use for value in values] == [-1] * 4


def test_the_forecast_switches_at_the_first_difference() -> None:
    iterations = iterations_of()
    short = run(iterations, shape(1, 2, 3))
    long = run(iterations, shape(1, 2, 4, 5))
    values = shape(1, 2, 3)
    save_all(iterations, values[:2])
    assert iterations.forecast is long
    assert [value.next_use for value in values[:2]] == [7, 6]
    save_all(iterations, values)
    assert iterations.forecast is short
    assert [value.next_use for value in values] == [5, 4, 3]


def test_an_iteration_longer_than_its_forecast_is_unknown_from_there() -> None:
    iterations = iterations_of()
    run(iterations, shape(1, 2))
    assert save_all(iterations, shape(1, 2, 3)) == [KEEP, KEEP, None]


@pytest.mark.parametrize("repeats", [1, 8])
def test_the_latest_of_two_with_one_beginning_is_foretold(repeats: int) -> None:
    iterations = iterations_of()
    for _ in range(repeats):
        run(iterations, shape(1, 2, 3))
    run(iterations, shape(1, 2, 4, 5))
    latest = run(iterations, shape(1, 2, 3))
    save_all(iterations, shape(1, 2))
    assert iterations.forecast is latest


# Plans follow the live bytes at the start.


def test_a_plan_is_made_for_the_live_bytes_at_the_start() -> None:
    sizes = [2 * MIB] * 4
    iterations = iterations_of(budget=STATIC + 10 * MIB)
    forecast = run(iterations, shape(*sizes))
    assert SWAP not in forecast.plan
    before = forecast.planned_peak
    assert before == STATIC + 8 * MIB
    iterations.plan(forecast, STATIC + 4 * MIB)
    assert SWAP in forecast.plan
    assert forecast.planned_peak <= STATIC + 10 * MIB
    iterations.plan(forecast, STATIC)
    assert SWAP not in forecast.plan
    assert forecast.planned_peak == before


@pytest.mark.parametrize("repeats", [1, 5])
def test_an_iteration_that_starts_with_more_gets_a_plan_for_that(repeats: int) -> None:
    sizes = [2 * MIB] * 4
    iterations = iterations_of(budget=STATIC + 10 * MIB)
    for _ in range(repeats):
        run(iterations, shape(*sizes))
    plans = save_all(iterations, shape(*sizes), start=STATIC + 4 * MIB)
    assert SWAP in plans


# Programs that do something else each time.


def test_where_nothing_repeats_nothing_is_planned_until_something_does() -> None:
    iterations = iterations_of(budget=STATIC + 20 * MIB)
    for n in range(12):
        run(iterations, shape(*[MIB + n] * 24))
    planned = [bool(len(f.plan)) for f in iterations._by_key.values()]
    assert planned == [True] * 4 + [False] * 8
    again = shape(*[MIB + 11] * 24)
    plans = save_all(iterations, again)
    assert plans[:3] == [None] * 3  # too little is the same to tell
    assert [value.next_use for value in again] == list(range(47, 23, -1))
    assert SWAP in plans
    assert None not in plans[3:]


# Memory.


def forecasts_in_memory() -> int:
    gc.collect()
    return sum(type(thing) is Forecast for thing in gc.get_objects())


def known(iterations: Iterations, values: list[Value]) -> bool:
    save_all(iterations, values)
    return iterations.forecast is not None


def test_of_many_shapes_the_latest_are_remembered() -> None:
    before = forecasts_in_memory()
    iterations = iterations_of()
    for n in range(200):
        run(iterations, shape(1000 + n, 7, n))
    assert forecasts_in_memory() - before <= REMEMBERED
    recalled = [n for n in range(200) if known(iterations, shape(1000 + n, 7, n))]
    assert recalled == list(range(200 - REMEMBERED, 200))
    # prefixes of what is forgotten are forgotten too
    begun = [n for n in range(200) if known(iterations, shape(1000 + n))]
    assert begun == recalled


def test_a_shared_beginning_outlives_the_oldest_that_had_it() -> None:
    iterations = iterations_of()
    for n in range(REMEMBERED + 1):
        run(iterations, shape(1, 2, 100 + n))
    assert known(iterations, shape(1, 2))
    assert not known(iterations, shape(1, 2, 100))
    assert known(iterations, shape(1, 2, 100 + REMEMBERED))


def test_a_repeated_shape_takes_one_place() -> None:
    before = forecasts_in_memory()
    iterations = iterations_of()
    for _ in range(200):
        run(iterations, shape(1, 2, 3))
    assert iterations.finished == 200
    assert forecasts_in_memory() - before == 1


def test_of_sixty_four_lengths_nearly_all_are_found_again() -> None:
    iterations = iterations_of()
    draw = random.Random(0)
    repeated = []
    for _ in range(1000):
        length = draw.randrange(64)
        before = iterations.repeated
        run(iterations, shape(1 + length, 2 + length, 3))
        repeated.append(iterations.repeated - before)
    assert iterations.finished == 1000
    assert iterations.repeated == sum(repeated) == 1000 - 64
    assert sum(repeated[200:]) > 0.95 * 800
    assert len(iterations.known) == 64
