"""Place other people's problems, by the published rules and by ours.

    python benchmarks/placement.py --published DIR    # the AutoSwap author's traces
    python benchmarks/placement.py --minimalloc DIR   # MiniMalloc's problems
    python benchmarks/placement.py --recorded         # the benchmark models, as trained
    python benchmarks/placement.py --recorded --full-size --ways plain --optimizers own
    python benchmarks/placement.py --made-up 100000   # blocks
    python benchmarks/placement.py --published DIR --json FILE --quick

The columns `lower_bound` and `height` include the bytes that stay from iteration to
iteration, as published; `pool_lower_bound` and `pool_height` leave them out. Problems
with a known capacity are searched until they fit into it, the others for a number of
nodes (`--quick`: a sixteenth). `reference` is the seconds MiniMalloc took to fit the
problem into its capacity on a 2.8 GHz Xeon; ours are the processor's, of one core.
Every placement is checked.

Recorded trainings are placed as on a device, in multiples of 512 bytes: all blocks of
one iteration, small ones too. `cnmem` is what a model of CnMem reserves for the whole
training, from the making of the network on; `saved` is what a planned pool needs less.
CnMem begins with a segment of 256 MiB, which at reduced sizes would exceed all that is
trained: there it begins with nothing, which suits it best.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from numpy.typing import NDArray

from benchmarks import harness
from benchmarks.problems import MADE_UP, Problem, read_autoswap, read_minimalloc
from lowtide.planner.check import check_placement
from lowtide.planner.pool import DEFAULT_NODES, POLICIES, Search, place_blocks
from lowtide.simulator.caching import CnMemRules, simulate_allocator

FIELDS = (
    "problem",
    "policy",
    "blocks",
    "lower_bound",
    "height",
    "pool_lower_bound",
    "pool_height",
    "seconds",
)
LONG = 1 << 26  # nodes for problems that are known to fit
REFERENCE = dict(
    zip("ABCDEFGH", (6.70, 4.94, 1.00, 4.37, 4.76, 7.19, 1.38, 2.09), strict=True)
)


def measure(problem: Problem, policy: str, search: Search) -> harness.Row:
    """Place a problem, check the placement, and describe it in a row."""
    start = time.process_time()
    pool = place_blocks(
        problem.blocks,
        period=problem.period,
        policy=policy,
        alignment=problem.alignment,
        search=search,
    )
    seconds = time.process_time() - start
    violations = check_placement(
        pool.blocks,
        pool.offsets,
        period=pool.period,
        height_bytes=pool.height_bytes,
        alignment=pool.alignment,
    )
    if violations:
        raise SystemExit(f"{problem.name}, {policy}: {violations[0]}")
    return {
        "problem": problem.name,
        "policy": policy,
        "blocks": len(problem.blocks),
        "lower_bound": pool.lower_bound_bytes + problem.persistent_bytes,
        "height": pool.height_bytes + problem.persistent_bytes,
        "pool_lower_bound": pool.lower_bound_bytes,
        "pool_height": pool.height_bytes,
        "seconds": seconds,
    }


def measure_all(problems: list[Problem], *, quick: bool) -> list[harness.Row]:
    """Place every problem by every policy."""
    rows = []
    for problem in problems:
        nodes = LONG if problem.capacity_bytes else DEFAULT_NODES
        if quick and not problem.capacity_bytes:
            nodes //= 16
        search = Search(enough_bytes=problem.capacity_bytes, nodes=nodes)
        rows += [measure(problem, policy, search) for policy in POLICIES]
    return rows


def measure_recorded(arguments: argparse.Namespace) -> list[harness.Row]:
    """Record trainings, and place the blocks of one iteration each."""
    from benchmarks import recordings

    rows = []
    for model in arguments.models or recordings.REDUCED:
        for optimizer in arguments.optimizers or recordings.OPTIMIZERS:
            for way in arguments.ways or recordings.WAYS:
                recording = recordings.record(
                    model, optimizer, way, full_size=arguments.full_size
                )
                row = measure(recording.problem, "auto", Search())
                first = CnMemRules.first if arguments.full_size else 0
                cnmem = _cnmem(recording.blocks, first)
                rows.append({**row, "cnmem": cnmem, "saved": 1 - row["height"] / cnmem})
                print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rows


def _cnmem(blocks: NDArray[np.void], first: int) -> int:
    """Tell what CnMem reserves, beginning with so many bytes."""
    rules = CnMemRules(first=first)
    return simulate_allocator(blocks, rules).reserved_bytes


def show(rows: list[harness.Row]) -> None:
    """Print the rows with their ratios, to the four digits that were published."""
    table = [
        {
            **row,
            "ratio": f"{row['height'] / row['lower_bound']:.4f}",
            "pool_ratio": f"{row['pool_height'] / row['pool_lower_bound']:.4f}",
            "saved": f"{row['saved']:.3f}" if "saved" in row else None,
            "reference": REFERENCE.get(row["problem"].partition(".")[0]),
        }
        for row in rows
    ]
    more = ["ratio", "pool_ratio", "reference", "cnmem", "saved"]
    known = [name for name in more if any(row.get(name) for row in table)]
    harness.print_table(table, [*FIELDS, *known])


def main() -> None:
    """Read the problems, place them, and show and write the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--published", type=Path, metavar="DIR")
    parser.add_argument("--minimalloc", type=Path, metavar="DIR")
    parser.add_argument("--made-up", type=int, metavar="BLOCKS")
    parser.add_argument("--recorded", action="store_true")
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--optimizers", nargs="+", help="sgd, adamw, adafactor, own")
    parser.add_argument("--ways", nargs="+", help="such as plain, mixed")
    parser.add_argument("--full-size", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    problems = []
    if arguments.published:
        logs = sorted(arguments.published.glob("memInfo_*.text"))
        problems += [read_autoswap(path) for path in logs]
    if arguments.minimalloc:
        files = sorted(arguments.minimalloc.glob("*.csv"))
        problems += [read_minimalloc(path) for path in files]
    if not problems and not arguments.made_up and not arguments.recorded:
        parser.error("no problem: give --published DIR, --minimalloc DIR or --recorded")
    rows = measure_all(problems, quick=arguments.quick)
    for make in MADE_UP if arguments.made_up else ():
        rows.append(measure(make(arguments.made_up), "auto", Search()))
    if arguments.recorded:
        rows += measure_recorded(arguments)
    show(rows)
    harness.write_rows(arguments.json, rows)


if __name__ == "__main__":
    main()
