# SPDX-License-Identifier: Apache-2.0
"""lowtide plan: what would each budget cost on a device that is not at hand?"""

import json
from collections import defaultdict
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lowtide.cli.files import Say, harmless, perform_verb, read_any
from lowtide.cli.savings import savings_of
from lowtide.cli.scripts import ArgsArgument, ModuleOption, Script
from lowtide.cli.subject import (
    BudgetOption,
    DtypeOption,
    GpuOption,
    JsonOption,
    LinkOption,
    Target,
    find_target,
    graph_in,
    read_budget,
)
from lowtide.elsewhere.contest import Contest, Result
from lowtide.elsewhere.curve import point_of, trade_off, ways_of
from lowtide.elsewhere.rebuild import rebuild, says_enough
from lowtide.elsewhere.retime import lanes_of, usable_bytes
from lowtide.reports.curves import Chosen, PlaceSums, PlanReport, render_plan
from lowtide.reports.savings import render_savings
from lowtide.scheduler.scheduler import DROP
from lowtide.simulator.forecast import managed_versions
from lowtide.tidefile import Tide
from lowtide.trace import Graph

SCRIPT_TIMES = "times are of the types that the script computes in"
LOG_TIMES = "times are those of the file; of the device, memory and link count"


def plan(
    context: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE|SCRIPT|-m MODULE", help="What to plan for."),
    ],
    args: ArgsArgument = None,
    *,
    gpu: GpuOption,
    batch: Annotated[
        int | None,
        typer.Option(metavar="N", help="Batch size of a script, as lowtide record."),
    ] = None,
    dtype: DtypeOption = "float32",
    link: LinkOption = None,
    budget: BudgetOption = None,
    as_json: JsonOption = False,
    is_module: ModuleOption = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", hidden=True)] = None,
) -> None:
    """Say what each budget would cost on a device that is not at hand.

    FILE is an iteration that lowtide record wrote, a script (recorded first, without
    its memory and work) or a log of DTR. Of other files that lowtide show reads, it
    says what a planned pool and swapping could have saved.

    Runs the recorded iteration on a virtual clock, with operator times from the
    device's roofline, at every budget from all that it needs down to the least that
    works, and prints the whole trade-off: how much slower, and what is kept, swapped
    and recomputed. One budget is marked as worth it: below it, time is lost faster than
    memory is saved. What `lowtide run --plan` follows is learnt by a real run instead,
    and written by `lowtide run --save-plan`.

    Examples:

    \b
      lowtide plan step.tide --gpu rtx4090
      lowtide plan step.tide --gpu v100-16g --budget 12GiB --json
      lowtide plan train.py --gpu rtx4090 --batch 256 -- --epochs 1 --batch {batch}
      lowtide plan snapshot.pickle --gpu a100-80g
    """
    if output is not None:
        raise typer.BadParameter(
            "lowtide plan only prints, --json too; what lowtide run --plan follows is "
            "written by lowtide run --save-plan",
            param_hint="-o",
        )
    script = None
    if is_module or file.suffix == ".py" or batch is not None or args:
        script = Script(str(file), tuple(args or ()), is_module, gpu)
    act = partial(_plan, file, script, batch, gpu, dtype, link, budget, as_json)
    context.obj.append(partial(perform_verb, "plan", act))


def _plan(
    file: Path,
    script: Script | None,
    batch: int | None,
    gpu: str,
    dtype: str,
    link: str | None,
    budget: str | None,
    as_json: bool,
    say: Say,
) -> None:
    target = find_target(gpu, dtype, link)
    wanted = None if budget is None else read_budget(budget, target.hardware, 0)
    notes: tuple[str, ...] = ()
    if script is not None:
        say(f"recording {file.name}", 0, 20)
        graph, notes = script.record(batch), (SCRIPT_TIMES,)
    else:
        say(f"reading {file.name}", 0, 20)
        content = read_any(file)
        if isinstance(content, Tide):
            graph = target.place(graph_in(file, content))
        elif says_enough(content):
            graph, notes = rebuild(content), (LOG_TIMES, *content.notes)
        else:
            savings = savings_of(file.name, content, target.hardware, say)
            text = harmless(render_savings(savings)).rstrip()
            print(json.dumps(asdict(savings), indent=2) if as_json else text)
            return
    report = plan_graph(file.name, graph, target, wanted, say, notes)
    print_report(report, as_json)


def print_report(report: PlanReport, as_json: bool) -> None:
    """Print it for people or for programs."""
    text = harmless(render_plan(report)).rstrip()
    print(json.dumps(asdict(report), indent=2) if as_json else text)


def plan_graph(
    name: str,
    graph: Graph,
    target: Target,
    wanted: int | None,
    say: Say,
    notes: tuple[str, ...] = (),
) -> PlanReport:
    """Find the trade-off of an iteration that has the device's times."""
    hardware = target.hardware
    contest = Contest(graph, lanes_of(hardware))
    curve = trade_off(
        contest, progress=lambda done, of: say("trying budgets", done, of)
    )
    chosen = None if wanted is None else _choose(contest, wanted)
    return PlanReport(
        file=name,
        hardware=hardware.name,
        dtype=target.dtype,
        memory_bytes=hardware.memory_bytes,
        usable_bytes=usable_bytes(hardware),
        operators=len(graph.operators),
        saved_bytes=int(graph.versions["bytes"][managed_versions(graph)].sum()),
        curve=curve,
        chosen=chosen,
        notes=notes,
    )


def _choose(contest: Contest, budget: int) -> Chosen:
    result = contest.at(budget)
    if not result.outcome.fits:
        return Chosen(budget_bytes=budget, fits=False, point=None, places=())
    return Chosen(
        budget_bytes=budget,
        fits=True,
        point=point_of(contest.graph, budget, result),
        places=_places(contest.graph, result),
    )


def _places(graph: Graph, result: Result) -> tuple[PlaceSums, ...]:
    """Sum up where saved tensors are, by the operator that made them."""
    ways = ways_of(result)
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for version in managed_versions(graph):
        row = graph.versions[version]
        made_by = int(row["operator"])
        name = graph.names[graph.operators["name"][made_by]] if made_by >= 0 else "data"
        way = ways.get(version)
        column = 1 if way is None else 3 if way == DROP else 2
        sums[name][0] += 1
        sums[name][column] += int(row["bytes"])
    places = [
        PlaceSums(
            name=name,
            tensors=tensors,
            kept_bytes=kept,
            swapped_bytes=swapped,
            recomputed_bytes=recomputed,
        )
        for name, (tensors, kept, swapped, recomputed) in sums.items()
    ]
    places.sort(key=lambda p: -(p.kept_bytes + p.swapped_bytes + p.recomputed_bytes))
    return tuple(places)
