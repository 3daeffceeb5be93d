# SPDX-License-Identifier: Apache-2.0
"""Measure what keeping a budget costs this machine beside copies and recomputing.

Small networks train plainly and within a budget, by swapping alone, in turn. They
differ in what they have much of: operators, saved tensors, tensors that move, bytes
that move. What a step takes longer is laid on these four by least squares, none below
zero (`hardware.Overheads`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor, nn

from lowtide.hardware import Overheads
from lowtide.recorder.graph import record
from lowtide.runtime import allocator
from lowtide.runtime.session import Session

_ROUNDS = 2  # sessions, with plain steps between them
_LEARNT = 4  # steps of a session that are not timed
_TIMED = 3
_CALLS = 200
_LAYERS = 60

Step = Callable[[], object]
Seconds = float


def measure_overheads() -> Overheads:
    """Time all of it: some half a minute."""
    counter = allocator.install()
    allocator.adopt(counter)
    rows, extra = [], []
    for build, size, part in _CASES:
        step = build(size)
        step()
        graph = record(step, meter=counter)
        watched = _within(step, int(part * graph.plain_peak_bytes))
        sizes = graph.versions["bytes"][graph.versions["held"] >= 0]
        moved = watched.moved_bytes / max(float(sizes.mean()), 1.0)
        rows.append(
            (len(graph.operators), len(graph.saves), moved, watched.moved_bytes)
        )
        extra.append(watched.seconds)
    watch, save, move, moved_byte = _shared_out(np.array(rows, float), np.array(extra))
    return Overheads(
        call=_measure_call(), watch=watch, save=save, move=move, moved_byte=moved_byte
    )


# -- programs -------------------------------------------------------------------------


def _chain(elements: int) -> Step:
    """Make cheap layers that each save one tensor."""
    start = torch.ones(elements, requires_grad=True)

    def step() -> None:
        x: Tensor = start
        for _ in range(_LAYERS):
            x = (x * 0.5).tanh()
        x.sum().backward()
        start.grad = None

    return step


def _updates(weights: int) -> Step:
    """Make small weights that an optimizer updates, and a short chain."""
    chain = _chain(1 << 14)
    small = [nn.Parameter(torch.ones(64)) for _ in range(weights)]
    for weight in small:
        weight.grad = torch.ones(64)
    optimizer = torch.optim.AdamW(small, lr=1e-6)

    def step() -> None:
        chain()
        optimizer.step()

    return step


def _convolutions(pictures: int) -> Step:
    """Make convolutions with batch norm."""
    blocks = [
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        for _ in range(12)
    ]
    return _trained(nn.Sequential(*blocks), torch.ones(pictures, 8, 16, 16))


def _encoder(sentences: int) -> Step:
    """Make a transformer's encoder."""
    layers = [
        nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        for _ in range(4)
    ]
    return _trained(nn.Sequential(*layers), torch.ones(sentences, 32, 32))


def _trained(model: nn.Module, x: Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


_CASES: tuple[tuple[Callable[[int], Step], int, float], ...] = (
    (_chain, 1 << 14, 0.5),
    (_chain, 1 << 19, 0.5),
    (_updates, 200, 0.9),
    (_convolutions, 4, 0.9),
    (_convolutions, 64, 0.9),
    (_convolutions, 64, 0.6),
    (_encoder, 4, 0.9),
    (_encoder, 64, 0.9),
    (_encoder, 64, 0.6),
)


# -- timing ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Watched:
    """What a budget costs a step."""

    seconds: Seconds
    moved_bytes: int


def _within(step: Step, budget: int) -> _Watched:
    """Return by how much a step takes longer within a budget, and what it moves."""
    within: list[Seconds] = []
    plain: list[Seconds] = []
    moved = 0
    for _ in range(_ROUNDS):
        with Session(budget, policy="swap-only") as session:
            for _ in range(_LEARNT):
                step()
            within += _times(step)
        moved = session.report().swapped_bytes
        plain += _times(step)
    return _Watched(max(min(within) - min(plain), 0.0), moved)


def _times(step: Step) -> Iterator[Seconds]:
    for _ in range(_TIMED):
        start = time.perf_counter()
        step()
        yield time.perf_counter() - start


def _shared_out(rows: np.ndarray, extra: np.ndarray) -> list[float]:
    """Solve by least squares, relative errors counting; nothing below zero.

    Of four columns all choices of those that may differ from zero can be tried.
    """
    weight = 1 / np.maximum(extra, 1e-6)
    a, b = rows * weight[:, None], extra * weight
    best, error = np.zeros(4), float(b @ b)
    for count in range(1, 5):
        for columns in combinations(range(4), count):
            found, *_ = np.linalg.lstsq(a[:, columns], b, rcond=None)
            if (found < 0).any():
                continue
            left = float(((a[:, columns] @ found - b) ** 2).sum())
            if left < error:
                best, error = np.zeros(4), left
                best[list(columns)] = found
    return [float(value) for value in best]


def _measure_call() -> Seconds:
    """Time what an operator costs beside its kernel: Python, dispatch, autograd."""
    x = torch.ones(1, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(_CALLS):
            y = y * 1.5
        y.backward()

    chain()
    return min(_times(chain)) / (2 * _CALLS)
