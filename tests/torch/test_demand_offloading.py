# SPDX-License-Identifier: Apache-2.0
"""Demand: hooks that offload, host memory, and what is said of it.

What users asked for in public threads: each test names its thread, and other tests name
others (tests/pure/test_demand_named.py has the list).
"""

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

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
from tests.virtual_lane import VirtualDriver, VirtualLane, Weather


def leaf(*size: int) -> Tensor:
    return torch.randn(*size, requires_grad=True)


def gradients(net: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in net.parameters()]


def test_graphs_that_are_not_used_whole() -> None:
    """TRL#4280: evaluation under grad, a part of a backward, an error in mid-step."""

    def program() -> list[Any]:
        net, x = deep(16, 3), leaf(4, 16)
        net(x).exp().sum()  # nobody wants its gradient
        net.eval()
        net(x).exp()
        net.train()
        h = net[:4](x)
        torch.autograd.grad(net[4:](h).exp().sum(), h, retain_graph=True)
        with pytest.raises(RuntimeError):
            net(x).exp() @ torch.randn(3, 3)
        return train(net, 8)

    check(program)


LAYOUTS = st.tuples(
    st.lists(st.integers(0, 4), min_size=0, max_size=3),
    st.lists(st.integers(0, 5), min_size=3, max_size=3),
    st.integers(0, 9),
    st.sampled_from(POLICIES),
)


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(LAYOUTS)
def test_any_layout(layout: tuple[list[int], list[int], int, str]) -> None:
    """TRL PR#5694: tensors that are not contiguous crash an offloader."""
    size, stride, offset, policy = layout

    def program() -> list[Any]:
        x = torch.linspace(-1, 1, 64, requires_grad=True)
        y = (x * 2).as_strided(size, stride[: len(size)], offset)
        (y.exp() * y.sin()).sum().backward()
        picture = leaf(1, 2, 3, 3)
        moved = (picture * 2).to(memory_format=torch.channels_last)
        (moved.exp() * moved.expand(4, 2, 3, 3).sin()).sum().backward()
        return [x.grad, picture.grad]

    expected = run_plain(program)
    assert_same(expected, run_under(forced(policy), program), f"{layout}")


def test_slabs_are_used_again_at_every_step() -> None:
    """pytorch#86097: pin_memory for CPU offload, within a host budget."""
    lane = HostLane(VirtualDriver(2), limit_bytes=4 << 20, below=None)
    pins: list[int] = []
    with forced("swap-only", lane=lane):
        net = deep(64, 6)
        for _ in range(5):
            net(torch.randn(64, 64)).exp().mean().backward()
            pins.append(lane.slabs.pins)
    assert pins[0] > 0
    assert len(set(pins[1:])) == 1
    assert lane.slabs.held_bytes <= 4 << 20


def test_training_where_pinning_is_refused() -> None:
    """unsloth#338: pinning fails on WSL."""
    expected = run_plain(lambda: train(deep(16, 4), 16))
    driver = VirtualDriver(1, Weather(pinning=False))
    lane = HostLane(driver, limit_bytes=None, below=None)
    session = forced("swap-only", lane=lane)
    assert_same(expected, run_under(session, lambda: train(deep(16, 4), 16)), "WSL")
    notes = [n for n in session.report().notes if "could not be pinned" in n]
    assert len(notes) == 1
    assert moved_bytes(session) > 0


def test_first_evaluation_under_inference_mode_then_training() -> None:
    """unsloth#3828: buffers made under inference mode crash training."""

    def program() -> list[Any]:
        net = deep(16, 3)
        with torch.inference_mode():
            made = torch.randn(16)
            net(torch.randn(4, 16)).exp().sum()
        x = leaf(4, 16)
        (net(x) + made).exp().sum().backward()
        return [x.grad, *train(net, 4)]

    check(program)


def test_tied_weights_are_not_moved() -> None:
    """cache-dit PR#1111: weights that are tied get torn apart."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(32, 16)
            self.head = nn.Linear(16, 32, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens).tanh().exp())

    def program() -> list[Any]:
        net = Tied()
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(3):
            tokens = torch.randint(32, (4, 8))
            F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
        assert net.head.weight is net.embedding.weight
        return [*net.parameters(), *gradients(net)]

    check(program)


def test_parameters_their_views_and_buffers_are_never_moved() -> None:
    """pytorch#64729: parameters should be left out of what is packed."""

    class Watching(VirtualLane):
        places: set[int] = set()  # noqa: RUF012

        def write(self, address: int, nbytes: int) -> Any:
            assert address not in self.places
            return super().write(address, nbytes)

    lane = Watching(1)
    weight, buffer = nn.Parameter(torch.randn(16, 16)), torch.randn(16)
    lane.places = {weight.data_ptr(), buffer.data_ptr()}
    x = leaf(8, 16)
    with forced("swap-only", lane=lane):
        h = (x * 2).exp() @ weight.t()
        ((h * buffer).sin() @ weight[:, :4]).sum().backward()
    assert lane.written_bytes > 0
    assert lane.faults == []


