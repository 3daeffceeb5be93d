# SPDX-License-Identifier: Apache-2.0
"""Broken disks, tight budgets, budgets that are too small: exact, or a clear error."""

import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.errors import BudgetError, LowtideError, SpillError
from lowtide.runtime import allocator, steward
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

# Disks that do not do what they should.


def test_a_full_disk_falls_back(tmp_path: Path) -> None:
    expected = run_plain(lambda: train(deep(64, 8), 256))
    session = Session(PLENTY, force=True, policy="swap-only", disk="64KiB")
    assert_same(expected, run_under(session, lambda: train(deep(64, 8), 256)), "full")
    notes = " ".join(session.report().notes)
    assert "swapping stopped" in notes
    assert "65536" in notes or "64.00 KiB" in notes or "64 KiB" in notes, notes


def test_a_disk_that_fills_up_in_mid_training() -> None:
    expected = run_plain(lambda: train(deep(64, 8), 64))
    calls = [0]

    def failing(*args: Any) -> int:
        calls[0] += 1
        if calls[0] > 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwritev(*args)

    session = forced("swap-only")

    def program() -> list[Any]:
        assert session.lane is not None
        session.lane._calls = DiskCalls(pwritev=failing)
        return train(deep(64, 8), 64)

    assert_same(expected, run_under(session, program), "ENOSPC")
    assert calls[0] > 20
    notes = " ".join(session.report().notes)
    assert "swapping stopped" in notes
    assert os.strerror(errno.ENOSPC) in notes


def test_bytes_that_cannot_be_read_back_are_an_error_and_no_hang() -> None:
    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    session = forced("swap-only")

    def program() -> list[Any]:
        assert session.lane is not None
        session.lane._calls = DiskCalls(preadv=failing)
        return train(deep(8, 3), 4)

    with pytest.raises(SpillError, match=os.strerror(errno.EIO)):
        run_under(session, program)
    expected = run_plain(lambda: train(deep(8, 3), 4))
    found = run_under(forced("swap-only"), lambda: train(deep(8, 3), 4))
    assert_same(expected, found, "the next session")


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    expected = run_plain(lambda: train(deep(8, 2), 4))
    session = forced("swap-only", spill_dir=missing)
    assert_same(expected, run_under(session, lambda: train(deep(8, 2), 4)), "missing")
    assert str(missing) in " ".join(session.report().notes)


# Budgets.


def peak_of(program: Callable[[], Any]) -> int:
    session = Session(PLENTY, policy="keep")
    run_under(session, program)
    return session.report().peak_bytes


@pytest.mark.parametrize("policy", ["auto", "swap-only", "recompute-only", "random"])
def test_a_tight_budget_is_exact(policy: str) -> None:
    def program() -> list[Any]:
        return train(deep(64, 12), 2048, 4)

    expected = run_plain(program)
    session = Session(int(0.75 * peak_of(program)), policy=policy)
    assert_same(expected, run_under(session, program), policy)
    assert moved_bytes(session) > 0
    report = session.report()
    assert report.peak_bytes <= report.budget_bytes


def test_verify_compares_what_comes_back() -> None:
    expected = run_plain(lambda: train(deep(8, 3), 4))
    session = forced("random", verify=True)
    assert_same(expected, run_under(session, lambda: train(deep(8, 3), 4)), "verify")
    assert session.report().verified_tensors > 0


def test_too_small_a_budget_and_then_a_larger_one() -> None:
    def program() -> list[Any]:
        return train(deep(64, 12), 2048, 4)

    expected = run_plain(program)
    with pytest.raises(BudgetError) as caught:
        run_under(Session("1MiB"), program)
    smallest = caught.value.smallest_bytes
    assert smallest is not None
    assert caught.value.operator in str(caught.value)
    del caught  # its traceback holds the first network
    gc.collect()
    found = run_under(Session(smallest), program)
    assert_same(expected, found, "at the smallest budget")


def test_what_an_operator_has_made_is_not_counted_beside_its_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It exceeds the budget for want of an estimate, and would have fitted."""
    monkeypatch.setattr(steward, "estimate_need", lambda func, args, kwargs: (0, 0))

    def program() -> list[Any]:
        found = []
        for step in range(4):
            x = torch.randn(512, 512, requires_grad=True)
            h = x
            for _ in range(8):
                h = (h * 1.01).sin()
            if step == 3:
                found.append(h.detach().repeat(10, 1).sum())
            h.sum().backward()
            found.append(x.grad)
            if session is not None:
                session.step()
        return found

    session = None
    expected = run_plain(program)
    there = allocator.install().live.value
    session = Session(there + (16 << 20))
    assert_same(expected, run_under(session, program), "an unknown need")
    assert any("needed more than was known" in note for note in session.report().notes)


def test_a_budget_inside_a_budget() -> None:
    expected = run_plain(lambda: train(deep(8, 3), 4))

    def program() -> list[Any]:
        with pytest.raises(LowtideError, match="already in force"), Session("1GiB"):
            pass
        return train(deep(8, 3), 4)

    session = forced("recompute-only")
    assert_same(expected, run_under(session, program), "after the refusal")
    assert moved_bytes(session) > 0


def test_marking_steps_by_hand() -> None:
    net = deep(8, 3)
    with forced("random") as session:
        for _ in range(3):
            net(torch.randn(4, 8)).exp().sum().backward()
            session.step()
        assert session.report().steps == 3


def test_what_exists_on_entry_is_counted() -> None:
    net = deep(64, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    parameters = sum(p.nbytes for p in net.parameters())
    with Session(PLENTY) as session:
        assert session.counter.live.value >= 4 * parameters
        net(torch.randn(4, 64)).sum().backward()
        optimizer.step()
