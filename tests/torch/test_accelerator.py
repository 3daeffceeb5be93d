# SPDX-License-Identifier: Apache-2.0
"""The device adaptor, as far as it goes without a device: a pretended one."""

import types
from typing import Any

import pytest
import torch

from lowtide.errors import LowtideError, SizeError
from lowtide.runtime import cuda, devices
from lowtide.runtime.cuda import (
    AcceleratorClock,
    AcceleratorCounter,
    AcceleratorDriver,
)
from lowtide.runtime.hostlane import HostLane
from lowtide.runtime.session import Session
from tests.pure.blocks import Block


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
    x = torch.zeros(4)
    first = clock("exp", x, 500.0)
    assert first >= 500
    assert 200 <= clock("exp", (x, None), 200.0) < 500
    assert 200 <= clock("exp", x, 9e9) < 500
    assert len(waits) == 2
    clock("exp", torch.zeros(5), 0.1)
    clock("sum_", None, 0.1)
    assert len(waits) == 4


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
