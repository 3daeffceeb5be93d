"""What a planner knows of an iteration: its saved values, and the load beside them.

Made from a full graph, in the form in which the run time observes it (`trace.Trace`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lowtide.simulator.buffers import Buffer, Clock, build
from lowtide.trace import OPS, VALUES, Graph, Trace


def managed_versions(graph: Graph) -> list[int]:
    """List the versions that the scheduler is told of, in the order of their making."""
    versions = graph.versions
    found = np.flatnonzero((versions["held"] >= 0) & ~versions["lasting"])
    return [int(i) for i in found]


def managed_bytes(graph: Graph) -> NDArray[np.int64]:
    """Bytes of these at the start of each operator, with nothing leaving memory."""
    n = len(graph.operators)
    rows = graph.versions[managed_versions(graph)]
    change = np.zeros(n + 2, dtype=np.int64)
    np.add.at(change, rows["held"], rows["bytes"])
    np.add.at(change, np.minimum(rows["dead"], n + 1), -rows["bytes"])
    managed: NDArray[np.int64] = np.cumsum(change)[:n]
    return managed


def forecast(graph: Graph) -> Trace:
    """Summarise a graph as the run time sees an iteration in which nothing left."""
    ops = np.zeros(len(graph.operators), dtype=OPS)
    ops["seconds"] = graph.operators["seconds"]
    ops["live"] = graph.live_bytes
    ops["need"] = graph.needs
    ops["managed"] = managed_bytes(graph)
    _, buffers = build(graph, Clock())
    kept = set(managed_versions(graph))
    rows = []
    for i in managed_versions(graph):
        row = graph.versions[i]
        seconds, scratch = _alone(buffers[i], kept)
        rows.append(
            (
                row["bytes"],
                max(int(row["held"]) - 1, 0),
                row["first_use"],
                seconds or 0.0,
                seconds is not None,
                scratch,
            )
        )
    return Trace(ops, np.array(rows, dtype=VALUES), key=0)


def parents_of(graph: Graph) -> list[list[int]]:
    """List, for each saved value, the saved values that it is computed from.

    Both are counted in the order of their making, as the rows of `forecast` are.
    """
    _, buffers = build(graph, Clock())
    order = {version: i for i, version in enumerate(managed_versions(graph))}
    rows = []
    for version in order:
        found: set[int] = set()
        seen, stack = {version}, [buffers[version]]
        while stack:
            op = stack.pop().op
            for parent in op.inputs if op is not None else ():
                if parent.index in seen or parent.lasting:
                    continue
                seen.add(parent.index)
                if parent.index in order:
                    found.add(order[parent.index])
                else:
                    stack.append(parent)
        rows.append(sorted(found))
    return rows


def _alone(value: Buffer, kept: set[int]) -> tuple[float | None, int]:
    """Measure the replay of one value from lasting and other saved values."""
    seconds, scratch = 0.0, 0
    if value.op is None:
        return None, 0
    seen, stack = {value.op}, [value.op]
    while stack:
        op = stack.pop()
        seconds += op.seconds
        touched = op.workspace + sum(b.nbytes for b in (*op.inputs, *op.outputs))
        scratch = max(scratch, touched)
        for parent in op.inputs:
            if parent.lasting or parent.index in kept:
                continue
            if parent.op is None:
                return None, 0
            if parent.op not in seen:
                seen.add(parent.op)
                stack.append(parent.op)
    return seconds, scratch
