# SPDX-License-Identifier: Apache-2.0
import os
import traceback
from collections.abc import Callable

import pytest

import lowtide
from lowtide.frames import hide_frames

OURS = os.path.join(os.path.dirname(lowtide.__file__), "runtime", "pretended.py")
OPERATORS = os.path.join("site-packages", "torch", "_ops.py")


def function_in(file: str, body: str, **names: object) -> Callable[[], None]:
    """Make a function whose frames say that they are of a file."""
    code = compile(f"def call():\n    {body}", file, "exec")
    exec(code, names)
    call: Callable[[], None] = names["call"]  # type: ignore[assignment]
    return call


def files_after_hiding(call: Callable[[], None]) -> list[str]:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    error = caught.value
    hide_frames(error)
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return [file for file in files if file != __file__]


def test_an_operator_under_our_mode_looks_as_if_called_directly() -> None:
    fail = function_in(OPERATORS, "raise ValueError('shapes')")
    mode = function_in(OURS, "fail()", fail=fail)
    layer = function_in("layer.py", "mode()", mode=mode)
    assert files_after_hiding(layer) == ["layer.py"]


def test_torchs_caller_of_operators_stays_where_the_program_called_it() -> None:
    fail = function_in(OPERATORS, "raise ValueError('shapes')")
    layer = function_in("layer.py", "fail()", fail=fail)
    assert files_after_hiding(layer) == ["layer.py", OPERATORS]


def test_a_program_called_by_ours_is_shown_whole() -> None:
    inner = function_in("inner.py", "raise ValueError('x')")
    mode = function_in(OURS, "inner()", inner=inner)
    outer = function_in("outer.py", "mode()", mode=mode)
    assert files_after_hiding(outer) == ["outer.py", "inner.py"]


def test_our_own_faults_keep_their_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = function_in(OURS, "raise KeyError('a fault')")
    layer = function_in("layer.py", "fault()", fault=fault)
    assert files_after_hiding(layer) == ["layer.py", OURS]
    on_purpose = function_in(OURS, "raise RuntimeError('as PyTorch')")
    layer = function_in("layer.py", "fault()", fault=on_purpose)
    assert files_after_hiding(layer) == ["layer.py"]
    monkeypatch.setenv("LOWTIDE_TRACEBACK", "1")
    assert files_after_hiding(layer) == ["layer.py", OURS]


def test_causes_are_treated_alike() -> None:
    fail = function_in("layer.py", "raise ValueError('x')")
    mode = function_in(OURS, "fail()", fail=fail)
    body = "\n    ".join(
        ("try:", "    mode()", "except ValueError as e:", "    raise KeyError from e")
    )
    with pytest.raises(KeyError) as caught:
        function_in("outer.py", body, mode=mode)()
    hide_frames(caught.value)
    cause = caught.value.__cause__
    assert cause is not None
    files = [frame.filename for frame in traceback.extract_tb(cause.__traceback__)]
    assert files == ["outer.py", "layer.py"]


def test_errors_that_cause_each_other_end() -> None:
    a, b = ValueError("a"), ValueError("b")
    a.__context__, b.__context__ = b, a
    hide_frames(a)
