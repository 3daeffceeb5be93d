# SPDX-License-Identifier: Apache-2.0
"""The scheduler's choices and its orders, with candidates made by hand."""

import pytest

from lowtide.scheduler.director import KEEP, RECOMPUTE, SWAP, Lanes
from lowtide.scheduler.scheduler import DROP, RELEASE, WAIT, WRITE, Scheduler
from tests.pure.candidates import CLOSED, OPEN, Item, entries, scheduler_of


def first_moves(scheduler: Scheduler[Item]) -> list[tuple[str, str]]:
    """List the first action offered for each value, in order."""
    moves: dict[str, str] = {}
    for action, item in scheduler.victims():
        moves.setdefault(item.name, action)
    return [(action, name) for name, action in moves.items()]


# Choices at saving.


@pytest.mark.parametrize(
    ("policy", "lanes", "seconds", "plan"),
    [
        ("auto", OPEN, 1e-4, RECOMPUTE),
        ("auto", OPEN, 10.0, SWAP),
        ("auto", OPEN, None, SWAP),
        ("auto", CLOSED, None, KEEP),
        ("swap-only", OPEN, 0.0, SWAP),
        ("recompute-only", OPEN, 10.0, RECOMPUTE),
        ("recompute-only", OPEN, None, KEEP),
        ("keep", OPEN, 0.0, KEEP),
    ],
)
def test_without_a_trace_each_value_is_judged_alone(
    policy: str, lanes: Lanes, seconds: float | None, plan: int
) -> None:
    scheduler = scheduler_of(policy, lanes)
    item = Item(seconds=seconds)
    scheduler.saved(item, None)
    assert item.plan == plan
    expected = {KEEP: set(), SWAP: {"to_write"}, RECOMPUTE: {"to_drop"}}[plan]
    assert entries(scheduler, item) == {"present"} | expected


@pytest.mark.parametrize("plan", [KEEP, SWAP, RECOMPUTE])
def test_a_plan_from_a_trace_is_followed(plan: int) -> None:
    scheduler = scheduler_of()
    item = Item(seconds=1e-4)
    scheduler.saved(item, plan)
    assert item.plan == plan


@pytest.mark.parametrize(
    ("policy", "lanes", "seconds", "action"),
    [
        ("swap-only", OPEN, 0.0, WRITE),
        ("swap-only", OPEN, None, WRITE),
        ("recompute-only", OPEN, 10.0, DROP),
        ("recompute-only", OPEN, None, None),
        ("keep", OPEN, 0.0, None),
    ],
)
def test_forced_regimes_move_even_what_is_small(
    policy: str, lanes: Lanes, seconds: float | None, action: str | None
) -> None:
    scheduler = scheduler_of(policy, lanes, force=True)
    item = Item(nbytes=4, seconds=seconds)
    scheduler.saved(item, None)
    expected = [] if action is None else [(action, item)]
    assert list(scheduler.forced()) == expected


def test_forced_swaps_with_a_finished_copy_are_released() -> None:
    scheduler = scheduler_of("swap-only", force=True)
    item = Item(clean=True)
    scheduler.saved(item, None)
    assert list(scheduler.forced()) == [(RELEASE, item)]


# Victims.


def test_victims_clean_first_then_drops_then_waits_then_farthest() -> None:
    scheduler = scheduler_of()
    near = Item("near", next_use=50, seconds=10.0)
    far = Item("far", next_use=90, seconds=10.0)
    cheap = Item("cheap", next_use=70, seconds=1e-4)
    flying = Item("flying", next_use=10)
    drop = Item("drop", next_use=20, seconds=1.0)
    clean = Item("clean", next_use=5)
    for item in (near, far, cheap):
        scheduler.saved(item, KEEP)
    scheduler.saved(flying, SWAP)
    scheduler.saved(drop, RECOMPUTE)
    scheduler.saved(clean, SWAP)
    for item in (flying, clean):
        scheduler.write_started(item)
    flying.writing = True
    clean.clean = True
    scheduler.copied(clean)
    assert first_moves(scheduler) == [
        (RELEASE, "clean"),
        (DROP, "drop"),
        (WAIT, "flying"),
        (WRITE, "far"),
        (DROP, "cheap"),
        (WRITE, "near"),
    ]


