# SPDX-License-Identifier: Apache-2.0
"""How many floating-point operations an operator does.

PyTorch's own formulas, and those that it lacks: attention and recurrent layers on a
CPU, matrices multiplied in groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

Formula = Callable[[Any], float]  # of positional arguments


def count_flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Count the work of an operator; 0 where nobody has a formula."""
    own = _OWN.get(func._schema.name)
    if own is not None:
        return float(own(args))
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return 0.0
    return float(formula(*args, **kwargs, out_val=result))


def _attention(args: Any) -> float:
    query, key, value = (t.shape for t in args[:3])
    return float(sdpa_flop_count(query, key, value))


def _attention_backward(args: Any) -> float:
    gradient, query, key, value = (t.shape for t in args[:4])
    return float(sdpa_backward_flop_count(gradient, query, key, value))


def _recurrent(args: Any) -> float:
    """Multiply each step by the weights of input and state."""
    steps: torch.Size = args[0].shape
    return float(2 * steps[0] * steps[1] * (args[1].numel() + args[2].numel()))


def _grouped(args: Any) -> float:
    """Multiply each row by the matrix of its group, or sum the groups up."""
    left, right = args[0].shape, args[1].shape
    return float(2 * left.numel() * right[-1])


_OWN: dict[str, Formula] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::mkldnn_rnn_layer": _recurrent,
    "aten::mkldnn_rnn_layer_backward": lambda args: 2 * _recurrent(args),
    "aten::_grouped_mm": _grouped,
}
