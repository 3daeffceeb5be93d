# SPDX-License-Identifier: Apache-2.0
"""Timelines for tests of what reads them."""

from typing import Any

from lowtide.timeline import Kept, Timeline

MIB = 2**20


def make_timeline(**changes: Any) -> Timeline:
    """Make the timeline of a healthy run, less what the test changes."""
    fields: dict[str, Any] = {
        "policy": "auto",
        "allocator": "lowtide",
        "budget_bytes": 800 * MIB,
        "plain_peak_bytes": 1600 * MIB,
        "plain_peak_known": False,
        "static_bytes": 300 * MIB,
        "floor_bytes": 500 * MIB,
        "smallest_bytes": 520 * MIB,
        "planned_peak_bytes": 780 * MIB,
        "peak_bytes": 790 * MIB,
        "first_peak_bytes": 795 * MIB,
        "steps": 12,
        "step_seconds": 2.31,
        "trained": True,
        "saved_bytes": 1100 * MIB,
        "kept_bytes": 300 * MIB,
        "swapped_bytes": 600 * MIB,
        "recomputed_bytes": 200 * MIB,
        "exposed_seconds": 0.04,
        "replay_seconds": 0.31,
        "decide_seconds": 0.01,
        "written_bytes": 7200 * MIB,
        "read_bytes": 7200 * MIB,
        "verified_tensors": 0,
        "kept": (
            Kept("shares its memory with a NumPy array", 1, 2 * MIB, "input"),
            Kept("not needed to leave", 31, 298 * MIB, "layer4.2.bn3 output"),
        ),
        "notes": (),
    }
    return Timeline(**{**fields, **changes})
