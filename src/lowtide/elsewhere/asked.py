# SPDX-License-Identifier: Apache-2.0
"""What an allocator is asked for by an iteration as it is: a history of blocks."""

from __future__ import annotations

import numpy as np

from lowtide.history import BLOCKS, OPERATIONS, USES, History
from lowtide.scheduler.director import Lanes
from lowtide.simulator.simulator import simulate
from lowtide.simulator.watch import Watch
from lowtide.trace import Graph


def asked_of(graph: Graph) -> History:
    """List the blocks of a plain iteration; what outlives it never stops."""
    watch = Watch()
    simulate(graph, "keep", graph.plain_peak_bytes, Lanes(1.0, 1.0), watch=watch)
    rows = watch.blocks()
    rows = rows[np.argsort(rows["born"], kind="stable")]
    blocks = np.zeros(len(rows), BLOCKS)
    blocks["bytes"], blocks["start"] = rows["bytes"], rows["born"]
    blocks["stop"] = np.where(rows["dead"] > watch.now, -1, rows["dead"])
    return History(
        source="iteration",
        device="",
        events=watch.now,
        blocks=blocks,
        names=(),
        label=np.full(len(blocks), -1, np.int32),
        groups=("",),
        group=np.zeros(len(blocks), np.int32),
        ops=np.zeros(0, OPERATIONS),
        uses=np.zeros(0, USES),
        seconds=np.zeros(0),
        reserved_bytes=0,
        steps=1,
        notes=("parameters and optimizer state are among the blocks",),
    )
