# SPDX-License-Identifier: Apache-2.0
"""Cut one steady iteration out of a file's blocks.

Addresses change between iterations, so events are compared by numbers that know none:
an allocation has its size, a release minus the age of its block (Zhang et al., arXiv
1903.06631, section 3, look at more kinds of events and for the same thing in O(n^2)).
Of the period found, the iteration begins where the fewest blocks are alive.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NEVER = 1 << 40  # later than any event
_LEFT_OUT = (2, 3, 4)
_HELD = 0.75  # part of what is looked at that repeats; less is chance, as of layers

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One of many equal iterations, from a moment when few blocks are alive."""

    period: int  # allocations and releases in it
    chosen: NDArray[np.intp]  # the blocks that are born in it
    starts: Ints  # of these, counted from the beginning of the iteration
    stops: Ints  # may lie in a later iteration
    staying_bytes: int  # there before, and for another iteration at least


def find_iteration(blocks: NDArray[np.void]) -> Iteration | None:
    """Cut one steady iteration out of a sequence of blocks, if it has one.

    The first half of the sequence is left out, or a third or quarter of it: it may warm
    up. O(n log n).

    Arguments:
        blocks: of dtype BLOCKS; those that start at 0 were there before.
    """
    born, dead = number_events(blocks)
    signature = sign_events(blocks["bytes"], born, dead)
    for part in _LEFT_OUT:
        begin = len(signature) // part
        period, held = find_period(signature[begin:].tolist())
        if period and held >= _HELD * (len(signature) - begin):
            break
    else:
        return None
    begin += _quietest(born, dead, begin, period)
    end = begin + period
    chosen = np.flatnonzero((born >= begin) & (born < end))
    stays = (born < begin) & (dead >= end + period)
    return Iteration(
        period=period,
        chosen=chosen,
        starts=born[chosen] - begin,
        stops=dead[chosen] - begin,
        staying_bytes=int(blocks["bytes"][stays].sum()),
    )


def number_events(blocks: NDArray[np.void]) -> tuple[Ints, Ints]:
    """Number allocations and releases from 0, each apart.

    Of those at one event the releases come first. A block that was there before is born
    at -1, one that is never released dies at NEVER.
    """
    n = len(blocks)
    times = np.concatenate([blocks["stop"], blocks["start"]]).astype(np.int64)
    births = np.repeat([False, True], n)
    seen = np.concatenate([blocks["stop"] >= 0, blocks["start"] > 0])
    order = np.lexsort((births, times))
    number = np.full(2 * n, -1, np.int64)
    number[order] = np.cumsum(seen[order]) - 1
    dead, born = number[:n], number[n:]
    born[~seen[n:]] = -1
    dead[~seen[:n]] = NEVER
    return born, dead


def sign_events(sizes: Ints, born: Ints, dead: Ints) -> Ints:
    """Give each event a number that knows no address."""
    starts, stops = born >= 0, dead < NEVER
    signature = np.zeros(np.count_nonzero(starts) + np.count_nonzero(stops), np.int64)
    signature[born[starts]] = sizes[starts]
    signature[dead[stops]] = (born - dead)[stops]
    return signature


def find_period(signature: list[int]) -> tuple[int, int]:
    """Find the period that a sequence begins with, for at least three rounds.

    Of all such periods, the one that holds longest. O(n): the failure function of
    Knuth, Morris and Pratt gives the shortest period of every beginning.

    Returns:
        The period, and for how many events it holds; zeros when nothing comes thrice.
    """
    border = [0] * len(signature)
    best = 0, 0
    for i in range(1, len(signature)):
        k = border[i - 1]
        while k and signature[i] != signature[k]:
            k = border[k - 1]
        border[i] = k + (signature[i] == signature[k])
        period = i + 1 - border[i]
        if i + 1 >= 3 * period:
            best = period, i + 1
    return best


def _quietest(born: Ints, dead: Ints, begin: int, period: int) -> int:
    """Find the first event of a period at which the fewest of its blocks are alive."""
    mine = dead < begin + 3 * period
    moments = np.arange(begin, begin + period)
    before = np.searchsorted(np.sort(born[mine]), moments)
    gone = np.searchsorted(np.sort(dead[mine]), moments)
    return int(np.argmin(before - gone))
