# SPDX-License-Identifier: Apache-2.0
"""Show one line of progress on a terminal that the program also writes to.

The line is drawn at the right edge, as shells draw a right-hand prompt, and the cursor
goes back to where it was. So the program's own output is never moved, and replacing
`sys.stdout` by a proxy, which scripts can notice, is not needed.
"""

import time
from collections.abc import Callable

from rich.cells import cell_len, set_cell_size
from rich.console import Console

_SECONDS_BETWEEN_DRAWS = 0.25
_SAVE, _RESTORE, _CLEAR_TO_EDGE = "\x1b7", "\x1b8", "\x1b[K"
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class ProgressLine:
    """Draw the last thing said, a few times a second, and wipe it at the end."""

    def __init__(
        self, console: Console, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._clock = clock
        self._last_draw = float("-inf")
        self._column = 0  # of the leftmost cell drawn on, counted from 1; 0: none

    @property
    def is_shown(self) -> bool:
        """Whether there is a terminal to draw on."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def say(self, text: str) -> None:
        """Draw a line, unless one was drawn a moment ago; wipe it if it is empty."""
        now = self._clock()
        if not text:
            self.wipe()
        elif now - self._last_draw >= _SECONDS_BETWEEN_DRAWS:
            self._last_draw = now
            self._draw(f"lowtide: {text}")

    def wipe(self) -> None:
        """Take the line off the screen."""
        if self._column:
            self._write(f"\x1b[{self._column}G{_CLEAR_TO_EDGE}")
            self._column = 0

    def _draw(self, text: str) -> None:
        width = self._console.width
        shown = min(cell_len(text), width - 1)
        column = width - shown
        start = min(column, self._column or column)
        self._write(
            f"\x1b[{start}G{_CLEAR_TO_EDGE}\x1b[{column}G"
            f"{_DIM}{set_cell_size(text, shown)}{_PLAIN}"
        )
        self._column = column

    def _write(self, codes: str) -> None:
        self._console.file.write(f"{_SAVE}{codes}{_RESTORE}")
        self._console.file.flush()
