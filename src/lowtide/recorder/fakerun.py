# SPDX-License-Identifier: Apache-2.0
"""One fake run under way: kernels replaced, operators told to a listener."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from lowtide.errors import LowtideError
from lowtide.recorder.arguments import tensors_in
from lowtide.recorder.claims import Claims, storages_of
from lowtide.recorder.costs import Costs
from lowtide.recorder.dispatch import is_plain
from lowtide.recorder.fake import FakeKernels
from lowtide.recorder.graph import GraphListener
from lowtide.recorder.key import observe_with, observed, stop_observing
from lowtide.recorder.schemas import Facts
from lowtide.recorder.work import count_flops
from lowtide.recorder.workspace import workspace_of
from lowtide.trace import Graph


class _Register:
    def __init__(self) -> None:
        self.value = 0


class _Needs:
    """Tells the listener what an operator would have needed (graph.Meter)."""

    def __init__(self) -> None:
        self.live = _Register()
        self.op_peak = _Register()


class FakeRun:
    """While entered, no operator does any work; `begin` and `end` record a part.

    Arguments:
        costs: of operators on the device that is recorded for.
        device: "cpu" or "cuda", which need not be there.
        protect: leave alone all tensors, gradients and optimizers that are there
            already, for a program that goes on afterwards.
    """

    def __init__(self, costs: Costs, device: str, *, protect: bool) -> None:
        self.costs = costs
        self._claims = Claims(costs.hardware) if device == "cuda" else None
        self._patches = ExitStack()
        self.kernels = FakeKernels()
        self.listener: GraphListener | None = None
        self._needs = _Needs()
        self._kept = _Kept() if protect else None

    def __enter__(self) -> FakeRun:
        """Replace all kernels."""
        if observed():
            raise LowtideError(
                "a fake recording cannot begin inside a budget or another recording: "
                "begin it outside of them."
            )
        if self._kept is not None:
            self.kernels.protect(self._kept.note())
        if self._claims is not None:
            self._patches = self._claims.patches()
        observe_with(self.observe)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put all back."""
        stop_observing()
        self._patches.close()
        if self._kept is not None:
            self._kept.put_back()

    def begin(self) -> GraphListener:
        """Begin to record, anew where something was being recorded."""
        self.listener = GraphListener(self._needs, self._is_counted)
        return self.listener

    def end(self) -> Graph:
        """Stop to record."""
        listener, self.listener = self.listener, None
        assert listener is not None
        return listener.graph()

    def observe(self, func: Any, facts: Facts, args: Any, kwargs: Any) -> Any:
        """Stand in for one operator."""
        if facts.views:
            return func(*args, **kwargs)
        known: set[int] | None = None
        if self._claims is not None:
            there, args, kwargs = self._claims.target(args, kwargs)
            known = storages_of((args, tuple(kwargs.values()))) if there else None
        listener = self.listener
        token = None if listener is None else listener.before(func, args, kwargs)
        result = self.kernels.perform(func, facts, args, kwargs)
        if self._claims is not None and known is not None:
            self._claims.claim(result, known)
        if listener is None or token is None:
            return result
        flops = count_flops(func, args, kwargs, result)
        seconds = self.costs.seconds(facts, args, kwargs, result, flops)
        extra = workspace_of(facts.name, args, result)
        made = sum(t.untyped_storage().nbytes() for t in tensors_in(result))
        self._needs.op_peak.value = made + extra if extra else 0
        listener.after(func, token, seconds, result)
        return result

    def _is_counted(self, tensor: torch.Tensor) -> bool:
        if not is_plain(tensor, "cpu"):
            return False
        return self._claims is None or self._claims.hold(tensor)


def _is_leaf(tensor: torch.Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:  # a view that autograd has given up
        return False


class _Kept:
    """Gradients, states of optimizers and of random numbers, as they were before."""

    def note(self) -> Iterator[torch.Tensor]:
        """Look for all that there are; yield the tensors that there are."""
        things = gc.get_objects()
        tensors = [t for t in things if type(t) in (torch.Tensor, torch.nn.Parameter)]
        self._dice = torch.get_rng_state(), random.getstate()
        self._gradients = [(t, t.grad) for t in tensors if _is_leaf(t)]
        self._optimizers = [
            (thing, dict(thing.state), [dict(group) for group in thing.param_groups])
            for thing in things
            if issubclass(type(thing), torch.optim.Optimizer)
        ]
        self._states = [
            (state, dict(state))
            for _, states, _ in self._optimizers
            for state in states.values()
            if isinstance(state, dict)
        ]
        yield from (t for t in tensors if is_plain(t, "cpu"))
        yield from (
            g for _, g in self._gradients if g is not None and is_plain(g, "cpu")
        )

    def put_back(self) -> None:
        """Give everybody what they had."""
        torch.set_rng_state(self._dice[0])
        random.setstate(self._dice[1])
        for tensor, gradient in self._gradients:
            if tensor.grad is not gradient:
                tensor.grad = gradient
        for state, before in self._states:
            state.clear()
            state.update(before)
        for optimizer, states, groups in self._optimizers:
            optimizer.state.clear()
            optimizer.state.update(states)
            for group, before in zip(optimizer.param_groups, groups, strict=False):
                group.clear()
                group.update(before)
        self._gradients.clear()
        self._optimizers.clear()
        self._states.clear()
