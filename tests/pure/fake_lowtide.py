# SPDX-License-Identifier: Apache-2.0
"""The command line with a session that keeps no budget, so that no torch is loaded.

FAKE_SESSION chooses what goes wrong: "budget" raises BudgetError when the program
ends, "enter" refuses to begin.
"""

import os
import sys

import lowtide.cli.run
from lowtide.cli import main
from lowtide.errors import BudgetError, LowtideError
from lowtide.timeline import Timeline
from tests.pure.timelines import make_timeline


class FakeSession:
    """Count nothing, keep nothing, report a program that did not train."""

    def __init__(self, request, on_progress):
        self.on_progress = on_progress
        if os.environ.get("FAKE_SESSION") == "enter":
            raise LowtideError("this session cannot begin")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if os.environ.get("FAKE_SESSION") == "budget":
            raise BudgetError(
                budget_bytes=100, operator="aten::mm", needed_bytes=300
            ) from error

    def report(self) -> Timeline:
        return make_timeline(trained=False)


if __name__ == "__main__":
    lowtide.cli.run.open_session = FakeSession
    sys.exit(main())
