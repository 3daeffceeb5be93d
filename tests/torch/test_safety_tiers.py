# SPDX-License-Identifier: Apache-2.0
"""Tiers that fail, are full or too small: fall back, say so once, stay exact."""

import errno
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.errors import BudgetError
from lowtide.runtime import allocator
from lowtide.runtime.hostlane import HostLane
from lowtide.runtime.session import Session
from lowtide.runtime.spill import DiskCalls
from tests.torch.regimes import (
    PLENTY,
    assert_same,
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


def test_what_a_cap_on_writes_forbids_is_computed_again() -> None:
    """No copy is tried that the cap would refuse, from the first step on."""

    def program() -> list[Any]:
        return train(deep(64, 8), 1024, 5)

    expected = run_plain(program)
    plain = Session("1TiB", policy="keep")
    run_under(plain, program)
    cap = 600 << 10  # two activations of some twenty
    session = Session(int(0.6 * plain.report().peak_bytes), disk_writes=cap)
    assert_same(expected, run_under(session, program), "cap")
    report = session.report()
    assert report.peak_bytes <= report.budget_bytes
    assert report.recomputed_bytes > 0
    assert report.swapped_bytes <= cap
    assert report.step_written_bytes <= cap
    assert "swapping stopped" not in notes_of(session)


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
