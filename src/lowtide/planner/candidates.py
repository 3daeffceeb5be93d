# SPDX-License-Identifier: Apache-2.0
"""AutoSwap's candidates: windows in which a variable may be absent, and their scores.

After Zhang et al. (arXiv 1903.06631). A *window* lies between two accesses of a
variable that follow each other. The paper's candidates are those that span the moment
of the peak, one a variable; ours are all that last longer than both copies, also those
that begin in one iteration and end in the next (parameters, optimizer state).

    score   what it measures                        as published
    DOA     time absent, less both copies           less the copy out only
    AOA     DOA times bytes                         below 0: DOA / bytes
    WDOA    load above the limit, summed over       one cell of the load, times the
            the time of absence                     events of absence
    SWDOA   WDOA on what earlier picks leave        on the whole load, over events
    VOTE    sum of the ranks by DOA, AOA, WDOA      the same
    BO      weighted sum of the four, the weights   DOA's weight is dead, SWDOA
            found for each limit (swap.py)          is not standardised

The right column is what the authors' code computes; it made their published figures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Windows = NDArray[np.void]  # dtype WINDOW

MALLOC, FREE, READ, MUTABLE, LAYER = range(5)

EVENT = np.dtype(
    [
        ("variable", "i4"),  # numbered in the order in which ties are broken
        ("kind", "i1"),
        ("bytes", "i8"),
        ("seconds", "f8"),
    ]
)
WINDOW = np.dtype(
    [
        ("variable", "i4"),
        ("bytes", "i8"),
        ("start", "i4"),  # event of the access before; events count from the start
        ("stop", "i4"),  # of the middle iteration; this is the access after
    ]
)
LEAST_BYTES = 1 << 20
SCORES = ("DOA", "AOA", "WDOA", "SWDOA", "VOTE")
WEIGHED = ("AOA", "DOA", "WDOA", "SWDOA")  # what "BO" weighs


@dataclass(frozen=True, slots=True)
class CopyCost:
    """Seconds that a copy takes: bytes times `slope`, and `start`."""

    out_slope: float = 0.0756e-9
    out_start: float = 47200e-9
    in_slope: float = 0.0823e-9
    in_start: float = 9700e-9

    def out(self, nbytes: NDArray[np.int64] | int) -> Floats:
        """Seconds to the host."""
        return np.asarray(self.out_slope * nbytes + self.out_start, np.float64)

    def back(self, nbytes: NDArray[np.int64] | int) -> Floats:
        """Seconds from the host."""
        return np.asarray(self.in_slope * nbytes + self.in_start, np.float64)


@dataclass(frozen=True, slots=True)
class Recording:
    """Three iterations of events in order; positions count from the middle one."""

    events: NDArray[np.void]  # dtype EVENT, 3 * period of them
    load: Floats  # live bytes after each event
    period: int

    @property
    def peak_at(self) -> int:
        """The first event of the middle iteration at which the load is highest."""
        return int(self.load[self.period : 2 * self.period].argmax())

    @property
    def peak_bytes(self) -> int:
        """The highest load of the middle iteration."""
        return int(self.load[self.period : 2 * self.period].max())

    @property
    def seconds(self) -> float:
        """How long the middle iteration takes."""
        times = self.events["seconds"]
        return float(times[2 * self.period] - times[self.period])

    def times(self, windows: Windows) -> tuple[Floats, Floats]:
        """Give when windows begin and end."""
        times = self.events["seconds"]
        return (
            times[windows["start"] + self.period],
            times[windows["stop"] + self.period],
        )


def peak_windows(recording: Recording, *, any_access: bool) -> Windows:
    """List the windows over the peak, one a variable (the paper's candidates).

    `any_access`: an allocation may begin one, as in the planner behind the published
    figures; the run-time code asks for a read, a write or the end of a layer.
    """
    windows = _windows(recording)
    peak = recording.peak_at
    spans = (windows["start"] < peak) & (windows["stop"] > peak)
    if not any_access:
        kinds = recording.events["kind"][windows["start"] + recording.period]
        spans &= kinds >= READ
    found: Windows = windows[spans]
    return found


def steady_windows(recording: Recording, costs: CopyCost) -> Windows:
    """List all windows that begin in one iteration and outlast both copies."""
    windows = _windows(recording)
    windows = windows[(windows["start"] >= 0) & (windows["start"] < recording.period)]
    windows = windows[windows["stop"] <= windows["start"] + recording.period]
    kinds = recording.events["kind"][windows["start"] + recording.period]
    usable = (kinds >= READ) & (doa(recording, windows, costs) > 0)
    found: Windows = windows[usable]
    return found


def _windows(recording: Recording) -> Windows:
    """List all windows of large variables, by variable and event."""
    events = recording.events
    order = np.lexsort((np.arange(len(events)), events["variable"]))
    first, second = order[:-1], order[1:]
    joined = events["variable"][first] == events["variable"][second]
    joined &= events["bytes"][first] >= LEAST_BYTES
    windows = np.zeros(int(joined.sum()), WINDOW)
    windows["variable"] = events["variable"][first[joined]]
    windows["bytes"] = events["bytes"][first[joined]]
    windows["start"] = first[joined] - recording.period
    windows["stop"] = second[joined] - recording.period
    return windows


def doa(recording: Recording, windows: Windows, costs: CopyCost) -> Floats:
    """Duration of absence: the time between the accesses, less both copies."""
    begin, end = recording.times(windows)
    copies = costs.out(windows["bytes"]) + costs.back(windows["bytes"])
    return np.asarray(end - begin - copies, np.float64)


def rank(
    name: str,
    recording: Recording,
    windows: Windows,
    costs: CopyCost,
    *,
    limit_bytes: int,
    as_published: bool,
) -> NDArray[np.int64]:
    """Order windows by a score, best first; ties keep their order."""
    score = _published(name, recording, windows, costs)
    if not as_published:
        score = _meant(name, recording, windows, costs, limit_bytes)
    return np.argsort(-score, kind="stable")


def standardised(
    recording: Recording,
    windows: Windows,
    costs: CopyCost,
    *,
    limit_bytes: int,
    as_published: bool,
) -> Floats:
    """Give the four scores of WEIGHED, a row each, ready to be weighed and summed."""
    rows = []
    for name in WEIGHED:
        if as_published:
            row = _published(name, recording, windows, costs)
        else:
            row = _meant(name, recording, windows, costs, limit_bytes)
        if not (as_published and name == "SWDOA"):
            row = (row - row.mean()) / (row.std() or 1.0) if len(row) else row
        if as_published and name == "DOA":
            row = np.zeros_like(row)
        rows.append(row)
    return np.array(rows)


def _votes(scores: list[Floats]) -> Floats:
    """Sum the places that each score gives."""
    places = [np.argsort(np.argsort(-s, kind="stable"), kind="stable") for s in scores]
    return np.asarray(-np.sum(places, axis=0), np.float64)


def _meant(
    name: str,
    recording: Recording,
    windows: Windows,
    costs: CopyCost,
    limit_bytes: int,
) -> Floats:
    time = doa(recording, windows, costs)
    if name == "DOA":
        return time
    if name == "AOA":
        # what cannot be hidden comes after all else
        return np.asarray(np.where(time >= 0, time * windows["bytes"], time))
    if name == "VOTE":
        three = ("DOA", "AOA", "WDOA")
        return _votes(
            [_meant(n, recording, windows, costs, limit_bytes) for n in three]
        )
    lasts = np.diff(recording.events["seconds"], append=recording.events["seconds"][-1])
    return _weighted(name, recording, windows, lasts, limit_bytes)


def _published(
    name: str, recording: Recording, windows: Windows, costs: CopyCost
) -> Floats:
    begin, end = recording.times(windows)
    time = np.asarray((end - begin) - costs.out(windows["bytes"]), np.float64)
    if name == "DOA":
        return time
    if name == "AOA":
        size = windows["bytes"]
        return np.asarray(np.where(time >= 0, time * size, time / size))
    if name == "WDOA":
        cells = recording.load[np.arange(len(windows))]
        return np.asarray(cells * (windows["stop"] - windows["start"]), np.float64)
    if name == "VOTE":
        three = ("DOA", "AOA", "WDOA")
        return _votes([_published(n, recording, windows, costs) for n in three])
    return _weighted(name, recording, windows, np.ones(len(recording.load)), 0)


def _weighted(
    name: str,
    recording: Recording,
    windows: Windows,
    lasts: Floats,
    limit_bytes: int,
) -> Floats:
    """Sum what lies above a limit; for SWDOA pick after pick, on what is left."""
    load = recording.load.copy()
    start = windows["start"] + recording.period
    stop = windows["stop"] + recording.period
    score = np.zeros(len(windows))
    left = list(range(len(windows)))  # sorted again and again: that breaks ties
    while left:
        above = np.concatenate(
            ([0.0], np.cumsum(np.maximum(load - limit_bytes, 0.0) * lasts))
        )
        sums = above[stop] - above[start]
        if name == "WDOA":
            return np.asarray(sums)
        left.sort(key=lambda i: -sums[i])
        best = left.pop(0)
        score[best] = sums[best]
        load[start[best] : stop[best]] -= windows["bytes"][best]
    return score
