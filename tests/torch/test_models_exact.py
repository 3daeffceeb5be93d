"""Ten networks from transformers train within budgets exactly as without.

`benchmarks/exact.py` runs them at more budgets, and the curve for 200 steps.
"""

import pytest

from benchmarks import exact_models
from tests.models import MODELS

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", MODELS)
def test_models_keep_every_bit(name: str) -> None:
    """Three steps at the smallest budget and half-way from there to the plain peak."""
    outcome = exact_models.run(name, fractions=(0.0, 0.5))
    assert outcome.failures == []
    assert outcome.passed == 2


def test_loss_curve_at_half_of_the_peak() -> None:
    """Forty steps of GPT-2 with dropout: every loss, and the state at the end."""
    outcome = exact_models.run_curve(steps=40)
    assert outcome.failures == []
    assert outcome.passed == 1
