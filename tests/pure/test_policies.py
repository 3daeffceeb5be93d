# SPDX-License-Identifier: Apache-2.0
"""The published policies decide as their formulas say: every number by hand."""

from dataclasses import dataclass, field

import pytest

from lowtide.scheduler.director import KEEP, RECOMPUTE, RULES, SWAP, Lanes
from lowtide.scheduler.lineage import Lineage, seconds_around
from lowtide.scheduler.policies import POLICIES, direct, knapsack
from lowtide.scheduler.scheduler import DROP, RELEASE, WAIT, WRITE, Scheduler
from tests.pure.candidates import CLOSED, MIB, OPEN, Item, scheduler_of


@dataclass(eq=False)
class Step:
    """An operator: its time and what it reads."""

    seconds: float
    inputs: list["Act"] = field(default_factory=list)


@dataclass(eq=False)
class Act(Item):
    """A value with lineage, and whether it is in memory."""

    op: Step | None = field(default=None, repr=False)
    here: bool = True

    def replay_seconds(self) -> float | None:
        """Sum over itself and its evicted ancestors; all in these tests are chains."""
        if self.op is None:
            return None
        missing = (p.replay_seconds() or 0.0 for p in self.op.inputs if not p.here)
        return self.op.seconds + sum(missing)


def chain(*seconds: float, nbytes: int = MIB) -> list[Act]:
    """Make a chain of values; each but the first is made from the one before."""
    acts: list[Act] = []
    for i, cost in enumerate(seconds):
        act = Act("abcdefgh"[i], nbytes=nbytes, birth=i)
        act.op = Step(cost, acts[-1:])
        acts.append(act)
    return acts


def leave(scheduler: Scheduler[Item], act: Act, *, swapped: bool = False) -> None:
    act.here = False
    scheduler.left(act, swapped=swapped)


def come_back(scheduler: Scheduler[Item], act: Act) -> None:
    act.here = True
    scheduler.returned(act)


def order(scheduler: Scheduler[Item], short: int = 0) -> list[str]:
    """Name the victims in the order in which they are offered."""
    names = [item.name for _, item in scheduler.victims(short)]
    return list(dict.fromkeys(names))


def aged(policy: str, lanes: Lanes = CLOSED) -> Scheduler[Item]:
    """Fill a scheduler with a (1 MiB, 10 s old), b (4 MiB, 2 s), c (2 MiB, 6 s)."""
    scheduler = scheduler_of(policy, lanes)
    for name, mib, cost, at in [("a", 1, 2.0, 0), ("c", 2, 6.0, 4), ("b", 4, 1.0, 8)]:
        scheduler.now = at
        scheduler.saved(Act(name, nbytes=mib * MIB, op=Step(cost)), None)
    scheduler.now = 10.0
    return scheduler


# Scores.


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("lru", "acb"),  # 1/s: staleness 10, 6, 2
        ("size", "bca"),  # 1/m: 4, 2, 1 MiB
        ("delta", "cab"),  # 1/(m s): m s = 12, 10, 8
        ("dtr-local", "bac"),  # c/(m s): 1/8, 2/10, 6/12
        ("dtr", "bac"),  # nothing is evicted: the same
        ("msps", "bac"),  # c/m: 1/4, 2/1, 6/2
    ],
)
def test_order_of_victims(policy: str, expected: str) -> None:
    assert "".join(order(aged(policy))) == expected


def test_time_alone_changes_the_order() -> None:
    scheduler = aged("delta")
    scheduler.now = 8.0  # m s: 8 for a, 8 for c, 0 for b
    assert order(scheduler)[-1] == "b"
    scheduler.now = 12.0  # 12, 16, 16
    assert order(scheduler)[-1] == "a"
    scheduler.now = 100.0  # 100, 192, 368
    assert order(scheduler) == ["b", "c", "a"]
    assert scheduler.ranked is not None
    assert scheduler.ranked.evaluations == 3  # one each, when it was saved


def test_an_access_makes_a_value_young() -> None:
    scheduler = aged("lru")
    a = next(item for item in scheduler.present.values() if item.name == "a")
    scheduler.touched(a)
    assert order(scheduler) == ["c", "b", "a"]


def test_what_cannot_be_computed_again_is_no_victim_without_lanes() -> None:
    for policy, lanes in [("dtr", OPEN), ("lru", OPEN), ("delta", CLOSED)]:
        scheduler = scheduler_of(policy, lanes)
        scheduler.saved(Act("source"), None)
        scheduler.now = 1.0
        assert order(scheduler) == []


# DTR's union-find.


