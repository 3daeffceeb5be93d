# SPDX-License-Identifier: Apache-2.0
"""lowtide plan: what would each budget cost on a device that is not at hand?"""

import json
from collections import defaultdict
from dataclasses import asdict
from functools import partial
from pathlib import Path

import typer

from lowtide.cli.files import Say, harmless, perform_verb
from lowtide.cli.subject import (
    BudgetOption,
    DtypeOption,
    FileArgument,
    GpuOption,
    JsonOption,
    LinkOption,
    Target,
    find_target,
    read_budget,
    read_graph,
)
from lowtide.elsewhere.contest import Contest, Result
from lowtide.elsewhere.curve import point_of, trade_off, ways_of
from lowtide.elsewhere.retime import lanes_of, usable_bytes
from lowtide.reports.curves import Chosen, PlaceSums, PlanReport, render_plan
from lowtide.scheduler.scheduler import DROP
from lowtide.simulator.forecast import managed_versions
from lowtide.trace import Graph


def plan(
    context: typer.Context,
    file: FileArgument,
    *,
    gpu: GpuOption,
    dtype: DtypeOption = "float32",
    link: LinkOption = None,
    budget: BudgetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what each budget would cost on a device that is not at hand.

    Runs the recorded iteration on a virtual clock, with operator times from the
    device's roofline, at every budget from all that it needs down to the least that
    works, and prints the whole trade-off: how much slower, and what is kept, swapped
    and recomputed. One budget is marked as worth it: below it, time is lost faster than
    memory is saved.

    Examples:

    \b
      lowtide plan step.tide --gpu rtx4090
      lowtide plan step.tide --gpu v100-16g --budget 12GiB --json
    """
    act = partial(_plan, file, gpu, dtype, link, budget, as_json)
    context.obj.append(partial(perform_verb, "plan", act))


def _plan(
    file: Path,
    gpu: str,
    dtype: str,
    link: str | None,
    budget: str | None,
    as_json: bool,
    say: Say,
) -> None:
    target = find_target(gpu, dtype, link)
    wanted = None if budget is None else read_budget(budget, target.hardware, 0)
    say(f"reading {file.name}", 0, 20)
    report = plan_graph(file.name, read_graph(file), target, wanted, say)
    print_report(report, as_json)


def print_report(report: PlanReport, as_json: bool) -> None:
    """Print it for people or for programs."""
    text = harmless(render_plan(report)).rstrip()
    print(json.dumps(asdict(report), indent=2) if as_json else text)


def plan_graph(
    name: str, graph: Graph, target: Target, wanted: int | None, say: Say
) -> PlanReport:
    """Find the trade-off of an iteration on a device."""
    hardware = target.hardware
    graph = target.place(graph)
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
        notes=(),
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
