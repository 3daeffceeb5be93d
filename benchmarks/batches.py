"""The largest batch that `lowtide max-batch` promises, against the largest that runs.

    python benchmarks/batches.py            # ResNet-50, GPT-2 and BERT; some minutes
    python benchmarks/batches.py --quick    # under half of the budget, one budget each
    python benchmarks/batches.py bert --json batches.json

Each network of the exactness suite gets budgets in bytes. *Predicted* is what
`lowtide max-batch SCRIPT --gpu this-machine` says (fake recordings, in which nothing is
computed). *Real* is found by bisection: a batch runs if four steps within the budget
end without `BudgetError` and none from the second on takes more. To be reached: never
above what runs, and at most 5 % below. No time plays a part.
"""

import argparse
import json
import os
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
from lowtide.elsewhere.batches import near
from lowtide.errors import LowtideError
from lowtide.hardware import MEASURED, load_measured
from lowtide.units import format_bytes

MIB = 1 << 20
BUDGETS = {
    "resnet50": (32 * MIB, 64 * MIB),
    "gpt2": (32 * MIB, 64 * MIB),
    "bert": (24 * MIB, 48 * MIB),
}
STEPS = 4
BELOW = 0.05
MOST_SLOWDOWN = 50  # none: memory alone is to decide
SCRIPT = """\
import sys
sys.path.insert(0, {root!r})
from benchmarks.batches import STEPS, build
step = build({name!r}, int(sys.argv[1]))
for _ in range(STEPS):
    step()
"""


def build(name: str, batch: int) -> Callable[[], object]:
    """Build a network and a function that trains it once on `batch` samples."""
    import torch

    from tests.compare import seed_everything
    from tests.models import MODELS

    seed_everything(0)
    model, make_batch, loss_of = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        parts = [make_batch()]
        size = len(next(iter(parts[0].values())))
        parts += [make_batch() for _ in range(-(-batch // size) - 1)]
        data = {key: torch.cat([p[key] for p in parts])[:batch] for key in parts[0]}
        del parts
        loss_of(model, {key: part.clone() for key, part in data.items()}).backward()
        optimizer.step()

    return step


class Trainer:
    """One network in one process: tries batches within a budget."""

    def __init__(self, name: str) -> None:
        warnings.simplefilter("ignore")
        self.name = name

    def answer(self, request: harness.Row) -> harness.Row:
        """Train some steps; say whether the budget held."""
        from lowtide.errors import BudgetError
        from lowtide.runtime.session import Session

        step = build(self.name, request["batch"])
        session = Session(request["budget"])
        try:
            with session:
                for _ in range(STEPS):
                    step()
        except BudgetError:
            return {"runs": False}
        return {"runs": session.report().peak_bytes <= request["budget"]}


def predict(name: str, budget_bytes: int) -> int:
    """Ask `lowtide max-batch`."""
    with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT.format(root=str(harness.ROOT), name=name))
        command = [sys.executable, "-m", "lowtide", "max-batch", str(script), "--json"]
        command += ["--gpu", MEASURED, "--budget", str(budget_bytes)]
        command += ["--max-slowdown", str(MOST_SLOWDOWN), "--", "{batch}"]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    if done.returncode:
        raise SystemExit(f"lowtide max-batch failed: {done.stderr.strip()}")
    return int(json.loads(done.stdout)["batch"])


def compare(name: str, budget_bytes: int) -> harness.Row:
    """Return the row of a network within a budget."""
    predicted = predict(name, budget_bytes)
    with harness.Worker("batches.py", "--serve", name, threads=1) as worker:

        def runs(batch: int) -> bool:
            return bool(worker.ask(batch=batch, budget=budget_bytes)["runs"])

        real = near(runs, predicted)
    fine = (1 - BELOW) * real <= predicted <= real
    return {
        "model": name,
        "budget_bytes": budget_bytes,
        "predicted": predicted,
        "real": real,
        "ratio": predicted / real if real else 0.0,
        "fine": fine,
    }


def be_measured() -> None:
    """Measure this machine where nobody has."""
    try:
        load_measured()
    except LowtideError:
        subprocess.run([sys.executable, "-m", "lowtide", "measure"], check=True)


def main() -> None:
    """Compare, print and judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help="all by default")
    parser.add_argument("--quick", action="store_true", help="the smaller budgets")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--serve", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        harness.serve(Trainer(options.serve).answer)
        return
    unknown = sorted(set(options.models) - set(BUDGETS))
    if unknown:
        parser.error(f"no such model: {unknown[0]}; there are {', '.join(BUDGETS)}")
    begin = time.perf_counter()
    be_measured()
    rows: list[dict[str, Any]] = []
    for name in options.models or BUDGETS:
        for budget in BUDGETS[name][: 1 if options.quick else None]:
            rows.append(compare(name, budget))
            said = f"{name} within {format_bytes(budget)}: {rows[-1]['predicted']}"
            print(f"{said}, really {rows[-1]['real']}", file=sys.stderr)
    harness.print_table(rows, list(rows[0]))
    fine = sum(row["fine"] for row in rows)
    print(f"never above, within {BELOW:.0%}: {fine} of {len(rows)}")
    print(f"took {time.perf_counter() - begin:.0f} s")
    harness.write_rows(options.json, rows)


if __name__ == "__main__":
    main()
