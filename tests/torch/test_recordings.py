"""Recorded trainings of the benchmark models are placed at their lower bound."""

import pytest

from benchmarks import placement
from benchmarks.recordings import record
from lowtide.planner.pool import Search


@pytest.mark.parametrize(("model", "way"), [("unet", "all three"), ("swin", "plain")])
def test_a_training_is_placed_at_its_bound(model: str, way: str) -> None:
    recording = record(model, "adamw", way)
    row = placement.measure(recording.problem, "auto", Search())
    assert row["height"] <= 1.001 * row["lower_bound"]
    assert row["blocks"] > 500
    # What the models of allocators are given is the whole training.
    assert len(recording.blocks) > 4 * row["blocks"]
