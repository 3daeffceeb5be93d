# SPDX-License-Identifier: Apache-2.0
"""What a planned pool and swapping could have saved, out of somebody else's file."""

import numpy as np
from numpy.typing import NDArray

from lowtide.cli.files import Say
from lowtide.cli.pool import compare_allocators
from lowtide.elsewhere.accesses import copy_cost
from lowtide.hardware import Hardware
from lowtide.history import History
from lowtide.planner.candidates import EVENT, FREE, MALLOC, MUTABLE, READ, Recording
from lowtide.planner.unstalled import without_stall
from lowtide.recorder import period as period_of
from lowtide.recorder import steady
from lowtide.reports.savings import SavingsReport, Swapped

_MOST_EVENTS = 1 << 16  # of an iteration: more are not planned for swapping
_LEFT_OUT = (2, 3, 4)
_ENDS = 25  # events that may be the last of an iteration are looked at
_LEAST = 100  # events in an iteration, where it comes only twice
_HELD = 0.75  # part of what is looked at that repeats; less is chance, as of layers

NO_RECOMPUTATION = (
    "recomputation: the file does not say what was computed from what, nor how long "
    "that took"
)


def savings_of(
    name: str, history: History, hardware: Hardware, say: Say
) -> SavingsReport:
    """Plan a pool and swapping for a file that knows no operators."""
    pool = compare_allocators(name, history, say)
    missing = [NO_RECOMPUTATION]
    swapped = None
    if len(history.seconds) == 0:
        missing.append("swapping: the file has no times")
    else:
        say("planning swaps", 6, 7)
        recording, repeats = recording_in(history)
        if recording is None:
            missing.append("swapping: the file is too long and repeats no iteration")
        else:
            swapped = _swap(recording, repeats, hardware, len(history.uses) > 0)
    return SavingsReport(
        hardware=hardware.name, pool=pool, swapped=swapped, missing=tuple(missing)
    )


def _swap(
    recording: Recording, repeats: bool, hardware: Hardware, uses_known: bool
) -> Swapped:
    events = recording.events
    if not uses_known:  # then a birth begins a window, and only a use may
        events["kind"][events["kind"] == MALLOC] = READ
    costs = copy_cost(hardware)
    found = without_stall(recording, 0, steady=repeats, costs=costs)
    return Swapped(
        peak_bytes=recording.peak_bytes,
        reached_bytes=found.peak_bytes,
        moved_bytes=int(found.windows["bytes"].sum()),
        windows=len(found.windows),
        seconds=recording.seconds,
        uses_known=uses_known,
    )


def recording_in(history: History) -> tuple[Recording | None, bool]:
    """Cut three iterations out, or lay the whole thrice; tells whether it is steady."""
    events, load = _events(history)
    begin, period = _three_iterations(_sign(events))
    if period:
        if period > _MOST_EVENTS:
            return None, True
        cut = slice(begin, begin + 3 * period)
        return Recording(events[cut].copy(), load[cut].copy(), period), True
    if len(events) > _MOST_EVENTS or len(events) == 0:
        return None, False
    return _thrice(events, load), False


def _three_iterations(signature: list[int]) -> tuple[int, int]:
    """Find three equal iterations: where they begin, and the events of one, or 0."""
    for part in _LEFT_OUT:
        begin = len(signature) // part
        period, held = steady.find_period(signature[begin:])
        if period and held >= _HELD * (len(signature) - begin):
            return begin, period
    # few iterations, and the last cut off: two equal ones that something leads up to
    n = len(signature)
    for end in range(n, n // 2, -max(1, n // _ENDS)):
        found = period_of.find_period(signature[:end], rounds=2, least=_LEAST)
        if found is None:
            continue
        first = last = found.start
        while first > 0 and signature[first - 1] == signature[first - 1 + found.length]:
            first -= 1
        while (
            last + found.length < n
            and signature[last] == signature[last + found.length]
        ):
            last += 1
        if last - first >= 2 * found.length:
            return first, found.length
    return 0, 0


def _events(history: History) -> tuple[NDArray[np.void], NDArray[np.float64]]:
    """List what happens to blocks, in order."""
    blocks, uses = history.blocks, history.uses
    born = np.flatnonzero(blocks["start"] > 0)
    dies = np.flatnonzero(blocks["stop"] >= 0)
    at = np.concatenate([blocks["start"][born], blocks["stop"][dies], uses["event"]])
    variable = np.concatenate([born, dies, uses["block"]])
    kind = np.concatenate(
        [
            np.full(len(born), MALLOC),
            np.full(len(dies), FREE),
            np.where(uses["writes"], MUTABLE, READ),
        ]
    )
    order = np.argsort(at, kind="stable")
    at, variable, kind = at[order], variable[order], kind[order]
    events = np.zeros(len(at), EVENT)
    events["variable"], events["kind"] = variable, kind
    events["bytes"] = blocks["bytes"][variable]
    times = history.seconds[np.clip(at - 1, 0, None)]
    events["seconds"] = np.maximum.accumulate(times)  # clocks of threads differ
    sign = np.where(kind == MALLOC, 1, np.where(kind == FREE, -1, 0))
    before = int(blocks["bytes"][blocks["start"] == 0].sum())
    load = before + np.cumsum(sign * events["bytes"]).astype(np.float64)
    return events, load


def _sign(events: NDArray[np.void]) -> list[int]:
    """Give each event a number that knows no address: a size, or an age."""
    last: dict[int, int] = {}
    numbers = []
    rows = zip(
        *(events[c].tolist() for c in ("variable", "kind", "bytes")), strict=True
    )
    for i, (variable, kind, n_bytes) in enumerate(rows):
        numbers.append(n_bytes if kind == MALLOC else last.get(variable, i) - i)
        last[variable] = i
    return numbers


def _thrice(events: NDArray[np.void], load: NDArray[np.float64]) -> Recording:
    """Take a file without iterations for one, and lay it three times in a row."""
    n = len(events)
    rows = np.tile(events, 3)
    again = np.repeat(np.arange(3), n)
    first = float(events["seconds"][0])
    whole = float(events["seconds"][-1]) - first + 1e-6
    rows["seconds"] += again * whole
    variables = int(events["variable"].max()) + 1
    rows["variable"] += (again * variables).astype(np.int32)
    return Recording(rows, np.tile(load, 3), n)
