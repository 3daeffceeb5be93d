# SPDX-License-Identifier: Apache-2.0
"""The program `lowtide`: read the command line, then act on it."""

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

import lowtide
from lowtide.cli import (
    max_batch,
    measure,
    plan,
    pool,
    record,
    run,
    show,
    simulate,
)
from lowtide.cli.run import EXIT_USAGE
from lowtide.cli.target import CONTEXT

app = typer.Typer(
    name="lowtide",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", context_settings=CONTEXT)(run.run)
app.command("record", context_settings=CONTEXT)(record.record)
app.command("show")(show.show)
app.command("pool")(pool.pool)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)
app.command("max-batch")(max_batch.max_batch)
app.command("measure")(measure.measure)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"lowtide {lowtide.__version__}")
        raise typer.Exit


@app.callback()
def lowtide_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    """Train PyTorch programs within a byte budget, gradients unchanged."""


def main() -> int:
    """Run the command line; return the exit status.

    The parser takes interrupts for its own, so verbs only leave here what they want
    done, and it is done when the parser has finished.
    """
    chosen: list[Callable[[], int]] = []
    parser = typer.main.get_command(app)
    try:
        status = parser.main(prog_name="lowtide", standalone_mode=False, obj=chosen)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        print(_explain(error), file=sys.stderr)
        return EXIT_USAGE
    return chosen[0]() if chosen else int(status or 0)


def _explain(error: Any) -> str:
    """Say in a line what is wrong with the command line; all help if it is empty."""
    message = str(error.format_message()).strip()
    if "\n" in message:  # the help, where nothing was asked for
        return message
    verb = "lowtide" if error.ctx is None else error.ctx.command_path
    return f"{verb}: {message.rstrip('.')}. See: {verb} --help"
