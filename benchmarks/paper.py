"""Reproduce both papers on simulated devices: as published, and ours.

    python benchmarks/paper.py --quick        # a minute: fewer networks, no variations
    python benchmarks/paper.py --json FILE    # some minutes: all, and all variations
    python benchmarks/paper.py --tables smartpool autoswap

Nothing is measured here: operators take the time of a device's roofline (the catalogue
and its efficiencies, `lowtide.hardware`, were committed before any result was computed
from them), and networks are made up layer by layer (`lowtide.simulator`), without the
workspace of libraries. Tables:

smartpool  pool_ratio: height of the pool over the peak of live bytes, both with what
           stays; saved_fraction: against CnMem's model on the same blocks. The author's
           traces are used where they are at hand.
autoswap   zero_overhead_fraction: how far below the peak swapping gets without a stall.
           Parameters are updated as soon as their gradients are there. Published as the
           best of the author's four scores, scheduled without overhead.
delta      max_batch at a slow-down of at most 1.25 against the same batch in ample
           memory, and max_batch_ratio over the plain largest batch (none where plain
           does not run at all); saved_fraction at that slow-down and the plain largest
           batch. DELTA's optimizers, devices and delays are not known; here GPT-2 is
           trained by SGD, BERT and Swin by Adam, 512 and 384 words.
dtr        slowdown by budget, as a part of the plain peak; T: twice as slow or more,
           O: it does not fit. Published: h_DTR_eq in its authors' simulator.

Policies: `delta` and `dtr` as published, `auto` ours (the fastest of its own plans and
of all published rules, each simulated before one is taken; in the table `delta`
parameters and optimizer state may live on the host). Columns after `published`:
the same value with 20 % less and more FLOP/s, and 20 % less and more of the link.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import harness
from benchmarks.paper_jobs import (
    FIELDS,
    VARIATIONS,
    Job,
    autoswap_jobs,
    delta_jobs,
    dtr_jobs,
    smartpool_jobs,
)
from benchmarks.paper_subjects import DTR, IMAGENET, LARGE
from lowtide.elsewhere.contest import AUTO

QUICK = {
    "smartpool": ("vgg16", "resnet50", "densenet121"),
    "autoswap": ("vgg16", "vgg19", "alexnet", "resnet18"),
    "delta": ("resnet50", "gpt2-large"),
    "dtr": ("resnet32-cifar", "unet"),
}


JOBS = {
    "smartpool": (smartpool_jobs, tuple(IMAGENET)),
    "autoswap": (autoswap_jobs, tuple(IMAGENET)),
    "delta": (delta_jobs, tuple(LARGE)),
    "dtr": (dtr_jobs, tuple(DTR)),
}


def verdicts(rows: list[harness.Row]) -> Iterator[str]:
    """Say what was to be reached, and whether it was."""
    ours = [row for row in rows if row["policy"] == AUTO]
    pools = [r["value"] for r in ours if r["measure"] == "pool_ratio"]
    if pools:
        yield f"pool_ratio <= 1.01 on every trace: worst {max(pools):.4f}"
    zero = {
        r["model"]: r["value"] for r in ours if r["measure"] == "zero_overhead_fraction"
    }
    for name, value in zero.items():
        if "trace" in name:
            yield f"zero overhead >= 0.43 on the VGG trace: {value:.3f}"
    above = sorted(n for n, v in zero.items() if n in IMAGENET and v >= 0.342)
    if zero:
        yield f"zero overhead >= 0.342 on three ImageNet models: {', '.join(above)}"
    bars = {"resnet50": 2.5, "resnet101": 2.8, "gpt2-large": 5.5, "gpt2-xl": 6.0}
    for row in ours:
        if row["measure"] == "max_batch_ratio" and row["model"] in bars:
            value = "plain does not run"
            if row["value"] is not None:
                value = f"{row['value']:.2f}"
            at_least = bars[row["model"]]
            where = f"{row['model']} on {row['hardware']}"
            yield f"max batch >= {at_least} x for {where}: {value}"
    lost = [_where(row) for row in rows if _is_beaten(row, ours)]
    yield f"auto slower than delta or dtr: {', '.join(lost) or 'nowhere'}"


def _where(row: harness.Row) -> str:
    return f"{row['model']} {row['measure']} {row['at']} ({row['policy']})"


def _is_beaten(row: harness.Row, ours: list[harness.Row]) -> bool:
    """Say whether a published policy does better than ours in a row."""
    if row["policy"] not in ("delta", "dtr") or row["value"] is None:
        return False
    keys = ("table", "model", "hardware", "measure", "at")
    (mine,) = (o for o in ours if all(o[key] == row[key] for key in keys))
    if row["measure"] == "slowdown":
        return _order(mine["value"]) > _order(row["value"])
    return bool(mine["value"] < row["value"])


def _order(slowdown: str) -> float:
    return {"T": 100.0, "O": 200.0}.get(slowdown) or float(slowdown)


_GROUPS: list[list[Job]] = []  # for the children, which are forked: jobs are closures


def compute(
    groups: list[list[Job]], processes: int, *, vary: bool
) -> list[harness.Row]:
    """Compute all rows; jobs of one network on one device in the same process."""
    _GROUPS[:] = groups
    rows: list[harness.Row] = []
    with get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
        work = partial(_compute_group, vary=vary)
        for part in pool.imap(work, range(len(groups))):
            rows += part
            for row in part:
                said = f"  {row['table']} {_where(row)}: {row['value']}"
                print(said, file=sys.stderr, flush=True)
    return rows


def _compute_group(number: int, *, vary: bool) -> list[harness.Row]:
    return [job.row(vary=vary) for job in _GROUPS[number]]


def main() -> None:
    """Compute and print all tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--models", nargs="+", help="only these")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write all rows there")
    options = parser.parse_args()
    begin = time.perf_counter()
    groups: dict[tuple[str, ...], list[Job]] = {}
    for table in options.tables:
        jobs, models = JOBS[table]
        names = QUICK[table] if options.quick else models
        if options.models:
            names = tuple(n for n in models if n in options.models)
        for job in jobs(names):
            groups.setdefault((table, job.model, job.hardware), []).append(job)
    rows = compute(list(groups.values()), options.processes, vary=not options.quick)
    for table in options.tables:
        part = [row for row in rows if row["table"] == table]
        print(f"\n{table}")
        columns = [c for c in (*FIELDS[1:], *VARIATIONS) if _says(part, c)]
        harness.print_table(part, columns)
    print()
    for line in verdicts(rows):
        print(line)
    print(f"{time.perf_counter() - begin:.0f} s")
    harness.write_rows(options.json, rows)


def _says(rows: list[harness.Row], column: str) -> bool:
    return any(row[column] not in (None, "") for row in rows)


if __name__ == "__main__":
    main()
