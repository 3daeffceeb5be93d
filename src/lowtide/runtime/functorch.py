"""Let torch.func run inside a budget.

It forbids saved-tensor hooks for its duration and refuses while hooks are in force,
so ours step aside: what its transforms save is kept as plain PyTorch keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Hook = Callable[[Any], Any]


def suspending(pack: Hook, unpack: Hook) -> Any:
    """Wrap torch's `disable_saved_tensors_hooks` around a pair of hooks."""
    original = torch.autograd.graph.disable_saved_tensors_hooks
    autograd = torch._C._autograd

    class Suspending:
        def __init__(self, message: str) -> None:
            self._inner = original(message)

        def __enter__(self) -> None:
            top = autograd._top_saved_tensors_default_hooks(True)
            self._popped = top is not None and top[0] == pack
            if self._popped:
                autograd._pop_saved_tensors_default_hooks()
            self._inner.__enter__()

        def __exit__(self, *details: Any) -> None:
            self._inner.__exit__(*details)
            if self._popped:
                autograd._push_saved_tensors_default_hooks(pack, unpack)

    return Suspending
