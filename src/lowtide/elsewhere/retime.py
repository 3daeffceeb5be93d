# SPDX-License-Identifier: Apache-2.0
"""Give a recorded iteration the seconds that its operators would take elsewhere.

Work comes from the recording (floating-point operations where PyTorch counts them, and
the bytes of all that an operator reads and writes), rates from the roofline of a
device (hardware.py). An operator that writes nothing is a view: it launches nothing
and takes no time; neither does asking for memory.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lowtide.hardware import GIB, Hardware
from lowtide.kinds import kind_of
from lowtide.scheduler.director import Lanes
from lowtide.trace import Graph

# What CUDA's context and its libraries take of a device before any tensor: a round
# figure, since it differs by driver and libraries.
CONTEXT_BYTES = GIB // 2


def usable_bytes(hardware: Hardware) -> int:
    """Return the memory that tensors may have."""
    return hardware.memory_bytes - CONTEXT_BYTES


def lanes_of(hardware: Hardware) -> Lanes:
    """Return the link to the host as the lanes of a plan."""
    return Lanes(hardware.to_host, hardware.from_host)


def retime(graph: Graph, hardware: Hardware, dtype: str = "float32") -> Graph:
    """Return the same iteration with the seconds that a device would take.

    Arguments:
        graph: recorded anywhere.
        hardware: the device.
        dtype: in which it computes; "tf32" for float32 on tensor cores.
    """
    count = len(graph.operators)
    moved = np.zeros(count)
    for table in (graph.reads, graph.writes):
        n_bytes = graph.versions["bytes"][table["version"]]
        np.add.at(moved, table["operator"], n_bytes)
    kinds = [kind_of(name) for name in graph.names]
    idle = _idle(graph)
    operators = graph.operators.copy()
    columns = zip(operators["name"].tolist(), operators["flops"].tolist(), strict=True)
    operators["seconds"] = [
        0.0 if idle[i] else hardware.seconds(flops, moved[i], dtype, kinds[name])
        for i, (name, flops) in enumerate(columns)
    ]
    return replace(graph, operators=operators)


def _idle(graph: Graph) -> list[bool]:
    """Tell the operators that launch nothing: views, and requests for memory."""
    operators = graph.operators
    busy = np.bincount(graph.writes["operator"], minlength=len(operators)) > 0
    busy |= (operators["flops"] > 0) | (operators["need"] > 0)
    in_place = np.array([_writes_in_place(name) for name in graph.names], np.bool_)
    empty = np.array([_is_request(name) for name in graph.names], np.bool_)
    if len(graph.names):
        busy = (busy | in_place[operators["name"]]) & ~empty[operators["name"]]
    idle: list[bool] = (~busy).tolist()
    return idle


def _writes_in_place(name: str) -> bool:
    return name.endswith("_") and "strided" not in name


def _is_request(name: str) -> bool:
    short = name.rsplit("::", 1)[-1]
    return short in ("empty", "empty_like", "new_empty", "empty_strided")
