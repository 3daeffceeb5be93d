# SPDX-License-Identifier: Apache-2.0
"""The tensors among an operator's arguments and results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lowtide.recorder.schemas import Facts


def tensors_in(argument: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments or results, at any depth."""
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from tensors_in(item)


def written_by(facts: Facts, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator writes into, by its schema."""
    for position in facts.writes:
        if position < len(args):
            yield from tensors_in(args[position])
    for name in facts.writes_named:
        yield from tensors_in(kwargs.get(name))