def test_components_sum_and_stay_joined() -> None:
    a, b, c, d, e = chain(1.0, 2.0, 4.0, 8.0, 16.0)
    lineage = Lineage()
    nodes = {act.name: lineage.enter(act) for act in (a, b, c, d, e)}

    def around() -> dict[str, float]:
        return {
            name: seconds_around(node)
            for name, node in nodes.items()
            if node.component is None
        }

    lineage.evict(nodes["b"])
    assert around() == {"a": 2.0, "c": 2.0, "d": 0.0, "e": 0.0}
    lineage.evict(nodes["d"])
    assert around() == {"a": 2.0, "c": 10.0, "e": 8.0}  # two components beside c
    lineage.evict(nodes["c"])
    assert around() == {"a": 14.0, "e": 14.0}  # it joins them: 2 + 4 + 8
    lineage.restore(nodes["c"])
    # Its own 4 are subtracted, but b and d stay joined: phantom connections. From a
    # only b is missing (2), yet d counts too; beside c they are one component.
    assert around() == {"a": 10.0, "c": 10.0, "e": 10.0}
    lineage.restore(nodes["b"])
    assert around() == {"a": 0.0, "b": 0.0, "c": 8.0, "e": 8.0}


def test_outputs_of_one_operator_count_once() -> None:
    step = Step(5.0)
    one, two = Act("one", op=step), Act("two", op=step)
    child = Act("child", op=Step(1.0, [one, two]))
    lineage = Lineage()
    node = lineage.enter(child)  # nobody saved its parents: they are evicted
    assert seconds_around(node) == 5.0


def test_dtr_prefers_what_has_no_evicted_neighbours() -> None:
    scheduler = scheduler_of("dtr", CLOSED)
    acts = chain(4.0, 5.0, 6.0, 7.0)
    for act in acts:
        scheduler.saved(act, None)
    scheduler.now = 1.0
    assert order(scheduler) == ["a", "b", "c", "d"]
    leave(scheduler, acts[0])
    # b: 5 + 4 evicted beside it = 9, against 6 and 7
    assert order(scheduler) == ["c", "d", "b"]
    leave(scheduler, acts[2])
    # b: 5 + 4 + 6 = 15, d: 7 + 6 = 13
    assert order(scheduler) == ["d", "b"]
    come_back(scheduler, acts[0])
    scheduler.now = 2.0
    # a: 4 in 1 s, b: 5 + 6 in 2 s, d: 7 + 6 in 2 s
    assert order(scheduler) == ["a", "b", "d"]


def test_swapped_values_join_no_component() -> None:
    scheduler = scheduler_of("delta", OPEN)
    acts = chain(1.0, 1.0)
    for act in acts:
        scheduler.saved(act, None)
    leave(scheduler, acts[0], swapped=True)
    assert scheduler.ranked is not None
    node = scheduler.ranked.lineage.find(acts[1])
    assert node is not None
    assert seconds_around(node) == 0.0


def test_lineage_is_forgotten_with_the_iteration() -> None:
    scheduler = scheduler_of("dtr", CLOSED)
    acts = chain(1.0, 1.0)
    for act in acts:
        scheduler.saved(act, None)
    leave(scheduler, acts[0])
    for act in acts:
        scheduler.gone(act)
    assert scheduler.ranked is not None
    assert len(scheduler.ranked.lineage) == 0
    assert order(scheduler) == []


# Capuchin's measure.


def test_msps_counts_evicted_ancestors() -> None:
    scheduler = scheduler_of("msps", CLOSED)
    acts = chain(2.0, 3.0, 4.0)
    for act in acts:
        scheduler.saved(act, None)
    assert order(scheduler) == ["a", "b", "c"]
    leave(scheduler, acts[0])  # b now costs 3 + 2
    assert order(scheduler) == ["c", "b"]
    leave(scheduler, acts[1])  # c: 4 + 3 + 2
    come_back(scheduler, acts[0])  # c: 4 + 3, against 2
    assert order(scheduler) == ["a", "c"]


# DELTA's director.


@pytest.mark.parametrize(
    ("seconds", "choice"),
    [
        (0.15, RECOMPUTE),  # 8 MiB out and back at 100 MiB/s: 0.16 s; 0.16/0.15 > 1
        (0.16, SWAP),  # the ratio is 1, not above
        (0.17, SWAP),
        (None, SWAP),
    ],
)
def test_directors_ratio(seconds: float | None, choice: int) -> None:
    assert direct(8 * MIB, seconds, OPEN) == choice


def test_director_measures_each_way() -> None:
    lanes = Lanes(100.0 * MIB, 50.0 * MIB)  # 0.08 s out, 0.16 s back
    assert direct(8 * MIB, 0.23, lanes) == RECOMPUTE
    assert direct(8 * MIB, 0.25, lanes) == SWAP


def test_delta_looks_at_the_head_operator_alone() -> None:
    """Its filter and its director see no chain: as published."""
    scheduler = scheduler_of("delta", OPEN)
    acts = chain(9.0, 9.0, 0.1, nbytes=8 * MIB)
    for act in acts:
        scheduler.saved(act, None)
    leave(scheduler, acts[0])
    leave(scheduler, acts[1])
    scheduler.now = 1.0
    assert next(iter(scheduler.victims())) == (DROP, acts[2])  # though it costs 18.1


