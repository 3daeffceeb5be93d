# SPDX-License-Identifier: Apache-2.0
"""The device adaptor: streams, events, pinning and memory figures of an accelerator.

Everything that needs the device itself is here, and as little else as possible; what
uses it is tested on a CPU with a driver that delays, reorders and fails. Written for
CUDA; it asks torch's module of the device's kind for streams, events and figures, so
that others (XPU) can follow. Only pinning and the fast way to the figures are CUDA's
own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, TypeAlias

import torch

from lowtide.recorder.arguments import tensors_in
from lowtide.recorder.key import quiet
from lowtide.runtime.hostjobs import Event
from lowtide.runtime.spill import Address, Bytes
from lowtide.runtime.streams import Streams

_TIMED = 2  # times that an operator of one size is waited for, to learn its time
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context
_NEVER = 0, float("inf")  # how often, and how long at least
_Kind: TypeAlias = tuple[Any, int | str]


class Transfer:
    """One copy: an event before it and one behind it (hostjobs.Motion)."""

    def __init__(self, before: Any, behind: Any) -> None:
        self._before, self.event = before, behind

    def query(self) -> bool:
        """Tell whether the copy is over."""
        return bool(self.event.query())

    def synchronize(self) -> None:
        """Wait until it is."""
        self.event.synchronize()

    def seconds(self) -> float:
        """Tell how long it took."""
        return float(self._before.elapsed_time(self.event)) / 1e3


class AcceleratorDriver:
    """Copy between one device and the host on a side stream for each direction.

    Arguments:
        device: with its index, like "cuda:0".
        streams: on which the program computes.
    """

    def __init__(self, device: str, streams: Streams | None = None) -> None:
        self.device = torch.device(device)
        self.streams = streams or Streams(device)
        self._torch: Any = torch.get_device_module(self.device)
        self._out = self._torch.Stream(self.device)
        self._in = self._torch.Stream(self.device)

    def ready(self) -> Sequence[Event]:
        """Mark what the program has queued, on every stream that it uses."""
        return self.streams.ready()

    def copy_out(
        self, host: Address, device: Address, n_bytes: Bytes, after: Sequence[Event]
    ) -> Transfer:
        """Start a copy to the host, once the events are reached."""
        return self._copy(self._out, host, device, n_bytes, after, out=True)

    def copy_in(
        self, device: Address, host: Address, n_bytes: Bytes, after: Sequence[Event]
    ) -> Transfer:
        """Start a copy to the device, once the events are reached."""
        return self._copy(self._in, host, device, n_bytes, after, out=False)

    def _copy(
        self,
        stream: Any,
        host: Address,
        device: Address,
        n_bytes: Bytes,
        after: Sequence[Any],
        *,
        out: bool,
    ) -> Transfer:
        for event in after:
            stream.wait_event(event.event if isinstance(event, Transfer) else event)
        before = self._torch.Event(enable_timing=True)
        behind = self._torch.Event(enable_timing=True)
        with quiet(), torch.inference_mode(False), self._torch.stream(stream):
            before.record(stream)
            if n_bytes:
                here = host_bytes(host, n_bytes)
                there = device_bytes(device, n_bytes, self.device)
                if out:
                    here.copy_(there, non_blocking=True)
                else:
                    there.copy_(here, non_blocking=True)
            behind.record(stream)
        return Transfer(before, behind)

    def pin(self, address: Address, n_bytes: Bytes) -> str | None:
        """Pin a range of memory; return why that is refused, if it is."""
        if self.device.type != "cuda":
            return f"not supported for {self.device.type}"
        try:
            status = torch.cuda.cudart().cudaHostRegister(address, n_bytes, _PORTABLE)
        except RuntimeError as error:
            return str(error)
        if int(status) == 0:
            return None
        # CUDA tells of this error once more, to whoever launches the next kernel; and
        # torch would raise it there, in an operator of the program
        with suppress(RuntimeError):
            launch(self.device)
        return str(torch.cuda.cudart().cudaGetErrorString(status))

    def unpin(self, address: Address) -> None:
        """Unpin a range that was pinned."""
        torch.cuda.cudart().cudaHostUnregister(address)


def host_bytes(address: Address, n_bytes: Bytes) -> torch.Tensor:
    """Make a tensor over host memory that somebody else owns."""
    buffer = (ctypes.c_uint8 * n_bytes).from_address(address)
    return torch.frombuffer(buffer, dtype=torch.uint8)


def device_bytes(
    address: Address, n_bytes: Bytes, device: torch.device
) -> torch.Tensor:
    """Make a tensor over memory of a device that somebody else owns."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, n_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def launch(device: torch.device) -> None:
    """Launch some kernel, which raises whatever error was left behind."""
    with quiet():
        torch.empty(1, device=device).fill_(0)


