"""Import, plan and report a very long trace: seconds and memory.

    python benchmarks/large.py                     # 1,000,000 events, both kinds
    python benchmarks/large.py --events 100000     # a tenth of that

`steady` repeats one iteration, `changing` never does (each iteration has sizes of its
own), so that the whole file is one problem. `lowtide pool` runs in a process of its
own; to be reached at a million events: 60 s and 4 GiB.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import harness

LAYERS = 250  # of one iteration: four events each
KIB = 1 << 10


def lines(events: int, *, changing: bool) -> Iterator[str]:
    """Write an AutoSwap log of a training: layers forward, and back in reverse."""
    choice = random.Random(0)
    sizes = [choice.randrange(4, 4096) * KIB for _ in range(LAYERS)]
    number = time_ns = 0
    while number < events:
        if changing:
            sizes = [choice.randrange(4, 4096) * KIB for _ in range(LAYERS)]
        acts: list[tuple[str, str, int]] = []
        for layer, size in enumerate(sizes):
            acts.append(("Malloc", f"0xa{layer:04x}", size))
        for layer in reversed(range(LAYERS)):
            acts.append(("Malloc", f"0xb{layer:04x}", sizes[layer]))
            acts.append(("Free", f"0xa{layer:04x}", sizes[layer]))
            acts.append(("Free", f"0xb{layer:04x}", sizes[layer]))
        for kind, address, size in acts:
            time_ns += 10_000
            yield f"{number} {kind} {address} {size} {time_ns}\n"
            number += 1


def measure(events: int, *, changing: bool) -> harness.Row:
    """Run `lowtide pool` on such a trace."""
    with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
        path = Path(folder) / "trace.log"
        with path.open("w") as file:
            file.writelines(lines(events, changing=changing))
        code = (
            "import resource, sys; sys.argv[0] = 'lowtide';"
            "from lowtide.cli.app import main; status = main();"
            "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
            "print(peak, file=sys.stderr); sys.exit(status)"
        )
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", code, "pool", "--json", str(path)],
            capture_output=True,
            text=True,
            check=True,
        )
        seconds = time.perf_counter() - begin
    report = json.loads(done.stdout)
    return {
        "trace": "changing" if changing else "steady",
        "events": events,
        "period": report["period"],
        "ratio": report["pool_bytes"] / report["lower_bound_bytes"],
        "seconds": seconds,
        "rss_bytes": int(done.stderr.split()[-1]) * KIB,
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, help="write all rows there")
    options = parser.parse_args()
    rows = [measure(options.events, changing=changing) for changing in (False, True)]
    harness.print_table(rows, list(rows[0]))
    harness.write_rows(options.json, rows)


if __name__ == "__main__":
    main()
