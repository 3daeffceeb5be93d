"""Other people's problems: the published figures, and ours beside them.

The data lie in $LOWTIDE_DATA, or in `shared/data` beside the repository.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import placement
from benchmarks.problems import read_autoswap, read_minimalloc
from lowtide.planner.check import check_placement
from lowtide.planner.pool import Search, place_blocks
from lowtide.recorder.steady import find_period

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("LOWTIDE_DATA", ROOT.parent / "shared" / "data"))

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no data in {DATA}")


@needs_data
@pytest.mark.parametrize(
    ("name", "published", "ours"), [("alex", 1.0017, 1.001), ("vgg", 1.0515, 1.008)]
)
def test_the_published_ratios_come_out_to_four_digits(
    name: str, published: float, ours: float
) -> None:
    problem = read_autoswap(DATA / "autoswap" / f"memInfo_{name}.text")
    ratio = {}
    for policy in placement.POLICIES:
        row = placement.measure(problem, policy, Search(nodes=1 << 17))
        ratio[policy] = row["height"] / row["lower_bound"]
    assert round(ratio["published-first-fit"], 4) == published
    assert round(ratio["published-best-fit"], 4) == published
    assert ratio["auto"] <= ours


@needs_data
@pytest.mark.parametrize("letter", "ABCDEFGH")
def test_minimallocs_problems_fit_into_their_capacity(letter: str) -> None:
    problem = read_minimalloc(DATA / "minimalloc" / f"{letter}.1048576.csv")
    assert problem.capacity_bytes == 1_048_576
    search = Search(nodes=placement.LONG, enough_bytes=problem.capacity_bytes)
    pool = place_blocks(problem.blocks, search=search)
    assert pool.height_bytes <= problem.capacity_bytes
    assert check_placement(pool.blocks, pool.offsets) == []


@needs_data
def test_a_real_training_graph_reaches_its_lower_bound() -> None:
    problem = read_minimalloc(DATA / "somas_resnet50.csv")
    pool = place_blocks(problem.blocks)
    assert pool.optimal
    assert check_placement(pool.blocks, pool.offsets) == []


@needs_data
def test_the_benchmark_writes_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "problems"
    folder.mkdir()
    source = DATA / "minimalloc" / "B.1048576.csv"
    (folder / source.name).write_bytes(source.read_bytes())
    report = tmp_path / "rows.json"
    arguments = ["--minimalloc", str(folder), "--json", str(report), "--quick"]
    monkeypatch.setattr(sys, "argv", ["placement.py", *arguments])
    placement.main()
    rows = json.loads(report.read_text())
    assert [row["policy"] for row in rows] == list(placement.POLICIES)
    assert all(tuple(row) == placement.FIELDS for row in rows)
    assert rows[0]["height"] == rows[0]["lower_bound"] == 1_048_576


def test_a_period_is_found_behind_a_shorter_repeat() -> None:
    layer, step = [7, -1], [5, 7, -1, 7, -1, 7, -1, 3, -8]
    assert find_period(layer * 3 + [9]) == (2, 6)
    assert find_period(step * 4 + [5, 7, 1]) == (len(step), 4 * len(step) + 2)
    assert find_period([1, 2, 3, 4]) == (0, 0)
