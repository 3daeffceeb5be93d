"""Replay: compute dropped values again, exactly, from what is at hand.

The operators that are missing are gathered first (a stack, no recursion), then run
in their original order, which is a topological one. Each runs below autograd with its
own arguments of this iteration, its recorded random state and scratch in place of
running statistics; an in-place operator writes into a copy of the earlier value
unless that value was only passing through. Intermediates go at their last use.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from lowtide.errors import LowtideError
from lowtide.recorder.dispatch import Blank, Scratch
from lowtide.recorder.key import quiet
from lowtide.recorder.values import Op, Ref, Value, bytes_of, tensor_over
from lowtide.runtime.ledger import Ledger


class Replayer:
    """Brings dropped values back by running their operators again."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.seconds = 0.0
        self.bytes = 0  # of saved values computed again, so far
        self.operators = 0

    def __call__(self, value: Value) -> None:
        """Compute `value` again and install it."""
        start = perf_counter()
        waited = self.ledger.exposed
        ops, uses = _missing(value)
        if self.ledger.streams is not None:
            self.ledger.streams.join()  # its inputs may come from any of them
        _Run(self, ops, uses).run()
        if not value.resident:
            raise LowtideError(
                "a dropped tensor could not be computed again; please report this "
                f"({len(ops)} operators replayed, last {ops[-1].facts.name})"
            )
        self.seconds += perf_counter() - start - (self.ledger.exposed - waited)
        self.operators += len(ops)


def _missing(value: Value) -> tuple[list[Op], dict[int, int]]:
    """Gather the operators to run, in order, and how often each value is read."""
    ops: dict[int, Op] = {}
    uses: dict[int, int] = {}
    stack = [value]
    while stack:
        op = stack.pop().op
        if op is None:
            raise LowtideError("a value without lineage was dropped; please report it")
        if op.index in ops:
            continue
        ops[op.index] = op
        for parent in dict.fromkeys(op.inputs):
            uses[id(parent)] = uses.get(id(parent), 0) + 1
            if parent.copy is None and not parent.trusted:
                stack.append(parent)
    return [ops[i] for i in sorted(ops)], uses


