# SPDX-License-Identifier: Apache-2.0
"""Time spent deciding is counted: without waits for copies, and planning apart."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lowtide.runtime import iterations, ledger, session, steward
from lowtide.runtime.session import Session
from tests.torch.regimes import deep, run_under, train
from tests.virtual_lane import Job, VirtualLane, Weather

CHOOSING, WAITING, PLANNING = 1.0, 100.0, 10_000.0  # seconds, on a clock of our own


class Clock:
    """Stands still but for what this test lets take time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    for module in (iterations, ledger, session, steward):
        monkeypatch.setattr(module, "perf_counter", found)
    return found


def test_choosing_counts_and_waiting_and_planning_do_not(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"choices": 0, "waits": 0, "plans": 0}

    def wait(job: Job, original: Any = Job.wait) -> float:
        original(job)
        counts["waits"] += 1
        clock.now += WAITING
        return WAITING

    class Frontier(iterations.Frontier):
        def at(self, budget_bytes: int) -> Any:
            counts["plans"] += 1
            clock.now += PLANNING
            return super().at(budget_bytes)

    monkeypatch.setattr(Job, "wait", wait)
    monkeypatch.setattr(iterations, "Frontier", Frontier)
    plain = Session("1TiB", policy="keep")
    run_under(plain, lambda: train(deep(64, 6), 1024, 1))
    counts["plans"], clock.now = 0, 0.0
    lane = VirtualLane(3, Weather(delay=30))
    tight = Session(int(0.7 * plain.report().peak_bytes), policy="swap-only", lane=lane)

    with tight:
        original = tight.scheduler.victims

        def victims(short: int = 0) -> Iterator[tuple[str, Any]]:
            counts["choices"] += 1
            clock.now += CHOOSING
            return original(short)

        monkeypatch.setattr(tight.scheduler, "victims", victims)
        net = deep(64, 6)
        for _ in range(4):
            net(torch.randn(1024, 64)).exp().mean().backward()
    assert min(counts.values()) > 0
    assert tight.ledger.deciding == counts["choices"] * CHOOSING
    assert tight.ledger.exposed == counts["waits"] * WAITING
    assert tight.report().plan_seconds == counts["plans"] * PLANNING
    assert clock.now == (
        tight.ledger.deciding + tight.ledger.exposed + tight.report().plan_seconds
    )
