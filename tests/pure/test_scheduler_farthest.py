# SPDX-License-Identifier: Apache-2.0
"""The farthest next use is found, whatever has entered, left or changed."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.scheduler.farthest import Farthest
from tests.pure.candidates import Item


def expected(items: list[Item]) -> list[tuple[int, int]]:
    order = sorted(items, key=lambda item: (-item.next_use, item.birth))
    return [(item.next_use, item.birth) for item in order]


def found(farthest: Farthest[Item]) -> list[tuple[int, int]]:
    return [(item.next_use, item.birth) for item in farthest]


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10_000))
def test_order_is_that_of_a_sort(seed: int) -> None:
    generator = random.Random(seed)
    farthest: Farthest[Item] = Farthest()
    items: list[Item] = []
    for birth in range(generator.randint(1, 30)):
        item = Item(birth=birth, next_use=generator.choice([-1, *range(50)]))
        items.append(item)
        farthest.add(item)
        if generator.random() < 0.3:
            gone = items.pop(generator.randrange(len(items)))
            farthest.remove(gone)
        if generator.random() < 0.2:  # asked, and not to the end
            next(iter(farthest), None)
        assert found(farthest) == expected(items)
    assert found(farthest) == expected(items)


def test_a_new_forecast_changes_every_next_use() -> None:
    farthest: Farthest[Item] = Farthest()
    items = [Item(birth=birth, next_use=-1) for birth in range(9)]
    for item in items:
        farthest.add(item)
    for item in items:
        item.next_use = 40 - item.birth**2 % 7
    items.append(Item(birth=9, next_use=3))
    farthest.add(items[-1])  # as at the next saved value
    assert found(farthest) == expected(items)


def test_victims_that_leave_on_the_way_are_not_kept() -> None:
    farthest: Farthest[Item] = Farthest()
    items = [Item(birth=birth, next_use=birth) for birth in range(5)]
    for item in items:
        farthest.add(item)
    for item in farthest:
        if item.birth % 2 == 0:
            farthest.remove(item)
    assert found(farthest) == [(3, 3), (1, 1)]
