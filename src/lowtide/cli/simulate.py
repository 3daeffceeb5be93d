# SPDX-License-Identifier: Apache-2.0
"""lowtide simulate: one iteration under a policy, on a device that is not at hand."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from lowtide.cli.files import EXIT_TOO_LARGE, Say, harmless, perform_verb
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
from lowtide.elsewhere.contest import AUTO, Contest, Result
from lowtide.elsewhere.curve import point_of
from lowtide.elsewhere.retime import lanes_of, usable_bytes
from lowtide.errors import LowtideError
from lowtide.planner.pool import BLOCK, Search, place_blocks
from lowtide.reports.pools import ModelFootprint
from lowtide.reports.simulations import SimulationReport, render_simulation
from lowtide.scheduler.director import RULES
from lowtide.simulator import simulator
from lowtide.simulator.caching import MODELS, simulate_allocator
from lowtide.simulator.watch import Watch
from lowtide.trace import Graph

_SEARCH = Search(seconds=10)
_ALIGNMENT = 512


def simulate(
    context: typer.Context,
    file: FileArgument,
    *,
    gpu: GpuOption,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help=f"One of {', '.join(RULES)}.")
    ] = AUTO,
    dtype: DtypeOption = "float32",
    link: LinkOption = None,
    budget: BudgetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a recorded iteration under a policy, on a device that is not at hand.

    The scheduler is the one that runs; the clock, the memory and the link are virtual.
    Prints the peak of live bytes, what allocators would reserve for the same requests,
    the time of the step, what it waits for and what it computes again. Without
    --budget, it is what tensors may have on the device. Status 3: it does not fit.

    Examples:

    \b
      lowtide simulate step.tide --gpu rtx4090 --budget 8GiB
      lowtide simulate step.tide --gpu v100-16g --policy dtr --json
    """
    act = partial(_simulate, file, gpu, policy, dtype, link, budget, as_json)
    context.obj.append(partial(perform_verb, "simulate", act))


def _simulate(
    file: Path,
    gpu: str,
    policy: str,
    dtype: str,
    link: str | None,
    budget: str | None,
    as_json: bool,
    say: Say,
) -> int:
    if policy not in RULES:
        raise LowtideError(f"--policy: {policy!r} is none of {', '.join(RULES)}")
    target = find_target(gpu, dtype, link)
    usable = usable_bytes(target.hardware)
    budget_bytes = read_budget(budget, target.hardware, usable)
    say(f"reading {file.name}", 0, 4)
    graph = target.place(read_graph(file))
    report = simulate_graph(file.name, graph, target, policy, budget_bytes, say)
    text = harmless(render_simulation(report)).rstrip()
    print(json.dumps(asdict(report), indent=2) if as_json else text)
    return 0 if report.fits else EXIT_TOO_LARGE


def simulate_graph(
    name: str, graph: Graph, target: Target, policy: str, budget: int, say: Say
) -> SimulationReport:
    """Run one iteration, and its requests through models of allocators."""
    lanes = lanes_of(target.hardware)
    say("planning and running", 1, 4)
    contest = Contest(graph, lanes)
    if policy == AUTO:
        result = contest.at(budget)
        runs, plan = result.ran, result.plan
    else:
        runs, plan = policy, contest.plan_for(policy, budget)
    watch = Watch()
    outcome = simulator.simulate(graph, runs, budget, lanes, plan=plan, watch=watch)
    result = Result(outcome, result.found_by if policy == AUTO else policy, runs, plan)
    point = point_of(graph, budget, result)
    say("asking the allocators", 2, 4)
    blocks = watch.blocks().astype(BLOCK)
    seconds = outcome.seconds or 1.0
    return SimulationReport(
        file=name,
        hardware=target.hardware.name,
        dtype=target.dtype,
        policy=policy,
        found_by=result.found_by,
        budget_bytes=budget,
        fits=outcome.fits,
        thrashed=outcome.thrashed,
        failed_at=_name_of(graph, outcome.failed_at),
        plain_peak_bytes=graph.plain_peak_bytes,
        peak_bytes=outcome.peak_bytes,
        arena_bytes=_arena(blocks),
        models=tuple(_models(blocks)),
        plain_seconds=graph.seconds,
        step_seconds=outcome.seconds,
        slowdown=outcome.slowdown,
        exposed_seconds=outcome.exposed_seconds,
        room_seconds=outcome.room_seconds,
        replay_seconds=outcome.replay_seconds,
        replayed_operators=outcome.replayed_operators,
        written_bytes=outcome.written_bytes,
        read_bytes=outcome.read_bytes,
        out_use=outcome.written_bytes / lanes.write / seconds if lanes.write else 0.0,
        in_use=outcome.read_bytes / lanes.read / seconds if lanes.read else 0.0,
        kept_bytes=point.kept_bytes,
        swapped_bytes=point.swapped_bytes,
        recomputed_bytes=point.recomputed_bytes,
    )


def _models(blocks: NDArray[np.void]) -> Iterator[ModelFootprint]:
    for model, rules in MODELS.items():
        found = simulate_allocator(blocks, rules)
        yield ModelFootprint(
            name=model, reserved_bytes=found.reserved_bytes, segments=found.segments
        )


def _arena(blocks: NDArray[np.void]) -> int:
    """Place the blocks; those that are there all the time lie below the others."""
    stays = (blocks["born"] <= blocks["dead"].min(initial=1)) & (
        blocks["dead"] == blocks["dead"].max(initial=0)
    )
    pool = place_blocks(blocks[~stays], alignment=_ALIGNMENT, search=_SEARCH)
    below = -(-blocks["bytes"][stays] // _ALIGNMENT) * _ALIGNMENT
    return int(below.sum()) + pool.height_bytes


def _name_of(graph: Graph, operator: int) -> str:
    if operator < 0:
        return ""
    return f"{graph.names[graph.operators['name'][operator]]} (operator {operator})"
