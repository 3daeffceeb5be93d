# SPDX-License-Identifier: Apache-2.0
"""Say what each budget would cost on a device: `lowtide plan`.

step.tide on rtx4090 (24.00 GiB): 950 operators, 0.31 s a step, plain peak 31.20 GiB

        budget        slower      kept   swapped  recomputed   exposed    replay
     31.20 GiB  100 %  1.000  ...
  >  15.60 GiB   50 %  1.043  ...
"""

from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.elsewhere.curve import Curve, Point
from lowtide.units import format_bytes

_PLACES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceSums:
    """Saved tensors that one kind of operator made, by where they are."""

    name: str
    tensors: int
    kept_bytes: int
    swapped_bytes: int
    recomputed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The budget that was asked for."""

    budget_bytes: int
    fits: bool
    point: Point | None  # None where it does not fit
    places: tuple[PlaceSums, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A trade-off curve on a device."""

    file: str
    hardware: str
    dtype: str
    memory_bytes: int
    usable_bytes: int
    operators: int
    saved_bytes: int
    curve: Curve
    chosen: Chosen | None
    notes: tuple[str, ...]


def render_plan(report: PlanReport) -> str:
    """Return the text, ending in a newline."""
    blocks = ["\n".join(_headline(report)), "\n".join(_table(report.curve))]
    blocks.append("\n".join(_verdict(report.curve)))
    if report.chosen is not None:
        blocks.append("\n".join(_chosen_lines(report.chosen, report.curve)))
    if report.notes:
        blocks.append("\n".join(f"  note: {note}" for note in report.notes))
    return "\n\n".join(blocks) + "\n"


def _headline(report: PlanReport) -> Iterator[str]:
    curve = report.curve
    plain = format_bytes(curve.plain_peak_bytes)
    yield (
        f"{report.file} on {report.hardware} ({format_bytes(report.memory_bytes)}, "
        f"{report.dtype}): {report.operators:,} operators, "
        f"{format_seconds(curve.plain_seconds)} a step, plain peak {plain}"
    )
    usable = report.usable_bytes
    room = f"{format_bytes(usable)} that tensors may have there"
    if curve.plain_peak_bytes <= usable:
        yield f"  Fits as it is into the {room}."
        return
    over = format_bytes(curve.plain_peak_bytes - usable)
    if curve.smallest_bytes > usable:
        yield f"  Does not fit into the {room}, whatever is moved or recomputed."
        return
    best = min(
        (p for p in curve.points if p.budget_bytes <= usable), key=lambda p: p.slowdown
    )
    yield (
        f"  Exceeds the {room} by {over}; with lowtide it fits, at "
        f"{best.slowdown:.2f} x the time."
    )


def _table(curve: Curve) -> Iterator[str]:
    heads = ("kept", "swapped", "recomputed", "exposed", "replayed")
    yield f"  {'budget':>14}{'slower':>16}" + "".join(f"{h:>12}" for h in heads)
    for i, point in enumerate(curve.points):
        share = point.budget_bytes / (curve.plain_peak_bytes or 1)
        mark = ">" if i == curve.knee else " "
        sizes = (point.kept_bytes, point.swapped_bytes, point.recomputed_bytes)
        times = (point.exposed_seconds, point.replay_seconds)
        yield (
            f"  {mark} {format_bytes(point.budget_bytes):>12}{share:>7.0%}"
            f"{point.slowdown:>7.3f} x"
            + "".join(f"{format_bytes(n) if n else '-':>12}" for n in sizes)
            + "".join(f"{format_seconds(s) if s else '-':>12}" for s in times)
        )


def _verdict(curve: Curve) -> Iterator[str]:
    smallest = format_bytes(curve.smallest_bytes, round_up=True)
    yield f"  Smallest budget found to run: {smallest}"
    knee = curve.worth_it
    if knee is None or knee.budget_bytes == curve.plain_peak_bytes:
        yield "  Worth it: no budget below the plain peak."
        return
    share = knee.budget_bytes / curve.plain_peak_bytes
    line = (
        f"  Worth it (>): {format_bytes(knee.budget_bytes)}, {share:.0%} of the plain "
        f"peak, at {knee.slowdown:.3f} x the time"
    )
    if curve.knee + 1 < len(curve.points):
        below = curve.points[curve.knee + 1]
        line += (
            f"; the next smaller one, {format_bytes(below.budget_bytes)}, takes "
            f"{below.slowdown:.3f} x"
        )
    yield line + "."


def _chosen_lines(chosen: Chosen, curve: Curve) -> Iterator[str]:
    budget = format_bytes(chosen.budget_bytes)
    point = chosen.point
    if point is None:
        smallest = format_bytes(curve.smallest_bytes, round_up=True)
        yield f"  Within {budget} it does not run; give {smallest} or more."
        return
    yield (
        f"  Within {budget}: {format_seconds(point.seconds)} a step "
        f"({point.slowdown:.3f} x), planned peak {format_bytes(point.peak_bytes)}, "
        f"found by: {point.found_by}"
    )
    if not chosen.places:
        return
    yield (
        f"    {'made by':<36}{'tensors':>8}{'kept':>12}{'swapped':>12}"
        f"{'recomputed':>12}"
    )
    for place in chosen.places[:_PLACES]:
        sizes = (place.kept_bytes, place.swapped_bytes, place.recomputed_bytes)
        yield f"    {place.name[:35]:<36}{place.tensors:>8}" + "".join(
            f"{format_bytes(n) if n else '-':>12}" for n in sizes
        )
    if len(chosen.places) > _PLACES:
        yield f"    and {len(chosen.places) - _PLACES} others"


def format_seconds(seconds: float) -> str:
    """Write a time with three digits that say something."""
    for limit, factor, unit in ((1.0, 1, "s"), (1e-3, 1e3, "ms")):
        if seconds >= limit:
            return f"{seconds * factor:.2f} {unit}"
    return f"{seconds * 1e6:.0f} us"
