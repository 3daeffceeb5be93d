# SPDX-License-Identifier: Apache-2.0
"""The allocator is compiled once, whatever happens to compiler, cache and file."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lowtide.runtime import allocator, shim
from lowtide.runtime.allocator import PythonCounter
from tests.torch.processes import succeeds

FIRST_USE = """
from lowtide.runtime.allocator import install
counter = install()
import torch
tensor = torch.empty(1000)
print(counter.name, counter.live.value)
"""


@pytest.fixture(scope="module")
def quick_compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a compiler that knows only one result, to spare the tests some time."""
    folder = tmp_path_factory.mktemp("compiler")
    built = folder / "built.so"
    shim._compile(shim._compiler(), shim._source(), built)
    compiler = folder / "c++"
    compiler.write_text(
        f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp "{built}" "$2"\n'
    )
    compiler.chmod(0o755)
    return compiler


def test_it_is_compiled_once_and_said_so(tmp_path: Path, quick_compiler: Path) -> None:
    environment = {"LOWTIDE_CACHE_DIR": str(tmp_path), "CXX": str(quick_compiler)}
    first = succeeds(FIRST_USE, **environment)
    assert f"compiling its allocator for torch {torch.__version__} (once," in first
    assert "lowtide 4000\n" in first
    assert succeeds(FIRST_USE, **environment) == "lowtide 4000\n"
    # A damaged library is replaced: loading it would kill the process.
    (library,) = tmp_path.glob("*/*")
    content = library.read_bytes()
    library.write_bytes(content[:5000])
    assert "lowtide 4000\n" in succeeds(FIRST_USE, **environment)
    assert list(tmp_path.glob("*/*")) == [library]
    assert library.read_bytes() == content


def test_first_uses_at_once_do_not_collide(
    tmp_path: Path, quick_compiler: Path
) -> None:
    environment = {"LOWTIDE_CACHE_DIR": str(tmp_path), "CXX": str(quick_compiler)}
    with ThreadPoolExecutor(3) as pool:
        for output in pool.map(lambda _: succeeds(FIRST_USE, **environment), range(3)):
            assert "lowtide 4000\n" in output
    assert len(list(tmp_path.glob("*/*"))) == 1


def test_without_a_place_to_cache_it_is_compiled_for_this_process(
    tmp_path: Path, quick_compiler: Path
) -> None:
    (tmp_path / "file").touch()
    output = succeeds(
        FIRST_USE,
        LOWTIDE_CACHE_DIR=str(tmp_path / "file" / "below"),
        CXX=str(quick_compiler),
        TMPDIR=str(tmp_path),
    )
    assert "lowtide 4000\n" in output
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_failing_compiler_is_quoted_once(tmp_path: Path) -> None:
    compiler = tmp_path / "mycc"
    compiler.write_text("#!/bin/sh\necho 'fatal error: no such header' >&2\nexit 3\n")
    compiler.chmod(0o755)
    output = succeeds(
        FIRST_USE + "assert install() is counter\n",
        LOWTIDE_CACHE_DIR=str(tmp_path / "cache"),
        CXX=str(compiler),
    )
    assert output.count("fatal error: no such header") == 1
    assert "failed with exit code 3" in output
    assert "python 0\n" in output


def test_without_a_compiler_the_warning_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "nonesuch -O3")
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(shim.NoShimError, match=r"tried \$CXX \(nonesuch\), g\+\+"):
        shim.load_shim()
    fallback = allocator._installed.__wrapped__()
    (said,) = caplog.messages
    assert "not the workspace" in said
    assert "apt-get install g" in said
    assert isinstance(fallback, PythonCounter)
    assert not fallback.sees_workspace


def test_a_compiler_that_is_not_there_is_said_once_and_replaced(
    tmp_path: Path, quick_compiler: Path
) -> None:
    (tmp_path / "g++").symlink_to(quick_compiler)
    output = succeeds(
        FIRST_USE + "assert install() is counter\n",
        LOWTIDE_CACHE_DIR=str(tmp_path / "cache"),
        CXX="nonesuch -O3",
        PATH=f"{tmp_path}:/usr/bin:/bin",
    )
    assert output.count("$CXX names 'nonesuch', which is not there; using g++") == 1
    assert "lowtide 4000\n" in output


def test_no_warning_shows_a_line_of_ours(tmp_path: Path) -> None:
    output = succeeds(
        FIRST_USE,
        LOWTIDE_CACHE_DIR=str(tmp_path / "cache"),
        CXX="nonesuch",
        PATH=str(tmp_path),
    )
    assert "lowtide: counting memory in Python, because there is no C++" in output
    assert "Warning" not in output
    assert ".py" not in output
