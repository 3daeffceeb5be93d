"""What a fake recording predicts, against what happens: peaks, seconds, slow-downs.

    python benchmarks/predict.py                  # all models, some ten minutes
    python benchmarks/predict.py --quick          # four of them, about a minute
    python benchmarks/predict.py gpt2 bert --json predict.json

Twelve small networks with three batches each. *Predicted* comes from a fake recording,
in which nothing is computed: plain peak, and seconds by the roofline of this machine,
which is measured first, with one thread as all of this (`lowtide measure`), with what
calling an operator from Python costs. *Measured* are the peak of lowtide's allocator
over one step, and the median seconds of a step.

The second table is about budgets, at the largest batch of each model: the simulator's
slow-down with policy `auto` against that of a real budget, steps taken in turn with
plain ones. What watching, saving and moving cost beside copies and recomputing is added
to the simulated time (`hardware.Overheads`); it was measured on networks that are none
of these.

Run it on a quiet machine: peaks do not depend on that, seconds do.
"""

import argparse
import gc
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import harness

FACTORS = (4, 12, 32)  # of the batch in tests/models.py
QUICK = ("resnet50", "bert", "gpt2", "lstm")
NAMES = (
    "resnet50", "vit", "swin", "bert", "gpt2", "llama", "t5", "whisper", "mixtral",
    "mamba", "unet", "lstm",
)  # fmt: skip
STEPS = 5
PARTS = (0.75, 0.5)  # budgets, as parts of the plain peak
PAIRS = 3
PEAK_WITHIN, PEAK_MEDIAN, RANKS, SLOWDOWN_WITHIN = 0.03, 0.01, 0.95, 0.10

Step = Callable[[], object]


# -- in a process of its own ----------------------------------------------------------


