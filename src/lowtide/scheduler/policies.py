"""The published policies, each as the weight it gives to a candidate.

A policy that reacts to pressure evicts the candidate with the least score. Every score
here is cost / (size * staleness), with some of the three left out, so a candidate's
*weight* is size / cost, and the victim is the one with the largest weight times the
seconds since its last access (`scheduler.tournament`). In the formulas m is a value's
bytes, s its staleness, c the time of the operator that made it.

policy           score (least leaves)                     way out          source
dtr              (c + sum over adjacent components)/(m s) recompute        DTR, h_DTR_eq
dtr-local        c / (m s)                                recompute        DTR, h_local
lru              1 / s                                    recompute        DTR, h_LRU
size             1 / m                                    recompute        GreedyRemat
msps             (c + evicted ancestors) / m              recompute        Capuchin
delta            1 / (m s)                                2 m/BW : c       DELTA, 2022
delta-knapsack   min(2 m/BW, c) / (m s), as a 0/1 knapsack  the cheaper    DELTA, 2024

DTR: Kirisame et al., ICLR 2021; components as in `scheduler.lineage`. Capuchin: Peng et
al., ASPLOS 2020. DELTA: Tang et al., arXiv 2203.15980, as its released code has it,
repaired: both sides of its director in seconds, whole storages, copies that do not
block, and a prefetch of 5 that is really called. The journal's text (TACO 2024) was not
at hand: its knapsack is reconstructed from the abstract, and so marked below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lowtide.scheduler.director import RECOMPUTE, SWAP, Lanes
from lowtide.scheduler.lineage import Node, Recipe, seconds_around

_LEAST = 1e-9  # seconds: what takes no time at all still has a weight


class Candidate(Protocol):
    """What a policy looks at."""

    @property
    def nbytes(self) -> int:
        """Bytes that would be free."""

    @property
    def op(self) -> Recipe | None:
        """How it was made; None where it cannot be made again."""

    def replay_seconds(self) -> float | None:
        """Seconds to compute it again now; None where that cannot be done."""


def round_trip(nbytes: int, lanes: Lanes) -> float:
    """Return the seconds to copy out and back: DELTA's 2 m/BW, each way measured."""
    return nbytes / lanes.write + nbytes / lanes.read


def direct(nbytes: int, seconds: float | None, lanes: Lanes) -> int:
    """Choose as DELTA's director: drop where a round trip takes longer than c.

    `seconds` is the head operator's time alone: chains are not seen, as published.
    """
    if seconds is None:
        return SWAP
    if not lanes.open:
        return RECOMPUTE
    return RECOMPUTE if round_trip(nbytes, lanes) / max(seconds, _LEAST) > 1 else SWAP


@dataclass(frozen=True, slots=True)
class Policy:
    """How one published policy weighs candidates; the defaults weigh nothing."""

    sized: bool = True  # divide by the bytes
    ageing: bool = True  # divide by the staleness
    cost: str = ""  # "head", "components", "ancestors", "cheaper way" or nothing: 1
    swap: bool = False  # the director may copy out
    knapsack: bool = False  # choose a set for the whole request, not one by one
    ahead: bool = False  # start copies out before there is pressure
    prefetch: int = 0  # how many copies are read ahead at once
    newest_first: bool = True  # of these: last out, first in; else first in, first out
    small: float = 0.0  # leave alone what is smaller than this part of the mean size

    def weigh(self, node: Node, value: Candidate, lanes: Lanes) -> float | None:
        """Return size / cost; None where the value cannot leave at all."""
        can_swap = self.swap and lanes.open
        if value.op is None and not can_swap:
            return None
        seconds = self._seconds(node, value, lanes, can_swap)
        if seconds is None:
            return None
        return (value.nbytes if self.sized else 1.0) / max(seconds, _LEAST)

    def _seconds(
        self, node: Node, value: Candidate, lanes: Lanes, can_swap: bool
    ) -> float | None:
        op = value.op
        if self.cost == "":
            return 1.0
        if self.cost == "ancestors":
            return value.replay_seconds()
        if self.cost == "cheaper way":
            ways = [] if op is None else [op.seconds]
            if can_swap:
                ways.append(round_trip(value.nbytes, lanes))
            return min(ways)
        if op is None:
            return None
        return op.seconds + (seconds_around(node) if self.cost == "components" else 0.0)

    def way(self, value: Candidate, lanes: Lanes) -> int:
        """Choose how a victim leaves."""
        if not (self.swap and lanes.open):
            return RECOMPUTE
        return direct(value.nbytes, value.op.seconds if value.op else None, lanes)


POLICIES: dict[str, Policy] = {
    "delta": Policy(swap=True, prefetch=5, small=0.01),
    # Reconstructed: keep the set of values whose loss would cost most per second of
    # staleness, within the capacity (a 0/1 knapsack, greedy by density and then
    # pruned); prefetch in both directions: copies go out ahead of pressure as well.
    "delta-knapsack": Policy(
        cost="cheaper way",
        swap=True,
        knapsack=True,
        ahead=True,
        prefetch=5,
        small=0.01,
    ),
    "dtr": Policy(cost="components"),
    "dtr-local": Policy(cost="head"),
    "msps": Policy(cost="ancestors", ageing=False),
    "lru": Policy(sized=False),
    "size": Policy(ageing=False),
}


def knapsack(sizes: list[int], costs: list[float], short: int) -> list[int]:
    """Choose what leaves: at least `short` bytes for little cost, in polynomial time.

    The complement of a 0/1 knapsack: what stays has the most value within the
    capacity. Greedy by cost per byte until enough has left, then, dearest first, what
    proves needless stays after all; a single value that is large enough wins if it
    costs less than all of these. O(n log n).

    Returns the chosen positions, cheapest per byte first; all where they do not do.
    """
    order = sorted(range(len(sizes)), key=lambda i: (costs[i] / max(sizes[i], 1), i))
    chosen: list[int] = []
    freed = 0
    for i in order:
        if freed >= short:
            break
        chosen.append(i)
        freed += sizes[i]
    if freed < short:
        return chosen
    for i in sorted(chosen, key=lambda i: costs[i], reverse=True):
        if freed - sizes[i] >= short:
            chosen.remove(i)
            freed -= sizes[i]
    single = min(
        (i for i in order if sizes[i] >= short), key=lambda i: costs[i], default=None
    )
    if single is not None and costs[single] < sum(costs[i] for i in chosen):
        return [single]
    return chosen
