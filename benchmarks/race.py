"""Trainings that step in turn: plain, checkpointed, and within budgets by policies.

Each has a process of its own, and all of them step once a round, in a new order every
round, so that whatever slows the machine slows them alike. A published policy that
cannot keep to a budget, or takes far too long, stands still from then on, and its row
says so.
"""

import argparse
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks import harness
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
    "deciding_fraction",
    "remark",
]
WARM_UP = 3  # steps before the first timed one; a budget is learnt in the first two
HOPELESS = 1 << 12  # bytes that no step fits into
ALLOCATORS = ("torch", "lowtide")
PLAIN = "plain on torch"  # plain PyTorch as it comes
SAME = "plain on lowtide"
THRASHING = 4.0  # times as long as plain: a published policy then gives up
WITHIN = 0.02  # of the fastest policy


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

    def measure(self, steps: int = WARM_UP) -> float:
        """Find the plain peak, the floor and the smallest budget; return s a step."""
        with self.start() as worker:
            plain = worker.ask(do="step", count=steps)
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


@dataclass(frozen=True, slots=True)
class Entry:
    """Who trains within a budget."""

    policy: str
    at: str
    budget_bytes: int

    @property
    def name(self) -> str:
        """What it is called in a race."""
        return f"{self.policy} at {self.at}"


class Race:
    """All contestants of one model, stepping in turn."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.workers: dict[str, Worker] = {}
        self.entries: dict[str, Entry] = {}
        self.losses: dict[str, list[str]] = {}
        self.peaks: dict[str, list[int]] = {}
        self.seconds: dict[str, list[float]] = {}
        self.states: dict[str, dict[str, str]] = {}
        self.reports: dict[str, Row] = {}
        self.faults: dict[str, str] = {}

    def enter(self, name: str, worker: Worker) -> None:
        """Add a contestant."""
        self.workers[name] = worker
        self.losses[name], self.peaks[name] = [], []

    def enter_within(self, entry: Entry) -> None:
        """Add a contestant that trains within a budget."""
        worker = self.subject.start_within(entry.budget_bytes, policy=entry.policy)
        self.entries[entry.name] = entry
        self.enter(entry.name, worker)

    def step(self, name: str) -> float:
        """Let a contestant step; one that failed stands still."""
        if name in self.faults:
            return float("nan")
        try:
            reply = self.workers[name].ask(do="step")
        except (harness.WorkerFailed, harness.WorkerDied) as error:
            self.fail(name, str(error))
            return float("nan")
        self.losses[name] += reply["losses"]
        self.peaks[name] += reply["peaks"]
        return float(reply["seconds"][0])

    def fail(self, name: str, why: str) -> None:
        """Let a contestant stand still from now on."""
        self.faults[name] = why
        print(f"{self.subject.name}, {name}: {why}", flush=True)

    def run(self, rounds: int) -> None:
        """Warm up, then step in turn."""
        plain = self.warm_up(SAME)
        for name in self.workers:
            if name == SAME:
                continue
            last = self.warm_up(name)
            if self.published(name) and last > THRASHING * plain:
                self.fail(name, f"gave up: a step takes {last / plain:.1f} times plain")
        turns = {name: (lambda name=name: self.step(name)) for name in self.workers}
        self.seconds = harness.take_turns(turns, rounds=rounds, seed=0)
        for name, worker in self.workers.items():
            if name in self.faults:
                continue
            if name in self.entries:  # before the digests, which take memory too
                self.reports[name] = worker.ask(do="report")
            self.states[name] = worker.ask(do="state")

    def warm_up(self, name: str) -> float:
        """Run a contestant's first steps; return the seconds of the last one."""
        return [self.step(name) for _ in range(WARM_UP)][-1]

    def published(self, name: str) -> bool:
        """Say whether a contestant is there to be compared with only."""
        entry = self.entries.get(name)
        return entry is not None and entry.policy != self.subject.policy

    def close(self) -> None:
        """End all processes."""
        for worker in self.workers.values():
            worker.close()

    def faster(self, kind: str) -> str:
        """Name the allocator on which a kind of contestant is faster."""
        names = [f"{kind} on {allocator}" for allocator in ALLOCATORS]
        return min(names, key=lambda name: median(self.seconds[name]))

    def ratio(self, name: str, against: str) -> float:
        """Return the median ratio of a contestant's times to another's."""
        return harness.median_ratio(self.seconds[name], self.seconds[against])

    def inexact(self, name: str) -> str | None:
        """Say what differs from plain PyTorch: losses, or the state at the end."""
        pairs = zip(self.losses[SAME], self.losses[name], strict=True)
        steps = [step for step, (a, b) in enumerate(pairs) if a != b]
        if steps:
            return f"the losses differ from step {steps[0]} on"
        names = differing(self.states[SAME], self.states[name])
        return f"{len(names)} differ, such as {names[0]}" if names else None


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
        exact=losses == race.losses[SAME],
    )


def budget_row(race: Race, entry: Entry) -> Row:
    """Describe a contestant that trained within a budget."""
    name = entry.name
    row = race.subject.row(
        policy=entry.policy, at=entry.at, budget_bytes=entry.budget_bytes
    )
    if name not in race.faults:
        try:
            race.workers[name].ask(do="leave")
        except (harness.WorkerFailed, harness.WorkerDied) as error:
            race.fail(name, str(error))
    if name in race.faults:
        verdict = "remark" if race.published(name) else "fault"
        return {**row, verdict: race.faults[name]}
    report = race.reports[name]
    for key in ("peak", "first_peak", "swapped", "recomputed"):
        row[f"{key}_bytes"] = report[f"{key}_bytes"]
    row.update(
        time_ratio=race.ratio(name, PLAIN),
        same_allocator=race.ratio(name, SAME),
        exposed_seconds=report["exposed_seconds"],
        replay_seconds=report["replay_seconds"],
        plan_seconds=report["plan_seconds"],
        deciding_fraction=report["decide_seconds"] / median(race.seconds[name]),
    )
    over = report["peak_bytes"] - entry.budget_bytes
    if over > 0:
        verdict = "remark" if race.published(name) else "fault"
        row[verdict] = f"peak {over} bytes over the budget"
    inexact = race.inexact(name)
    row["exact"] = inexact is None
    if inexact is not None:
        row["fault"] = inexact
    if "checkpoint on lowtide" in race.workers:
        row["against_checkpoint"] = race.ratio(name, race.faster("checkpoint"))
    return row


def place(rows: list[Row], policy: str, at: str) -> str:
    """Say whether a policy is the fastest of those that keep to a budget, or nearly."""
    kept = {
        row["policy"]: row["same_allocator"]
        for row in rows
        if row["at"] == at and row["exact"] and not row["remark"] and "fault" not in row
    }
    if policy not in kept:
        return f"{policy} at {at}: failed"
    fastest = min(kept, key=lambda name: kept[name])
    verdict = "yes" if kept[policy] <= kept[fastest] + WITHIN else "no"
    return (
        f"{policy} at {at} fastest or within {WITHIN}: {verdict} "
        f"({kept[policy]:.3f}; {fastest} {kept[fastest]:.3f})"
    )
