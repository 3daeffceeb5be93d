"""Measure memory and time at several budgets, against plain PyTorch and checkpointing.

    python benchmarks/budget.py --model resnet50 --at 100,75,50,35,smallest
    python benchmarks/budget.py --model gpt2 --set batch=8 --at 50
    python benchmarks/budget.py --against plain,delta,dtr  # policies against each other
    python benchmarks/budget.py --model all --sweep        # does the budget hold?
    python benchmarks/budget.py --model all --check-counter

Peaks are live bytes counted in the allocator: weights, gradients, optimizer state,
activations and workspace. Every contestant has its own process; for the times all of
them step in turn, in a new order every round, and a ratio is the median over rounds.
Plain PyTorch and torch.utils.checkpoint run on torch's allocator and on lowtide's, the
faster one: `time_ratio` is to plain PyTorch as it comes, on torch's; `same_allocator`
to plain PyTorch on lowtide's; `against_checkpoint` to the faster of the two. `exact`
compares every loss and the final weights, buffers, optimizer and random states with
plain PyTorch's, bit for bit.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import dynamic, harness, models
from benchmarks.harness import Row, Worker
from benchmarks.race import (
    ALLOCATORS,
    COLUMNS,
    WARM_UP,
    Entry,
    Race,
    Subject,
    budget_row,
    peer_row,
    place,
)
from lowtide.scheduler.director import RULES

LONGER = 5  # steps at the smallest budget, whatever --steps says
KINDS = ("plain", "checkpoint")  # of training without a budget
MIB = 1 << 20


def compare(subject: Subject, args: argparse.Namespace) -> list[Row]:
    """Race budgets and policies against plain PyTorch and checkpointing."""
    # where every step is another one, the largest of all of them is the peak
    seconds = subject.measure(WARM_UP + args.rounds)
    kinds = [kind for kind in KINDS if kind in args.against]
    policies = [subject.policy, *(p for p in args.against if p not in KINDS)]
    entries = [
        [Entry(policy, at, budget) for policy in dict.fromkeys(policies)]
        for at, budget in budgets(subject, args).items()
    ]
    # all budgets of one policy at once; of several, one race for each budget: all of
    # them together would not fit into the machine
    heats = entries if len(policies) > 1 else [[e for heat in entries for e in heat]]
    n = sum(len(heat) + 2 * len(kinds) for heat in heats)
    minutes = 1.3 * seconds * (args.rounds + WARM_UP) * n / 60
    print(f"{subject.name}: {seconds:.2f} s a step, about {minutes:.0f} minutes")
    sys.stdout.flush()
    rows: list[Row] = []
    for heat in heats:
        rows += run_heat(subject, kinds, heat, args.rounds, peers=not rows)
        if len(policies) > 1:
            print(place(rows, subject.policy, heat[0].at), flush=True)
    return rows


def run_heat(
    subject: Subject, kinds: list[str], heat: list[Entry], rounds: int, *, peers: bool
) -> list[Row]:
    """Run one race; `peers`: with rows for plain PyTorch and checkpointing too."""
    race = Race(subject)
    for kind in kinds:
        for allocator in ALLOCATORS:
            worker = subject.start(allocator=allocator, checkpoint=kind == "checkpoint")
            race.enter(f"{kind} on {allocator}", worker)
    for entry in heat:
        race.enter_within(entry)
    race.run(rounds)
    rows: list[Row] = []
    if peers:
        rows += [peer_row(race, kind, name) for kind in kinds for name in ALLOCATORS]
    rows += [budget_row(race, entry) for entry in heat]
    race.close()
    return rows


def budgets(subject: Subject, args: argparse.Namespace) -> dict[str, int]:
    """Translate --at into bytes; checkpointing's own peak comes along with it."""
    found: dict[str, int] = {}
    for at in args.at.split(","):
        if at == "smallest":
            found[at] = subject.smallest
        else:
            found[f"{at} %"] = round(subject.plain_peak * float(at) / 100)
    if "checkpoint" in args.against:
        with subject.start(checkpoint=True) as worker:
            peaks = worker.ask(do="step", count=WARM_UP)["peaks"]
        found["checkpoint's"] = max(peaks)
    for at, budget in list(found.items()):
        if budget < subject.smallest:
            print(
                f"{subject.name} at {at}: {budget / MIB:.1f} MiB is below the smallest "
                f"budget, {subject.smallest / MIB:.1f} MiB"
            )
            del found[at]
    return found


