"""Placement problems from other people's files.

AutoSwap's author published the allocations of twenty training iterations; MiniMalloc's
problems are CSV files (`id,lower,upper,size`, half open) whose names end in the
capacity they fit into. Large ones are made up.
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
    alignment: int = 1


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


def make_training(n: int) -> Problem:
    """Make up an iteration: layers save, work, and free in the opposite order."""
    random = np.random.default_rng(0)
    layers = n // 8
    sizes = random.integers(1, 4096, (layers, 8)) * 512
    blocks = np.zeros((layers, 8), BLOCK)
    layer = np.arange(layers)
    forward, backward = 8 * layer, 8 * (2 * layers - layer)
    saved = random.integers(1, 4, layers)  # of each layer, until its backward
    for i in range(8):
        stays = i < saved
        early = (i % 2 == 0) | stays  # workspace of forward, else of backward
        start = np.where(early, forward, backward) + i
        blocks["born"][:, i] = start
        blocks["dead"][:, i] = np.where(
            stays, backward + 7 - i, start + random.integers(1, 9, layers)
        )
    blocks["bytes"] = sizes
    return Problem(name=f"training-{n}", blocks=blocks.reshape(-1))


def make_chance(n: int) -> Problem:
    """Make up blocks that come at any time, most of them for a short one."""
    random = np.random.default_rng(0)
    blocks = np.zeros(n, BLOCK)
    blocks["born"] = random.integers(0, 4 * n, n)
    blocks["dead"] = blocks["born"] + 1 + random.pareto(1.2, n).clip(0, n).astype(int)
    blocks["bytes"] = 512 * (1 + random.pareto(1.0, n).clip(0, 1 << 16).astype(int))
    return Problem(name=f"chance-{n}", blocks=blocks)


MADE_UP = (make_training, make_chance)
