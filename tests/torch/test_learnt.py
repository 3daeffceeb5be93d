# SPDX-License-Identifier: Apache-2.0
"""Plans that a run leaves to the next are followed, refused, or do no harm."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lowtide import archive
from lowtide.errors import LowtideError
from lowtide.plan import Learnt
from lowtide.planner.planner import Frontier
from lowtide.runtime.iterations import REPLANS
from lowtide.runtime.learnt import forecasts_of, read_learnt
from lowtide.runtime.session import Session
from lowtide.runtime.signature import number_of
from lowtide.scheduler.director import RULES
from lowtide.tidefile import TideError
from tests.compare import seed_everything
from tests.torch.processes import succeeds

BUDGET = 2 << 20
ROWS = 512


def train(
    batches: Iterable[int] = (ROWS,) * 3,
    *,
    depth: int = 8,
    each: Callable[[int], None] | None = None,
) -> list[Any]:
    """Train a network with dropout; the losses, then the weights."""
    seed_everything(0)
    blocks = [
        nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1))
        for _ in range(depth)
    ]
    net = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found: list[Any] = []
    for step, rows in enumerate(batches):
        loss = net(torch.randn(rows, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item().hex())
        if each is not None:
            each(step)
    return [*found, *(p.detach().clone() for p in net.parameters())]


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    return train()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keep what a run of four steps has learnt."""
    path = tmp_path_factory.mktemp("learnt") / "plan.tide"
    with Session(BUDGET) as session:
        train((ROWS,) * 4)
    assert session.iterations.last is not None
    assert session.iterations.last.plan.any()  # else there is nothing to follow
    session.save_plan(path)
    return path


def about_plans(session: Session) -> list[str]:
    """Give what the report notes of plans; a slow disk may be noted too."""
    return [note for note in session.report().notes if "plan" in note]


