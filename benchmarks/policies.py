"""Every policy over whole iterations on a virtual clock: slow-down by budget.

    python benchmarks/policies.py                       # made-up networks, no torch
    python benchmarks/policies.py --record              # the benchmark models as well
    python benchmarks/policies.py --load graph.npz      # graphs that were kept
    python benchmarks/policies.py --record --keep DIR   # keep what was recorded

Budgets are parts of the plain peak. T: the step took twice as long or more. O: it did
not fit. What a step takes is simulated (`lowtide.simulator`): operators as recorded,
copies at `--write` and `--read` bytes per second beside them, no time for deciding;
that is measured in real seconds and given as a part of the step. `auto`, `swap-only`
and `recompute-only` follow a plan of the joint planner. Recorded iterations run twice:
with the seconds measured here, and with those of a GPU's roofline. Below each table
stands whether `dtr` lies in the band of its authors' own results, for that kind of
network and for all of theirs, and whether `auto` is the fastest, or within 0.02 of it,
at 0.75, 0.5 and 0.35.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import harness
from lowtide.planner.planner import Frontier
from lowtide.planner.recompute import Lineage
from lowtide.planner.schedule import Allowed
from lowtide.scheduler.director import RULES, Lanes, Rules
from lowtide.simulator.forecast import forecast, parents_of
from lowtide.simulator.networks import NETWORKS, on_device
from lowtide.simulator.simulator import Outcome, Plan, planned_budget, simulate
from lowtide.trace import Graph, load_graph, save_graph

COMPARED = [name for name in RULES if name not in ("keep", "random")]
BUDGETS = (0.9, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4, 0.35, 0.3)
JUDGED = (0.75, 0.5, 0.35)
WITHIN = 0.02
THRASHED = 2.0
GPU = Lanes(12e9, 12e9)  # DELTA's 0.35 x 32 GiB/s, for the made-up networks

# h_DTR_eq in its authors' simulator, on their logs: the least and the most slow-down at
# 0.9, 0.8, 0.7, 0.6, 0.5 and 0.4 of the peak. Convolutional: DenseNet-121, Inception-v4
# and ResNet-32; transformer and U-Net have one log each (U-Net did not run at 0.4).
BAND_BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
BANDS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "convolutional": (
        (1.01, 1.02, 1.04, 1.07, 1.09, 1.14),
        (1.03, 1.06, 1.10, 1.14, 1.18, 1.29),
    ),
    "transformer": (
        (1.01, 1.02, 1.03, 1.04, 1.06, 1.09),
        (1.01, 1.02, 1.03, 1.04, 1.06, 1.09),
    ),
    "unet": (
        (1.03, 1.06, 1.08, 1.15, 1.16),
        (1.03, 1.06, 1.08, 1.15, 1.16),
    ),
    "all": (
        (1.01, 1.01, 1.03, 1.04, 1.06, 1.08),
        (1.03, 1.06, 1.10, 1.15, 1.18, 1.29),
    ),
}
EVERY_KIND = "all"
KINDS = {
    "resnet": "convolutional",
    "resnet50": "convolutional",
    "transformer": "transformer",
    "gpt2": "transformer",
    "bert": "transformer",
    "swin": "transformer",
    "unet": "unet",
}
AROUND = 0.03  # a band: most bands are one log, and all figures are rounded
# Sizes at which activations outweigh parameters, and work the launch of an operator, as
# in those logs; the other flags are those of the models' quick sizes.
RECORDED: dict[str, dict[str, int]] = {
    "resnet50": {"batch": 24, "width": 32},
    "gpt2": {"length": 256, "width": 256},
    "bert": {"length": 256, "width": 256},
    "swin": {"batch": 8, "width": 48},
    "unet": {"batch": 8, "pixels": 128, "width": 16},
}

Cells = dict[str, dict[float, Outcome]]  # by policy, by budget


def recorded(names: list[str]) -> Iterator[tuple[str, Graph]]:
    """Record one step of each benchmark model, in its quick size."""
    from benchmarks.models import build
    from lowtide.recorder.graph import record
    from lowtide.runtime import allocator

    meter = allocator.install()
    for name in names:
        training = build(name, quick=True, **RECORDED[name])
        allocator.adopt(meter)
        yield name, record(training.step, repeat=3, meter=meter)


def run_all(graph: Graph, budgets: tuple[float, ...], lanes: Lanes) -> Cells:
    """Run every policy at every budget; those that plan know the whole iteration."""
    sizes = {part: int(part * graph.plain_peak_bytes) for part in budgets}
    cells: Cells = {}
    for policy in COMPARED:
        rules = RULES[policy]
        plan = planner_of(graph, lanes, rules) if rules.planned else lambda _: None
        cells[policy] = {
            part: simulate(graph, policy, n, lanes, plan=plan(planned_budget(graph, n)))
            for part, n in sizes.items()
        }
    return cells


def planner_of(graph: Graph, lanes: Lanes, rules: Rules) -> Callable[[int], Plan]:
    """Return what plans the iteration for a budget, as the run time does."""
    # the simulator does not let copies disturb the compute
    allowed = Allowed(swap=rules.swap, recompute=rules.recompute, copy_tax=0.0)
    lineage = Lineage.of(parents_of(graph))
    return Frontier(forecast(graph), lanes, allowed, lineage=lineage).at


def cell(outcome: Outcome) -> str:
    """Write an outcome as DTR's authors do."""
    if outcome.thrashed or (outcome.fits and outcome.slowdown >= THRASHED):
        return "T"
    return f"{outcome.slowdown:.2f}" if outcome.fits else "O"


