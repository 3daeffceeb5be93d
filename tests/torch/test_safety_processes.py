# SPDX-License-Identifier: Apache-2.0
"""Other threads, other processes and compiled code beside a training under a budget."""

import multiprocessing
import queue
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lowtide.runtime.session import Session
from tests.torch.processes import succeeds
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


class Squares(Dataset[tuple[Tensor, int]]):
    """Draws rows with torch in the worker, and differentiates there."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        torch.manual_seed(index)
        x = torch.randn(8, requires_grad=True)
        (x * 2).exp().sum().backward()
        assert x.grad is not None
        return torch.tanh(x.grad).detach(), index % 4


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork", "ignore:This process")
def test_workers_of_a_data_loader(start: str) -> None:
    def program() -> list[Any]:
        net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh())
        optimizer = torch.optim.Adam(net.parameters())
        loader = DataLoader(
            Squares(),
            batch_size=4,
            shuffle=True,
            num_workers=1,
            multiprocessing_context=start,
        )
        for x, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x), labels).backward()
            optimizer.step()
        return [*net.parameters(), *(p.grad for p in net.parameters())]

    expected = run_plain(program)
    session = forced("swap-only")
    assert_same(expected, run_under(session, program), start)
    assert moved_bytes(session) > 0


def _in_child(results: Any) -> None:
    x = torch.ones(8, requires_grad=True)
    (x * 2).exp().sin().sum().backward()
    with forced("swap-only") as session:
        y = torch.ones(8, requires_grad=True)
        (y * 2).exp().sin().sum().backward()
        assert moved_bytes(session) > 0
    assert x.grad is not None
    assert y.grad is not None
    results.put((x.grad.tolist(), y.grad.tolist()))


@pytest.mark.filterwarnings("ignore:.*fork", "ignore:This process")
def test_a_forked_child_trains_plainly_and_under_a_budget_of_its_own() -> None:
    context = multiprocessing.get_context("fork")
    with forced("swap-only") as session:
        x = torch.ones(8, requires_grad=True)
        loss = (x * 2).exp().sin().sum()
        torch.zeros(1).add_(1)
        results = context.Queue()
        child = context.Process(target=_in_child, args=(results,))
        child.start()
        one, two = results.get(timeout=120)
        child.join()
        loss.backward()
        assert moved_bytes(session) > 0
    assert x.grad is not None
    assert one == two == x.grad.tolist()
    assert child.exitcode == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_threads_of_the_user(policy: str) -> None:
    def program() -> list[Any]:
        stop, losses = threading.Event(), []

        def compute() -> None:
            torch.manual_seed(3)
            while not stop.is_set():
                x = torch.ones(16, requires_grad=True)
                (x * 2).exp().sin().sum().backward()
                losses.append(x.grad)

        thread = threading.Thread(target=compute)
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        thread.start()
        while not losses:
            pass
        found = train(net, 4)
        stop.set()
        thread.join()
        assert all(torch.equal(loss, losses[0]) for loss in losses)
        return [*found[3:7], losses[0]]

    def quiet_draws() -> list[Any]:
        return program()[-1:]

    session = forced(policy)
    assert_same(run_plain(quiet_draws)[:1], run_under(session, quiet_draws)[:1], policy)
    assert moved_bytes(session) > 0


def test_training_in_a_thread_of_the_program_is_plain_and_said() -> None:
    def program() -> list[Any]:
        found: list[Any] = []

        def compute() -> None:
            found.extend(train(deep(64, 4)))

        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
        return found

    expected = run_plain(program)
    session = Session("1MiB")
    assert_same(expected, run_under(session, program), "in a thread")
    report = session.report()
    assert not report.trained
    assert any("a thread that the program started" in note for note in report.notes)
    assert report.steps == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_backward_in_another_thread(policy: str) -> None:
    def program() -> list[Any]:
        net, x = deep(8, 3), torch.randn(4, 8)
        buf = torch.randn(8)
        loss = (net(x) + buf).exp().sum()
        buf.add_(1)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        (net(x) + buf).exp().sum().backward()
        return [p.grad for p in net.parameters()]

    check(program)


def test_two_graphs_consumed_by_two_threads_at_once() -> None:
    def program() -> list[Any]:
        inputs = [torch.randn(64, requires_grad=True) for _ in range(4)]
        shared = torch.randn(64, requires_grad=True)
        losses: queue.Queue[Tensor] = queue.Queue()
        for x in inputs:
            h = x * shared.detach()
            for _ in range(20):
                h = (h * 1.01).sin().exp()
            losses.put(h.sum())
        torch.zeros(1).add_(1)

        def consume() -> None:
            while True:
                try:
                    losses.get_nowait().backward()
                except queue.Empty:
                    return

        threads = [threading.Thread(target=consume) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [x.grad for x in inputs]

    check(program)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_compiled_module(policy: str) -> None:
    def program() -> list[Any]:
        torch.compiler.reset()
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU())
        inner = torch.compile(nn.Sequential(*net[:3]), backend="aot_eager")
        results = []
        for rows in (4, 4, 6):
            loss = net[3](inner(torch.randn(rows, 8)) * 2).exp().sum()
            loss.backward()
            results.append(loss.detach())
        return [*results, *(p.grad for p in net.parameters())]

    expected = run_plain(program)
    assert_same(expected, run_under(forced(policy), program), policy)


def test_a_script_that_exits_in_mid_training() -> None:
    out = succeeds(
        """
        import sys
        import torch
        from lowtide.runtime.session import Session

        with Session("1TiB", policy="swap-only", force=True):
            x = torch.ones(4096, requires_grad=True)
            loss = (x * 2).exp().sin().sum()
            torch.zeros(1).add_(1)
            print("here")
            sys.exit(0)
        """
    )
    assert "here" in out


def test_a_graph_alive_when_the_interpreter_ends() -> None:
    out = succeeds(
        """
        import torch
        from lowtide.runtime.session import Session

        session = Session("1TiB", policy="swap-only", force=True).__enter__()
        x = torch.ones(4096, requires_grad=True)
        loss = (x * 2).exp().sin().sum()
        torch.zeros(1).add_(1)
        print("here")
        """
    )
    assert "here" in out


def test_a_session_per_thread_is_refused_while_one_is_in_force() -> None:
    errors: list[str] = []

    def enter() -> None:
        try:
            with Session("1TiB"):
                pass
        except Exception as error:
            errors.append(str(error))

    with forced("swap-only"):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert len(errors) == 1
    assert "already in force" in errors[0]
