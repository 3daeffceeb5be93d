# SPDX-License-Identifier: Apache-2.0
"""Estimates of the bytes that kernels take beside their results.

Measured on a CPU by a counting allocator and put into rules: which operands oneDNN
brings into blocked layouts, which copies PyTorch's own kernels make. They hold for
float32 and within some percent; whatever has no rule takes nothing. On CUDA, rules of
the same form stand for cuDNN's usual choice, which a recording cannot know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Bytes = int
Rule = Callable[[Any, Any], Bytes]  # of arguments and result

_FEW = 4  # channels of pictures: read as they lie
_MANY = 16  # pictures from which on one thread, too, leaves pointwise work to oneDNN


def workspace_of(name: str, args: Any, result: Any) -> Bytes:
    """Estimate what an operator takes beside its results."""
    rule = _RULES.get(name)
    return 0 if rule is None else rule(args, result)


def _convolution(args: Any, result: Any) -> Bytes:
    """Input and weight are reordered, and a result that is not strided."""
    picture, weight, stride, transposed = args[0], args[1], args[3], args[6]
    if _is_pointwise(weight, stride):
        if _as_matrices(picture):
            return 0
        # blocks of the result are still there when it is brought back in order
        both = _in_sixteens(picture) + _in_sixteens(result)
        return max(both - _bytes(result), _in_sixteens(result))
    blocked = _bytes(picture) if picture.size(1) > _FEW else 0
    if blocked == 0 or max(stride) == 1 or transposed:
        blocked += _bytes(result)
    return blocked + (_bytes(weight) if picture.size(1) > _FEW else 0)


def _convolution_backward(args: Any, result: Any) -> Bytes:
    """Both gradients and the input are there twice, reordered."""
    gradient, picture, weight, stride = args[0], args[1], args[2], args[4]
    if _is_pointwise(weight, stride):
        if _as_matrices(picture):
            return 0
        return _in_sixteens(picture) + _in_sixteens(gradient)
    if not args[10][0]:  # the gradient of the input is not asked for
        return _bytes(gradient) * (1 if gradient.is_contiguous() else 2)
    large, small = _bytes(picture), _bytes(gradient)
    whole = max(3 * large, 2 * (large + small), large + 2 * _bytes(weight))
    return max(whole - large - _bytes(weight), 0)


def _batch_norm(args: Any, result: Any) -> Bytes:
    return 2 * _bytes(result[1])


def _batch_norm_backward(args: Any, result: Any) -> Bytes:
    return _bytes(args[1])


def _layer_norm_backward(args: Any, result: Any) -> Bytes:
    return 0 if args[5] is None else 2 * _bytes(args[5])


def _safe_softmax(args: Any, result: Any) -> Bytes:
    """A mask of what is infinite, and one of its rows."""
    last = max(result.size(-1), 1) if result.dim() else 1
    return int(result.numel() + result.numel() // last)


def _attention(args: Any, result: Any) -> Bytes:
    """Scores of a block of queries and keys, for each thread."""
    rows, columns = _attention_block(args[0], args[1])
    width = args[0].size(-1)
    return int(torch.get_num_threads() * rows * (columns + 2 + width) * 4)


def _attention_backward(args: Any, result: Any) -> Bytes:
    """Scores and their gradients, and a copy of the gradient that comes in."""
    rows, columns = _attention_block(args[1], args[2])
    scores = torch.get_num_threads() * rows * (2 * columns + 1) * 4
    return scores + _bytes(args[0])


def _attention_block(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    """Return how many queries and keys PyTorch takes at a time."""
    length = query.size(-2)
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, key.size(-2))


def _rnn(args: Any, result: Any) -> Bytes:
    """Reordered weights, and the gates of all steps."""
    steps, batch = args[0].size(0), args[0].size(1)
    gates = args[1].size(0) * steps * batch * args[0].element_size()
    return int(gates + _bytes(args[1]) + _bytes(args[2]))


def _rnn_backward(args: Any, result: Any) -> Bytes:
    weights = _bytes(args[1]) + _bytes(args[2])
    return weights + 2 * _bytes(args[0]) + 13 * _bytes(args[7]) // 4


_RULES: dict[str, Rule] = {
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::native_batch_norm": _batch_norm,
    "aten::native_batch_norm_backward": _batch_norm_backward,
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::_safe_softmax": _safe_softmax,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::mkldnn_rnn_layer": _rnn,
    "aten::mkldnn_rnn_layer_backward": _rnn_backward,
}


def _is_pointwise(weight: torch.Tensor, stride: Any) -> bool:
    """Say whether a convolution looks at one pixel for each of its results."""
    return all(n == 1 for n in weight.shape[2:]) and all(n == 1 for n in stride)


def _as_matrices(picture: torch.Tensor) -> bool:
    """Say whether PyTorch multiplies matrices as they lie: oneDNN is no faster."""
    return picture.size(0) < _MANY and torch.get_num_threads() == 1


def _in_sixteens(picture: torch.Tensor) -> Bytes:
    """Count the bytes of pictures in blocks of sixteen channels."""
    channels = picture.size(1)
    return _bytes(picture) // max(channels, 1) * (-(-channels // 16) * 16)


def _bytes(tensor: torch.Tensor) -> Bytes:
    return tensor.numel() * tensor.element_size()
