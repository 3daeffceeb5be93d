# SPDX-License-Identifier: Apache-2.0
"""Errors, dropped graphs, broken disks: nothing leaks, and the next step is right."""

import errno
import gc
import os
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import BudgetError, LowtideError
from lowtide.runtime import allocator
from lowtide.runtime.hostlane import HostLane
from lowtide.runtime.session import Session
from lowtide.runtime.spill import DiskCalls
from tests.compare import random_state, seed_everything
from tests.torch.processes import succeeds
from tests.torch.regimes import (
    PLENTY,
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
from tests.virtual_lane import VirtualDriver


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
    net = deep(8, 3)
    with forced(policy) as session:
        for step in range(90):  # a multiple of every mishap's period
            mishaps(net, step)
        before = resources(session)
        for step in range(90, 180):
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


# Interrupts at any line.


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line of lowtide's own code that runs."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __enter__(self) -> "Interrupt":
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(None)

    def _call(self, frame: Any, event: str, _: Any) -> Any:
        code = frame.f_code
        mine = "/lowtide/runtime/" in code.co_filename
        # what the collector calls cannot be interrupted: Python only reports it
        return self._line if mine and code.co_name not in _COLLECTED else None

    def _line(self, frame: Any, event: str, _: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self._line


_COLLECTED = ("forget", "__del__", "gone", "<lambda>", "free")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n", [3, 17, 101, 228, 397, 611, 904, 1203, 1777])
def test_a_step_after_ctrl_c_at_any_line(policy: str, n: int) -> None:
    def program() -> list[Any]:
        return train(deep(8, 3), 4)

    expected = run_plain(program)
    with forced(policy):
        train(deep(8, 3), 4, 1)
        with suppress(KeyboardInterrupt), Interrupt(n):
            train(deep(8, 3), 4, 2)
        seed_everything(1)
        found = [*program(), *random_state().values()]
    assert_same(expected, found, f"{policy}, after line {n}")


# Processes that are killed, or fork.

KILLS = int(os.environ.get("LOWTIDE_KILLS", "4"))


def test_kill_9_leaves_nothing_behind(tmp_path: Path) -> None:
    """Kill children at random moments; LOWTIDE_KILLS=50 kills so many."""
    out = succeeds(
        """
        import hashlib, os, random, signal, sys, time, warnings
        import torch
        from pathlib import Path
        from lowtide.runtime.session import Session

        warnings.simplefilter("ignore")
        disk, kills = Path(sys.argv[1]), int(sys.argv[2])

        def train(steps, told):
            torch.manual_seed(1)
            net = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
            for _ in range(steps):
                net(torch.randn(512, 256)).square().mean().backward()
                os.write(told, b".")
            parts = [p.grad.numpy().tobytes() for p in net.parameters()]
            return hashlib.sha256(b"".join(parts)).hexdigest()

        def child(steps):
            heard, told = os.pipe()
            pid = os.fork()
            if pid == 0:
                with Session("1TiB", policy="swap-only", force=True, spill_dir=disk):
                    digest = train(steps, told)
                os.write(told, digest.encode())
                os._exit(0)
            os.close(told)
            return pid, heard

        silent = os.open(os.devnull, os.O_WRONLY)
        expected = train(3, silent)
        draw = random.Random(1)
        for _ in range(kills):
            pid, heard = child(10_000)
            os.read(heard, 1)
            time.sleep(draw.random() / 20)
            os.kill(pid, signal.SIGKILL)
            assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
            os.close(heard)
            assert list(disk.iterdir()) == []
        pid, heard = child(3)
        assert os.waitpid(pid, 0)[1] == 0
        assert os.read(heard, 100).decode().lstrip(".") == expected
        assert list(disk.iterdir()) == []
        print("clean")
        """,
        str(tmp_path),
        str(KILLS),
    )
    assert "clean" in out


@pytest.mark.parametrize("policy", POLICIES)
def test_a_fork_in_mid_step(policy: str) -> None:
    """The child is plain; the parent goes on, its copies as they were."""
    expected = run_plain(lambda: forking(forks=False))
    found = run_under(forced(policy), lambda: forking(forks=True))
    assert_same(expected, found, policy)


def forking(*, forks: bool) -> list[Any]:
    net = deep(16, 4)
    results = []
    for _ in range(2):
        loss = net(torch.randn(8, 16)).exp().mean()
        torch.zeros(1).add_(1)
        if forks:
            fork_and_train()
        loss.backward()
        results.append(loss.detach())
    return [*results, *(p.grad for p in net.parameters())]


def fork_and_train() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        pid = os.fork()
    if pid == 0:
        try:
            x = torch.ones(4, requires_grad=True)
            (x * 2).exp().sum().backward()
            assert x.grad is not None
            assert torch.equal(x.grad, 2 * torch.full((4,), 2.0).exp())
            with Session("1TiB", policy="recompute-only", force=True):
                (x * 2).exp().sum().backward()
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


# Tiers that fail.


def notes_of(session: Session) -> str:
    return " ".join(session.report().notes)


def test_a_file_that_may_not_grow_is_said_once(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The system itself refuses: a limit on the size of files (EFBIG)."""
    expected = run_plain(lambda: train(deep(64, 8), 64))
    session = forced("swap-only", spill_dir=tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    try:
        found = run_under(session, lambda: train(deep(64, 8), 64))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert_same(expected, found, "EFBIG")
    assert "File too large" in notes_of(session)
    said = [r for r in caplog.records if "swapping stopped" in r.getMessage()]
    assert len(said) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_read_that_fails_is_computed_again_where_that_is_possible() -> None:
    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    class Unreadable(Session):
        def __enter__(self) -> Session:
            session = super().__enter__()
            session.lane._calls = DiskCalls(preadv=failing)  # type: ignore[union-attr]
            session.scheduler.rules = replace(session.rules, recompute=True)
            return session

    def program() -> list[Any]:
        x = leaf(64, 64)
        (x.sin() * 2).exp().sum().backward()
        return [x.grad]

    expected = run_plain(program)
    session = Unreadable(PLENTY, policy="swap-only", force=True)
    assert_same(expected, run_under(session, program), "EIO")
    assert "is computed again" in notes_of(session)
    assert session.replayer.bytes > 0


def test_writes_in_one_step_can_be_capped() -> None:
    expected = run_plain(lambda: train(deep(64, 8), 64, 4))
    session = forced("swap-only", disk_writes="100KiB")
    assert_same(expected, run_under(session, lambda: train(deep(64, 8), 64, 4)), "cap")
    report = session.report()
    assert 0 < report.step_written_bytes <= 100 << 10
    assert report.written_bytes > 2 * report.step_written_bytes
    assert "disk_writes=" in notes_of(session)


def test_a_host_budget_that_is_used_up_falls_back() -> None:
    expected = run_plain(lambda: train(deep(64, 8), 64))
    lane = HostLane(VirtualDriver(1), limit_bytes=64 << 10, below=None)
    session = forced("swap-only", lane=lane)
    assert_same(expected, run_under(session, lambda: train(deep(64, 8), 64)), "host")
    assert lane.written_bytes > 0
    assert "Allow more with host=" in notes_of(session)


def test_a_step_after_one_that_did_not_fit() -> None:
    """In one session: too large a batch is refused, the next, smaller one is exact."""
    net, x = deep(64, 8), torch.randn(64, 64)

    def step(rows: Tensor) -> list[Tensor]:
        torch.manual_seed(3)
        for parameter in net.parameters():
            parameter.grad = None
        net(rows).exp().mean().backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    expected = [g.clone() for g in step(x)]
    counter = allocator.install()
    counter.reset_peak()
    step(x)
    with Session(counter.peak.value + (512 << 10)) as session:
        for _ in range(3):
            step(x)
            session.step()
        large = torch.randn(64, 64).repeat(2, 1)
        with pytest.raises(BudgetError):
            step(large.repeat(256, 1))
        found = [g.clone() for g in step(x)]
        session.step()
    assert_same(expected, found, "after the large batch")


def test_a_device_out_of_memory_is_given_room_and_tries_again() -> None:
    failures = [3, 5]  # of these runs of the operator

    @torch.library.custom_op("lowtide_tests::scarce", mutates_args=())
    def scarce(x: Tensor) -> Tensor:
        runs.append(len(runs) + 1)
        if runs[-1] in failures:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return x * 2

    scarce.register_autograd(lambda ctx, grad: grad * 2)
    runs: list[int] = []

    def program() -> list[Any]:
        runs.clear()
        x = leaf(64, 64)
        loss = sum(scarce(x.sin() * i).exp().sum() for i in range(1, 4))
        loss.backward()
        return [x.grad]

    failures.clear()
    expected = run_plain(program)
    failures[:] = [2]
    session = Session(PLENTY)
    assert_same(expected, run_under(session, program), "after out of memory")
    assert len(runs) == 4
    assert session.lane is not None
    assert session.lane.written_bytes + session.replayer.bytes > 0


# Deaths in the middle of a replay.


@pytest.mark.parametrize("seed", range(6))
def test_what_a_replay_reads_outlives_its_graph(seed: int) -> None:
    """A swapped value dies, and a value is computed from it again before that counts.

    Under pressure whatever makes room first settles who has died, in the middle of a
    replay too; here it does so every time.
    """

    class Thorough(Session):
        def __enter__(self) -> Session:
            session = super().__enter__()
            ledger = session.ledger
            make_room = ledger.make_room

            def thorough(need: int) -> bool:
                ledger.drain()
                return make_room(need)

            ledger.make_room = thorough  # type: ignore[method-assign]
            return session

    def program() -> list[Any]:
        x = leaf(64, 64)
        total = torch.zeros(())
        for i in range(12):
            shared = x + i
            later = (shared * 0.1).exp()  # saves itself, made from what sin saves
            total = total + later.sum() + shared.sin().sum()
            del shared, later
        total.backward()
        return [x.grad]

    expected = run_plain(program)
    session = Thorough(PLENTY, policy="random", force=True, seed=seed)
    assert_same(expected, run_under(session, program), f"seed {seed}")
    assert moved_bytes(session) > 0
