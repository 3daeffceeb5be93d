"""lowtide: train PyTorch programs within a byte budget, gradients unchanged.

`with lowtide.budget("8GiB"):` around a training loop, or `lowtide run --budget 8GiB
train.py` around an unmodified script. Names that need torch are resolved on first use,
so importing this package does not load it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lowtide.errors import BudgetError as BudgetError
from lowtide.errors import LowtideError as LowtideError
from lowtide.errors import SizeError as SizeError
from lowtide.errors import SpillError as SpillError
from lowtide.timeline import Timeline as Timeline
from lowtide.trace import Trace as Trace
from lowtide.units import format_bytes as format_bytes
from lowtide.units import parse_bytes as parse_bytes
from lowtide.version import VERSION

if TYPE_CHECKING:
    from lowtide.runtime.recording import record as record
    from lowtide.runtime.session import budget as budget

__version__ = VERSION

_NEED_TORCH = {
    "budget": "lowtide.runtime.session",
    "record": "lowtide.runtime.recording",
}


def __getattr__(name: str) -> Any:
    module = _NEED_TORCH.get(name)
    if module is None:
        raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
    return getattr(import_module(module), name)
