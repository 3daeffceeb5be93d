# SPDX-License-Identifier: Apache-2.0
"""The arena hands out no byte twice, keeps no more than its limit, changes no bit."""

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import LowtideError
from lowtide.runtime import shim
from lowtide.runtime.allocator import BlockLog, NativeCounter, install
from lowtide.runtime.arena import PAGED_FROM, Arena, Pool, cycle_of
from lowtide.runtime.session import Session
from lowtide.trace import BLOCKS
from tests.torch.processes import succeeds

MIB = 1 << 20


@pytest.fixture(scope="module")
def counter() -> NativeCounter:
    installed = install()
    assert isinstance(installed, NativeCounter), "the tests need a C++ compiler"
    return installed


@pytest.fixture
def arena(counter: NativeCounter) -> Iterator[Arena]:
    """Watch over the arena: in every test, freed blocks are filled and checked."""
    arena = Arena(counter)
    counter.trim()
    arena.reset_footprint()
    before = arena.figures.damaged
    arena.set_debug(True)
    yield arena
    arena.set_debug(False)
    counter.keep(None)
    assert arena.figures.damaged == before


@pytest.fixture
def pool(arena: Arena) -> Iterator[Pool]:
    pool = Pool(arena.counter)
    yield pool
    pool.close()


def block(n_bytes: int) -> Tensor:
    return torch.empty(n_bytes, dtype=torch.uint8)


# The arena alone, in C++.


def test_no_overlap_whatever_threads_and_plans_do(tmp_path: Path) -> None:
    source = Path(__file__).with_name("arena_stress.cc")
    cpp = shim._source().parent
    program = tmp_path / "stress"
    subprocess.run(
        [
            *(*shim._compiler(), "-std=c++20", "-O1", "-pthread", f"-I{cpp}"),
            *(str(source), *(str(cpp / name) for name in shim._UNITS)),
            *("-o", str(program)),
        ],
        check=True,
    )
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "no overlap\n")


# The log of blocks.


def test_the_log_tells_sizes_events_and_operators(counter: NativeCounter) -> None:
    early = block(1000)
    with BlockLog(counter) as log:
        counter.op.value = 3
        small = block(10)
        large = block(MIB + 1)
        counter.op.value = 4
        del small, early
        assert log.events == 3
        kept = block(7)
        counter.op.value = 0
    del large
    assert log.blocks.dtype == BLOCKS
    assert log.blocks.tolist() == [
        (10, 0, 2, 3, 4),
        (MIB + 1, 1, -1, 3, -1),
        (7, 3, -1, 4, -1),
    ]
    with BlockLog(counter) as log:
        del kept  # of a former log
        assert log.events == 0


def test_one_log_records_at_a_time(counter: NativeCounter) -> None:
    with BlockLog(counter):
        with pytest.raises(LowtideError, match="only one log at a time"):
            BlockLog(counter).__enter__()
        assert not BlockLog(counter).start()
    with BlockLog(counter):
        pass


def test_the_log_misses_nothing_from_threads(counter: NativeCounter) -> None:
    def work() -> None:
        for n in range(2000):
            block(n % 100 * 1000 + 1)

    with BlockLog(counter) as log:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    blocks = log.blocks
    assert len(blocks) == 6000
    events = sorted([*blocks["start"].tolist(), *blocks["stop"].tolist()])
    assert events == list(range(12_000))
    assert (blocks["start"] < blocks["stop"]).all()


# What is kept.


def test_freed_pages_are_kept_and_used_again(arena: Arena) -> None:
    first = block(10 * MIB)
    address = first.data_ptr()
    fresh = arena.figures.fresh
    del first
    parts = [block(3 * MIB), block(3 * MIB)]
    assert address <= parts[0].data_ptr() < address + 10 * MIB
    assert arena.figures.fresh == fresh
    assert arena.figures.kept >= 4 * MIB
    del parts


def test_kept_pages_stay_within_the_peak_and_the_limit(
    arena: Arena, counter: NativeCounter
) -> None:
    base = arena.figures.live
    hole, wall = block(80 * MIB), block(MIB)
    del hole
    large = block(90 * MIB)  # does not fit into the hole
    figures = arena.figures
    assert figures.live - base == 91 * MIB
    assert figures.live + figures.kept <= figures.footprint
    assert figures.footprint == pytest.approx(base + 91 * MIB, abs=9 * MIB)
    del large
    assert arena.figures.kept == pytest.approx(90 * MIB, abs=9 * MIB)
    counter.keep(counter.live.value + 4 * MIB)
    assert arena.figures.kept <= 4 * MIB
    assert counter.trim() <= 4 * MIB
    assert arena.figures.kept == 0
    del wall


