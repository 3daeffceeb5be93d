# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at any line, kill -9 at any moment, forks in mid-step."""

import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.runtime.session import Session
from tests.compare import random_state, seed_everything
from tests.torch.processes import succeeds
from tests.torch.regimes import (
    POLICIES,
    assert_same,
    deep,
    forced,
    run_plain,
    run_under,
    train,
)

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