def sweep(subject: Subject, args: argparse.Namespace) -> list[Row]:
    """Train from the plain peak down to the smallest budget, 5 % at a time."""
    seconds = subject.measure()
    step = subject.plain_peak / 20
    ladder = [round(subject.plain_peak - i * step) for i in range(20)]
    ladder = [budget for budget in ladder if budget > subject.smallest]
    ladder.append(subject.smallest)
    minutes = len(ladder) * (args.steps * 1.5 * seconds + 8) / 60
    print(f"{subject.name}: {len(ladder)} budgets, about {minutes:.0f} minutes")
    sys.stdout.flush()
    with subject.start() as worker:
        count = max(args.steps, LONGER)
        plain = worker.ask(do="step", count=count)["losses"]
    rows = [sweep_row(subject, budget, plain[: args.steps]) for budget in ladder[:-1]]
    return [*rows, sweep_row(subject, subject.smallest, plain)]


def sweep_row(subject: Subject, budget: int, plain: list[str]) -> Row:
    """Train within one budget in a fresh process, and say what is wrong if it is."""
    percent = 100 * budget / subject.plain_peak
    row = subject.row(policy=subject.policy, at=f"{percent:.1f} %", budget_bytes=budget)
    try:
        with subject.start_within(budget) as worker:
            losses = worker.ask(do="step", count=len(plain))["losses"]
            report = worker.ask(do="leave")
    except (harness.WorkerFailed, harness.WorkerDied) as error:
        return {**row, "exact": False, "fault": str(error)}
    for name in ("peak", "first_peak", "swapped", "recomputed"):
        row[f"{name}_bytes"] = report[f"{name}_bytes"]
    row["exact"] = losses == plain
    if report["peak_bytes"] > budget:
        row["fault"] = f"peak {report['peak_bytes'] - budget} bytes over the budget"
    elif report["first_peak_bytes"] > 1.05 * budget:
        over = report["first_peak_bytes"] / budget
        row["fault"] = f"first peak {over:.3f} times the budget"
    return row


def check_counter(subject: Subject, args: argparse.Namespace) -> list[Row]:
    """Compare lowtide's counter with torch.profiler's memory events."""
    rows = []
    with subject.start() as worker:
        plain_peak = max(worker.ask(do="step", count=WARM_UP)["peaks"])
    half_way = (plain_peak + subject.ask_smallest()) // 2
    for budget in (None, {"size": half_way, "policy": subject.policy}):
        with Worker("contestant.py") as worker:
            found = worker.ask(
                do="profile", steps=args.steps, budget=budget, **subject.options
            )
        counted, profiled = found["counted_bytes"], found["profiled_bytes"]
        error = counted / profiled - 1
        row: Row = {
            "model": subject.name,
            "policy": subject.policy if budget else "plain",
            "counted_bytes": counted,
            "profiled_bytes": profiled,
            "relative_error": error,
        }
        if abs(error) > 0.01:
            row["fault"] = f"the counters differ by {100 * error:.2f} %"
        rows.append(row)
    return rows


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*models.SIZES, "all", *dynamic.SIZES, "dynamic"]
    parser.add_argument("--model", choices=names, default="resnet50")
    parser.add_argument("--at", default="100,75,50,35,smallest", help="percentages")
    parser.add_argument(
        "--against", default="plain", help="plain, checkpoint and policies, by commas"
    )
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--check-counter", action="store_true")
    parser.add_argument("--quick", action="store_true", help="small models")
    parser.add_argument("--set", action="append", default=[], metavar="FLAG=NUMBER")
    parser.add_argument("--rounds", type=int, default=harness.PAIRS)
    parser.add_argument("--steps", type=int, default=5, help="of a sweep's budget")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    args.against = ["plain", *args.against.split(",")]
    for name in args.against:
        if name not in (*KINDS, *RULES):
            parser.error(f"--against {name}: give {', '.join((*KINDS, *RULES))}")
    pairs = (text.partition("=") for text in args.set)
    args.set = {name: float(number) for name, _, number in pairs}
    return args


def main() -> int:
    """Measure; the exit status is 1 where a run is not exact or a budget not kept."""
    args = arguments()
    groups = {"all": list(models.SIZES), "dynamic": list(dynamic.SIZES)}
    chosen = groups.get(args.model, [args.model])
    rows: list[Row] = []
    for name in chosen:
        subject = Subject(name, args)
        if args.check_counter:
            found, columns = check_counter(subject, args), None
        elif args.sweep:
            found, columns = sweep(subject, args), COLUMNS
        else:
            found, columns = compare(subject, args), COLUMNS
        harness.print_table(found, columns or list(found[0]))
        rows += found
        harness.write_rows(args.json, rows)
    faults = [row for row in rows if row.get("fault") or row.get("exact") is False]
    for row in faults:
        print(f"FAULT {row['model']} {row.get('at')}: {row.get('fault', 'not exact')}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
