"""Record the blocks of the benchmark models as they train, in many a way.

Every block that torch's CPU allocator hands out is logged from the model's making to
its last step, so that the whole may be replayed through the model of another allocator.
One iteration is cut out where two in a row have the same events: its blocks are what a
planned pool has to place. Sizes are reduced unless asked otherwise; which blocks there
are, and in what order they come and go, does not depend on them.
"""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import models
from benchmarks.problems import Problem
from lowtide.planner.pool import BLOCK
from lowtide.runtime.allocator import BlockLog, NativeCounter, install

GRANULE = 512  # bytes: the alignment on a device
STEPS = 5
# Small pictures and texts, but all layers.
REDUCED: dict[str, models.Flags] = {
    "resnet50": {"batch": 2, "pixels": 64, "width": 16},
    "gpt2": {"batch": 2, "length": 64, "width": 64, "vocabulary": 512},
    "bert": {"batch": 2, "length": 64, "width": 64, "vocabulary": 512},
    "swin": {"batch": 1, "width": 24},
    "unet": {"batch": 2, "pixels": 64, "width": 8},
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-3),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a model is trained."""

    halves: bool = False  # mixed precision
    parts: int = 1  # batches whose gradients are accumulated
    checkpoint: bool = False


WAYS = {
    "plain": Way(),
    "mixed": Way(halves=True),
    "accumulated": Way(parts=2),
    "checkpointed": Way(checkpoint=True),
    "all three": Way(halves=True, parts=2, checkpoint=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What one training asked of its allocator."""

    problem: Problem  # one iteration
    blocks: NDArray[np.void]  # all of it, from the model's making; dtype BLOCK


def record(
    model: str, optimizer: str, way: str, *, full_size: bool = False
) -> Recording:
    """Train a model for some steps, and log its blocks.

    Arguments:
        model: one of the benchmark models.
        optimizer: one of `OPTIMIZERS`, or "own", the model's.
        way: one of `WAYS`.
        full_size: do not reduce the sizes.
    """
    counter = install()
    if not isinstance(counter, NativeCounter):
        raise SystemExit("recording blocks needs a C++ compiler")
    how = WAYS[way]
    gc.collect()
    gc.disable()  # or blocks would die when it happens to run
    try:
        with BlockLog(counter) as log:
            training = models.build(
                model,
                checkpoint=how.checkpoint,
                **({} if full_size else REDUCED[model]),
            )
            if optimizer != "own":
                training.optimizer = OPTIMIZERS[optimizer](training.model.parameters())
            marks = []
            for _ in range(STEPS):
                marks.append(log.events)
                _step(training, how)
            marks.append(log.events)
    finally:
        gc.enable()
    name = " ".join((model, optimizer, way))
    return Recording(
        problem=_iteration(name, log.blocks, marks), blocks=_lives(log.blocks)
    )


def _step(training: models.Training, how: Way) -> None:
    training.optimizer.zero_grad()
    for _ in range(how.parts):
        batch = training.make_batch()
        precision: AbstractContextManager[object] = nullcontext()
        if how.halves:
            precision = torch.autocast("cpu", torch.bfloat16)
        with precision:
            loss = training.loss_of(training.model, batch)
        (loss / how.parts).backward()
    training.optimizer.step()


def _iteration(name: str, blocks: NDArray[np.void], marks: list[int]) -> Problem:
    """Cut out the last iteration but one."""
    start, stop, end = marks[-3:]
    period = stop - start
    if end - stop != period:
        raise SystemExit(f"{name}: its iterations differ: {np.diff(marks).tolist()}")
    lives = _lives(blocks)
    inside = (lives["born"] >= start) & (lives["born"] < stop)
    stays = (lives["born"] < start) & (lives["dead"] >= end)
    placed = lives[inside]
    if (placed["dead"] > end).any():
        raise SystemExit(f"{name}: a block lives longer than two iterations")
    placed["born"] -= start
    placed["dead"] -= start
    sizes = -(-lives["bytes"][stays] // GRANULE) * GRANULE
    return Problem(
        name=name,
        blocks=placed,
        period=period,
        persistent_bytes=int(sizes.sum()),
        alignment=GRANULE,
    )


def _lives(blocks: NDArray[np.void]) -> NDArray[np.void]:
    lives = np.zeros(len(blocks), BLOCK)
    lives["born"], lives["bytes"] = blocks["start"], blocks["bytes"]
    last = 1 + max(blocks["start"].max(initial=0), blocks["stop"].max(initial=0))
    lives["dead"] = np.where(blocks["stop"] < 0, last, blocks["stop"])
    return lives
