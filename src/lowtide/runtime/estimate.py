"""How many bytes an operator will need, before it has ever run with such inputs."""

from __future__ import annotations

from typing import Any

import torch

from lowtide.recorder.schemas import facts_of

# Kernels that reorder their inputs into blocked layouts or keep partial sums; measured
# needs replace the estimate after the first run with the same shapes.
_WORKSPACE = ("convolution", "conv", "mkldnn", "linear", "attention")

Signature = tuple[Any, ...]


def signature_of(func: Any, args: Any, kwargs: Any) -> Signature:
    """Return a key under which an operator's need is the same: sizes and scalars."""
    parts: list[Any] = [func]
    for argument in args:
        parts.append(_part(argument))
    for name, argument in kwargs.items():
        parts.append((name, _part(argument)))
    return tuple(parts)


def _part(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        if argument.layout is not torch.strided:
            return ("sparse", argument.shape)
        return (argument.shape, argument.stride(), argument.dtype)
    if isinstance(argument, (list, tuple)):
        return tuple(_part(item) for item in argument)
    if isinstance(argument, (int, bool, str)) or argument is None:
        return argument
    return type(argument)  # scalars such as a learning rate change no sizes


def estimate_need(func: Any, args: Any, kwargs: Any) -> tuple[int, int]:
    """Estimate the bytes that an operator allocates, workspace included.

    Returns (certain, estimated). Certain are its outputs, where it has a meta
    implementation; without one they are taken to be as large as its inputs. Workspace
    is taken as one copy of inputs and outputs for operators that reorder them.
    """
    facts = facts_of(func)
    inputs = sum(_nbytes(argument) for argument in args)
    certain = outputs = 0
    if not (facts.writes or facts.writes_named):
        try:
            result = func(
                *[_to_meta(argument) for argument in args],
                **{k: _to_meta(v) for k, v in kwargs.items()},
            )
            certain = outputs = _nbytes(result)
        except Exception:
            outputs = inputs
    if any(word in facts.name for word in _WORKSPACE):
        return certain, outputs + inputs + outputs
    return certain, outputs


def _to_meta(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return torch.empty_strided(
            argument.size(), argument.stride(), dtype=argument.dtype, device="meta"
        )
    if isinstance(argument, (list, tuple)):
        return [_to_meta(item) for item in argument]
    if isinstance(argument, torch.device):
        return torch.device("meta")
    if isinstance(argument, torch.Generator):
        return None
    return argument


def _nbytes(argument: Any) -> int:
    if isinstance(argument, torch.Tensor):
        return int(argument.numel() * argument.element_size())
    if isinstance(argument, (list, tuple)):
        return sum(_nbytes(item) for item in argument)
    return 0
