# SPDX-License-Identifier: Apache-2.0
"""The device adaptor, as far as it goes without a device: a pretended one."""

import types
from time import sleep
from typing import Any

import pytest
import torch

from lowtide.errors import LowtideError, SizeError
from lowtide.runtime import cuda, devices, replay
from lowtide.runtime.cuda import (
    AcceleratorClock,
    AcceleratorCounter,
    AcceleratorDriver,
)
from lowtide.runtime.hostlane import HostLane
from lowtide.runtime.session import Session
from lowtide.runtime.streams import Streams
from tests.pure.blocks import Block
from tests.torch.regimes import (
    assert_same,
    deep,
    forced,
    moved_bytes,
    run_plain,
    run_under,
    train,
)


class Event:
    """An event that is reached at once."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.stream: Any = None

    def record(self, stream: Any) -> None:
        self.stream = stream

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "Event") -> float:
        return 2.0


class Stream:
    """A stream that notes what it waits for."""

    def __init__(self, device: Any) -> None:
        self.waited: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that torch's module of a device is one whose memory is the CPU's."""
    module = types.SimpleNamespace(
        Stream=Stream, Event=Event, stream=lambda s: s, now=Stream(None)
    )
    module.current_stream = lambda device: module.now
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def test_copies_go_through_torch(fake: Any) -> None:
    driver = AcceleratorDriver("cpu")
    lane = HostLane(driver, limit_bytes=None, below=None)
    block, target = Block(70_001, fill=3), Block(70_001)
    copy = lane.write(block.address, 70_001)
    assert lane.read(copy, target.address).wait() >= 0
    assert target.content() == block.content()
    assert lane.write_bandwidth < 1e9  # two milliseconds were told
    assert "not supported for cpu" in lane.remarks()[0]
    nothing = lane.write(0, 0)
    lane.read(nothing, 0).wait()
    lane.close()


def test_the_current_stream_is_asked_for_each_time(fake: Any) -> None:
    """TRL PR#7195: a stream that was current once is not any more."""
    driver = AcceleratorDriver("cpu")
    lane = HostLane(driver, limit_bytes=None, below=None)
    block = Block(4096, fill=1)
    for _ in range(2):
        fake.now = Stream(None)
        copy = lane.write(block.address, 4096)
        assert driver._out.waited[-1].stream is fake.now
        fake.now = Stream(None)
        lane.read(copy, Block(4096).address)
        assert fake.now in [event.stream for event in driver._in.waited]
    lane.close()


