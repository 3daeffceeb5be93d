# SPDX-License-Identifier: Apache-2.0
"""What the verbs that look ahead share: their subject, and the device."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from lowtide.archive import noun_in
from lowtide.cli.files import naming, read_any
from lowtide.elsewhere.retime import retime
from lowtide.errors import FileError, LowtideError
from lowtide.hardware import Hardware, find_hardware
from lowtide.history import History
from lowtide.tidefile import Tide
from lowtide.trace import Graph
from lowtide.units import parse_bytes

DTYPES = ("float32", "tf32", "float16", "bfloat16", "float64")

FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="What was recorded.")
]
GpuOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="The device: rtx4090, v100-16g, ...; this-machine after lowtide measure.",
    ),
]
DtypeOption = Annotated[
    str,
    typer.Option(metavar="TYPE", help=f"In which it computes: {', '.join(DTYPES)}."),
]
LinkOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Bytes a second to the host and back, where the catalogue's differ.",
    ),
]
BudgetOption = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Memory for tensors: 8GiB, 75% of the device."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]


@dataclass(frozen=True, slots=True)
class Target:
    """The device that is asked about."""

    hardware: Hardware
    dtype: str

    def place(self, graph: Graph) -> Graph:
        """Give an iteration the times of this device."""
        return retime(graph, self.hardware, self.dtype)


def find_target(gpu: str, dtype: str, link: str | None = None) -> Target:
    """Find the device.

    Raises:
        LowtideError: something is not known; says what is.
    """
    hardware = find_hardware(gpu)
    if dtype not in DTYPES:
        raise LowtideError(f"--dtype: {dtype!r} is none of {', '.join(DTYPES)}")
    hardware.peak(dtype)  # refuse now what it has no rate for
    if link is not None:
        rate = float(parse_bytes(link))
        if rate <= 0:
            raise LowtideError("--link: 0 bytes a second is no link")
        hardware = replace(hardware, to_host=rate, from_host=rate)
    return Target(hardware, dtype)


def read_budget(budget: str | None, hardware: Hardware, default: int) -> int:
    """Read a budget; a percentage is of the device's memory.

    Raises:
        SizeError: it is no size.
    """
    if budget is None:
        return default
    n_bytes = parse_bytes(budget, total=hardware.memory_bytes)
    if n_bytes <= 0:
        raise LowtideError("--budget: nothing fits into 0 bytes")
    return n_bytes


def read_graph(path: Path) -> Graph:
    """Read an iteration in full.

    Raises:
        FileError: it is something else, or damaged; says why.
    """
    content = read_any(path)
    if isinstance(content, Tide):
        return graph_in(path, content)
    why = f"is of another kind ({content.source}); this verb takes an iteration"
    raise FileError(why, path=path)


def graph_in(path: Path, tide: Tide) -> Graph:
    """Take the iteration out of a file."""
    noun = naming(path, lambda: noun_in(tide))
    if isinstance(noun, Graph):
        return noun
    what = "history" if isinstance(noun, History) else tide.kind
    why = f"holds a {what}, not an iteration in full; record one: lowtide record"
    raise FileError(why, path=path)
