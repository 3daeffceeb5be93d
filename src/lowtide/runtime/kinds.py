# SPDX-License-Identifier: Apache-2.0
"""Time one or two operators of each kind, small and large, on this machine.

What they reach of the machine's peaks are the efficiencies by which the seconds of
other operators are estimated (`Hardware.calibrated`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.hardware import Measured

_TRIES = 3
_ELEMENTS = (1 << 18, 1 << 20, 1 << 22)  # float32: 1 to 16 MiB
_CONVOLUTIONS = ((16, 32, 3), (64, 28, 3), (64, 28, 1), (128, 14, 3), (256, 7, 1))

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
    for channels, pixels, window in _CONVOLUTIONS:
        x = torch.ones(16, channels, pixels, pixels)
        w = torch.ones(channels, channels, window, window)
        flops = 2.0 * x.numel() * channels * window**2
        n_bytes = 4.0 * (2 * x.numel() + w.numel())
        pad = window // 2
        yield "convolution", flops, n_bytes, partial(F.conv2d, x, w, padding=pad)
        yield (
            "convolution_backward",
            2 * flops,
            1.5 * n_bytes,
            _convolution_backward(x, w),
        )
        pool = partial(F.max_pool2d, x, 2)
        yield "pooling", 0, 4.0 * x.numel() * 1.75, pool  # and indices of 8 bytes
        yield "batchnorm", 0, 8.0 * x.numel(), _batch_norm(x)
        yield "batchnorm", 0, 12.0 * x.numel(), _batch_norm_backward(x)
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


def _convolution_backward(x: Tensor, w: Tensor) -> Act:
    pad = w.size(-1) // 2
    sides: Any = (1, 1), (pad, pad), (1, 1), False, (0, 0), 1, (True, True, False)
    return partial(torch.ops.aten.convolution_backward, x, x, w, None, *sides)


def _batch_norm(x: Tensor) -> Act:
    each = torch.ones(x.size(1))
    return partial(
        torch.ops.aten.native_batch_norm, x, each, each, None, None, True, 0.1, 1e-5
    )


def _batch_norm_backward(x: Tensor) -> Act:
    each = torch.ones(x.size(1))
    rest: Any = each, None, None, each, each, True, 1e-5, (True, True, True)
    return partial(torch.ops.aten.native_batch_norm_backward, x, x, *rest)


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
        safe = partial(torch.ops.aten._safe_softmax, x, -1)
        yield "safesoftmax", 0, 2 * size, safe  # checks what is infinite
        yield "random", 0, size, partial(torch.empty_like(x).bernoulli_, 0.9)
        yield "copy", 0, 2 * size, x.clone
        yield "copy", 0, size, x.zero_
        yield "gather", 0, 2 * size, partial(torch.index_select, x, 0, rows)