class Figures:
    """Figures such as torch keeps: what is live, and one peak."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    def allocate(self, n_bytes: int) -> None:
        self.live += n_bytes
        self.peak = max(self.peak, self.live)

    def read(self) -> tuple[int, int]:
        return self.live, self.peak

    def reset(self) -> None:
        self.peak = self.live


def test_one_peak_serves_for_two() -> None:
    figures = Figures()
    figures.allocate(100)
    counter = AcceleratorCounter(figures.read, figures.reset)
    assert counter.live.value == counter.peak.value == 100
    figures.allocate(50)
    figures.allocate(-50)
    counter.op_peak.value = counter.live.value
    assert (counter.peak.value, counter.op_peak.value) == (150, 100)
    figures.allocate(20)
    figures.allocate(-20)
    assert (counter.peak.value, counter.op_peak.value) == (150, 120)
    counter.reset_peak()
    assert (counter.peak.value, counter.op_peak.value) == (100, 120)
    figures.allocate(10)
    assert (counter.peak.value, counter.op_peak.value) == (110, 120)


def test_operators_are_timed_until_their_time_is_known() -> None:
    waits: list[int] = []
    clock = AcceleratorClock(lambda: waits.append(1))

    def time(func: str, args: Any, seconds: float) -> float:
        return clock.end(clock.begin(func, args), seconds)

    x = torch.zeros(4)
    assert time("exp", (x,), 500.0) >= 500
    assert 200 <= time("exp", (x, None), 200.0) < 500
    assert 200 <= time("exp", (x,), 9e9) < 500
    assert len(waits) == 4  # before and behind
    time("exp", (torch.zeros(5),), 0.1)
    time("sum_", (x,), 0.1)
    assert len(waits) == 8
    time("zeros", ([3],), 0.1)
    time("zeros", ([4],), 0.1)
    assert len(waits) == 12


def test_what_is_queued_before_an_operator_is_not_its_time() -> None:
    queued = [1]

    def synchronize() -> None:
        while queued:
            sleep(0.02)
            queued.pop()

    clock = AcceleratorClock(synchronize)
    assert clock.end(clock.begin("exp", (torch.zeros(4),)), 0.0) < 0.02


def test_figures_of_devices_other_than_cuda(fake: Any) -> None:
    fake.memory_allocated = lambda device: 5
    fake.max_memory_allocated = lambda device: 7
    resets: list[Any] = []
    fake.reset_peak_memory_stats = resets.append
    counter = cuda.counter_of("xpu:0")
    assert counter.live.value == 5
    counter.op_peak.value = 5
    assert counter.op_peak.value == 7
    assert resets


def test_a_refused_pin_leaves_no_error_for_the_program(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA reports an error a second time, at the next launch of a kernel."""
    pending: list[str] = []

    def register(address: int, n_bytes: int, flags: int) -> int:
        pending.append("operation not supported")
        return 801

    def launch(device: Any) -> None:
        if pending:
            raise RuntimeError(pending.pop())

    cudart = types.SimpleNamespace(
        cudaHostRegister=register,
        cudaGetErrorString=lambda status: f"error {status}",
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(cuda, "launch", launch)
    driver = AcceleratorDriver("cuda:0")
    assert driver.pin(0, 4096) == "error 801"
    assert pending == []


def test_an_allocator_without_figures_is_an_error(fake: Any) -> None:
    """pytorch#98481: a pluggable allocator's statistics raise."""

    def none(device: Any) -> int:
        raise RuntimeError("does not yet support getDeviceStats")

    fake.memory_allocated = none
    with pytest.raises(LowtideError, match="not a pluggable one"):
        devices.install_counter("xpu:0")


def test_a_device_that_is_not_there_is_named() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has one")
    for device in ("cuda", "cuda:3", "xpu"):
        with pytest.raises(LowtideError, match="sees no accelerator"):
            Session("1GiB", device=device)
    with pytest.raises(LowtideError, match="unknown to torch"):
        Session("1GiB", device="abacus")
    assert Session("1GiB", device="cpu").device_type == "cpu"


def test_a_device_is_given_its_index(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.current_device = lambda: 1
    fake.mem_get_info = lambda device: (600, 1000)
    fake.memory_reserved = lambda device: 300
    fake.memory_allocated = lambda device: 100
    monkeypatch.setattr(
        torch, "accelerator", types.SimpleNamespace(
            current_accelerator=lambda: torch.device("cuda"),
            is_available=lambda: True,
            device_count=lambda: 2,
        ),
    )  # fmt: skip
    assert devices.resolve_device("cuda") == "cuda:1"
    assert devices.resolve_device("cuda:0") == "cuda:0"
    with pytest.raises(LowtideError, match="has 2 of cuda"):
        devices.resolve_device("cuda:2")
    with pytest.raises(LowtideError, match="sees 'cuda' and no other"):
        devices.resolve_device("xpu")
    assert devices.resolve_budget("50%", "cuda:1") == 500
    assert devices.resolve_budget("auto", "cuda:1") == 720


def tiers(**changes: Any) -> Any:
    given = {"host": "auto", "disk": "auto", "disk_writes": None, "directory": None}
    return devices.resolve_tiers(device="cuda:0", **{**given, **changes})


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"])
def test_ranks_share_the_machine_fairly(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in devices._RANKS:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setattr(devices, "total_memory", lambda: 8000)
    monkeypatch.setattr(devices, "free_memory", lambda: 4000)
    usage = types.SimpleNamespace(total=80_000, free=40_000)
    monkeypatch.setattr(devices, "_disk_usage", lambda directory: usage)
    assert devices.resolve_budget("50%") == 4000
    assert tiers().host_bytes == 3600
    assert tiers().disk_bytes is None
    monkeypatch.setenv(name, "4")
    assert devices.resolve_budget("50%") == 1000
    assert devices.resolve_budget("auto") == 900
    assert devices.resolve_budget(5000) == 5000
    assert tiers().host_bytes == 900
    assert tiers(host="25%").host_bytes == 500
    assert tiers(host=123).host_bytes == 123
    assert tiers().disk_bytes == 9000
    assert tiers(disk="50%").disk_bytes == 10_000
    assert tiers(disk=0).disk_bytes == 0
    assert tiers(disk_writes="1KiB").disk_writes == 1024


def test_a_malformed_limit_is_refused() -> None:
    for wrong in ({"disk_writes": "many"}, {"host": "-1"}, {"disk": "1 parsec"}):
        with pytest.raises(SizeError):
            Session("1GiB", **wrong)  # type: ignore[arg-type]


def test_the_disk_is_that_of_the_directory(tmp_path: Any) -> None:
    usage = devices._disk_usage(tmp_path / "not" / "yet")
    assert usage.total == devices._disk_usage(tmp_path).total > 0


# Programs on several streams.


class Streamed(Streams):
    """Streams whose device is this process; notes what is asked of it."""

    def __init__(self, module: Any) -> None:
        super().__init__("cpu")
        self.module = module
        self.kept: list[int] = []
        self.handed: list[int] = []

    def keep(self, storage: torch.UntypedStorage) -> None:
        self.kept.append(storage.data_ptr())

    def hand_over(self, storage: torch.UntypedStorage) -> None:
        self.handed.append(storage.data_ptr())
        super().hand_over(storage)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """List the streams that torch's allocator is told of."""
    found: list[Any] = []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: found.append(stream)
    )
    return found


def test_copies_wait_for_every_stream_that_computes(fake: Any) -> None:
    """A tensor made on one stream is copied while another is current."""
    driver = AcceleratorDriver("cpu")
    first, second = fake.now, Stream(None)
    driver.streams.look()
    fake.now = second
    lane = HostLane(driver, limit_bytes=None, below=None)
    lane.write(Block(4096).address, 4096)
    waited = [event.stream for event in driver._out.waited]
    assert waited == [first, second]
    lane.close()


def test_what_is_made_again_is_waited_for_on_other_streams(
    fake: Any, recorded: list[Any]
) -> None:
    storage = torch.zeros(8).untyped_storage()
    streams = Streams("cpu")
    streams.hand_over(storage)
    assert recorded == []  # as long as there is one alone
    first, second = fake.now, Stream(None)
    assert first.waited == []
    fake.now = second
    streams.hand_over(storage)
    assert [event.stream for event in second.waited] == [first]
    assert first.waited == []
    assert recorded == [first, second]


@pytest.mark.parametrize("policy", ["swap-only", "recompute-only"])
def test_memory_that_goes_and_returns_is_told_to_the_allocator(
    fake: Any, policy: str
) -> None:
    session = forced(policy)
    with session:
        streams = session.ledger.streams = Streamed(fake)
        train(deep(16, 4), 16, 2)
    assert moved_bytes(session) > 0
    assert streams.kept
    assert streams.handed


def test_a_graph_that_is_captured_is_left_alone(fake: Any) -> None:
    """Nothing may be waited for in a capture, and nothing in it runs at once."""
    fake.is_current_stream_capturing = lambda: True
    with forced("swap-only") as session:
        session.recorder.captured = Streams("cpu").capturing
        before = session.recorder.index
        x = torch.randn(64, requires_grad=True)
        x.exp().sin().sum().backward()
        assert session.recorder.index == before
        fake.is_current_stream_capturing = lambda: False
        session.recorder.captured = Streams("cpu").capturing
        (x * 2).exp().sin().sum().backward()
        assert session.recorder.index > before
    assert moved_bytes(session) > 0


# Out of memory, despite the count.


@pytest.mark.parametrize("policy", ["swap-only", "recompute-only"])
def test_what_returns_is_given_room_where_the_device_has_none(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Fragments, or others on the device, leave less than the count says."""
    expected = run_plain(lambda: train(deep(16, 4), 16, 2))
    empty, run_on = torch.empty, replay._run_on
    refusals: list[str] = []

    def starved(real: Any) -> Any:
        def sometimes(*args: Any, **kwargs: Any) -> Any:
            refuse = len(refusals) % 2 == 0  # the second try succeeds
            if real is run_on or kwargs.get("device") == "cpu":
                refusals.append("refused" if refuse else "given")
                if refuse:
                    raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
            return real(*args, **kwargs)

        return sometimes

    monkeypatch.setattr(torch, "empty", starved(empty))
    monkeypatch.setattr(replay, "_run_on", starved(run_on))
    monkeypatch.setattr(replay, "_written", lambda op: [])
    session = forced(policy)
    found = run_under(session, lambda: train(deep(16, 4), 16, 2))
    assert_same(expected, found, policy)
    assert refusals.count("refused") == refusals.count("given") > 0


def test_a_read_ahead_that_finds_no_memory_is_left_for_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with forced("swap-only") as session:
        y = (torch.randn(4096, requires_grad=True) * 2).exp()
        loss = y.sin().sum()
        del y
        torch.zeros(1).add_(1)
        ledger = session.ledger
        value = next(v for v in ledger.alive if v.copy is not None and v.away)

        def refuse(n_bytes: int) -> torch.Tensor:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

        with monkeypatch.context() as patch:
            patch.setattr(ledger, "_empty", refuse)
            assert not ledger.read_ahead(value)
        assert value.reading is None
        assert ledger.read_ahead(value)
        loss.backward()
