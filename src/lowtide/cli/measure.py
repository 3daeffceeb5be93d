# SPDX-License-Identifier: Apache-2.0
"""lowtide measure: how fast is this machine?"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lowtide.cli.progress import ProgressLine
from lowtide.errors import LowtideError
from lowtide.hardware import MEASURED, Hardware, describe, save_measured

EXIT_USAGE = 2


def measure(
    context: typer.Context,
    *,
    spill_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Measure the disk of this folder."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON.")
    ] = False,
) -> None:
    """Measure this machine: arithmetic, memory and disk.

    Takes half a minute and is kept: `lowtide.hardware.find_hardware("this-machine")`.
    Let nothing else run meanwhile.

    Examples:

    \b
      lowtide measure
      lowtide measure --spill-dir /mnt/nvme --json
    """
    context.obj.append(partial(perform, spill_dir, as_json=as_json))


def perform(spill_dir: Path | None, *, as_json: bool) -> int:
    """Measure, keep and print; return the exit status."""
    progress = ProgressLine(Console(stderr=True))
    if spill_dir is not None and not spill_dir.is_dir():
        print(f"lowtide measure: {spill_dir} is not a folder", file=sys.stderr)
        return EXIT_USAGE
    try:
        hardware = measure_now(
            progress.say if progress.is_shown else lambda _: None, spill_dir
        )
        path = save_measured(hardware)
    except (LowtideError, OSError) as error:
        print(f"lowtide measure: {error}", file=sys.stderr)
        return EXIT_USAGE
    finally:
        progress.wipe()
    if as_json:
        print(json.dumps(hardware.to_dict(), indent=2))
        return 0
    print(describe(hardware), end="")
    print(f"Wrote {path}. Name it as: {MEASURED}")
    return 0


def measure_now(say: Callable[[str], None], directory: Path | None) -> Hardware:
    """Measure; this loads torch."""
    from lowtide.runtime.speed import measure_machine

    return measure_machine(say, directory=directory)
