"""Sees every operator below autograd, before and after it runs.

It keeps the lineage of values (which operator made them from which) while gradients
are being recorded, notices every write, and lets its listener make room before an
operator allocates. It performs nothing else. Cost: about 10 us an operator, as much
again where lineage is kept.

Not a `TorchDispatchMode`: while one is active, PyTorch computes some gradients by
other formulas (those meant for tensor subclasses), whose last bit differs. Kernels on a
dispatch key that ordinary programs leave unused see the same operators and change
nothing; like a mode they follow autograd into its threads.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch

from lowtide.recorder.arguments import written_by
from lowtide.recorder.exports import SHARED, Exports
from lowtide.recorder.key import observe_with, stop_observing, unseen
from lowtide.recorder.schemas import Facts
from lowtide.recorder.storages import StorageTable
from lowtide.recorder.values import (
    Op,
    Ref,
    Value,
    geometry_of,
)

_PLAIN = (torch.Tensor, torch.nn.Parameter)
# the attribute itself may say something else, for the sake of a program (claims.py)
_is_on_cpu = vars(torch._C.TensorBase)["is_cpu"].__get__


class Listener(Protocol):
    """What the recorder tells, and asks, the one who owns the memory."""

    def before(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Make room for an operator; returns a token for `after`."""

    def after(self, func: Any, token: Any, seconds: float, result: Any) -> int:
        """Note an operator's end; returns the bytes it needed while it ran."""

    def before_write(self, value: Value) -> None:
        """Save what others need of a value that is about to be overwritten."""


class Clock(Protocol):
    """Times operators on a device, which runs them later than they are called."""

    def begin(self, func: Any, args: Any) -> Any:
        """Note that an operator is about to be called; returns a token."""

    def end(self, token: Any, seconds: float) -> float:
        """Return what the operator takes, given what its call took."""


class Cell(Protocol):
    """Hold one number."""

    value: int


class Opaque(Exception):
    """An argument that lineage cannot describe (subclass, sparse, other device)."""


class Scratch:
    """Stands for running statistics: a replay writes into a throw-away copy."""

    __slots__ = ("device", "dtype", "size")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.size = tuple(tensor.size())
        self.dtype = tensor.dtype
        self.device = tensor.device


class Blank:
    """Stands for a tensor that the operator overwrites whole, without reading it."""

    __slots__ = ("device", "geometry", "nbytes")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.device = tensor.device
        self.geometry = geometry_of(tensor)
        self.nbytes = tensor.untyped_storage().nbytes()


