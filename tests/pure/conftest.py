# SPDX-License-Identifier: Apache-2.0
"""Lanes that are closed after the test, in a directory that may lie in memory."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lowtide.runtime.transfers import DiskLane
from tests.pure.blocks import memories


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Give a directory; tests of the lane accept one in memory."""
    return tmp_path


@pytest.fixture
def make(disk: Path) -> Iterator[Callable[..., DiskLane]]:
    """Make lanes there, and close them in the end."""
    lanes: list[DiskLane] = []

    def make_lane(**arguments: object) -> DiskLane:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the spill directory")
            lanes.append(DiskLane(disk, **arguments))  # type: ignore[arg-type]
        return lanes[-1]

    yield make_lane
    for lane in lanes:
        lane.close()
    memories.clear()
