# SPDX-License-Identifier: Apache-2.0
"""Run a program without its memory and without its work.

Every operator is seen on the way to its kernel. What is large is not computed: its
result has the size, the strides and the type that PyTorch's fake tensors give, in a
hollow storage (`recorder.hollow`). The tensors are ordinary ones all the same, so that
autograd, hooks, optimizers and data loaders take the very same way as in a real run,
operator by operator.

What is small is computed: counters, masks, positions, indices. Where such a thing comes
from a hollow one it is made up: ones for numbers, evenly spread indices for a choice
(`topk`, `argmax`), every element for a selection (`nonzero`). An operator that fake
tensors do not know runs for real, on zeros; its name is noted.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from lowtide.recorder.arguments import tensors_in, written_by
from lowtide.recorder.dispatch import is_plain
from lowtide.recorder.hollow import hollow_memory
from lowtide.recorder.infer import ALIASES, Alias, Inference, New, Shape, Unknown
from lowtide.recorder.schemas import Facts
from lowtide.recorder.storages import storage_key

_COMPUTED = 1 << 16  # bytes of numbers up to which an operator is computed
_INDICES = 1 << 24  # the same of integers and truth values, which decide shapes
_MADE_UP = 1 << 12  # bytes of numbers up to which results get a value

# operators whose integers choose among the elements of a dimension
_CHOICES = ("topk", "argmax", "argmin", "sort", "argsort", "max", "min", "multinomial")
_COUNTS = ("sum", "count_nonzero", "cumsum")

Seconds = float


class FakeKernels:
    """Stands in for the kernels of all operators."""

    def __init__(self) -> None:
        self.unknown: set[str] = set()  # operators that ran for real, on zeros
        self._memory = hollow_memory()
        self._inference = Inference()
        self._protected: dict[int, weakref.ref[Any]] = {}

    def protect(self, tensors: Iterator[torch.Tensor]) -> None:
        """Leave alone what these hold, as long as they live."""
        protected = self._protected
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            protected[key] = weakref.ref(storage, partial(_forget, protected, key))

    def perform(self, func: Any, facts: Facts, args: Any, kwargs: Any) -> Any:
        """Do what an operator does to metadata, and what it computes if it is small."""
        tensors = list(tensors_in((args, tuple(kwargs.values()))))
        if not all(is_plain(tensor, "cpu") for tensor in tensors):
            return func(*args, **kwargs)  # sparse, quantized, or somebody's own fakes
        hollow = [self._memory.holds(tensor) for tensor in tensors]
        if facts.name == "aten::_local_scalar_dense":
            return self._item(args[0]) if hollow[0] else func(*args, **kwargs)
        if facts.rebinds:
            return self._rebind(func, facts, args, kwargs)
        real = not any(hollow) and all(map(_is_small, tensors))
        if real and self._protected:
            written = written_by(facts, args, kwargs)
            real = not any(storage_key(t) in self._protected for t in written)
        if facts.writes and not facts.writes_named and _returns_written(func):
            return func(*args, **kwargs) if real else _results_written(func, args)
        if not real:
            args = self._without_masks(facts, args)
        shape = self._shape(func, args, kwargs)
        if shape is None and not real:
            self.unknown.add(facts.name)
        if shape is None or (real and all(map(_is_small, _news(shape)))):
            return func(*args, **kwargs)
        if facts.writes_named:
            return self._out(func, shape, kwargs, tensors)
        return self._build(shape, facts, tensors)

    # -- shapes -------------------------------------------------------------------

    def _shape(self, func: Any, args: Any, kwargs: Any) -> Shape | None:
        try:
            return self._inference.shape_of(func, args, kwargs)
        except Unknown:  # the real operator can do it, or say why not
            return None

    def _without_masks(self, facts: Facts, args: Any) -> Any:
        """Put in place of masks what they select, which fake tensors cannot know."""
        if facts.name == "aten::index":
            indices: list[Any] = []
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    indices += self._selected(index).unbind(1)
                else:
                    indices.append(index)
            return (args[0], indices, *args[2:])
        if facts.name == "aten::nonzero" and self._memory.holds(args[0]):
            return (torch.ones(args[0].size(), dtype=torch.bool), *args[1:])
        if facts.name == "aten::masked_select":
            mask = args[1]
            if self._memory.holds(mask):
                mask = torch.ones(mask.size(), dtype=torch.bool)
            return (args[0], mask, *args[2:])
        return args

    def _selected(self, mask: torch.Tensor) -> torch.Tensor:
        if self._memory.holds(mask):
            mask = torch.ones(mask.size(), dtype=torch.bool)
        return mask.nonzero()

    # -- results ------------------------------------------------------------------

    def _item(self, tensor: torch.Tensor) -> bool | float | int:
        if tensor.dtype is torch.bool:
            return False
        return 1.0 if tensor.is_floating_point() else 1

    def _rebind(self, func: Any, facts: Facts, args: Any, kwargs: Any) -> Any:
        """Change which storage a tensor has; give it a hollow one where it grows."""
        tensor = args[0]
        if facts.name in ("aten::resize_", "aten::_resize_output_"):
            size = tuple(args[1])
            self._resize(tensor, size)
            return tensor
        if facts.name == "aten::resize_as_":
            self._resize(tensor, tuple(args[1].size()))
            return tensor
        return func(*args, **kwargs)

    def _resize(self, tensor: torch.Tensor, size: tuple[int, ...]) -> None:
        numel = math.prod(size)
        stride = _contiguous(size)
        n_bytes = numel * tensor.element_size()
        if n_bytes <= tensor.untyped_storage().nbytes():
            tensor.as_strided_(size, stride)
            return
        new = self._new(New(size, stride, tensor.dtype, n_bytes), None)
        tensor.set_(new.untyped_storage(), 0, size, stride)

    def _out(self, func: Any, shape: Shape, kwargs: Any, tensors: Any) -> Any:
        """Return the `out` arguments, resized as the operator would."""
        shapes = shape if isinstance(shape, list) else [shape]
        results = []
        for wanted in shapes:
            tensor = tensors[wanted.argument]
            if tuple(tensor.size()) != wanted.size:
                self._resize(tensor, wanted.size)
            results.append(tensor)
        return tuple(results) if isinstance(shape, list) else results[0]

    def _build(self, shape: Shape, facts: Facts, tensors: list[torch.Tensor]) -> Any:
        if isinstance(shape, New):
            return self._new(shape, self._value(shape, facts, tensors))
        if isinstance(shape, Alias) and facts.name not in ALIASES:
            # fake tensors hand on what the kernel copies
            n_bytes = math.prod(shape.size) * shape.dtype.itemsize
            return self._new(New(shape.size, shape.stride, shape.dtype, n_bytes), 1)
        if isinstance(shape, Alias):
            owner = tensors[shape.argument]
            offset = owner.storage_offset() + shape.offset
            if shape.dtype is not owner.dtype:
                return owner.view(shape.dtype)
            return owner.as_strided(shape.size, shape.stride, offset)
        if isinstance(shape, list):
            return tuple(self._build(item, facts, tensors) for item in shape)
        return shape

    def _value(self, shape: New, facts: Facts, tensors: list[torch.Tensor]) -> Any:
        """Make up what a small result holds."""
        name = facts.name.removeprefix("aten::")
        if shape.dtype is torch.bool:
            if name in ("eq", "ne") and len(tensors) == 2:  # of one: is it a number?
                same = tensors[0].data_ptr() == tensors[1].data_ptr()
                return same == (name == "eq")
            return name in ("all", "isfinite", "ne")
        if shape.dtype.is_floating_point or shape.dtype.is_complex:
            return 0 if name.startswith("zeros") else 1
        if tensors and name in _COUNTS:
            return tensors[0].numel() // max(math.prod(shape.size), 1)
        return _Spread(tensors, shape) if tensors and name in _CHOICES else 0

    def _new(self, shape: New, fill: Any) -> torch.Tensor:
        """Make a tensor: hollow, or with made-up values if it is small."""
        decides = not shape.dtype.is_floating_point and not shape.dtype.is_complex
        decides = decides and shape.dtype is not torch.bool
        if shape.n_bytes <= (_INDICES if decides else _MADE_UP):
            tensor = torch.empty_strided(shape.size, shape.stride, dtype=shape.dtype)
            if isinstance(fill, _Spread):
                tensor.copy_(fill.indices())
            elif fill is not None:
                tensor.fill_(fill)
            return tensor
        tensor = torch.empty(0, dtype=shape.dtype)
        storage = self._memory.storage(shape.n_bytes)
        return tensor.set_(storage, 0, shape.size, shape.stride)


class _Spread:
    """Indices into a dimension, each as often as the others."""

    def __init__(self, tensors: list[torch.Tensor], shape: New) -> None:
        self._shape = shape
        source, size = tensors[0].size(), shape.size
        self._dim, self._choices = 0, tensors[0].numel()
        if len(source) == len(size):
            changed = [
                i for i, (a, b) in enumerate(zip(source, size, strict=True)) if a != b
            ]
            self._dim = changed[0] if changed else len(size) - 1
            self._choices = source[self._dim] if source else 1
        elif len(source) == len(size) + 1:
            gone = [i for i, n in enumerate(size) if source[i] != n]
            self._choices = source[gone[0] if gone else -1]

    def indices(self) -> torch.Tensor:
        """Return them in the shape of the result, different along its dimension."""
        size = self._shape.size
        n = math.prod(size)
        if not size or n == 0:
            return torch.zeros(size, dtype=torch.int64)
        along = size[self._dim]
        rest = torch.arange(n // along).view(-1, 1) * along
        spread = (rest + torch.arange(along)) % max(self._choices, 1)
        moved = [s for i, s in enumerate(size) if i != self._dim]
        return spread.view(*moved, along).movedim(-1, self._dim)


def _forget(protected: dict[int, Any], key: int, _: object) -> None:
    protected.pop(key, None)


def _news(shape: Shape) -> Iterator[New]:
    if isinstance(shape, New):
        yield shape
    elif isinstance(shape, list):
        for item in shape:
            yield from _news(item)


def _is_small(thing: torch.Tensor | New) -> bool:
    """Say whether something is small enough to be computed."""
    if isinstance(thing, New):
        n_bytes = thing.n_bytes
    else:
        n_bytes = thing.numel() * thing.element_size()
    number = thing.dtype.is_floating_point or thing.dtype.is_complex
    return n_bytes <= (_COMPUTED if number else _INDICES)


def _returns_written(func: Any) -> bool:
    """Say whether an operator returns nothing but what it wrote into."""
    return all(
        r.alias_info is not None and r.alias_info.is_write for r in func._schema.returns
    )


def _results_written(func: Any, args: Any) -> Any:
    written = [
        args[i]
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    n = len(func._schema.returns)
    if n == 0:
        return None
    return written[0] if n == 1 else tuple(written[:n])


def _contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(size):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))
