# SPDX-License-Identifier: Apache-2.0
"""Every code block of the README runs.

A block fenced as `python NAME` is a file that later commands find under that name, and
so is what `profile_steps.py` writes. Commands run as they stand, but for two kinds:
installation, which needs a network, has to be what is written here, and `make` would
run these tests again: there the target has to exist.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [match.groups() for match in BLOCK.finditer((ROOT / "README.md").read_text())]
SCRIPTS = [text for language, _, text in BLOCKS if language == "python"]
FILES = {name: text for language, name, text in BLOCKS if language == "python" and name}
COMMANDS = [
    line.split("  #")[0].strip()
    for language, _, text in BLOCKS
    if language == "sh"
    for line in text.splitlines()
]
INSTALLATION = [
    "python3 -m venv .venv",
    ". .venv/bin/activate",
    "pip install torch --index-url https://download.pytorch.org/whl/cpu",
    "pip install .",
]

(TABLE,) = (text for *_, text in BLOCKS if text.startswith("lowtide: "))
(POOL,) = (text for *_, text in BLOCKS if text.startswith("trace.json: "))


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_there_is_something_to_run() -> None:
    assert {language for language, *_ in BLOCKS} == {"python", "sh", "text"}
    assert len(SCRIPTS) >= 3
    assert "train.py" in FILES
    assert "lowtide run --budget 200MiB train.py" in COMMANDS
    assert COMMANDS[: len(INSTALLATION)] == INSTALLATION


@pytest.mark.parametrize("script", SCRIPTS, ids=range(len(SCRIPTS)))
def test_python(script: str, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(script)
    done = run([sys.executable, "-W", "error", "block.py"], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", COMMANDS[len(INSTALLATION) :])
def test_command(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *args = command.split()
    if args == ["measure"]:  # a test's figures are not to be kept
        monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path))
    if program == "make":
        done = run(["make", "--dry-run", *args], ROOT)
        assert done.returncode == 0, done.stderr
    else:
        assert program == "lowtide"
        for name, text in FILES.items():
            (tmp_path / name).write_text(text)
        if "trace.json" in args:
            run([sys.executable, "profile_steps.py"], tmp_path)
        if "--plan" in args:
            keep = [{"--plan": "--save-plan"}.get(arg, arg) for arg in args]
            assert " ".join([program, *keep]) in COMMANDS
            run([sys.executable, "-m", "lowtide", *keep], tmp_path)
        done = run([sys.executable, "-m", "lowtide", *args], tmp_path)
        assert done.returncode == 0, done.stderr
        if args == ["pool", "trace.json"]:
            assert without_numbers(done.stdout) == without_numbers(POOL)
        if args == ["run", "--budget", "200MiB", "train.py"]:
            printed = done.stderr[done.stderr.index("lowtide: 5 steps") :]
            assert without_numbers(printed) == without_numbers(TABLE)


def without_numbers(table: str) -> list[str]:
    """Keep labels and comments; numbers, and what stays, differ between machines."""
    table = table.partition("What stayed")[0]
    return re.sub(r"[0-9.]+( [KMGT]?i?B\b| m?s\b|%)?", "N", table).split()
