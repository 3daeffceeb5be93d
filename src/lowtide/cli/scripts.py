# SPDX-License-Identifier: Apache-2.0
"""Record scripts without their memory and work, each in a process of its own.

How a batch size reaches a script is `lowtide record`'s business: in place of {batch}
among its arguments, else by the DataLoaders that it builds.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from lowtide import archive
from lowtide.cli.record import MADE_UP
from lowtide.cli.subject import find_target
from lowtide.errors import LowtideError
from lowtide.trace import Graph

Rows = NDArray[np.void]

ArgsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS", help="Arguments of a script, after --"),
]
ModuleOption = Annotated[
    bool, typer.Option("-m", help="FILE is a module, as with `python -m`.")
]


@dataclass(slots=True)
class Script:
    """A script with its arguments, to be recorded for a card."""

    target: str
    args: tuple[str, ...]
    is_module: bool
    gpu: str
    progress: Callable[[str], None] = lambda _: None
    basis: tuple[int, int] = (2, 4)  # batches from which others are estimated
    _known: dict[int, Graph] = field(default_factory=dict)

    def record(self, batch: int | None) -> Graph:
        """Record an iteration, of a batch where one is given.

        Raises:
            LowtideError: the script failed, or did not train; says what it said last.
        """
        key = batch or 0
        if key not in self._known:
            size = "" if batch is None else f" at batch {batch}"
            self.progress(f"recording {Path(self.target).name}{size}")
            self._known[key] = self._record(batch)
        return self._known[key]

    def _record(self, batch: int | None) -> Graph:
        graph = self._run(batch, ("--gpu", self.gpu))
        if (graph.versions["held"] >= 0).any():
            return graph
        # It trains beside the card: what it does is planned as if it were on it.
        self.progress(f"{Path(self.target).name} puts nothing on a GPU: as if it did")
        return find_target(self.gpu, "float32").place(self._run(batch, ()))

    def _run(self, batch: int | None, device: tuple[str, ...]) -> Graph:
        with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
            output = Path(folder) / "step.tide"
            command = [sys.executable, "-m", "lowtide", "record", "--fake"]
            command += [*device, "-o", str(output)]
            if batch is not None:
                command += ["--batch", str(batch)]
            command += [*(["-m"] if self.is_module else []), self.target, *self.args]
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", check=False
            )
            if done.returncode or not output.exists():
                lines = done.stderr.strip().splitlines()
                said = [line for line in lines if line != f"lowtide: {MADE_UP}"]
                last = said[-1] if said else "it said nothing"
                last = last.removeprefix("lowtide record: ")
                where = "" if batch is None else f" at batch {batch}"
                raise LowtideError(f"{self.target} cannot be recorded{where}: {last}")
            graph = archive.load(output)
        assert isinstance(graph, Graph)
        return graph

    def estimate(self, batch: int) -> Graph:
        """Estimate an iteration of a batch from those of two others.

        Sizes and work of each operator grow with the batch along a line, nearly; times
        do where they are not those of launches. What is found with estimates is to be
        checked with a recording.
        """
        first, second = self.basis
        small, large = self.record(first), self.record(second)
        if not _alike(small, large):
            return self.record(batch)
        part = (batch - first) / (second - first)
        return replace(
            small,
            operators=_between(small.operators, large.operators, part),
            versions=_between(small.versions, large.versions, part),
        )


def _alike(a: Graph, b: Graph) -> bool:
    """Tell whether two iterations are the same but for sizes and times."""
    names = [[g.names[i] for i in g.operators["name"].tolist()] for g in (a, b)]
    same = names[0] == names[1] and a.names == b.names
    for table in ("reads", "writes", "saves"):
        same = same and np.array_equal(getattr(a, table), getattr(b, table))
    return same and len(a.versions) == len(b.versions)


def _between(a: Rows, b: Rows, part: float) -> Rows:
    """Go from one table towards another, and beyond, in all columns that differ."""
    rows: Rows = a.copy()
    for name in ("seconds", "flops", "need", "bytes"):
        if name in (rows.dtype.names or ()):
            grown = a[name] + part * (b[name].astype(float) - a[name])
            rows[name] = np.maximum(grown, 0)
    return rows
