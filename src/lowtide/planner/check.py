# SPDX-License-Identifier: Apache-2.0
"""Check a placement by definition, sharing no code with what made it.

Two blocks may not hold the same byte at the same time. Every iteration is laid out on
a line of time, as many as it takes until the offsets repeat and the longest life has
ended, and every pair of lives that meet is compared: O(n^2) in the worst case, linear
in the number of such pairs, so quick where lives are short.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedBlock:
    """One life of a block: of block `index` in iteration `iteration`."""

    index: int
    iteration: int
    born: int  # counted from the start of iteration 0
    dead: int
    offset: int
    bytes: int

    def __str__(self) -> str:
        return (
            f"block {self.index} of iteration {self.iteration} "
            f"(bytes [{self.offset}, {self.offset + self.bytes}), "
            f"alive in [{self.born}, {self.dead}))"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule that a placement breaks, and where."""

    rule: str
    first: PlacedBlock
    second: PlacedBlock | None = None

    def __str__(self) -> str:
        other = "" if self.second is None else f" and {self.second}"
        return f"{self.first}{other}: {self.rule}"


def check_placement(
    blocks: NDArray[np.void],
    offsets: Ints,
    *,
    period: int = 0,
    height_bytes: int | None = None,
    alignment: int = 1,
) -> list[Violation]:
    """List everything that is wrong with a placement; an empty list is a proof.

    Arguments:
        blocks: columns `born`, `dead` (events, half open) and `bytes`.
        offsets: bytes; one row a slot, one column a block: iteration `k` uses row
            `k % slots`. A single row may come without its dimension.
        period: events in an iteration; 0 when the blocks do not come again.
        height_bytes: nothing may lie above it. None: not checked.
        alignment: what every offset has to be a multiple of.

    Returns:
        The violations in order of time, each with the blocks concerned.

    Raises:
        ValueError: the offsets do not belong to these blocks.
    """
    table = np.atleast_2d(np.asarray(offsets, np.int64))
    if table.ndim != 2 or table.shape[1] != len(blocks) or len(table) == 0:
        raise ValueError(
            f"offsets have shape {np.shape(offsets)}; {len(blocks)} blocks "
            f"need (slots, {len(blocks)})"
        )
    if period == 0 and len(table) != 1:
        raise ValueError(f"{len(table)} slots, but the blocks do not come again")
    lives = _lives(blocks, table, period)
    return _check_each(lives, height_bytes, alignment) + _check_pairs(lives)


@dataclass(frozen=True, slots=True)
class _Lives:
    """All lives that are compared, by birth; the first `own` are each slot's own."""

    index: Ints
    iteration: Ints
    born: Ints
    dead: Ints
    offset: Ints
    bytes: Ints
    end_of_round: int  # lives born from here on repeat earlier ones

    def __getitem__(self, i: int) -> PlacedBlock:
        return PlacedBlock(
            index=int(self.index[i]),
            iteration=int(self.iteration[i]),
            born=int(self.born[i]),
            dead=int(self.dead[i]),
            offset=int(self.offset[i]),
            bytes=int(self.bytes[i]),
        )


def _lives(blocks: NDArray[np.void], table: Ints, period: int) -> _Lives:
    n, slots = len(blocks), len(table)
    iterations = 1
    if period and n:
        longest = int((blocks["dead"] - blocks["born"]).max())
        iterations = slots + -(-longest // period) + 1
    iteration = np.repeat(np.arange(iterations), n)
    index = np.tile(np.arange(n), iterations)
    born = blocks["born"][index] + iteration * period
    order = np.argsort(born, kind="stable")
    index, iteration = index[order], iteration[order]
    return _Lives(
        index=index,
        iteration=iteration,
        born=born[order],
        dead=blocks["dead"][index] + iteration * period,
        offset=table[iteration % slots, index],
        bytes=blocks["bytes"][index].astype(np.int64),
        end_of_round=slots * period,
    )


def _check_each(
    lives: _Lives, height_bytes: int | None, alignment: int
) -> list[Violation]:
    rules = [
        (lives.dead <= lives.born, "dies before it is born"),
        (lives.bytes < 0, "has a negative size"),
        (lives.offset < 0, "lies below 0"),
        (lives.offset % alignment != 0, f"its offset is no multiple of {alignment}"),
    ]
    if height_bytes is not None:
        above = lives.offset + lives.bytes > height_bytes
        rules.append((above, f"ends above the height of {height_bytes}"))
    counts = np.ones(len(lives.born), np.bool_)
    if lives.end_of_round:
        counts = lives.born < lives.end_of_round
    return [
        Violation(rule=rule, first=lives[int(i)])
        for broken, rule in rules
        for i in np.flatnonzero(broken & counts)
    ]


def _check_pairs(lives: _Lives) -> list[Violation]:
    violations = []
    top = lives.offset + lives.bytes
    # Lives born while life i lasts; those of the same birth that come after it.
    ends = np.searchsorted(lives.born, lives.dead, side="left")
    for i, end in enumerate(ends.tolist()):
        if lives.end_of_round and lives.born[i] >= lives.end_of_round:
            break
        later = slice(i + 1, end)
        low = np.maximum(lives.offset[i], lives.offset[later])
        high = np.minimum(top[i], top[later])
        for j in np.flatnonzero(low < high) + i + 1:
            shared = int(min(top[i], top[j]) - max(lives.offset[i], lives.offset[j]))
            violations.append(
                Violation(
                    rule=f"{shared} bytes are in both at {lives.born[j]}",
                    first=lives[i],
                    second=lives[int(j)],
                )
            )
    return violations
