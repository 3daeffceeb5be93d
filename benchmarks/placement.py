"""Place other people's problems, by the published rules and by ours.

    python benchmarks/placement.py --published DIR    # the AutoSwap author's traces
    python benchmarks/placement.py --minimalloc DIR   # MiniMalloc's problems
    python benchmarks/placement.py --published DIR --json FILE --quick

The columns `lower_bound` and `height` include the bytes that stay from iteration to
iteration, as published; `pool_lower_bound` and `pool_height` leave them out. Problems
with a known capacity are searched until they fit into it, the others for a number of
nodes (`--quick`: a sixteenth). `reference` is the seconds MiniMalloc took to fit the
problem into its capacity on a 2.8 GHz Xeon. Every placement is checked.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import harness
from benchmarks.problems import Problem, read_autoswap, read_minimalloc
from lowtide.planner.check import check_placement
from lowtide.planner.pool import DEFAULT_NODES, POLICIES, Search, place_blocks

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
    start = time.perf_counter()
    pool = place_blocks(
        problem.blocks, period=problem.period, policy=policy, search=search
    )
    seconds = time.perf_counter() - start
    violations = check_placement(
        pool.blocks,
        pool.offsets,
        period=pool.period,
        height_bytes=pool.height_bytes,
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


def show(rows: list[harness.Row]) -> None:
    """Print the rows with their ratios, to the four digits that were published."""
    table = [
        {
            **row,
            "ratio": f"{row['height'] / row['lower_bound']:.4f}",
            "pool_ratio": f"{row['pool_height'] / row['pool_lower_bound']:.4f}",
            "reference": REFERENCE.get(row["problem"].partition(".")[0]),
        }
        for row in rows
    ]
    harness.print_table(table, [*FIELDS, "ratio", "pool_ratio", "reference"])


def main() -> None:
    """Read the problems, place them, and show and write the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--published", type=Path, metavar="DIR")
    parser.add_argument("--minimalloc", type=Path, metavar="DIR")
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
    if not problems:
        parser.error("no problem found: give --published DIR or --minimalloc DIR")
    rows = measure_all(problems, quick=arguments.quick)
    show(rows)
    harness.write_rows(arguments.json, rows)


if __name__ == "__main__":
    main()
