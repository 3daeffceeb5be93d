"""How many bytes an operator will need, before it has ever run with such inputs."""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import Any

import torch

from lowtide.recorder.arguments import tensors_in
from lowtide.recorder.schemas import facts_of
from lowtide.recorder.storages import storage_key

# Blocked layouts of convolution kernels hold channels in groups of so many.
_BLOCK = 16
# Gates, their gradients and blocked weights of a fused recurrent layer, in sizes of
# its first result.
_GATES = 24
_RECURRENT = ("rnn", "lstm", "gru")
# Data types whose convolutions have kernels of their own; the rest unfold their input.
_BLOCKED = (torch.float32, torch.bfloat16, torch.float16)
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)

# Pointwise operators whose results are not of their arguments' type.
_OTHER_TYPES = frozenset(
    f"aten::{name}"
    for name in (
        *("eq", "ne", "lt", "le", "gt", "ge", "isclose", "isfinite", "isinf", "isnan"),
        *("isneginf", "isposinf", "signbit", "complex", "polar", "float_power"),
        *("logical_and", "logical_not", "logical_or", "logical_xor", "frexp"),
        "_to_copy",
    )
)
# Products of matrices: where the left one stands among the arguments; then the right.
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}

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

    Returns (certain, estimated). Certain are its fresh outputs, where it has a meta
    implementation; where it has none they are taken to be as large as its inputs.
    Workspace, which no schema tells, is judged by the kind of operator and rather too
    large: the measured need replaces it after one run with the same shapes.
    """
    plain = _plainly(func, args, kwargs)
    return _on_meta(func, args, kwargs) if plain is None else plain


def _plainly(func: Any, args: Any, kwargs: Any) -> tuple[int, int] | None:
    """Estimate the most common operators by their sizes, in a few microseconds.

    To ask for an implementation on meta takes some hundred; a program of small
    operators that has other sizes at every step would feel that.
    """
    facts = facts_of(func)
    left = _PRODUCTS.get(facts.name)
    pointwise = torch.Tag.pointwise in func.tags and facts.name not in _OTHER_TYPES
    if facts.writes_named or facts.writes_list or not (pointwise or left is not None):
        return None
    given = [a for a in args if isinstance(a, torch.Tensor)]
    one_type = len({t.dtype for t in given}) == 1 and given[0].is_floating_point()
    if not one_type or any(isinstance(a, torch.dtype) for a in kwargs.values()):
        return None
    if any(isinstance(a, torch.Tensor) for a in kwargs.values()):
        return None
    if any(t.layout is not torch.strided for t in given):
        return None
    size = given[0].element_size()
    if left is not None:
        a, b = args[left].shape, args[left + 1].shape
        outputs = math.prod(a[:-1]) * b[-1] * size
        return outputs, 2 * outputs + sum(_bytes_of(t) for t in given)
    if facts.writes:
        return (0, 0) if facts.writes == (0,) else None
    returns = func._schema.returns
    if len(returns) != 1 or str(returns[0].type) != "Tensor":
        return None
    outputs = _broadcast([t.shape for t in given]) * size
    return outputs, outputs


def _broadcast(shapes: list[torch.Size]) -> int:
    """Count the elements of the shape that these are broadcast to."""
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return first.numel()
    return math.prod(
        0 if 0 in sizes else max(sizes)
        for sizes in zip_longest(*(shape[::-1] for shape in shapes), fillvalue=1)
    )


def _on_meta(func: Any, args: Any, kwargs: Any) -> tuple[int, int]:
    """Estimate an operator by its results on the meta device."""
    given = list(tensors_in([*args, *kwargs.values()]))
    inputs = sum(_bytes_of(t) for t in given)
    try:
        results = _fresh(func, args, kwargs)
    except Exception:  # no meta implementation, or one that needs the data
        facts = facts_of(func)
        outputs = 0 if facts.writes or facts.writes_named else inputs
        return 0, outputs + (inputs + outputs if outputs else 0)
    outputs = sum(t.untyped_storage().nbytes() for t in results)
    return outputs, outputs + _workspace(func, given, results, inputs + outputs)


def _fresh(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return an operator's results that are no argument's, one for each storage."""
    given: list[Any] = [_to_meta(argument) for argument in args]
    named = {name: _to_meta(argument) for name, argument in kwargs.items()}
    results = tensors_in(func(*given, **named))
    old = {storage_key(t) for t in tensors_in([*given, *named.values()])}
    fresh = {storage_key(t): t for t in results}
    return [t for key, t in fresh.items() if key not in old]


def _workspace(
    func: Any, given: list[torch.Tensor], results: list[torch.Tensor], copies: int
) -> int:
    """Guess the bytes that an operator takes beside its results.

    `copies` is what a contiguous copy of everything takes.
    """
    name = facts_of(func).name
    if torch.Tag.pointwise in func.tags or name.startswith("aten::_foreach"):
        # computed in one type: those of another are converted first
        return 0 if len({t.dtype for t in [*given, *results]}) <= 1 else copies
    if not results:
        return 0  # views and writes; what writes needs no copy of what it writes to
    if "conv" in name:
        return _convolution_bytes([t for t in [*given, *results] if t.dim() >= 3])
    if any(word in name for word in _RECURRENT):
        return copies + _GATES * results[0].nbytes
    return copies


def _convolution_bytes(images: list[torch.Tensor]) -> int:
    """Return what reordering into blocks takes, or unfolding where that is done."""
    if not images:
        return 0
    blocked = 0
    for t in images:
        channels = max(t.shape[1], 1)
        blocked += t.nbytes * (-(-channels // _BLOCK) * _BLOCK) // channels
    if images[0].dtype in _BLOCKED:
        return blocked
    kernel = min(images, key=lambda t: t[0, 0].numel())
    return blocked + kernel[0, 0].numel() * max(t.nbytes for t in images)


def _bytes_of(tensor: torch.Tensor) -> int:
    """Count a tensor's bytes; of a sparse one those of what it lists."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    if tensor.layout in _COMPRESSED:
        return tensor.values().nbytes + 8 * tensor._nnz()
    return tensor.numel() * tensor.element_size()


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
