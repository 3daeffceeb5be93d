"""Train ResNet-50 plain and in half of its memory, and compare every loss, bit by bit.

Three runs of examples/train_resnet.py, each in a process of its own: with `python`,
without a trace of lowtide; a short one that measures the peak; and within half of that
peak. Exits with 1 if one loss differs in one bit, or the budget was not kept.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide import format_bytes

SCRIPT = Path(__file__).with_name("train_resnet.py")
STEP = re.compile(r"step +(\d+) +loss +(\S+) +(\S+) +(\S+) s")


@dataclass(frozen=True)
class Run:
    """What one run printed, and the memory that the system saw it use."""

    losses: tuple[str, ...]  # in hexadecimal: every bit counts
    seconds: tuple[float, ...]
    resident_bytes: int  # highest, of the whole process: libraries and all

    @property
    def step_seconds(self) -> float:
        """The mean of the steps after the first, which warms up and learns."""
        later = self.seconds[1:] or self.seconds
        return sum(later) / len(later)


def main() -> int:
    """Run, show, compare; return the exit status."""
    args = arguments()
    options = ["--batch", str(args.batch)]
    print(f"1. {SCRIPT.name} with python, batch {args.batch}:")
    plain = train([], [*options, "--steps", str(args.steps)])
    print("\n2. How much memory does it need? Two steps with `--policy keep`:")
    needed = measure(["--budget", "100%", "--policy", "keep"], [*options, "--steps=2"])
    peak = needed["peak_bytes"]
    print(f"   {format_bytes(peak)} of tensors at its peak\n")
    budget = peak // 2
    print(f"3. The same within half of that, `--budget {budget}`:")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        launcher = ["-m", "lowtide", "run", f"--budget={budget}", f"--report={report}"]
        halved = train(launcher, [*options, "--steps", str(args.steps)])
        timeline = json.loads(report.read_text())
    show(plain, halved, budget)
    return judge(plain, halved, peak, timeline)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    return parser.parse_args()


def train(launcher: list[str], options: list[str]) -> Run:
    """Run the script, show its lines as they come, and keep what they say."""
    command = [sys.executable, *launcher, str(SCRIPT), *options]
    found = []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        print(f"   {line}", end="", flush=True)
        if match := STEP.match(line):
            found.append(match)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"demo: {' '.join(command)} failed with {process.returncode}")
    return Run(
        losses=tuple(match[3] for match in found),
        seconds=tuple(float(match[4]) for match in found),
        resident_bytes=usage.ru_maxrss * 1024,
    )


def measure(options: list[str], script_options: list[str]) -> dict[str, Any]:
    """Run the script quietly under lowtide; return its report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "lowtide", "run", *options]
        command += [f"--report={report}", str(SCRIPT), *script_options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"demo: {' '.join(command)} failed:\n{done.stderr}")
        timeline: dict[str, Any] = json.loads(report.read_text())
        return timeline


def show(plain: Run, halved: Run, budget: int) -> None:
    """Print the losses of both runs side by side."""
    print(f"\nstep   {'plain':<22} {'in ' + format_bytes(budget):<22}")
    for step, (a, b) in enumerate(zip(plain.losses, halved.losses, strict=False)):
        print(f"{step:4d}   {a:<22} {b:<22} {'equal' if a == b else 'DIFFERENT'}")


def judge(plain: Run, halved: Run, peak: int, timeline: dict[str, Any]) -> int:
    """Say whether the promise was kept; return the exit status."""
    faults = []
    if not plain.losses or not all(map(is_finite, plain.losses)):
        faults.append("the plain run printed no finite losses")
    if plain.losses != halved.losses:
        faults.append("the losses differ")
    if timeline["peak_bytes"] > timeline["budget_bytes"]:
        faults.append(f"the peak, {timeline['peak_bytes']}, is above the budget")
    print(
        f"\npeak of tensors   {format_bytes(peak):>10} -> "
        f"{format_bytes(timeline['peak_bytes'])}"
        f"\nwhole process     {format_bytes(plain.resident_bytes):>10} -> "
        f"{format_bytes(halved.resident_bytes)}  (as the system saw it)"
        f"\ntime per step     {plain.step_seconds:>8.2f} s -> "
        f"{halved.step_seconds:.2f} s"
    )
    if faults:
        print(f"\nFAILED: {'; '.join(faults)}.", file=sys.stderr)
        return 1
    print(f"\nAll {len(plain.losses)} losses are equal to the last bit.")
    return 0


def is_finite(loss: str) -> bool:
    """Tell whether a loss in hexadecimal is a number that training can use."""
    return math.isfinite(float.fromhex(loss))


if __name__ == "__main__":
    sys.exit(main())
