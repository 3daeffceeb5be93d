# SPDX-License-Identifier: Apache-2.0
"""The long traces of benchmarks/large.py are what they say, in small."""

import pytest

from benchmarks.large import LAYERS, lines
from lowtide.cli.pool import compare_allocators
from lowtide.recorder.files import parse_history


@pytest.mark.parametrize("changing", [False, True])
def test_a_long_trace_is_planned(changing: bool) -> None:
    history = parse_history("".join(lines(5000, changing=changing)).encode())
    assert history.events == 5000
    assert len(history.blocks) == 2500
    report = compare_allocators("trace", history, lambda *_: None)
    assert report.period == (0 if changing else 4 * LAYERS)
    assert report.optimal
    assert report.pool_bytes == report.lower_bound_bytes
