# SPDX-License-Identifier: Apache-2.0
"""The byte counters are exact, whoever allocated a block and whoever frees it."""

import gc
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lowtide.runtime.allocator import NativeCounter, PythonCounter, adopt, install
from tests.torch.processes import succeeds

PAGED_FROM = 65_536
SIZES = [1, 63, 64, 65, 4095, 65_535, 65_536, 65_537, 1_000_003, 40_000_001]


@pytest.fixture(scope="module")
def counter() -> NativeCounter:
    installed = install()
    assert isinstance(installed, NativeCounter), "the tests need a C++ compiler"
    return installed


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


def block(n_bytes: int) -> torch.Tensor:
    return torch.empty(n_bytes, dtype=torch.uint8)


# Counting.


@pytest.mark.parametrize("n_bytes", SIZES)
def test_live_counts_what_was_asked_for(counter: NativeCounter, n_bytes: int) -> None:
    before = counter.live.value
    tensor = block(n_bytes)
    assert counter.live.value - before == n_bytes
    assert counter.block_bytes(tensor.data_ptr()) == n_bytes
    del tensor
    assert counter.live.value == before


@pytest.mark.parametrize("n_bytes", SIZES)
def test_large_blocks_start_on_a_page(counter: NativeCounter, n_bytes: int) -> None:
    address = block(n_bytes).data_ptr()
    tensors = [block(n_bytes) for _ in range(4)]
    assert all(
        tensor.data_ptr() % (4096 if n_bytes >= PAGED_FROM else 64) == 0
        for tensor in tensors
    )
    assert address


def test_nothing_takes_no_block(counter: NativeCounter) -> None:
    before = counter.blocks_so_far(), counter.live.value
    tensor = block(0)
    assert tensor.data_ptr() == 0
    assert (counter.blocks_so_far(), counter.live.value) == before
    tensor.untyped_storage().resize_(100)
    assert counter.live.value - before[1] == 100
    tensor.untyped_storage().resize_(0)
    assert counter.live.value == before[1]


def test_resizing_a_storage_is_seen(counter: NativeCounter) -> None:
    before = counter.live.value
    storage = block(100_000).untyped_storage()
    for n_bytes in (200_000, 0, 7, 100_000):
        storage.resize_(n_bytes)
        assert counter.live.value - before == n_bytes


def test_peaks_rise_and_are_reset_apart(counter: NativeCounter) -> None:
    base = counter.live.value
    counter.reset_peak()
    counter.op_peak.value = counter.live.value
    del (first := [block(1_000_000)])[:]
    second = block(300_000)
    assert counter.peak.value - base == 1_000_000
    counter.op_peak.value = counter.live.value
    third = block(100_000)
    del third
    assert counter.op_peak.value - base == 400_000
    assert counter.peak.value - base == 1_000_000
    counter.reset_peak()
    assert counter.peak.value - base == 300_000
    assert not first
    del second


def test_workspace_inside_operators_is_seen(counter: NativeCounter) -> None:
    x = torch.randn(200, 200)
    before = counter.live.value
    counter.op_peak.value = before
    outputs = torch.linalg.svd(x)
    returned = sum(output.untyped_storage().nbytes() for output in outputs)
    assert counter.live.value - before == returned
    assert counter.op_peak.value - before > returned
    assert counter.sees_workspace


def test_adjusted_bytes_count_like_others(counter: NativeCounter) -> None:
    before = counter.live.value
    counter.reset_peak()
    counter.adjust(12_345)
    assert counter.live.value - before == 12_345
    assert counter.peak.value - before == 12_345
    counter.adjust(-12_345)
    assert counter.live.value == before


def test_foreign_memory_is_not_ours(counter: NativeCounter) -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.ones(100_000, dtype=numpy.uint8)
    before = counter.live.value
    tensor = torch.from_numpy(array)
    assert counter.live.value == before
    assert counter.block_bytes(tensor.data_ptr()) is None


def test_installing_again_changes_nothing(counter: NativeCounter) -> None:
    assert install() is counter
    assert counter.is_current()


def test_the_profiler_counts_the_same(counter: NativeCounter) -> None:
    x = torch.randn(8, 16, 32, 32)
    layer = torch.nn.Conv2d(16, 32, 3)
    layer(x).sum().backward()  # what is made once is made now
    base = counter.live.value
    counter.reset_peak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        y = layer(x).relu()
        y.sum().backward()
        del y
    live, peak = counter.live.value - base, counter.peak.value - base
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in results.events() if event.name() == "[memory]"]
    assert events
    seen = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        seen += event.nbytes()
        highest = max(highest, seen)
    assert (seen, highest) == (live, peak)


def test_running_out_of_memory_says_what_torch_says(counter: NativeCounter) -> None:
    before = counter.live.value
    message = "DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    with pytest.raises(RuntimeError, match=message):
        block(1 << 50)
    assert counter.live.value == before


def test_threads_lose_no_byte(counter: NativeCounter) -> None:
    gc.collect()
    before = counter.live.value
    handed: list[torch.Tensor] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(1, 100_000, (3000,), generator=generator).tolist()
        mine = []
        for n_bytes in sizes:
            mine.append(block(n_bytes))
            if len(mine) > 50:  # freed here, or by whoever takes it
                handed.append(mine.pop(0))
                del mine[n_bytes % len(mine)]
            if len(handed) > 100:
                handed.pop()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    handed.clear()
    assert counter.live.value == before


