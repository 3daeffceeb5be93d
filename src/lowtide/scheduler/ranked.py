"""The filter of the published policies: the best victim without looking at all others.

Candidates stand in a kinetic tournament by weight (`scheduler.policies`). Time alone
never asks for a weight again. What has been evicted makes others dearer: that is found
out lazily, when a candidate comes up as a victim with a weight that no longer holds.
What has returned makes others cheaper: only those whose score it was part of are
weighed again. So a victim costs O(log n) matches, and weighings only where something
changed; `evaluations` and `chosen` count both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from lowtide.scheduler.director import Lanes
from lowtide.scheduler.lineage import Lineage, Node, below
from lowtide.scheduler.policies import Candidate, Policy, knapsack
from lowtide.scheduler.tournament import Tournament

V = TypeVar("V", bound=Candidate)

_STEADY = 1e-9  # relative change of a weight that is taken for none
_CONSIDERED = 16  # candidates that the knapsack looks at, at least


class Ranked(Generic[V]):
    """Candidates in memory, by the score of one published policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.evaluations = 0  # of scores
        self.chosen = 0  # victims offered
        self.lineage = Lineage()
        self._tournament = Tournament()
        self._ranked: dict[int, tuple[V, Node]] = {}  # by slot
        self._since: dict[int, float] = {}  # last access, by slot
        self._weights: dict[int, float] = {}  # by slot
        self._sizes = (0, 0)  # values and bytes seen, for the mean

    # -- events -----------------------------------------------------------------

    def enter(self, value: V, now: float, lanes: Lanes) -> None:
        """Take in a value that is in memory, just accessed."""
        known = self.lineage.find(value)
        watchers: Iterable[Node] = ()
        if known is None:
            self._sizes = (self._sizes[0] + 1, self._sizes[1] + value.nbytes)
        else:
            watchers = self.lineage.restore(known)
        node = known or self.lineage.enter(value)
        for other in self._cheaper(node, watchers):
            self._weigh_again(other, now, lanes)
        count, total = self._sizes
        if node.slot >= 0 or value.nbytes < self.policy.small * total / count:
            return
        weight = self._weigh(node, value, lanes)
        if weight is not None:
            self._rank(value, node, weight, now, now)

    def touch(self, value: V, now: float) -> None:
        """Note an access."""
        node = self.lineage.find(value)
        if node is not None and node.slot >= 0:
            self._since[node.slot] = now
            self._set(node.slot, now)

    def leave(self, value: V, now: float, *, evicted: bool) -> None:
        """Take out a value; `evicted`: it would have to be computed again."""
        node = self.lineage.find(value)
        if node is None:
            return
        self._unrank(node, now)
        if evicted:
            self.lineage.evict(node)

    # -- victims ----------------------------------------------------------------

    def victims(self, now: float, lanes: Lanes, short: int) -> Iterator[V]:
        """Yield victims, least score first; those that stay are offered once."""
        refused: list[tuple[V, Node, float, float]] = []
        try:
            if self.policy.knapsack and short > 0:
                for value, node in self._packed(now, lanes, short):
                    yield value
                    self._set_aside(refused, node, now)
            while (found := self._best(now, lanes)) is not None:
                value, node = found
                yield value
                self._set_aside(refused, node, now)
        finally:
            for value, node, weight, since in refused:
                if node.slot < 0 and node.component is None:
                    self._rank(value, node, weight, since, now)

    def _set_aside(
        self, refused: list[tuple[V, Node, float, float]], node: Node, now: float
    ) -> None:
        """Take a victim that did not leave out of the way."""
        slot = node.slot
        if slot >= 0:
            value = self._ranked[slot][0]
            refused.append((value, node, self._weights[slot], self._since[slot]))
            self._unrank(node, now)

    def _best(self, now: float, lanes: Lanes) -> tuple[V, Node] | None:
        """Find the least score, weighing again whoever leads until it is true."""
        while True:
            slot = self._tournament.best(now)
            if slot < 0:
                return None
            value, node = self._ranked[slot]
            if self.policy.cost in ("components", "ancestors"):
                old = self._weights[slot]
                weight = self._weigh(node, value, lanes)
                if weight is None:
                    self._unrank(node, now)
                    continue
                if weight < old * (1 - _STEADY):
                    self._weights[slot] = weight
                    self._set(slot, now)
                    continue
            self.chosen += 1
            return value, node

    def _packed(self, now: float, lanes: Lanes, short: int) -> list[tuple[V, Node]]:
        """Choose a set for a whole request among the likeliest victims."""
        taken: list[tuple[V, Node, float, float]] = []
        freed = 0
        while freed < 2 * short or len(taken) < _CONSIDERED:
            found = self._best(now, lanes)
            if found is None:
                break
            value, node = found
            self.chosen -= 1
            weight, since = self._weights[node.slot], self._since[node.slot]
            taken.append((value, node, weight, since))
            freed += value.nbytes
            self._unrank(node, now)
        for value, node, weight, since in taken:
            self._rank(value, node, weight, since, now)
        sizes = [value.nbytes for value, _, _, _ in taken]
        costs = [
            value.nbytes / (weight * max(now - since, _STEADY))
            for value, _, weight, since in taken
        ]
        picked = knapsack(sizes, costs, short)
        self.chosen += len(picked)
        return [taken[i][:2] for i in picked]

    # -- weights ----------------------------------------------------------------

    def _cheaper(self, node: Node, watchers: Iterable[Node]) -> list[Node]:
        """List, in a fixed order, whose score fell because a value is back."""
        if self.policy.cost == "components":
            found = [other for other in watchers if other.slot >= 0]
        elif self.policy.cost == "ancestors":
            found = [other for other in below(node) if other.slot >= 0]
        else:
            return []
        return sorted(found, key=lambda other: other.slot)

    def _weigh(self, node: Node, value: V, lanes: Lanes) -> float | None:
        self.evaluations += 1
        return self.policy.weigh(node, value, lanes)

    def _weigh_again(self, node: Node, now: float, lanes: Lanes) -> None:
        slot = node.slot
        weight = self._weigh(node, self._ranked[slot][0], lanes)
        if weight is not None:
            self._weights[slot] = weight
            self._set(slot, now)

    def _rank(
        self, value: V, node: Node, weight: float, since: float, now: float
    ) -> None:
        node.slot = self._tournament.enter(*self._line(weight, since), now)
        self._ranked[node.slot] = value, node
        self._weights[node.slot], self._since[node.slot] = weight, since

    def _set(self, slot: int, now: float) -> None:
        line = self._line(self._weights[slot], self._since[slot])
        self._tournament.change(slot, *line, now)

    def _line(self, weight: float, since: float) -> tuple[float, float]:
        return (-weight * since, weight) if self.policy.ageing else (weight, 0.0)

    def _unrank(self, node: Node, now: float) -> None:
        if node.slot >= 0:
            self._tournament.leave(node.slot, now)
            del self._ranked[node.slot]
            del self._weights[node.slot], self._since[node.slot]
            node.slot = -1
