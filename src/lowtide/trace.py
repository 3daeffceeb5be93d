"""A Trace: what one iteration did to memory, as bulk arrays.

Times are seconds, sizes bytes, positions operator indices counted from the start of
the iteration; lifetimes are half open, [saved, first_use).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lowtide.errors import LowtideError

OPS = np.dtype(
    [
        ("seconds", "f8"),  # time in the operator itself
        ("live", "i8"),  # live bytes at its start, as they were under the budget
        ("need", "i8"),  # bytes it needed above `live`
        ("managed", "i8"),  # of the live bytes, those of saved tensors in memory
        ("absent", "i8"),  # bytes of saved tensors that were not in memory
    ]
)

VALUES = np.dtype(
    [
        ("bytes", "i8"),
        ("saved", "i4"),  # operator index at which it was first saved
        ("first_use", "i4"),  # operator index of its first use, -1 when never used
        ("seconds", "f8"),  # to compute it again from saved or lasting values
        ("replayable", "?"),
        ("scratch", "i8"),  # largest bytes one operator of that replay touches
    ]
)

BLOCKS = np.dtype(
    [
        ("bytes", "i8"),  # as requested
        ("start", "i8"),  # event at which it is allocated; events count from 0
        ("stop", "i8"),  # event at which it is released, -1 when never
        ("start_op", "i4"),  # operator that runs then, -1 when none or unknown
        ("stop_op", "i4"),
    ]
)


@dataclass(frozen=True, slots=True)
class Trace:
    """One observed iteration: its operators and its saved values, in order."""

    ops: NDArray[np.void]  # dtype OPS
    values: NDArray[np.void]  # dtype VALUES
    key: int  # hash of the sequence of saved values

    @property
    def plain_bytes(self) -> NDArray[np.int64]:
        """Bytes each operator would have met and needed had nothing left memory."""
        ops = self.ops
        plain: NDArray[np.int64] = ops["live"] + ops["absent"] + ops["need"]
        return plain

    @property
    def other_bytes(self) -> NDArray[np.int64]:
        """Bytes that each operator meets and needs beside saved tensors."""
        ops = self.ops
        others: NDArray[np.int64] = ops["live"] - ops["managed"] + ops["need"]
        return others

    @property
    def plain_peak_bytes(self) -> int:
        """Peak live bytes of this iteration had nothing left memory."""
        return int(self.plain_bytes.max(initial=0))

    @property
    def seconds(self) -> float:
        """Time spent in operators."""
        return float(self.ops["seconds"].sum())


# -- every operator and every value of an iteration ---------------------------------

OPERATORS = np.dtype(
    [
        ("name", "i4"),  # index into Graph.names
        ("seconds", "f8"),
        ("flops", "f8"),  # 0 where they are few or not known
        ("need", "i8"),  # bytes above the live bytes at its start, outputs included
        ("seeded", "?"),  # draws from a random generator
        ("replayable", "?"),  # may be run again
    ]
)

# A version is what one storage holds between two writes. It is there in [born, dead),
# where `born` follows the operator that made it; a position counts operators.
VERSIONS = np.dtype(
    [
        ("bytes", "i8"),
        ("operator", "i4"),  # that made it; -1: it was there before the iteration
        ("dead", "i4"),  # nobody holds it from here on; one past the last: it stays
        ("held", "i4"),  # only autograd holds it from here on; -1: it was not saved
        ("first_use", "i4"),  # by autograd; -1: it was not saved, or never used
        ("reuses", "i4"),  # the version whose bytes were overwritten; -1: none
        ("lasting", "?"),  # there before and after: parameters and the like
    ]
)

ACCESSES = np.dtype([("operator", "i4"), ("version", "i4")])

# One row for every use; `use` is -1 where a version was saved and never used.
SAVES = np.dtype([("version", "i4"), ("saved", "i4"), ("use", "i4")])

_TABLES = {
    "operators": OPERATORS,
    "versions": VERSIONS,
    "reads": ACCESSES,
    "writes": ACCESSES,
    "saves": SAVES,
}


@dataclass(frozen=True, slots=True)
class Graph:
    """One iteration in full: what every operator read and made, and for how long."""

    names: tuple[str, ...]
    operators: NDArray[np.void]  # dtype OPERATORS
    versions: NDArray[np.void]  # dtype VERSIONS
    reads: NDArray[np.void]  # dtype ACCESSES, by operator
    writes: NDArray[np.void]  # dtype ACCESSES, by operator
    saves: NDArray[np.void]  # dtype SAVES

    @property
    def seconds(self) -> float:
        """Time spent in operators."""
        return float(self.operators["seconds"].sum())

    @property
    def live_bytes(self) -> NDArray[np.int64]:
        """Live bytes at the start of each operator, with nothing leaving memory."""
        n, versions = len(self.operators), self.versions
        change = np.zeros(n + 2, dtype=np.int64)
        np.add.at(change, versions["operator"] + 1, versions["bytes"])
        np.add.at(change, np.minimum(versions["dead"], n + 1), -versions["bytes"])
        live: NDArray[np.int64] = np.cumsum(change)[:n]
        return live

    @property
    def needs(self) -> NDArray[np.int64]:
        """Bytes that each operator needs beside what is live, at least its outputs."""
        versions = self.versions
        fresh = (versions["operator"] >= 0) & (versions["reuses"] < 0)
        made = np.zeros(len(self.operators), dtype=np.int64)
        np.add.at(made, versions["operator"][fresh], versions["bytes"][fresh])
        needs: NDArray[np.int64] = np.maximum(made, self.operators["need"])
        return needs

    @property
    def plain_peak_bytes(self) -> int:
        """Peak live bytes with nothing leaving memory."""
        return int((self.live_bytes + self.needs).max(initial=0))


def save_graph(graph: Graph, path: Path) -> None:
    """Write a graph to a compressed `.npz` file, without pickles."""
    tables = {name: getattr(graph, name) for name in _TABLES}
    np.savez_compressed(path, names=np.array(graph.names, dtype="U"), **tables)


def load_graph(path: Path) -> Graph:
    """Read a graph that `save_graph` wrote."""
    with np.load(path, allow_pickle=False) as file:
        missing = sorted({"names", *_TABLES} - set(file.files))
        if missing:
            raise LowtideError(
                f"{path} is no recorded graph: it lacks the table {missing[0]!r}. "
                "Record it again with this version of lowtide."
            )
        tables = {}
        for name, dtype in _TABLES.items():
            tables[name] = file[name]
            if tables[name].dtype != dtype:
                raise LowtideError(
                    f"{path}: the columns of {name!r} are not those that this version "
                    "of lowtide reads. Record it again."
                )
        names = tuple(str(name) for name in file["names"])
    return Graph(names=names, **tables)
