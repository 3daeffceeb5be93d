"""Watches where a tensor's bytes are handed to NumPy or, by DLPack, to anybody.

From then on they may be written without any operator being seen, so what was saved of
them must not leave memory, and nothing may be computed again from them. PyTorch tells
nobody of it: the methods of `torch.Tensor` are wrapped while a recorder watches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

_METHODS = ("numpy", "__dlpack__")  # `__array__` calls `numpy`


class Exports:
    """Tells of every export until it is closed."""

    def __init__(self, tell: Callable[[torch.Tensor], None]) -> None:
        self._tell = tell
        self._own = {name: vars(torch.Tensor).get(name) for name in _METHODS}
        for name in _METHODS:
            setattr(torch.Tensor, name, self._wrapped(getattr(torch.Tensor, name)))

    def _wrapped(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def export(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._tell(tensor)
            return method(tensor, *args, **kwargs)

        return export

    def close(self) -> None:
        """Put the methods back."""
        for name, method in self._own.items():
            if method is None:
                delattr(torch.Tensor, name)  # it is the base class's again
            else:
                setattr(torch.Tensor, name, method)
