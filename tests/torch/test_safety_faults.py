# SPDX-License-Identifier: Apache-2.0
"""Errors, dropped graphs, broken disks: nothing leaks, and the next step is right."""

import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import LowtideError
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


def leaf(*size: int) -> Tensor:
    return torch.randn(*size, requires_grad=True)


class Broken(Exception):
    """What the tests' own code raises."""


class Breaks(torch.autograd.Function):
    """Raises in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Broken


# Exceptions in mid-step.


def broken_forward() -> list[Any]:
    net = deep(8, 3)
    for _ in range(2):
        try:
            h = net(torch.randn(4, 8)).exp()
            raise Broken
        except Broken:
            pass
        train(net, 4, 1)
    del h
    return train(net, 4)


def broken_operator() -> list[Any]:
    net, x = deep(8, 3), torch.randn(4, 8)
    for _ in range(2):
        h = net(x)
        with pytest.raises((RuntimeError, IndexError)):
            h.exp() @ torch.randn(5, 5)
        buf = torch.randn(8)
        loss = (h + buf).exp().sum()
        with pytest.raises((RuntimeError, IndexError)):
            buf.index_fill_(0, torch.tensor([1, 99]), 7.0)
        loss.backward()
    return train(net, 4)


def broken_backward() -> list[Any]:
    net, x = deep(8, 3), leaf(4, 8)
    for _ in range(2):
        h = net[:4](x * 2)
        with pytest.raises(Broken):
            net[4:](Breaks.apply(h)).exp().sum().backward()
        h.exp().sum().backward()
    return [x.grad, *train(net, 4)]


def interrupted_by_a_hook() -> list[Any]:
    net, x = deep(8, 3), leaf(4, 8)

    def stop(grad: Tensor) -> None:
        raise KeyboardInterrupt

    h = x * 2
    loss = net(h).exp().sum()
    handle = h.register_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        loss.backward(retain_graph=True)
    handle.remove()
    loss.backward()
    return [x.grad, *train(net, 4)]


@pytest.mark.parametrize(
    "program",
    [broken_forward, broken_operator, broken_backward, interrupted_by_a_hook],
    ids=lambda p: p.__name__,
)
def test_a_step_after_an_exception(program: Callable[[], list[Any]]) -> None:
    check(program)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_exception_that_leaves_the_session(policy: str) -> None:
    expected = run_plain(lambda: train(deep(8, 3), 4))
    x = leaf(4)
    losses: list[Tensor] = []

    def fail() -> None:
        losses.append((x * 2).exp().sin().sum())
        torch.zeros(1).add_(1)
        raise Broken

    with pytest.raises(Broken), forced(policy):
        fail()
    if policy == "recompute-only":
        with pytest.raises(LowtideError, match="run forward again"):
            losses[0].backward()
    found = run_under(forced(policy), lambda: train(deep(8, 3), 4))
    assert_same(expected, found, policy)


# Nothing grows.


def resources(session: Session) -> dict[str, int]:
    gc.collect()
    session.ledger.drain()
    lane = session.lane
    return {
        "live bytes": session.counter.live.value,
        "managed bytes": session.ledger.managed,
        "absent bytes": session.ledger.absent,
        "bytes on disk": 0 if lane is None else lane.used_bytes,
        "values": len(session.table),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def mishaps(net: nn.Module, step: int) -> None:
    """Train one step; sometimes drop a graph, or fail."""
    rows = 8 + step % 5
    x = torch.randn(rows, 8)
    if step % 3 == 1:
        net(x).exp()  # a graph without a backward
    if step % 10 == 9:
        with pytest.raises(Broken):
            Breaks.apply(net(x)).exp().sum().backward()
        return
    for parameter in net.parameters():
        parameter.grad = None
    net(x).exp().mean().backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.01 * parameter.grad


@pytest.mark.parametrize("policy", POLICIES)
def test_many_steps_with_mishaps_leave_nothing_behind(policy: str) -> None:
    """TRL PR#5700: what is stashed leaks from one step to the next."""
    net = deep(8, 3)
    with forced(policy) as session:
        for step in range(120):  # a multiple of every mishap's period
            mishaps(net, step)
        before = resources(session)
        for step in range(120, 240):
            mishaps(net, step)
        after = resources(session)
        assert moved_bytes(session) > 0
    assert after == before


@pytest.mark.parametrize("policy", POLICIES)
def test_dropped_graphs_give_everything_back(policy: str) -> None:
    with forced(policy) as session:
        x = leaf(1000)
        ((x * 2).exp().sin() * x.cos()).tanh().sum()
        torch.zeros(1).add_(1)
        empty = resources(session)
        for _ in range(20):
            ((x * 2).exp().sin() * x.cos()).tanh().sum()
        torch.zeros(1).add_(1)
        found = resources(session)
    for name in ("live bytes", "managed bytes", "absent bytes", "bytes on disk"):
        assert found[name] == empty[name], name


def test_sessions_leave_no_thread_or_descriptor_behind() -> None:
    def once() -> None:
        with forced("swap-only") as session:
            train(deep(8, 2), 4, 1)
            assert moved_bytes(session) > 0

    once()
    gc.collect()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        once()
    gc.collect()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files


def test_the_session_ends_what_it_began_in_torch() -> None:
    methods = torch.Tensor.numpy, torch.Tensor.__dlpack__
    disable = torch.autograd.graph.disable_saved_tensors_hooks
    with forced("random"):
        train(deep(8, 2), 4, 1)
    assert (torch.Tensor.numpy, torch.Tensor.__dlpack__) == methods
    assert "numpy" not in vars(torch.Tensor)
    assert torch.autograd.graph.disable_saved_tensors_hooks is disable
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    x = leaf(4)
    y = x.exp()
    assert y.grad_fn._saved_result.data_ptr() == y.data_ptr()


# Graphs that outlive their session.


@pytest.mark.parametrize("policy", POLICIES)
def test_a_backward_after_the_session(policy: str) -> None:
    def program(inside: Callable[[], Any]) -> list[Any]:
        torch.manual_seed(1)
        net, x, buf = deep(8, 3), leaf(4, 8), torch.randn(8)
        with inside():
            loss = (net(x * 2) + buf).exp().sin().sum()
            torch.zeros(1).add_(1)
        buf.add_(1)
        loss.backward(retain_graph=True)
        loss.backward()
        return [x.grad, *(p.grad for p in net.parameters())]

    expected = program(torch.enable_grad)
    assert_same(expected, program(lambda: forced(policy)), policy)


def test_a_backward_inside_a_later_session() -> None:
    torch.manual_seed(1)
    x = leaf(64)
    expected = torch.autograd.grad((x * 2).exp().sin().sum(), x)
    with forced("swap-only"):
        loss = (x * 2).exp().sin().sum()
        torch.zeros(1).add_(1)
    with forced("recompute-only"):
        (x * 3).exp().sin().sum().backward()
        found = torch.autograd.grad(loss, x)
    assert_same(expected, found, "a graph from an earlier session")