class _Run:
    """One replay: its operators and the bytes passing through.

    `passing` holds tensors, so that what a later operator of this replay reads counts
    as held and does not leave in between.
    """

    def __init__(self, owner: Replayer, ops: list[Op], uses: dict[int, int]) -> None:
        self.owner = owner
        self.ledger = owner.ledger
        self.ops = ops
        self.uses = uses
        self.passing: dict[int, torch.Tensor] = {}

    def run(self) -> None:
        self.ledger.replaying.append(self.uses)
        try:
            for op in self.ops:
                self._step(op)
        finally:
            self.ledger.replaying.pop()

    def _step(self, op: Op) -> None:
        held: dict[int, torch.Tensor] = {}
        written = {id(v) for v in _written(op)}
        for parent in dict.fromkeys(op.inputs):
            key = id(parent)
            tensor = self._at_hand(parent)
            self.uses[key] -= 1
            if self.uses[key] == 0:
                self.passing.pop(key, None)
            if key in written and (self.uses[key] > 0 or parent.storage() is not None):
                self.ledger.require(parent.nbytes, _again(op))
                with quiet():
                    tensor = tensor.clone()
            held[key] = tensor
        self.ledger.require(op.need, _again(op))
        storages = {key: tensor.untyped_storage() for key, tensor in held.items()}
        starved = False
        try:
            done = _run_on(op, storages)
        except torch.OutOfMemoryError:
            if _written(op):
                raise  # a part of its work may be done already
            starved = True
        if starved:  # outside, so that the error's frames let go of their tensors
            self.ledger.starved()
            done = _run_on(op, storages)
        if self.ledger.streams is not None:
            for storage in storages.values():
                self.ledger.streams.keep(storage)
        self._collect(op, *done)

    def _at_hand(self, value: Value) -> torch.Tensor:
        """Find, or read back, the bytes of an input."""
        passing = self.passing.get(id(value))
        if passing is not None:
            return passing
        if value.storage() is None:
            if value.copy is None and not value.away:
                raise LowtideError(
                    "a source of a dropped tensor is gone; please report it"
                )
            if not value.away:
                return self._read_source(value)
            self.ledger.bring_back(value)
        storage = value.storage()
        assert storage is not None
        with quiet():
            return bytes_of(storage)

    def _read_source(self, value: Value) -> torch.Tensor:
        """Read back a source that only dropped values want: it passes through."""
        assert self.ledger.lane is not None
        self.ledger.require(value.nbytes, "reading a saved tensor back")
        tensor = self.ledger.allocate(value.nbytes)
        read = self.ledger.lane.read(value.copy, tensor.data_ptr())
        self.ledger.exposed += read.wait()
        self.passing[id(value)] = tensor
        return tensor

    def _collect(self, op: Op, args: Any, kwargs: Any, result: Any) -> None:
        """Keep what somebody wants; let the rest pass through or go."""
        for (kind, where), reference in op.outputs:
            value = reference()
            if value is None:
                continue
            if kind == "argument":
                tensor = args[where]
            elif kind == "keyword":
                tensor = kwargs[where]
            else:
                tensor = _pick(result, where)
            storage = tensor.untyped_storage()
            if storage.nbytes() != value.nbytes:
                raise LowtideError(
                    f"replaying {op.facts.name} gave {storage.nbytes()} bytes where "
                    f"{value.nbytes} were expected; please report this"
                )
            if value.away and value.dropped:
                with quiet():
                    self.ledger.install(value, tensor.detach())
                self.owner.bytes += value.nbytes
            if self.uses.get(id(value), 0) > 0:
                with quiet():
                    self.passing[id(value)] = bytes_of(storage)


def _again(op: Op) -> str:
    return f"computing {op.facts.name} again"


def _written(op: Op) -> list[Value]:
    found: list[Value] = []
    for position in op.facts.writes:
        if position < len(op.args) and isinstance(op.args[position], Ref):
            found.append(op.args[position].value)
    for name in op.facts.writes_named:
        if isinstance(op.kwargs.get(name), Ref):
            found.append(op.kwargs[name].value)
    return found


def _decode(argument: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
    if isinstance(argument, Ref):
        return tensor_over(storages[id(argument.value)], argument.geometry)
    if isinstance(argument, Scratch):
        return torch.zeros(argument.size, dtype=argument.dtype, device=argument.device)
    if isinstance(argument, Blank):
        fresh = torch.empty(argument.nbytes, dtype=torch.uint8, device=argument.device)
        return tensor_over(fresh.untyped_storage(), argument.geometry)
    if isinstance(argument, list):
        return [_decode(item, storages) for item in argument]
    return argument


def _run_on(op: Op, storages: dict[int, torch.UntypedStorage]) -> tuple[Any, Any, Any]:
    """Run an operator on these; returns its arguments, named ones, and the result."""
    with torch.enable_grad(), quiet():
        args = [_decode(argument, storages) for argument in op.args]
        kwargs = {k: _decode(v, storages) for k, v in op.kwargs.items()}
        return args, kwargs, _run_seeded(op, args, kwargs)


def _run_seeded(op: Op, args: Any, kwargs: Any) -> Any:
    """Run the operator with the random state it had the first time."""
    if not op.rng:
        return op.func(*args, **kwargs)
    now = [(generator, generator.get_state()) for generator, _ in op.rng]
    try:
        for generator, state in op.rng:
            generator.set_state(state)
        return op.func(*args, **kwargs)
    finally:
        for generator, state in now:
            generator.set_state(state)


def _pick(result: Any, where: Any) -> Any:
    if isinstance(where, tuple):
        return result[where[0]][where[1]]
    return result[where] if isinstance(result, (tuple, list)) else result
