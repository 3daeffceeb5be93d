"""Check that nothing changes a bit: operators, modules, models, a long loss curve.

    python benchmarks/exact.py                      # everything
    python benchmarks/exact.py --quick              # two samples each
    python benchmarks/exact.py --learnt             # each sample by a learnt plan
    python benchmarks/exact.py --only operators --shard 0/8
    python benchmarks/exact.py --only linalg_det --only nn_LSTM

Operators and modules run torch's own samples in three forced regimes (everything that
can be recomputed is recomputed; everything is swapped to disk; a random mix). Models
train within budgets from the smallest upwards. With `--learnt` each sample runs three
times, and what leaves is what a plan learnt in the run before says. Worker processes
with one thread each take one operator, module or model at a time, so that a crash costs
only that one.
"""

import argparse
import gc
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import harness
from benchmarks.samples import Outcome

GROUPS = ("operators", "modules", "models", "curve")
SECONDS = {"operators": 2.5, "modules": 8.0, "models": 20.0, "curve": 60.0}
QUICK_SECONDS = {"operators": 1.0, "modules": 1.5, "models": 15.0, "curve": 60.0}
QUICK_SAMPLES = 2
SHOWN = 4  # failures of one operator that are printed; --json has them all

Unit: TypeAlias = tuple[str, str]


def units() -> list[Unit]:
    """List everything there is to check, as (group, name)."""
    from benchmarks.exact_modules import modules
    from benchmarks.exact_operators import operators
    from tests.models import MODELS

    return [
        *(("models", name) for name in MODELS),
        ("curve", "gpt2"),
        *(("modules", name) for name in modules()),
        *(("operators", name) for name in operators()),
    ]


def check(request: dict[str, Any]) -> dict[str, Any]:
    """Check one unit: what a worker does with a request."""
    import torch

    from benchmarks import exact_models, exact_modules, exact_operators

    torch.set_num_threads(1)
    name, seed, quick = request["name"], request["seed"], request["quick"]
    learnt = request["learnt"]
    limit = QUICK_SAMPLES if quick else None
    match request["group"]:
        case "operators":
            return asdict(
                exact_operators.run(name, seed=seed, limit=limit, learnt=learnt)
            )
        case "modules":
            return asdict(
                exact_modules.run(name, seed=seed, limit=limit, learnt=learnt)
            )
        case "models":
            fractions = (0.0, 0.5) if quick else exact_models.FRACTIONS
            return asdict(exact_models.run(name, seed=seed, fractions=fractions))
        case _:
            return asdict(exact_models.run_curve(name, seed=seed))


def check_all(
    chosen: Iterable[Unit], *, jobs: int, seed: int, quick: bool, learnt: bool
) -> list[Outcome]:
    """Check units in worker processes, printing failures as they come."""
    waiting: queue.SimpleQueue[Unit] = queue.SimpleQueue()
    for unit in chosen:
        waiting.put(unit)
    outcomes: list[Outcome] = []

    def work() -> None:
        worker = harness.Worker("exact.py", "--worker", threads=1)
        while True:
            try:
                group, name = waiting.get_nowait()
            except queue.Empty:
                break
            try:
                reply = worker.ask(
                    group=group, name=name, seed=seed, quick=quick, learnt=learnt
                )
                outcome = Outcome(**reply)
            except harness.WorkerFailed as error:
                outcome = Outcome(group, name)
                outcome.count(name, [str(error)])
            except harness.WorkerDied as error:
                outcome = Outcome(group, name)
                outcome.count(name, [str(error)])
                worker = harness.Worker("exact.py", "--worker", threads=1)
            outcomes.append(outcome)
            for failure in outcome.failures[:SHOWN]:
                print(f"FAILED {group}: {failure}", flush=True)
        worker.close()

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def choose(everything: list[Unit], args: argparse.Namespace) -> list[Unit]:
    """Apply --only, then cut a seeded shard out of what is left."""
    chosen = everything
    if args.only:
        chosen = [unit for unit in everything if set(unit) & set(args.only)]
        known = {word for unit in everything for word in unit}
        unknown = sorted(set(args.only) - known)
        if unknown:
            raise SystemExit(f"nothing here is called {', '.join(unknown)}")
    index, shards = (int(part) for part in args.shard.split("/"))
    if shards > 1:
        chosen = random.Random(args.seed).sample(chosen, len(chosen))[index::shards]
        chosen.sort(key=everything.index)
    return chosen


def main() -> int:
    """Run the suite; the exit status is 1 where anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="two samples each")
    parser.add_argument(
        "--learnt", action="store_true", help="each sample by learnt plans"
    )
    parser.add_argument("--shard", default="0/1", metavar="I/N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", metavar="GROUP|NAME")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        units()
        # A session looks at every object for tensors to adopt; spare it the half
        # million of the sample tables, which hold none that these checks use.
        gc.freeze()
        harness.serve(check)
        return 0
    chosen = choose(units(), args)
    costs = QUICK_SECONDS if args.quick else SECONDS
    minutes = sum(costs[group] for group, _ in chosen) / args.jobs / 60
    print(
        f"{len(chosen)} operators, modules and models; about {minutes:.0f} minutes",
        flush=True,
    )
    started = time.monotonic()
    outcomes = check_all(
        chosen, jobs=args.jobs, seed=args.seed, quick=args.quick, learnt=args.learnt
    )
    report(outcomes, seconds=time.monotonic() - started)
    harness.write_rows(args.json, map(as_row, outcomes))
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def report(outcomes: list[Outcome], *, seconds: float) -> None:
    """Print the counts of each group, and what was left out."""
    for group in GROUPS:
        mine = [outcome for outcome in outcomes if outcome.group == group]
        if not mine:
            continue
        passed, failed, skipped, replayed, written = (
            sum(getattr(outcome, what) for outcome in mine)
            for what in ("passed", "failed", "skipped", "replayed", "written_bytes")
        )
        followed = sum(outcome.followed for outcome in mine)
        print(f"{group}: {passed} passed, {failed} failed", end="")
        if skipped:
            print(f" ({skipped} samples skipped: plain PyTorch raises on them)", end="")
        print(f"; {replayed} operators replayed, {written} bytes swapped", end="")
        print(f"; {followed} iterations by a learnt plan" if followed else "")
        for outcome in mine:
            if outcome.failed:
                print(f"  failed: {outcome.name} ({outcome.failed})")
            elif outcome.note:
                print(f"  {outcome.name}: {outcome.note}")
    print(f"{seconds / 60:.1f} minutes")


def as_row(outcome: Outcome) -> harness.Row:
    """Make a flat row of an outcome."""
    return {**asdict(outcome), "failures": "\n".join(outcome.failures)}


if __name__ == "__main__":
    sys.exit(main())
