"""Placement problems from other people's files.

AutoSwap's author published the allocations of twenty training iterations; MiniMalloc's
problems are CSV files (`id,lower,upper,size`, half open) whose names end in the
capacity they fit into.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lowtide.planner.pool import BLOCK
from lowtide.recorder.logs import parse_autoswap
from lowtide.recorder.steady import find_iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Blocks to be placed, and what is known about them."""

    name: str
    blocks: NDArray[np.void]
    period: int = 0
    capacity_bytes: int = 0  # they fit below this height; 0: unknown
    persistent_bytes: int = 0  # allocated before, released after; not placed


def read_minimalloc(path: Path) -> Problem:
    """Read a CSV file of half-open lifetimes."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    blocks = np.zeros(len(rows), BLOCK)
    columns = {"born": "lower", "dead": "upper", "bytes": "size"}
    for name, column in columns.items():
        blocks[name] = [int(row[column]) for row in rows]
    capacity = path.stem.rpartition(".")[2]
    return Problem(
        name=path.stem,
        blocks=blocks,
        capacity_bytes=int(capacity) if capacity.isdecimal() else 0,
    )


def read_autoswap(path: Path) -> Problem:
    """Read a log of allocations and cut one steady iteration out of it."""
    history = parse_autoswap(path.read_text())
    iteration = find_iteration(history.blocks)
    if iteration is None:
        raise SystemExit(f"{path.name}: nothing comes three times")
    placed = np.zeros(len(iteration.chosen), BLOCK)
    placed["born"], placed["dead"] = iteration.starts, iteration.stops
    placed["bytes"] = history.blocks["bytes"][iteration.chosen]
    return Problem(
        name=path.stem,
        blocks=placed,
        period=iteration.period,
        persistent_bytes=iteration.staying_bytes,
    )


def read_blocks(path: Path) -> NDArray[np.void]:
    """Give all blocks of a log of allocations."""
    history = parse_autoswap(path.read_text())
    blocks = np.zeros(len(history.blocks), BLOCK)
    blocks["born"], blocks["dead"] = history.starts, history.stops
    blocks["bytes"] = history.blocks["bytes"]
    return blocks
