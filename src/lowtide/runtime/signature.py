"""What an iteration is told by: the sequence of what it saves, told alike anywhere.

One saved value is described by its bytes, the shape and dtype of the tensor that was
saved first, the operator that made it, and that operator's switches (such as a module's
`training`). Descriptions are chained into one number for every beginning of an
iteration. Nothing here depends on addresses or on Python's randomised hashes, so that a
plan finds its iteration in another process too.

The node of autograd that saves a tensor does not exist yet when the hook runs: the
operator that made the tensor stands for it.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, NamedTuple

import torch

from lowtide.recorder.values import Value

_MASK = (1 << 63) - 1  # fits signed columns too
_FACTOR = 0x100000001B3
_KNOWN = 1 << 14  # descriptions whose numbers are remembered


class Told(NamedTuple):
    """What is told of one saved value."""

    number: int
    text: str  # the same in words


class Chain:
    """Gives beginnings of iterations their numbers."""

    def __init__(self) -> None:
        self._known: dict[Any, Told] = {}

    def tell(self, value: Value) -> Told:
        """Describe a saved value."""
        op = value.op
        saved = next(iter(value.saved.values()), None)
        alias = None if saved is None else saved.alias
        key = (
            value.nbytes,
            None if alias is None else (alias.shape, alias.dtype),
            "" if op is None else op.facts.name,
            () if op is None else tuple(a for a in op.args if a is True or a is False),
        )
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            text = _describe(*key)
            known = self._known[key] = Told(number_of(text), text)
        return known


def _describe(
    nbytes: int,
    tensor: tuple[torch.Size, torch.dtype] | None,
    operator: str,
    switches: tuple[bool, ...],
) -> str:
    words = [f"{nbytes} bytes"]
    if tensor is not None:
        shape, dtype = tensor
        kind = str(dtype).removeprefix("torch.")
        words.append(f"as {kind} [{', '.join(map(str, shape))}]")
    if operator:
        words.append(f"by {operator}")
    if switches:
        words.append(f"({', '.join(map(str, switches))})")
    return " ".join(words)


def number_of(text: str) -> int:
    """Give a text its number, the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") & _MASK


def extend(beginning: int, item: int) -> int:
    """Give the number of a beginning with one more saved value."""
    return ((beginning * _FACTOR) ^ item) & _MASK


def prefixes_of(items: list[int]) -> list[int]:
    """Give the numbers of all beginnings of an iteration, shortest first."""
    numbers, beginning = [], 0
    for item in items:
        beginning = extend(beginning, item)
        numbers.append(beginning)
    return numbers
