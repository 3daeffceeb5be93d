"""Who was made from whom, as far as scores of recomputation need to know.

A value that is out of memory and would have to be computed again is *evicted*; so is
one that nobody saved, for it is gone a moment later. DTR's cost of a candidate is its
own operator's time and that of the evicted values around it, found by union-find:
evicted neighbours are joined into components that carry the sum of their times. A
component cannot be split again, so when a value returns only its own time is
subtracted and the rest stays joined ("phantom connections"), as published
(Kirisame et al., ICLR 2021, appendix on the prototype's relaxation).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol


class Recipe(Protocol):
    """The operator that made a value."""

    @property
    def seconds(self) -> float:
        """How long it took."""

    @property
    def inputs(self) -> Sequence[Ancestor]:
        """What it read."""


class Ancestor(Protocol):
    """A value that others are made from."""

    @property
    def op(self) -> Recipe | None:
        """How it was made; None where it cannot be made again."""


class Component:
    """Evicted values that were joined, and the sum of their operators' times."""

    __slots__ = ("joined", "seconds", "watchers")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.joined: Component | None = None
        self.watchers: set[Node] = set()  # candidates whose score contains the sum

    def root(self) -> Component:
        """Return the component that this one has become a part of."""
        root = self
        while root.joined is not None:
            root = root.joined
        node = self
        while node.joined is not None:  # path compression
            node.joined, node = root, node.joined
        return root


class Node:
    """One value in the lineage; only those in memory are candidates."""

    __slots__ = ("children", "component", "counted", "op", "parents", "slot", "value")

    def __init__(self, value: Ancestor) -> None:
        self.value = value
        self.op = value.op
        self.parents: list[Node] = []
        self.children: list[Node] = []
        self.component: Component | None = None  # set while it is evicted
        self.counted = 0.0  # seconds that it added to its component
        self.slot = -1  # in the tournament

    def neighbours(self) -> Iterator[Node]:
        """Yield what it was made from and what was made from it."""
        yield from self.parents
        yield from self.children


class Lineage:
    """The values of an iteration, joined as they are evicted."""

    def __init__(self) -> None:
        self._nodes: dict[int, Node] = {}
        self._evicted: dict[int, int] = {}  # by operator: how many of its outputs

    def __len__(self) -> int:
        return len(self._nodes)

    def clear(self) -> None:
        """Forget everything: nothing of the iteration is left.

        Nodes refer to each other in circles, and to operators, whose random states are
        memory; so the circles are broken.
        """
        for node in self._nodes.values():
            node.parents.clear()
            node.children.clear()
            node.component = None
        self._nodes.clear()
        self._evicted.clear()

    def find(self, value: Ancestor) -> Node | None:
        """Return a value's node, if it is known."""
        return self._nodes.get(id(value))

    def enter(self, value: Ancestor) -> Node:
        """Add a value that is in memory, and what it descends from."""
        node = self._nodes.get(id(value))
        if node is not None:
            if node.component is not None:
                self.restore(node)
            return node
        node = self._link(value)
        todo = [node]
        while todo:  # ancestors that nobody saved count as evicted
            child = todo.pop()
            for parent in child.op.inputs if child.op is not None else ():
                if parent.op is None or parent is child.value:
                    continue
                known = self._nodes.get(id(parent))
                if known is None:
                    known = self._link(parent)
                    todo.append(known)
                    self.evict(known)
                if known not in child.parents:
                    child.parents.append(known)
                    known.children.append(child)
                    if child.component is not None and known.component is not None:
                        _join(child.component, known.component)
        return node

    def _link(self, value: Ancestor) -> Node:
        node = self._nodes[id(value)] = Node(value)
        return node

    def evict(self, node: Node) -> None:
        """Note that a value has to be computed again, and join it to its like.

        The outputs of one operator come back together: its time counts once.
        """
        if node.component is not None or node.op is None:
            return
        siblings = self._evicted.get(id(node.op), 0)
        self._evicted[id(node.op)] = siblings + 1
        node.counted = 0.0 if siblings else node.op.seconds
        node.component = Component(node.counted)
        for other in node.neighbours():
            if other.component is not None:
                _join(node.component, other.component)

    def restore(self, node: Node) -> set[Node]:
        """Note that a value is in memory again; returns whose score has fallen."""
        component = node.component
        if component is None:
            return set()
        root = component.root()
        root.seconds -= node.counted
        node.component = None
        self._evicted[id(node.op)] -= 1
        watchers, root.watchers = root.watchers, set()
        return watchers


def _join(a: Component, b: Component) -> None:
    """Make one component of two; the one watched by fewer gives itself up."""
    a, b = a.root(), b.root()
    if a is b:
        return
    if len(a.watchers) > len(b.watchers):
        a, b = b, a
    a.joined = b
    b.seconds += a.seconds
    b.watchers |= a.watchers
    a.watchers = set()


def seconds_around(node: Node) -> float:
    """Sum the distinct components beside a candidate, which watches them from now on.

    Nothing is joined by asking.
    """
    roots = {
        other.component.root()
        for other in node.neighbours()
        if other.component is not None
    }
    for root in roots:
        root.watchers.add(node)
    return max(0.0, sum(root.seconds for root in roots))


def below(node: Node) -> Iterator[Node]:
    """Yield the values in memory whose replay runs through a value's place.

    They are reached downwards over evicted values only.
    """
    seen = {node}
    todo = list(node.children)
    while todo:
        child = todo.pop()
        if child in seen:
            continue
        seen.add(child)
        if child.component is None:
            yield child
        else:
            todo.extend(child.children)