def build(name: str, factor: int) -> Step:
    """Build a model of the exactness suite, with batches `factor` times as large."""
    import torch

    from tests.compare import seed_everything

    seed_everything(0)
    model, make_batch, loss_of = _case(name)
    for module in model.modules():
        for dice in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
            if hasattr(module, dice):  # which layers run would be a matter of luck
                setattr(module, dice, 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        batches = [make_batch() for _ in range(factor)]
        batch = {key: torch.cat([b[key] for b in batches]) for key in batches[0]}
        loss = loss_of(model, batch)
        loss.backward()
        loss.item()
        optimizer.step()

    return step


def _case(name: str) -> Any:
    from tests import models

    if name in models.MODELS:
        return models.MODELS[name]()
    return {"unet": _unet, "lstm": _lstm}[name]()


def _unet() -> Any:
    import torch
    import torch.nn.functional as F

    from benchmarks.models import UNet

    def make_batch() -> Any:
        pictures = torch.randn(4, 3, 96, 96)
        return {"x": pictures, "y": (pictures.mean(1).abs() * 4).long().clamp(max=7)}

    def loss_of(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    return UNet(width=8, levels=4, classes=8).train(), make_batch, loss_of


def _lstm() -> Any:
    import torch
    from torch import nn

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(256, 64)
            self.lstm = nn.LSTM(64, 128, 2, dropout=0.1, batch_first=True)
            self.head = nn.Linear(128, 256)

        def forward(self, x: Any) -> Any:
            return self.head(self.lstm(self.embedding(x))[0])

    def make_batch() -> Any:
        return {"x": torch.randint(256, (8, 48))}

    def loss_of(model: Any, batch: Any) -> Any:
        logits = model(batch["x"])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["x"].flatten())

    return Reader().train(), make_batch, loss_of


class Model:
    """One model in one process: asked for predictions, then for what happens."""

    def __init__(self, name: str) -> None:
        warnings.simplefilter("ignore")
        self.name = name

    def answer(self, request: harness.Row) -> harness.Row:
        """Do what is asked for."""
        made: harness.Row = getattr(self, request.pop("do"))(**request)
        return made

    def machine(self, path: str) -> harness.Row:
        """Measure this machine into a file."""
        from lowtide.hardware import save_measured
        from lowtide.runtime.speed import measure_machine

        save_measured(measure_machine(lambda _: None), Path(path))
        return {}

    def predict(self, factor: int, parts: Sequence[float], machine: str) -> harness.Row:
        """Record fakely; simulate the budgets."""
        import lowtide
        from lowtide.hardware import load_measured

        start = time.perf_counter()
        hardware = load_measured(Path(machine))
        graph = lowtide.record(
            build=lambda: build(self.name, factor), fake=True, hardware=hardware
        )
        peak = graph.plain_peak_bytes
        plain = graph.seconds + hardware.overheads.call * len(graph.operators)
        slow: dict[str, float | None] = {}
        for part in parts:
            extra = simulated(graph, int(part * peak), hardware)
            slow[str(part)] = None if extra is None else 1 + extra / plain
        return {
            "peak_bytes": peak,
            "seconds": plain,
            "slowdowns": slow,
            "recording_seconds": time.perf_counter() - start,
        }

    def measure(self, factor: int) -> harness.Row:
        """Train for some steps."""
        from lowtide.runtime import allocator

        counter = allocator.install()
        step = build(self.name, factor)
        allocator.adopt(counter)
        for _ in range(2):
            step()
        gc.collect()
        peaks, seconds = [], []
        for _ in range(STEPS):
            counter.reset_peak()
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
            peaks.append(counter.peak.value)
        return {"peak_bytes": int(median(peaks)), "seconds": median(seconds)}

    def slowdown(self, factor: int, budget_bytes: int) -> harness.Row:
        """Train within a budget and plainly, in turn."""
        from lowtide.errors import BudgetError
        from lowtide.runtime.session import Session

        step = build(self.name, factor)
        step()
        ratios = []
        try:
            for _ in range(PAIRS):
                with Session(budget_bytes):
                    for _ in range(5):  # learnt by then
                        step()
                    within = timed(step)
                ratios.append(within / timed(step))
        except BudgetError:
            return {"slowdown": None}
        return {"slowdown": median(ratios)}


def timed(step: Step) -> float:
    """Return the median seconds of three steps."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def simulated(graph: Any, budget_bytes: int, machine: Any) -> float | None:
    """Return the seconds that a budget adds by the simulator; None: it does not fit."""
    from benchmarks.policies import planner_of
    from lowtide.elsewhere.retime import lanes_of
    from lowtide.scheduler.director import RULES
    from lowtide.scheduler.scheduler import DROP
    from lowtide.simulator.simulator import planned_budget, simulate

    lanes = lanes_of(machine)
    plan = planner_of(graph, lanes, RULES["auto"])(planned_budget(graph, budget_bytes))
    outcome = simulate(graph, "auto", budget_bytes, lanes, plan=plan)
    if not outcome.fits:
        return None
    costs = machine.overheads
    keeping = costs.keeping(
        operators=len(graph.operators) + outcome.replayed_operators,
        saved=len(graph.saves),
        moved=sum(action != DROP for _, action, _ in outcome.actions),
        moved_bytes=outcome.written_bytes,
    )
    return float(outcome.seconds - outcome.plain_seconds + keeping)


# -- the tables ----------------------------------------------------------------------


def compare(
    name: str, factors: Sequence[int], parts: Sequence[float], machine: str
) -> list[Any]:
    """Return the rows of one model: peaks and seconds, and slow-downs."""
    rows, slow = [], []
    with harness.Worker("predict.py", "--serve", name, threads=1) as worker:
        for factor in factors:
            wanted = parts if factor == max(factors) else ()
            told = worker.ask(
                do="predict", factor=factor, parts=list(wanted), machine=machine
            )
            seen = worker.ask(do="measure", factor=factor)
            rows.append(
                {
                    "model": name,
                    "batch": factor,
                    "predicted_peak_bytes": told["peak_bytes"],
                    "measured_peak_bytes": seen["peak_bytes"],
                    "predicted_seconds": told["seconds"],
                    "measured_seconds": seen["seconds"],
                }
            )
            for part in wanted:
                budget = int(part * told["peak_bytes"])
                found = worker.ask(do="slowdown", factor=factor, budget_bytes=budget)
                slow.append(
                    {
                        "model": name,
                        "batch": factor,
                        "part": part,
                        "predicted_slowdown": told["slowdowns"][str(part)],
                        "measured_slowdown": found["slowdown"],
                    }
                )
    return [rows, slow]


def judge_peaks(rows: Sequence[harness.Row]) -> str:
    """Sum up the first table."""
    from scipy.stats import spearmanr

    errors = [
        abs(r["predicted_peak_bytes"] / r["measured_peak_bytes"] - 1) for r in rows
    ]
    ranks = spearmanr(
        [r["predicted_seconds"] for r in rows], [r["measured_seconds"] for r in rows]
    ).statistic
    return (
        f"peak: median error {median(errors):.2%} (bar {PEAK_MEDIAN:.0%}), largest "
        f"{max(errors):.2%} (bar {PEAK_WITHIN:.0%})\n"
        f"seconds: rank correlation {ranks:.3f} (bar {RANKS})"
    )


def judge_slowdowns(rows: Sequence[harness.Row]) -> str:
    """Sum up the second table."""
    both = [
        abs(r["predicted_slowdown"] - r["measured_slowdown"])
        for r in rows
        if r["predicted_slowdown"] is not None and r["measured_slowdown"] is not None
    ]
    agree = sum(
        r["predicted_slowdown"] is None and r["measured_slowdown"] is None for r in rows
    )
    near = agree + sum(error <= SLOWDOWN_WITHIN for error in both)
    return (
        f"slow-down: {near} of {len(rows)} within {SLOWDOWN_WITHIN} "
        f"({near / max(len(rows), 1):.0%}, bar 80%); {agree} fit in neither"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help="all by default")
    parser.add_argument("--quick", action="store_true", help="four models")
    parser.add_argument("--no-budgets", action="store_true", help="first table only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--serve", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        harness.serve(Model(options.serve).answer)
        return
    names = options.models or (QUICK if options.quick else NAMES)
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        parser.error(f"no such model: {unknown[0]}; there are {', '.join(NAMES)}")
    start = time.perf_counter()
    parts = () if options.no_budgets else PARTS
    rows: list[harness.Row] = []
    slow: list[harness.Row] = []
    with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
        machine = str(Path(folder) / "hardware.json")
        with harness.Worker("predict.py", "--serve", "", threads=1) as worker:
            worker.ask(do="machine", path=machine)
        print("this machine measured", file=sys.stderr)
        for name in names:
            found = compare(name, FACTORS, parts, machine)
            rows += found[0]
            slow += found[1]
            print(f"{name} done", file=sys.stderr)
    harness.print_table(rows, list(rows[0]))
    print(judge_peaks(rows))
    if slow:
        harness.print_table(slow, list(slow[0]))
        print(judge_slowdowns(slow))
    print(f"took {time.perf_counter() - start:.0f} s")
    harness.write_rows(options.json, rows + slow)


if __name__ == "__main__":
    main()
