"""Train on sequences of many lengths: is each planned once, and then found again?

    python benchmarks/lengths.py                     # 1,000 steps, 64 lengths
    python benchmarks/lengths.py --quick             # 200 steps, 8 lengths
    python benchmarks/lengths.py --json FILE --budget 50

A small GPT, whose batches have another length at every step (drawn from a seed), within
a part of the peak of the longest. Every length has a plan of its own. The checks:

- the peak of no step exceeds the budget, the first included;
- of the iterations after the first fifth, more than 95 % find the plan of their length;
- no step takes more than 3 times the median of its length.

Times want a quiet machine: a step that somebody else delayed counts against lowtide.
"""

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import harness
from lowtide.runtime import allocator
from lowtide.runtime.session import Session
from lowtide.timeline import Timeline
from lowtide.units import format_bytes

FIELDS = ("step", "length", "seconds", "found")
SIZE = {"width": 192, "layers": 4, "batch": 8}
SHORTEST = 32
STRIDE = 4  # between one length and the next
MOST_OVER_MEDIAN = 3.0
LEAST_FOUND = 0.95
LEARNING = 0.2  # of the steps, in which plans may be missing


@dataclass(frozen=True, slots=True)
class Step:
    """What one step took."""

    length: int
    seconds: float
    found: bool  # the plan of this length was there


class Trainer:
    """A small GPT, trained on made-up text of any length."""

    def __init__(self, longest: int, *, width: int, layers: int, batch: int) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(
            n_layer=layers,
            n_embd=width,
            n_head=4,
            n_positions=longest,
            vocab_size=512,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
        self.model = GPT2LMHeadModel(config).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batch = batch

    def step(self, length: int) -> None:
        """Train on one batch."""
        tokens = torch.randint(512, (self.batch, length))
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def plain_peak(trainer: Trainer, length: int) -> int:
    """Measure what two steps of a length need without lowtide."""
    counter = allocator.install()
    trainer.step(length)
    counter.reset_peak()
    trainer.step(length)
    return int(counter.peak.value)


def train(
    trainer: Trainer, lengths: Sequence[int], budget_bytes: int
) -> tuple[list[Step], Timeline]:
    """Train within a budget; returns what every step took, and the report."""
    steps = []
    with Session(budget_bytes) as session:
        for length in lengths:
            repeated = session.iterations.repeated
            start = perf_counter()
            trainer.step(length)
            seconds = perf_counter() - start
            steps.append(Step(length, seconds, session.iterations.repeated > repeated))
    return steps, session.report()


def over_median(steps: Sequence[Step]) -> list[float]:
    """Divide the time of every step by the median of its length."""
    by_length: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        by_length[step.length].append(step.seconds)
    typical = {length: median(seconds) for length, seconds in by_length.items()}
    return [step.seconds / typical[step.length] for step in steps]


def judge(steps: Sequence[Step], report: Timeline) -> list[str]:
    """Print the figures; returns what was missed."""
    learnt = steps[int(LEARNING * len(steps)) :]
    rate = sum(step.found for step in learnt) / len(learnt)
    ratios = over_median(steps)
    slowest = max(range(len(steps)), key=ratios.__getitem__)
    nearly_all = sorted(ratios)[int(0.99 * len(ratios))]
    peak = max(report.first_peak_bytes, report.peak_bytes)
    print(
        f"budget {format_bytes(report.budget_bytes)}, highest peak of any step "
        f"{format_bytes(peak)}, first step {format_bytes(report.first_peak_bytes)}\n"
        f"plans found: {rate:.1%} of the last {len(learnt)} steps\n"
        f"slowest step: number {slowest}, {ratios[slowest]:.2f} x the median of its "
        f"length; 99 % of steps within {nearly_all:.2f} x\n"
        f"swapped {format_bytes(report.swapped_bytes)}, recomputed "
        f"{format_bytes(report.recomputed_bytes)} in the last step"
    )
    missed = []
    if peak > report.budget_bytes:
        missed.append("the budget was exceeded")
    if rate <= LEAST_FOUND:
        missed.append(f"fewer than {LEAST_FOUND:.0%} of the plans were found")
    if ratios[slowest] > MOST_OVER_MEDIAN:
        missed.append(f"a step took more than {MOST_OVER_MEDIAN:g} x its median")
    return missed


def main() -> int:
    """Run the training; the exit status is 1 where a check was missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lengths", type=int, default=64, help="how many")
    parser.add_argument("--budget", type=int, default=60, help="%% of the plain peak")
    parser.add_argument("--quick", action="store_true", help="200 steps, 8 lengths")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.lengths = min(args.steps, 200), min(args.lengths, 8)
    choices = [SHORTEST + STRIDE * i for i in range(args.lengths)]
    size = {"width": 64, "layers": 2, "batch": 4} if args.quick else SIZE
    trainer = Trainer(choices[-1], **size)
    budget_bytes = plain_peak(trainer, choices[-1]) * args.budget // 100
    draw = random.Random(args.seed)
    lengths = [draw.choice(choices) for _ in range(args.steps)]
    steps, report = train(trainer, lengths, budget_bytes)
    missed = judge(steps, report)
    rows = [
        {"step": i, "length": s.length, "seconds": s.seconds, "found": s.found}
        for i, s in enumerate(steps)
    ]
    harness.write_rows(args.json, rows)
    for text in missed:
        print(f"MISSED: {text}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
