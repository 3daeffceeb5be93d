"""Watches where a tensor's bytes are handed to NumPy or, by DLPack, to anybody.

From then on they may be written without any operator being seen, so what was saved of
them must not leave memory, and nothing may be computed again from them. The same goes
for a storage that is resized: FSDP lets a parameter's bytes go so, and fills them in
later. PyTorch tells nobody of it: the methods are wrapped while a recorder watches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.utils.dlpack

from lowtide.recorder.key import quiet
from lowtide.recorder.values import bytes_of

SHARED = "shared with NumPy or by DLPack"
_METHODS = ("numpy", "__dlpack__")  # `__array__` calls `numpy`
_FUNCTIONS = ((torch, "to_dlpack"), (torch.utils.dlpack, "to_dlpack"))


class Exports:
    """Tells of every export until it is closed."""

    def __init__(self, tell: Callable[[torch.Tensor, str], None]) -> None:
        self._tell = tell
        self._own = {name: vars(torch.Tensor).get(name) for name in _METHODS}
        for name in _METHODS:
            setattr(torch.Tensor, name, self._wrapped(getattr(torch.Tensor, name)))
        self._own_functions = [getattr(module, name) for module, name in _FUNCTIONS]
        for module, name in _FUNCTIONS:
            setattr(module, name, self._wrapped(getattr(module, name)))
        resize = torch.UntypedStorage.resize_

        @wraps(resize)
        def resizing(storage: torch.UntypedStorage, size: int) -> Any:
            if storage.nbytes():
                with quiet(), torch.inference_mode(False):
                    tensor = bytes_of(storage)
                self._tell(tensor, "resized by the program")
                del tensor
            return resize(storage, size)

        torch.UntypedStorage.resize_ = resizing  # type: ignore[assignment,method-assign]

    def _wrapped(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def export(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._tell(tensor, SHARED)
            return method(tensor, *args, **kwargs)

        return export

    def close(self) -> None:
        """Put the methods back."""
        del torch.UntypedStorage.resize_  # it is the base class's again
        for (module, name), function in zip(
            _FUNCTIONS, self._own_functions, strict=True
        ):
            setattr(module, name, function)
        for name, method in self._own.items():
            if method is None:
                delattr(torch.Tensor, name)  # it is the base class's again
            else:
                setattr(torch.Tensor, name, method)