def test_the_system_sees_what_is_counted(arena: Arena, counter: NativeCounter) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    tensor = torch.ones(100 * MIB, dtype=torch.uint8)
    assert resident() - before == pytest.approx(100 * MIB, abs=8 * MIB)
    del tensor
    assert resident() - before == pytest.approx(100 * MIB, abs=8 * MIB)
    counter.trim()
    assert resident() - before == pytest.approx(0, abs=8 * MIB)


# Plans.


def test_requests_are_known_by_operator_and_order() -> None:
    log = [
        (PAGED_FROM, 10, 14, 1, 2),  # born before the cycle
        (2 * PAGED_FROM, 20, 29, 1, 2),
        (100, 21, 22, 1, 1),  # does not lie in the arena
        (PAGED_FROM + 1, 23, 45, 3, 1),  # crosses into the next cycle
        (PAGED_FROM, 25, -1, 3, -1),  # stays
        (PAGED_FROM, 31, 32, 1, 1),  # of the next cycle
    ]
    cycle = cycle_of(np.array(log, BLOCKS), 20, 30)
    assert cycle is not None
    assert cycle.period == 10
    assert cycle.first.tolist() == [0, 0, 1, 1, 3]
    assert cycle.pages.tolist() == [32, 17, 0]
    assert cycle.born.tolist() == [0, 3, 5]
    assert cycle.dead.tolist() == [9, 23, 6]  # at most two cycles from birth


