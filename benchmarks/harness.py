"""What the benchmarks share: worker processes, interleaved timing, tables and rows.

Memory is measured in fresh processes, one contestant each, so that nobody's leftovers
count against somebody else. Time is measured with all contestants alive at once, each
in its own process, stepping in turn: whatever slows the machine slows them alike.
"""

import json
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]
Seconds: TypeAlias = float

ROOT = Path(__file__).resolve().parent.parent
PAIRS = 9  # interleaved pairs of steps behind every ratio of times


class WorkerDied(Exception):
    """A worker ended, or fell silent, in the middle of a request."""


class WorkerFailed(Exception):
    """A worker caught an exception; it lives on."""

    def __init__(self, reply: Row) -> None:
        super().__init__(f"{reply['error']}: {reply['message']}")
        self.reply = reply


class Worker:
    """A Python process that answers requests, one JSON line each."""

    def __init__(
        self,
        script: str,
        *arguments: str,
        threads: int | None = None,
        patience: Seconds = 1800,
    ) -> None:
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        self._patience = patience
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "benchmarks" / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    def ask(self, **request: Any) -> Row:
        """Send a request and wait for its reply."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise WorkerDied(self._last_words()) from None
        if not select.select([process.stdout], [], [], self._patience)[0]:
            process.kill()
            raise WorkerDied(f"no answer within {self._patience:.0f} s")
        line = process.stdout.readline()
        if not line:
            raise WorkerDied(self._last_words())
        reply: Row = json.loads(line)
        if "error" in reply:
            raise WorkerFailed(reply)
        return reply

    def _last_words(self) -> str:
        code = self._process.wait()
        if code < 0:
            return f"the process died of {signal.Signals(-code).name}"
        return f"the process ended with status {code}"

    def close(self) -> None:
        """End the process by ending its input."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def serve(answer: Callable[[Row], Row]) -> None:
    """Answer the requests on standard input until it ends: a worker's main loop."""
    # Whatever the program under test prints must not end up among the replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as error:
            reply = {"error": type(error).__name__, "message": str(error)}
            for name in ("operator", "needed_bytes", "smallest_bytes"):
                if getattr(error, name, None) is not None:
                    reply[name] = getattr(error, name)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def take_turns(
    contestants: Mapping[str, Callable[[], Seconds]], *, rounds: int, seed: int
) -> dict[str, list[Seconds]]:
    """Let each contestant step once a round, in a new order every round."""
    order = random.Random(seed)
    seconds: dict[str, list[Seconds]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name in order.sample(sorted(contestants), len(contestants)):
            seconds[name].append(contestants[name]())
    return seconds


def median_ratio(seconds: Sequence[Seconds], against: Sequence[Seconds]) -> float:
    """Return the median of the ratios of one round each."""
    return median(a / b for a, b in zip(seconds, against, strict=True))


def write_rows(path: Path | None, rows: Iterable[Row]) -> None:
    """Write flat rows as JSON, where a path was given."""
    if path is not None:
        path.write_text(json.dumps(list(rows), indent=1) + "\n")


def print_table(rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Print rows below their column names; bytes in MiB, ratios with two digits."""
    cells = [[_cell(name, row.get(name)) for name in columns] for row in rows]
    heads = [name.replace("_bytes", "_MiB") for name in columns]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    for line in (heads, *cells):
        print("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)))
    sys.stdout.flush()


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith("_bytes"):
        return f"{value / 2**20:.1f}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