def searched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the searches for plans from now on."""
    searches: list[int] = []
    find = Frontier._find

    def counting(self: Frontier) -> Any:
        searches.append(self.trace.key)
        return find(self)

    monkeypatch.setattr(Frontier, "_find", counting)
    return searches


# -- followed --------------------------------------------------------------------------


def test_the_first_iteration_follows_the_plan_and_learns_nothing(
    path: Path, plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (learnt,) = forecasts_of(read_learnt(path), RULES["auto"])
    searches = searched(monkeypatch)
    repeated: list[int] = []
    planned: list[int | None] = []
    session = Session(BUDGET, plan=path)
    with session:
        saved = session.iterations.saved

        def noting(value: Any, position: int) -> int | None:
            planned.append(saved(value, position))
            return planned[-1]

        monkeypatch.setattr(session.iterations, "saved", noting)
        found = train(each=lambda _: repeated.append(session.iterations.repeated))
    assert same(found, plain)
    assert searches == []
    assert repeated == [1, 2, 3]
    assert session.iterations.last is not None
    assert session.iterations.last.trace.key == learnt.trace.key
    first = planned[: len(learnt.told)]
    moved = [code for code in first if code]
    assert moved  # known before the first backward
    report = session.report()
    assert 0 < report.first_peak_bytes <= BUDGET
    assert report.peak_bytes <= BUDGET
    assert about_plans(session) == []


def test_another_process_knows_the_same_iterations(path: Path) -> None:
    script = """
        import sys
        from tests.torch.test_learnt import BUDGET, Session, train
        with Session(BUDGET, plan=sys.argv[1]) as session:
            train((512,))
        (known,) = session.iterations.known
        print(known.trace.key, known.seen, session.iterations.repeated)
    """
    (learnt,) = forecasts_of(read_learnt(path), RULES["auto"])
    printed = succeeds(script, str(path), PYTHONHASHSEED="7", PYTHONPATH=".")
    assert printed.split() == [str(learnt.trace.key), str(REPLANS + 1), "1"]


def test_numbers_of_texts_do_not_change() -> None:
    assert number_of("64 bytes by aten::tanh") == 2395389389744012708


def test_a_shape_that_the_plan_lacks_is_learnt(path: Path) -> None:
    batches = (ROWS, ROWS // 2, ROWS, ROWS // 2)
    expected = train(batches)
    session = Session(BUDGET, plan=path)
    repeated: list[int] = []
    with session:
        found = train(
            batches, each=lambda _: repeated.append(session.iterations.repeated)
        )
    assert same(found, expected)
    assert repeated == [1, 1, 2, 3]
    assert about_plans(session) == []
    assert len(session.iterations.known) == 2


def test_what_was_followed_can_be_saved_again(path: Path, tmp_path: Path) -> None:
    with Session(BUDGET, plan=path) as session:
        train((ROWS,))
    again = tmp_path / "again.tide"
    session.save_plan(again)
    one, other = read_learnt(path), read_learnt(again)
    assert one.told == other.told
    assert (one.codes == other.codes).all()
    assert (one.saved == other.saved).all()


# -- refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lowtide": "0.0.1"}, r"made for lowtide 0\.0\.1, not "),
        ({"torch": "1.13.0"}, r"made for torch 1\.13\.0, not "),
        ({"device": "cuda"}, "made for device cuda, not cpu"),
        ({"policy": "swap-only"}, "made for policy swap-only, not auto"),
        ({"budget_bytes": 7 << 20}, r"made for budget 7340032 bytes .*, not 2097152"),
        ({"torch": "1.0", "policy": "x"}, r"made for torch 1\.0, .*; policy x, not"),
    ],
)
def test_a_plan_made_for_something_else_is_refused_by_name(
    change: dict[str, Any], words: str, path: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.tide"
    archive.save(other, replace(read_learnt(path), **change))
    with pytest.raises(LowtideError, match=words) as caught:
        Session(BUDGET, plan=other)
    assert str(other) in str(caught.value)


def test_a_plan_of_another_model_or_shape_is_named_and_not_followed(
    path: Path,
) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"batches": (ROWS // 2,) * 3}, "is 65536 bytes .*, in the plan 131072 bytes"),
        ({"depth": 9}, r"saved tensor \d+ is .*, in the plan "),
    ]
    for program, words in cases:
        expected = train(**program)
        session = Session(BUDGET, plan=path)
        with session:
            found = train(**program)
        assert same(found, expected)
        (note,) = about_plans(session)
        assert "made for another model, shape or mode, and is not followed" in note
        assert re.search(words, note)
        assert session.report().peak_bytes <= BUDGET


def test_a_file_that_holds_no_plan_is_refused(tmp_path: Path) -> None:
    with Session("1GiB") as session:
        pass
    with pytest.raises(LowtideError, match="no forward and backward pass has ended"):
        session.save_plan(tmp_path / "empty.tide")
    other = tmp_path / "timeline.tide"
    archive.save(other, session.report())
    with pytest.raises(TideError, match="holds a timeline, not the plans of a run"):
        Session("1GiB", plan=other)


# -- advice only -----------------------------------------------------------------------


def wild(learnt: Learnt, seed: int) -> Learnt:
    """Make a plan that still holds together, and is wrong in everything it says."""
    random = np.random.default_rng(seed)
    ops, values = learnt.ops.copy(), learnt.values.copy()
    n = len(ops)
    for name in ("live", "need", "managed", "absent"):
        ops[name] = random.integers(0, 2 * BUDGET, n)
    ops["seconds"] = random.random(n)
    values["saved"] = random.integers(0, n, len(values))
    values["first_use"] = random.integers(-1, n, len(values))
    values["replayable"] = random.random(len(values)) < 0.8
    values["bytes"] = random.integers(0, BUDGET, len(values))
    values["scratch"] = random.integers(0, BUDGET, len(values))
    heads = learnt.iterations.copy()
    heads["plans"] = 0  # the planner makes of it what it can
    needs = learnt.needs.copy()
    needs["bytes"] = random.integers(0, BUDGET // 8, len(needs))
    return replace(
        learnt,
        ops=ops,
        values=values,
        iterations=heads,
        codes=learnt.codes[:0],
        needs=needs,
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_wrong_plan_changes_no_bit(
    seed: int, path: Path, plain: list[Any], tmp_path: Path
) -> None:
    learnt = read_learnt(path)
    other = tmp_path / "wild.tide"
    archive.save(other, wild(learnt, seed))
    session = Session(BUDGET, plan=other)
    with session:
        for forecast in session.iterations.known:
            codes = np.random.default_rng(seed).integers(0, 3, len(forecast.plan))
            forecast.plan = codes.astype(np.int8)
            forecast.growth = 0
        found = train()
    assert same(found, plain)
    assert session.iterations.repeated == 3  # it was followed
    assert session.report().peak_bytes <= BUDGET


def test_damaged_tables_are_refused_or_do_no_harm(path: Path) -> None:
    learnt = read_learnt(path)
    random = np.random.default_rng(3)
    refused = 0
    for round_ in range(150):
        name = ("iterations", "ops", "values", "saved", "parents", "codes")[round_ % 6]
        table = getattr(learnt, name).copy()
        raw = table.view(np.uint8)
        at = random.integers(0, len(raw), 3)
        raw[at] = random.integers(0, 256, 3)
        try:
            forecasts_of(replace(learnt, **{name: table}), RULES["auto"])
        except TideError:
            refused += 1
    assert refused > 30