def print_cells(cells: Cells) -> None:
    """Print slow-downs by budget, and what deciding cost at a half."""
    rows = []
    for policy, outcomes in cells.items():
        row: harness.Row = {"policy": policy}
        row |= {str(part): cell(outcome) for part, outcome in outcomes.items()}
        worst = max(o.deciding_seconds / o.plain_seconds for o in outcomes.values())
        row["deciding"] = f"{worst:.1%}"
        victims = sum(o.victims for o in outcomes.values())
        scores = sum(o.evaluations for o in outcomes.values())
        row["scores/victim"] = f"{scores / victims:.1f}" if victims else None
        rows.append(row)
    harness.print_table(rows, list(rows[0]))


def place_dtr(name: str, cells: Cells) -> str:
    """Say where `dtr` lies against its authors' results."""
    kind = KINDS.get(name.split()[0], EVERY_KIND)
    return "dtr: " + "; ".join(
        f"{label} {_against(cells['dtr'], *BANDS[label])}"
        for label in dict.fromkeys([kind, EVERY_KIND])
    )


def _against(
    outcomes: dict[float, Outcome], low: tuple[float, ...], high: tuple[float, ...]
) -> str:
    """List the budgets at which outcomes leave a band."""
    words = []
    for part, least, most in zip(BAND_BUDGETS, low, high, strict=False):
        outcome = outcomes[part]
        found = f"{part}: {cell(outcome)}"
        if not outcome.fits or outcome.slowdown > most + AROUND:
            words.append(f"{found} above {most:.2f}")
        elif outcome.slowdown < least - AROUND:
            words.append(f"{found} below {least:.2f}")
    return ("outside at " + ", ".join(words)) if words else "in the band"


def place_auto(cells: Cells) -> str:
    """Say whether `auto` is the fastest, or nearly."""
    words = []
    for part in JUDGED:
        fastest, best = min(
            ((o[part].slowdown, p) for p, o in cells.items() if o[part].fits),
            default=(0.0, "nobody"),
        )
        ours = cells["auto"][part]
        if best == "nobody":
            words.append(f"{part}: nobody runs")
        elif not ours.fits:
            words.append(f"{part}: {cell(ours)}, {best} {fastest:.2f}")
        elif ours.slowdown > fastest + WITHIN:
            words.append(f"{part}: {ours.slowdown:.2f}, {best} {fastest:.2f}")
        else:
            words.append(f"{part}: yes")
    return f"auto fastest or within {WITHIN}: " + "; ".join(words)


def rows_of(name: str, cells: Cells) -> Iterator[harness.Row]:
    """Flatten what was found, for `--json`."""
    for policy, outcomes in cells.items():
        for part, outcome in outcomes.items():
            yield {
                "network": name,
                "policy": policy,
                "budget": part,
                "fits": outcome.fits,
                "slowdown": outcome.slowdown,
                "peak_bytes": outcome.peak_bytes,
                "replay_seconds": outcome.replay_seconds,
                "exposed_seconds": outcome.exposed_seconds,
                "written_bytes": outcome.written_bytes,
                "deciding_seconds": outcome.deciding_seconds,
                "evaluations": outcome.evaluations,
                "victims": outcome.victims,
            }


def sources(options: argparse.Namespace) -> Iterator[tuple[str, Graph, Lanes]]:
    """Yield the graphs to run, and the lanes beside them."""
    lanes = Lanes(options.write, options.read)
    if options.load:
        for path in options.load:
            graph = load_graph(path)
            yield path.stem, graph, lanes
            yield f"{path.stem} on a GPU", on_device(graph), GPU
        return
    for name, make in NETWORKS.items():
        yield name, make(), GPU
    if options.record:
        for name, graph in recorded(options.models):
            if options.keep is not None:
                options.keep.mkdir(parents=True, exist_ok=True)
                save_graph(graph, options.keep / f"{name}.npz")
            yield name, graph, lanes
            yield f"{name} on a GPU", on_device(graph), GPU


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="needs torch")
    parser.add_argument(
        "--models", nargs="+", default=["resnet50", "gpt2", "bert", "swin", "unet"]
    )
    parser.add_argument("--load", nargs="+", type=Path, help="recorded graphs")
    parser.add_argument("--keep", type=Path, help="folder for recorded graphs")
    parser.add_argument("--write", type=float, default=1e9, help="bytes per second")
    parser.add_argument("--read", type=float, default=2e9, help="bytes per second")
    parser.add_argument("--json", type=Path, help="write all rows there")
    options = parser.parse_args()
    rows: list[harness.Row] = []
    for name, graph, lanes in sources(options):
        print(
            f"\n{name}: {len(graph.operators)} operators, {graph.seconds:.3f} s, peak "
            f"{graph.plain_peak_bytes / 2**20:.0f} MiB, copies {lanes.write / 1e9:g} "
            f"GB/s out and {lanes.read / 1e9:g} in"
        )
        cells = run_all(graph, BUDGETS, lanes)
        print_cells(cells)
        print(place_dtr(name, cells))
        print(place_auto(cells))
        rows += rows_of(name, cells)
    harness.write_rows(options.json, rows)


if __name__ == "__main__":
    main()
