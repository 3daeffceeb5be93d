# SPDX-License-Identifier: Apache-2.0
"""Parameters and optimizer state that live on the host, and visit the device.

What lasts from iteration to iteration is used at a few moments only. Such a variable is
away when the iteration begins, is read in before each group of uses, may leave again
after it (at no cost where it was not changed, else once it is written out), and is away
again at the end: the last copies out are waited for, though a real iteration would go
on beside them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lowtide.scheduler.director import Lanes
from lowtide.trace import Graph

_MARGIN = 1.5  # a copy in begins so much earlier than it must
_LEAST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Visit:
    """A group of uses close to each other."""

    first: int  # operators
    last: int
    changed: bool
    due: int  # the operator before which the copy in begins


@dataclass(frozen=True, slots=True)
class Hosted:
    """What lives on the host: visits by version, in order."""

    visits: dict[int, tuple[Visit, ...]]
    moved_bytes: int  # in and out, in an iteration

    def away_bytes(self, graph: Graph, lanes: Lanes) -> NDArray[np.int64]:
        """Sum, for each operator, what is planned to be away."""
        n = len(graph.operators)
        clock = np.concatenate([[0.0], np.cumsum(graph.operators["seconds"])])
        change = np.zeros(n + 1, np.int64)
        for version, visits in self.visits.items():
            size = int(graph.versions["bytes"][version])
            gone = 0
            for visit in visits:
                change[gone] += size if visit.due > gone else 0
                change[visit.due] -= size if visit.due > gone else 0
                until = clock[visit.last + 1]
                if visit.changed:
                    until += _MARGIN * size / lanes.write
                after = int(np.searchsorted(clock, until))
                gone = min(max(after, visit.last + 1), n)
            change[gone] += size
            change[n] -= size
        return np.asarray(np.cumsum(change)[:n], np.int64)


def hostable(graph: Graph) -> list[int]:
    """List what could live on the host, what is used least often first."""
    versions = graph.versions
    large = versions["lasting"] & (versions["bytes"] >= _LEAST_BYTES)
    uses = np.bincount(graph.reads["version"], minlength=len(versions))
    found = np.flatnonzero(large & (uses > 0))
    order = np.lexsort((-versions["bytes"][found], uses[found]))
    return [int(i) for i in found[order]]


def host(graph: Graph, variables: Iterable[int], lanes: Lanes) -> Hosted:
    """Let variables live on the host; the copies in are laid out from the end."""
    wanted = set(variables)
    uses: dict[int, list[int]] = defaultdict(list)
    for op, version in graph.reads.tolist():
        if version in wanted:
            uses[version].append(op)
    clock = np.concatenate([[0.0], np.cumsum(graph.operators["seconds"])])
    changes = np.array([name.endswith("_") for name in graph.names])
    changing = changes[graph.operators["name"]]
    groups: list[tuple[int, int, int, bool]] = []
    moved = 0
    for version, ops in uses.items():
        size = int(graph.versions["bytes"][version])
        round_trip = size / lanes.write + size / lanes.read
        for group in _groups(sorted(ops), clock, 2 * round_trip):
            changed = bool(changing[group].any())
            groups.append((group[0], group[-1], version, changed))
            moved += size * (1 + changed)
    visits: dict[int, list[Visit]] = defaultdict(list)
    begin = float(clock[-1])
    for first, last, version, changed in sorted(groups, reverse=True):
        size = int(graph.versions["bytes"][version])
        begin = min(begin, float(clock[first])) - _MARGIN * size / lanes.read
        due = max(int(np.searchsorted(clock, begin, "right")) - 1, 0)
        visits[version].insert(0, Visit(first, last, changed, due))
    rows = {version: tuple(row) for version, row in visits.items()}
    return Hosted(rows, moved)


def _groups(
    ops: list[int], clock: NDArray[np.float64], gap: float
) -> Iterable[list[int]]:
    """Part uses where there is time to leave and to return between them."""
    group = ops[:1]
    for before, op in pairwise(ops):
        if clock[op] - clock[before + 1] > gap:
            yield group
            group = []
        group.append(op)
    if group:
        yield group
