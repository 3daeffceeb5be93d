# SPDX-License-Identifier: Apache-2.0
"""Victims are the right ones, and found without looking at all the others."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.scheduler.director import Lanes
from lowtide.scheduler.lineage import seconds_around
from lowtide.scheduler.policies import POLICIES
from lowtide.scheduler.tournament import Tournament
from lowtide.simulator.networks import make_chain
from lowtide.simulator.simulator import simulate
from tests.pure.candidates import CLOSED, scheduler_of
from tests.pure.test_policies import Act, Step, come_back, leave

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "leave", "change", "wait"]), st.integers(0, 999)
    ),
    max_size=60,
)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(events=EVENTS)
def test_a_tournament_knows_the_largest_line(
    events: list[tuple[str, int]],
) -> None:
    tournament = Tournament()
    lines: dict[int, tuple[float, float]] = {}
    now = 0.0
    for event, n in events:
        line = (float(n % 31 - 15), float(n % 7))
        if event == "wait":
            now += n / 100
        elif event == "enter":
            lines[tournament.enter(*line, now)] = line
        elif lines:
            slot = sorted(lines)[n % len(lines)]
            if event == "leave":
                tournament.leave(slot, now)
                del lines[slot]
            else:
                tournament.change(slot, *line, now)
                lines[slot] = line
        best = tournament.best(now)
        if not lines:
            assert best == -1
            continue
        heights = {slot: base + slope * now for slot, (base, slope) in lines.items()}
        assert heights[best] == pytest.approx(max(heights.values()), abs=1e-9)


def test_winners_are_kept_until_they_can_be_beaten() -> None:
    """Time passes in 10,000 questions; a thousand lines cross now and then."""
    generator = random.Random(1)
    tournament = Tournament()
    for _ in range(1000):
        tournament.enter(-generator.random(), generator.random(), 0.0)
    tournament.matches = 0
    for tick in range(10_000):
        tournament.best(tick / 1000)
    assert tournament.matches < 10_000  # one a question; a scan takes a thousand


@dataclass(eq=False)
class World:
    """Values of a random network, and what brute force would choose."""

    policy: str
    acts: list[Act] = field(default_factory=list)
    since: dict[int, float] = field(default_factory=dict)

    def best_scores(self, scheduler) -> dict[str, float]:
        """Score every candidate afresh; the least is the victim."""
        scores: dict[str, float] = {}
        policy = POLICIES[self.policy]
        for act in self.acts:
            if not act.here:
                continue
            node = scheduler.ranked.lineage.find(act)
            cost = {
                "": 1.0,
                "head": act.op.seconds,
                "components": act.op.seconds + seconds_around(node),
                "ancestors": act.replay_seconds(),
                "cheaper way": act.op.seconds,
            }[policy.cost]
            score = max(cost, 1e-9) / (act.nbytes if policy.sized else 1)
            stale = max(scheduler.now - self.since[id(act)], 1e-12)
            scores[act.name] = score / (stale if policy.ageing else 1)
        return scores


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(
    policy=st.sampled_from(sorted(set(POLICIES) - {"delta-knapsack"})),
    seed=st.integers(0, 10_000),
)
def test_the_victim_is_the_one_that_a_scan_would_find(policy: str, seed: int) -> None:
    """Through evictions, returns and accesses, with weights found out lazily."""
    generator = random.Random(seed)
    scheduler = scheduler_of(policy, CLOSED)
    world = World(policy)
    for i in range(generator.randint(2, 14)):
        parents = generator.sample(world.acts, min(len(world.acts), 2))
        act = Act(str(i), nbytes=generator.randint(50, 99))
        act.op = Step(generator.randint(1, 9), parents)
        world.acts.append(act)
        world.since[id(act)] = scheduler.now
        scheduler.saved(act, None)
        scheduler.now += 1.0
    for _ in range(30):
        scheduler.now += generator.random()
        act = generator.choice(world.acts)
        if act.here:
            world.since[id(act)] = scheduler.now
            scheduler.touched(act)
            scheduler.now += 1.0
            for _, victim in scheduler.victims():
                scores = world.best_scores(scheduler)
                assert scores[victim.name] == pytest.approx(min(scores.values()))
                leave(scheduler, victim)
                break
        else:
            world.since[id(act)] = scheduler.now
            come_back(scheduler, act)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lanes", [CLOSED, Lanes(12e9, 12e9)], ids=["closed", "open"])
def test_weighings_per_victim_do_not_grow_with_the_network(
    policy: str, lanes: Lanes
) -> None:
    rates = []
    for length in (64, 512):
        graph = make_chain(length)
        outcome = simulate(graph, policy, graph.plain_peak_bytes // 2, lanes)
        assert outcome.failed_at < 0  # `size` thrashes, as it does for its authors
        entered = length + outcome.replayed_operators
        rates.append(max(0, outcome.evaluations - entered) / outcome.victims)
    assert rates[1] <= rates[0] + 2
    assert rates[1] < 8
