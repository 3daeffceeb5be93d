"""A kinetic tournament: the largest of many straight lines, as time goes on.

Every published score that looks at staleness has the form cost / (size * staleness),
so the best victim is the one with the largest `weight * (now - since)`. Which one that
is changes with time alone. A binary tree of matches keeps the winners, and each match
knows until when its outcome holds; asking for the winner plays again only the matches
whose time is up. Entering, leaving and changing cost O(log n) matches, and no weight
is ever computed again because time has passed.
"""

from __future__ import annotations

from math import inf


class Tournament:
    """Lines `base + slope * now` in numbered slots; time never runs backwards."""

    def __init__(self) -> None:
        self.matches = 0  # played so far
        self._free: list[int] = [0]
        self._base: list[float] = [0.0]
        self._slope: list[float] = [0.0]
        self._size = 1
        self._winner = [-1, -1]  # of the tree's nodes; the root is 1
        self._until = [inf, inf]

    def enter(self, base: float, slope: float, now: float) -> int:
        """Let a line take part; returns its slot."""
        if not self._free:
            self._grow(now)
        slot = self._free.pop()
        self._base[slot], self._slope[slot] = base, slope
        self._replay_from(slot, slot, now)
        return slot

    def change(self, slot: int, base: float, slope: float, now: float) -> None:
        """Give a slot another line."""
        self._base[slot], self._slope[slot] = base, slope
        self._replay_from(slot, slot, now)

    def leave(self, slot: int, now: float) -> None:
        """Free a slot."""
        self._free.append(slot)
        self._replay_from(slot, -1, now)

    def best(self, now: float) -> int:
        """Return the slot of the largest line, -1 where there is none."""
        self._advance(1, now)
        return self._winner[1]

    def _replay_from(self, slot: int, winner: int, now: float) -> None:
        node = self._size + slot
        self._winner[node] = winner
        node >>= 1
        while node:
            self._play(node, now)
            node >>= 1

    def _advance(self, node: int, now: float) -> None:
        if self._until[node] > now or node >= self._size:
            return
        self._advance(2 * node, now)
        self._advance(2 * node + 1, now)
        self._play(node, now)

    def _play(self, node: int, now: float) -> None:
        left, right = 2 * node, 2 * node + 1
        winner, loser = self._winner[left], self._winner[right]
        until = min(self._until[left], self._until[right])
        if winner < 0 or loser < 0:
            self._winner[node] = max(winner, loser)
            self._until[node] = until
            return
        self.matches += 1
        base, slope = self._base, self._slope
        if base[winner] + slope[winner] * now < base[loser] + slope[loser] * now:
            winner, loser = loser, winner
        if slope[loser] > slope[winner]:
            crossing = (base[winner] - base[loser]) / (slope[loser] - slope[winner])
            until = min(until, crossing)
        self._winner[node] = winner
        self._until[node] = until

    def _grow(self, now: float) -> None:
        """Double the number of slots."""
        old, size = self._size, 2 * self._size
        self._free.extend(range(size - 1, old - 1, -1))
        self._base += [0.0] * old
        self._slope += [0.0] * old
        leaves = self._winner[old : 2 * old] + [-1] * old
        self._size = size
        self._winner = [-1] * size + leaves
        self._until = [inf] * (2 * size)
        for node in range(size - 1, 0, -1):
            self._play(node, now)
