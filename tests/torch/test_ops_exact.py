"""A seeded part of the exactness suites: every operator and module, few samples each.

`benchmarks/exact.py` runs all of their samples.
"""

from itertools import chain

import pytest

from benchmarks import exact_modules, exact_operators
from benchmarks.samples import Outcome, compare_samples

OPERATOR_PARTS = 16
MODULE_PARTS = 4
SEED = 2026

# What torch's own samples warn of is not ours to repair.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("part", range(OPERATOR_PARTS))
def test_operators_keep_every_bit(part: int) -> None:
    """One sample of each operator, in its usual and in-place form, in three regimes."""
    operators = exact_operators.operators()
    names = [name for name in operators if name not in exact_operators.LEFT_OUT]
    samples = chain.from_iterable(
        exact_operators.samples_of(operators[name], seed=SEED, limit=1)
        for name in names[part::OPERATOR_PARTS]
    )
    outcome = Outcome("operators", f"part {part}")
    compare_samples(samples, outcome, seed=SEED)
    check(outcome)


@pytest.mark.parametrize("part", range(MODULE_PARTS))
def test_modules_keep_every_bit(part: int) -> None:
    """Two samples of each module, training and evaluating, in three regimes."""
    modules = exact_modules.modules()
    samples = chain.from_iterable(
        exact_modules.samples_of(modules[name], seed=SEED, limit=2)
        for name in list(modules)[part::MODULE_PARTS]
    )
    outcome = Outcome("modules", f"part {part}")
    compare_samples(samples, outcome, seed=SEED)
    check(outcome)


def test_plans_that_were_learnt_keep_every_bit() -> None:
    """One sample of each 64th operator, three times, the last two by a plan."""
    operators = exact_operators.operators()
    names = [name for name in operators if name not in exact_operators.LEFT_OUT]
    samples = chain.from_iterable(
        exact_operators.samples_of(operators[name], seed=SEED, limit=1)
        for name in names[:: 4 * OPERATOR_PARTS]
    )
    outcome = Outcome("operators", "learnt")
    compare_samples(samples, outcome, seed=SEED, learnt=True)
    check(outcome)
    assert outcome.followed > outcome.passed / 2


def check(outcome: Outcome) -> None:
    """Require that all was the same, and that it was put to the test."""
    assert outcome.failures == []
    assert outcome.passed > 0
    assert outcome.replayed > 0
    assert outcome.written_bytes > 0
