# SPDX-License-Identifier: Apache-2.0
"""Make an iteration in full out of somebody else's log, where it says enough.

That is: which operator made each block and which ones read it, and what each took, as
DTR's logs do. Such a log does not tell what autograd saves. The forward pass is taken
to end where the most bytes are alive; what was made before and is read after is saved,
from its last reader before to its first one after.
"""

from __future__ import annotations

import numpy as np

from lowtide.history import History
from lowtide.trace import ACCESSES, OPERATORS, SAVES, VERSIONS, Graph


def says_enough(history: History) -> bool:
    """Tell whether a history names the makers and the readers of its blocks."""
    blocks, uses, ops = history.blocks, history.uses, history.ops
    if len(ops) == 0 or len(uses) == 0 or np.isnan(ops["seconds"]).any():
        return False
    made = blocks["start"] > 0
    known = (blocks["start_op"][made] >= 0).all() and (uses["op"] >= 0).all()
    return bool(known and made.any())


def rebuild(history: History) -> Graph:
    """Make the iteration; the history must say enough."""
    n, blocks = len(history.ops), history.blocks
    operators = np.zeros(n, OPERATORS)
    operators["name"] = history.ops["name"]
    operators["seconds"] = history.ops["seconds"]
    operators["replayable"] = True
    versions = np.zeros(len(blocks), VERSIONS)
    before = (blocks["start"] == 0) | (blocks["start_op"] < 0)
    versions["bytes"] = blocks["bytes"]
    versions["operator"] = np.where(before, -1, blocks["start_op"])
    stays = blocks["stop"] < 0
    last = np.maximum(versions["operator"], blocks["stop_op"])
    np.maximum.at(last, history.uses["block"], history.uses["op"])
    versions["dead"] = np.where(stays, n + 1, last + 1)
    versions["reuses"] = versions["held"] = versions["first_use"] = -1
    versions["lasting"] = before & stays
    reads = _reads(history, versions)
    made = np.flatnonzero(~before)
    writes = np.zeros(len(made), ACCESSES)
    writes["operator"], writes["version"] = versions["operator"][made], made
    writes = writes[np.argsort(writes["operator"], kind="stable")]
    graph = Graph(
        names=history.names,
        operators=operators,
        versions=versions,
        reads=reads,
        writes=writes,
        saves=np.zeros(0, SAVES),
    )
    turn = int(np.argmax(graph.live_bytes + graph.needs))
    return Graph(
        names=history.names,
        operators=operators,
        versions=versions,
        reads=reads,
        writes=writes,
        saves=_save(versions, reads, turn),
    )


def _reads(history: History, versions: np.ndarray) -> np.ndarray:
    uses = history.uses
    later = uses["op"] > versions["operator"][uses["block"]]
    pairs = np.unique(
        np.stack([uses["op"][later], uses["block"][later]], axis=1), axis=0
    )
    reads = np.zeros(len(pairs), ACCESSES)
    reads["operator"], reads["version"] = pairs[:, 0], pairs[:, 1]
    return reads


def _save(versions: np.ndarray, reads: np.ndarray, turn: int) -> np.ndarray:
    """Fill in what is saved, and return who uses it."""
    held = versions["operator"].astype(np.int64).copy()
    early = reads[reads["operator"] <= turn]
    np.maximum.at(held, early["version"], early["operator"])
    rows = []
    first = versions["first_use"]
    for op, version in reads[reads["operator"] > turn].tolist():
        saved = held[version]
        row = versions[version]
        if row["lasting"] or row["operator"] > turn or saved < 0:
            continue
        if first[version] < 0:
            versions["held"][version] = saved + 1
            first[version] = op
        rows.append((version, saved, op))
    return np.array(rows, SAVES)
