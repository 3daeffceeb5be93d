# SPDX-License-Identifier: Apache-2.0
"""SmartPool: give every block of one iteration its place, with nothing wasted.

Placing blocks of known lifetimes and sizes below the least height is dynamic storage
allocation, NP-complete (Zhang et al., arXiv 1903.06631, section 2). No placement is
lower than the peak of the live bytes. On training traces that bound is nearly always
reached, so the search (`_core`, in C++) goes from cheap to exact and stops there:

1. cut time where nothing is alive: the parts do not interact;
2. fill the lowest valley of the skyline with the block of the largest key (bytes x
   lifetime, and three more), about O(n log n); then first and best fit by size, and
   first fit around a gapless stack of what lives at the peak, O(n^2);
3. repeat step 2 with noisy keys, and decide exactly whether the blocks fit below a
   height, closing in on the least one from both sides: a depth-first search over
   skylines that prunes what overfills a moment, jumps back over moves that a failure
   did not depend on, and remembers failed states. Exponential, and the answer to most
   hard problems of a few hundred blocks; proves small ones optimal.

A block that outlives its iteration needs more than one place, since its successor is
born before it dies. SmartPool reserves two whole copies of such blocks below all
others. Here several iterations are laid on a circle and placed together, so that each
block has one offset in even and another in odd iterations:

    offset |  ##A0####      ####          A crosses the boundary: A0 and A1 alternate;
           |____bbb__##A1#######_b'b'b'   b is placed anew in each of the two
           +-----------|----------->
           iteration 0 | iteration 1 | 0 again

Offsets and sizes are bytes; times are indices of events or operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide import _core
from lowtide.errors import LowtideError

BLOCK = np.dtype(
    [
        ("born", "i8"),  # the event at which it is allocated
        ("dead", "i8"),  # the event at which it is released; not alive any more
        ("bytes", "i8"),
    ]
)

DEFAULT_NODES = 1 << 19  # about a second of search at most

Ints = NDArray[np.int64]


class LifetimeError(LowtideError, ValueError):
    """Refuse blocks that cannot be placed.

    Arguments:
        block: the index of the first one, or None when the whole is at fault.
        why: a clause that says what is wrong.
    """

    def __init__(self, block: int | None, why: str) -> None:
        super().__init__(why if block is None else f"block {block} {why}")
        self.block = block
        self.why = why


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Places for the blocks of one iteration.

    Block `i` of iteration `k` lies at `offsets[k % slots, i]` and below `height`.
    """

    blocks: NDArray[np.void]  # dtype BLOCK, as given
    period: int  # events in an iteration; 0: the blocks do not come again
    offsets: Ints  # (slots, blocks), bytes, multiples of the alignment
    height_bytes: int
    lower_bound_bytes: int  # no placement of the aligned sizes is lower
    alignment: int
    policy: str
    nodes: int  # what the search took; the same for the same input
    aborted: bool  # the deadline or the caller ended the search

    @property
    def slots(self) -> int:
        """How many iterations pass before the offsets come again."""
        return len(self.offsets)

    @property
    def optimal(self) -> bool:
        """Whether it is proved that no placement is lower."""
        return self.height_bytes == self.lower_bound_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How long the search may take, and when it may stop early.

    The same `seed` and `nodes` give the same placement on every machine. `seconds`
    and `cancel` only abort: what was found by then is given.
    """

    enough_bytes: int = 0  # stop at this height, though a lower one may exist
    seed: int = 0
    nodes: int = DEFAULT_NODES
    seconds: float | None = None
    cancel: _core.Cancel | None = None


def place_blocks(
    blocks: NDArray[np.void],
    *,
    period: int = 0,
    policy: str = "auto",
    alignment: int = 1,
    search: Search | None = None,
) -> Pool:
    """Give every block an offset so that blocks alive at once share no byte.

    Arguments:
        blocks: what to place, of dtype `BLOCK`. Blocks without bytes lie at 0.
        period: how many events an iteration has, when the blocks come again in every
            iteration; births then lie in [0, period), and a block that dies after
            `period` dies in a later iteration. 0 when they do not come again.
        policy: "auto", or one of the published rules, "published-first-fit" and
            "published-best-fit" (Zhang et al., section 2: the largest block first, two
            copies of what crosses iterations below all others, O(n^2)).
        alignment: every offset is a multiple of it, and every size counts as one.
        search: limits for "auto". By default a quarter of a million nodes, which only
            problems without a placement found at the lower bound use up.

    Returns:
        A Pool; it is proved optimal when its height is its lower bound.

    Raises:
        LifetimeError: a block dies before it is born, has a negative size, or does not
            belong to the period.
    """
    rule = POLICIES.get(policy)
    if rule is None:
        known = ", ".join(POLICIES)
        raise LifetimeError(None, f"{policy!r} is no policy; there are {known}")
    _validate(blocks, period, alignment)
    sized = np.zeros(len(blocks), BLOCK)
    sized["born"], sized["dead"] = blocks["born"], blocks["dead"]
    sized["bytes"] = -(-blocks["bytes"] // alignment) * alignment
    solid = sized["bytes"] > 0
    found = rule(sized[solid], period, search or Search())
    offsets = np.zeros((len(found.offsets), len(blocks)), np.int64)
    offsets[:, solid] = found.offsets
    ends = offsets + sized["bytes"]
    return Pool(
        blocks=blocks,
        period=period,
        offsets=offsets,
        height_bytes=int(ends.max(initial=0)),
        lower_bound_bytes=found.lower_bound,
        alignment=alignment,
        policy=policy,
        nodes=found.nodes,
        aborted=found.aborted,
    )


def lower_bound(blocks: NDArray[np.void], *, period: int = 0) -> int:
    """Compute the peak of the live bytes; no placement is lower. O(n log n)."""
    _validate(blocks, period, 1)
    _, live = live_curve(blocks, period=period)
    return int(live.max(initial=0))


def live_curve(blocks: NDArray[np.void], *, period: int = 0) -> tuple[Ints, Ints]:
    """Sum the live bytes at each birth, in iterations that all are like this one.

    Returns:
        The births in ascending order, and the bytes alive from each of them on; with a
        period they cover as many iterations as the longest life touches.
    """
    circle, _ = _unroll(blocks[blocks["bytes"] > 0], period)
    return _core.live_bytes(*circle.columns(), circle.length)


def _validate(blocks: NDArray[np.void], period: int, alignment: int) -> None:
    if blocks.dtype != BLOCK:
        raise LifetimeError(None, f"the blocks have dtype {blocks.dtype}, not BLOCK")
    if alignment < 1:
        raise LifetimeError(None, f"the alignment is {alignment}; it is at least 1")
    born, dead = blocks["born"], blocks["dead"]
    _refuse(dead <= born, blocks, "dies before it is born")
    _refuse(blocks["bytes"] < 0, blocks, "has a negative size")
    if period:
        _refuse((born < 0) | (born >= period), blocks, f"is not born in [0, {period})")


def _refuse(wrong: NDArray[np.bool_], blocks: NDArray[np.void], why: str) -> None:
    if wrong.any():
        i = int(np.argmax(wrong))
        born, dead, size = blocks[i].tolist()
        raise LifetimeError(i, f"({size} bytes, alive in [{born}, {dead})) {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    offsets: Ints  # (slots, blocks)
    lower_bound: int
    nodes: int = 0
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class _Circle:
    """Lives on a circle of `length` events, or on a line when that is 0."""

    born: Ints
    dead: Ints
    bytes: Ints
    length: int

    def columns(self) -> tuple[Ints, Ints, Ints]:
        return self.born, self.dead, self.bytes


def _unroll(blocks: NDArray[np.void], period: int) -> tuple[_Circle, int]:
    """Lay as many iterations on a circle as the longest life needs."""
    born, dead, size = (
        np.ascontiguousarray(blocks[name]) for name in ("born", "dead", "bytes")
    )
    if period == 0 or len(blocks) == 0:
        return _Circle(born, dead, size, 0), 1
    slots = -(-int((dead - born).max()) // period)
    start = np.repeat(np.arange(slots) * period, len(blocks))
    circle = _Circle(
        np.tile(born, slots) + start,
        np.tile(dead, slots) + start,
        np.tile(size, slots),
        slots * period,
    )
    return circle, slots


def _search(blocks: NDArray[np.void], period: int, search: Search) -> _Found:
    circle, slots = _unroll(blocks, period)
    offsets, bound, nodes, aborted = _core.place(
        *circle.columns(),
        circle.length,
        enough=search.enough_bytes,
        seed=search.seed,
        nodes=search.nodes,
        seconds=search.seconds,
        cancel=search.cancel,
    )
    return _Found(
        offsets=offsets.reshape(slots, len(blocks)),
        lower_bound=bound,
        nodes=nodes,
        aborted=aborted,
    )


def _published_first_fit(blocks: NDArray[np.void], period: int, _: Search) -> _Found:
    return _published(blocks, period, best=False)


def _published_best_fit(blocks: NDArray[np.void], period: int, _: Search) -> _Found:
    return _published(blocks, period, best=True)


def _published(blocks: NDArray[np.void], period: int, *, best: bool) -> _Found:
    """Place by size, with the zone of what crosses iterations doubled at the bottom."""
    circle, slots = _unroll(blocks, period)
    if slots > 2:
        raise LifetimeError(
            None, f"a block lives {slots} iterations; the published pool has two copies"
        )
    _, live = _core.live_bytes(*circle.columns(), circle.length)
    crosses = blocks["dead"] > period if period else np.zeros(len(blocks), np.bool_)
    offsets = np.zeros((2 if period else 1, len(blocks)), np.int64)
    zone = blocks[crosses]
    zone["dead"] = period
    offsets[:, crosses] = _fit_by_size(zone, best=best)
    copy = int((offsets[0] + blocks["bytes"])[crosses].max(initial=0))
    if period:
        offsets[1, crosses] += copy
    offsets[:, ~crosses] = 2 * copy + _fit_by_size(blocks[~crosses], best=best)
    return _Found(offsets=offsets, lower_bound=int(live.max(initial=0)))


def _fit_by_size(blocks: NDArray[np.void], *, best: bool) -> Ints:
    """Place the largest first, of equals the earliest."""
    born, dead, size = (
        np.ascontiguousarray(blocks[name]) for name in ("born", "dead", "bytes")
    )
    order = np.lexsort((born, -size)).astype(np.int64)
    return _core.fit(born, dead, size, order, best)


POLICIES: dict[str, Callable[[NDArray[np.void], int, Search], _Found]] = {
    "auto": _search,
    "published-first-fit": _published_first_fit,
    "published-best-fit": _published_best_fit,
}
