# SPDX-License-Identifier: Apache-2.0
"""One fake run under way: kernels replaced, operators told to a listener."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch

from lowtide.errors import LowtideError
from lowtide.recorder.costs import Costs
from lowtide.recorder.dispatch import is_plain
from lowtide.recorder.fake import FakeKernels
from lowtide.recorder.graph import GraphListener, count_flops
from lowtide.recorder.key import observe_with, observed, stop_observing
from lowtide.recorder.schemas import Facts
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
        protect: leave alone all tensors, gradients and optimizers that are there
            already, for a program that goes on afterwards.
    """

    def __init__(self, costs: Costs, *, protect: bool) -> None:
        self.costs = costs
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
        if self._kept is not None:
            self._kept.put_back()

    def begin(self) -> GraphListener:
        """Begin to record, anew where something was being recorded."""
        self.listener = GraphListener(self._needs, _is_counted)
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
        listener = self.listener
        if listener is None:
            return self.kernels.perform(func, facts, args, kwargs)
        token = listener.before(func, args, kwargs)
        result = self.kernels.perform(func, facts, args, kwargs)
        flops = count_flops(func, args, kwargs, result)
        seconds = self.costs.seconds(facts, args, kwargs, result, flops)
        self._needs.op_peak.value = self.costs.workspace(facts, args, kwargs, result)
        listener.after(func, token, seconds, result)
        return result


def _is_counted(tensor: torch.Tensor) -> bool:
    return is_plain(tensor, "cpu")


class _Kept:
    """Gradients and states of optimizers, as they were before."""

    def note(self) -> Iterator[torch.Tensor]:
        """Look for all that there are; yield the tensors that there are."""
        things = gc.get_objects()
        tensors = [t for t in things if type(t) in (torch.Tensor, torch.nn.Parameter)]
        self._gradients = [(t, t.grad) for t in tensors if t.is_leaf]
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
