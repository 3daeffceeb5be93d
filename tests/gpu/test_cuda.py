# SPDX-License-Identifier: Apache-2.0
"""On a CUDA device: the adaptor's copies, its counter, and training under budgets."""

from typing import Any

import pytest
import torch
from torch import nn

from lowtide.runtime.cuda import AcceleratorDriver, counter_of
from lowtide.runtime.hostlane import HostLane
from lowtide.runtime.session import Session
from tests.compare import describe_difference, seed_everything

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device"
)

MIB = 1 << 20


def train(steps: int = 4, rows: int = 4096) -> list[Any]:
    seed_everything(1)
    layers: list[nn.Module] = []
    for _ in range(10):
        layers += [nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1), nn.BatchNorm1d(256)]
    net = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.Adam(net.parameters())
    losses = []
    for _ in range(steps):
        loss = net(torch.randn(rows, 256, device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    state = [*net.parameters(), *net.buffers(), *(p.grad for p in net.parameters())]
    return [*losses, *(t.detach().cpu() for t in state), torch.cuda.get_rng_state()]


def same(expected: list[Any], found: list[Any]) -> None:
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert describe_difference(one, other) is None


def test_copies_return_whatever_is_queued_before_and_behind() -> None:
    lane = HostLane(AcceleratorDriver("cuda:0"), limit_bytes=None, below=None)
    x = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    heavy = torch.randn(4096, 4096, device="cuda")
    for value in range(1, 9):
        for _ in range(5):
            heavy = (heavy @ heavy).clamp(-1, 1)
        x.fill_(value)  # queued behind all that
        copy = lane.write(x.data_ptr(), x.nbytes)
        copy.wait()
        x.fill_(0)
        target = torch.empty_like(x)
        read = lane.read(copy, target.data_ptr())
        lane.free(copy)
        read.wait()
        assert bool((target == value).all())
    assert lane.slabs.pins == 1
    assert lane.slabs.refused is None
    assert lane.write_bandwidth > 1e9
    assert lane.used_bytes == 0
    lane.close()


def test_the_counter_agrees_with_torch() -> None:
    counter = counter_of("cuda:0")
    before = counter.live.value
    x = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
    assert counter.live.value - before == 32 * MIB
    counter.op_peak.value = counter.live.value
    y = torch.empty(16 * MIB, dtype=torch.uint8, device="cuda")
    del y
    assert counter.op_peak.value - before == 48 * MIB
    assert counter.peak.value >= counter.op_peak.value
    del x
    assert counter.live.value == before


@pytest.mark.parametrize("policy", ["swap-only", "recompute-only", "random"])
def test_everything_released_at_once(policy: str) -> None:
    expected = train(2, 512)
    session = Session("8GiB", device="cuda", policy=policy, force=True)
    with session:
        found = train(2, 512)
    same(expected, found)
    lane = session.lane
    assert session.replayer.bytes + (lane.read_bytes if lane else 0) > 0


@pytest.mark.parametrize("part", [0.75, 0.5])
def test_a_budget_is_kept_and_exact(part: float) -> None:
    expected = train()
    plain = Session("8GiB", device="cuda", policy="keep")
    with plain:
        train()
    session = Session(int(part * plain.report().peak_bytes), device="cuda")
    with session:
        found = train()
    same(expected, found)
    report = session.report()
    assert report.peak_bytes <= report.budget_bytes
    assert report.swapped_bytes + report.recomputed_bytes > 0


def test_host_memory_and_then_the_disk() -> None:
    expected = train(2, 2048)
    session = Session(
        "8GiB", device="cuda", policy="swap-only", force=True, host="4MiB"
    )
    with session:
        found = train(2, 2048)
    same(expected, found)
    lane = session.lane
    assert isinstance(lane, HostLane)
    assert lane.below is not None
    assert lane.below.written_bytes > 0


def test_a_real_out_of_memory_is_given_room() -> None:
    total = torch.cuda.mem_get_info()[1]
    expected = train()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_allocated() + 160 * MIB) / total
    )
    try:
        with Session("64GiB", device="cuda"):  # more than there is, on purpose
            found = train()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    same(expected, found)
