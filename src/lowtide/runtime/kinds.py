# SPDX-License-Identifier: Apache-2.0
"""Time one or two operators of each kind, small and large, on this machine.

What they reach of the machine's peaks are the efficiencies by which the seconds of
other operators are estimated (`Hardware.calibrated`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from lowtide.hardware import Measured

_TRIES = 3
_ELEMENTS = (1 << 14, 1 << 17, 1 << 20, 1 << 23)  # float32: 64 KiB to 32 MiB

Act = Callable[[], object]
Case = tuple[str, float, float, Act]  # kind, FLOP, bytes in and out, what is timed


def measure_kinds() -> list[Measured]:
    """Time all of them: some seconds."""
    with torch.no_grad():
        return [
            Measured(kind, flops, n_bytes, "float32", _best(act))
            for kind, flops, n_bytes, act in (*_products(), *_streams())
        ]


def _best(act: Act) -> float:
    act()
    seconds = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start)
    return max(min(seconds), 1e-9)


def _products() -> Iterator[Case]:
    """Yield what is bound by arithmetic."""
    for rows, inner, columns in ((512, 64, 128), (512, 256, 512), (1024, 1024, 1024)):
        a, b = torch.ones(rows, inner), torch.ones(inner, columns)
        n_bytes = 4.0 * (a.numel() + b.numel() + rows * columns)
        flops = 2.0 * rows * inner * columns
        yield "matmul", flops, n_bytes, partial(torch.mm, a, b)
    for channels, pixels in ((16, 32), (64, 28), (128, 14)):
        x = torch.ones(8, channels, pixels, pixels)
        w = torch.ones(channels, channels, 3, 3)
        flops = 2.0 * x.numel() * channels * 9
        n_bytes = 4.0 * (2 * x.numel() + w.numel())
        yield "convolution", flops, n_bytes, partial(F.conv2d, x, w, padding=1)
        pool = partial(F.max_pool2d, x, 2)
        yield "pooling", 0, 4.0 * x.numel() * 1.75, pool  # and indices of 8 bytes
    for width in (64, 256):
        layer = torch.nn.LSTM(width, width)
        sequence = torch.ones(32, 8, width)
        flops = 2.0 * 32 * 8 * 8 * width * width  # four gates, of input and state
        n_bytes = 4.0 * (2 * sequence.numel() + 8 * width * width)
        yield "recurrent", flops, n_bytes, partial(layer, sequence)
    for length in (64, 256):
        q = torch.ones(4, 4, length, 32)
        flops = 4.0 * q.numel() * length
        yield (
            "attention",
            flops,
            16.0 * q.numel(),
            partial(F.scaled_dot_product_attention, q, q, q),
        )


def _streams() -> Iterator[Case]:
    """Yield what is bound by memory."""
    for n in _ELEMENTS:
        x = torch.ones(n // 256, 256)
        w = torch.ones(256)
        rows = torch.arange(n // 256)
        size = 4.0 * n
        yield "elementwise", 0, 3 * size, partial(torch.add, x, x)
        yield "elementwise", 0, 2 * size, partial(F.gelu, x)
        yield "elementwise", 0, 2 * size, partial(torch.mul, x, 0.5)
        yield "reduction", 0, size, partial(torch.sum, x, 0)
        yield "normalization", 0, 2 * size, partial(F.layer_norm, x, (256,), w)
        yield "normalization", 0, 2 * size, partial(F.softmax, x, 1)
        yield "random", 0, size, partial(torch.bernoulli, x)
        yield "random", 0, size, x.normal_
        yield "copy", 0, 2 * size, x.clone
        yield "copy", 0, size, x.zero_
        yield "gather", 0, 2 * size, partial(torch.index_select, x, 0, rows)
