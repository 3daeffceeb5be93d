# SPDX-License-Identifier: Apache-2.0
"""The simulator: small iterations computed by hand, and its own bookkeeping."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import LowtideError
from lowtide.scheduler.director import KEEP, RECOMPUTE, RULES, SWAP, Lanes
from lowtide.scheduler.scheduler import WAIT, Scheduler
from lowtide.simulator.buffers import Buffer, Clock, build
from lowtide.simulator.forecast import forecast
from lowtide.simulator.machine import Machine
from lowtide.simulator.networks import NETWORKS, make_chain
from lowtide.simulator.simulator import Outcome, simulate
from lowtide.trace import Graph, load_graph, save_graph
from tests.pure.graphs import chain_of, graphs

CLOSED = Lanes(0.0, 0.0)
MIB = 1 << 20
KIB64 = 64 << 10  # movable for every policy
OPEN = Lanes(KIB64 / 0.5, KIB64 / 0.5)  # a value of the chains takes half a second


class Rows:
    """A plan made by hand."""

    def __init__(self, codes: list[int], reads: list[int]) -> None:
        self.codes = np.array(codes, np.int8)
        self.reads = np.array(reads, np.int32)


# A chain of four: v1 = f(v0), ... v4 = f(v3), loss = f(v4). Each saves its input, so
# v1..v4 are saved; v0 is the batch. Operators 0..4 forward, 5 makes the first gradient,
# 6..9 read v4..v1, one second each. Plain, all four are live at operator 5.
CHAIN = chain_of([KIB64] * 4)


def test_a_chain_is_what_it_should_be() -> None:
    assert len(CHAIN.operators) == 10
    assert CHAIN.seconds == 10.0
    assert CHAIN.versions["held"][1:5].tolist() == [2, 3, 4, 5]
    assert CHAIN.versions["first_use"][1:5].tolist() == [9, 8, 7, 6]
    assert CHAIN.versions["dead"][1:5].tolist() == [10, 9, 8, 7]
    # at operator 6: v1..v4 and the gradient made, the batch and the first gradient
    assert CHAIN.plain_peak_bytes == 5 * KIB64 + 1 + 4


def actions(outcome: Outcome) -> list[tuple[int, str, int]]:
    return list(outcome.actions)


@pytest.mark.parametrize("policy", RULES)
def test_what_fits_is_left_alone(policy: str) -> None:
    outcome = simulate(CHAIN, policy, CHAIN.plain_peak_bytes, OPEN)
    assert outcome.fits
    assert outcome.peak_bytes == CHAIN.plain_peak_bytes
    if not RULES[policy].swap or policy == "delta":  # others copy ahead of pressure
        assert outcome.written_bytes == 0
    assert outcome.slowdown == 1.0
    assert outcome.actions == ()


def test_one_value_too_many_is_dropped_and_computed_again() -> None:
    outcome = simulate(CHAIN, "lru", CHAIN.plain_peak_bytes - KIB64, CLOSED)
    assert outcome.fits
    # Room is wanted first by operator 6, and v1 has not been read for longest.
    assert actions(outcome) == [(6, "drop", 1)]
    # Before operator 9 it is computed again, from the batch.
    assert outcome.replayed_operators == 1
    assert outcome.seconds == 11.0


def test_a_replay_brings_back_what_else_is_missing_on_its_way() -> None:
    outcome = simulate(CHAIN, "lru", CHAIN.plain_peak_bytes - 2 * KIB64, CLOSED)
    assert outcome.fits
    # v1 has to leave for v4, v2 for the gradient. v2, wanted at 8, is computed from
    # v1, which comes back as well; it is in the way of the gradient and leaves again.
    assert actions(outcome) == [(3, "drop", 1), (6, "drop", 2), (8, "drop", 1)]
    assert outcome.replayed_operators == 3
    assert outcome.seconds == 13.0


def test_a_copy_out_is_exposed_where_the_room_is_wanted_at_once() -> None:
    budget = CHAIN.plain_peak_bytes - KIB64
    outcome = simulate(CHAIN, "delta", budget, OPEN)
    assert outcome.fits
    # A round trip takes a second, as does the operator: not longer, so it is copied.
    assert actions(outcome) == [(6, "write", 1)]
    assert outcome.written_bytes == outcome.read_bytes == KIB64
    # Half a second of waiting at operator 6; the copy in hides behind operator 8.
    assert outcome.exposed_seconds == 0.5
    assert outcome.seconds == 10.5


def test_copies_that_take_longer_than_the_operator_are_not_made() -> None:
    slow = Lanes(KIB64 / 0.6, KIB64 / 0.5)
    outcome = simulate(CHAIN, "delta", CHAIN.plain_peak_bytes - KIB64, slow)
    assert actions(outcome) == [(6, "drop", 1)]
    assert outcome.written_bytes == 0


def test_copies_ahead_of_pressure_hide() -> None:
    budget = CHAIN.plain_peak_bytes - KIB64
    outcome = simulate(CHAIN, "delta-knapsack", budget, OPEN)
    assert outcome.fits
    assert outcome.exposed_seconds == 0.0
    assert outcome.seconds == 10.0
    assert [action for _, action, _ in outcome.actions] == ["release"]


def test_a_plan_is_followed() -> None:
    budget = CHAIN.plain_peak_bytes - KIB64
    plan = Rows([KEEP, RECOMPUTE, KEEP, KEEP], [-1, -1, -1, -1])  # of v1..v4
    outcome = simulate(CHAIN, "auto", budget, OPEN, plan=plan)
    assert actions(outcome) == [(6, "drop", 2)]
    assert outcome.seconds == 11.0


@pytest.mark.parametrize(("due", "exposed"), [(8, 0.0), (9, 0.5)])
def test_a_plan_says_where_copies_come_back(due: int, exposed: float) -> None:
    """Operator 9 reads v1, whose copy in takes half a second, one operator a second."""
    budget = CHAIN.plain_peak_bytes - KIB64
    plan = Rows([SWAP, KEEP, KEEP, KEEP], [due, -1, -1, -1])
    outcome = simulate(CHAIN, "auto", budget, OPEN, plan=plan)
    assert actions(outcome) == [(6, "release", 1)]
    assert outcome.exposed_seconds == exposed


def test_too_small_a_budget_says_which_operator() -> None:
    outcome = simulate(CHAIN, "dtr", 2 * KIB64, CLOSED)
    assert not outcome.fits
    assert outcome.failed_at >= 0


def test_copies_share_their_lane() -> None:
    clock = Clock()
    _, buffers = build(CHAIN, clock)
    scheduler: Scheduler[Buffer] = Scheduler(RULES["auto"], OPEN, force=False, seed=0)
    machine = Machine(1 << 30, OPEN, scheduler, buffers, clock)
    machine.position = 5
    for value in buffers[1:4]:
        value.alive = value.resident = True
        machine.adopt(value, KEEP)
        assert machine.start_write(value)
    assert [value.copied for value in buffers[1:4]] == [0.5, 1.0, 1.5]
    clock.now = 1.0
    machine.land()
    assert [value.clean for value in buffers[1:4]] == [True, True, False]
    assert machine.perform(WAIT, buffers[3])  # half a second more
    assert machine.tally.exposed == 0.5


def test_in_place_operators_take_over_the_bytes() -> None:
    resnet = NETWORKS["resnet"]()
    assert (resnet.versions["reuses"] >= 0).any()
    outcome = simulate(resnet, "auto", resnet.plain_peak_bytes, CLOSED)
    assert outcome.peak_bytes == resnet.plain_peak_bytes


@pytest.mark.parametrize("network", NETWORKS)
def test_networks_hold_together(network: str) -> None:
    graph = NETWORKS[network]()
    trace = forecast(graph)
    assert trace.plain_peak_bytes == graph.plain_peak_bytes
    assert trace.values["replayable"].all()
    assert (trace.values["first_use"] > trace.values["saved"]).all()
    assert (graph.versions["dead"] > graph.versions["operator"]).all()


def test_the_last_seconds_are_the_sum_of_their_parts() -> None:
    graph = make_chain(32)
    outcome = simulate(graph, "delta", graph.plain_peak_bytes // 2, Lanes(12e9, 12e9))
    parts = outcome.plain_seconds + outcome.replay_seconds + outcome.exposed_seconds
    assert outcome.seconds == pytest.approx(parts)


# Properties.


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    graph=graphs(),
    part=st.floats(0.3, 1.0),
    policy=st.sampled_from(sorted(RULES)),
    lanes=st.sampled_from([CLOSED, Lanes(2e6, 4e6), Lanes(1e9, 1e9)]),
)
def test_nothing_is_lost_and_budgets_hold(
    graph: Graph, part: float, policy: str, lanes: Lanes
) -> None:
    """The simulator raises where an operator would run without its inputs."""
    budget = int(part * graph.plain_peak_bytes)
    outcome = simulate(graph, policy, budget, lanes)
    assert outcome.counted_bytes == outcome.final_bytes
    if outcome.fits:
        assert outcome.peak_bytes <= budget
        stays = graph.versions["dead"] > len(graph.operators)
        assert outcome.final_bytes == graph.versions["bytes"][stays].sum()
        parts = outcome.plain_seconds + outcome.replay_seconds
        assert outcome.seconds == pytest.approx(parts + outcome.exposed_seconds)
    else:
        assert outcome.thrashed or outcome.failed_at >= 0


def test_what_is_slower_than_one_has_patience_for_is_given_up() -> None:
    graph = make_chain(30, mib=8)
    slow = Lanes(1e3, 1e3)
    budget = graph.plain_peak_bytes // 2
    whole = simulate(graph, "swap-only", budget, slow, patience=1e9)
    assert whole.fits
    given_up = simulate(graph, "swap-only", budget, slow, patience=1.5)
    assert given_up.thrashed
    assert not given_up.fits
    assert given_up.seconds < whole.seconds


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(graph=graphs(), policy=st.sampled_from(sorted(RULES)))
def test_a_run_repeats_itself(graph: Graph, policy: str) -> None:
    budget = int(0.6 * graph.plain_peak_bytes)
    first, second = (simulate(graph, policy, budget, OPEN) for _ in range(2))
    assert first.actions == second.actions
    assert first.seconds == second.seconds


# Files.


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(graph=graphs())
def test_graphs_survive_a_file(
    graph: Graph, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("graphs") / "graph.npz"
    save_graph(graph, path)
    again = load_graph(path)
    assert again.names == graph.names
    for name in ("operators", "versions", "reads", "writes", "saves"):
        assert np.array_equal(getattr(again, name), getattr(graph, name))


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.npz"
    np.savez(path, operators=np.zeros(3))
    with pytest.raises(LowtideError, match="lacks the table 'names'"):
        load_graph(path)
    tables = {n: np.zeros(0) for n in ("operators", "versions", "reads", "writes")}
    np.savez(path, names=np.zeros(0, "U1"), saves=np.zeros(0), **tables)
    with pytest.raises(LowtideError, match="columns of 'operators'"):
        load_graph(path)
