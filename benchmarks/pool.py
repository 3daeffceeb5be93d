"""Train on torch's own CPU allocator, on a tuned glibc, and on lowtide's arena.

    python benchmarks/pool.py                           # footprint, RSS and step times
    python benchmarks/pool.py --rounds 0 --changing     # memory alone, changing shapes
    python benchmarks/pool.py --rounds 0 --at 50        # within half of the plain peak
    python benchmarks/pool.py --pairs                   # nanoseconds a pair, in C++

Contestants: `default`, torch's allocator on glibc as it is; `tuned`, the same with
glibc kept from mapping blocks and from giving memory back; `arena`, lowtide's
allocator without plans; `pool`, with plans. Columns: `live_bytes`, the peak of live
blocks; `footprint`, the arena's high-water mark, over that peak of its blocks; `rss`,
peak resident memory above that of the same process after a tiny training of the same
model; `over_rss`, that less the peak live bytes; `hits`, the part of the requests that
got planned places; `ratio`, step time against `default`, of interleaved rounds.
`same` says whether all losses equal those of `default` to the last bit.

With `--at` two more train within a budget, of so many per cent of the peak of `arena`:
`budget` without a pool, `pooled` with one. Their `footprint` is the high-water mark of
all that is live and kept, in the arena and beside it, over the budget, once the first
two steps have shown what there is.
"""

import argparse
import ctypes
import gc
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import harness
from benchmarks.harness import Row, Seconds, Worker

# Never map a block, never give memory back: 16 GiB is beyond what is trained here.
TUNED = (
    "glibc.malloc.mmap_threshold=17179869184:glibc.malloc.trim_threshold=17179869184"
)
CONTESTANTS = ("default", "tuned", "arena", "pool")
WITHIN = ("budget", "pooled")
COLUMNS = (
    *("model", "shapes", "contestant", "budget_bytes", "live_bytes", "footprint"),
    "rss_bytes",
    *("over_rss_bytes", "hits", "fresh_bytes", "seconds", "ratio", "same"),
)


class Training:
    """One training in this process; steps on request."""

    def __init__(
        self,
        model: str,
        *,
        contestant: str,
        changing: bool,
        quick: bool,
        budget: int | None = None,
    ) -> None:
        from benchmarks import models

        self.counter: Any = None
        self.pool: Any = None
        self.session: Any = None
        if contestant not in ("default", "tuned"):
            from lowtide.runtime.allocator import install
            from lowtide.runtime.arena import Arena, Pool

            self.counter = install()
            self.arena = Arena(self.counter)
            if contestant == "pool":
                self.pool = Pool(self.counter)
        models.build(model, quick=True).step()  # libraries take what they keep
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        if self.counter is not None:
            self.counter.trim()
        self.idle = _resident("VmRSS")
        self.training = models.build(model, quick=quick)
        if changing:
            self.training.make_batch = _shrunk(self.training.make_batch)
        self.live = 0
        _reset_peak_of_resident()
        self.requests = self.hits = self.fresh = 0
        if contestant in WITHIN:
            from lowtide.runtime.session import Session

            self.session = Session(budget, pool=contestant == "pooled")
            self.session.__enter__()

    def step(self, count: int = 1) -> Row:
        """Run some steps; tell the time of each, and the losses."""
        seconds, losses = [], []
        for _ in range(count):
            if self.counter is not None:
                before = self.arena.figures
            started = time.perf_counter()
            if self.pool is not None:
                self.pool.boundary()
            losses.append(self.training.step().hex())
            seconds.append(time.perf_counter() - started)
            if self.counter is not None:
                now = self.arena.figures
                self.requests, self.hits = now.requests, now.hits
                self.fresh = now.fresh - before.fresh
        return {"seconds": seconds, "losses": losses}

    def reset(self) -> Row:
        """Let all peaks begin anew."""
        if self.counter is not None:
            self.counter.reset_peak()
            self.arena.reset_footprint()
        _reset_peak_of_resident()
        return {}

    def figures(self) -> Row:
        """Tell what was counted since the last reset; hits of the last step."""
        row: Row = {"rss_bytes": _resident("VmHWM") - self.idle}
        if self.counter is None:
            return row
        arena = self.arena.figures
        row["live_bytes"] = self.counter.peak.value
        row["footprint"] = arena.footprint / arena.most_asked
        if self.session is not None:
            row["live_bytes"] = self.session.report().peak_bytes
            beside = max(0, row["live_bytes"] - arena.most_asked)  # small blocks
            row["budget_bytes"] = self.session.budget
            row["footprint"] = (arena.footprint + beside) / self.session.budget
        row["over_rss_bytes"] = row["rss_bytes"] - row["live_bytes"]
        row["fresh_bytes"] = self.fresh
        if self.pool is not None or (self.session is not None and self.session.pool):
            row["hits"] = self.hits / self.requests
        return row


