# SPDX-License-Identifier: Apache-2.0
"""The table of policies: what it runs, how it writes and judges what it finds."""

from dataclasses import replace

import pytest

from benchmarks import policies
from benchmarks.policies import COMPARED, cell, place_auto, place_dtr, run_all
from lowtide.scheduler.director import Lanes
from lowtide.simulator.networks import NETWORKS, make_chain, make_transformer
from lowtide.simulator.simulator import Outcome, simulate
from lowtide.trace import Graph

GRAPH = make_chain(24)


@pytest.fixture(scope="module")
def cells() -> policies.Cells:
    return run_all(GRAPH, (0.75, 0.5), Lanes(12e9, 12e9))


def test_every_policy_is_run_at_every_budget(cells: policies.Cells) -> None:
    assert set(cells) == set(COMPARED)
    for outcomes in cells.values():
        for part, outcome in outcomes.items():
            assert outcome.budget_bytes == int(part * GRAPH.plain_peak_bytes)
            assert outcome.fits or outcome.thrashed


def test_plans_pay(cells: policies.Cells) -> None:
    """What is planned with two lanes beats what only reacts, at a half of the peak."""
    best = min(cells[p][0.5].slowdown for p in COMPARED if cells[p][0.5].fits)
    assert cells["auto"][0.5].slowdown <= best + policies.WITHIN


def outcome_of(seconds: float, *, fits: bool = True) -> Outcome:
    outcome = simulate(GRAPH, "keep", GRAPH.plain_peak_bytes, Lanes(0, 0))
    return replace(outcome, seconds=seconds * GRAPH.seconds, fits=fits)


def test_cells_are_written_as_in_the_papers() -> None:
    assert cell(outcome_of(1.234)) == "1.23"
    assert cell(outcome_of(2.5)) == "T"
    assert cell(outcome_of(0.4, fits=False)) == "O"
    assert cell(replace(outcome_of(10.0, fits=False), thrashed=True)) == "T"


def test_dtr_is_held_against_its_authors_figures() -> None:
    inside = {0.9: 1.02, 0.8: 1.04, 0.7: 1.07, 0.6: 1.1, 0.5: 1.13, 0.4: 1.2}
    cells = {"dtr": {part: outcome_of(s) for part, s in inside.items()}}
    assert place_dtr("resnet", cells) == (
        "dtr: convolutional in the band; all in the band"
    )
    cells["dtr"][0.5] = outcome_of(1.3)
    assert "0.5: 1.30 above 1.18" in place_dtr("resnet on a GPU", cells)
    cells["dtr"][0.4] = outcome_of(0.5, fits=False)
    assert "0.4: O above 1.29" in place_dtr("something else", cells)


def dtr_over(graph: Graph) -> policies.Cells:
    sizes = {part: int(part * graph.plain_peak_bytes) for part in policies.BAND_BUDGETS}
    return {
        "dtr": {
            part: simulate(graph, "dtr", n, policies.GPU) for part, n in sizes.items()
        }
    }


# DTR's transformer had batch 10 and sequences of 512, and took 9,872 MB plain; so large
# ours takes 9,424 MB.
LARGE = {"transformer": lambda: make_transformer(batch=10, width=1024)}


@pytest.mark.parametrize("name", NETWORKS)
def test_dtr_is_as_good_as_its_authors_say(name: str) -> None:
    """A fair baseline: 0.9 to 0.4 of the peak, each kind of network held to its own.

    The made-up U-Net is up to 0.08 faster than theirs, never slower.
    """
    graph = LARGE.get(name, NETWORKS[name])()
    said = place_dtr(name, dtr_over(graph))
    assert said.endswith("all in the band")
    if name == "unet":
        assert " above " not in said
    else:
        assert "outside" not in said


def test_auto_is_held_against_the_fastest() -> None:
    cells = {
        "auto": {0.75: outcome_of(1.03), 0.5: outcome_of(1.3), 0.35: outcome_of(1.0)},
        "dtr": {0.75: outcome_of(1.02), 0.5: outcome_of(1.1), 0.35: outcome_of(1.5)},
    }
    assert place_auto(cells) == (
        "auto fastest or within 0.02: 0.75: yes; 0.5: 1.30, dtr 1.10; 0.35: yes"
    )
    cells = {
        p: {b: outcome_of(1, fits=False) for b in (0.75, 0.5, 0.35)} for p in cells
    }
    assert "0.5: nobody runs" in place_auto(cells)
