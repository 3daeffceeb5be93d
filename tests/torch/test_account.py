# SPDX-License-Identifier: Apache-2.0
"""The report adds up and is true: peaks with and without lowtide, what stayed, how it
ended."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.errors import BudgetError
from lowtide.reports.text import render
from lowtide.runtime import allocator
from lowtide.runtime.session import Session
from lowtide.timeline import FINISHED, INTERRUPTED, RUNNING, Timeline
from tests.compare import seed_everything
from tests.torch.regimes import deep
from tests.virtual_lane import VirtualLane, Weather

MIB = 1 << 20
STEPS = 4


def convolutions() -> None:
    """Train a network whose saved tensors are far larger than its parameters."""
    seed_everything(0)
    layers: list[nn.Module] = []
    for i in range(5):
        layers += [nn.Conv2d(16 if i else 3, 16, 3, padding=1), nn.BatchNorm2d(16)]
        layers += [nn.ReLU()]
    net = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        loss = net(torch.randn(16, 3, 32, 32)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def perceptron() -> None:
    """Train with an optimizer whose step takes more than all else."""
    seed_everything(0)
    net = deep(192, 6)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    for _ in range(STEPS):
        loss = net(torch.randn(512, 192)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def recurrent() -> None:
    """Train a network whose kernels save workspace that needs no gradient."""
    seed_everything(0)
    net = nn.LSTM(64, 64, 2, batch_first=True)
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3)
    for _ in range(STEPS):
        result, _state = net(torch.randn(16, 64, 64))
        optimizer.zero_grad()
        result.square().mean().backward()
        optimizer.step()


def peak_of(program: Callable[[], Any]) -> int:
    counter = allocator.install()
    program()  # what is made once and stays
    counter.reset_peak()
    program()
    return int(counter.peak.value)


def report_of(session: Session, program: Callable[[], Any]) -> Timeline:
    with session:
        program()
    return session.report()


POLICIES = ("auto", "swap-only", "recompute-only", "random", "dtr", "delta", "lru")


@pytest.mark.parametrize("program", [convolutions, perceptron])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_plain_peak_is_what_the_program_needs_without_us(
    policy: str, program: Callable[[], None]
) -> None:
    """Copies come late, so that much of what is read ahead is on its way."""
    plain = peak_of(program)
    lane = VirtualLane(seed=1, weather=Weather(delay=60))
    report = report_of(Session(int(0.75 * plain), policy=policy, lane=lane), program)
    assert not report.plain_peak_known
    assert report.swapped_bytes + report.recomputed_bytes > 0
    assert report.plain_peak_bytes == pytest.approx(plain, rel=0.01)


def test_what_an_operator_is_about_to_read_counts_as_held() -> None:
    """Letting go of it would free nothing."""
    plain = peak_of(recurrent)
    report = report_of(Session(int(0.7 * plain), policy="swap-only"), recurrent)
    assert report.swapped_bytes > 0
    assert report.plain_peak_bytes == pytest.approx(plain, rel=0.01)


@pytest.mark.parametrize("policy", ["keep", *POLICIES])
def test_what_stayed_adds_up_to_what_was_kept(policy: str) -> None:
    plain = peak_of(convolutions)
    budget = "1GiB" if policy == "keep" else int(0.75 * plain)
    report = report_of(Session(budget, policy=policy), convolutions)
    assert report.kept_bytes > 0
    assert sum(kept.bytes for kept in report.kept) == report.kept_bytes
    parts = report.kept_bytes + report.swapped_bytes + report.recomputed_bytes
    assert parts == report.saved_bytes
    assert report.saved_bytes == pytest.approx(16 * MIB, rel=0.5)


def test_what_stays_as_it_is_counts_once_a_step() -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    sparse = torch.eye(64).to_sparse()
    with Session("1GiB") as session:
        for _ in range(STEPS):
            (torch.sparse.mm(sparse, weight).exp()).sum().backward()
            session.step()
    whole = [kept for kept in session.report().kept if "plain dense" in kept.reason]
    assert [kept.tensors for kept in whole] == [1]
    report = session.report()
    assert sum(kept.bytes for kept in report.kept) == report.kept_bytes


def test_what_is_saved_while_backward_runs_is_accounted_for() -> None:
    net = deep(64, 4)
    with Session("1GiB") as session:
        for _ in range(STEPS):
            x = torch.randn(64, 64, requires_grad=True)
            (grad,) = torch.autograd.grad(net(x).exp().sum(), x, create_graph=True)
            grad.square().sum().backward()
            del grad
            session.step()
    report = session.report()
    assert "saved during backward" in [kept.reason for kept in report.kept]
    assert sum(kept.bytes for kept in report.kept) == report.kept_bytes


def test_what_comes_after_the_last_step_counts() -> None:
    net = deep(64, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Session("1GiB") as session:
        for _ in range(2):
            net(torch.randn(64, 64)).sum().backward()
            optimizer.step()
        with torch.no_grad():
            net(torch.randn(65536, 64))
    assert session.report().peak_bytes > 32 * MIB
    assert session.report().plain_peak_bytes > 32 * MIB


def steps(net: nn.Module, n: int) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(n):
        net(torch.randn(64, 64)).sum().backward()
        optimizer.step()


def end_by(session: Session, error: BaseException) -> None:
    with session:
        steps(deep(64, 4), 2)
        raise error


def test_how_a_run_ended() -> None:
    with Session("1GiB") as session:
        steps(deep(64, 4), 2)
        assert session.report().outcome == RUNNING
        assert "2 steps so far" in render(session.report())
    assert session.report().outcome == FINISHED
    for error, outcome in (
        (KeyboardInterrupt(), INTERRUPTED),
        (ValueError("on purpose"), "ValueError"),
        (SystemExit(3), "exit status 3"),
        (SystemExit(), FINISHED),
    ):
        session = Session("1GiB")
        with pytest.raises(type(error)):
            end_by(session, error)
        assert session.report().outcome == outcome
        assert ("trained within" in render(session.report())) == (outcome == FINISHED)


@pytest.mark.parametrize("n", [1, 3])
def test_a_budget_too_small_is_how_it_ended(n: int) -> None:
    session = Session("64KiB")
    with pytest.raises(BudgetError), session:
        steps(deep(64, 4), n)
    report = session.report()
    assert report.outcome == "BudgetError"
    assert "trained" not in render(report)
    assert 0 < report.smallest_bytes < MIB


def test_no_smallest_budget_is_named_where_the_rest_was_not_seen() -> None:
    net = deep(64, 4)
    session = Session("8MiB")

    def program() -> None:
        with session:
            steps(net, 3)
            net(torch.randn(65536, 64)).sum().backward()

    with pytest.raises(BudgetError) as caught:
        program()
    assert caught.value.smallest_bytes is None
    assert session.report().smallest_bytes == 0
    assert "smallest budget" not in render(session.report())


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_left_between_steps(policy: str) -> None:
    """Not even what only the garbage collector would find."""
    plain = peak_of(perceptron)
    net = deep(192, 6)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    left = []
    gc.collect()
    gc.disable()
    try:
        with Session(int(0.75 * plain), policy=policy) as session:
            for _ in range(6):
                loss = net(torch.randn(512, 192)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                left.append(session.counter.live.value)
                assert not session.ledger.holding
    finally:
        gc.enable()
    assert len(set(left)) == 1


@pytest.mark.parametrize("policy", ["dtr", "dtr-local", "msps", "lru", "size"])
def test_a_policy_that_plans_nothing_never_rests_while_things_leave(
    policy: str,
) -> None:
    """At rest no lineage is kept, and these have no other way to make room."""
    plain = peak_of(perceptron)
    seen = []
    seed_everything(0)
    net = deep(192, 6)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    with Session(int(0.75 * plain), policy=policy) as session:
        for _ in range(8):
            loss = net(torch.randn(512, 192)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(session.recorder.resting is not None)
    assert not any(seen)
    assert session.report().recomputed_bytes > 0
    assert session.report().peak_bytes <= session.budget
