# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import BudgetError
from lowtide.reports.text import render
from lowtide.timeline import RUNNING, Kept, outcome_of
from tests.pure.timelines import MIB, make_timeline

HEALTHY = """\
lowtide: 12 steps trained within 800.0 MiB (policy auto)

  budget             800.0 MiB   50% of the plain peak
  planned peak       780.0 MiB
  measured peak      790.0 MiB   first step 795.0 MiB
  plain peak          1.56 GiB   without lowtide; computed from what was saved
  smallest budget    520.0 MiB   that works
  between steps      300.0 MiB   what stays: parameters, gradients, \
optimizer state, data
  time per step         2.31 s   40.0 ms exposed to copies, 0.31 s recomputing
  saved per step      1.07 GiB   for backward, of it:
    kept             300.0 MiB   stayed in memory
    swapped          600.0 MiB   left for the spill file
    recomputed       200.0 MiB   computed again

  What stayed in memory per step, and why
      298.0 MiB  not needed to leave (31 tensors, e.g. layer4.2.bn3 output)
       2.00 MiB  shares its memory with a NumPy array (1 tensor, e.g. input)
"""

STILL = {"swapped_bytes": 0, "recomputed_bytes": 0, "written_bytes": 0}


def test_a_healthy_run() -> None:
    assert render(make_timeline()) == HEALTHY


def test_a_program_that_does_not_train_gets_one_line() -> None:
    text = render(make_timeline(trained=False, peak_bytes=0, first_peak_bytes=3 * MIB))
    assert text.count("\n") == 1
    assert "no backward pass" in text
    assert "3.00 MiB" in text


def test_what_is_to_be_noted_is_said_of_a_program_that_did_not_train_too() -> None:
    text = render(make_timeline(trained=False, notes=("a thread trained",)))
    assert text.endswith(").\n  note: a thread trained\n")


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (None, "this program ran no backward pass"),
        (SystemExit(), "this program ran no backward pass"),
        (SystemExit(0), "this program ran no backward pass"),
        (SystemExit("no data"), "ended by exit status 1 before the first backward"),
        (SystemExit(7), "ended by exit status 7 before the first backward pass"),
        (ValueError(), "ended by ValueError before the first backward pass"),
        (KeyboardInterrupt(), "interrupted before the first backward pass"),
    ],
)
def test_a_program_that_ended_early_is_not_said_to_do_nothing(
    failure: BaseException | None, said: str
) -> None:
    text = render(make_timeline(trained=False, outcome=outcome_of(failure)))
    assert text.startswith(f"lowtide: {said}")
    assert text.count("\n") == 1


SHORTAGE = BudgetError(budget_bytes=1, operator="aten::mm", needed_bytes=2)


@pytest.mark.parametrize(
    ("failure", "how"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (ValueError("x"), "ended by ValueError"),
        (SHORTAGE, "ended by BudgetError"),
        (SystemExit(7), "ended by exit status 7"),
        (SystemExit("no data"), "ended by exit status 1"),
    ],
)
def test_a_run_that_did_not_come_to_its_end_is_not_called_trained(
    failure: BaseException, how: str
) -> None:
    outcome = outcome_of(failure)
    first = render(make_timeline(outcome=outcome)).splitlines()[0]
    expected = f"{how} after 12 steps, up to then within 800.0 MiB (policy auto)"
    assert first == f"lowtide: {expected}"
    first = render(make_timeline(outcome=outcome, steps=0)).splitlines()[0]
    assert first.startswith(f"lowtide: {how} before the end of a step, up to then wi")
    first = render(make_timeline(outcome=outcome, peak_bytes=900 * MIB)).splitlines()[0]
    assert "trained" not in first
    assert "NOT within 800.0 MiB but with up to 900.0 MiB" in first


def test_a_run_that_goes_on_is_not_called_trained() -> None:
    first = render(make_timeline(outcome=RUNNING)).splitlines()[0]
    assert first == "lowtide: 12 steps so far, within 800.0 MiB (policy auto)"
    text = render(make_timeline(outcome=RUNNING, trained=False))
    assert text.startswith("lowtide: no backward pass so far (")


def test_the_smallest_budget_suffices_as_it_is_written() -> None:
    text = render(make_timeline(smallest_bytes=520 * MIB + 1))
    assert "smallest budget    520.1 MiB" in text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"plain_peak_bytes": 700 * MIB}, "needs 700.0 MiB by itself, which fits"),
        ({"policy": "keep"}, "the policy keep forbids it"),
        ({}, "no saved tensor could leave memory; the reasons are below."),
        ({"kept": ()}, "no saved tensor could leave memory."),
    ],
)
def test_a_run_in_which_nothing_left_says_why(changes: dict, reason: str) -> None:
    text = render(make_timeline(**STILL, **changes))
    assert "Nothing was moved or recomputed" in text
    assert reason in text


def test_a_budget_far_above_the_need_is_not_called_a_share_of_it() -> None:
    assert "of the plain peak" not in render(make_timeline(plain_peak_bytes=MIB))


def test_nothing_is_said_of_a_run_in_which_something_left() -> None:
    assert "Nothing was" not in render(make_timeline(swapped_bytes=0))


def test_a_broken_budget_is_called_broken() -> None:
    text = render(make_timeline(peak_bytes=801 * MIB))
    said = "12 steps trained, NOT within 800.0 MiB but with up to 801.0 MiB (policy"
    assert said in text


def test_a_budget_broken_in_the_first_step_is_called_broken() -> None:
    text = render(make_timeline(first_peak_bytes=812 * MIB))
    said = "NOT within 800.0 MiB but with up to 812.0 MiB, in the first step (policy"
    assert said in text


def test_a_budget_broken_by_less_than_is_shown_is_not_contradicted() -> None:
    text = render(make_timeline(peak_bytes=800 * MIB + 5))
    assert (
        "NOT within 800.0 MiB (838,860,800 bytes) but with up to 800.0 MiB "
        "(838,860,805 bytes) (policy"
    ) in text


def test_the_only_step_is_its_peak() -> None:
    text = render(make_timeline(steps=1, peak_bytes=0, first_peak_bytes=812 * MIB))
    assert "1 step trained, NOT within 800.0 MiB but with up to 812.0 MiB (" in text
    assert "measured peak      812.0 MiB" in text


def test_gradients_without_a_step() -> None:
    text = render(make_timeline(steps=0, step_seconds=0.0))
    assert "gradients computed, no optimizer's step, within 800.0 MiB" in text
    assert "time per step        unknown" in text


def test_what_was_measured_is_told_from_what_was_computed() -> None:
    assert "without lowtide; measured\n" in render(make_timeline(plain_peak_known=True))
    assert "cannot see" in render(make_timeline(allocator="python"))


def test_many_reasons_are_summed_up() -> None:
    kept = tuple(Kept(f"reason {i}", 2, i * MIB, "") for i in range(1, 12))
    text = render(make_timeline(kept=kept, notes=("a", "b")))
    assert "reason 11 (2 tensors)" in text
    assert "6.00 MiB  3 other reasons" in text
    assert text.endswith("  note: a\n  note: b\n")


@given(
    st.integers(0, 2**50),
    st.integers(0, 2**50),
    st.integers(0, 2**50),
    st.floats(0, 1e5),
)
def test_any_numbers_line_up(budget: int, plain: int, peak: int, time: float) -> None:
    timeline = make_timeline(
        budget_bytes=budget, plain_peak_bytes=plain, peak_bytes=peak, step_seconds=time
    )
    rows = render(timeline).split("\n\n")[1].splitlines()
    ends = {len(row[:30].rstrip()) for row in rows}
    assert ends == {30}