@pytest.mark.parametrize(
    ("state", "action"),
    [("plain", WRITE), ("writing", WAIT), ("clean", RELEASE)],
)
def test_a_copy_is_made_once(state: str, action: str) -> None:
    scheduler = scheduler_of("delta", OPEN)
    act = Act(op=Step(10.0))
    scheduler.saved(act, None)
    act.clean, act.writing = state == "clean", state == "writing"
    scheduler.now = 1.0
    assert next(iter(scheduler.victims())) == (action, act)


def test_small_values_are_left_alone_by_delta() -> None:
    scheduler = scheduler_of("delta", CLOSED)
    for name, nbytes in [("large", 8 * MIB), ("small", 1024), ("fair", MIB)]:
        scheduler.saved(Act(name, nbytes=nbytes, op=Step(1.0)), None)
    scheduler.now = 1.0
    assert order(scheduler) == ["large", "fair"]  # 1 KiB is under 1 % of the mean


def test_prefetch_is_five_deep_newest_first() -> None:
    scheduler = scheduler_of("delta", OPEN)
    acts = [Act(str(i), op=Step(1.0)) for i in range(7)]
    for act in acts:
        scheduler.saved(act, None)
        leave(scheduler, act, swapped=True)
    assert [item.name for item in scheduler.returns(0)] == ["6", "5", "4", "3", "2"]
    come_back(scheduler, acts[6])
    assert [item.name for item in scheduler.returns(0)] == ["5", "4", "3", "2", "1"]


# The knapsack.


@pytest.mark.parametrize(
    ("sizes", "costs", "short", "chosen"),
    [
        ([5, 4, 3], [10.0, 7.0, 3.0], 7, [2, 1]),  # per byte 2, 1.75, 1: 3 + 4 = 7
        ([6, 3, 8], [9.0, 6.0, 10.0], 7, [2]),  # the best per byte is enough
        ([2, 3, 10], [1.0, 2.0, 9.5], 10, [2]),  # with it the first two are needless
        ([5, 5, 9], [5.0, 5.0, 9.1], 9, [2]),  # one alone for 9.1, not two for 10
        ([2, 2], [1.0, 1.0], 9, [0, 1]),  # all there is
        ([], [], 1, []),
    ],
)
def test_knapsack(
    sizes: list[int], costs: list[float], short: int, chosen: list[int]
) -> None:
    assert knapsack(sizes, costs, short) == chosen


def test_delta_knapsack_packs_for_the_whole_request() -> None:
    scheduler = scheduler_of("delta-knapsack", CLOSED)
    # all of one age: costs 5, 5 and 9.1 s, as in the fourth row above
    for name, mib, cost in [("a", 5, 5.0), ("b", 5, 5.0), ("c", 9, 9.1)]:
        scheduler.saved(Act(name, nbytes=mib * MIB, op=Step(cost)), None)
    scheduler.now = 1.0
    assert order(scheduler, 9 * MIB) == ["c", "b", "a"]
    assert order(scheduler, 10 * MIB) == ["a", "b", "c"]


def test_delta_knapsack_takes_the_cheaper_way() -> None:
    scheduler = scheduler_of("delta-knapsack", OPEN)
    cheap = Act("cheap", op=Step(0.1))  # 0.1 s again, 0.16 s by copy
    dear = Act("dear", op=Step(3.0))
    for act in (cheap, dear):
        scheduler.saved(act, None)
    scheduler.now = 1.0
    first = {item.name: action for action, item in reversed([*scheduler.victims()])}
    assert first == {"cheap": DROP, "dear": WRITE}
    # in both directions: the copy out starts ahead of any pressure
    assert list(scheduler.early_writes()) == [dear]


# All of them.


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_can_be_named(policy: str) -> None:
    assert RULES[policy].name == policy
    assert not RULES[policy].planned
    assert RULES[policy].swap == POLICIES[policy].swap


@pytest.mark.parametrize("policy", POLICIES)
def test_plans_are_not_followed(policy: str) -> None:
    scheduler = scheduler_of(policy, CLOSED)
    act = Act(op=Step(1.0))
    scheduler.saved(act, RECOMPUTE)
    assert act.plan == KEEP
    assert list(scheduler.early_writes()) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_refused_victims_are_offered_again_next_time(policy: str) -> None:
    scheduler = aged(policy)
    assert sorted(order(scheduler)) == ["a", "b", "c"]
    assert sorted(order(scheduler)) == ["a", "b", "c"]
    first = next(scheduler.victims())  # and nobody asks for the others
    assert sorted(order(scheduler)) == ["a", "b", "c"]
    assert first[1].name == order(scheduler)[0]


@pytest.mark.parametrize("policy", ["delta", "delta-knapsack"])
def test_delta_does_not_swap_what_a_limit_forbids(policy: str) -> None:
    scheduler = scheduler_of(policy, OPEN)
    (act,) = chain(9.0)  # far more than a round trip: DELTA swaps it
    scheduler.saved(act, None)
    assert next(iter(scheduler.victims(1))) == (WRITE, act)
    scheduler.allows = lambda nbytes: False
    assert list(scheduler.victims(1)) == [(DROP, act)]
