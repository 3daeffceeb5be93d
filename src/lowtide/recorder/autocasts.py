# SPDX-License-Identifier: Apache-2.0
"""Autocast as it is on CUDA, for tensors that lie on a CPU and claim to be there.

Both devices multiply in half precision. What CUDA computes in single precision besides
(norms, softmax, losses, powers) is widened here; a CPU leaves much of it narrow, and
would save half the bytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_KEY = "AutocastCPU"
_NARROW = (torch.float16, torch.bfloat16)

# PyTorch's documentation of autocast lists them ("ops that autocast to float32")
_WIDE = (
    "acos",
    "asin",
    "binary_cross_entropy_with_logits",
    "cosh",
    "cosine_similarity",
    "cross_entropy_loss",
    "cumprod",
    "cumsum.default",
    "erfinv",
    "exp",
    "expm1",
    "group_norm",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "log",
    "log10",
    "log1p",
    "log2",
    "log_softmax.int",
    "logsumexp",
    "mse_loss",
    "nll_loss",
    "nll_loss_nd",
    "norm.Scalar",
    "norm.ScalarOpt_dim",
    "pow.Scalar",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "prod",
    "prod.dim_int",
    "reciprocal",
    "rsqrt",
    "sinh",
    "smooth_l1_loss",
    "softmax.int",
    "softplus",
    "sum",
    "sum.dim_IntList",
    "tan",
)


@contextmanager
def wide_operators() -> Iterator[None]:
    """Widen what CUDA widens, under autocast, while inside."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for name in _WIDE:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            spelled = packet if overload in ("", "default") else name
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some replace what a CPU has
                library.impl(spelled, _widened(operator), _KEY, allow_override=True)
        yield
    finally:
        library._destroy()


def _widened(operator: Any) -> Callable[..., Any]:
    key = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_KEY))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key):
            return operator(
                *map(_wide, args), **{k: _wide(v) for k, v in kwargs.items()}
            )

    return kernel


def _wide(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor) and argument.dtype in _NARROW:
        return argument.float()
    return argument
