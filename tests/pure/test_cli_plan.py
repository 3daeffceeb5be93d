# SPDX-License-Identifier: Apache-2.0
"""lowtide plan and simulate: what they print, and that it holds."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lowtide.archive import save
from lowtide.elsewhere.contest import RIVALS, Contest
from lowtide.elsewhere.curve import trade_off
from lowtide.elsewhere.retime import lanes_of, retime, usable_bytes
from lowtide.hardware import CATALOGUE
from lowtide.kinds import kind_of
from lowtide.simulator.networks import make_resnet, make_transformer, make_unet
from lowtide.simulator.simulator import simulate
from lowtide.simulator.watch import Watch
from lowtide.tidefile import Tide, write_tide
from lowtide.trace import OPS, VALUES, Graph, Trace
from tests.pure.foreign import write_all
from tests.pure.golden import check_golden
from tests.pure.test_cli_show import lowtide

CARD = CATALOGUE["v100-16g"]
NETS = {
    "resnet": make_resnet(4, batch=8),
    "unet": make_unet(2, batch=2),
    "transformer": make_transformer(2, batch=4, length=256, width=256),
}


@pytest.fixture
def step(tmp_path: Path) -> Path:
    path = tmp_path / "step.tide"
    save(path, NETS["unet"])
    return path


@pytest.mark.parametrize(
    ("golden", "args"),
    [
        ("plan-unet.txt", ["plan", "--gpu", "v100-16g", "--budget", "400MiB"]),
        ("plan-unet-too-small.txt", ["plan", "--gpu", "rtx4090", "--budget", "1MiB"]),
        ("simulate-unet.txt", ["simulate", "--gpu", "v100-16g", "--budget", "400MiB"]),
        ("simulate-unet-dtr.json", ["simulate", "--gpu", "h100", "--policy", "dtr",
                                    "--budget", "400MiB", "--json"]),
    ],
)  # fmt: skip
def test_text(
    golden: str,
    args: list[str],
    step: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert lowtide(monkeypatch, *args, str(step)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    check_golden(golden, captured.out)


def test_json(
    step: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("plan", str(step), "--gpu", "v100-16g", "--json", "--budget", "50%")
    assert lowtide(monkeypatch, *args) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["hardware"] == "v100-16g"
    assert report["chosen"]["budget_bytes"] == CARD.memory_bytes // 2
    assert report["curve"]["points"][0]["slowdown"] == pytest.approx(1.0)


def test_what_does_not_fit_has_its_own_status(
    step: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("simulate", str(step), "--gpu", "v100-16g", "--budget", "10MiB")
    assert lowtide(monkeypatch, *args) == 3
    assert "Does not fit:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--gpu", "rtx"], "'rtx' may mean: rtx3090, rtx4090, rtx5090"),
        (["--gpu", "abacus"], "'abacus' is no device that lowtide knows"),
        (["--gpu", "h100", "--dtype", "int4"], "--dtype: 'int4' is none of float32"),
        (["--gpu", "t4", "--dtype", "tf32"], ""),
        (["--gpu", "h100", "--budget", "much"], "'much' is not a usable size"),
        (["--gpu", "h100", "--budget", "0"], "nothing fits into 0 bytes"),
        (["--gpu", "h100", "--link", "0"], "--link: 0 bytes a second is no link"),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "simulate"])
def test_one_line(
    verb: str,
    args: list[str],
    message: str,
    step: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = lowtide(monkeypatch, verb, str(step), *args)
    captured = capsys.readouterr()
    if not message:  # tf32 stands for float32 where there are no such cores
        assert status == 0
        return
    assert status == 2
    assert captured.out == ""
    assert captured.err.startswith(f"lowtide {verb}: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_policy_that_there_is_not(
    step: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("simulate", str(step), "--gpu", "h100", "--policy", "best")
    assert lowtide(monkeypatch, *args) == 2
    assert "--policy: 'best' is none of auto, keep" in capsys.readouterr().err


def test_files_that_hold_no_iteration_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bare = tmp_path / "trace.tide"
    save(bare, Trace(np.zeros(1, OPS), np.zeros(0, VALUES), 0))
    other = tmp_path / "other.tide"
    write_tide(other, Tide(kind="something"))
    csv = write_all(tmp_path)["vec_run.csv"]
    for path, why in (
        (bare, "holds a trace, not an iteration in full"),
        (other, "holds a 'something', which is none of"),
        (csv, "is of another kind (AutoSwap log); this verb takes an iteration"),
        (tmp_path / "none.tide", "is missing"),
    ):
        assert lowtide(monkeypatch, "simulate", str(path), "--gpu", "h100") == 2
        assert why in capsys.readouterr().err


@pytest.mark.parametrize("name", NETS)
def test_the_winner_is_never_slower_than_its_rivals_nor_for_more_memory(
    name: str,
) -> None:
    graph = retime(NETS[name], CARD)
    lanes = lanes_of(CARD)
    contest = Contest(graph, lanes)
    slower = 100.0
    for part in (0.3, 0.5, 0.7, 0.9, 1.0):
        budget = int(part * graph.plain_peak_bytes)
        outcome = contest.at(budget).outcome
        for rival in RIVALS:
            other = simulate(graph, rival, budget, lanes)
            assert not other.fits or outcome.slowdown <= other.slowdown + 1e-9
        if outcome.fits:
            assert outcome.peak_bytes <= budget
            assert outcome.slowdown <= slower + 1e-9
            slower = outcome.slowdown
    assert slower == pytest.approx(1.0)


@pytest.mark.parametrize("name", NETS)
def test_the_curve_falls_and_its_knee_is_on_it(name: str) -> None:
    curve = trade_off(Contest(retime(NETS[name], CARD), lanes_of(CARD)))
    budgets = [point.budget_bytes for point in curve.points]
    slower = [point.slowdown for point in curve.points]
    assert budgets == sorted(budgets, reverse=True)
    assert slower == sorted(slower)
    assert budgets[0] == curve.plain_peak_bytes
    assert budgets[-1] == curve.smallest_bytes
    assert 0 < curve.knee < len(budgets)
    assert all(point.peak_bytes <= point.budget_bytes for point in curve.points)


@pytest.mark.parametrize("policy", ["dtr", "lru", "delta"])
@pytest.mark.parametrize("part", [1.0, 0.4])
@pytest.mark.parametrize("name", NETS)
def test_watched_blocks_are_what_the_machine_counts(
    name: str, part: float, policy: str
) -> None:
    graph, watch = NETS[name], Watch()
    budget = int(part * graph.plain_peak_bytes)
    outcome = simulate(graph, policy, budget, lanes_of(CARD), watch=watch)
    blocks = watch.blocks()
    change = np.zeros(int(blocks["dead"].max()) + 1, np.int64)
    np.add.at(change, blocks["born"], blocks["bytes"])
    np.subtract.at(change, blocks["dead"], blocks["bytes"])
    assert np.cumsum(change).max() == outcome.peak_bytes


def test_times_follow_the_device() -> None:
    graph = NETS["resnet"]
    slow, fast = retime(graph, CATALOGUE["t4"]), retime(graph, CATALOGUE["h100"])
    assert graph.seconds != slow.seconds > fast.seconds
    doubled = replace(CARD, to_host=1.0)
    assert lanes_of(doubled).write == 1.0
    assert usable_bytes(CARD) < CARD.memory_bytes


def test_views_and_requests_for_memory_take_no_time() -> None:
    graph = NETS["resnet"]
    operators = graph.operators.copy()
    operators["need"], operators["flops"] = 0, 0
    nothing = graph.writes[:0]
    view = Graph(
        names=tuple("aten::view" for _ in graph.names),
        operators=operators,
        versions=graph.versions,
        reads=graph.reads,
        writes=nothing,
        saves=graph.saves,
    )
    assert retime(view, CARD).seconds == 0.0
    written = replace(view, names=tuple("aten::mul_" for _ in graph.names))
    assert retime(written, CARD).seconds > 0.0
    empty = replace(view, writes=graph.writes, names=("aten::empty",) * len(view.names))
    assert retime(empty, CARD).seconds == 0.0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::convolution_backward", "convolution_backward"),
        ("aten::convolution", "convolution"),
        ("aten::native_batch_norm_backward", "batchnorm"),
        ("aten::_safe_softmax", "safesoftmax"),
        ("aten::mkldnn_rnn_layer", "recurrent"),
        ("aten::addmm", "matmul"),
        ("bmm", "matmul"),
        ("linear_backward", "matmul"),
        ("aten::_scaled_dot_product_flash_attention", "attention"),
        ("aten::native_layer_norm", "normalization"),
        ("aten::embedding_dense_backward", "gather"),
        ("aten::_softmax", "reduction"),
        ("aten::sum", "reduction"),
        ("aten::clone", "copy"),
        ("aten::mul_", "elementwise"),
        ("aten::gelu", "elementwise"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind
