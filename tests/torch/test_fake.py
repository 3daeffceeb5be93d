# SPDX-License-Identifier: Apache-2.0
"""Iterations recorded without memory: what they share with real ones."""

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import LowtideError
from lowtide.recorder.graph import sequence_of
from lowtide.runtime import allocator
from lowtide.trace import Graph

Step = Callable[[], object]


def trained(
    model: nn.Module,
    make_batch: Callable[[], torch.Tensor],
    loss_of: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Step:
    """Return what trains a model once, with logging as people do it."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        out = model(make_batch())
        out = out[0] if isinstance(out, tuple) else out
        loss = out.square().mean() if loss_of is None else loss_of(out)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert f"{loss.item():.3f}"

    return step


def mlp() -> Step:
    model = nn.Sequential(nn.Linear(96, 256), nn.GELU(), nn.Linear(256, 8))
    labels = torch.arange(64) % 8

    def loss_of(out: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(out, labels)

    return trained(model, lambda: torch.randn(64, 96), loss_of)


def cnn() -> Step:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 24, 3, stride=2, groups=8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    return trained(model, lambda: torch.randn(8, 3, 32, 32))


def transformer() -> Step:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return trained(model, lambda: torch.randn(8, 32, 64))


def attention() -> Step:
    def make_batch() -> torch.Tensor:
        return torch.randn(4, 8, 64, 16, requires_grad=True)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(
                x * self.scale, x, x, is_causal=True
            )

    return trained(Attention(), make_batch)


def lstm() -> Step:
    return trained(nn.LSTM(32, 64, 2), lambda: torch.randn(24, 8, 32))


STEPS = [mlp, cnn, transformer, attention, lstm]


def saved_bytes(graph: Graph) -> list[int]:
    return graph.versions["bytes"][graph.versions["held"] >= 0].tolist()


@pytest.mark.parametrize("build", STEPS)
def test_a_fake_iteration_is_the_real_one(build: Callable[[], Step]) -> None:
    real = lowtide.record(build=build)
    fake = lowtide.record(build=build, fake=True)
    assert sequence_of(fake) == sequence_of(real)
    assert saved_bytes(fake) == saved_bytes(real)
    assert fake.versions["bytes"].tolist() == real.versions["bytes"].tolist()
    assert np.array_equal(fake.saves, real.saves)
    assert np.array_equal(fake.operators["flops"], real.operators["flops"])
    assert fake.live_bytes.max() == real.live_bytes.max()
    if allocator.install().sees_workspace:  # which a fake run estimates
        assert fake.plain_peak_bytes == pytest.approx(real.plain_peak_bytes, rel=0.03)


def test_a_hundred_gigabytes_take_no_memory() -> None:
    before = resident_bytes()

    def build() -> Step:
        model = nn.Sequential(*[nn.Linear(1 << 16, 1 << 16) for _ in range(2)])
        return trained(model, lambda: torch.randn(1 << 17, 1 << 16))

    graph = lowtide.record(build=build, fake=True)
    assert graph.plain_peak_bytes > 100 << 30
    assert resident_bytes() - before < 1 << 30


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_what_was_there_before_stays() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).pow(3).sum().backward()
        optimizer.step()

    before = {k: v.clone() for k, v in model.state_dict().items()}
    lowtide.record(step, fake=True)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.state
    step()  # for real
    assert not torch.equal(before["0.weight"], model[0].weight)
    momenta = optimizer.state_dict()
    lowtide.record(step, fake=True)
    after = optimizer.state_dict()
    for key, state in momenta["state"].items():
        assert all(torch.equal(v, after["state"][key][k]) for k, v in state.items())


def test_what_the_data_decide_is_made_up() -> None:
    def build() -> Step:
        model = nn.Linear(64, 64)

        def loss_of(out: torch.Tensor) -> torch.Tensor:
            chosen = out[out > 0]  # all of them, says the fallback
            values, indices = out.topk(2)
            spread = indices.flatten().bincount(minlength=64)
            assert spread.min() == spread.max()
            assert torch.isfinite(out).all()
            assert not torch.isnan(out).any()
            return chosen.mean() + values.mean()

        return trained(model, lambda: torch.randn(1024, 64), loss_of)

    graph = lowtide.record(build=build, fake=True)
    assert "aten::topk" in graph.names
    assert 1024 * 64 * 4 in saved_bytes(graph)


def test_an_operator_unknown_to_fake_tensors_runs_for_real(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def step() -> None:
        x = torch.randn(512, 64, requires_grad=True)
        torch._grouped_mm(
            x, torch.randn(2, 64, 64), torch.tensor([256, 512], dtype=torch.int32)
        ).square().sum().backward()

    with caplog.at_level(logging.ERROR):
        graph = lowtide.record(step, fake=True)
    assert "aten::_grouped_mm" in graph.names
    assert not caplog.records


def test_mistakes_are_errors_of_the_program() -> None:
    def step() -> None:
        torch.randn(512, 64) @ torch.randn(512, 64)

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        lowtide.record(step, fake=True)
    assert torch.ones(4, 4).sum() == 16  # kernels are back


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "not both"),
        ({"step": print, "build": print}, "not both"),
        ({"step": print, "device": "tpu"}, "one of cpu, cuda"),
        ({"step": print, "device": "cuda"}, "only under fake"),
        ({"build": list, "fake": True}, "must return the function"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(LowtideError, match=says):
        lowtide.record(**arguments)


def test_a_fake_recording_inside_a_budget_is_refused() -> None:
    with lowtide.budget("1GiB"), pytest.raises(LowtideError, match="outside"):
        lowtide.record(print, fake=True)
