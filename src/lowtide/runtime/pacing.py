# SPDX-License-Identifier: Apache-2.0
"""Pacing: how much may be on its way at once, in one step, and how far ahead.

Pure: bytes and seconds in, decisions out.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowtide.errors import SpillError
from lowtide.trace import Trace

Bytes: TypeAlias = int
Seconds: TypeAlias = float

_LEAST_FLIGHT: Bytes = 16 << 20  # below it a disk is not kept busy
_LONGEST_FLIGHT: Seconds = 0.5  # that a caller may have to wait for what is under way
_IN_A_ROW = 3  # writes that fail before the rest of the step goes without
_SHORTEST: Seconds = 0.002  # of lead: about the time of a small copy
NOTICED: Seconds = 0.0005  # a shorter wait is no late arrival


def flight_limit(budget: Bytes, bandwidth: float) -> Bytes:
    """Return how many bytes may be on their way out at once.

    What is on its way still takes up memory, and whoever needs that memory waits for
    it: so at most a quarter of the budget, and half a second's worth of copying.
    """
    most = min(budget // 4, int(bandwidth * _LONGEST_FLIGHT))
    return max(_LEAST_FLIGHT, most)


class Allowance:
    """What may be written in one step: so many bytes, and nothing after failures."""

    def __init__(self, limit_bytes: Bytes | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.most_bytes: Bytes = 0  # in any step so far
        self.reached = False  # something was refused
        self._step_bytes: Bytes = 0
        self._failures = 0  # in a row
        self._last: SpillError | None = None

    def begin_step(self) -> None:
        """Count anew, and try again what failed."""
        self._step_bytes = 0
        self._failures, self._last = 0, None

    def over(self, n_bytes: Bytes) -> bool:
        """Say whether so many bytes more would exceed the step's limit."""
        limit = self.limit_bytes
        over = limit is not None and self._step_bytes + n_bytes > limit
        self.reached |= over
        return over

    @property
    def step_bytes(self) -> Bytes:
        """Tell how many bytes were given leave in this step."""
        return self._step_bytes

    @property
    def failing(self) -> SpillError | None:
        """Return the last error, once so many writes failed that trying is a waste."""
        return self._last if self._failures >= _IN_A_ROW else None

    def spend(self, n_bytes: Bytes) -> None:
        """Count bytes that are to be written."""
        self._step_bytes += n_bytes
        self.most_bytes = max(self.most_bytes, self._step_bytes)

    def succeeded(self) -> None:
        """Note a write that arrived."""
        self._failures = 0

    def failed(self, error: SpillError) -> None:
        """Note a write that did not."""
        self._failures += 1
        self._last = error


class Lead:
    """How long before its use a swapped value is read back, learnt from mistakes.

    At first as early as there is room. A read ahead that had to be given up, because
    the room was wanted, came too early: those after it start later. One that was
    waited for came too late: those after it start earlier, by twice the wait. Both
    together settle between the two, where such a place exists.
    """

    def __init__(self) -> None:
        self.seconds: Seconds = math.inf
        self._trace: Trace | None = None
        self._clock: NDArray[np.float64] | None = None  # start of each operator
        self._position = 0

    def look(self, trace: Trace | None, position: int) -> None:
        """Note where the program stands in the iteration that is foretold."""
        if trace is not self._trace:
            self._trace, self._clock = trace, None
        self._position = position

    def wants(self, use: int) -> bool:
        """Say whether a value that is used at an operator should be on its way."""
        return self.seconds == math.inf or self._until(use) <= self.seconds

    def late(self, waited: Seconds) -> None:
        """Learn that a value was waited for."""
        if waited > NOTICED:
            self.seconds += max(2 * waited, 0.05 * self.seconds)

    def cancelled(self, use: int) -> None:
        """Learn that the room for a value's read ahead was wanted otherwise."""
        ahead = self._until(use)
        if 0 < ahead < math.inf:
            self.seconds = max(_SHORTEST, min(self.seconds, 0.7 * ahead))

    def _until(self, use: int) -> Seconds:
        """Foretell the seconds from here to an operator; 0 where nothing is known."""
        if self._trace is None or use < 0:
            return 0.0
        if self._clock is None:
            ends = np.cumsum(self._trace.ops["seconds"])
            self._clock = np.concatenate(([0.0], ends))
        last = len(self._clock) - 1
        here, there = min(max(self._position, 0), last), min(use, last)
        return max(0.0, float(self._clock[there] - self._clock[here]))
