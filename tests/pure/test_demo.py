# SPDX-License-Identifier: Apache-2.0
"""The demonstration must fail loudly when the promise is not kept."""

import pytest

from examples.demo import STEP, Run, judge

LOSSES = ("0x1.cc2cf20000000p+2", "0x1.ccc1f20000000p+2")
WITHIN = {"peak_bytes": 99, "budget_bytes": 100}


def a_run(*losses: str) -> Run:
    return Run(losses=losses, seconds=(2.0, 1.0), resident_bytes=1000)


@pytest.mark.parametrize(
    ("halved", "timeline", "status"),
    [
        (LOSSES, WITHIN, 0),
        ((LOSSES[0], "0x1.ccc1f20000001p+2"), WITHIN, 1),
        (LOSSES[:1], WITHIN, 1),
        ((), WITHIN, 1),
        (LOSSES, {"peak_bytes": 101, "budget_bytes": 100}, 1),
    ],
)
def test_judgement(
    halved: tuple[str, ...],
    timeline: dict[str, int],
    status: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert judge(a_run(*LOSSES), a_run(*halved), 200, timeline) == status
    captured = capsys.readouterr()
    assert ("equal to the last bit" in captured.out) is (status == 0)
    assert captured.err.startswith("\nFAILED: ") is (status != 0)


@pytest.mark.parametrize("losses", [(), ("nan", "nan"), ("inf", "inf")])
def test_equal_but_useless_losses_fail(losses: tuple[str, ...]) -> None:
    assert judge(a_run(*losses), a_run(*losses), 200, WITHIN) == 1


def test_the_scripts_lines_are_understood() -> None:
    match = STEP.match("step   3  loss 7.291558743  0x1.d2a8e60000000p+2   14.33 s\n")
    assert match is not None
    assert match.groups() == ("3", "7.291558743", "0x1.d2a8e60000000p+2", "14.33")
