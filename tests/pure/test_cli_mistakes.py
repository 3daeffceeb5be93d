# SPDX-License-Identifier: Apache-2.0
"""Mistakes on the command line: one clear line each, status 2, before anything runs."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.cli.app import main

SCRIPT = "print('ran')"


def lowtide(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lowtide", *args])
    monkeypatch.setattr(sys, "path", ["launcher", *sys.path])
    try:
        return main()
    except SystemExit as done:
        return -1 if done.code is None else int(done.code)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--budget", "8Gigs", "SCRIPT"], "--budget: '8Gigs' is not a usable size"),
        (["--budget", "-1", "SCRIPT"], "--budget: '-1' is not a usable size"),
        (["--budget", "-5MB", "SCRIPT"], "--budget: '-5MB' is not a usable size"),
        (["--budget", "", "SCRIPT"], "--budget: '' is not a usable size: it is empty"),
        (["--budget", "0", "SCRIPT"], "--budget: '0' is not a usable size: a budget"),
        (["--budget", "0%", "SCRIPT"], "--budget: '0%' is not a usable size"),
        (["--budget", "130%", "SCRIPT"], "above 0 and not above 100"),
        (["--budget", "1g", "--host", "x", "SCRIPT"], "--host: 'x' is not"),
        (["--budget", "1g", "--disk-writes", "x", "SCRIPT"], "--disk-writes: 'x' is"),
        (["--budget", "1g", "--policy", "best", "SCRIPT"], "it is one of auto, keep"),
        (["--budget", "1g", "--spill-dir", "no/such", "SCRIPT"], "is not a folder"),
        (["--budget", "1g", "--report", "no/r.json", "SCRIPT"], "--report: cannot"),
        (["--budget", "1g", "--report", ".", "SCRIPT"], "--report: cannot write"),
        (["--budget", "1g", "--plan", "no.tide", "SCRIPT"], "no.tide is not a file"),
        (["--budget", "1g", "--save-plan", ".", "SCRIPT"], "--save-plan: cannot write"),
        (["--budget", "1g", "missing.py"], "cannot find the script 'missing.py'"),
        (["--budget", "1g", "-"], "cannot be read from standard input"),
        (["--budget", "1g", "."], "cannot find a __main__ module"),
        (["--budget", "1g", "-m", "no_such_module"], "no module named 'no_such_mod"),
        (["--budget", "1g", "-m", "no.such.module"], "no module named 'no.such.mod"),
        (["--budget", "1g", "-m", ".relative"], "no module named '.relative'"),
        (["--budget", "1g", "-m", "json.tool.py"], "drop -m"),
        (["--budget", "1g", "-m", "xml"], "package without a __main__ module"),
        (["--budget", "1g", "-m", "sys"], "no Python code to run"),
    ],
)
def test_one_line(
    args: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    real = [str(script) if arg == "SCRIPT" else arg for arg in args]
    assert lowtide(monkeypatch, "run", *real) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("lowtide run: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_all_faults_are_named_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--budget", "x", "--host", "y", "--policy", "z", "missing.py"]
    assert lowtide(monkeypatch, "run", *args) == 2
    assert capsys.readouterr().err.count("\n") == 3


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["run"], "lowtide run: Missing argument 'SCRIPT|-m MODULE'. See: lowtide run"),
        (["run", "x.py"], "lowtide run: Missing option '--budget'. See: lowtide run"),
        (["walk"], "lowtide: No such command 'walk'. See: lowtide --help"),
        (["run", "--no"], "lowtide run: No such option: --no"),
        (["record", "--steps", "x"], "lowtide record: Invalid value for '--steps'"),
        (["plan", "a.tide", "--gpu", "h100", "-o", "p"], "lowtide run --save-plan"),
    ],
)
def test_usage_is_one_line(
    args: list[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert lowtide(monkeypatch, *args) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1


def test_without_arguments_the_verbs_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lowtide(monkeypatch) == 2
    assert "max-batch" in capsys.readouterr().err


def test_ctrl_c_while_loading_shows_no_traceback() -> None:
    code = (
        "import sys; from lowtide.__main__ import main;"
        "class_ = type('Stop', (), {'find_spec': staticmethod(stop)});"
        "sys.meta_path.insert(0, class_); main()"
    )
    stop = (
        "def stop(name, *_):\n"
        "    if name == 'typer':\n"
        "        raise KeyboardInterrupt\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", stop + code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_help_shows_examples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lowtide(monkeypatch, "run", "--help") == 0
    output = capsys.readouterr().out
    assert "lowtide run --budget 8GiB train.py --epochs 3\n" in output
    assert "recompute-only" in output


def test_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lowtide(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("lowtide ")


def test_a_mistake_costs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from lowtide.cli import main;"
        "sys.argv = ['lowtide', 'run', '--budget', 'x', 'y.py'];"
        "status = main(); print('torch' in sys.modules); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "False\n")
