# SPDX-License-Identifier: Apache-2.0
"""lowtide record: keep one iteration of an unmodified script in a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import lowtide
from lowtide import archive
from lowtide.cli.program import ProgramError, load_program
from lowtide.cli.run import EXIT_USAGE, die_of_interrupt, raise_as_python
from lowtide.cli.target import ArgsArgument, ModuleOption, TargetArgument
from lowtide.errors import LowtideError
from lowtide.frames import hide_frames
from lowtide.hardware import find_hardware
from lowtide.trace import Graph
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.runtime.recording import Recorded

EXIT_NOTHING = 1
BATCH = "{batch}"
MADE_UP = "a fake run: numbers that the script prints are made up."


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for on the command line."""

    target: str
    is_module: bool
    args: tuple[str, ...]
    steps: int = 3
    fake: bool = False
    device: str = "cpu"
    hardware: str | None = None
    batch: int | None = None


def record(
    context: typer.Context,
    target: TargetArgument,
    args: ArgsArgument = None,
    *,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE.tide", help="What to write.")
    ],
    steps: Annotated[
        int, typer.Option(metavar="N", help="Record iteration N, then end the script.")
    ] = 3,
    fake: Annotated[
        bool,
        typer.Option("--fake", help="Without its memory and its work: any size fits."),
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            metavar="cpu|cuda",
            help="What to record for; with --fake the device need not be there.",
        ),
    ] = "cpu",
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Whose seconds a fake iteration takes: rtx4090, a100-80g ...",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=f"Batch size, put in place of {BATCH} among ARGS; without it, of "
            "what the script gives its DataLoaders.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write over a file that is there.")
    ] = False,
    is_module: ModuleOption = False,
) -> None:
    """Record one training iteration of an unmodified PyTorch script.

    The script runs until the third iteration has been recorded (or `--steps`), and no
    further. With --fake nothing is computed and nothing takes memory, so that it may
    be of any size, and for a GPU that is not there.

    Exit status: 0; 1 if the script did not train; 2 for a mistake on this command line;
    the script's own where it fails.

    Examples:

    \b
      lowtide record train.py -o train.tide
      lowtide record --fake --batch 512 -o big.tide train.py --batch-size {batch}
      lowtide record --fake --device cuda --gpu rtx4090 -o gpu.tide -m mypackage.train
    """
    request = Request(
        target=target,
        is_module=is_module,
        args=tuple(args or ()),
        steps=steps,
        fake=fake,
        device="cuda" if gpu is not None else device,
        hardware=gpu,
        batch=batch,
    )
    # The program runs after the parser is done, which would catch its exceptions.
    context.obj.append(partial(perform, request, output.absolute(), force=force))


def perform(request: Request, output: Path, *, force: bool) -> int:
    """Record and write; return the exit status."""
    faults = [*list_faults(request)]
    if output.is_dir() or not output.parent.is_dir():
        faults.append(f"-o: cannot write a file {output}")
    elif output.exists() and not force:
        faults.append(f"{output} exists; give --force to write over it")
    if faults:
        return _refuse(faults)
    try:
        recorded = record_script(request)
        if recorded.graph is None:
            print(f"lowtide record: {_why_nothing(request, recorded)}", file=sys.stderr)
            return EXIT_NOTHING
        archive.save(output, recorded.graph, written_by=lowtide.__version__)
    except ProgramError as error:
        return _refuse([str(error)])
    except LowtideError as error:
        return _refuse([str(error)])
    except BaseException as error:  # the script's own
        hide_frames(error)
        raise_as_python(error)
    _conclude(request, recorded, recorded.graph, output)
    return 0


def list_faults(request: Request) -> list[str]:
    """Find what is wrong with a request before anything slow begins."""
    faults = []
    if request.steps < 2:
        faults.append("--steps: the first iteration is never the steady one; give 2 up")
    if request.device not in ("cpu", "cuda"):
        faults.append(f"--device: {request.device!r} is neither cpu nor cuda")
    if request.device == "cuda" and not request.fake:
        faults.append("--device cuda and --gpu need --fake")
    if request.hardware is not None:
        try:
            find_hardware(request.hardware)
        except LowtideError as error:
            faults.append(f"--gpu: {error}")
    if request.batch is not None and request.batch < 1:
        faults.append(f"--batch: {request.batch} is no batch size")
    if request.batch is None and any(BATCH in argument for argument in request.args):
        faults.append(f"{BATCH} stands among the script's arguments: give --batch N")
    return faults


def record_script(request: Request) -> Recorded:
    """Run a script until its iteration was recorded; this loads torch.

    It becomes the main program of this process, as with `lowtide run`: a second script
    needs a process of its own.

    Raises:
        LowtideError: there is no such program; nothing takes the batch size.
        BaseException: whatever the script raises.
    """
    try:
        from lowtide.runtime.recording import record_program
    except KeyboardInterrupt:  # while torch was loading
        die_of_interrupt()
    arguments = request.args
    if request.batch is not None:
        arguments = tuple(a.replace(BATCH, str(request.batch)) for a in arguments)
    program = load_program(request.target, arguments, is_module=request.is_module)
    if request.fake:
        print(f"lowtide: {MADE_UP}", file=sys.stderr, flush=True)
    return record_program(
        program.run,
        steps=request.steps,
        fake=request.fake,
        device=request.device,
        hardware=request.hardware,
        batch=request.batch if arguments == request.args else None,
    )


def _refuse(faults: Sequence[str]) -> int:
    for fault in faults:
        print(f"lowtide record: {fault}", file=sys.stderr)
    return EXIT_USAGE


def _why_nothing(request: Request, recorded: Recorded) -> str:
    if recorded.iterations == 0:
        return f"{request.target} did not train: nothing to record."
    return (
        f"{request.target} trained one iteration only; a steady one is the second at "
        "the earliest. Let it train for longer."
    )


def _conclude(request: Request, recorded: Recorded, graph: Graph, output: Path) -> None:
    """Say what was recorded."""
    sys.stdout.flush()
    say = partial(print, file=sys.stderr)
    if recorded.ended:
        say(f"lowtide: ended {request.target} after iteration {recorded.iterations}.")
    else:
        say(f"lowtide: {request.target} ended after {recorded.iterations} iterations.")
    if recorded.unknown:
        names = ", ".join(recorded.unknown)
        say(f"lowtide: ran for real, on zeros, since fake tensors cannot: {names}.")
    name = output.name
    print(f"Wrote {name} ({describe_graph(graph)}). Next: lowtide show {name}")


def describe_graph(graph: Graph) -> str:
    """Say in some words what a recorded iteration holds."""
    saved = int(graph.versions["bytes"][graph.versions["held"] >= 0].sum())
    return (
        f"{len(graph.operators):,} operators, {format_bytes(saved)} saved, plain peak "
        f"{format_bytes(graph.plain_peak_bytes)}"
    )