def _shrunk(make_batch: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Cut each batch to a random length, or its pictures to a random size."""
    choice = random.Random(0)

    def make() -> dict[str, Any]:
        batch = make_batch()
        x = batch["x"]
        size = x.shape[-1]
        if x.dim() == 2:
            size = choice.randint(size // 4, size)
            return {**batch, "x": x[:, :size].contiguous()}
        size = choice.randint(size * 4 // 7, size)
        return {**batch, "x": x[:, :, :size, :size].contiguous()}

    return make


def _resident(name: str) -> int:
    """Read a figure of this process's resident memory, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def _reset_peak_of_resident() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def compete(model: str, arguments: argparse.Namespace) -> list[Row]:
    """Train all contestants, in turns where times are wanted."""
    rows = []
    workers: dict[str, Worker] = {}
    losses: dict[str, list[str]] = {}
    budget = None
    try:
        for name in arguments.contestants:
            environment = os.environ.copy()
            if name == "tuned":
                os.environ["GLIBC_TUNABLES"] = TUNED
            workers[name] = Worker("pool.py", "--serve", threads=arguments.threads)
            os.environ.clear()
            os.environ.update(environment)
            workers[name].ask(
                do="build",
                model=model,
                contestant=name,
                changing=arguments.changing,
                quick=arguments.quick,
                budget=budget,
            )
            losses[name] = workers[name].ask(do="step", count=2)["losses"]
            workers[name].ask(do="reset")
            more = workers[name].ask(do="step", count=arguments.steps)
            losses[name] += more["losses"]
            row = {"model": model, "contestant": name, "seconds": more["seconds"][-1]}
            row["shapes"] = "changing" if arguments.changing else "fixed"
            row["same"] = losses[name] == losses[arguments.contestants[0]]
            rows.append({**row, **workers[name].ask(do="figures")})
            if name == "arena" and arguments.at:
                budget = int(rows[-1]["live_bytes"] * arguments.at / 100)
        _time(rows, workers, arguments.rounds)
    finally:
        for worker in workers.values():
            worker.close()
    return rows


def _time(rows: list[Row], workers: dict[str, Worker], rounds: int) -> None:
    """Let the contestants step in turn, and add the ratios of their times."""
    if rounds == 0:
        return

    def stepping(worker: Worker) -> Callable[[], Seconds]:
        return lambda: float(worker.ask(do="step")["seconds"][0])

    turns = {name: stepping(worker) for name, worker in workers.items()}
    seconds = harness.take_turns(turns, rounds=rounds, seed=0)
    for row in rows:
        name, first = row["contestant"], rows[0]["contestant"]
        row["seconds"] = sorted(seconds[name])[rounds // 2]
        row["ratio"] = harness.median_ratio(seconds[name], seconds[first])


def time_pairs() -> None:
    """Compile and run the C++ benchmark of allocation and release."""
    from lowtide.runtime.shim import _UNITS

    cpp = harness.ROOT / "cpp"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "pairs"
        source = Path(__file__).with_name("arena_pairs.cc")
        subprocess.run(
            [
                *(os.environ.get("CXX", "g++"), "-std=c++20", "-O2", f"-I{cpp}"),
                *(str(source), *(str(cpp / name) for name in _UNITS)),
                *("-o", str(program)),
            ],
            check=True,
        )
        dynamic, planned, glibc, hits = subprocess.run(
            [str(program)], check=True, capture_output=True, text=True
        ).stdout.split()
    print(
        f"a pair takes {dynamic} ns without a plan, {planned} ns by one (hits {hits}), "
        f"{glibc} ns in glibc where it maps nothing"
    )


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=["resnet50", "gpt2"])
    parser.add_argument("--contestants", nargs="+", default=CONTESTANTS)
    parser.add_argument("--changing", action="store_true", help="random shapes")
    parser.add_argument("--quick", action="store_true", help="small models")
    parser.add_argument("--steps", type=int, default=6, help="before the times")
    parser.add_argument("--rounds", type=int, default=harness.PAIRS)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pairs", action="store_true", help="the C++ benchmark only")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--at", type=float, metavar="PERCENT", help="of the plain peak")
    arguments = parser.parse_args()
    if arguments.at:
        arguments.contestants = ("default", "arena", *WITHIN)
    if arguments.serve:
        serve()
        return
    if arguments.pairs:
        time_pairs()
        return
    rows: list[Row] = []
    for model in arguments.model:
        rows += compete(model, arguments)
        harness.print_table(rows, COLUMNS)
    harness.write_rows(arguments.json, rows)


def serve() -> None:
    """Serve one training."""
    warnings.simplefilter("ignore")
    trainings: list[Training] = []

    def answer(request: Row) -> Row:
        verb = request.pop("do")
        if verb == "build":
            trainings.append(Training(**request))
            return {}
        reply: Row = getattr(trainings[-1], verb)(**request)
        return reply

    harness.serve(answer)


if __name__ == "__main__":
    main()
