# SPDX-License-Identifier: Apache-2.0
"""Record an iteration of training: for real, or without its memory and its work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lowtide.errors import LowtideError
from lowtide.hardware import (
    CATALOGUE,
    MEASURED,
    Hardware,
    find_hardware,
)
from lowtide.recorder import graph as recorder
from lowtide.recorder.costs import Costs
from lowtide.recorder.fakerun import FakeRun
from lowtide.recorder.laps import Enough, Laps, Saves
from lowtide.runtime import allocator
from lowtide.trace import Graph

DEVICES = ("cpu", "cuda")
_DEFAULT_CARD = "a100-80g"

Step = Callable[[], object]
Build = Callable[[], Step]


def record(
    step: Step | None = None,
    *,
    build: Build | None = None,
    warmup: int = 2,
    fake: bool = False,
    device: str = "cpu",
    hardware: Hardware | str | None = None,
) -> Graph:
    """Record one iteration of training: every operator, every value, who reads what.

    Under `fake` the iteration touches no memory and does no work, so that it may have
    any size: what there was before stays as it is, operators take the seconds that
    `hardware` would need, and their workspace is an estimate.

    Arguments:
        step: trains once: forward, backward and update.
        build: builds what is trained and returns `step`, instead of `step`; under
            `fake` not even parameters take memory then.
        warmup: how often `step` runs before, so that optimizers have their state.
        fake: whether to pretend.
        device: "cpu", or "cuda" under `fake`, with or without such a device.
        hardware: whose seconds a fake iteration takes: a name of
            `lowtide.hardware.CATALOGUE`, "this-machine" (as measured by `lowtide
            measure`), or a device; None for this machine or a usual card.

    Raises:
        LowtideError: inside a budget or another recording; a device that is not there.
    """
    if (step is None) == (build is None):
        raise LowtideError("give record() either a step or build=, and not both.")
    _check_device(device, fake=fake)
    if fake:
        costs = Costs(hardware_of(hardware, device))
        with FakeRun(costs, device, protect=True) as run:
            return _record_fake(run, step or _built(build), warmup)
    return recorder.record(step or _built(build), warm=warmup, meter=_meter())


def _check_device(device: str, *, fake: bool) -> None:
    if device not in DEVICES:
        raise LowtideError(
            f"{device!r} cannot be recorded; it is one of {', '.join(DEVICES)}."
        )
    if device != "cpu" and not fake:
        raise LowtideError(f"{device!r} can be recorded only under fake.")


def _meter() -> recorder.Meter:
    """Count bytes from now on."""
    counter = allocator.install()
    allocator.adopt(counter)
    return counter


def _built(build: Build | None) -> Step:
    assert build is not None
    step = build()
    if not callable(step):
        raise LowtideError(
            "build() must return the function that trains once, not "
            f"{type(step).__name__}."
        )
    return step


def _record_fake(run: FakeRun, step: Step, warmup: int) -> Graph:
    for _ in range(warmup):
        step()
    with Saves() as saves:
        saves.listener = run.begin()
        step()
        saves.listener = None
        return run.end()


def _save_nothing(*_: object, **__: object) -> None:
    """Stand in for `torch.save`: no checkpoint is overwritten by a pretence."""


class _Around(Sampler[int]):
    """Goes through a data set again and again."""

    def __init__(self, size: int, wanted: int) -> None:
        self._size = size
        self._wanted = wanted

    def __iter__(self) -> Iterator[int]:
        return (i % self._size for i in range(self._wanted))

    def __len__(self) -> int:
        return self._wanted


@contextmanager
def batches_of(size: int | None, least: int) -> Iterator[list[DataLoader[Any]]]:
    """Give every DataLoader that is made a batch size; collect those it concerns.

    A data set too small for `least` batches is gone through several times, so that no
    batch is cut short.
    """
    taken: list[DataLoader[Any]] = []
    if size is None:
        yield taken
        return
    make = DataLoader.__init__

    @wraps(make)
    def with_batch(self: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        bound = signature(make).bind(self, *args, **kwargs)
        given = bound.arguments
        if given.get("batch_sampler") is None and given.get("batch_size", 1):
            given["batch_size"] = size
            taken.append(self)
            dataset: Any = given["dataset"]
            if not isinstance(dataset, IterableDataset) and len(dataset) < least * size:
                given["sampler"] = _Around(len(dataset), least * size)
                given.pop("shuffle", None)
        make(*bound.args, **bound.kwargs)

    DataLoader.__init__ = with_batch  # type: ignore[method-assign]
    try:
        yield taken
    finally:
        DataLoader.__init__ = make  # type: ignore[method-assign]


def hardware_of(wanted: Hardware | str | None, device: str) -> Hardware:
    """Find whose seconds a fake iteration takes."""
    if isinstance(wanted, Hardware):
        return wanted
    if wanted is not None:
        return find_hardware(wanted)
    if device == "cuda":
        return CATALOGUE[_DEFAULT_CARD]
    try:
        return find_hardware(MEASURED)
    except LowtideError:
        return USUAL_CPU


# Round figures of one core of a server, where nothing was measured.
USUAL_CPU = Hardware(
    name="usual-cpu",
    memory_bytes=16 << 30,
    flops={"float32": 6e10, "float64": 3e10, "bfloat16": 3e10},
    memory_bandwidth=1e10,
    to_host=1e9,
    from_host=1e9,
    host_bytes=16 << 30,
    disk_write=1e9,
    disk_read=1e9,
    source="round figures; nothing was measured here",
    launch=2e-6,
)


@dataclass(slots=True)
class Recorded:
    """What came of recording a program."""

    graph: Graph | None  # None: it did not train, or not for long enough
    iterations: int  # that it trained
    ended: bool  # by us: the iteration was recorded
    unknown: tuple[str, ...] = ()  # operators that ran for real in a fake run


def record_program(
    run: Callable[[], None],
    *,
    steps: int = 3,
    fake: bool = False,
    device: str = "cpu",
    hardware: Hardware | str | None = None,
    batch: int | None = None,
) -> Recorded:
    """Run a program until it has trained `steps` iterations; record the last of them.

    Whatever the program raises comes out, but not the end that it is brought to.

    Arguments:
        run: runs it.
        steps: at least two; where the program ends before, the last one counts.
        fake, device, hardware: as in `record`.
        batch: batch size in place of what the program gives its DataLoaders.

    Raises:
        LowtideError: as in `record`; no DataLoader takes the batch size.
    """
    _check_device(device, fake=fake)
    recording: FakeRun | recorder.RealRun
    pretence: AbstractContextManager[object] = nullcontext()
    if fake:
        costs = Costs(hardware_of(hardware, device))
        pretence = recording = FakeRun(costs, device, protect=False)
    else:
        recording = recorder.RealRun(_meter(), device)
    ended = False
    saving = patch.object(torch, "save", _save_nothing) if fake else nullcontext()
    batches = batches_of(batch, steps + 1)
    with batches as taken, saving, pretence, Laps(recording, steps) as laps:
        try:
            run()
        except Enough:
            ended = True
        except SystemExit as left:
            if left.code not in (None, 0):
                raise
    if batch is not None and not taken:
        raise LowtideError(
            "no DataLoader of the program takes a batch size. Write {batch} where it "
            "stands among the program's arguments."
        )
    unknown: list[str] = []
    if isinstance(recording, FakeRun):
        unknown = sorted(recording.kernels.unknown)
    return Recorded(laps.graph, laps.finished, ended, tuple(unknown))
