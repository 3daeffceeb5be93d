# SPDX-License-Identifier: Apache-2.0
"""The check for GPUs runs without one, smaller, so that it cannot rot."""

import json
import os
import subprocess
from pathlib import Path

from benchmarks import gpu_check

ROOT = Path(__file__).parents[2]


def test_the_check_runs_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    rows = gpu_check.main(
        [
            *("--device", "cpu", "--small", "--models", "gpt2-medium"),
            *("--cap", str(12 << 20), "--out", str(out)),
        ]
    )
    assert json.loads(out.read_text()) == rows
    ways = [row["way"] for row in rows if "slowdown" in row]
    assert ways[:2] == ["plain", "checkpoint"]
    assert rows[0]["peak_bytes"] > 0
    for row in rows:
        if str(row["way"]).startswith("lowtide 50%"):
            assert row["exact"] is True, row
            assert row["of_plain"] <= 0.5
    batches = {row["way"]: row["largest_batch"] for row in rows if "cap_bytes" in row}
    assert batches["lowtide"] >= batches["plain"] > 0


def test_other_models_can_be_built() -> None:
    for name in gpu_check.BATCHES:
        subject = gpu_check.Subject(name, "cpu", small=True, batch=2)
        subject.checkpointed()
        assert subject.step() > 0


def test_the_script_is_one_a_shell_can_run() -> None:
    script = ROOT / "benchmarks" / "gpu_check.sh"
    assert os.access(script, os.X_OK)
    subprocess.run(["sh", "-n", str(script)], check=True)
    assert "tests/gpu" in script.read_text()
