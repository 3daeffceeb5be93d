# SPDX-License-Identifier: Apache-2.0
"""lowtide pool: what could a planned pool have saved?"""

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from lowtide.archive import noun_in
from lowtide.cli.files import Say, harmless, naming, perform_verb, read_any
from lowtide.elsewhere.asked import asked_of
from lowtide.errors import FileError
from lowtide.history import History
from lowtide.planner.pool import BLOCK, Search, place_blocks
from lowtide.recorder.steady import Iteration, find_iteration
from lowtide.reports.pools import ModelFootprint, PoolReport, render_pool
from lowtide.simulator.caching import MODELS, simulate_allocator
from lowtide.tidefile import Tide
from lowtide.trace import Graph

_SEARCH = Search(seconds=20)  # a limit for files with hundreds of thousands of blocks


def pool(
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
    whole: Annotated[
        bool,
        typer.Option("--whole", help="Plan the file as a whole, not one iteration."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON.")
    ] = False,
) -> None:
    """Say what a planned pool could have saved.

    Blocks whose sizes and lifetimes are known beforehand can be placed so that next to
    nothing is wasted (SmartPool). This compares such a plan with what allocators that
    know no future reserve for the same requests: PyTorch's caching allocator, the same
    with expandable segments, TensorFlow's BFC and NVIDIA's CnMem, each as a model. FILE
    is what `lowtide show` reads, or an iteration that `lowtide record` wrote.

    Examples:

    \b
      lowtide pool snapshot.pickle
      lowtide pool trace.json.gz --device cuda:0 --json
    """
    context.obj.append(
        partial(perform_verb, "pool", partial(_pool, file, device, whole, as_json))
    )


def _pool(file: Path, device: str | None, whole: bool, as_json: bool, say: Say) -> None:
    say(f"reading {file.name}", 0, len(MODELS) + 2)
    content = read_any(file, device=device)
    history = content if isinstance(content, History) else _asked(file, content)
    report = compare_allocators(file.name, history, say, whole=whole)
    text = harmless(render_pool(report)).rstrip()
    print(json.dumps(asdict(report), indent=2) if as_json else text)


def _asked(file: Path, tide: Tide) -> History:
    """Give the blocks that a recorded iteration asks for."""
    if tide.kind == "graph":
        noun = naming(file, lambda: noun_in(tide))
        assert isinstance(noun, Graph)
        return asked_of(noun)
    why = f"holds a {tide.kind}, which names no single blocks"
    if tide.kind == "learnt":
        why += "; lowtide run --plan takes it"
    raise FileError(why, path=file)


def compare_allocators(
    name: str, history: History, say: Say, *, whole: bool = False
) -> PoolReport:
    """Plan a pool, and run the models on the same blocks."""
    of = len(MODELS) + 2
    lives = [born_and_dead(history, group) for group in range(len(history.groups))]
    say(f"placing {len(history.blocks):,} blocks", 1, of)
    iteration = None
    if len(lives) == 1 and not whole:
        iteration = find_iteration(history.blocks)
    plan = _plan_whole(lives) if iteration is None else _plan(history, iteration)
    models = []
    for done, (model, rules) in enumerate(MODELS.items(), start=2):
        say(f"modelling {model}", done, of)
        footprints = [simulate_allocator(blocks, rules) for blocks in lives]
        models.append(
            ModelFootprint(
                name=model,
                reserved_bytes=sum(f.reserved_bytes for f in footprints),
                segments=sum(f.segments for f in footprints),
            )
        )
    return PoolReport(
        file=name,
        kind=history.source,
        device=history.device,
        blocks=len(history.blocks),
        period=iteration.period if iteration else 0,
        peak_bytes=history.peak_bytes,
        lower_bound_bytes=plan.bound,
        pool_bytes=plan.height,
        staying_bytes=iteration.staying_bytes if iteration else 0,
        groups=len(lives),
        optimal=plan.optimal,
        models=tuple(models),
        reserved_bytes=history.reserved_bytes,
        notes=history.notes,
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    bound: int
    height: int
    optimal: bool


def _plan_whole(lives: list[NDArray[np.void]]) -> _Plan:
    pools = [place_blocks(blocks, search=_SEARCH) for blocks in lives]
    return _Plan(
        sum(p.lower_bound_bytes for p in pools),
        sum(p.height_bytes for p in pools),
        all(p.optimal for p in pools),
    )


def _plan(history: History, iteration: Iteration) -> _Plan:
    blocks = np.zeros(len(iteration.chosen), BLOCK)
    blocks["born"], blocks["dead"] = iteration.starts, iteration.stops
    blocks["bytes"] = history.blocks["bytes"][iteration.chosen]
    pool = place_blocks(blocks, period=iteration.period, search=_SEARCH)
    stays = iteration.staying_bytes
    bound, height = pool.lower_bound_bytes + stays, pool.height_bytes + stays
    return _Plan(bound, height, pool.optimal)


def born_and_dead(history: History, group: int) -> NDArray[np.void]:
    """Give the blocks of one group as the planner takes them."""
    which = history.group == group
    blocks = np.zeros(np.count_nonzero(which), BLOCK)
    blocks["born"] = history.starts[which]
    blocks["dead"] = history.stops[which]
    blocks["bytes"] = history.blocks["bytes"][which]
    return blocks