def test_while_uses_are_unknown_the_oldest_is_the_farthest() -> None:
    scheduler = scheduler_of("swap-only")
    for birth in (3, 1, 2):
        scheduler.saved(Item(f"born {birth}", birth=birth), KEEP)
    assert first_moves(scheduler) == [
        (WRITE, "born 1"),
        (WRITE, "born 2"),
        (WRITE, "born 3"),
    ]


def test_a_refused_way_out_is_followed_by_the_other() -> None:
    scheduler = scheduler_of()
    dear, cheap = Item("dear", seconds=10.0, next_use=9), Item("cheap", seconds=1e-4)
    scheduler.saved(dear, KEEP)
    scheduler.saved(cheap, KEEP)
    assert list(scheduler.victims()) == [
        (WRITE, dear),
        (DROP, dear),
        (DROP, cheap),
        (WRITE, cheap),
    ]


@pytest.mark.parametrize(
    ("policy", "lanes", "actions"),
    [
        ("keep", OPEN, set()),
        ("swap-only", OPEN, {WRITE}),
        ("swap-only", CLOSED, set()),
        ("recompute-only", OPEN, {DROP}),
        ("auto", CLOSED, {DROP}),
    ],
)
def test_policies_hold_under_pressure(
    policy: str, lanes: Lanes, actions: set[str]
) -> None:
    scheduler = scheduler_of(policy, lanes)
    for seconds in (1e-4, 10.0):
        scheduler.saved(Item(seconds=seconds), KEEP)
    assert {action for action, _ in scheduler.victims()} == actions


def test_a_runtime_that_performs_everything_empties_memory() -> None:
    scheduler = scheduler_of()
    for i in range(12):
        item = Item(f"{i}", birth=i, seconds=[None, 1e-4, 10.0][i % 3])
        scheduler.saved(item, [None, KEEP, SWAP, RECOMPUTE][i % 4])
    left: list[Item] = []
    for action, item in scheduler.victims():
        if item in left:
            continue  # refused: it is not in memory
        if action == DROP and item.seconds is None:
            continue  # refused: it cannot be computed again
        item.clean = action != DROP
        scheduler.left(item, swapped=action != DROP)
        left.append(item)
    assert len(left) == 12
    assert not scheduler.present
    assert list(scheduler.victims()) == []
    assert list(scheduler.early_writes()) == []
    assert list(scheduler.absent.values()) == [item for item in left if item.clean]


# Writes and returns.


def test_planned_swaps_are_written_early_oldest_first() -> None:
    scheduler = scheduler_of()
    items = [Item(f"{i}") for i in range(4)]
    for item, plan in zip(items, [SWAP, KEEP, SWAP, SWAP], strict=True):
        scheduler.saved(item, plan)
    assert list(scheduler.early_writes()) == [items[0], items[2], items[3]]
    scheduler.write_started(items[0])
    scheduler.gone(items[2])
    assert list(scheduler.early_writes()) == [items[3]]


def test_writes_may_start_while_they_are_listed() -> None:
    scheduler = scheduler_of()
    for _ in range(3):
        scheduler.saved(Item(), SWAP)
    for item in scheduler.early_writes():
        scheduler.write_started(item)
    assert list(scheduler.early_writes()) == []


def swapped_out(scheduler: Scheduler[Item], *items: Item) -> None:
    for item in items:
        scheduler.saved(item, SWAP)
        item.clean = True
        scheduler.left(item, swapped=True)


