# SPDX-License-Identifier: Apache-2.0
"""lowtide show: what is in a file?"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from lowtide.archive import KINDS, Noun, noun_in
from lowtide.cli.files import Say, harmless, naming, perform_verb, read_any
from lowtide.cli.pool import born_and_dead
from lowtide.errors import FileError
from lowtide.history import History
from lowtide.plan import Plan
from lowtide.planner.pool import lower_bound
from lowtide.recorder.steady import Iteration, find_iteration
from lowtide.reports.contents import (
    Category,
    Contents,
    Largest,
    Place,
    TableFacts,
    TideFacts,
    render_contents,
    render_tide,
)
from lowtide.tidefile import Tide
from lowtide.trace import Graph, Trace

_LARGEST = 8


def show(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What to look into.")],
    *,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="Whose memory, where a file has several: cuda:1, cpu.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the facts as JSON.")
    ] = False,
) -> None:
    """Say what is in a file about memory.

    FILE is a .tide file, a CUDA memory snapshot (torch.cuda.memory._dump_snapshot), a
    profiler trace (export_chrome_trace), or a log of AutoSwap's author or of DTR, as
    it is or packed by gzip. What it is shows in its content, not in its name. No code
    in a file ever runs.

    Examples:

    \b
      lowtide show snapshot.pickle
      lowtide show trace.json.gz --device cuda:0 --json
    """
    context.obj.append(
        partial(perform_verb, "show", partial(_show, file, device, as_json))
    )


def _show(file: Path, device: str | None, as_json: bool, say: Say) -> None:
    say(f"reading {file.name}", 0, 2)
    content = read_any(file, device=device)
    facts: Contents | TideFacts
    if isinstance(content, Tide):
        tide = content
        facts = naming(file, lambda: describe_tide(file.name, tide))
        text = render_tide(facts)
    else:
        say("looking for an iteration", 1, 2)
        facts = describe_history(file.name, content)
        text = render_contents(facts)
    print(json.dumps(asdict(facts), indent=2) if as_json else harmless(text).rstrip())


def describe_history(name: str, history: History) -> Contents:
    """Gather what is to be said of a file with blocks."""
    live = history.live_curve
    peak = int(np.argmax(live))
    iteration = None
    if len(history.groups) == 1:
        iteration = find_iteration(history.blocks)
    bound = sum(
        lower_bound(born_and_dead(history, group))
        for group in range(len(history.groups))
    )
    seconds = history.seconds
    took = history.ops["seconds"]
    return Contents(
        file=name,
        kind=history.source,
        device=history.device,
        events=history.events,
        seconds=float(seconds.max() - seconds.min()) if len(seconds) else 0.0,
        steps=history.steps,
        blocks=len(history.blocks),
        operators=len(history.ops),
        operator_seconds=float(took[~np.isnan(took)].sum()),
        uses=len(history.uses),
        peak_bytes=int(live[peak]),
        peak_event=peak,
        lower_bound_bytes=bound,
        reserved_bytes=history.reserved_bytes,
        period=iteration.period if iteration else 0,
        groups=history.groups,
        categories=tuple(_categories(history, peak, iteration)),
        at_peak=tuple(_places(history, peak)),
        largest=tuple(_largest(history)),
        notes=history.notes,
    )


def _categories(
    history: History, peak: int, iteration: Iteration | None
) -> Iterator[Category]:
    """Group the blocks by where their lives begin and end."""
    sizes, starts, stops = history.blocks["bytes"], history.starts, history.stops
    at_peak = (starts <= peak) & (peak < stops)
    before, stays = starts == 0, history.blocks["stop"] < 0
    kinds = {
        "there from before to the end": before & stays,
        "there before, released": before & ~stays,
        "allocated, there at the end": ~before & stays,
        "allocated and released": ~before & ~stays,
    }
    if iteration is not None:
        crossing = np.zeros(len(sizes), np.bool_)
        crossing[iteration.chosen[iteration.stops > iteration.period]] = True
        kinds["cross a steady iteration"] = crossing
    for name, which in kinds.items():
        if which.any():
            yield Category(
                name=name,
                blocks=int(np.count_nonzero(which)),
                bytes=int(sizes[which].sum()),
                at_peak_bytes=int(sizes[which & at_peak].sum()),
            )


def _places(history: History, peak: int) -> Iterator[Place]:
    """Sum up what is alive at the peak by the place that it comes from."""
    alive = (history.starts <= peak) & (peak < history.stops) & (history.label >= 0)
    labels, sizes = history.label[alive], history.blocks["bytes"][alive]
    n_bytes = np.zeros(len(history.names), np.int64)
    np.add.at(n_bytes, labels, sizes)
    counts = np.bincount(labels, minlength=len(history.names))
    for i in np.argsort(-n_bytes, kind="stable")[:_LARGEST].tolist():
        if counts[i]:
            yield Place(
                name=history.names[i], blocks=int(counts[i]), bytes=int(n_bytes[i])
            )


def _largest(history: History) -> Iterator[Largest]:
    blocks = history.blocks
    order = np.lexsort((blocks["start"], -blocks["bytes"]))[:_LARGEST]
    for i in order.tolist():
        yield Largest(
            bytes=int(blocks["bytes"][i]),
            start=int(blocks["start"][i]),
            stop=int(blocks["stop"][i]),
            place=history.name_of(i),
        )


def describe_tide(name: str, tide: Tide) -> TideFacts:
    """Gather what is to be said of any `.tide` file without blocks."""
    facts = {
        key: value
        for key, value in tide.meta.items()
        if isinstance(value, int | float | str)
    }
    if tide.kind in KINDS:
        facts |= _computed_facts(noun_in(tide))
    return TideFacts(
        file=name,
        kind=tide.kind,
        written_by=tide.written_by,
        facts=facts,
        tables=tuple(
            TableFacts(
                name=key,
                rows=len(table) if table.ndim else 1,
                columns=table.dtype.names or (str(table.dtype),),
                bytes=table.nbytes,
            )
            for key, table in tide.tables.items()
        ),
    )


def _computed_facts(noun: Noun) -> dict[str, int | float]:
    """Compute what a noun knows beside its fields."""
    try:
        if isinstance(noun, Trace | Graph):
            return {
                "plain_peak_bytes": noun.plain_peak_bytes,
                "seconds": noun.seconds,
            }
        if isinstance(noun, Plan):
            return {"fits": noun.fits, "slowdown": noun.slowdown}
    except (IndexError, TypeError, ValueError) as error:
        raise FileError(f"contradicts itself: {error}") from None
    return {}
