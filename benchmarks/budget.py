"""Measure memory and time at several budgets, against plain PyTorch and checkpointing.

    python benchmarks/budget.py --model resnet50 --at 100,75,50,35,smallest
    python benchmarks/budget.py --model gpt2 --set batch=8 --at 50
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
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import harness, models
from benchmarks.harness import Row, Worker
from tests.compare import differing

COLUMNS = [
    "model",
    "policy",
    "at",
    "allocator",
    "budget_bytes",
    "plain_peak_bytes",
    "static_bytes",
    "floor_bytes",
    "smallest_bytes",
    "peak_bytes",
    "first_peak_bytes",
    "time_ratio",
    "same_allocator",
    "against_checkpoint",
    "exact",
    "swapped_bytes",
    "recomputed_bytes",
]
WARM_UP = 3  # steps before the first timed one; a budget is learnt in the first two
LONGER = 5  # steps at the smallest budget, whatever --steps says
HOPELESS = 1 << 12  # bytes that no step fits into
ALLOCATORS = ("torch", "lowtide")
PLAIN = "plain on torch"  # plain PyTorch as it comes
MIB = 1 << 20


class Subject:
    """A benchmark model in one size, and what is known of it."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        self.policy: str = args.policy
        self.options = {"model": name, "quick": args.quick, "flags": args.set}
        self.plain_peak = self.static = self.floor = self.smallest = 0

    def start(self, *, allocator: str = "lowtide", checkpoint: bool = False) -> Worker:
        """Start a contestant in a fresh process."""
        worker = Worker("contestant.py")
        worker.ask(
            do="build", allocator=allocator, checkpoint=checkpoint, **self.options
        )
        return worker

    def start_within(self, budget_bytes: int, **options: Any) -> Worker:
        """Start a contestant that trains within a budget."""
        worker = self.start()
        worker.ask(
            do="enter", **{"size": budget_bytes, "policy": self.policy, **options}
        )
        return worker

    def measure(self) -> float:
        """Find the plain peak, the floor and the smallest budget; return s a step."""
        with self.start() as worker:
            plain = worker.ask(do="step", count=WARM_UP)
        self.plain_peak = max(plain["peaks"])
        with self.start_within(
            4 * self.plain_peak, policy="keep", measure_floor=True
        ) as worker:
            worker.ask(do="step", count=WARM_UP)
            report = worker.ask(do="leave")
        self.floor, self.static = report["floor_bytes"], report["static_bytes"]
        self.smallest = self.ask_smallest()
        return float(median(plain["seconds"]))

    def ask_smallest(self) -> int:
        """Take the smallest budget from the error of one that is far too small."""
        with self.start_within(HOPELESS) as worker:
            try:
                worker.ask(do="step", count=WARM_UP)
                worker.ask(do="leave")
            except harness.WorkerFailed as error:
                smallest = error.reply.get("smallest_bytes")
                if smallest is None:
                    raise SystemExit(
                        f"{self.name}: no smallest budget: {error}"
                    ) from None
                return int(smallest)
        raise SystemExit(f"{self.name} trained within {HOPELESS} bytes")

    def row(self, **cells: Any) -> Row:
        """Make a row that holds what is known of the model, and the given cells."""
        known = {
            "model": self.name,
            "allocator": "lowtide",
            "plain_peak_bytes": self.plain_peak,
            "static_bytes": self.static,
            "floor_bytes": self.floor,
            "smallest_bytes": self.smallest,
        }
        return {**dict.fromkeys(COLUMNS), **known, **cells}


