"""Values in memory by the distance of their next use, the farthest first.

A heap: a value enters in O(log n), leaves in O(1) (its entry is passed over later), and
is found in O(log n), however many there are. Known next uses come first, then, while
none is known, the oldest: autograd consumes in reverse order.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, Protocol, TypeVar


class Awaited(Protocol):
    """A value that will be used again."""

    @property
    def birth(self) -> int:
        """The operator that made it."""

    @property
    def next_use(self) -> int:
        """The operator that wants it; -1: not known."""


V = TypeVar("V", bound=Awaited)

_Key = tuple[int, int]


class Farthest(Generic[V]):
    """A heap of values whose predictions may change in between."""

    def __init__(self) -> None:
        self._heap: list[tuple[_Key, int, V]] = []
        self._entries: dict[int, tuple[_Key, int, V]] = {}  # the valid ones, by id
        self._serial = count()

    def add(self, value: V) -> None:
        """Take in a value, or note that its next use is another one."""
        if self._outdated():
            self._rebuild()
        self._push(value)

    def remove(self, value: V) -> None:
        """Forget a value."""
        self._entries.pop(id(value), None)
        if not self._entries:
            self._heap.clear()

    def __iter__(self) -> Iterator[V]:
        """Yield values, farthest first; those that are not removed stay."""
        passed: list[tuple[_Key, int, V]] = []
        try:
            while self._heap:
                entry = heappop(self._heap)
                key, _, value = entry
                if self._entries.get(id(value)) is not entry:
                    continue
                if key != _key(value):
                    self._push(value)
                    continue
                passed.append(entry)
                yield value
        finally:
            for entry in passed:
                if self._entries.get(id(entry[2])) is entry:
                    heappush(self._heap, entry)

    def _push(self, value: V) -> None:
        entry = (_key(value), next(self._serial), value)
        self._entries[id(value)] = entry
        heappush(self._heap, entry)

    def _outdated(self) -> bool:
        """Say whether predictions have changed: then that of the first one has."""
        entry = next(iter(self._entries.values()), None)
        return entry is not None and entry[0] != _key(entry[2])

    def _rebuild(self) -> None:
        entries = [(_key(v), serial, v) for _, serial, v in self._entries.values()]
        self._entries = {id(entry[2]): entry for entry in entries}
        self._heap = entries.copy()
        heapify(self._heap)


def _key(value: Awaited) -> _Key:
    return (-value.next_use, value.birth)
