# SPDX-License-Identifier: Apache-2.0
"""What the verbs that look into files share: reading them, progress, and refusals."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from lowtide.archive import noun_in
from lowtide.cli.progress import ProgressLine
from lowtide.errors import FileError, LowtideError
from lowtide.history import History
from lowtide.recorder.files import read_history
from lowtide.tidefile import Tide, is_tide, read_tide

EXIT_USAGE = 2
EXIT_TOO_LARGE = 3
EXIT_INTERRUPTED = 130  # as shells count a death of SIGINT
EXIT_PIPE = 141  # as shells count a death of SIGPIPE
_BAR_CELLS = 20

T = TypeVar("T")
Say = Callable[[str, int, int], None]  # what is done now; steps done, steps in all


def read_any(path: Path, *, device: str | None = None) -> History | Tide:
    """Read a `.tide` file, or what others write about memory.

    A `.tide` file without blocks comes as the `Tide` that it is.

    Raises:
        FileError: it is none of these, or damaged; says why.
        OSError: the system refused.
    """
    if not path.is_file():  # a pipe would be waited for, a folder cannot be read
        raise FileError("is not a file" if path.exists() else "is missing", path=path)
    with path.open("rb") as file:
        if not is_tide(file.read(16)):
            return read_history(path, device=device)
    tide = read_tide(path)
    if tide.kind != "history":
        return tide
    noun = naming(path, lambda: noun_in(tide))
    assert isinstance(noun, History)
    return noun


def naming(path: Path, act: Callable[[], T]) -> T:
    """Do something, and name the file in an error that does not know it."""
    try:
        return act()
    except FileError as error:
        raise FileError(error.why, path=path) from None


def perform_verb(verb: str, act: Callable[[Say], int | None]) -> int:
    """Do what a verb does, with progress; return the exit status.

    A file that cannot be read gives one line and status 2.
    """
    progress = ProgressLine(Console(stderr=True))

    def say(text: str, done: int, of: int) -> None:
        if progress.is_shown:
            full = _BAR_CELLS * done // of
            bar = "#" * full + "-" * (_BAR_CELLS - full)
            progress.say(f"[{bar}] {text}")

    try:
        status = act(say) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever reads has seen enough; nothing more is to come
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except (LowtideError, OSError) as error:
        progress.wipe()
        print(f"lowtide {verb}: {_one_line(error)}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        progress.wipe()


def harmless(text: str) -> str:
    """Take out what would steer a terminal: names come from files, maybe hostile."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def _one_line(error: Exception) -> str:
    text = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.filename} cannot be read: {error.strerror}"
    return harmless(text).replace("\n", " ")