def test_returns_come_in_the_order_of_their_next_use() -> None:
    scheduler = scheduler_of()
    items = [Item(next_use=use) for use in (30, 10, 40, 20)]
    swapped_out(scheduler, *items)
    assert [item.next_use for item in scheduler.returns(5)] == [10, 20, 30, 40]
    scheduler.returned(items[3])
    assert [item.next_use for item in scheduler.returns(5)] == [10, 30, 40]


def test_a_plan_may_say_where_reading_begins() -> None:
    scheduler = scheduler_of()
    items = [Item(next_use=use) for use in (30, 10, 20)]
    for item, due in zip(items, [25, 8, -1], strict=True):
        scheduler.saved(item, SWAP, due)
        item.clean = True
        scheduler.left(item, swapped=True)
    assert [item.next_use for item in scheduler.returns(7)] == [20]
    assert [item.next_use for item in scheduler.returns(8)] == [10, 20]
    scheduler.gone(items[1])
    assert [item.next_use for item in scheduler.returns(25)] == [20, 30]


def test_what_has_just_come_back_is_not_the_first_to_leave_again() -> None:
    scheduler = scheduler_of()
    soon, later = Item("soon", next_use=6), Item("later", next_use=90, seconds=10.0)
    drop = Item("drop", next_use=50, seconds=1.0)
    swapped_out(scheduler, soon)
    scheduler.returned(soon)  # read ahead; its copy is still there
    scheduler.saved(later, KEEP)
    scheduler.saved(drop, RECOMPUTE)
    assert first_moves(scheduler) == [
        (DROP, "drop"),
        (WRITE, "later"),
        (RELEASE, "soon"),
    ]


def test_while_uses_are_unknown_the_youngest_returns_first() -> None:
    scheduler = scheduler_of()
    swapped_out(scheduler, *(Item(birth=birth) for birth in (1, 3, 2)))
    assert [item.birth for item in scheduler.returns(9)] == [3, 2, 1]


def test_dropped_values_are_not_read_back() -> None:
    scheduler = scheduler_of()
    item = Item(seconds=1.0)
    scheduler.saved(item, RECOMPUTE)
    scheduler.left(item, swapped=False)
    assert scheduler.returns(0) == []
    assert entries(scheduler, item) == set()
    scheduler.returned(item)
    assert entries(scheduler, item) == {"present"}


# The random policy.


def random_decisions(seed: int) -> tuple[list[int], list[tuple[str, str]]]:
    scheduler = scheduler_of("random", force=True, seed=seed)
    items = [Item(f"{i}", birth=i, seconds=1.0) for i in range(40)]
    for item in items:
        scheduler.saved(item, None)
    victims = [(action, item.name) for action, item in scheduler.victims()]
    return [item.plan for item in items], victims


def test_the_random_policy_repeats_itself_for_a_seed() -> None:
    assert random_decisions(7) == random_decisions(7)
    assert random_decisions(7) != random_decisions(8)
    assert set(random_decisions(7)[0]) == {KEEP, SWAP, RECOMPUTE}


# Limits of the tier below.


@pytest.mark.parametrize("policy", ["auto", "swap-only"])
def test_what_may_not_be_written_is_never_offered_to_be(policy: str) -> None:
    scheduler = scheduler_of(policy)
    scheduler.allows = lambda nbytes: False
    item = Item(seconds=10.0)  # a copy would be far cheaper
    scheduler.saved(item, None)
    assert first_moves(scheduler) == ([(DROP, "")] if policy == "auto" else [])
    assert WRITE not in [action for action, _ in scheduler.victims()]
    scheduler.allows = lambda nbytes: True
    assert WRITE in [action for action, _ in scheduler.victims()]


def test_planned_copies_stop_where_a_limit_is_reached() -> None:
    scheduler = scheduler_of()
    items = [Item(nbytes=n << 20) for n in (4, 1, 3)]
    for item in items:
        scheduler.saved(item, SWAP)
    scheduler.allows = lambda nbytes: nbytes <= 3 << 20
    assert list(scheduler.early_writes()) == items[1:]
