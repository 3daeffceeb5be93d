# SPDX-License-Identifier: Apache-2.0
import io
import re

import pytest
from rich.console import Console

from lowtide.cli.progress import ProgressLine

CODE = re.compile(r"\x1b(\[[0-9]*[A-Za-z]|[0-9])")


class Screen:
    """A terminal of one line: enough to see what stays on it."""

    def __init__(self, width: int) -> None:
        self.file = io.StringIO()
        self.console = Console(file=self.file, force_terminal=True, width=width)
        self.cells = [" "] * width
        self.cursor = self.saved = 0

    def type(self, text: str) -> None:
        """Print as the program does."""
        for letter in text:
            self.cells[self.cursor] = letter
            self.cursor += 1

    def show(self) -> str:
        """Carry out what was written since the last time; return the line."""
        rest = self.file.getvalue()
        self.file.seek(0)
        self.file.truncate()
        while rest:
            if rest[0] != "\x1b":
                self.type(rest[0])
                rest = rest[1:]
                continue
            code = CODE.match(rest)
            assert code is not None, rest
            rest = rest[code.end() :]
            self._obey(code[1])
        return "".join(self.cells)

    def _obey(self, code: str) -> None:
        if code == "7":
            self.saved = self.cursor
        elif code == "8":
            self.cursor = self.saved
        elif code == "[K":
            self.cells[self.cursor :] = " " * (len(self.cells) - self.cursor)
        elif code.endswith("G"):
            self.cursor = int(code[1:-1]) - 1
        else:
            assert code in ("[2m", "[0m")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_line_leaves_the_programs_output_alone() -> None:
    screen, clock = Screen(40), Clock()
    line = ProgressLine(screen.console, clock=clock)
    screen.type("loss: ")
    line.say("learning 9")
    assert screen.show() == "loss: ".ljust(20) + "lowtide: learning 9".rjust(19) + " "
    screen.type("3.5")
    clock.now += 1
    line.say("learn 1")
    assert screen.show() == "loss: 3.5".ljust(23) + "lowtide: learn 1".rjust(16) + " "
    line.wipe()
    assert screen.show() == "loss: 3.5".ljust(40)
    assert screen.cursor == 9


def test_a_few_redraws_a_second() -> None:
    screen, clock = Screen(60), Clock()
    line = ProgressLine(screen.console, clock=clock)
    drawn = 0
    for _ in range(1000):
        line.say("learning")
        drawn += bool(screen.file.getvalue())
        screen.show()
        clock.now += 0.001
    assert drawn == 4


def test_a_long_line_is_cut() -> None:
    screen = Screen(20)
    ProgressLine(screen.console, clock=Clock()).say("many words too many")
    assert screen.show() == "lowtide: many words "


def test_an_empty_line_wipes() -> None:
    screen = Screen(30)
    line = ProgressLine(screen.console, clock=Clock())
    line.say("learning")
    line.say("")
    assert screen.show().strip() == ""


@pytest.mark.parametrize(("terminal", "shown"), [(True, True), (False, False)])
def test_only_on_a_terminal(
    terminal: bool, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=io.StringIO(), force_terminal=terminal)
    assert ProgressLine(console).is_shown is shown
    monkeypatch.setenv("TERM", "dumb")
    assert ProgressLine(console).is_shown is False
