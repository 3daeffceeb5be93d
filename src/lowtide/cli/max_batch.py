# SPDX-License-Identifier: Apache-2.0
"""lowtide max-batch: how many samples fit, without lowtide and with it?"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import typer

from lowtide.cli.files import EXIT_TOO_LARGE, Say, harmless, perform_verb
from lowtide.cli.scripts import ArgsArgument, ModuleOption, Script
from lowtide.cli.subject import (
    BudgetOption,
    GpuOption,
    JsonOption,
    LinkOption,
    find_target,
    read_budget,
)
from lowtide.elsewhere.batches import Batches, largest
from lowtide.elsewhere.contest import Contest, Result
from lowtide.elsewhere.retime import lanes_of, usable_bytes
from lowtide.errors import LowtideError
from lowtide.scheduler.director import Lanes
from lowtide.units import format_bytes

_RESERVE = 0.02  # of a budget: what the run time needs beyond a plan, and workspace
_STEPS_BACK = 24  # recordings of smaller batches where an estimate was too high


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """The largest batches of a script on a device."""

    script: str
    hardware: str
    budget_bytes: int
    most_slowdown: float
    plain_batch: int  # 0: not even the smallest runs
    batch: int
    ratio: float | None
    slowdown: float
    found_by: str


def max_batch(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="SCRIPT|-m MODULE", help="What would be run.")
    ],
    args: ArgsArgument = None,
    *,
    gpu: GpuOption,
    budget: BudgetOption = None,
    most_slowdown: Annotated[
        float,
        typer.Option(
            "--max-slowdown",
            metavar="X",
            help="Against the same batch in ample memory.",
        ),
    ] = 1.2,
    link: LinkOption = None,
    as_json: JsonOption = False,
    is_module: ModuleOption = False,
) -> None:
    """Find the largest batch of a script on a device that is not at hand.

    The script is recorded without its memory and its work, at two batches; the rest is
    bisection over plans, and the batch found is recorded once more and checked. The
    batch size goes where {batch} stands among ARGS; without it, lowtide sets that of
    the DataLoaders which the script builds. Without --budget, it is what tensors may
    have on the device. Where something has to leave, 2 % are kept in reserve. Status 3:
    not even the smallest batch fits.

    Examples:

    \b
      lowtide max-batch train.py --gpu rtx4090 --max-slowdown 1.1
      lowtide max-batch train.py --gpu v100-16g -- --batch {batch}
    """
    script = Script(target, tuple(args or ()), is_module, gpu)
    act = partial(_max_batch, script, budget, most_slowdown, link, as_json)
    context.obj.append(partial(perform_verb, "max-batch", act))


def _max_batch(
    script: Script,
    budget: str | None,
    most_slowdown: float,
    link: str | None,
    as_json: bool,
    say: Say,
) -> int:
    if not most_slowdown >= 1:
        raise LowtideError(f"--max-slowdown: {most_slowdown} is below 1")
    hardware = find_target(script.gpu, "float32", link).hardware
    budget_bytes = read_budget(budget, hardware, usable_bytes(hardware))
    tried = 0

    def progress(text: str) -> None:
        nonlocal tried
        tried += 1
        say(text, min(tried, 29), 30)

    script.progress = progress
    search = Search(script, budget_bytes, lanes_of(hardware), most_slowdown, progress)
    found = search.find()
    report = BatchReport(
        script=script.target,
        hardware=hardware.name,
        budget_bytes=budget_bytes,
        most_slowdown=most_slowdown,
        plain_batch=found.plain,
        batch=found.ours,
        ratio=found.ratio,
        slowdown=found.slowdown,
        found_by=found.found_by,
    )
    text = harmless(render(report)).rstrip()
    print(json.dumps(asdict(report), indent=2) if as_json else text)
    return 0 if report.batch else EXIT_TOO_LARGE


@dataclass(slots=True)
class Search:
    """Bisection by estimates, then recordings of what was found."""

    script: Script
    budget: int
    lanes: Lanes
    most_slowdown: float
    progress: Callable[[str], None]

    def find(self) -> Batches:
        """Find both largest batches."""
        plain = self._checked(
            largest(lambda b: self._fits(b, exact=False)),
            lambda b: self._fits(b, exact=True),
        )
        if plain > self.script.basis[1]:  # times are better told from nearby
            self.script.basis = (plain, 2 * plain)
        ours = self._checked(
            largest(lambda b: self._runs(b, exact=False), max(2 * plain, 1)),
            lambda b: self._runs(b, exact=True),
        )
        ours = max(ours, plain)
        result = self._result(ours, exact=True) if ours else None
        return Batches(
            plain=plain,
            ours=ours,
            slowdown=result.outcome.slowdown if result else 1.0,
            found_by=result.found_by if result else "",
        )

    def _checked(self, batch: int, runs: Callable[[int], bool]) -> int:
        """Go back from an estimate in small steps until a recording agrees."""
        for _ in range(_STEPS_BACK):
            if batch < 1 or runs(batch):
                return batch
            batch -= max(1, batch // 64)
        return 0

    def _fits(self, batch: int, *, exact: bool) -> bool:
        script = self.script
        graph = script.record(batch) if exact else script.estimate(batch)
        return graph.plain_peak_bytes <= self.budget

    def _runs(self, batch: int, *, exact: bool) -> bool:
        outcome = self._result(batch, exact=exact).outcome
        return outcome.fits and outcome.slowdown <= self.most_slowdown

    def _result(self, batch: int, *, exact: bool) -> Result:
        script = self.script
        graph = script.record(batch) if exact else script.estimate(batch)
        self.progress(f"planning batch {batch}")
        budget = self.budget
        if graph.plain_peak_bytes > budget:  # something has to leave
            budget = int((1 - _RESERVE) * budget)
        contest = Contest(graph, self.lanes)
        return contest.at(budget, enough=self.most_slowdown)


def render(report: BatchReport) -> str:
    """Return the text, ending in a newline."""
    room = format_bytes(report.budget_bytes)
    lines = [f"{report.script} on {report.hardware}, {room} for tensors", ""]
    plain = str(report.plain_batch) if report.plain_batch else "does not fit"
    lines.append(f"  plain        {plain:>12}")
    if not report.batch:
        lines.append(f"  with lowtide {'does not fit':>12}")
        return "\n".join(lines) + "\n"
    times = f"   {report.ratio:.2f} x the batch" if report.ratio else ""
    lines.append(f"  with lowtide {report.batch:>12}{times}")
    lines.append(
        f"  slow-down    {report.slowdown:>12.3f}   at most {report.most_slowdown:g}, "
        "against the same batch in ample memory"
    )
    return "\n".join(lines) + "\n"
