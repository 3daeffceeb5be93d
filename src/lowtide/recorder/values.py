"""Storage versions ("values"), what they were made from, and who still needs them.

A *value* is what one storage holds between two writes. An operator that returns a
fresh storage makes a value; an in-place operator ends one value of the storage and
begins the next; views are geometry over a value. A value's bytes are kept for its
*saved tensors* (what autograd will ask back) and, where the value itself cannot be
computed again, for the dropped values that descend from it. When the last of these
goes, so do the bytes, although a child's lineage may still name the value.

Only plain, strided, dense CPU or device tensors become values; for everything else
the caller keeps the tensor itself.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_use_count = torch._C._storage_Use_Count


class Geometry(NamedTuple):
    """How a tensor lies over its storage (sizes in elements)."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """Return a tensor's geometry over its storage."""
    return Geometry(
        tensor.dtype,
        tensor.size(),
        tensor.stride(),
        tensor.storage_offset(),  # type: ignore[arg-type]  # symbolic: no plain tensor
        tensor.is_conj(),
        tensor.is_neg(),
    )


def tensor_over(storage: torch.UntypedStorage, geometry: Geometry) -> torch.Tensor:
    """Make a fresh tensor of the given geometry over a storage."""
    tensor = torch.empty(0, dtype=geometry.dtype, device=storage.device)
    tensor.set_(storage, geometry.offset, geometry.size, geometry.stride)
    if geometry.conj:
        tensor = torch._conj(tensor)
    if geometry.neg:
        tensor = torch._neg_view(tensor)
    return tensor


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Make a flat byte tensor over a whole storage (it counts as one holder)."""
    tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return tensor.set_(storage, 0, (storage.nbytes(),), (1,))


def _lone_references() -> int:
    """Count the references to a storage's object that whoever asks for it sees."""
    tensor = torch.empty(0)
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


_ALONE = _lone_references()


class Ref(NamedTuple):
    """An operator's tensor argument: a value seen through a geometry."""

    value: Value
    geometry: Geometry


class Op:
    """One observed operator: enough to run it again, exactly, in this iteration."""

    __slots__ = (
        "args",
        "facts",
        "func",
        "index",
        "inputs",
        "kwargs",
        "need",
        "outputs",
        "rng",
        "seconds",
    )

    def __init__(self, func: Any, facts: Any, args: Any, kwargs: Any) -> None:
        self.func = func
        self.facts = facts
        self.args = args  # tensors replaced by Ref
        self.kwargs = kwargs
        self.index = 0  # order of execution; a topological order of the lineage
        self.inputs: tuple[Value, ...] = ()
        # ("return", i) or ("argument", position) or ("keyword", name) -> value made
        self.outputs: list[tuple[tuple[str, Any], weakref.ref[Value]]] = []
        self.rng: tuple[tuple[Any, torch.Tensor], ...] = ()
        self.seconds = 0.0
        self.need = 0  # bytes above the live bytes at its start that it needed


class Saved:
    """One saved tensor of autograd's: its geometry and, while resident, an alias."""

    __slots__ = ("alias", "geometry", "spoiled", "version")

    def __init__(self, alias: torch.Tensor, version: int) -> None:
        self.alias: torch.Tensor | None = alias
        self.geometry: Geometry | None = None  # known once the alias has gone
        self.version = version
        self.spoiled: str | None = None  # error text once it was modified in place


