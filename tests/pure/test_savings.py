# SPDX-License-Identifier: Apache-2.0
"""lowtide plan on files of others: what it could have saved, and what is missing."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from lowtide.cli.savings import recording_in
from lowtide.elsewhere.contest import Contest
from lowtide.elsewhere.rebuild import rebuild, says_enough
from lowtide.recorder.files import parse_history, read_history
from lowtide.scheduler.director import Lanes
from lowtide.simulator.forecast import managed_versions
from tests.pure.foreign import MIB, call, write_all
from tests.pure.golden import check_golden
from tests.pure.test_cli_show import NAMES, lowtide

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("LOWTIDE_DATA", ROOT.parent / "shared" / "data"))
LAYERS = 12


@pytest.mark.parametrize("name", NAMES)
def test_text(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_all(tmp_path)[name]
    assert lowtide(monkeypatch, "plan", str(path), "--gpu", "rtx3090") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    check_golden(f"plan-{name}.txt", captured.out)


def autoswap_steps(idle: int) -> str:
    """Log four iterations: ten blocks made in order, read back in reverse."""
    lines, time = ["0 Malloc 0xaa 1048576 0"], 0
    for _ in range(4):
        for i in range(10):
            time += idle
            lines.append(f"{len(lines)} Malloc 0x{i} {8 * MIB} {time}")
            lines.append(f"{len(lines)} Mutable 0x{i} {8 * MIB} {time}")
        for i in reversed(range(10)):
            time += idle
            lines.append(f"{len(lines)} Read 0x{i} {8 * MIB} {time}")
            lines.append(f"{len(lines)} Free 0x{i} {8 * MIB} {time}")
    return "\n".join(lines)


def test_swapping_hides_where_there_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reached = []
    for idle in (1_000, 10_000_000):  # ns between uses; a copy takes 0.3 ms
        path = tmp_path / "log"
        path.write_text(autoswap_steps(idle))
        args = ("plan", str(path), "--gpu", "rtx4090", "--json")
        assert lowtide(monkeypatch, *args) == 0
        report = json.loads(capsys.readouterr().out)
        swapped = report["swapped"]
        assert swapped["uses_known"]
        assert swapped["peak_bytes"] == 81 * MIB
        reached.append(swapped["reached_bytes"])
    assert reached[0] == 81 * MIB
    assert reached[1] < 40 * MIB


def test_three_iterations_are_cut_out() -> None:
    history = parse_history(autoswap_steps(1000).encode())
    recording, steady = recording_in(history)
    assert steady
    assert recording is not None
    assert recording.period == 40
    assert len(recording.events) == 120
    assert recording.peak_bytes == 81 * MIB


def dtr_step() -> str:
    """Log a chain, forward and back, as DTR's prototype does."""
    lines = []

    def fresh(name: str, size: int) -> None:
        lines.append({"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": str(size)})
        lines.append({"INSTRUCTION": "ALIAS", "NAME": name, "ALIAS": "-1"})

    lines.append({"INSTRUCTION": "CONSTANT", "NAME": "x0"})
    lines.append({"INSTRUCTION": "MEMORY", "NAME": "x0", "MEMORY": str(MIB)})
    lines.append({"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"})
    for i in range(LAYERS):
        lines.append(call("aten::mm", [f"x{i + 1}"], [f"x{i}"], 1_000_000))
        fresh(f"x{i + 1}", MIB)
    gradient = f"x{LAYERS}"
    for i in reversed(range(LAYERS)):
        lines.append(call("aten::mm_back", [f"g{i}"], [f"x{i}", gradient], 2_000_000))
        fresh(f"g{i}", MIB)
        lines.append({"INSTRUCTION": "RELEASE", "NAME": gradient})
        if i and gradient != f"x{i}":
            lines.append({"INSTRUCTION": "RELEASE", "NAME": f"x{i}"})
        gradient = f"g{i}"
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_a_log_of_dtr_becomes_an_iteration() -> None:
    history = parse_history(dtr_step().encode())
    assert says_enough(history)
    graph = rebuild(history)
    assert graph.seconds == pytest.approx(3e-3 * LAYERS)
    assert graph.plain_peak_bytes == history.peak_bytes
    saved = managed_versions(graph)
    assert len(saved) >= LAYERS - 2
    lanes = Lanes(0.0, 0.0)
    result = Contest(graph, lanes).at(graph.plain_peak_bytes * 6 // 10)
    assert result.outcome.fits
    assert 1.0 < result.outcome.slowdown < 1.34  # each operator once more at most


def test_a_log_of_dtr_has_a_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "dtr.log"
    path.write_text(dtr_step())
    assert lowtide(monkeypatch, "plan", str(path), "--gpu", "titanv", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    points = report["curve"]["points"]
    assert points[0]["budget_bytes"] > points[-1]["budget_bytes"]
    assert points[-1]["slowdown"] > 1
    assert "times are those of the file" in report["notes"][0]


@pytest.mark.parametrize("name", ["snapshot.pickle", "trace.json", "vec_run.csv"])
def test_others_do_not_say_enough(name: str, tmp_path: Path) -> None:
    assert not says_enough(read_history(write_all(tmp_path)[name]))


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no data in {DATA}")
def test_the_published_recording() -> None:
    history = read_history(DATA / "autoswap" / "vec_run_5_alex.csv")
    recording, steady = recording_in(history)
    assert steady
    assert recording is not None
    assert recording.period == 612
    assert round(recording.peak_bytes / MIB, 1) == 178.9
    assert (np.diff(recording.events["seconds"]) >= 0).all()
