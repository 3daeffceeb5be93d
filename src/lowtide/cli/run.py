# SPDX-License-Identifier: Apache-2.0
"""lowtide run: train an unmodified script within a budget."""

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Annotated, NoReturn, Protocol

import typer
from rich.console import Console

from lowtide.cli.program import Program, ProgramError, load_program
from lowtide.cli.progress import ProgressLine
from lowtide.cli.target import ArgsArgument, ModuleOption, TargetArgument
from lowtide.errors import BudgetError, LowtideError, SizeError
from lowtide.frames import SHOW_ALL, hide_frames
from lowtide.reports.text import render
from lowtide.scheduler.director import RULES
from lowtide.timeline import Timeline, outcome_of
from lowtide.units import parse_bytes

EXIT_USAGE = 2
EXIT_BUDGET = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for on the command line."""

    budget: str
    device: str = "cpu"
    host: str
    disk_writes: str | None
    spill_dir: Path | None
    policy: str
    verify: bool
    pool: bool
    report: Path | None
    plan: Path | None
    save_plan: Path | None
    target: str
    is_module: bool
    args: tuple[str, ...]


class RunningSession(Protocol):
    """What is used here of `lowtide.runtime.session.Session`."""

    def __enter__(self) -> object:
        """Start to keep the budget."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        """Stop to keep the budget."""

    def report(self) -> Timeline:
        """Tell what happened."""

    def save_plan(self, path: Path) -> None:
        """Write what was learnt."""


def run(
    context: typer.Context,
    target: TargetArgument,
    args: ArgsArgument = None,
    *,
    budget: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help='Memory for tensors: "8GiB", "8GB", bytes, "75%" of the memory there '
            'is (of the container\'s limit, where there is one), or "auto": what is '
            "free now, less a reserve.",
        ),
    ],
    device: Annotated[
        str, typer.Option(metavar="NAME", help="Whose memory: cpu, cuda, cuda:1.")
    ] = "cpu",
    host: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Host memory to spill to where the device has memory of its own; no "
            "effect on the CPU.",
        ),
    ] = "auto",
    disk_writes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Most that one step may write to the disk: writing wears an SSD.",
        ),
    ] = None,
    spill_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the spill file, on a local disk. It vanishes by itself.",
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help=f"One of: {', '.join(RULES)}.")
    ] = "auto",
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Check at first that all comes back with the same bits."
        ),
    ] = False,
    pool: Annotated[
        bool,
        typer.Option(
            help="Plan where memory goes, so that the system sees no more than is used."
        ),
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Write what happened to a file too."),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.tide",
            help="Follow what an earlier run of this program learnt within this "
            "budget, from the first step on.",
        ),
    ] = None,
    save_plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.tide", help="Write what was learnt, for --plan of later runs."
        ),
    ] = None,
    is_module: ModuleOption = False,
) -> None:
    """Train an unmodified PyTorch script within a memory budget.

    The script runs as it does with `python`; its gradients stay the same to the last
    bit. What it saves for the backward pass leaves for a file on disk or is computed
    again. At the end a table says what happened.

    Exit status: the script's own; 2 for a mistake on this command line; 3 if the
    budget is too small, and then the message names the smallest that works.

    Examples:

    \b
      lowtide run --budget 8GiB train.py --epochs 3
      lowtide run --budget 75% --report run.json -m mypackage.train --lr 1e-3
      lowtide run --budget auto --spill-dir /mnt/nvme train.py
    """
    request = Request(
        budget=budget,
        device=device,
        host=host,
        disk_writes=disk_writes,
        spill_dir=None if spill_dir is None else spill_dir.absolute(),
        policy=policy,
        verify=verify,
        pool=pool,
        report=None if report is None else report.absolute(),
        plan=None if plan is None else plan.absolute(),
        save_plan=None if save_plan is None else save_plan.absolute(),
        target=target,
        is_module=is_module,
        args=tuple(args or ()),
    )
    # The program runs after the parser is done, which would catch its exceptions.
    context.obj.append(partial(perform, request))


def open_session(
    request: Request, on_progress: Callable[[str], None] | None
) -> RunningSession:
    """Make the session that will keep the budget; this loads torch."""
    from lowtide.runtime.session import Session

    return Session(
        request.budget,
        device=request.device,
        host=request.host,
        disk_writes=request.disk_writes,
        spill_dir=request.spill_dir,
        policy=request.policy,
        verify=request.verify,
        pool=request.pool,
        plan=request.plan,
        on_progress=on_progress,
    )


def perform(request: Request) -> int:
    """Run the program and report; return the exit status."""
    faults = list_faults(request)
    if faults:
        return _refuse(*faults)
    try:
        program = load_program(
            request.target, request.args, is_module=request.is_module
        )
    except ProgramError as error:
        return _refuse(str(error))
    except BaseException as error:  # a syntax error, or a package that fails to load
        hide_frames(error, keep_own_errors=False)
        raise_as_python(error)
    progress = ProgressLine(Console(stderr=True))
    try:
        session = open_session(request, progress.say if progress.is_shown else None)
    except (LowtideError, OSError) as error:
        return _refuse(" ".join(str(error).split()))
    except KeyboardInterrupt:  # while torch was loading: nothing of the program ran
        die_of_interrupt()
    process = os.getpid()
    failure = _run_within(session, program)
    if os.getpid() == process:  # not in a child that the program forked
        progress.wipe()
        _conclude(session.report(), request, failure)
        if request.save_plan is not None:
            _save_plan(session, request.save_plan)
    if isinstance(failure, BudgetError):
        if os.environ.get(SHOW_ALL):
            traceback.print_exception(failure)
        print(f"lowtide: {failure}", file=sys.stderr)
        return EXIT_BUDGET
    if failure is not None:
        hide_frames(failure)
        raise_as_python(failure)
    return 0


def list_faults(request: Request) -> list[str]:
    """Find all that is wrong with a request before anything slow begins."""
    faults = []
    for option, size in (("--budget", request.budget), ("--host", request.host)):
        try:
            if size == "auto":
                continue
            n_bytes = parse_bytes(size, total=2**40)  # any: the real one needs torch
            if option == "--budget" and n_bytes == 0:
                raise SizeError(size, "a budget has at least one byte")
        except SizeError as error:
            faults.append(f'{option}: {error} Or give "auto".')
    if request.disk_writes is not None:
        try:
            parse_bytes(request.disk_writes)
        except SizeError as error:
            faults.append(f"--disk-writes: {error}")
    if request.policy not in RULES:
        faults.append(
            f"--policy: {request.policy!r} is unknown; it is one of {', '.join(RULES)}"
        )
    if request.spill_dir is not None and not request.spill_dir.is_dir():
        faults.append(f"--spill-dir: {request.spill_dir} is not a folder")
    if request.plan is not None and not request.plan.is_file():
        faults.append(f"--plan: {request.plan} is not a file")
    for option, path in (("report", request.report), ("save-plan", request.save_plan)):
        if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            faults.append(f"--{option}: cannot write a file {path}")
    return faults


def _refuse(*faults: str) -> int:
    for fault in faults:
        print(f"lowtide run: {fault}", file=sys.stderr)
    return EXIT_USAGE


def _run_within(session: RunningSession, program: Program) -> BaseException | None:
    try:
        with session:
            program.run()
    except BaseException as error:
        return error
    return None


def _conclude(
    timeline: Timeline, request: Request, failure: BaseException | None
) -> None:
    timeline = replace(timeline, outcome=outcome_of(failure))
    if request.report is not None:
        try:
            request.report.write_text(json.dumps(timeline.to_dict(), indent=2) + "\n")
        except OSError as error:
            print(f"lowtide: no report written: {error}", file=sys.stderr)
    # What the program printed comes first; it may have closed or replaced its streams.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(render(timeline))
        sys.stderr.flush()


def _save_plan(session: RunningSession, path: Path) -> None:
    try:
        session.save_plan(path)
    except (LowtideError, OSError) as error:
        print(f"lowtide: no plan written: {error}", file=sys.stderr)


def die_of_interrupt() -> NoReturn:
    """Die of Ctrl-C as shells expect, with nothing to show for it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    raise KeyboardInterrupt


def raise_as_python(error: BaseException) -> NoReturn:
    """Let an error leave the interpreter as it would have without lowtide.

    The interpreter then prints it through the program's own `sys.excepthook` and, for
    KeyboardInterrupt, dies of SIGINT as shells expect. Only the traceback is put right
    first, and kept, since frames are added to it on the way out.
    """
    print_error, traceback = sys.excepthook, error.__traceback__

    def print_without_ours(
        kind: type[BaseException],
        value: BaseException,
        longer_traceback: TracebackType | None,
    ) -> None:
        if value is error:
            value.__traceback__ = longer_traceback = traceback
        print_error(kind, value, longer_traceback)

    sys.excepthook = print_without_ours
    raise error
