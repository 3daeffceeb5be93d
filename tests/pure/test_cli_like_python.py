# SPDX-License-Identifier: Apache-2.0
"""`lowtide run` against `python`: the same program must not notice the difference.

Each program runs under both, and output, errors and exit status are compared. No test
here loads torch: the session is a fake one.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipapp
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable]
LOWTIDE = [sys.executable, str(ROOT / "tests/pure/fake_lowtide.py"), "run"]
WITHIN = ["--budget", "1GiB"]
UNTRAINED = (
    "lowtide: this program ran no backward pass",
    "lowtide: ended by ",
    "lowtide: interrupted before the first backward pass",
)


@dataclass(frozen=True)
class Outcome:
    status: int
    output: str
    errors: str


def environment(**changes: str) -> dict[str, str]:
    path = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **changes}


def run(command: Sequence[str], folder: Path, **changes: str) -> Outcome:
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    errors = done.stderr.splitlines(keepends=True)
    kept = [line for line in errors if not line.startswith(UNTRAINED)]
    return Outcome(done.returncode, done.stdout, without_runpy("".join(kept)))


def without_runpy(errors: str) -> str:
    """Take out the frames of `python -m` itself."""
    return re.sub(r'  File "<frozen runpy>", line .*\n(    .*\n)*', "", errors)


def assert_same(args: Sequence[str], folder: Path, **changes: str) -> Outcome:
    plain = run([*PYTHON, *args], folder, **changes)
    ours = run([*LOWTIDE, *WITHIN, *args], folder, **changes)
    assert ours == plain
    return ours


def write(folder: Path, text: str, name: str = "program.py") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return name


PROGRAMS = {
    "names": """
import sys, os
print(sys.argv, __name__, __file__, __package__, __spec__, __doc__, os.getcwd())
print(sys.path[0], sys.modules["__main__"].__dict__ is globals())
print(type(__loader__).__name__, sorted(n for n in globals() if n != "__annotations__"))
""",
    "nothing": "",
    "exit nothing": "import sys; sys.exit()",
    "exit 7": "import sys; sys.exit(7)",
    "exit True": "import sys; sys.exit(True)",
    "exit text": "import sys; print('out'); sys.exit('a reason')",
    "exit object": "import sys; sys.exit([1, 2])",
    "exit at once": "import os; print('x', flush=True); os._exit(9)",
    "error": """
def inner(n):
    return 1 / n

def outer():
    inner(0)

outer()
""",
    "error with a cause": """
def fail():
    try:
        {}["key"]
    except KeyError as error:
        raise RuntimeError("two") from error
try:
    fail()
except RuntimeError:
    raise ValueError("three")
""",
    "own excepthook": """
import sys
def hook(kind, value, traceback):
    print("hook", kind.__name__, value, traceback.tb_lineno, traceback.tb_next)
sys.excepthook = hook
raise OSError("x")
""",
    "syntax error": "x = 1\ndef f(:\n    pass\n",
    "keyboard interrupt": "raise KeyboardInterrupt",
    "generator exit": "raise GeneratorExit",
    "memory error": "raise MemoryError('no')",
    "error at exit": """
import atexit
atexit.register(print, "at exit", __name__)
raise SystemExit(4)
""",
    "thread outlives main": """
import threading
event = threading.Event()
thread = threading.Thread(target=lambda: (event.wait(), print("thread done")))
thread.start()
threading.Timer(0.01, event.set).start()
print("main done")
""",
    "pickle": """
import dataclasses, pickle

@dataclasses.dataclass
class Point:
    x: "int"
    y: int = 2

print(pickle.loads(pickle.dumps(Point(1))), Point.__module__)
""",
    "multiprocessing": """
import multiprocessing, sys

def square(n):
    return n * n, __name__, "lowtide" in sys.modules

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(square, [1, 2]))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        print([n for n, *_ in pool.map(square, [1, 2])])
""",
    "argparse": """
import argparse
parser = argparse.ArgumentParser(description="A script with our own option's name")
parser.add_argument("--budget", type=int)
parser.add_argument("-m", action="store_true")
parser.add_argument("rest", nargs="*")
print(parser.parse_args())
""",
    "closed output": "import sys; print('x'); sys.stdout.close()",
    "no output": "import sys; sys.stdout = sys.stderr = None",
    "warning": "import warnings; warnings.warn('old', DeprecationWarning)",
    "assertion": "assert 1 == 2, 'no'",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, tmp_path: Path) -> None:
    assert_same([write(tmp_path, PROGRAMS[name]), "a", "b"], tmp_path)


@pytest.mark.parametrize(
    "args",
    [
        ["--budget", "5"],
        ["-m", "x"],
        ["--", "--budget", "5"],
        ["--help"],
        ["--unknown"],
        ["--budget=many"],
        ["", " "],
    ],
)
def test_options_after_the_script_are_its_own(args: list[str], tmp_path: Path) -> None:
    assert_same([write(tmp_path, PROGRAMS["argparse"]), *args], tmp_path)


def test_a_double_dash_ends_our_options(tmp_path: Path) -> None:
    script = write(tmp_path, PROGRAMS["argparse"])
    plain = run([*PYTHON, script, "--budget", "5"], tmp_path)
    assert run([*LOWTIDE, *WITHIN, "--", script, "--budget", "5"], tmp_path) == plain


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups are of 3.11")
def test_exception_group(tmp_path: Path) -> None:
    text = """
errors = []
for error in (ValueError("a"), KeyError("b")):
    try:
        raise error
    except Exception as caught:
        errors.append(caught)
