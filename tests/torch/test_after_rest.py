# SPDX-License-Identifier: Apache-2.0
"""Something new after rest has begun: it is exact, and the budget holds.

Each program trains a network until it is at rest, does something else, and trains on.
It is compared with itself: plainly, under a budget that it fits, under every forced
regime, and at half of what it needs.
"""

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowtide.runtime import allocator
from lowtide.runtime.session import Session
from tests.compare import random_state, seed_everything
from tests.torch.regimes import (
    POLICIES,
    assert_same,
    forced,
    moved_bytes,
    run_plain,
    run_under,
)

WIDTH, ROWS = 96, 768
UNTIL_REST = 5  # steps

Found = list[Any]
Other = Callable[[nn.Sequential, torch.optim.Optimizer, Found], None]


def network() -> nn.Sequential:
    return nn.Sequential(
        *[
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))
            for _ in range(8)
        ]
    )


def step(net: nn.Module, optimizer: torch.optim.Optimizer, found: Found) -> None:
    optimizer.zero_grad()
    loss = net(torch.randn(ROWS, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    found.append(loss.detach().clone())


def program(other: Other, note: Callable[[], None] = lambda: None) -> Found:
    """Train, do something else twice in a row, train on."""
    seed_everything(0)
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    found: Found = []
    for _ in range(UNTIL_REST):
        step(net, optimizer, found)
    note()
    for _ in range(2):
        other(net, optimizer, found)
    for _ in range(2):
        step(net, optimizer, found)
    gradients = [p.grad for p in net.parameters()]
    return [*found, *net.parameters(), *gradients, *random_state().values()]


# -- what else a program may do ------------------------------------------------------


def checkpointed(reentrant: bool) -> Other:
    def other(net: nn.Sequential, optimizer: Any, found: Found) -> None:
        optimizer.zero_grad()
        h = torch.randn(ROWS, WIDTH, requires_grad=True)
        start = h
        for block in net:
            h = checkpoint(block, h, use_reentrant=reentrant)
        h.square().mean().backward()
        optimizer.step()
        found.append(start.grad)

    return other


def gradient_penalty(net: nn.Sequential, optimizer: Any, found: Found) -> None:
    optimizer.zero_grad()
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    (grad,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    penalty = (grad.norm(dim=1) - 1).square().mean()
    (net(x).square().mean() + penalty).backward()
    optimizer.step()
    found.append(penalty.detach().clone())


def hessian_vector(net: nn.Sequential, optimizer: Any, found: Found) -> None:
    weights = list(net.parameters())[:4]
    loss = net(torch.randn(ROWS, WIDTH)).square().mean()
    first = torch.autograd.grad(loss, weights, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), weights)
    found += [g.clone() for g in second]


def functional_gradient(net: nn.Sequential, optimizer: Any, found: Found) -> None:
    weights = {name: p.detach() for name, p in net.named_parameters()}
    x = torch.randn(ROWS, WIDTH)

    def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(net, weights, (x,)).square().mean()

    found += torch.func.grad(loss)(weights).values()


def per_sample_gradients(net: nn.Sequential, optimizer: Any, found: Found) -> None:
    net.eval()
    weights = {name: p.detach() for name, p in net.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, weights, (x,)).square().mean()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    found += each(weights, torch.randn(16, WIDTH)).values()
    net.train()


def vectorized_in_training(net: nn.Sequential, optimizer: Any, found: Found) -> None:
    optimizer.zero_grad()
    x = torch.randn(ROWS, WIDTH)
    scale = torch.randn(WIDTH, requires_grad=True)
    h = torch.func.vmap(lambda row: (row * scale).exp().tanh())(net(x))
    h.square().mean().backward()
    optimizer.step()
    found.append(scale.grad)


def another_shape(net: nn.Sequential, optimizer: Any, found: Found) -> None:
    optimizer.zero_grad()
    net(torch.randn(ROWS // 2 + 1, WIDTH)).square().mean().backward()
    optimizer.step()


def a_hook(net: nn.Sequential, optimizer: Any, found: Found) -> None:
    seen: Found = []

    def note(module: Any, inputs: Any, result: torch.Tensor) -> torch.Tensor:
        seen.append(result.detach())
        result.register_hook(lambda grad: grad * 2)
        return result.mul(1.5)

    handle = net[3].register_forward_hook(note)
    step(net, optimizer, found)
    handle.remove()
    found.append(seen[0].sum())


def an_exception(net: nn.Sequential, optimizer: Any, found: Found) -> None:
    def fail(module: Any, grad_inputs: Any, grad_outputs: Any) -> None:
        raise ValueError("on purpose")

    optimizer.zero_grad()
    handle = net[4].register_full_backward_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        net(torch.randn(ROWS, WIDTH)).square().mean().backward()
    handle.remove()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        net(torch.randn(ROWS, WIDTH + 1))


def a_second_model(net: nn.Sequential, optimizer: Any, found: Found) -> None:
    second = network()
    other = torch.optim.AdamW(second.parameters())
    x = net(torch.randn(ROWS, WIDTH))
    optimizer.zero_grad()
    second(x).square().mean().backward()
    other.step()
    optimizer.step()
    found += [p.grad for p in second.parameters()]


def another_thread(net: nn.Sequential, optimizer: Any, found: Found) -> None:
    """The whole of a step in a thread of the program, while this one waits."""
    thread = threading.Thread(target=step, args=(net, optimizer, found))
    thread.start()
    thread.join()


def backward_elsewhere(net: nn.Sequential, optimizer: Any, found: Found) -> None:
    optimizer.zero_grad()
    loss = net(torch.randn(ROWS, WIDTH)).square().mean()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    optimizer.step()
    found.append(loss.detach().clone())


def a_kept_graph(net: nn.Sequential, optimizer: Any, found: Found) -> None:
    optimizer.zero_grad()
    loss = net(torch.randn(ROWS, WIDTH)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def evaluation(net: nn.Sequential, optimizer: Any, found: Found) -> None:
    net.eval()
    with torch.no_grad():
        found.append(net(torch.randn(ROWS, WIDTH)).sum())
    with torch.inference_mode():
        found.append(net(torch.randn(ROWS, WIDTH)).sum().item())
    net.train()


OTHERS: dict[str, Other] = {
    "checkpoint, reentrant": checkpointed(True),
    "checkpoint, not reentrant": checkpointed(False),
    "gradient penalty": gradient_penalty,
    "hessian-vector product": hessian_vector,
    "torch.func.grad": functional_gradient,
    "per-sample gradients": per_sample_gradients,
    "vmap in training": vectorized_in_training,
    "another shape": another_shape,
    "a hook": a_hook,
    "an exception": an_exception,
    "a second model": a_second_model,
    "another thread": another_thread,
    "backward in another thread": backward_elsewhere,
    "a kept graph": a_kept_graph,
    "evaluation": evaluation,
}


# What runs in another thread is not budgeted; torch.func lets nothing leave.
THREADS = {"another thread", "backward in another thread"}
UNBUDGETED = THREADS | {"torch.func.grad", "per-sample gradients"}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", OTHERS)
def test_something_else_after_rest(name: str) -> None:
    other = OTHERS[name]
    counter = allocator.install()
    gc.collect()
    counter.reset_peak()
    before = counter.live.value
    expected = program(other)
    peak = counter.peak.value - before
    rested: list[bool] = []

    session = Session("1TiB")
    with session:
        rests = session.recorder
        found = program(other, lambda: rested.append(rests.resting is not None))
    assert rested == [True]
    assert_same(expected, found, "at rest")

    share = 1.2 if name in UNBUDGETED else 0.5
    session = Session(counter.live.value + int(share * peak))
    with session:
        found = program(other)
    assert_same(expected, found, "within a budget")
    report = session.report()
    said = any("a thread that the program started" in note for note in report.notes)
    assert said == (name in THREADS)
    if name not in UNBUDGETED:
        assert session.account.moved
        assert report.peak_bytes <= report.budget_bytes


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", OTHERS)
def test_something_else_while_all_leaves(name: str, policy: str) -> None:
    def run() -> Found:
        return program(OTHERS[name])

    expected = run_plain(run)
    session = forced(policy)
    assert_same(expected, run_under(session, run), policy)
    assert moved_bytes(session) > 0
