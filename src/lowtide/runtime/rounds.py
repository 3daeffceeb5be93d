# SPDX-License-Identifier: Apache-2.0
"""Places for what steps ask for in the same order, planned once a step came again.

The time of a plan is the number of requests so far: a request is born with its own
number, and dies with that of the first request after its release. Two steps in a row
with the same sizes are planned from the lives of the first; where a later one lives
longer (releases wait for copies), the plan is made anew with the longer life.

A place is a suggestion: whoever asks looks whether it is free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lowtide.planner.pool import BLOCK, Ints, Search, place_blocks

_SLOTS = 2  # what lives longer than so many steps stays, and is not planned for
_NODES = 1 << 14  # of the search: some milliseconds


@dataclass(slots=True, eq=False)
class _Round:
    start: int  # requests before it
    sizes: list[int] = field(default_factory=list)
    deaths: list[int] = field(default_factory=list)  # requests by then; -1: it lives


class Ticket(NamedTuple):
    """Name a request; give it back at the release."""

    round: _Round
    place: int  # in it


class Rounds:
    """Learn what one step after the other asks for."""

    def __init__(self) -> None:
        self.height_bytes = 0  # of the plan; 0: there is none
        self._number = 0  # of the step
        self._clock = 0  # requests so far
        self._now = _Round(0)
        self._before = _Round(0)
        self._sizes: list[int] = []  # of the plan
        self._lives: Ints = np.zeros(0, np.int64)
        self._offsets: Ints = np.zeros((1, 0), np.int64)

    def begin(self) -> None:
        """End a step, and begin the next."""
        ended, before = self._now, self._before
        if ended.sizes and ended.sizes == before.sizes:
            lives = self._lived(before)
            if before.sizes != self._sizes:
                self._plan(before.sizes, lives)
            elif (lives > self._lives).any():
                self._plan(before.sizes, np.maximum(lives, self._lives))
        self._before, self._now = ended, _Round(self._clock)
        self._number += 1

    def offset(self, n_bytes: int) -> int | None:
        """Look up the place planned for the next request; None: there is none."""
        index = len(self._now.sizes)
        if index >= len(self._sizes) or n_bytes > self._sizes[index]:
            return None
        offset = int(self._offsets[self._number % len(self._offsets), index])
        return None if offset < 0 else offset

    def ask(self, n_bytes: int) -> Ticket:
        """Note the next request."""
        now = self._now
        now.sizes.append(n_bytes)
        now.deaths.append(-1)
        self._clock += 1
        return Ticket(now, len(now.sizes) - 1)

    def end(self, ticket: Ticket) -> None:
        """Note a release."""
        ticket.round.deaths[ticket.place] = self._clock

    def _lived(self, past: _Round) -> Ints:
        """Count the requests that each of a step's lives spans; 0: it stays."""
        deaths = np.array(past.deaths)
        lives = deaths - past.start - np.arange(len(deaths))
        return np.where((deaths < 0) | (lives > _SLOTS * len(deaths)), 0, lives)

    def _plan(self, sizes: list[int], lives: Ints) -> None:
        planned = lives > 0
        blocks = np.zeros(len(sizes), BLOCK)
        blocks["born"] = np.arange(len(sizes))
        blocks["dead"] = blocks["born"] + np.maximum(lives, 1)
        blocks["bytes"] = np.where(planned, sizes, 0)
        pool = place_blocks(blocks, period=len(sizes), search=Search(nodes=_NODES))
        self._sizes, self._lives = list(sizes), lives
        self._offsets = np.where(planned, pool.offsets, -1)
        self.height_bytes = pool.height_bytes