def one_cycle(sizes: list[int], carried: list[Tensor]) -> None:
    """Allocate like a layer after the other, then free in the opposite order."""
    saved = []
    for size in sizes:
        saved.append(block(size))
        block(size // 2 + PAGED_FROM)
    carried[:] = [block(max(sizes))]  # dies in the next cycle
    while saved:
        saved.pop()


def test_a_cycle_that_comes_again_gets_its_places(pool: Pool) -> None:
    carried: list[Tensor] = []
    sizes = [MIB, 3 * MIB, 2 * MIB, 5 * MIB]
    for _ in range(8):
        pool.boundary()
        one_cycle(sizes, carried)
    figures = pool.arena.figures
    assert figures.requests == figures.hits == 9
    fresh = figures.fresh
    (plan,) = pool.plans.values()
    assert plan.height == plan.bound
    for _ in range(4):
        pool.boundary()
        one_cycle(sizes, carried)
    assert pool.arena.figures.fresh == fresh


def test_one_plan_serves_changing_shapes(pool: Pool) -> None:
    carried: list[Tensor] = []
    sizes = [MIB, 3 * MIB, 2 * MIB, 5 * MIB]
    for _ in range(5):
        pool.boundary()
        one_cycle(sizes, carried)
    for scale in (7, 5, 13, 11, 6):
        pool.boundary()
        one_cycle([size * scale // 10 for size in sizes], carried)
    figures = pool.arena.figures
    assert len(pool.plans) == 1
    assert figures.requests == figures.hits == 9
    # The largest came third: the plan has grown at the boundary after it.
    (plan,) = pool.plans.values()
    assert plan.cycle.pages.max() == 5 * MIB * 13 // 10 // 4096


def test_alternating_cycles_have_a_plan_each(pool: Pool) -> None:
    carried: list[Tensor] = []
    for i in range(16):
        pool.boundary()
        one_cycle([MIB, 2 * MIB] if i % 2 else [3 * MIB] * 5, carried)
    assert len(pool.plans) == 2
    hits = 0
    for i in range(2):
        pool.boundary()
        one_cycle([MIB, 2 * MIB] if i % 2 else [3 * MIB] * 5, carried)
        hits += pool.arena.figures.hits
    assert hits >= 12  # of 16: what crosses from one kind to the other may collide


def test_a_block_in_the_way_costs_no_byte(pool: Pool) -> None:
    carried: list[Tensor] = []
    sizes = [MIB, 3 * MIB, 2 * MIB, 5 * MIB]
    for _ in range(6):
        pool.boundary()
        one_cycle(sizes, carried)
    pool.arena.begin(None)
    squatters = [block(MIB) for _ in range(6)]
    for i, squatter in enumerate(squatters):
        squatter.fill_(i)
    for _ in range(10):
        pool.boundary()
        one_cycle(sizes, carried)
    assert all((s == i).all() for i, s in enumerate(squatters))
    assert pool.arena.figures.hits == 9  # the zone has moved


# Trainings, bit for bit.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1) for i in range(4)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(4))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = torch.relu(norm(convolution(x)))
        return self.head(x.mean((2, 3)))


class Failed(Exception):
    pass


def train(boundary: Callable[[], None], *, steps: int = 14) -> list[Tensor]:
    """Train with changing shapes, evaluations, errors in forward, and a busy thread."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    ended = threading.Event()

    def churn() -> None:
        n = 0
        while not ended.is_set():
            n = (n * 5 + 7) % 97
            tensor = torch.full((n * 10_000 + 1,), float(n))
            assert bool((tensor == n).all())

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for step in range(steps):
            boundary()
            size = 64 - step % 4 * 8 if step > 6 else 64
            x = torch.randn(4, 3, size, size)
            optimizer.zero_grad()
            if step == 9:
                with pytest.raises(Failed):
                    fail_in_the_middle(net, x)
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            if step % 5 == 4:
                net.eval()
                with torch.no_grad():
                    net(torch.randn(8, 3, 64, 64))
                net.train()
    finally:
        ended.set()
        thread.join()
    return [p.detach().clone() for p in net.parameters()]


def fail_in_the_middle(net: Net, x: Tensor) -> None:
    net(x).sum().backward(retain_graph=True)
    raise Failed


def test_training_is_the_same_to_the_last_bit(pool: Pool) -> None:
    plain = train(lambda: None)
    hits = []

    def boundary() -> None:
        hits.append(pool.arena.figures.hits)
        pool.boundary()

    pooled = train(boundary)
    assert all(torch.equal(a, b) for a, b in zip(plain, pooled, strict=True))
    assert max(hits) > 40  # nearly all of a step


def few_steps(session: Session | None, *, steps: int = 9) -> list[Tensor]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with session if session is not None else nullcontext():
        for _ in range(steps):
            optimizer.zero_grad()
            net(torch.randn(8, 3, 64, 64)).square().mean().backward()
            optimizer.step()
        if session is not None and session.pool is not None:
            figures = session.pool.arena.figures
            assert figures.hits >= 0.8 * figures.requests > 0
    return [p.detach().clone() for p in net.parameters()]


def test_a_session_plans_and_stays_within_its_budget(
    arena: Arena, counter: NativeCounter
) -> None:
    counter.reset_peak()
    base = counter.live.value
    plain = few_steps(None)
    peak = counter.peak.value - base
    budget = base + int(0.7 * peak)
    for session in (
        Session("1GiB", pool=True),
        Session(budget, pool=True),
        Session(budget),
    ):
        counter.trim()
        trained = few_steps(session)
        assert all(torch.equal(a, b) for a, b in zip(plain, trained, strict=True))
        assert (session.pool is not None) == session.pooled


def test_what_the_system_sees_stays_within_the_budget(
    arena: Arena, counter: NativeCounter
) -> None:
    few_steps(None)
    counter.reset_peak()
    base = counter.live.value
    few_steps(None)
    session = Session(base + int(0.7 * (counter.peak.value - base)), pool=True)
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with session:
        for step in range(9):
            if step == 3:
                arena.reset_footprint()
            optimizer.zero_grad()
            net(torch.randn(8, 3, 64, 64)).square().mean().backward()
            optimizer.step()
        figures = arena.figures
    assert session.report().swapped_bytes + session.report().recomputed_bytes > 0
    # Blocks span whole pages; the budget counts what was asked for.
    assert figures.footprint <= session.budget + 0.01 * figures.most_asked


def test_a_fork_in_the_middle_of_a_cycle_goes_on() -> None:
    succeeds(
        """
        import os, warnings
        import torch
        from lowtide.runtime.allocator import install
        from lowtide.runtime.arena import Pool
        warnings.simplefilter("ignore")
        pool = Pool(install())
        def cycle():
            pool.boundary()
            kept = [torch.full((n * 50_000,), n) for n in range(1, 6)]
            return all(bool((t == n).all()) for n, t in enumerate(kept, 1))
        assert all(cycle() for _ in range(5))
        child = os.fork()
        if child == 0:
            os._exit(0 if all(cycle() for _ in range(5)) else 1)
        assert all(cycle() for _ in range(5))
        assert os.waitpid(child, 0)[1] == 0
        """
    )


def test_without_addresses_malloc_serves() -> None:
    succeeds(
        """
        import resource, torch
        torch.ones(10) @ torch.ones(10)
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        from lowtide.runtime.allocator import install
        from lowtide.runtime.arena import Arena
        counter = install()
        tensor = torch.ones(1 << 20)
        assert counter.live.value == 4 << 20
        assert tensor.data_ptr() % 4096 == 0
        assert Arena(counter).figures.live == 0
        del tensor
        assert counter.live.value == 0
        """
    )