def test_gradients_asked_for_in_another_order() -> None:
    """pytorch PR#198016: the order of unpacking is not that of packing, reversed."""

    def program() -> list[Any]:
        x = leaf(64, 256)
        results = []
        for step in range(4):
            hidden = [(x * i).sin().exp() for i in range(1, 9)]
            losses = [h.square().sum() for h in hidden]
            del hidden
            random.Random(step).shuffle(losses)
            for loss in losses:
                loss.backward()
            results.append(x.grad)
        return results

    check(program)
    expected = run_plain(program)
    plain = Session("1TiB", policy="keep")
    run_under(plain, program)
    for seed in range(3):
        lane = VirtualLane(seed, Weather(delay=100))
        session = Session(int(0.7 * plain.report().peak_bytes), lane=lane)
        assert_same(expected, run_under(session, program), f"seed {seed}")
        assert lane.faults == []


@pytest.mark.parametrize("policy", POLICIES)
def test_a_dropped_graph_leaves_no_cycle(policy: str) -> None:
    """pytorch#115255: hooks made of lambdas keep what they saved alive."""

    class Token:
        pass

    gc.collect()
    gc.disable()
    try:
        with forced(policy):
            token = Token()
            x = leaf(64)
            y = (x * 2).exp()
            y.sin().sum().grad_fn.metadata["token"] = token  # type: ignore[union-attr]
            loss = y.sin().sum()
            loss.grad_fn.metadata["token"] = token  # type: ignore[union-attr]
            gone = weakref.ref(token)
            del token, y, loss
            torch.zeros(1).add_(1)
            assert gone() is None
    finally:
        gc.enable()


def errors_in_place() -> list[Any]:
    results: list[Any] = []
    x = leaf(8, 8)
    y = (x * 2).exp()
    y[2:4].relu_()  # a view of what exp has saved
    try:
        y.sum().backward()
    except RuntimeError as error:
        results.append(str(error).split(":")[0])
    z = (x * 3).sin()
    F.relu_(z[1:3])
    (z * 2).sum().backward()
    return [*results, x.grad]


def test_views_changed_in_place() -> None:
    """pytorch#181832: an in-place operator on a view loses a hook."""
    found = run_plain(errors_in_place)
    assert "modified by an inplace operation" in str(found[0])
    check(errors_in_place)


def its_own_checkpointing() -> list[Any]:
    net = deep(16, 4)
    x = leaf(8, 16)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    h = checkpoint(net[:3], x * 2, use_reentrant=False)
    h = checkpoint(net[3:6], h, use_reentrant=False, context_fn=contexts)
    with save_on_cpu():
        h = net[6:9](h)
    checkpoint(net[9:], h, use_reentrant=False).exp().sum().backward()
    return [x.grad, *gradients(net)]


def test_a_model_with_checkpointing_and_hooks_of_its_own() -> None:
    """pytorch#191236: selective checkpointing inside the user's own hooks."""
    check(its_own_checkpointing, must_move=())


# What is said.


def holding(keep: Callable[[Tensor], None]) -> Session:
    with forced("swap-only") as session:
        x = leaf(128, 128)
        y = (x * 2).exp()
        keep(y)
        y.sin().sum().backward()
        session.step()
    return session


def test_the_report_names_who_holds_what_stayed() -> None:
    """discuss.pytorch.org/t/208243: why does offloading not reduce memory?"""
    held: list[Tensor] = []
    kept = holding(held.append).report().kept
    reasons = {entry.reason: entry for entry in kept}
    entry = reasons["held by the program at the start of backward"]
    assert entry.bytes >= 128 * 128 * 4
    assert "exp" in entry.example or entry.tensors > 1


def test_nothing_moved_is_said_with_the_reason() -> None:
    """DeepSpeed#522: why does cpu_checkpointing not work?"""
    with Session("1TiB") as session:
        train(deep(64, 4), 256)
    report = session.report()
    assert report.swapped_bytes == report.recomputed_bytes == 0
    assert report.kept_bytes == report.saved_bytes > 0
    assert any(entry.reason == "it fitted" for entry in report.kept)


def test_planned_and_measured_peaks_are_told() -> None:
    """DeepSpeed#3779: partitioned checkpointing does not reduce memory."""

    def program() -> list[Any]:
        return train(deep(64, 10), 1024, 5)

    plain = Session("1TiB", policy="keep")
    run_under(plain, program)
    session = Session(int(0.8 * plain.report().peak_bytes))
    run_under(session, program)
    report = session.report()
    assert 0 < report.peak_bytes <= report.budget_bytes
    assert 0 < report.planned_peak_bytes <= report.budget_bytes
    assert report.swapped_bytes + report.recomputed_bytes > 0
