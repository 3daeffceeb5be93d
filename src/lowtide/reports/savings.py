# SPDX-License-Identifier: Apache-2.0
"""Say what planning could have saved somebody else's recording: `lowtide plan`.

The pool comes first, since every file says enough for it (`reports.pools`); then
swapping, where the file has times; recomputation is named only to say what is missing.
"""

from dataclasses import dataclass

from lowtide.reports.curves import format_seconds
from lowtide.reports.pools import PoolReport, render_pool
from lowtide.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Swapped:
    """What swapping could have done without a stall."""

    peak_bytes: int  # of the iteration that was looked at
    reached_bytes: int  # while nothing ever waits for a copy
    moved_bytes: int
    windows: int
    seconds: float  # of that iteration
    uses_known: bool  # False: nothing is taken to be used between birth and death


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingsReport:
    """A planned pool, and swapping on a device."""

    hardware: str
    pool: PoolReport
    swapped: Swapped | None
    missing: tuple[str, ...]  # why something is not told


def render_savings(report: SavingsReport) -> str:
    """Return the text, ending in a newline."""
    lines = [render_pool(report.pool).rstrip(), ""]
    swapped = report.swapped
    if swapped is not None:
        saved = 1 - swapped.reached_bytes / (swapped.peak_bytes or 1)
        bound = "" if swapped.uses_known else "at best "
        lines += [
            f"  Swapping over the link of {report.hardware}, with nothing waiting",
            f"  {'swapping':<16}{format_bytes(swapped.reached_bytes):>12}   "
            f"{bound}{saved:.1%} below the peak of {format_bytes(swapped.peak_bytes)}",
            f"  {'moved':<16}{format_bytes(swapped.moved_bytes):>12}   "
            f"out and back, {swapped.windows} blocks, in "
            f"{format_seconds(swapped.seconds)}",
        ]
        if not swapped.uses_known:
            lines.append(
                "  note: the file does not say when blocks are used; none is taken to "
                "be, between its allocation and its release"
            )
    lines += [f"  note: {why}" for why in report.missing]
    return "\n".join(lines) + "\n"
