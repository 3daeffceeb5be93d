"""Record one iteration in full: every operator, every value, who reads what.

For tools (policies on a virtual clock, placement, reports), not for the run time: it
costs some 30 us an operator and changes nothing in what the program computes. It
listens to the same recorder as the run time, and to autograd's saved-tensor hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from lowtide.errors import LowtideError
from lowtide.recorder.arguments import tensors_in, written_by
from lowtide.recorder.dispatch import Recorder, is_plain
from lowtide.recorder.key import observed
from lowtide.recorder.schemas import facts_of
from lowtide.recorder.storages import StorageTable, storage_key
from lowtide.recorder.values import Value
from lowtide.recorder.work import count_flops
from lowtide.trace import ACCESSES, OPERATORS, SAVES, VERSIONS, Graph

_Saved = tuple[int, torch.Tensor]  # version or -1, and the tensor to give back
# live bytes, what is written, and what counts the work once there is a result
_Token = tuple[int, list[torch.Tensor], Callable[[Any], float]]


class Reading(Protocol):
    """A number that a counter keeps."""

    @property
    def value(self) -> int:
        """The number now."""


class Register(Protocol):
    """The same, to be set too."""

    value: int


class Meter(Protocol):
    """Counts live bytes (runtime.allocator has one), so that workspace is seen too."""

    @property
    def live(self) -> Reading:
        """Live bytes now."""

    @property
    def op_peak(self) -> Register:
        """Their peak since it was set."""


def record(
    step: Callable[[], object],
    *,
    warm: int = 1,
    repeat: int = 1,
    meter: Meter | None = None,
    device_type: str = "cpu",
) -> Graph:
    """Run `step` a few times and record the last: one whole iteration.

    Arguments:
        step: forward, backward and update.
        warm: how often it runs unrecorded first, so that optimizers have their state.
        repeat: how often it is recorded. Where that gives the same operators, each gets
            its least seconds, which other processes disturb least.
        meter: counts bytes; without one an operator needs only its outputs.
        device_type: whose tensors count.

    Raises:
        LowtideError: inside a budget, or inside another recording.
    """
    if observed():
        raise LowtideError(
            "an iteration cannot be recorded inside a budget or another recording: "
            "call record(...) outside of them."
        )
    for _ in range(warm):
        step()
    graph = _record_once(step, meter, device_type)
    for _ in range(repeat - 1):
        earlier, graph = graph, _record_once(step, meter, device_type)
        if sequence_of(earlier) == sequence_of(graph):
            seconds = graph.operators["seconds"]
            np.minimum(seconds, earlier.operators["seconds"], out=seconds)
    return graph


def _record_once(
    step: Callable[[], object], meter: Meter | None, device_type: str
) -> Graph:
    run = RealRun(meter, device_type)
    listener = run.begin()
    try:
        with torch.autograd.graph.saved_tensors_hooks(listener.pack, listener.unpack):
            step()
    finally:
        graph = run.end()
    return graph


class RealRun:
    """Records parts of a run; what autograd saves has to be told to the listener."""

    def __init__(self, meter: Meter | None, device_type: str) -> None:
        self._meter = meter
        self._device_type = device_type
        self._listener: GraphListener | None = None
        self._recorder: Recorder | None = None

    def begin(self) -> GraphListener:
        """Begin to record, anew where something was being recorded."""
        if self._recorder is not None:
            self._recorder.detach()
        plain = partial(is_plain, device_type=self._device_type)
        self._listener = GraphListener(self._meter, plain)
        self._recorder = Recorder(StorageTable(), self._listener, self._device_type)
        self._recorder.attach()
        return self._listener

    def end(self) -> Graph:
        """Stop to record."""
        listener, self._listener = self._listener, None
        assert listener is not None
        assert self._recorder is not None
        self._recorder.detach()
        self._recorder = None
        return listener.graph()


def sequence_of(graph: Graph) -> list[str]:
    """Return the names of all operators, in order."""
    return [graph.names[i] for i in graph.operators["name"].tolist()]


class _Version:
    """One row of the table of versions, in the making."""

    __slots__ = ("dead", "nbytes", "operator", "reuses")

    def __init__(self, nbytes: int, operator: int, reuses: int) -> None:
        self.nbytes = nbytes
        self.operator = operator
        self.reuses = reuses
        self.dead = -1


class GraphListener:
    """Fills the tables of a graph (recorder.dispatch.Listener)."""

    def __init__(
        self, meter: Meter | None, counts: Callable[[torch.Tensor], bool]
    ) -> None:
        self.meter = meter
        self.counts = counts  # whether a tensor's bytes are among those recorded
        self.names: dict[str, int] = {}
        self.operators: list[tuple[int, float, float, int, bool, bool]] = []
        self.versions: list[_Version] = []
        self.reads: list[tuple[int, int]] = []
        self.writes: list[tuple[int, int]] = []
        self.saved_at: dict[int, int] = {}
        self.uses: list[tuple[int, int]] = []  # version, operator
        self._makers: dict[int, int | None] = {}  # backward node, by version
        self.sums: dict[int, int] = {}  # of gradients: operator, version added to
        self._current: dict[int, int] = {}  # version, by storage
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    # -- operators ----------------------------------------------------------------

    def before(self, func: Any, args: Any, kwargs: Any) -> _Token:
        """Note what an operator reads, and what it is going to write."""
        facts = facts_of(func)
        position = len(self.operators)
        blank = args[0] if facts.overwrites and _is_whole(args[0]) else None
        seen = {
            self._version_of(tensor)
            for tensor in self._tensors((args, tuple(kwargs.values())))
            if tensor is not blank
        }
        self.reads += [(position, version) for version in sorted(seen)]
        if facts.name == "aten::add" and _is_whole(args[0]):
            self._note_sum(position, self._version_of(args[0]))
        live = 0
        if self.meter is not None:
            live = self.meter.op_peak.value = self.meter.live.value
        return (
            live,
            list(filter(self.counts, written_by(facts, args, kwargs))),
            partial(count_flops, func, args, kwargs),
        )

    def after(self, func: Any, token: _Token, seconds: float, result: Any) -> int:
        """Note an operator's end and what it made; returns the bytes it needed."""
        facts = facts_of(func)
        live, written, flops = token
        need = 0 if self.meter is None else self.meter.op_peak.value - live
        name = self.names.setdefault(facts.name, len(self.names))
        replayable = facts.replayable and not facts.rebinds
        self.operators.append(
            (name, seconds, flops(result), need, facts.seeded, replayable)
        )
        for tensor in written:
            old = self._version_of(tensor)
            if self.versions[old].operator >= 0:  # what was there before stays
                self.versions[old].dead = len(self.operators)
                self._begin(tensor, reuses=old)
        for tensor in self._tensors(result):
            if storage_key(tensor) not in self._current:
                self._begin(tensor)
        return need

    def before_write(self, value: Value) -> None:
        """Owe nobody anything: nothing leaves memory here."""

    def _tensors(self, argument: Any) -> Iterator[torch.Tensor]:
        """Yield the tensors that values can describe, at any depth."""
        return filter(self.counts, tensors_in(argument))

    def _note_sum(self, operator: int, version: int) -> None:
        """Note where autograd adds a gradient to one that another node has made."""
        node = _backward_node()
        maker = self._makers.get(version)
        if None not in (node, maker) and node != maker:
            self.sums[operator] = version

    # -- versions -------------------------------------------------------------------

    def _version_of(self, tensor: torch.Tensor) -> int:
        """Return the current version of a storage; unknown ones were there before."""
        version = self._current.get(storage_key(tensor))
        if version is None:
            version = self._begin(tensor, source=True)
        return version

    def _begin(
        self, tensor: torch.Tensor, *, reuses: int = -1, source: bool = False
    ) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        version = len(self.versions)
        operator = -1 if source else len(self.operators) - 1
        self.versions.append(_Version(storage.nbytes(), operator, reuses))
        if not source:
            self.writes.append((operator, version))
            self._makers[version] = _backward_node()
        self._current[key] = version
        if key not in self._references:

            def gone(_: object) -> None:  # before the address can return
                self._references.pop(key, None)
                last = self._current.pop(key)
                self.versions[last].dead = len(self.operators)

            self._references[key] = weakref.ref(storage, gone)
        return version

    # -- saved tensors ----------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> _Saved:
        """Note that autograd saves a tensor."""
        version = -1
        if self.counts(tensor):
            version = self._version_of(tensor)
            self.saved_at.setdefault(version, len(self.operators))
        return version, tensor.detach()

    def unpack(self, saved: _Saved) -> torch.Tensor:
        """Note that autograd wants it back."""
        version, tensor = saved
        if version >= 0:
            self.uses.append((version, len(self.operators)))
        return tensor

    # -- the tables -------------------------------------------------------------------

    def _sum_in_place(self) -> None:
        """Let sums of gradients overwrite what nobody else holds, as they do unwatched.

        Autograd adds in place where a storage has one owner; the objects by which a
        recording learns that storages die count as others.
        """
        made = {self.sums[op]: (op, v) for op, v in self.writes if op in self.sums}
        for old, (op, new) in made.items():
            before, after = self.versions[old], self.versions[new]
            dies = before.dead == op + 1 and before.operator >= 0
            if not dies or old in self.saved_at or before.nbytes != after.nbytes:
                continue
            after.reuses = old
            name, seconds, flops, need, *rest = self.operators[op]
            need = max(need - after.nbytes, 0)
            self.operators[op] = (name, seconds, flops, need, *rest)  # type: ignore[assignment]

    def graph(self) -> Graph:
        """Return what was recorded."""
        self._sum_in_place()
        n = len(self.operators)
        first_use: dict[int, int] = {}
        for version, operator in self.uses:
            first_use.setdefault(version, operator)
        held = {i: v.operator + 1 for i, v in enumerate(self.versions)}
        for operator, version in self.reads:
            if operator < first_use.get(version, n):
                held[version] = max(held[version], operator + 1)
        rows = np.zeros(len(self.versions), dtype=VERSIONS)
        for i, made in enumerate(self.versions):
            rows[i] = (
                made.nbytes,
                made.operator,
                n + 1 if made.dead < 0 else made.dead,
                held[i] if i in self.saved_at else -1,
                first_use.get(i, -1),
                made.reuses,
                made.operator < 0 and made.dead < 0,
            )
        unused = [(v, at, -1) for v, at in self.saved_at.items() if v not in first_use]
        saves = [(v, self.saved_at[v], operator) for v, operator in self.uses]
        return Graph(
            names=tuple(self.names),
            operators=np.array(self.operators, dtype=OPERATORS),
            versions=rows,
            reads=np.array(self.reads, dtype=ACCESSES),
            writes=np.array(self.writes, dtype=ACCESSES),
            saves=np.array(saves + unused, dtype=SAVES),
        )


def _backward_node() -> int | None:
    """Return the number of the node that a backward pass has come to, if one runs."""
    if torch._C._current_graph_task_id() < 0:
        return None
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def _is_whole(tensor: Any) -> bool:
    """Say whether a tensor covers its storage, each byte of it."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    )
