# SPDX-License-Identifier: Apache-2.0
"""Demand: no silently wrong gradients.

What users asked for in public threads: each test names its thread, and other tests name
others (tests/pure/test_demand_named.py has the list).
"""

import random
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.recorder import dispatch
from lowtide.runtime.hostlane import HostLane
from lowtide.runtime.session import Session
from tests.torch.regimes import (
    POLICIES,
    assert_same,
    check,
    deep,
    forced,
    moved_bytes,
    run_plain,
    run_under,
    train,
)
from tests.virtual_lane import VirtualDriver, Weather


def leaf(*size: int) -> Tensor:
    return torch.randn(*size, requires_grad=True)


def gradients(net: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in net.parameters()]


def seeded_operators() -> list[Any]:
    x = leaf(32, 32)
    q = x.view(1, 2, 16, 32)
    heads = F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)
    y = F.dropout(x.sin(), 0.4) + F.rrelu(x, training=True) + heads.view(32, 32)
    y = y * torch.bernoulli(x.sigmoid().detach())
    y.exp().clamp(max=5).sum().backward()
    return [x.grad]


def test_random_operators_draw_the_same() -> None:
    """pytorch#190758: a partitioner draws dropout anew in backward."""
    check(seeded_operators)


@pytest.mark.parametrize("part", [0.95, 0.8, 0.65])
def test_random_operators_at_every_budget(part: float) -> None:
    """pytorch#190758: at any budget below the whole."""

    def program() -> list[Any]:
        return train(deep(64, 10), 1024, 4)

    expected = run_plain(program)
    plain = Session("1TiB", policy="keep")
    run_under(plain, program)
    session = Session(int(part * plain.report().peak_bytes))
    assert_same(expected, run_under(session, program), f"{part}")
    assert moved_bytes(session) > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_dropout_gradients_agree_with_differences(policy: str) -> None:
    """pytorch#190758: checked against finite differences, not only against itself."""
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return F.dropout((x.sin() * 2).exp(), 0.4).tanh()

    with forced(policy):
        assert torch.autograd.gradcheck(function, (x,))


def own_generators() -> list[Any]:
    generator, draw = torch.Generator().manual_seed(7), random.Random(3)
    x = leaf(16, 16)
    y = x
    for _ in range(4):
        mask = torch.empty(16, 16).bernoulli_(draw.random(), generator=generator)
        noise = torch.rand(16, 16, generator=generator)
        y = (y * mask + noise * draw.random()).sin().exp()
    y.sum().backward()
    return [x.grad, generator.get_state(), draw.random()]


def test_own_generators_and_pythons_random() -> None:
    """pytorch#190717: dropout's mask differs in backward at a low budget."""
    check(own_generators)


def test_two_hundred_steps_with_dropout() -> None:
    """guided-diffusion#167: checkpointing with dropout lets the loss diverge."""

    def program() -> list[Any]:
        return train(deep(8, 1), 2, 200)

    assert_same(run_plain(program), run_under(forced("random"), program), "200 steps")


def test_the_random_stream_after_the_step() -> None:
    """OLMo-core PR#828: recomputing draws from the stream of the program."""

    def program() -> list[Any]:
        drawn = []
        net = deep(16, 3)
        for _ in range(3):
            net(torch.randn(8, 16)).exp().sum().backward()
            drawn += [torch.rand(2), random.random()]
        return drawn

    check(program)


def test_other_devices_random_states_are_kept_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """pytorch PR#194478: the random state of devices other than CUDA's."""
    own = torch.Generator().manual_seed(11)
    fake = types.SimpleNamespace(default_generators=[None, own])
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    states = dispatch._random_states((), {}, "xpu:1")
    assert [generator for generator, _ in states] == [torch.default_generator, own]
    assert torch.equal(states[1][1], own.get_state())


class Counting(nn.Module):
    """Counts its calls in a buffer and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.calls += 1
        return self.norm(x).tanh()


def test_statistics_are_updated_once() -> None:
    """pytorch#96136: checkpointing updates batch norm's statistics twice."""

    def program() -> list[Any]:
        net = nn.Sequential(nn.Linear(16, 16), Counting(), nn.Linear(16, 16))
        for _ in range(3):
            net(torch.randn(8, 16)).exp().sum().backward()
        return [*net.state_dict().values(), *gradients(net), net[1].seen]

    check(program)


def views_of_one_storage() -> list[Any]:
    x = leaf(12, 12)
    y = x.exp()
    z = y @ y.t() + y[:, 2:5] @ y[2:5] * y.t()
    (z * y[:, 3:4].expand(12, 12)).sum().backward()
    return [x.grad]


def test_views_of_one_storage_keep_their_strides() -> None:
    """ms-swift PR#10157: views told apart by their storage alone get mixed up.

    That one copy is made: test_safety_geometry.py::
    test_a_storage_shared_by_views_is_moved_once.
    """
    check(views_of_one_storage)


def test_two_steps_through_one_slab() -> None:
    """torchtitan PR#2581: a slot of the pool is handed out too early."""
    expected = run_plain(lambda: train(deep(64, 6), 64, 2))
    driver = VirtualDriver(4, Weather(delay=60))
    lane = HostLane(driver, limit_bytes=16 << 10, below=None)
    session = forced("swap-only", lane=lane)
    assert_same(expected, run_under(session, lambda: train(deep(64, 6), 64, 2)), "1")
    assert lane.read_bytes > 0
    assert lane.slabs.held_bytes <= 16 << 10
    assert driver.faults == []
