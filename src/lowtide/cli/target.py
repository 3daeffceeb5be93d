# SPDX-License-Identifier: Apache-2.0
"""What the verbs that run a program take as arguments: the program, and its own."""

from typing import Annotated

import typer

# Options after SCRIPT belong to the script, as they do with `python`.
CONTEXT = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}

TargetArgument = Annotated[
    str, typer.Argument(metavar="SCRIPT|-m MODULE", help="What to run.")
]
ArgsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS", help="Arguments of the script."),
]
ModuleOption = Annotated[
    bool, typer.Option("-m", help="Run a module, as `python -m` does.")
]
