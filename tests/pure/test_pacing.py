# SPDX-License-Identifier: Apache-2.0
"""Prefetches learn when to start, and a step writes no more than it may."""

import math

import numpy as np
import pytest

from lowtide.errors import SpillError
from lowtide.runtime.pacing import Allowance, Lead, flight_limit
from lowtide.trace import OPS, VALUES, Trace

MIB = 2**20
N_OPERATORS = 200
SECONDS = 0.01  # of each operator


def even_trace() -> Trace:
    ops = np.zeros(N_OPERATORS, dtype=OPS)
    ops["seconds"] = SECONDS
    return Trace(ops, np.zeros(0, dtype=VALUES), 1)


def iteration(lead: Lead, copy_seconds: float, room_seconds: float) -> tuple[int, int]:
    """Play a backward whose every 20th operator wants a value; count the mistakes.

    A copy takes so long. One that is on its way longer than there is room for it is
    given up, as happens under pressure, and begun again when it is wanted.
    """
    trace = even_trace()
    late = early = 0
    for use in range(60, N_OPERATORS, 20):
        started = None
        for position in range(use):
            lead.look(trace, position)
            if lead.wants(use):
                started = position
                break
        ahead = (use - (use if started is None else started)) * SECONDS
        if ahead > room_seconds:
            lead.look(trace, use - round(ahead / SECONDS))
            lead.cancelled(use)
            early += 1
        elif ahead < copy_seconds:
            lead.late(copy_seconds - ahead)
            late += 1
    return late, early


@pytest.mark.parametrize("start", [0.0, 0.03, 0.4, math.inf])
@pytest.mark.parametrize("copy_seconds", [0.02, 0.1, 0.25])
def test_the_lead_converges(start: float, copy_seconds: float) -> None:
    lead = Lead()
    lead.seconds = start
    mistakes = [iteration(lead, copy_seconds, 0.5) for _ in range(20)]
    assert mistakes[-5:] == [(0, 0)] * 5
    assert copy_seconds <= lead.seconds + SECONDS
    assert lead.seconds <= 0.55
    if start < copy_seconds:
        assert mistakes[0][0] > 0


def test_a_slower_disk_makes_it_longer_again() -> None:
    lead = Lead()
    for _ in range(10):
        iteration(lead, 0.02, 0.1)
    settled = lead.seconds
    assert settled <= 0.12
    assert iteration(lead, 0.3, 0.5)[0] > 0
    for _ in range(10):
        iteration(lead, 0.3, 0.5)
    assert lead.seconds > settled
    assert iteration(lead, 0.3, 0.5) == (0, 0)


def test_without_mistakes_everything_starts_at_once() -> None:
    lead = Lead()
    lead.look(even_trace(), 0)
    lead.late(0.1)
    assert lead.wants(N_OPERATORS - 1)
    assert lead.seconds == math.inf


def test_where_nothing_is_foretold_nothing_is_learnt_of_distances() -> None:
    lead = Lead()
    lead.look(None, 5)
    lead.cancelled(100)
    assert lead.seconds == math.inf
    lead.seconds = 0.1
    assert lead.wants(-1)


def test_what_is_in_flight_follows_budget_and_bandwidth() -> None:
    assert flight_limit(400 * MIB, 10e9) == 100 * MIB
    assert flight_limit(64 << 30, 1e9) == 500_000_000
    assert flight_limit(10 * MIB, 1e6) == 16 * MIB


def test_a_step_writes_no_more_than_it_may() -> None:
    allowance = Allowance(100)
    assert not allowance.over(100)
    allowance.spend(60)
    assert not allowance.over(40)
    assert allowance.over(41)
    allowance.begin_step()
    assert not allowance.over(100)
    allowance.spend(20)
    assert allowance.most_bytes == 60


def test_after_failures_in_a_row_the_step_goes_without() -> None:
    allowance, error = Allowance(), SpillError("writing")
    allowance.failed(error)
    allowance.failed(error)
    allowance.succeeded()
    allowance.failed(error)
    allowance.failed(error)
    assert allowance.failing is None
    allowance.failed(error)
    assert allowance.failing is error
    allowance.begin_step()
    assert allowance.failing is None
