# SPDX-License-Identifier: Apache-2.0
"""Turn an iteration into the events that AutoSwap plans from (planner/candidates.py).

A block may leave once the operator that used it has ended, and must be back when the
next one begins, so each use is two accesses, at either end of its operator. Versions
that overwrite each other are one variable. The iteration comes three times, as AutoSwap
records it; what outlives it is released at its end.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from lowtide.hardware import Hardware
from lowtide.planner.candidates import (
    EVENT,
    FREE,
    MALLOC,
    MUTABLE,
    READ,
    CopyCost,
    Recording,
)
from lowtide.trace import Graph

COPY_START = 10e-6  # seconds before the first byte of a copy


def copy_cost(hardware: Hardware) -> CopyCost:
    """Return what copies of pinned memory cost on a device."""
    return CopyCost(
        1 / hardware.to_host, COPY_START, 1 / hardware.from_host, COPY_START
    )


@dataclass(slots=True)
class _Events:
    """One iteration's events in the making."""

    rows: list[tuple[int, int, int, float]] = field(default_factory=list)
    load: list[int] = field(default_factory=list)
    live: int = 0

    def add(self, variable: int, kind: int, nbytes: int, seconds: float) -> None:
        self.live += nbytes if kind == MALLOC else -nbytes if kind == FREE else 0
        self.rows.append((variable, kind, nbytes, seconds))
        self.load.append(self.live)


def recording_of(graph: Graph) -> Recording:
    """Return three equal iterations of events."""
    versions, n = graph.versions, len(graph.operators)
    variable = list(range(len(versions)))
    for i, old in enumerate(versions["reuses"].tolist()):
        if old >= 0:
            variable[i] = variable[old]
    sizes = versions["bytes"].tolist()
    dies: dict[int, int] = {}  # of each variable: the last of its versions
    for i, dead in enumerate(versions["dead"].tolist()):
        dies[variable[i]] = max(dies.get(variable[i], 0), dead)
    dying: dict[int, list[int]] = defaultdict(list)
    makers = versions["operator"].tolist()
    before = {variable[i] for i, maker in enumerate(makers) if maker < 0}
    for v, dead in dies.items():
        if v not in before:
            dying[min(dead, n)].append(v)
    reads, writes = _by_operator(graph.reads, n), _by_operator(graph.writes, n)
    events = _Events(live=sum(sizes[v] for v in before))
    clock = 0.0
    for op, seconds in enumerate(graph.operators["seconds"].tolist()):
        for v in dying[op]:
            events.add(v, FREE, sizes[v], clock)
        for i in writes[op]:
            if variable[i] == i:
                events.add(i, MALLOC, sizes[i], clock)
        used = {variable[i]: READ for i in reads[op]}
        used |= {variable[i]: MUTABLE for i in writes[op]}
        for moment in (clock, clock + seconds):
            for v, kind in used.items():
                events.add(v, kind, sizes[v], moment)
        clock += seconds
    for v in dying[n]:
        events.add(v, FREE, sizes[v], clock)
    return _thrice(events, before, len(versions), clock)


def _by_operator(table: np.ndarray, n: int) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in range(n)]
    for op, version in table.tolist():
        rows[op].append(version)
    return rows


def _thrice(
    events: _Events, before: set[int], variables: int, seconds: float
) -> Recording:
    one = np.array(events.rows, EVENT)
    rows = np.tile(one, 3)
    period = len(one)
    again = np.repeat(np.arange(3), period)
    rows["seconds"] += again * seconds
    lasting = np.isin(rows["variable"], sorted(before))
    rows["variable"] += np.where(lasting, 0, again * variables).astype(np.int32)
    return Recording(rows, np.tile(np.array(events.load, np.float64), 3), period)
