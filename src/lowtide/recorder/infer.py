# SPDX-License-Identifier: Apache-2.0
"""What an operator would return, by PyTorch's fake tensors: sizes, strides, types.

The answer for a signature (operator, geometry of its tensors, its other arguments) is
kept, so that the layers of a network and its later steps ask only once.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# these return their argument's storage, though their schemas do not say so
ALIASES = ("aten::_unsafe_view", "aten::lift", "aten::_reshape_alias")
_log = logging.getLogger("torch._subclasses.fake_tensor")


@dataclass(frozen=True, slots=True)
class New:
    """A tensor in a storage of its own."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Alias:
    """A tensor in the storage of the n-th tensor among the arguments."""

    argument: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


Shape = Any  # a New, an Alias, a list of these, or a plain value


class Unknown(Exception):
    """Fake tensors do not know an operator, or not for these arguments."""


class Inference:
    """Asks fake tensors, once a signature."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[Any, Shape] = {}

    def shape_of(self, func: Any, args: Any, kwargs: Any) -> Shape:
        """Return the shape of a result.

        Raises:
            Unknown: fake tensors cannot say, for one of their many reasons.
        """
        key = (func, _key(args), tuple((k, _key(v)) for k, v in kwargs.items()))
        known = self._known.get(key, self)
        if known is self:
            # it reports every operator that it cannot do; here that is no fault
            _log.disabled, before = True, _log.disabled
            try:
                known = self._ask(func, args, kwargs)
            except Exception:
                known = Unknown
            finally:
                _log.disabled = before
            self._known[key] = known
            if known is Unknown:
                gc.collect()  # errors hold on to frames, and these to tensors
        if known is Unknown:
            raise Unknown(str(func))
        return known

    def _ask(self, func: Any, args: Any, kwargs: Any) -> Shape:
        shape = self._ask_fakes(func, args, kwargs)
        if func is torch.ops.aten.mkldnn_rnn_layer.default and args[-1]:
            shape[3] = _rnn_reserve(func, args)
        return shape

    def _ask_fakes(self, func: Any, args: Any, kwargs: Any) -> Shape:
        fakes: list[torch.Tensor] = []
        fake_args = [self._fake(argument, fakes) for argument in args]
        fake_kwargs = {k: self._fake(v, fakes) for k, v in kwargs.items()}
        owners = {f.untyped_storage()._cdata: i for i, f in enumerate(fakes)}
        with self._mode:
            result = func(*fake_args, **fake_kwargs)
        return _shape(result, owners)

    def _fake(self, argument: Any, fakes: list[torch.Tensor]) -> Any:
        if isinstance(argument, torch.Tensor):
            meta = torch.empty_strided(
                argument.size(), argument.stride(), dtype=argument.dtype, device="meta"
            )
            fake = FakeTensor(self._mode, meta, torch.device("cpu"))
            fakes.append(fake)
            return fake
        if isinstance(argument, (list, tuple)):
            return [self._fake(item, fakes) for item in argument]
        return None if isinstance(argument, torch.Generator) else argument


def _rnn_reserve(func: Any, args: Any) -> New:
    """Find what a recurrent layer keeps for its backward pass, from short runs.

    Its size is the library's affair; it grows by the step.
    """
    few, more = 8, 16
    picture = args[0]
    sizes = []
    for steps in (few, more):
        start = torch.zeros(steps, *picture.shape[1:], dtype=picture.dtype)
        sizes.append(func(start, *args[1:])[3].numel())
    by_step = (sizes[1] - sizes[0]) / (more - few)
    numel = round(sizes[1] + by_step * (picture.size(0) - more))
    return New((numel,), (1,), torch.uint8, numel)


def _key(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return (argument.size(), argument.stride(), argument.dtype)
    if isinstance(argument, (list, tuple)):
        return tuple(_key(item) for item in argument)
    if isinstance(argument, torch.Generator):
        return None
    if isinstance(argument, (bool, float)):  # True == 1 == 1.0 as keys, alas
        return (type(argument), argument)
    return argument


def _shape(result: Any, owners: dict[int, int]) -> Shape:
    if isinstance(result, torch.Tensor):
        storage = result.untyped_storage()
        owner = owners.get(storage._cdata)
        size, stride = tuple(map(int, result.size())), tuple(map(int, result.stride()))
        if owner is not None:
            offset = int(result.storage_offset())
            return Alias(owner, size, stride, offset, result.dtype)
        return New(size, stride, result.dtype, int(storage.nbytes()))
    if isinstance(result, (list, tuple)):
        return [_shape(item, owners) for item in result]
    return result
