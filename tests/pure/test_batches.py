# SPDX-License-Identifier: Apache-2.0
"""The largest batch: bisection, and scripts that are recorded for it."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.cli.scripts import Script
from lowtide.elsewhere.batches import largest, max_batch, near
from lowtide.elsewhere.retime import lanes_of, retime
from lowtide.errors import LowtideError
from lowtide.hardware import CATALOGUE
from lowtide.simulator.networks import make_resnet
from lowtide.simulator.vision import make_imagenet_resnet
from lowtide.trace import Graph
from tests.pure.test_cli_show import lowtide

CARD = CATALOGUE["v100-16g"]
MIB = 1 << 20


@given(st.integers(0, 3000), st.integers(1, 5000))
def test_the_largest_is_found_from_anywhere(most: int, start: int) -> None:
    assert largest(lambda n: n <= most, start) == most


@given(st.integers(0, 3000), st.integers(0, 5000))
def test_the_largest_is_found_from_a_guess(most: int, guess: int) -> None:
    tried: list[int] = []

    def runs(n: int) -> bool:
        tried.append(n)
        return n <= most

    assert near(runs, guess) == most
    assert min(tried, default=1) > 0


@given(st.integers(100, 100_000))
def test_a_part_may_be_enough(most: int) -> None:
    found = largest(lambda n: n <= most, finest=0.05)
    assert most / 1.06 <= found <= most


def make(batch: int) -> Graph:
    return retime(make_resnet(3, batch=batch, width=16), CARD)


def test_what_is_found_runs_and_one_more_does_not() -> None:
    budget = 200 * MIB
    found = max_batch(make, budget, lanes_of(CARD), most_slowdown=1.2)
    assert make(found.plain).plain_peak_bytes <= budget
    assert make(found.plain + 1).plain_peak_bytes > budget
    assert found.ours > found.plain > 0
    assert found.ratio == found.ours / found.plain
    assert 1.0 < found.slowdown <= 1.2


def test_where_nothing_fits() -> None:
    found = max_batch(make, MIB, lanes_of(CARD), most_slowdown=1.2)
    assert (found.plain, found.ours, found.ratio) == (0, 0, None)


class FakeScript(Script):
    """Records a made-up network."""

    def _record(self, batch: int | None) -> Graph:
        return retime(make_imagenet_resnet(18, batch=batch or 1, size=64), CARD)


def fake_script(*args: object) -> FakeScript:
    return FakeScript("train.py", (), False, "v100-16g")


def test_estimates_come_near_to_recordings() -> None:
    script = fake_script()
    for batch in (1, 3, 64, 300):
        estimate, recorded = script.estimate(batch), script.record(batch)
        assert estimate.plain_peak_bytes == pytest.approx(
            recorded.plain_peak_bytes, rel=1e-3
        )
    script.basis = (100, 200)
    for batch in (150, 300, 1000):
        estimate, recorded = script.estimate(batch), script.record(batch)
        assert estimate.seconds == pytest.approx(recorded.seconds, rel=0.01)


def test_max_batch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lowtide.cli.max_batch.Script", fake_script)
    args = ("max-batch", "train.py", "--gpu", "v100-16g", "--budget", "400MiB")
    assert lowtide(monkeypatch, *args, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    script = fake_script()
    plain = report["plain_batch"]
    assert script.record(plain).plain_peak_bytes <= 400 * MIB
    assert script.record(plain + 3).plain_peak_bytes > 400 * MIB
    assert report["ratio"] > 1.5
    assert 1.0 < report["slowdown"] <= 1.2
    assert lowtide(monkeypatch, *args) == 0
    text = capsys.readouterr().out
    assert text.startswith("train.py on v100-16g, 400.0 MiB for tensors\n")
    assert f"x the batch\n  slow-down    {report['slowdown']:>12.3f}" in text
    assert lowtide(monkeypatch, *args[:-1], "1MiB") == 3
    assert capsys.readouterr().out.count("does not fit") == 2


def test_mistakes_give_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lowtide.cli.max_batch.Script", fake_script)
    args = ("max-batch", "train.py", "--gpu", "v100-16g", "--max-slowdown", "0.5")
    assert lowtide(monkeypatch, *args) == 2
    assert (
        capsys.readouterr().err == "lowtide max-batch: --max-slowdown: 0.5 is below 1\n"
    )


def test_a_script_that_fails_is_quoted(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('no data')\n")
    script = Script(str(path), (), False, "v100-16g")
    with pytest.raises(LowtideError, match=r"cannot be recorded at batch 2: .+"):
        script.record(2)
