# SPDX-License-Identifier: Apache-2.0
"""What keeping a budget costs is laid on what there is much of."""

import numpy as np
import pytest

from lowtide.runtime import overheads


def test_costs_are_found_again() -> None:
    rows = np.array(
        [[900, 8, 2, 1e6], [800, 200, 4, 1e6], [200, 60, 30, 9e7], [70, 16, 16, 4e6]]
    )
    costs = np.array([2e-5, 1e-4, 3e-4, 1e-9])
    assert overheads._shared_out(rows, rows @ costs) == pytest.approx(list(costs))


def test_no_cost_is_negative() -> None:
    rows = np.array([[100.0, 10, 0, 0], [200, 10, 0, 0], [300, 90, 0, 0]])
    found = overheads._shared_out(rows, np.array([2.0, 4.1, 5.0]))
    assert min(found) >= 0
    assert found[1] == 0


@pytest.mark.parametrize("case", overheads._CASES)
def test_every_program_trains(case: tuple[object, int, float]) -> None:
    build, _, part = case
    build(2)()  # type: ignore[operator]
    assert 0 < part < 1
