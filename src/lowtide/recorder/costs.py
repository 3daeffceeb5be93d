# SPDX-License-Identifier: Apache-2.0
"""How long an operator that nobody runs would take.

Seconds come from a roofline (`lowtide.hardware`): arithmetic by PyTorch's own formulas,
memory traffic by the tensors that go in and out.
"""

from __future__ import annotations

from typing import Any

import torch

from lowtide.hardware import Hardware
from lowtide.recorder.arguments import tensors_in
from lowtide.recorder.infer import ALIASES
from lowtide.recorder.schemas import Facts

Bytes = int
Seconds = float

_KINDS = (  # the first word found in an operator's name decides
    ("convolution_backward", ("convolution_backward",)),
    ("convolution", ("convolution", "conv")),
    ("attention", ("scaled_dot_product",)),
    ("recurrent", ("rnn", "lstm", "gru")),
    (
        "random",
        ("bernoulli", "randn", "rand", "randint", "dropout", "normal", "uniform"),
    ),
    ("pooling", ("pool2d", "pool3d", "pool1d")),
    (
        "matmul",
        ("mm", "bmm", "addmm", "baddbmm", "linear", "dot"),
    ),
    ("batchnorm", ("batch_norm",)),
    ("safesoftmax", ("safe_softmax",)),
    ("normalization", ("norm", "softmax", "cross_entropy", "nll_loss")),
    ("gather", ("embedding", "index", "gather", "scatter", "sort", "topk")),
    ("copy", ("copy", "clone", "cat", "stack", "fill", "zero", "ones", "empty")),
    ("reduction", ("sum", "mean", "var", "amax", "amin", "max", "min", "any", "all")),
)


def kind_of(name: str) -> str:
    """Return the kind of an operator, one of `hardware.EFFICIENCIES`."""
    short = name.split("::")[-1]
    words = short.split("_")
    for kind, marks in _KINDS:
        if any(mark in words or (len(mark) > 5 and mark in short) for mark in marks):
            return kind
    return "elementwise"


class Costs:
    """Estimates for one device."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware

    def seconds(
        self, facts: Facts, args: Any, kwargs: Any, result: Any, flops: float
    ) -> Seconds:
        """Estimate how long an operator takes."""
        read = list(tensors_in((args, tuple(kwargs.values()))))
        made = [] if facts.name in ALIASES else list(tensors_in(result))
        n_bytes = sum(map(_n_bytes, read)) + sum(map(_n_bytes, made))
        numbers = [t for t in (*read, *made) if t.is_floating_point()]
        dtype = str(numbers[0].dtype).removeprefix("torch.") if numbers else "float32"
        if dtype not in self.hardware.flops and dtype not in ("bfloat16", "float16"):
            dtype = "float32"
        if "empty" in facts.name or facts.name in ALIASES:
            n_bytes = 0
        kind = kind_of(facts.name)
        return self.hardware.seconds(flops, n_bytes, dtype, kind)


def _n_bytes(tensor: torch.Tensor) -> Bytes:
    """Count the bytes that are touched: those of a broadcast tensor once."""
    return min(
        tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    )
