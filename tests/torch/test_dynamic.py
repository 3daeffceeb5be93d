# SPDX-License-Identifier: Apache-2.0
"""Programs that differ from step to step train exactly, at half of their peak."""

from typing import Any

import pytest

from benchmarks import dynamic
from lowtide.runtime.session import Session
from tests.compare import differing, seed_everything, training_state

STEPS = 4


def train(name: str, session: Session) -> tuple[list[str], dict[str, Any]]:
    seed_everything(3)
    with session:
        training = dynamic.build(name, quick=True)
        losses = [training.step().hex() for _ in range(STEPS)]
        return losses, training_state(training.model, training.optimizer)


@pytest.mark.parametrize("name", dynamic.SIZES)
def test_half_of_the_peak_is_enough_and_exact(name: str) -> None:
    plain = Session("1TiB", policy="keep")
    losses, state = train(name, plain)
    report = plain.report()
    budget = max(report.peak_bytes, report.first_peak_bytes) // 2
    session = Session(budget)
    found, reached = train(name, session)
    assert found == losses
    assert differing(state, reached) == []
    report = session.report()
    assert report.peak_bytes <= budget
    assert report.swapped_bytes + report.recomputed_bytes > 0


def test_the_tree_is_another_one_at_every_step() -> None:
    training = dynamic.build("tree", quick=True)
    sizes = {tuple(training.make_batch()["x"].shape) for _ in range(8)}
    assert len(sizes) > 3
