# SPDX-License-Identifier: Apache-2.0
"""lowtide pool: its output, and that it says nothing untrue."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.archive import save
from lowtide.cli.pool import compare_allocators
from lowtide.hardware import CATALOGUE
from lowtide.recorder.lives import Lives
from lowtide.simulator.networks import make_chain
from lowtide.tidefile import Tide, write_tide
from tests.pure.foreign import MIB, write_all
from tests.pure.golden import check_golden
from tests.pure.test_cli_show import NAMES, lowtide, refusals

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("LOWTIDE_DATA", ROOT.parent / "shared" / "data"))


@pytest.mark.parametrize("name", NAMES)
def test_text(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_all(tmp_path)[name]
    assert lowtide(monkeypatch, "pool", str(path)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    check_golden(f"pool-{name}.txt", captured.out)


def test_json_and_the_file_as_a_whole(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_all(tmp_path)["memInfo.text"]
    assert lowtide(monkeypatch, "pool", "--json", "--whole", str(path)) == 0
    output = capsys.readouterr().out
    assert json.loads(output)["period"] == 0
    check_golden("pool-memInfo.text.json", output)


def test_an_iteration_is_planned(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "step.tide"
    graph = make_chain(5, mib=2)
    save(path, graph)
    assert lowtide(monkeypatch, "pool", "--json", str(path)) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["peak_bytes"] == graph.plain_peak_bytes
    assert report["pool_bytes"] == report["lower_bound_bytes"]


def test_a_file_without_blocks_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "a.tide"
    write_tide(path, Tide(kind="plan"))
    line = refusals(monkeypatch, capsys, "pool", path)
    assert "holds a plan, which names no single blocks" in line


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no data in {DATA}")
def test_the_published_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = DATA / "autoswap" / "memInfo_alex.text"
    assert lowtide(monkeypatch, "pool", "--json", str(path)) == 0
    report = json.loads(capsys.readouterr().out)
    assert round(report["peak_bytes"] / MIB, 2) == 178.88
    assert report["pool_bytes"] <= 1.0017 * report["lower_bound_bytes"]
    assert report["period"] == 188


actions = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 3 * MIB), st.integers(0, 1)),
    max_size=60,
)


@settings(deadline=None, max_examples=60)
@given(actions)
def test_a_plan_is_never_below_what_lives(
    told: list[tuple[int, int, int]],
) -> None:
    lives = Lives()
    for address, size, stream in told:
        lives.event += 1
        group = f"stream {stream}"
        if (stream, address) in lives.live:
            lives.release((stream, address), size, group=group, op=-1)
        else:
            lives.allocate((stream, address), size, group=group, op=-1)
    history = lives.history(source="a test")
    for whole in (False, True):
        report = compare_allocators("x", history, lambda *_: None, whole=whole)
        assert report.lower_bound_bytes <= report.pool_bytes
        if whole:
            assert report.peak_bytes <= report.lower_bound_bytes
            for model in report.models:
                assert model.reserved_bytes >= report.peak_bytes


def test_measure(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        "lowtide.cli.measure.measure_now", lambda *_: CATALOGUE["rtx3090"]
    )
    assert lowtide(monkeypatch, "measure") == 0
    output = capsys.readouterr().out
    assert "TFLOP/s    float32 35.6" in output
    assert f"Wrote {tmp_path / 'hardware.json'}. Name it as: this-machine\n" in output
    assert lowtide(monkeypatch, "measure", "--json") == 0
    assert json.loads(capsys.readouterr().out)["name"] == "rtx3090"
    assert lowtide(monkeypatch, "measure", "--spill-dir", str(tmp_path / "no")) == 2
    assert capsys.readouterr().err.endswith("/no is not a folder\n")
