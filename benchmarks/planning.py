"""How long does it take to plan an iteration of a large model, for all budgets at once?

    python benchmarks/planning.py            # ResNet-101, GPT-2, a 48-layer transformer
    python benchmarks/planning.py --only gpt2 --json FILE

Iterations are recorded without their memory and their work, with the seconds of a
device from the catalogue. Seconds are of the processor, so that other processes do not
count. Planning takes at most 5 s each; a further budget takes a look at the plans that
are there. More memory may not get a slower plan.
"""

import argparse
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import process_time

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import lowtide
from benchmarks import harness
from lowtide.elsewhere.retime import lanes_of
from lowtide.hardware import find_hardware
from lowtide.planner.planner import Frontier
from lowtide.planner.recompute import Lineage
from lowtide.scheduler.director import Lanes
from lowtide.simulator.forecast import forecast, parents_of
from lowtide.trace import Graph

FIELDS = (
    "model",
    "operators",
    "values",
    "plan_seconds",
    "budget_seconds",
    "budget_part",
    "slowdown",
    "peak_bytes",
    "plain_peak_bytes",
)
MOST_SECONDS = 5.0
PARTS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
GPU = "a100-80g"

Step = Callable[[], object]


def resnet101() -> Step:
    """Build ResNet-101 on 32 pictures."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(depths=[3, 4, 23, 3], num_labels=1000)
    model = ResNetForImageClassification(config)
    x, y = torch.empty(32, 3, 224, 224), torch.zeros(32, dtype=torch.long)
    return trains(model, lambda: model(pixel_values=x, labels=y).loss)


def gpt2() -> Step:
    """Build GPT-2 of 12 layers on 8 texts of 1,024 tokens."""
    return _transformer(layers=12, width=768, heads=12)


def transformer48() -> Step:
    """Build a transformer of 48 layers on 8 texts of 1,024 tokens."""
    return _transformer(layers=48, width=1600, heads=25)


def _transformer(*, layers: int, width: int, heads: int) -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, use_cache=False)
    model = GPT2LMHeadModel(config)
    tokens = torch.zeros(8, 1024, dtype=torch.long)
    return trains(model, lambda: model(input_ids=tokens, labels=tokens).loss)


def trains(model: torch.nn.Module, loss_of: Callable[[], torch.Tensor]) -> Step:
    """Return what trains a model once."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()

    return step


MODELS: dict[str, Callable[[], Step]] = {
    "resnet101": resnet101,
    "gpt2": gpt2,
    "transformer48": transformer48,
}


def plan(name: str, graph: Graph, lanes: Lanes) -> list[harness.Row]:
    """Plan one iteration for several budgets; returns a row each."""
    trace, parents = forecast(graph), parents_of(graph)
    start = process_time()
    frontier = Frontier(trace, lanes, lineage=Lineage.of(parents))
    frontier.at(int(PARTS[0] * trace.plain_peak_bytes))
    plan_seconds = process_time() - start
    rows = []
    for part in PARTS:
        start = process_time()
        made = frontier.at(int(part * trace.plain_peak_bytes))
        rows.append(
            {
                "model": name,
                "operators": len(trace.ops),
                "values": len(trace.values),
                "plan_seconds": plan_seconds,
                "budget_seconds": process_time() - start,
                "budget_part": part,
                "slowdown": made.slowdown if made.fits else None,
                "peak_bytes": made.peak_bytes,
                "plain_peak_bytes": trace.plain_peak_bytes,
            }
        )
    return rows


def faults(rows: list[harness.Row]) -> list[str]:
    """List what was missed."""
    found = []
    for row in rows:
        if row["plan_seconds"] > MOST_SECONDS:
            found.append(f"{row['model']}: {row['plan_seconds']:.1f} s of planning")
    for before, after in pairwise(rows):
        one, other = before["slowdown"], after["slowdown"]
        if one and other and before["model"] == after["model"] and one > other + 1e-9:
            found.append(f"{before['model']}: {before['budget_part']} is slower")
    return sorted(set(found))


def main() -> int:
    """Record, plan and print; the exit status is 1 where a check was missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=MODELS, action="append")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    hardware = find_hardware(GPU)
    lanes = lanes_of(hardware)
    rows: list[harness.Row] = []
    for name in args.only or MODELS:
        graph = lowtide.record(build=MODELS[name], fake=True, hardware=hardware)
        rows += plan(name, graph, lanes)
    harness.print_table(rows, list(FIELDS))
    harness.write_rows(args.json, rows)
    missed = faults(rows)
    for text in missed:
        print(f"MISSED: {text}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