raise ExceptionGroup("both", errors)
"""
    assert_same([write(tmp_path, text)], tmp_path)


def test_neighbours_are_found_from_elsewhere(tmp_path: Path) -> None:
    write(tmp_path, "print(__name__, __file__)", "code/neighbour.py")
    script = write(tmp_path, "import neighbour, sys; print(sys.path[0])", "code/run.py")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert_same([f"../{script}"], elsewhere)
    assert_same([str(tmp_path / script)], elsewhere)
    (elsewhere / "link.py").symlink_to(tmp_path / script)
    assert_same(["link.py"], elsewhere)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8-sig"])
def test_source_encodings(encoding: str, tmp_path: Path) -> None:
    text = "print(ascii('\N{LATIN SMALL LETTER E WITH ACUTE}'))\n"
    cookie = "" if encoding == "utf-8-sig" else f"# coding: {encoding}\n"
    (tmp_path / "program.py").write_bytes((cookie + text).encode(encoding))
    assert "xe9" in assert_same(["program.py"], tmp_path).output


MODULE = """
import sys
from . import part
from pkg.part import name
print(part, name, __name__, __package__, __spec__.name, __file__, sys.argv)
print(sys.path[0])
if "fail" in sys.argv:
    raise RuntimeError("failed")
"""


@pytest.mark.parametrize("module", ["pkg", "pkg.entry"])
@pytest.mark.parametrize("args", [[], ["fail"], ["--budget", "3", "-m"]])
def test_modules(module: str, args: list[str], tmp_path: Path) -> None:
    write(tmp_path, "", "pkg/__init__.py")
    write(tmp_path, "name = __name__", "pkg/part.py")
    write(tmp_path, MODULE, "pkg/__main__.py")
    write(tmp_path, MODULE, "pkg/entry.py")
    assert_same(["-m", module, *args], tmp_path)


def test_module_with_multiprocessing(tmp_path: Path) -> None:
    write(tmp_path, "", "pkg/__init__.py")
    write(tmp_path, PROGRAMS["multiprocessing"], "pkg/entry.py")
    assert "spawn" in assert_same(["-m", "pkg.entry"], tmp_path).output


@pytest.mark.parametrize("args", [["-m", "json.tool", "-h"], ["-m", "this"]])
def test_modules_of_the_standard_library(args: list[str], tmp_path: Path) -> None:
    assert_same(args, tmp_path)


def test_package_that_fails_to_import(tmp_path: Path) -> None:
    write(tmp_path, "import missing_thing", "pkg/__init__.py")
    write(tmp_path, "", "pkg/__main__.py")
    ours = run([*LOWTIDE, *WITHIN, "-m", "pkg"], tmp_path)
    assert ours.status == 1
    assert "No module named 'missing_thing'" in ours.errors
    assert str(ROOT) not in ours.errors


def test_folders_and_archives(tmp_path: Path) -> None:
    write(tmp_path, "import sys, part; print(sys.path[0], __file__)", "app/__main__.py")
    write(tmp_path, "", "app/part.py")
    assert_same(["app"], tmp_path)
    zipapp.create_archive(tmp_path / "app", tmp_path / "app.pyz")
    shutil.rmtree(tmp_path / "app")
    assert_same(["app.pyz"], tmp_path)


@pytest.mark.parametrize("launcher", [PYTHON, [*LOWTIDE, *WITHIN]], ids=["py", "ours"])
def test_interrupt_from_the_keyboard(launcher: list[str], tmp_path: Path) -> None:
    text = """
import atexit, threading
atexit.register(print, "at exit")
try:
    print("ready", flush=True)
    threading.Event().wait()
finally:
    print("finally")
"""
    process = subprocess.Popen(
        [*launcher, write(tmp_path, text)],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert output == "finally\nat exit\n"
    assert errors.endswith("\nKeyboardInterrupt\n")
    assert errors.startswith(UNTRAINED[2]) == (launcher != PYTHON)
    assert str(ROOT) not in errors


def test_program_that_changes_folder_still_gets_its_report(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    script = write(tmp_path, "import os; os.chdir('other')")
    ours = run([*LOWTIDE, *WITHIN, "--report", "run.json", script], tmp_path)
    assert ours.status == 0
    timeline = json.loads((tmp_path / "run.json").read_text())
    assert timeline["trained"] is False
    assert timeline["budget_bytes"] > 0


def test_forked_child_that_runs_to_the_end_reports_nothing(tmp_path: Path) -> None:
    text = """
import os, sys
pid = os.fork()
if pid == 0:
    sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    command = [*LOWTIDE, *WITHIN, write(tmp_path, text)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, b"5\n")
    assert done.stderr.count(b"ran no backward pass") == 1


def test_program_too_large_for_its_budget(tmp_path: Path) -> None:
    script = write(tmp_path, "print('ran')")
    command = [*LOWTIDE, *WITHIN, "--report", "run.json", script]
    ours = run(command, tmp_path, FAKE_SESSION="budget")
    assert ours.status == 3
    assert ours.output == "ran\n"
    assert "aten::mm needs" in ours.errors
    assert "Traceback" not in ours.errors
    assert (tmp_path / "run.json").exists()
    shown = run(command, tmp_path, FAKE_SESSION="budget", LOWTIDE_TRACEBACK="1")
    assert shown.status == 3
    assert "Traceback (most recent call last)" in shown.errors
    assert shown.errors.endswith(ours.errors)


def test_session_that_cannot_begin(tmp_path: Path) -> None:
    script = write(tmp_path, "print('ran')")
    ours = run([*LOWTIDE, *WITHIN, script], tmp_path, FAKE_SESSION="enter")
    assert ours == Outcome(2, "", "lowtide run: this session cannot begin\n")
