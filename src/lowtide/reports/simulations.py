# SPDX-License-Identifier: Apache-2.0
"""Say what one iteration would do on a device: `lowtide simulate`.

step.tide on rtx4090 within 8.00 GiB (policy auto)

  step            310.2 ms   1.04 x the plain step of 298.1 ms
  peak live       7.98 GiB   64% of the plain peak of 12.50 GiB
  ...
"""

from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.reports.curves import format_seconds
from lowtide.reports.pools import MEANING, ModelFootprint
from lowtide.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """One iteration on a virtual clock."""

    file: str
    hardware: str
    dtype: str
    policy: str
    found_by: str
    budget_bytes: int
    fits: bool
    thrashed: bool  # given up after ten times the plain step
    failed_at: str  # the operator that did not fit, "" where it ran to its end
    plain_peak_bytes: int
    peak_bytes: int
    arena_bytes: int  # one arena with planned places
    models: tuple[ModelFootprint, ...]
    plain_seconds: float
    step_seconds: float
    slowdown: float
    exposed_seconds: float
    room_seconds: float  # of these, for copies out
    replay_seconds: float
    replayed_operators: int
    written_bytes: int
    read_bytes: int
    out_use: float  # part of the step in which each lane works
    in_use: float
    kept_bytes: int
    swapped_bytes: int
    recomputed_bytes: int


def render_simulation(report: SimulationReport) -> str:
    """Return the text, ending in a newline."""
    head = (
        f"{report.file} on {report.hardware} ({report.dtype}) within "
        f"{format_bytes(report.budget_bytes)} (policy {report.policy})"
    )
    lines = [head, *_failure(report), "", *_rows(report)]
    if report.models:
        lines += ["", "  What an allocator reserves for this"]
        arena = "one arena, with places planned for each block"
        lines.append(_row("planned", format_bytes(report.arena_bytes), arena))
        for model in report.models:
            meaning = MEANING.get(model.name, "")
            ratio = model.reserved_bytes / (report.peak_bytes or 1)
            comment = f"{meaning}; {ratio:.3f} x the peak"
            lines.append(_row(model.name, format_bytes(model.reserved_bytes), comment))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _failure(report: SimulationReport) -> Iterator[str]:
    if report.fits:
        return
    if report.thrashed:
        yield "  Given up: it took more than ten times the plain step."
    elif report.failed_at:
        yield f"  Does not fit: {report.failed_at} finds no room. Up to there:"
    else:
        yield "  Does not keep to it."


def _rows(report: SimulationReport) -> Iterator[str]:
    plain = report.plain_seconds
    yield _row(
        "step",
        format_seconds(report.step_seconds),
        f"{report.slowdown:.3f} x the plain step of {format_seconds(plain)}",
    )
    share = report.peak_bytes / (report.plain_peak_bytes or 1)
    yield _row(
        "peak live",
        format_bytes(report.peak_bytes),
        f"{share:.0%} of the plain peak of {format_bytes(report.plain_peak_bytes)}",
    )
    if report.found_by != report.policy:
        yield _row("found by", "", report.found_by)
    moving = report.exposed_seconds - report.room_seconds
    yield _row(
        "exposed",
        format_seconds(report.exposed_seconds),
        f"waiting: {format_seconds(report.room_seconds)} for copies out to make room, "
        f"{format_seconds(moving)} for copies in that were late",
    )
    yield _row(
        "replayed",
        format_seconds(report.replay_seconds),
        f"{report.replayed_operators:,} operators computed again",
    )
    out = f"{report.out_use:.0%} of the step the link is busy"
    yield _row("copied out", format_bytes(report.written_bytes), out)
    back = f"{report.in_use:.0%} of the step the link is busy"
    yield _row("copied in", format_bytes(report.read_bytes), back)
    yield _row("kept", format_bytes(report.kept_bytes), "saved tensors that stayed")
    yield _row("swapped", format_bytes(report.swapped_bytes), "left for the host")
    yield _row("recomputed", format_bytes(report.recomputed_bytes), "computed again")


def _row(label: str, value: str, comment: str) -> str:
    return f"  {label:<12}{value:>12}   {comment}"
