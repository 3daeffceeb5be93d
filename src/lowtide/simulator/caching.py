# SPDX-License-Identifier: Apache-2.0
"""Models of other allocators: how much they reserve for a given sequence of requests.

None of these allocators knows the future. Each takes memory from the device in
segments, cuts blocks out of them (the smallest free block that is large enough, of
equals the lowest), joins free neighbours again, and gives nothing back unless it must.
They differ in how they round, how large their segments are and when they cut:

model        rounding   segments                             cuts off what is left if
caching      512 B      2 MiB below 1 MiB, 20 MiB below      it is >= 512 B (small pool)
                        10 MiB, else the next 2 MiB          or > 1 MiB (large pool)
expandable   512 B      one a pool, grown by 2 or 20 MiB     it is >= 512 B
bfc          256 B      2 MiB, doubled as needed             half, or >= 128 MiB, is
cnmem        512 B      a first one, then as requested       anything is

`caching` is PyTorch's CUDA allocator with its options `max_split_size` and
`garbage_collection_threshold`, `expandable` the same with `expandable_segments` (its
unmapping under pressure is not modelled), `bfc` TensorFlow's with `allow_growth`,
`cnmem` NVIDIA's old pool, against which SmartPool was published. The rules are those
documented and observed; no model was compared with a GPU. A request costs O(n) at worst
and O(log n) as a rule.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

KIB, MIB = 1 << 10, 1 << 20
FOR_EVER = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What an allocator needed for a sequence of requests."""

    reserved_bytes: int  # peak taken from the device
    live_bytes: int  # peak of what was requested and not yet freed
    segments: int  # how often the device was asked
    fits: bool  # False: the device was full; the peaks are those until then

    @property
    def ratio(self) -> float:
        """Reserved over live bytes; 1 is perfect."""
        return self.reserved_bytes / self.live_bytes if self.live_bytes else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How an allocator takes, cuts and gives back; the defaults are PyTorch's."""

    granule: int = 512
    small: int = MIB  # requests up to this come from a pool of their own; 0: one pool
    expandable: bool = False
    max_split: int = FOR_EVER  # larger blocks are neither cut nor lent to smaller ones
    collect_above: float = 1.0  # part of the capacity from which free segments go back
    releases: bool = True  # give free segments back when the device is full
    settles: bool = False  # take less than the rules say when the device is nearly full

    def rounded(self, size: int) -> int:
        """Round a request up to what is really handed out."""
        return max(self.granule, -(-size // self.granule) * self.granule)

    def pool(self, size: int) -> int:
        """Choose the pool: 0 for small requests, 1 for large ones."""
        return int(size > self.small)

    def segment(self, size: int, pool: int, state: int) -> tuple[int, int]:
        """Choose how much to take for what a request still lacks.

        Returns:
            The bytes, and the `state` of the next call; that of the first is 0.
        """
        if self.expandable:
            page = 20 * MIB if pool else 2 * MIB
            return -(-size // page) * page, 0
        if pool == 0:
            return 2 * MIB, 0
        return 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB, 0

    def cuts(self, block: int, size: int) -> bool:
        """Decide whether what a block has beyond a request becomes a block."""
        if self.pool(size) == 0 or self.expandable:
            return block - size >= self.granule
        return size < self.max_split and block - size > MIB

    def lends(self, block: int, size: int) -> bool:
        """Decide whether a free block may serve a smaller request."""
        if size < self.max_split:
            return block < self.max_split
        return block < size + 20 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class BfcRules(Rules):
    """TensorFlow's best fit with coalescing, in regions that double."""

    granule: int = 256
    small: int = 0
    releases: bool = False
    settles: bool = True

    def segment(self, size: int, pool: int, state: int) -> tuple[int, int]:
        """Take twice as much each time, or as often twice as the request needs."""
        region = state or 2 * MIB
        if region >= size:
            return region, 2 * region
        while region < size:
            region *= 2
        return region, region

    def cuts(self, block: int, size: int) -> bool:
        """Cut when half or 128 MiB would be wasted."""
        return block >= 2 * size or block - size >= 128 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class CnMemRules(Rules):
    """NVIDIA's CnMem: one large segment, then as much as is requested."""

    small: int = 0
    releases: bool = False
    first: int = 256 * MIB

    def segment(self, size: int, pool: int, state: int) -> tuple[int, int]:
        """Take what is requested, after the first segment."""
        return (size if state else max(size, self.first)), 1

    def cuts(self, block: int, size: int) -> bool:
        """Cut whatever is left."""
        return block > size


MODELS: dict[str, Rules] = {
    "caching": Rules(),
    "expandable": Rules(expandable=True, releases=False),
    "bfc": BfcRules(),
    "cnmem": CnMemRules(),
}


_Entry = tuple[Any, ...]  # size, segment, address and the block itself


@dataclass(slots=True, eq=False)
class _Block:
    segment: int
    address: int  # within its segment
    size: int
    pool: int
    free: bool = True
    since: int = 0  # the request at which it became free
    before: _Block | None = None
    after: _Block | None = None
    entry: _Entry = ()  # in its list of free blocks


@dataclass(slots=True)
class _Allocator:
    rules: Rules
    capacity: int
    reserved: int = 0
    peak: int = 0
    segments: int = 0
    state: int = 0  # of Rules.segment
    requests: int = 0
    # Free blocks of the two pools, by size, then by address.
    unused: tuple[list[_Entry], list[_Entry]] = field(default_factory=lambda: ([], []))
    ends: dict[int, _Block] = field(default_factory=dict)  # expandable: the last one

    def allocate(self, request: int) -> _Block | None:
        """Give a block, or None when the device is full."""
        self.requests += 1
        size = self.rules.rounded(request)
        pool = self.rules.pool(size)
        block = self._find(size, pool) or self._take(size, pool)
        if block is None:
            return None
        self._forget(block)
        block.free = False
        if self.rules.cuts(block.size, size):
            self._cut(block, size)
        return block

    def free(self, block: _Block) -> None:
        """Take a block back and join it with its free neighbours."""
        block.free, block.since = True, self.requests
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._forget(other)
                self._join(block, other)
        self._remember(block)

    def _find(self, size: int, pool: int) -> _Block | None:
        unused = self.unused[pool]
        at = bisect_left(unused, (size,))
        if at == len(unused):
            return None
        block: _Block = unused[at][-1]
        return block if self.rules.lends(block.size, size) else None

    def _take(self, size: int, pool: int) -> _Block | None:
        """Get a block from the device, giving free segments back when it is full."""
        end = self.ends.get(pool)
        spare = end.size if end is not None and end.free else 0
        amount, state = self.rules.segment(size - spare, pool, self.state)
        self._collect(amount)
        if self.reserved + amount > self.capacity and self.rules.releases:
            self._release_all()
        if self.reserved + amount > self.capacity and self.rules.settles:
            amount = max(size, self.capacity - self.reserved)
        if self.reserved + amount > self.capacity:
            return None
        self.state = state
        self.reserved += amount
        self.peak = max(self.peak, self.reserved)
        self.segments += 1
        return self._extend(amount, pool)

    def _extend(self, amount: int, pool: int) -> _Block:
        if not self.rules.expandable:
            block = _Block(self.segments, 0, amount, pool)
        else:
            end = self.ends.get(pool)
            address = end.address + end.size if end else 0
            block = _Block(pool, address, amount, pool, before=end)
            if end is not None:
                end.after = block
            self.ends[pool] = block
            if end is not None and end.free:
                self._forget(end)
                self._join(block, end)
        self._remember(block)
        return block

    def _collect(self, amount: int) -> None:
        """Give old free segments back once much of the capacity is reserved."""
        limit = self.rules.collect_above * self.capacity
        if self.rules.collect_above >= 1 or self.reserved + amount <= limit:
            return
        whole = sorted(self._whole_segments(1), key=lambda block: block.since)
        for block in whole:
            if self.reserved + amount <= limit:
                break
            self._release(block)

    def _release_all(self) -> None:
        for pool in (0, 1):
            for block in self._whole_segments(pool):
                self._release(block)

    def _whole_segments(self, pool: int) -> list[_Block]:
        return [
            block
            for *_, block in self.unused[pool]
            if block.before is None and block.after is None
        ]

    def _release(self, block: _Block) -> None:
        self._forget(block)
        self.reserved -= block.size

    def _remember(self, block: _Block) -> None:
        block.entry = block.size, block.segment, block.address, block
        insort(self.unused[block.pool], block.entry)

    def _forget(self, block: _Block) -> None:
        unused = self.unused[block.pool]
        del unused[bisect_left(unused, block.entry)]
        block.entry = ()

    def _cut(self, block: _Block, size: int) -> None:
        rest = _Block(
            block.segment,
            block.address + size,
            block.size - size,
            block.pool,
            since=block.since,
            before=block,
            after=block.after,
        )
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size = rest, size
        if self.ends.get(block.pool) is block:
            self.ends[block.pool] = rest
        self._remember(rest)

    def _join(self, block: _Block, other: _Block) -> None:
        """Add a neighbour, which is in no list any more, to a block."""
        if other is block.before:
            block.address, block.before = other.address, other.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = other.after
            if block.after is not None:
                block.after.before = block
        block.size += other.size
        if self.ends.get(block.pool) is other:
            self.ends[block.pool] = block


def _events(blocks: NDArray[np.void]) -> Iterator[tuple[int, bool]]:
    """Give (block, whether it is born), in order; at one time, deaths come first."""
    n = len(blocks)
    times = np.concatenate([blocks["dead"], blocks["born"]])
    births = np.repeat([False, True], n)
    for at in np.lexsort((births, times)).tolist():
        yield at % n, at >= n


def simulate_allocator(
    blocks: NDArray[np.void],
    rules: Rules,
    *,
    capacity_bytes: int = FOR_EVER,
) -> Footprint:
    """Replay the births and deaths of blocks through a model of an allocator.

    Arguments:
        blocks: columns `born`, `dead` and `bytes`, on one line of time; repeat an
            iteration to see the allocator warmed up.
        rules: one of `MODELS`, or rules of your own.
        capacity_bytes: what the device has. The default has no end.

    Returns:
        The peaks, and whether the device was large enough.
    """
    allocator = _Allocator(rules, capacity_bytes)
    sizes = blocks["bytes"].tolist()
    held: dict[int, _Block] = {}
    live = peak = 0
    fits = True
    for i, born in _events(blocks):
        size = sizes[i]
        if size == 0:
            continue
        if not born:
            live -= size
            allocator.free(held.pop(i))
            continue
        block = allocator.allocate(size)
        if block is None:
            fits = False
            break
        held[i] = block
        live += size
        peak = max(peak, live)
    return Footprint(
        reserved_bytes=allocator.peak,
        live_bytes=peak,
        segments=allocator.segments,
        fits=fits,
    )


def smallest_capacity(
    blocks: NDArray[np.void], rules: Rules, *, resolution_bytes: int = 8 * MIB
) -> int:
    """Find the least capacity a sequence runs in, to a resolution, by bisection.

    An allocator that may give free segments back often needs less than it would
    reserve on an endless device. (A run in a larger device could in principle fail
    where one in a smaller one does not; the smallest found by bisection is given.)
    """
    free = simulate_allocator(blocks, rules)
    low, high = free.live_bytes - 1, free.reserved_bytes
    while high - low > resolution_bytes:
        middle = (low + high) // 2
        if simulate_allocator(blocks, rules, capacity_bytes=middle).fits:
            high = middle
        else:
            low = middle
    return high
