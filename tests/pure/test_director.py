# SPDX-License-Identifier: Apache-2.0
"""The director's decisions about one value alone, worked out by hand."""

import pytest

from lowtide.scheduler.director import KEEP, RECOMPUTE, RULES, SWAP, Lanes, judge

MIB = 1 << 20
CLOSED = Lanes(0.0, 0.0)
SLOW = Lanes(1.0 * MIB, 1.0 * MIB)  # bytes a second
FAST = Lanes(1e6 * MIB, 1e6 * MIB)
HOURS = 1e4  # seconds: no replay may take that long


@pytest.mark.parametrize(
    ("policy", "lanes", "replay_seconds", "choice"),
    [
        ("auto", SLOW, 0.01, RECOMPUTE),  # 8 MiB out and back: 16 s
        ("auto", SLOW, 100.0, SWAP),
        ("auto", FAST, 0.01, SWAP),  # 16 us
        ("auto", SLOW, None, SWAP),
        ("auto", CLOSED, 100.0, RECOMPUTE),
        ("auto", CLOSED, None, KEEP),
        ("keep", FAST, 0.0, KEEP),
        ("swap-only", SLOW, 0.0, SWAP),
        ("swap-only", CLOSED, 0.0, KEEP),
        ("recompute-only", FAST, HOURS, RECOMPUTE),
        ("recompute-only", FAST, None, KEEP),
    ],
)
def test_one_value_takes_the_cheaper_way_that_is_open(
    policy: str, lanes: Lanes, replay_seconds: float | None, choice: int
) -> None:
    assert judge(8 * MIB, replay_seconds, lanes, RULES[policy]) == choice


@pytest.mark.parametrize("policy", RULES)
@pytest.mark.parametrize("nbytes", [0, 1, 1024])
def test_a_small_value_alone_stays(policy: str, nbytes: int) -> None:
    for lanes in (CLOSED, SLOW, FAST):
        assert judge(nbytes, 0.0, lanes, RULES[policy]) == KEEP
        assert judge(nbytes, None, lanes, RULES[policy]) == KEEP
