# SPDX-License-Identifier: Apache-2.0
"""A CUDA device that is not there, for fake runs.

Tensors "on" it are hollow CPU tensors; a table knows which, and for the time of the run
`Tensor.device`, `Tensor.to` and `torch.cuda` answer a program accordingly. Where they
come from an operator they are where its arguments are, or where it was told to put
them. So optimizers choose their foreach kernels, and attention its fused ones, as they
do on the device. All is put back at the end.

What differs from a real device: recurrent layers and batch norm are recorded as the
operators of a CPU, which save as much.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lowtide.hardware import Hardware
from lowtide.recorder.arguments import tensors_in
from lowtide.recorder.autocasts import wide_operators
from lowtide.recorder.storages import storage_key

_CUDA = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_MILLISECONDS = 1.0  # between any two events

Keywords = dict[str, Any]

_ACCELERATOR: Keywords = {  # what `torch.accelerator` says
    "is_available": True,
    "current_accelerator": torch.device("cuda"),
    "device_count": 1,
    "current_device_index": 0,
    "current_device_idx": 0,
    "set_device_index": None,
    "synchronize": None,
}


class Claims:
    """Which storages are said to lie on the device; the patches that say so."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._claimed: dict[int, weakref.ref[Any]] = {}

    def hold(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor is said to lie on the device."""
        return storage_key(tensor) in self._claimed

    def claim(self, result: Any, known: set[int]) -> None:
        """Say from now on that a result lies there, unless its storage is known."""
        claimed = self._claimed
        for tensor in _plain(result):
            key = storage_key(tensor)
            if key not in claimed and key not in known:
                storage = tensor.untyped_storage()
                claimed[key] = weakref.ref(storage, partial(_forget, claimed, key))

    def target(self, args: Any, kwargs: Keywords) -> tuple[bool, Any, Keywords]:
        """Say whether results lie on the device; take it out of the arguments."""
        device = kwargs.get("device")
        if device is not None:
            return device.type == "cuda", args, {**kwargs, "device": _CPU}
        for i, argument in enumerate(args):
            if isinstance(argument, torch.device):
                moved = (*args[:i], _CPU, *args[i + 1 :])
                return argument.type == "cuda", moved, kwargs
        return any(map(self.hold, _plain(args))), args, kwargs

    # -- patches ------------------------------------------------------------------

    def patches(self) -> ExitStack:
        """Return a context in which programs find the device."""
        with ExitStack() as stack:
            for owner, name, new in self._replacements():
                stack.enter_context(patch.object(owner, name, new, create=True))
            stack.enter_context(wide_operators())
            return stack.pop_all()

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        tensor = torch.Tensor
        own_device = torch._C.TensorBase.device

        def device_of(self_: torch.Tensor) -> torch.device:
            device: torch.device = own_device.__get__(self_)
            return _CUDA if device.type == "cpu" and self._on(self_) else device

        yield tensor, "device", property(device_of)
        yield tensor, "is_cuda", property(lambda t: device_of(t).type == "cuda")
        yield tensor, "is_cpu", property(lambda t: device_of(t).type == "cpu")
        yield tensor, "get_device", lambda t: -1 if device_of(t).type == "cpu" else 0
        yield tensor, "to", self._moving(tensor.to, device_of)
        yield tensor, "cuda", lambda t, device=None, **_: t.to(_CUDA)
        yield tensor, "cpu", lambda t, **_: t.to(_CPU)
        yield tensor, "pin_memory", lambda t, *_: t
        for name in ("tensor", "as_tensor"):
            yield torch, name, _made_then_moved(getattr(torch, name))
        yield F, "scaled_dot_product_attention", self._attention()
        yield DataLoader, "__init__", _unpinned(DataLoader.__init__)
        autocast = torch.amp.autocast_mode.autocast
        yield autocast, "__init__", _autocast_on_cpu(autocast.__init__)
        for name, value in _answers(self.hardware).items():
            yield torch.cuda, name, value
        yield torch.accelerator, "current_stream", partial(_say, _Stream())
        for name, value in _ACCELERATOR.items():
            yield torch.accelerator, name, partial(_say, value)

    def _on(self, tensor: torch.Tensor) -> bool:
        try:
            return self.hold(tensor)
        except (RuntimeError, NotImplementedError):
            return False  # no storage: nothing of ours

    def _moving(self, own: Any, device_of: Callable[[Any], torch.device]) -> Any:
        @wraps(own)
        def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if args and isinstance(args[0], torch.Tensor):
                args = (device_of(args[0]), args[0].dtype, *args[1:])
            copy = kwargs.pop("copy", False)
            parsed: Any = torch._C._nn._parse_to(*args, **kwargs)
            device, dtype, non_blocking, memory_format = parsed
            if device is not None and device.type in ("cpu", "cuda"):
                if device.type != device_of(tensor).type:
                    moved: torch.Tensor = torch.ops.aten._to_copy(
                        tensor,
                        dtype=dtype,
                        device=_CUDA if device.type == "cuda" else _CPU,
                        non_blocking=non_blocking,
                        memory_format=memory_format,
                    )
                    return moved
                device = None
            result: torch.Tensor = own(
                tensor,
                device,
                dtype or tensor.dtype,
                non_blocking,
                copy,
                memory_format=memory_format,
            )
            return result

        return to

    def _attention(self) -> Any:
        """Return what chooses the fused kernel that the device would choose."""
        own = F.scaled_dot_product_attention

        @wraps(own)
        def attention(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attn_mask: torch.Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> torch.Tensor:
            if query.dim() != 4 or not self._on(query):
                return own(
                    query, key, value, attn_mask, dropout_p, is_causal,
                    scale=scale, enable_gqa=enable_gqa,
                )  # fmt: skip
            if enable_gqa:
                groups = query.size(1) // key.size(1)
                key = key.repeat_interleave(groups, 1)
                value = value.repeat_interleave(groups, 1)
            results: Any
            if attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
                results = torch.ops.aten._scaled_dot_product_flash_attention(
                    query, key, value, dropout_p, is_causal, False, scale=scale
                )
            else:
                bias = _bias(attn_mask, query, key)
                results = torch.ops.aten._scaled_dot_product_efficient_attention(
                    query, key, value, bias, True, dropout_p, is_causal, scale=scale
                )
            out: torch.Tensor = results[0]
            return out

        return attention


def _bias(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        zero = torch.zeros_like(mask, dtype=query.dtype)
        mask = zero.masked_fill(mask.logical_not(), -torch.inf)
    return mask.expand(*query.shape[:3], key.size(2))


def _answers(hardware: Hardware) -> Keywords:
    """Return what stands in for the functions of `torch.cuda`."""
    total = hardware.memory_bytes
    properties = SimpleNamespace(
        name=hardware.name,
        total_memory=total,
        major=8,
        minor=0,
        multi_processor_count=100,
    )
    answers: Keywords = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": hardware.name,
        "get_device_properties": properties,
        "get_device_capability": (8, 0),
        "mem_get_info": (total, total),
        "memory_stats": {},
        "memory_summary": "",
        "current_stream": _Stream(),
        "default_stream": _Stream(),
    }
    answers |= dict.fromkeys(
        [
            "memory_allocated",
            "max_memory_allocated",
            "memory_reserved",
            "max_memory_reserved",
        ],
        0,
    )
    answers |= dict.fromkeys(
        [
            "_lazy_init",
            "init",
            "synchronize",
            "empty_cache",
            "manual_seed",
            "manual_seed_all",
            "set_device",
            "reset_peak_memory_stats",
            "reset_max_memory_allocated",
            "set_per_process_memory_fraction",
        ]
    )
    functions: Keywords = {name: partial(_say, v) for name, v in answers.items()}
    return functions | {"Stream": _Stream, "Event": _Event, "stream": _Stream}


def _say(answer: Any, *_: Any, **__: Any) -> Any:
    return answer


class _Stream:
    """A queue in which nothing waits."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        """Wait for nothing."""

    def is_capturing(self) -> bool:
        """Say that no graph is being captured."""
        return False

    wait_stream = wait_event = record_event = lambda self, *_: None


class _Event(_Stream):
    """A moment in such a queue."""

    def record(self, *_: Any) -> None:
        """Mark it."""

    def query(self) -> bool:
        """Say that it has come."""
        return True

    def elapsed_time(self, _: object) -> float:
        """Return some milliseconds."""
        return _MILLISECONDS


def _made_then_moved(make: Any) -> Any:
    @wraps(make)
    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None:
            return make(data, *args, **kwargs)
        grad = kwargs.pop("requires_grad", False)
        tensor = make(data, *args, **kwargs).to(device)
        return tensor.requires_grad_(grad) if grad else tensor

    return made


def _unpinned(make: Any) -> Any:
    @wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **{**kwargs, "pin_memory": False})

    return init


def _autocast_on_cpu(make: Any) -> Any:
    @wraps(make)
    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type = "cpu"
            if not args and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.float16
        make(self, device_type, *args, **kwargs)

    return init


def _plain(argument: Any) -> Iterator[torch.Tensor]:
    return (t for t in tensors_in(argument) if t.layout is torch.strided)


def storages_of(argument: Any) -> set[int]:
    """Collect the storages of all tensors among arguments."""
    return {storage_key(tensor) for tensor in _plain(argument)}


def _forget(claimed: dict[int, Any], key: int, _: object) -> None:
    claimed.pop(key, None)