class Value:
    """What a storage holds between two writes. Bytes belong to its saved tensors."""

    __slots__ = (
        "__weakref__",
        "away",
        "base",
        "birth",
        "copy",
        "dropped",
        "foreign",
        "hold",
        "kept_because",
        "last_use",
        "ledger",
        "nbytes",
        "next_use",
        "op",
        "pins",
        "plan",
        "reading",
        "reference",
        "saved",
        "slot",
        "slot_era",
        "transfer",
        "version",
    )

    def __init__(
        self, reference: weakref.ref[torch.UntypedStorage] | None, nbytes: int
    ) -> None:
        self.reference = reference  # the program's storage while it lives
        self.nbytes = nbytes
        self.op: Op | None = None  # None: a source; it can be kept or swapped only
        self.saved: dict[int, Saved] = {}
        self.base: torch.Tensor | None = None  # our own bytes, after a return
        self.hold: torch.Tensor | None = None  # bytes kept for dropped descendants
        self.copy: Any = None  # a copy on a lower tier (runtime.transfers.Copy)
        self.transfer: torch.Tensor | None = None  # bytes under a copy in flight
        self.reading: Any = None  # a prefetch in flight (runtime.transfers.Read)
        self.away = False  # saved, but its bytes are not in memory
        self.dropped = False  # away, and to be computed again
        self.pins = 0  # dropped values that descend from this one, directly
        self.foreign = False  # written by others, unseen: NumPy, a file, a process
        self.kept_because: str | None = None
        self.birth = 0  # operator index at which it was made
        self.last_use = 0
        self.next_use = -1  # predicted operator index of the next use, -1 unknown
        self.slot_era = 0  # optimizer steps seen when it was saved
        self.slot = -1  # position among this iteration's saved values
        self.plan = 0  # the director's code for it (scheduler.director)
        self.ledger: Any = None
        self.version = -1  # the storage's counter, where writes pass unseen

    # -- what the scheduler asks ----------------------------------------------

    @property
    def clean(self) -> bool:
        """Whether a finished copy on a lower tier exists."""
        return self.copy is not None and self.copy.done and not self.copy.failed

    @property
    def writing(self) -> bool:
        """Whether a copy to a lower tier is in flight."""
        return self.copy is not None and not self.copy.done

    def replay_seconds(self) -> float | None:
        """Seconds to compute it again from what is at hand; None where impossible."""
        replay = replay_now(self)
        return None if replay is None else replay.seconds

    # -- where its bytes are -------------------------------------------------

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage that holds this value now, if any does."""
        if self.base is not None:
            return self.base.untyped_storage()
        if self.hold is not None:
            return self.hold.untyped_storage()
        return self.reference() if self.reference is not None else None

    def own_references(self) -> int:
        """Count the tensors through which lowtide itself holds the storage."""
        count = sum(1 for saved in list(self.saved.values()) if saved.alias is not None)
        return count + sum(
            1 for own in (self.base, self.hold, self.transfer) if own is not None
        )

    def held_by_others(self) -> bool:
        """Say whether anyone but lowtide could read or write this storage.

        The storage's Python object counts as one reference beside ours; the program
        may hold that object itself.
        """
        storage = self.storage()
        if storage is None or sys.getrefcount(storage) > _ALONE:
            return True
        return bool(_use_count(storage._cdata) - 1 > self.own_references())

    @property
    def trusted(self) -> bool:
        """Whether its bytes are in memory, and nobody can have changed them unseen."""
        return not self.foreign and self.storage() is not None

    @property
    def resident(self) -> bool:
        """Whether lowtide holds this value's bytes in memory."""
        if self.base is not None or self.hold is not None:
            return True
        return any(saved.alias is not None for saved in list(self.saved.values()))

    @property
    def wanted(self) -> bool:
        """Whether anything still needs the bytes themselves."""
        return bool(self.saved) or (self.pins > 0 and self.op is None)

    def expose(self) -> None:
        """Let every saved tensor see, from now on, what others write to the bytes."""
        if self.base is None:
            return
        for saved in list(self.saved.values()):
            if saved.alias is None:
                assert saved.geometry is not None
                saved.alias = tensor_over(self.base.untyped_storage(), saved.geometry)
                saved.version = saved.alias._version
        self.base = None

    def release_memory(self) -> None:
        """Let go of the bytes in memory (a copy or the lineage stays)."""
        for saved in list(self.saved.values()):
            if saved.alias is not None:
                saved.geometry = geometry_of(saved.alias)
                saved.alias = None
        self.base = None
        self.hold = None
        self.reference = None

    def forget(self, saved: Saved) -> None:
        """Note that autograd has dropped a saved tensor; called from `__del__`.

        May run at any point, even inside a lock: only plain assignments here; the
        rest is queued for the ledger's next safe point.
        """
        self.saved.pop(id(saved), None)
        if not self.saved:
            if self.pins == 0 or self.op is not None:
                self.base = None
            if self.ledger is not None:
                self.ledger.orphans.append(self)


class Replay(NamedTuple):
    """What it takes to compute a value again."""

    seconds: float  # the measured times of the operators that run
    scratch: int  # largest bytes that one of them touches


_LONGEST = 64  # operators that one replay may run


def _measure_replay(value: Value, starts: Callable[[Value], bool]) -> Replay | None:
    """Sum up the operators between a value and those that a replay starts from.

    None where a source is not among these, or too many operators would run.
    """
    if value.op is None:
        return None
    seconds, scratch = 0.0, 0
    seen, stack = {id(value.op)}, [value.op]
    while stack:
        op = stack.pop()
        seconds += op.seconds
        touched = op.need
        for parent in op.inputs:
            touched += parent.nbytes
            if starts(parent):
                continue
            if parent.op is None or len(seen) >= _LONGEST:
                return None
            if id(parent.op) not in seen:
                seen.add(id(parent.op))
                stack.append(parent.op)
        scratch = max(scratch, touched)
    return Replay(seconds, scratch)


def _at_hand(value: Value) -> bool:
    return value.copy is not None or value.trusted


def replay_now(value: Value) -> Replay | None:
    """Measure the replay of a value from what is at hand at this moment."""
    return _measure_replay(value, _at_hand)


def replay_later(
    value: Value, slots: dict[int, int]
) -> tuple[Replay | None, list[int]]:
    """Measure the replay of a saved value once what was not saved is gone.

    `slots` numbers the saved values by their id, in the order of saving. It starts from
    sources and from values saved before it; the slots of the latter come second.
    """
    own, parents = slots[id(value)], set()

    def starts(parent: Value) -> bool:
        slot = slots.get(id(parent), own)
        if slot < own:
            parents.add(slot)
            return True
        return parent.op is None and _at_hand(parent)

    replay = _measure_replay(value, starts)
    return replay, [] if replay is None else sorted(parents)


def recoverable(value: Value) -> bool:
    """Say whether a value could be computed again from what is at hand or pinned.

    Walks up to sources; a source whose bytes are gone makes everything below it a
    source too, so the walk is paid once.
    """
    path: list[tuple[Value, int]] = [(value, 0)]
    seen: set[int] = set()
    while path:
        current, i = path.pop()
        op = current.op
        assert op is not None
        if i == len(op.inputs):
            continue
        path.append((current, i + 1))
        parent = op.inputs[i]
        if parent.pins or id(parent) in seen:
            continue
        seen.add(id(parent))
        if parent.op is not None:
            path.append((parent, 0))
        elif parent.copy is None and not parent.trusted:
            for lost, _ in path:
                lost.op = None
            return False
    return True


class Handle:
    """What autograd keeps in place of a saved tensor."""

    __slots__ = ("saved", "value")

    def __init__(self, value: Value, saved: Saved) -> None:
        self.value = value
        self.saved = saved

    def __del__(self) -> None:
        self.value.forget(self.saved)