def read_figures(device: torch.device) -> tuple[Bytes, Bytes]:
    """Return a device's allocated bytes: now, and at most since the last reset."""
    if device.type == "cuda":
        stats = torch._C._cuda_memoryStats(device.index)["allocated_bytes"]["all"]
        return int(stats["current"]), int(stats["peak"])
    module: Any = torch.get_device_module(device)
    return int(module.memory_allocated(device)), int(
        module.max_memory_allocated(device)
    )


def reset_figures(device: torch.device) -> None:
    """Let the peak of a device's allocated bytes begin anew."""
    torch.get_device_module(device).reset_peak_memory_stats(device)


class AcceleratorCounter:
    """Count the bytes of one device as torch does (allocator.Counter).

    Torch keeps one peak; two are needed, of a step and of an operator. So each time
    that one is read or set, torch's is folded into both, and reset. What the program
    itself reads as the peak is therefore the peak since then.
    """

    name = "torch"
    sees_workspace = True

    def __init__(
        self,
        read: Callable[[], tuple[Bytes, Bytes]],
        reset: Callable[[], None],
    ) -> None:
        self._read = read
        self._reset = reset
        self._peaks = {"step": 0, "operator": 0}
        self.live = _Live(read)
        self.peak = _Peak(self, "step")
        self.op_peak = _Peak(self, "operator")
        self.reset_peak()

    def reset_peak(self) -> None:
        """Let the peak begin anew at what is live now."""
        self.peak.value = self.live.value

    def adjust(self, n_bytes: Bytes) -> None:
        """Do nothing: what lives elsewhere is not the device's."""

    def trim(self) -> Bytes:
        """Give nothing back: torch keeps what was freed for what comes next."""
        return 0

    def fold(self, name: str) -> Bytes:
        """Return one of the two peaks, up to now."""
        peak = self._read()[1]
        return max(self._peaks[name], peak)

    def begin(self, name: str, n_bytes: Bytes) -> None:
        """Let one of the two peaks begin anew; the other keeps what it has seen."""
        peak = self._read()[1]
        for other in self._peaks:
            self._peaks[other] = max(self._peaks[other], peak)
        self._peaks[name] = n_bytes
        self._reset()


class _Live:
    def __init__(self, read: Callable[[], tuple[Bytes, Bytes]]) -> None:
        self._read = read

    @property
    def value(self) -> Bytes:
        return self._read()[0]


class _Peak:
    def __init__(self, owner: AcceleratorCounter, name: str) -> None:
        self._owner = owner
        self._name = name

    @property
    def value(self) -> Bytes:
        return self._owner.fold(self._name)

    @value.setter
    def value(self, n_bytes: Bytes) -> None:
        self._owner.begin(self._name, n_bytes)


def counter_of(device: str) -> AcceleratorCounter:
    """Return the counter of a device's memory.

    Raises:
        RuntimeError: torch's allocator keeps no figures (a pluggable one is in use).
    """
    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.init()  # before it there are no figures
    return AcceleratorCounter(lambda: read_figures(place), lambda: reset_figures(place))


class AcceleratorClock:
    """Tell how long operators take on a device, which runs them behind the host.

    Each kind and size is timed a few times, alone: what stands before it is waited for
    first. The shortest counts, since the first may load a kernel, or choose one. From
    then on the device runs ahead undisturbed.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._known: dict[_Kind, tuple[int, float]] = {}

    def begin(self, func: Any, args: Any) -> _Kind:
        """Wait for what stands before an operator that is to be timed."""
        kind = func, sum(t.numel() for t in tensors_in(args)) or str(args[:1])
        if self._known.get(kind, _NEVER)[0] < _TIMED:
            self._synchronize()
        return kind

    def end(self, kind: _Kind, seconds: float) -> float:
        """Return an operator's time on the device, given what its call took."""
        times, shortest = self._known.get(kind, _NEVER)
        if times < _TIMED:
            start = perf_counter()
            self._synchronize()
            shortest = min(shortest, seconds + perf_counter() - start)
            self._known[kind] = times + 1, shortest
        return shortest
