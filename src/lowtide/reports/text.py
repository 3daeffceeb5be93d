# SPDX-License-Identifier: Apache-2.0
"""Render a Timeline as plain text, for a terminal or a log.

    lowtide: 12 steps trained within 800.0 MiB (policy auto)

      budget          800.0 MiB   51 % of the plain peak
      planned peak    788.2 MiB
      measured peak   791.9 MiB   first step 790.3 MiB
      ...

What stayed in memory is listed with its reason, so that nobody has to guess why a
budget saves less than it should; and if nothing left memory, that is said first.
"""

import math
from collections.abc import Iterator

from lowtide.timeline import FINISHED, INTERRUPTED, RUNNING, Timeline
from lowtide.units import format_apart, format_bytes

_LABEL_CELLS = 17
_VALUE_CELLS = 11
_KEPT_ROWS = 8

Row = tuple[str, str, str]


def render(timeline: Timeline) -> str:
    """Return the report of a run, ending in a newline."""
    if not timeline.trained:
        peak = format_bytes(_measured_peak(timeline))
        line = f"lowtide: {_why_untrained(timeline.outcome)} (measured peak {peak})."
        return "\n".join([line, *_notes(timeline)]) + "\n"
    lines = [f"lowtide: {_verdict(timeline)} (policy {timeline.policy})"]
    lines += _why_still(timeline)
    blocks = ["\n".join(lines), _table(_rows(timeline))]
    if timeline.kept:
        blocks.append("\n".join(_kept_lines(timeline)))
    if timeline.notes:
        blocks.append("\n".join(_notes(timeline)))
    return "\n\n".join(blocks) + "\n"


def _notes(timeline: Timeline) -> Iterator[str]:
    yield from (f"  note: {note}" for note in timeline.notes)


def _why_untrained(outcome: str) -> str:
    if outcome == INTERRUPTED:
        return "interrupted before the first backward pass"
    if outcome == RUNNING:
        return "no backward pass so far"
    if outcome != FINISHED:
        return f"ended by {outcome} before the first backward pass"
    return "this program ran no backward pass, so there was nothing to do"


def _verdict(timeline: Timeline) -> str:
    """Say whether the budget was kept, of a run that came to its end; else what was."""
    peak = max(timeline.peak_bytes, timeline.first_peak_bytes)
    budget = timeline.budget_bytes
    size, most = format_apart(budget, peak)
    steps = f"{timeline.steps} step{'' if timeline.steps == 1 else 's'}"
    within = f"within {size}"
    if peak > budget:
        within = f"NOT within {size} but with up to {most}"
        if 0 < timeline.peak_bytes <= budget and timeline.steps > 1:
            within += ", in the first step"
    if timeline.outcome == RUNNING:
        return f"{steps} so far, {within}"
    if timeline.outcome != FINISHED:
        when = f"after {steps}" if timeline.steps else "before the end of a step"
        how = timeline.outcome
        if how != INTERRUPTED:
            how = f"ended by {how}"
        return f"{how} {when}, up to then {within}"
    if timeline.steps == 0:
        return f"gradients computed, no optimizer's step, {within}"
    return f"{steps} trained{',' if peak > budget else ''} {within}"


def _why_still(timeline: Timeline) -> Iterator[str]:
    """Say why nothing left memory, if nothing did."""
    if timeline.swapped_bytes or timeline.recomputed_bytes or timeline.written_bytes:
        return
    if timeline.plain_peak_bytes <= timeline.budget_bytes:
        yield (
            "  Nothing was moved or recomputed: the program needs "
            f"{format_bytes(timeline.plain_peak_bytes)} by itself, which fits."
        )
    elif timeline.policy == "keep":
        yield "  Nothing was moved or recomputed: the policy keep forbids it."
    else:
        below = "; the reasons are below" if timeline.kept else ""
        yield (
            "  Nothing was moved or recomputed: no saved tensor could leave "
            f"memory{below}."
        )


def _rows(timeline: Timeline) -> Iterator[Row]:
    plain = timeline.plain_peak_bytes
    share = timeline.budget_bytes / plain if plain else math.inf
    comment = f"{share:.0%} of the plain peak" if share < 1.995 else ""
    yield "budget", format_bytes(timeline.budget_bytes), comment
    if timeline.planned_peak_bytes:
        yield "planned peak", format_bytes(timeline.planned_peak_bytes), ""
    yield from _measured_rows(timeline)
    known = "computed from what was saved"
    if timeline.plain_peak_known:
        known = "measured"
    yield "plain peak", format_bytes(plain), f"without lowtide; {known}"
    if timeline.smallest_bytes:
        smallest = format_bytes(timeline.smallest_bytes, round_up=True)
        yield "smallest budget", smallest, "that works"
    yield (
        "between steps",
        format_bytes(timeline.static_bytes),
        "what stays: parameters, gradients, optimizer state, data",
    )
    yield (
        "time per step",
        "unknown" if timeline.steps < 2 else _seconds(timeline.step_seconds),
        f"{_seconds(timeline.exposed_seconds)} exposed to copies, "
        f"{_seconds(timeline.replay_seconds)} recomputing",
    )
    yield "saved per step", format_bytes(timeline.saved_bytes), "for backward, of it:"
    yield "  kept", format_bytes(timeline.kept_bytes), "stayed in memory"
    yield "  swapped", format_bytes(timeline.swapped_bytes), "left for the spill file"
    yield "  recomputed", format_bytes(timeline.recomputed_bytes), "computed again"


def _measured_rows(timeline: Timeline) -> Iterator[Row]:
    first = f"first step {format_bytes(timeline.first_peak_bytes)}"
    if timeline.allocator == "python":
        first += "; without operators' workspace, which the Python counter cannot see"
    yield "measured peak", format_bytes(_measured_peak(timeline)), first


def _kept_lines(timeline: Timeline) -> Iterator[str]:
    yield "  What stayed in memory per step, and why"
    groups = sorted(timeline.kept, key=lambda kept: -kept.bytes)
    for kept in groups[:_KEPT_ROWS]:
        example = f", e.g. {kept.example}" if kept.example else ""
        count = f"{kept.tensors} tensor{'' if kept.tensors == 1 else 's'}"
        yield f"    {format_bytes(kept.bytes):>11}  {kept.reason} ({count}{example})"
    rest = groups[_KEPT_ROWS:]
    if rest:
        n_bytes = sum(kept.bytes for kept in rest)
        yield f"    {format_bytes(n_bytes):>11}  {len(rest)} other reasons"


def _table(rows: Iterator[Row]) -> str:
    return "\n".join(
        f"  {label:<{_LABEL_CELLS}}{value:>{_VALUE_CELLS}}   {comment}".rstrip()
        for label, value, comment in rows
    )


def _measured_peak(timeline: Timeline) -> int:
    """Take the first iteration's peak where there was no later one."""
    return timeline.peak_bytes or timeline.first_peak_bytes


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"
