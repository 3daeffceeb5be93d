# SPDX-License-Identifier: Apache-2.0
"""Training over a device that delays, reorders and fails its copies.

Every step's gradients are exact, or the step ends with a clear error and the next one
is exact again; nobody waits for ever, touches memory that a copy is using, or leaves a
copy behind. LOWTIDE_SCHEDULES=20000 tries so many schedules (CI tries few), and
LOWTIDE_SCHEDULES_FROM starts elsewhere, so that the many can be tried in pieces.
"""

import gc
import os
import random
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lowtide.errors import BudgetError, SpillError
from lowtide.runtime import allocator, iterations, steward
from lowtide.runtime.estimate import estimate_need, signature_of
from lowtide.runtime.hostlane import HostLane
from lowtide.runtime.session import Session
from tests.torch.regimes import assert_same
from tests.virtual_lane import VirtualDriver, VirtualLane, Weather

SCHEDULES = int(os.environ.get("LOWTIDE_SCHEDULES", "40"))
FROM = int(os.environ.get("LOWTIDE_SCHEDULES_FROM", "0"))
PROGRAMS = 10
STEPS = 3
WIDTH, ROWS = 64, 160  # 40 KiB an activation: enough to be worth moving
EFFORT = 1 << 17  # of the planner: so few values need little


class Block(nn.Module):
    """One of several kinds of layer, drawn by number."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.kind == 0:
            return y.tanh()
        if self.kind == 1:
            return x + F.relu(y, inplace=True)
        if self.kind == 2:
            return F.dropout(y, 0.2).sigmoid()
        if self.kind == 3:
            return self.norm(y) * x
        if self.kind == 4:
            halves = y.chunk(2, 1)
            return torch.cat([halves[1].exp().clamp(max=2), halves[0].sin()], 1)
        return y.t().softmax(0).t() + x.add(1).mul_(0.5)


def start_from(seed: int) -> None:
    """Seed the CPU's generator alone: to seed all of them takes as long as a step."""
    torch.default_generator.manual_seed(seed)


def build(number: int) -> nn.Sequential:
    start_from(number)
    draw = random.Random(number)
    n_blocks = 2 + number % 3
    return nn.Sequential(*(Block(draw.randrange(6)) for _ in range(n_blocks)))


def one_step(net: nn.Sequential, number: int) -> list[Any]:
    """Compute one step's gradients, from random states of its own."""
    start_from(100 + number)
    for parameter in net.parameters():
        parameter.grad = None
    loss = net(torch.randn(ROWS, WIDTH)).square().mean()
    loss.backward()
    slopes = [p.grad for p in net.parameters() if p.grad is not None]
    return [loss.detach(), *slopes, *net.buffers()]


def steps_of(net: nn.Sequential, session: Session | None = None) -> list[Any]:
    """Run the steps; an error stands for one that ended with it."""
    found: list[Any] = []
    buffers = [b.clone() for b in net.buffers()]
    for number in range(STEPS):
        with torch.no_grad():  # a step that failed has left them half updated
            for buffer, was in zip(net.buffers(), buffers, strict=True):
                buffer.copy_(was)
        try:
            found.append([r.clone() for r in one_step(net, number)])
        except (SpillError, BudgetError) as error:
            found.append(error.with_traceback(None))
        if session is not None:
            with suppress(BudgetError):  # measured on until here; the step is exact
                session.step()
    return found


@cache
def plainly(number: int) -> tuple[list[Any], int]:
    """Run a program with nothing moved; its results, and how far memory grows."""
    net = build(number)
    live = allocator.install().live.value
    with Session("1TiB", policy="keep") as session:
        found = steps_of(net, session)
    assert all(isinstance(step, list) for step in found)
    return found, session.report().peak_bytes - live


def run(number: int, part: float, policy: str, lane: Any) -> list[Any]:
    """Run a program within a part of the memory by which it grows."""
    _, growth = plainly(number)
    net = build(number)
    gc.collect()
    gc.freeze()  # spares the collector, and the session, a look at all that was before
    budget = allocator.install().live.value + int(part * growth)
    session = Session(budget, policy=policy, lane=lane)
    found: list[Any] = []
    with suppress(BudgetError), session:  # as step() does, at the end
        found = steps_of(net, session)
    return found


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    """Plan with little effort, estimate once, and thaw what the runs have frozen."""
    estimates: dict[Any, tuple[int, int]] = {}

    def estimate(func: Any, args: Any, kwargs: Any) -> tuple[int, int]:
        key = signature_of(func, args, kwargs)
        if key not in estimates:
            estimates[key] = estimate_need(func, args, kwargs)
        return estimates[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iterations, "EFFORT", EFFORT)
        patch.setattr(steward, "estimate_need", estimate)
        yield
    gc.unfreeze()


def compare(number: int, found: list[Any], weather: Weather) -> None:
    """Compare what steps computed; errors must have a cause."""
    expected, _ = plainly(number)
    loses = weather.lost_reads or weather.lost_writes or weather.refused
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        if isinstance(other, SpillError):
            assert loses, f"step {index}: {other}"
        elif isinstance(other, BudgetError):  # some of these programs need nearly all
            assert loses or index > 0, f"step {index}: {other}"
        else:
            assert_same(one, other, f"program {number}, step {index}")


schedules = given(
    number=st.integers(0, PROGRAMS - 1),
    lane_seed=st.integers(0, 2**32),
    part=st.floats(0.6, 0.95),
    policy=st.sampled_from(["auto", "swap-only", "random"]),
    weather=st.builds(
        Weather,
        delay=st.sampled_from([0, 5, 30, 120]),
        lost_writes=st.sampled_from([0.0, 0.0, 0.1, 0.7]),
        lost_reads=st.sampled_from([0.0, 0.0, 0.0, 0.05]),
        refused=st.sampled_from([0.0, 0.0, 0.2]),
        room=st.sampled_from([None, None, 200_000]),
        pinning=st.booleans(),
    ),
)
many = settings(
    max_examples=SCHEDULES,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],  # each takes a while: no shrinking
    suppress_health_check=list(HealthCheck),
)


@seed(FROM)
@many
@schedules
def test_any_schedule_of_a_lane(
    number: int, lane_seed: int, part: float, policy: str, weather: Weather
) -> None:
    """torchtune#1867: a tensor deleted while it is copied gives NaN gradients."""
    lane = VirtualLane(lane_seed, weather)
    found = run(number, part, policy, lane)
    compare(number, found, weather)
    assert lane.faults == []


@seed(FROM + 1)
@many
@schedules
def test_any_schedule_of_a_device_above_host_and_disk(
    number: int, lane_seed: int, part: float, policy: str, weather: Weather
) -> None:
    """torchtune#1867, TRL PR#7195: copies on streams of their own race the program."""
    driver = VirtualDriver(lane_seed, weather)
    lane = HostLane(driver, limit_bytes=weather.room, below=None)
    found = run(number, part, policy, lane)
    compare(number, found, weather)
    assert driver.faults == []
    lane.close()
    assert driver.pinned == {}