def test_many_blocks_at_once_are_known_apart(counter: NativeCounter) -> None:
    before = counter.live.value
    tensors = [block(i % 200 + 1) for i in range(60_000)]
    assert counter.live.value - before == sum(t.numel() for t in tensors)
    del tensors[::2]
    assert counter.live.value - before == sum(t.numel() for t in tensors)
    assert all(counter.block_bytes(t.data_ptr()) == t.numel() for t in tensors[::97])
    tensors.clear()
    assert counter.live.value == before


# What existed before, forks and exits: each in a process of its own.


def test_tensors_from_before_are_taken_over() -> None:
    succeeds(
        """
        import numpy, torch
        from lowtide.runtime.allocator import adopt, install
        layer = torch.nn.Linear(1000, 1000)
        layer.weight.grad = None
        layer(torch.ones(1, 1000)).sum().backward()   # gradients: C++ holds them
        view = torch.zeros(100_000)[10:]
        pair = torch.eye(50).to_sparse()
        foreign = torch.from_numpy(numpy.ones(10_000))
        shared = torch.zeros(10_000).share_memory_()
        empty = torch.empty(0)
        counter = install()
        assert counter.live.value == 0
        params = 2 * 4 * (1000 * 1000 + 1000)
        expected = params + 400_000 + 50 * (2 * 8 + 4)
        found = adopt(counter)
        assert found == expected, (found, expected)
        assert adopt(counter) == 0
        assert counter.live.value == counter.peak.value == expected
        view.untyped_storage().resize_(0)
        assert counter.live.value == expected - 400_000
        view.untyped_storage().resize_(8)
        assert counter.live.value == expected - 400_000 + 8
        del view, pair
        assert counter.live.value == params
        empty.untyped_storage().resize_(70_000)
        assert counter.live.value == params + 70_000
        del layer, empty, foreign, shared
        assert counter.live.value == 0, counter.live.value
        """
    )


def test_blocks_may_be_freed_by_the_other_allocator() -> None:
    # oneDNN keeps buffers of its own and frees them through the current allocator.
    succeeds(
        """
        import torch
        from lowtide.runtime.allocator import install
        def train():
            x = torch.randn(4, 8, 32, 32, requires_grad=True)
            y = torch.nn.Conv2d(8, 16, 3)(x)
            z = torch.nn.Linear(30, 16)(torch.nn.LSTM(30, 30)(y.flatten(0, 1))[0])
            z.sum().backward()
            return x, y, z
        before = train()
        counter = install()
        during = train()
        del before, during
        import gc
        gc.collect()
        assert 0 <= counter.live.value < 1_000_000, counter.live.value
        """
    )


def test_a_fork_keeps_counting_while_threads_allocate() -> None:
    succeeds(
        """
        import os, threading, warnings
        import torch
        from lowtide.runtime.allocator import install
        warnings.simplefilter("ignore")
        counter = install()
        ended = threading.Event()
        def churn():
            while not ended.is_set():
                torch.empty(1000); torch.empty(100_000)
        threads = [threading.Thread(target=churn) for _ in range(2)]
        for thread in threads: thread.start()
        for _ in range(40):
            child = os.fork()
            if child == 0:
                before = counter.live.value
                kept = [torch.empty(n) for n in range(1, 30_000, 1000)]
                good = counter.live.value - before == 4 * sum(map(len, kept))
                os._exit(0 if good else 1)
            assert os.waitpid(child, 0)[1] == 0
        ended.set()
        for thread in threads: thread.join()
        """
    )


def test_tensors_may_outlive_everything() -> None:
    succeeds(
        """
        import atexit, torch
        from lowtide.runtime.allocator import install
        early = torch.empty(100_000)
        install()
        kept = [torch.empty(n) for n in (10, 100_000)]
        torch.lowtide_keeps = kept
        atexit.register(lambda: torch.empty(1_000_000))
        """
    )


# The Python counter.


def test_python_counts_storages_until_they_die() -> None:
    counter = PythonCounter()
    tensor = torch.empty(1000)
    assert counter.track(tensor.untyped_storage()) == 4000
    assert counter.track(tensor[10:].untyped_storage()) == 0
    other = torch.empty(10)
    counter.track(other.untyped_storage())
    assert counter.live.value == counter.peak.value == counter.op_peak.value == 4040
    view = tensor[5:]
    del tensor
    assert counter.live.value == 4040
    del view
    assert counter.live.value == 40
    assert counter.peak.value == 4040
    counter.reset_peak()
    assert counter.peak.value == 40
    counter.adjust(60)
    assert counter.live.value == counter.peak.value == 100
    del other
    assert counter.live.value == 60


def test_python_sees_a_resize_when_told_again() -> None:
    counter = PythonCounter()
    storage = torch.empty(1000).untyped_storage()
    counter.track(storage)
    storage.resize_(100)
    assert counter.track(storage) == -3900
    assert counter.live.value == 100
    del storage
    assert counter.live.value == 0


def test_python_is_not_fooled_by_addresses_that_return() -> None:
    counter = PythonCounter()
    for n in range(1, 2000):
        tensor = torch.empty(n % 7 + 1)
        assert counter.track(tensor.untyped_storage()) == 4 * tensor.numel()
        assert counter.live.value == 4 * tensor.numel()
    assert counter.peak.value <= 2 * 4 * 7


def test_python_counts_from_several_threads() -> None:
    counter = PythonCounter()

    def work() -> None:
        for n in range(1, 2000):
            counter.track(torch.empty(n).untyped_storage())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.live.value == 0


def test_python_adopts_what_is_torchs_own() -> None:
    counter = PythonCounter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
        base = adopt(counter)
        tensor = torch.empty(100_000)
        shared = torch.empty(100_000).share_memory_()
        assert adopt(counter) == 400_000
    assert counter.live.value == base + 400_000
    assert shared.is_shared()
    del tensor
    assert counter.live.value == base