class Race:
    """All contestants of one model, stepping in turn."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.workers: dict[str, Worker] = {}
        self.budgets: dict[str, int] = {}
        self.losses: dict[str, list[str]] = {}
        self.peaks: dict[str, list[int]] = {}
        self.seconds: dict[str, list[float]] = {}
        self.states: dict[str, dict[str, str]] = {}
        self.faults: dict[str, str] = {}

    def enter(self, name: str, worker: Worker, budget_bytes: int | None = None) -> None:
        """Add a contestant."""
        self.workers[name] = worker
        self.losses[name], self.peaks[name] = [], []
        if budget_bytes is not None:
            self.budgets[name] = budget_bytes

    def step(self, name: str) -> float:
        """Let a contestant step; one that failed stands still."""
        if name in self.faults:
            return float("nan")
        try:
            reply = self.workers[name].ask(do="step")
        except (harness.WorkerFailed, harness.WorkerDied) as error:
            self.faults[name] = str(error)
            print(f"{self.subject.name}, {name}: {error}", flush=True)
            return float("nan")
        self.losses[name] += reply["losses"]
        self.peaks[name] += reply["peaks"]
        return float(reply["seconds"][0])

    def run(self, rounds: int) -> None:
        """Warm up, then step in turn."""
        for name in self.workers:
            for _ in range(WARM_UP):
                self.step(name)
        turns = {name: (lambda name=name: self.step(name)) for name in self.workers}
        self.seconds = harness.take_turns(turns, rounds=rounds, seed=0)
        for name, worker in self.workers.items():
            if name not in self.faults:
                self.states[name] = worker.ask(do="state")

    def faster(self, kind: str) -> str:
        """Name the allocator on which a kind of contestant is faster."""
        names = [f"{kind} on {allocator}" for allocator in ALLOCATORS]
        return min(names, key=lambda name: median(self.seconds[name]))

    def ratio(self, name: str, against: str) -> float:
        """Return the median ratio of a contestant's times to another's."""
        return harness.median_ratio(self.seconds[name], self.seconds[against])

    def inexact(self, name: str) -> str | None:
        """Say what differs from plain PyTorch: losses, or the state at the end."""
        plain = "plain on lowtide"
        pairs = zip(self.losses[plain], self.losses[name], strict=True)
        steps = [step for step, (a, b) in enumerate(pairs) if a != b]
        if steps:
            return f"the losses differ from step {steps[0]} on"
        names = differing(self.states[plain], self.states[name])
        return f"{len(names)} differ, such as {names[0]}" if names else None


def compare(subject: Subject, args: argparse.Namespace) -> list[Row]:
    """Race the budgets against plain PyTorch and, where asked for, checkpointing."""
    seconds = subject.measure()
    race = Race(subject)
    kinds = ["plain", *(["checkpoint"] if "checkpoint" in args.against else [])]
    for kind in kinds:
        for allocator in ALLOCATORS:
            worker = subject.start(allocator=allocator, checkpoint=kind == "checkpoint")
            race.enter(f"{kind} on {allocator}", worker)
    rows: list[Row] = []
    for at, budget in budgets(subject, args, race).items():
        if budget < subject.smallest:
            print(
                f"{subject.name} at {at}: {budget / MIB:.1f} MiB is below the smallest "
                f"budget, {subject.smallest / MIB:.1f} MiB"
            )
            continue
        race.enter(at, subject.start_within(budget), budget)
    minutes = 1.3 * seconds * (args.rounds + WARM_UP) * len(race.workers) / 60
    print(f"{subject.name}: {seconds:.2f} s a step, about {minutes:.0f} minutes")
    sys.stdout.flush()
    race.run(args.rounds)
    rows += [peer_row(race, kind, name) for kind in kinds for name in ALLOCATORS]
    rows += [budget_row(race, at) for at in race.budgets]
    for worker in race.workers.values():
        worker.close()
    return rows


def budgets(subject: Subject, args: argparse.Namespace, race: Race) -> dict[str, int]:
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
    return found


def peer_row(race: Race, kind: str, allocator: str) -> Row:
    """Describe plain PyTorch or checkpointing on one of the allocators."""
    name = f"{kind} on {allocator}"
    peaks = race.peaks[f"{kind} on lowtide"]
    losses = race.losses[f"{kind} on lowtide"]
    return race.subject.row(
        policy=kind,
        allocator=allocator,
        peak_bytes=max(peaks[1:]),
        first_peak_bytes=peaks[0],
        time_ratio=race.ratio(name, PLAIN),
        same_allocator=race.ratio(name, f"plain on {allocator}"),
        exact=losses == race.losses["plain on lowtide"],
    )


def budget_row(race: Race, at: str) -> Row:
    """Describe a contestant that trained within a budget."""
    subject = race.subject
    row = subject.row(policy=subject.policy, at=at, budget_bytes=race.budgets[at])
    if at in race.faults:
        return {**row, "exact": False, "fault": race.faults[at]}
    report = race.workers[at].ask(do="leave")
    row.update(
        peak_bytes=report["peak_bytes"],
        first_peak_bytes=report["first_peak_bytes"],
        time_ratio=race.ratio(at, PLAIN),
        same_allocator=race.ratio(at, "plain on lowtide"),
        swapped_bytes=report["swapped_bytes"],
        recomputed_bytes=report["recomputed_bytes"],
        exposed_seconds=report["exposed_seconds"],
        replay_seconds=report["replay_seconds"],
    )
    inexact = race.inexact(at)
    row["exact"] = inexact is None
    if inexact is not None:
        row["fault"] = inexact
    if "checkpoint on lowtide" in race.workers:
        row["against_checkpoint"] = race.ratio(at, race.faster("checkpoint"))
    return row


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
    names = [*models.SIZES, "all"]
    parser.add_argument("--model", choices=names, default="resnet50")
    parser.add_argument("--at", default="100,75,50,35,smallest", help="percentages")
    parser.add_argument("--against", default="plain", help="plain,checkpoint")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--check-counter", action="store_true")
    parser.add_argument("--quick", action="store_true", help="small models")
    parser.add_argument("--set", action="append", default=[], metavar="FLAG=NUMBER")
    parser.add_argument("--rounds", type=int, default=harness.PAIRS)
    parser.add_argument("--steps", type=int, default=5, help="of a sweep's budget")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    pairs = (text.partition("=") for text in args.set)
    args.set = {name: float(number) for name, _, number in pairs}
    return args


def main() -> int:
    """Measure; the exit status is 1 where a run is not exact or a budget not kept."""
    args = arguments()
    chosen = list(models.SIZES) if args.model == "all" else [args.model]
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
