# SPDX-License-Identifier: Apache-2.0
"""lowtide show: its output for every kind of file, and one clear line for the rest."""

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from lowtide.archive import save
from lowtide.cli.app import main
from lowtide.recorder.files import read_history
from lowtide.tidefile import Tide, to_tide, write_tide
from lowtide.trace import OPS, VALUES, VERSIONS, Trace
from tests.pure.foreign import autoswap, mutate, write_all
from tests.pure.golden import check_golden
from tests.pure.test_archive import make_graph

NAMES = ("snapshot.pickle", "trace.json", "memInfo.text", "vec_run.csv", "dtr.log")


def lowtide(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lowtide", *args])
    try:
        return main()
    except SystemExit as done:
        return -1 if done.code is None else int(done.code)


@pytest.mark.parametrize("name", [*NAMES, "run.tide"])
def test_text(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_all(tmp_path)[name]
    assert lowtide(monkeypatch, "show", str(path)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    check_golden(f"show-{name}.txt", captured.out)


@pytest.mark.parametrize("name", ["snapshot.pickle", "run.tide"])
def test_json(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_all(tmp_path)[name]
    assert lowtide(monkeypatch, "show", "--json", str(path)) == 0
    output = capsys.readouterr().out
    assert json.loads(output)["file"] == name
    check_golden(f"show-{name}.json", output)


def test_packed_and_renamed_files_are_the_same(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = write_all(tmp_path)
    outputs = set()
    for path in (paths["trace.json"], paths["trace.json.gz"]):
        renamed = path.rename(tmp_path / "unnamed")
        assert lowtide(monkeypatch, "show", str(renamed)) == 0
        outputs.add(capsys.readouterr().out)
    assert len(outputs) == 1


def test_a_history_is_kept_in_a_tide_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = write_all(tmp_path)
    kept = tmp_path / "kept"
    kept.mkdir()
    write_tide(
        kept / "snapshot.pickle",
        to_tide("history", read_history(paths["snapshot.pickle"])),
    )
    assert lowtide(monkeypatch, "show", str(kept / "snapshot.pickle")) == 0
    check_golden("show-snapshot.pickle.txt", capsys.readouterr().out)


def refusals(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    path: Path,
    *options: str,
) -> str:
    """Look into a file that may be damaged; return the line, "" when it was read."""
    status = lowtide(monkeypatch, verb, str(path), *options)
    captured = capsys.readouterr()
    if status == 0:
        assert captured.out
        return ""
    assert (status, captured.out) == (2, "")
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(f"lowtide {verb}: {path} ")
    return captured.err


@pytest.mark.parametrize("name", [*NAMES, "trace.json.gz", "run.tide"])
def test_mutated_files_give_one_line(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """30 damaged files of each of seven kinds; some are still what they were."""
    path = write_all(tmp_path)[name]
    whole = path.read_bytes()
    refused = 0
    for seed in range(30):
        path.write_bytes(mutate(whole, seed))
        refused += bool(refusals(monkeypatch, capsys, "show", path))
    assert refused >= 10


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"\x7fELF", "is nothing that lowtide reads, which is: a CUDA memory snapshot"),
        (b"\x1f\x8b" + b"\0" * 20, "cannot be unpacked"),
        (b"Malloc \xff\xfe 3 4", "is no text: byte 7"),
        (b"\x89TIDE\r\n\x1a" + b"\0" * 24, "there is no format 0"),
        (b"\x80\x04cos\nsystem\n.", "is refused: it uses the pickle operation"),
    ],
)
def test_reasons(
    content: bytes,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert why in refusals(monkeypatch, capsys, "show", path)


def test_what_is_no_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("none", "is missing"), (".", "is not"), ("pipe", "is not")):
        assert why in refusals(monkeypatch, capsys, "show", tmp_path / name)


def test_a_device_that_is_not_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_all(tmp_path)["snapshot.pickle"]
    for device, why in (("cuda:7", "there is: 0"), ("tpu", "'tpu' is none")):
        line = refusals(monkeypatch, capsys, "show", path, "--device", device)
        assert why in line


def test_a_large_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 34)  # a hole: it takes no room on the disk
    with pytest.raises(ValueError, match=r"has more than 1.00 GiB"):
        read_history(path)
    packed = write_all(tmp_path)["trace.json.gz"]
    with pytest.raises(ValueError, match=r"has more than 400 B"):
        read_history(packed, most_bytes=400)


def test_control_characters_do_not_reach_the_terminal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "a\x1b[2Jb"
    path.write_text(autoswap())
    assert lowtide(monkeypatch, "show", str(path)) == 0
    assert "\x1b" not in capsys.readouterr().out
    hostile = Tide(kind="x\x1b[2J", meta={"a\x1b": "\x1b", "b": 3})
    write_tide(path, hostile)
    assert lowtide(monkeypatch, "show", str(path)) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_trace_is_summed_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ops = np.zeros(2, OPS)
    ops["live"], ops["need"], ops["seconds"] = [5, 7], 1, [0.25, 0.5]
    trace = Trace(ops=ops, values=np.zeros(0, VALUES), key=3)
    path = tmp_path / "a.tide"
    write_tide(path, to_tide("trace", trace))
    assert lowtide(monkeypatch, "show", "--json", str(path)) == 0
    facts = json.loads(capsys.readouterr().out)["facts"]
    assert facts == {"key": 3, "plain_peak_bytes": 8, "seconds": 0.75}


def test_a_bar_is_drawn_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=80)
    monkeypatch.setattr("lowtide.cli.files.Console", lambda **_: terminal)
    monkeypatch.setenv("TERM", "xterm")
    path = write_all(tmp_path)["memInfo.text"]
    assert lowtide(monkeypatch, "pool", str(path)) == 0
    assert "lowtide: [--------------------] reading memInfo.text" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[K\x1b8")  # wiped in the end


def test_a_tide_file_of_another_version_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "a.tide"
    for kind in ("history", "trace"):
        write_tide(path, Tide(kind=kind, meta={"future": 1}))
        line = refusals(monkeypatch, capsys, "show", path)
        assert "is from another version of lowtide, it differs in: " in line
    lost = np.full(1, 99, VERSIONS)
    save(path, dataclasses.replace(make_graph(), versions=lost))
    assert "contradicts itself" in refusals(monkeypatch, capsys, "show", path)


def test_whoever_reads_the_output_may_stop_early(tmp_path: Path) -> None:
    path = write_all(tmp_path)["trace.json"]
    for options in (["--json"], []):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [sys.executable, "-m", "lowtide", "show", *options, str(path)],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        os.close(writer)
        assert (done.returncode, done.stderr) == (141, "")
