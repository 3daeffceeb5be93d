# SPDX-License-Identifier: Apache-2.0
"""Recorded iterations: what they contain, and that recording changes nothing."""

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import LowtideError
from lowtide.recorder.graph import record
from lowtide.recorder.workspace import workspace_of
from lowtide.runtime import allocator
from lowtide.scheduler.director import Lanes
from lowtide.simulator.forecast import forecast, managed_versions
from lowtide.simulator.networks import DEVICE, on_device
from lowtide.simulator.simulator import simulate
from lowtide.trace import Graph


class Tower(nn.Module):
    """A few layers of each kind, with an in-place operator and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.relu(self.norm(self.first(x)), inplace=True)
        x = nn.functional.dropout(x + x.tanh(), 0.5)
        return self.last(x.mean((2, 3)))


def training(seed: int = 0):
    """Return a model and a function that trains it one step."""
    torch.manual_seed(seed)
    model = Tower()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 3, 16, 16)).square().mean().backward()
        optimizer.step()

    return model, step


@pytest.fixture(scope="module")
def graph() -> Graph:
    return record(training()[1])


def rows_named(graph: Graph, name: str) -> np.ndarray:
    return np.flatnonzero(graph.operators["name"] == graph.names.index(name))


def test_operators_are_there_in_order(graph: Graph) -> None:
    assert len(rows_named(graph, "aten::convolution")) == 1
    assert len(rows_named(graph, "aten::convolution_backward")) == 1
    forward = rows_named(graph, "aten::convolution")[0]
    assert forward < rows_named(graph, "aten::convolution_backward")[0]
    assert (graph.operators["seconds"] > 0).all()


def test_work_is_counted(graph: Graph) -> None:
    (forward,) = rows_named(graph, "aten::convolution")
    # 4 pictures of 16 x 16, 8 channels out of 3, 3 x 3 pixels each, two FLOP
    assert graph.operators["flops"][forward] == 2 * 4 * 16 * 16 * 8 * 3 * 9
    elsewhere = on_device(graph)
    assert elsewhere.plain_peak_bytes == graph.plain_peak_bytes
    assert (elsewhere.operators["seconds"] >= DEVICE.launch).all()


def test_what_there_was_before_lasts(graph: Graph) -> None:
    sources = graph.versions["operator"] < 0
    lasting = graph.versions["lasting"]
    # six parameters with two moments and a step each, batch norm's statistics
    assert lasting.sum() >= 6 * 4 + 2
    assert not (lasting & ~sources).any()


def test_saved_values_are_used_after_they_were_saved(graph: Graph) -> None:
    saves = graph.saves
    assert (saves["use"][saves["use"] >= 0] > 0).all()
    used = saves[saves["use"] >= 0]
    assert (used["use"] >= used["saved"]).all()
    backward = rows_named(graph, "aten::convolution_backward")[0]
    assert backward in used["use"]


def test_versions_live_from_their_operator_to_their_last_reader(graph: Graph) -> None:
    made = graph.versions["operator"][graph.reads["version"]]
    assert (made < graph.reads["operator"]).all()
    dead = graph.versions["dead"][graph.reads["version"]]
    assert (dead > graph.reads["operator"]).all()


def test_in_place_operators_take_over_a_storage(graph: Graph) -> None:
    (relu,) = rows_named(graph, "aten::relu_")
    (out,) = graph.writes["version"][graph.writes["operator"] == relu]
    old = graph.versions["reuses"][out]
    assert old >= 0
    assert graph.versions["dead"][old] == relu + 1


def test_random_operators_are_marked(graph: Graph) -> None:
    seeded = {
        graph.names[i] for i in graph.operators["name"][graph.operators["seeded"]]
    }
    assert seeded & {"aten::native_dropout", "aten::bernoulli_"}


def test_recording_changes_nothing() -> None:
    plain, step = training()
    for _ in range(3):
        step()
    watched, step = training()
    record(step, warm=2)
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)


def test_workspace_is_seen_with_a_meter() -> None:
    meter = allocator.install()
    if not meter.sees_workspace:
        pytest.skip("there is no compiler here, so workspace is not counted")
    made = record(training()[1], meter=meter)
    assert (made.operators["need"] > 0).any()
    assert made.plain_peak_bytes >= record(training()[1]).plain_peak_bytes


def test_a_recorded_iteration_can_be_simulated(graph: Graph) -> None:
    assert len(managed_versions(graph)) > 5
    assert forecast(graph).plain_peak_bytes == graph.plain_peak_bytes
    budget = int(0.8 * graph.plain_peak_bytes)
    for policy in ("auto", "dtr", "delta", "msps"):
        outcome = simulate(graph, policy, budget, Lanes(1e9, 1e9))
        assert outcome.counted_bytes == outcome.final_bytes
        assert outcome.fits, policy


def test_repeated_recordings_give_the_least_seconds() -> None:
    once, again = record(training()[1]), record(training()[1], repeat=3)
    assert len(once.operators) == len(again.operators)
    assert (again.operators["seconds"] > 0).all()


def test_recording_inside_a_budget_is_refused() -> None:
    with lowtide.budget("1GiB"), pytest.raises(LowtideError, match="outside"):
        record(training()[1])


@pytest.mark.parametrize("fake", [False, True])
def test_gradients_are_summed_in_place_as_without_a_recording(fake: bool) -> None:
    weight = torch.ones(1 << 14, requires_grad=True)

    def step() -> None:
        weight.grad = None
        x = weight * 2
        (x.tanh() + x.exp() + x.sin()).sum().backward()

    graph = lowtide.record(step, fake=fake)
    sums = set(rows_named(graph, "aten::add").tolist())
    in_place = [
        operator
        for operator, version in graph.writes.tolist()
        if operator in sums and graph.versions["reuses"][version] >= 0
    ]
    assert len(sums) == 4  # two of them forward
    assert len(in_place) == 2


@pytest.mark.parametrize(
    ("pictures", "channels", "sixteens"), [(15, 8, 0), (16, 8, 3), (16, 32, 5)]
)
def test_pointwise_convolutions_of_many_pictures_are_reordered(
    pictures: int, channels: int, sixteens: int
) -> None:
    x, weight = torch.ones(pictures, channels, 2, 2), torch.ones(8, channels, 1, 1)
    result = torch.ones(pictures, 8, 2, 2)
    args = x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = workspace_of("aten::convolution", args, result)
    finally:
        torch.set_num_threads(threads)
    assert found == sixteens * result.nbytes
