# SPDX-License-Identifier: Apache-2.0
"""Parameters and optimizer state on the host, in simulated iterations."""

from itertools import pairwise

import numpy as np
import pytest

from lowtide.elsewhere.contest import HOSTING, Contest
from lowtide.elsewhere.retime import lanes_of, retime
from lowtide.hardware import CATALOGUE
from lowtide.scheduler.director import Lanes
from lowtide.simulator.attention import make_gpt2
from lowtide.simulator.hosting import host, hostable
from lowtide.simulator.simulator import simulate

CARD = CATALOGUE["gtx1080ti"]
LANES = lanes_of(CARD)
GPT = retime(make_gpt2(6, 512, 8, batch=8, length=128, vocabulary=1000, states=2), CARD)
STATIC = int(GPT.versions["bytes"][GPT.versions["lasting"]].sum())


def test_what_is_used_least_goes_first() -> None:
    names = hostable(GPT)
    uses = np.bincount(GPT.reads["version"])[names]
    assert (np.diff(uses) >= 0).all()
    assert GPT.versions["lasting"][names].all()


def test_visits_cover_every_use_in_order() -> None:
    hosted = host(GPT, hostable(GPT), LANES)
    for version, visits in hosted.visits.items():
        uses = GPT.reads["operator"][GPT.reads["version"] == version]
        for use in uses.tolist():
            assert any(v.first <= use <= v.last for v in visits)
        for before, after in pairwise(visits):
            assert before.last < after.first
        assert all(visit.due <= visit.first for visit in visits)
        assert visits[-1].changed  # by the optimizer
        assert not any(visit.changed for visit in visits[:-1])


def test_what_is_away_is_not_there_while_it_is_used() -> None:
    names = hostable(GPT)
    hosted = host(GPT, names, LANES)
    away = hosted.away_bytes(GPT, LANES)
    used = np.zeros(len(GPT.operators), np.int64)
    for op, version in np.unique(GPT.reads[np.isin(GPT.reads["version"], names)]):
        used[op] += GPT.versions["bytes"][version]
    total = int(GPT.versions["bytes"][names].sum())
    assert ((away >= 0) & (away + used <= total)).all()
    assert away.max() > 0.5 * total


@pytest.mark.parametrize("part", [1.0, 0.7])
def test_nothing_is_lost_on_the_way(part: float) -> None:
    hosted = host(GPT, hostable(GPT), LANES)
    budget = int(part * GPT.plain_peak_bytes)
    outcome = simulate(GPT, "auto", budget, LANES, hosted=hosted)
    assert outcome.fits
    assert outcome.final_bytes == outcome.counted_bytes
    assert outcome.peak_bytes <= budget
    sizes = GPT.versions["bytes"]
    changed = sum(int(sizes[v]) for v in hosted.visits)
    assert outcome.written_bytes >= changed  # all of it went home again
    assert outcome.read_bytes >= changed


def test_a_slower_link_takes_longer() -> None:
    took = []
    for rate in (12e9, 3e9):
        lanes = Lanes(rate, rate)
        hosted = host(GPT, hostable(GPT), lanes)
        outcome = simulate(GPT, "auto", 4 * GPT.plain_peak_bytes, lanes, hosted=hosted)
        took.append(outcome.exposed_seconds)
    assert took[0] < took[1]


def test_it_runs_where_what_lasts_does_not_fit() -> None:
    budget = int(0.9 * STATIC)
    plain = Contest(GPT, LANES).at(budget)
    assert not plain.outcome.fits
    hosted = Contest(GPT, LANES, hosting=True).at(budget)
    assert hosted.outcome.fits
    assert hosted.outcome.peak_bytes <= budget
    assert hosted.found_by == HOSTING
    ample = Contest(GPT, LANES, hosting=True).at(GPT.plain_peak_bytes)
    assert ample.hosted is None