def is_plain(tensor: torch.Tensor, device_type: str) -> bool:
    """Say whether a tensor is one that values and geometry can describe."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and (
            _is_on_cpu(tensor)
            if device_type == "cpu"
            else str(tensor.device) == device_type
        )
        and not tensor.is_quantized
        and not tensor._is_zerotensor()
        and not tensor.is_inference()
    )


class Recorder:
    """Observes operators; keeps values and their lineage in a storage table."""

    def __init__(
        self, table: StorageTable, listener: Listener, device_type: str
    ) -> None:
        self.table = table
        self.listener = listener
        self.device_type = device_type
        self.index = 0  # operators seen in this iteration
        self.position: Cell = ctypes.c_int64()  # the same, for those who look on
        self.serial = 0  # operators recorded since the start, never reset
        self.enabled = True  # switched off in forked children
        # frees all that can be freed, where a device has run out of memory
        self.starved: Callable[[], None] | None = None
        self.clock: Clock | None = None
        # says whether operators are being written down only, to run at another time
        self.captured: Callable[[], bool] | None = None
        # at rest: says whether the next operator, by its number, may run unwatched
        self.resting: Callable[[int, Any], bool] | None = None

    def attach(self) -> None:
        """See the operators of this thread, and of autograd's on its behalf."""
        observe_with(self.observe)
        self._exports = Exports(self._exported)

    def detach(self) -> None:
        """See nothing any more."""
        self._exports.close()
        stop_observing()

    def _exported(self, tensor: torch.Tensor, why: str) -> None:
        """Note that others, who write unseen, are about to share a tensor's bytes."""
        if not self.enabled or not is_plain(tensor, self.device_type):
            return
        value = self.table.lookup(tensor)
        if value is not None:
            value.kept_because = value.kept_because or why
            with unseen(), torch.inference_mode(False), torch.no_grad():
                value.expose()
            self.listener.before_write(value)
            self.table.end(tensor)
        if why == SHARED:
            self.table.share(tensor)

    def observe(self, func: Any, facts: Facts, args: Any, kwargs: Any) -> Any:
        """Run one operator under observation."""
        if not self.enabled or facts.views:
            return func(*args, **kwargs)
        if self.captured is not None and self.captured():
            return func(*args, **kwargs)
        self.index += 1
        self.position.value = self.index
        if self.resting is not None and self.resting(self.index, func):
            return func(*args, **kwargs)
        op: Op | None = None
        if torch.is_grad_enabled() and not facts.rebinds and facts.replayable:
            op = self._describe(func, facts, args, kwargs)
        written = self._note_writes(facts, args, kwargs)
        token = self.listener.before(func, args, kwargs)
        if self.resting is not None:  # from now on: lineage has just been cut
            op = None
        if op is not None and facts.seeded:  # now that there is room for the state
            op.rng = _random_states(args, kwargs, self.device_type)
        for tensor in written:  # room may have been made by what starts from it
            value = self.table.lookup(tensor)
            if value is not None and value.pins:
                self.listener.before_write(value)
        try:
            timed = None if self.clock is None else self.clock.begin(func, args)
            start = perf_counter()
            starved = False
            try:
                result = func(*args, **kwargs)
            except torch.OutOfMemoryError:
                if facts.writes or facts.writes_named or (facts.seeded and op is None):
                    raise  # a part of its work may be done already
                starved = self.starved is not None
                if not starved:
                    raise
            if starved:  # outside, so that the error's frames let go of their tensors
                result = self._run_again(func, op, args, kwargs)
            seconds = perf_counter() - start
            if self.clock is not None:
                seconds = self.clock.end(timed, seconds)
            need = self.listener.after(func, token, seconds, result)
        except BaseException:
            for tensor in written:  # perhaps half written
                self.table.end(tensor)
            raise
        if op is not None:
            op.seconds = seconds
            op.need = need
            self._bind_results(op, facts, args, kwargs, result)
        else:
            for tensor in written:
                self.table.end(tensor)
        return result

    def _run_again(self, func: Any, op: Op | None, args: Any, kwargs: Any) -> Any:
        """Run an operator that found no memory, after making room as never before."""
        assert self.starved is not None
        self.starved()
        for generator, state in op.rng if op is not None else ():
            generator.set_state(state)
        return func(*args, **kwargs)

    # -- lineage --------------------------------------------------------------

    def _describe(self, func: Any, facts: Facts, args: Any, kwargs: Any) -> Op | None:
        """Describe the operator and its arguments as they are before it runs."""
        inputs: list[Value] = []
        try:
            described = [self._encode(argument, inputs) for argument in args]
            named = {k: self._encode(v, inputs) for k, v in kwargs.items()}
        except Opaque:
            return None
        if facts.running_statistics is not None:
            self._hide_statistics(facts, args, described, inputs)
        if facts.overwrites and _covers_its_storage(args[0]):
            inputs.remove(described[0].value)
            described[0] = Blank(args[0])
        op = Op(func, facts, described, named)
        op.inputs = tuple(inputs)
        self.serial += 1
        op.index = self.serial
        return op

    def _encode(self, argument: Any, inputs: list[Value]) -> Any:
        if isinstance(argument, torch.Tensor):
            if not is_plain(argument, self.device_type):
                raise Opaque
            value = self.table.value_of(argument)
            if value.foreign and _is_parameter(argument):
                value.foreign = False
            inputs.append(value)
            return Ref(value, geometry_of(argument))
        if isinstance(argument, (list, tuple)):
            if any(isinstance(item, torch.Tensor) for item in argument):
                return [self._encode(item, inputs) for item in argument]
            return list(argument)
        return argument

    def _hide_statistics(
        self, facts: Facts, args: Any, described: list[Any], inputs: list[Value]
    ) -> None:
        """Put scratch in place of running statistics that are only written."""
        if not _trains(facts, args):
            return
        assert facts.running_statistics is not None
        for position in facts.running_statistics[:2]:
            if position < len(args) and isinstance(args[position], torch.Tensor):
                inputs.remove(described[position].value)
                described[position] = Scratch(args[position])

    def _bind_results(
        self, op: Op, facts: Facts, args: Any, kwargs: Any, result: Any
    ) -> None:
        """Begin the values that the operator made, in results and by writing."""
        hidden = facts.running_statistics
        for position in facts.writes:
            tensor = args[position] if position < len(args) else None
            if not isinstance(tensor, torch.Tensor):
                continue
            if hidden is not None and position in hidden[:2]:
                if _trains(facts, args):
                    self.table.end(tensor)
                continue
            self._begin(op, ("argument", position), tensor)
        for name in facts.writes_named:
            if isinstance(kwargs.get(name), torch.Tensor):
                self._begin(op, ("keyword", name), kwargs[name])
        results = result if isinstance(result, (tuple, list)) else (result,)
        for i, tensor in enumerate(results):
            if isinstance(tensor, torch.Tensor) and is_plain(tensor, self.device_type):
                if self.table.lookup(tensor) is None:
                    self._begin(op, ("return", i), tensor)
            elif isinstance(tensor, (tuple, list)):
                for j, item in enumerate(tensor):
                    if (
                        isinstance(item, torch.Tensor)
                        and is_plain(item, self.device_type)
                        and self.table.lookup(item) is None
                    ):
                        self._begin(op, ("return", (i, j)), item)

    def _begin(self, op: Op, where: tuple[str, Any], tensor: torch.Tensor) -> None:
        value = self.table.begin(tensor.untyped_storage())
        value.op = op
        value.birth = self.index
        op.outputs.append((where, weakref.ref(value)))

    # -- writes ---------------------------------------------------------------

    def _note_writes(self, facts: Facts, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Announce every write to a storage with a current value."""
        if not (facts.writes or facts.writes_named):
            return []
        if facts.running_statistics is not None and not _trains(facts, args):
            return []
        known: list[torch.Tensor] = []
        for tensor in written_by(facts, args, kwargs):
            try:
                value = self.table.lookup(tensor)
            except (NotImplementedError, RuntimeError):
                continue  # no storage (sparse): nothing of ours
            if value is not None:
                known.append(tensor)
                self.listener.before_write(value)
        return known


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Say whether a tensor in foreign memory (a mapped checkpoint) is a parameter.

    Nobody writes a parameter but by operators: NumPy refuses what requires a gradient.
    """
    owner = tensor._base if tensor._is_view() else tensor
    return owner is not None and (
        owner.requires_grad or isinstance(owner, torch.nn.Parameter)
    )


def _covers_its_storage(tensor: Any) -> bool:
    if not isinstance(tensor, torch.Tensor):
        return False
    n_bytes = tensor.numel() * tensor.element_size()
    if n_bytes != tensor.untyped_storage().nbytes():
        return False
    expected = 1  # dense and without overlap: strides multiply up
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _trains(facts: Facts, args: Any) -> bool:
    """Say whether a batch norm call updates its running statistics."""
    assert facts.running_statistics is not None
    position = facts.running_statistics[2]
    return position is None or (position < len(args) and bool(args[position]))


def _random_states(
    args: Any, kwargs: Any, device: str
) -> tuple[tuple[Any, torch.Tensor], ...]:
    """Copy the state of every generator that a seeded operator may draw from."""
    generators = [
        argument
        for argument in (*args, *kwargs.values())
        if isinstance(argument, torch.Generator)
    ] or _default_generators(device)
    return tuple((generator, generator.get_state()) for generator in generators)


def _default_generators(device: str) -> list[torch.Generator]:
    if device == "cpu":
        return [torch.default_generator]
    module: Any = torch.get_device_module(device)
    index = torch.device(device).index
    return [torch.default_generator, module.default_generators[index]]
