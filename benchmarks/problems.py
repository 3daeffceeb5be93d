"""Placement problems from other people's files.

AutoSwap's author published the allocations of twenty training iterations, one line a
call (`Malloc ADDRESS BYTES TIME`, `Free ADDRESS TIME`); MiniMalloc's problems are CSV
files (`id,lower,upper,size`, half open) whose names end in the capacity they fit into.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lowtide.planner.pool import BLOCK

NEVER = 1 << 40  # later than any event


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
    blocks, signature = read_events(path)
    start = len(signature) // 2
    period = find_period(signature[start:])
    start += _quietest(blocks, start, period)
    end = start + period
    inside = (blocks["born"] >= start) & (blocks["born"] < end)
    # What was there before and stays for another whole iteration is no part of it.
    stays = (blocks["born"] < start) & (blocks["dead"] >= end + period)
    placed = blocks[inside]
    placed["born"] -= start
    placed["dead"] -= start
    return Problem(
        name=path.stem,
        blocks=placed,
        period=period,
        persistent_bytes=int(blocks["bytes"][stays].sum()),
    )


def read_events(path: Path) -> tuple[NDArray[np.void], list[int]]:
    """Give all blocks, and a number for each event that knows no addresses.

    An allocation has its size as its number, a release minus the age of its block.
    """
    rows: list[tuple[int, int, int]] = []
    signature: list[int] = []
    live: dict[str, int] = {}
    for event, line in enumerate(path.read_text().splitlines()):
        kind, address, *rest = line.split()
        if kind == "Malloc":
            live[address] = len(rows)
            rows.append((event, NEVER, int(rest[0])))
            signature.append(int(rest[0]))
        else:
            i = live.pop(address)
            born, _, size = rows[i]
            rows[i] = (born, event, size)
            signature.append(born - event)
    return np.array(rows, BLOCK), signature


def find_period(signature: list[int]) -> int:
    """Find the period that a sequence begins with, for at least three rounds.

    Of all such periods, the one that holds longest. O(n): the failure function of
    Knuth, Morris and Pratt gives the shortest period of every beginning.
    """
    border = [0] * len(signature)
    best = 0
    for i in range(1, len(signature)):
        k = border[i - 1]
        while k and signature[i] != signature[k]:
            k = border[k - 1]
        border[i] = k + (signature[i] == signature[k])
        period = i + 1 - border[i]
        if i + 1 >= 3 * period:
            best = period
    if not best:
        raise ValueError(f"nothing comes three times in {len(signature)} events")
    return best


def _quietest(blocks: NDArray[np.void], start: int, period: int) -> int:
    """Find the first event of a period at which the fewest of its blocks are alive."""
    mine = blocks[blocks["dead"] < start + 3 * period]
    alive = [
        np.count_nonzero((mine["born"] < t) & (mine["dead"] >= t))
        for t in range(start, start + period)
    ]
    return int(np.argmin(alive))
