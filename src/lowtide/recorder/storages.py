# SPDX-License-Identifier: Apache-2.0
"""Which value each living storage holds now.

Keyed by the storage object, weakly, never by the address of its bytes: storages die and
addresses return.
"""

from __future__ import annotations

import weakref

import torch

from lowtide.recorder.values import Value

# Which storage a tensor has: what `tensor.untyped_storage()._cdata` says, but without a
# Python object for the storage. Such an object counts as an owner for as long as the
# storage lives, and autograd adds gradients up in place only where there is one owner.
storage_key = torch._C._storage_address  # type: ignore[attr-defined]


class StorageTable:
    """The current value of every storage seen, keyed by the living storage object."""

    def __init__(self) -> None:
        self._values: dict[int, Value | None] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._shared: set[int] = set()  # storages that others write, unseen

    def __len__(self) -> int:
        return len(self._values)

    def lookup(self, tensor: torch.Tensor) -> Value | None:
        """Return the current value of a tensor's storage, None where unknown."""
        return self._values.get(storage_key(tensor))

    def value_of(self, tensor: torch.Tensor) -> Value:
        """Return the current value, adopting the storage as a source when unknown."""
        value = self.lookup(tensor)
        return self.begin(tensor.untyped_storage()) if value is None else value

    def begin(self, storage: torch.UntypedStorage) -> Value:
        """Begin a new value of a storage (its first, or after a write)."""
        key = storage._cdata
        reference = self._references.get(key)
        if reference is None:
            values, references = self._values, self._references
            shared = self._shared

            def gone(_: object, key: int = key) -> None:
                # runs while the storage dies, before its address can return
                values.pop(key, None)
                references.pop(key, None)
                shared.discard(key)

            reference = self._references[key] = weakref.ref(storage, gone)
        old = self._values.get(key)
        if old is not None:
            old.reference = None  # what the storage holds now is not that value
        value = Value(reference, storage.nbytes())
        value.foreign = key in self._shared or not storage.resizable()
        self._values[key] = value
        return value

    def bind(self, storage: torch.UntypedStorage, value: Value) -> None:
        """Make `value` the current value of a storage that lowtide brought back."""
        self.begin(storage)
        key = storage._cdata
        self._values[key] = value
        value.reference = self._references[key]

    def share(self, tensor: torch.Tensor) -> None:
        """Note that, while a storage lives, others may write it unseen."""
        storage = tensor.untyped_storage()
        self._shared.add(storage._cdata)
        self.begin(storage)

    def end(self, tensor: torch.Tensor) -> None:
        """Forget the current value of a storage: it has changed in a way unseen."""
        key = storage_key(tensor)
        old = self._values.get(key)
        if old is not None:
            old.reference = None
            self._values[key] = None

    def values(self) -> list[Value]:
        """Return the current values (a snapshot)."""
        return [value for value in list(self._values.values()) if value is not None]
