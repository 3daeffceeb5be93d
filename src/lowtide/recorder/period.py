# SPDX-License-Identifier: Apache-2.0
"""Find the iteration in a stream of events: the period that it has settled into.

Addresses and times differ from iteration to iteration; what is compared is a *token* an
event, a number that knows neither (`tokens`). The latest events decide: the stream is
read backwards, so whatever came before training settled does no harm. The failure
function of Knuth, Morris and Pratt gives the shortest period of every suffix; a suffix
that holds its period three times is settled. O(events) in all.

Programs change phase (train, evaluate): each phase has its own period, and `Phases`
tells them apart by what their period consists of, wherever in it the phase begins.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

ROUNDS = 3  # equal periods that are wanted before anything is planned


@dataclass(frozen=True, slots=True)
class Period:
    """Events [start, start + rounds * length) repeat every `length` events."""

    start: int
    length: int
    rounds: int


def tokens(events: Iterable[tuple[Hashable, int]]) -> list[int]:
    """Give each event (variable, bytes where it is allocated, else 0) its token.

    An allocation has its size as its token; any other event minus the number of events
    since the previous one of the same variable, or 0 where there was none.
    """
    latest: dict[Hashable, int] = {}
    result = []
    for i, (variable, nbytes) in enumerate(events):
        before = latest.get(variable)
        age = 0 if before is None else before - i
        result.append(nbytes if nbytes > 0 else age)
        latest[variable] = i
    return result


def find_period(
    stream: Sequence[Hashable], *, rounds: int = ROUNDS, least: int = 1
) -> Period | None:
    """Find the period that a stream ends with, where it came `rounds` times.

    Of all such, the one that holds longest. What repeats after fewer than `least`
    events, as a loop at the end of an iteration does, counts as no period, nor do its
    multiples.

    Returns:
        None where the stream has not settled.
    """
    n = len(stream)
    border = [0] * n
    best: Period | None = None
    for i in range(1, n):
        token = stream[n - 1 - i]
        k = border[i - 1]
        while k and token != stream[n - 1 - k]:
            k = border[k - 1]
        border[i] = k + (token == stream[n - 1 - k])
        length = i + 1 - border[i]
        if length >= least and i + 1 >= rounds * length:
            count = (i + 1) // length
            if best is None or length != best.length or count > best.rounds:
                best = Period(n - count * length, length, count)
    return best


def least_rotation(tokens: Sequence[int]) -> int:
    """Find where to begin a circle of tokens so that it is smallest. O(n).

    Two circles that are equal but for where they begin then become equal.
    """
    n = len(tokens)
    i, j, k = 0, 1, 0  # two beginnings compared, and how far they agree
    while i < n and j < n and k < n:
        a, b = tokens[(i + k) % n], tokens[(j + k) % n]
        if a == b:
            k += 1
            continue
        if a > b:
            i += k + 1
        else:
            j += k + 1
        j += i == j
        k = 0
    return min(i, j)


@dataclass(slots=True)
class Phases:
    """The phases met so far; a phase that comes back keeps its number."""

    _numbers: dict[tuple[int, ...], int] = field(default_factory=dict)

    def number(self, tokens: Sequence[int]) -> int:
        """Give the number of the phase whose period these are, new ones in order."""
        start = least_rotation(tokens)
        circle = (*tokens[start:], *tokens[:start])
        return self._numbers.setdefault(circle, len(self._numbers))
