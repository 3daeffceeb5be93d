# SPDX-License-Identifier: Apache-2.0
"""The program `lowtide`: read the command line, then act on it."""

from collections.abc import Callable
from typing import Annotated

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

    The parser turns exceptions and interrupts into its own messages, so verbs only
    leave here what they want done, and it is done when the parser has finished.
    """
    chosen: list[Callable[[], int]] = []
    try:
        typer.main.get_command(app).main(prog_name="lowtide", obj=chosen)
    except SystemExit:
        if not chosen:
            raise
    return chosen[0]()
