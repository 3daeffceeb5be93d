# SPDX-License-Identifier: Apache-2.0
"""Compile, cache and load the C++ allocator that counts torch's CPU bytes.

The C++ interface of c10 differs from one torch to the next, so that a wheel cannot
carry the library: its source is compiled at first use (about three seconds) and kept
under `$LOWTIDE_CACHE_DIR` or `~/.cache/lowtide`, in a folder that names everything the
result depends on. Two processes may do this at once: each compiles into a file of its
own and renames it into place. Its name carries a digest of its content, because loading
a truncated library kills the process. Where nothing can be cached, a temporary folder
serves this process alone.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

_COMPILERS = ("g++", "clang++", "c++")
_STEM = "cpu_allocator"
_UNITS = ("arena.cc", "arena_free.cc", "arena_moves.cc", "ranges.cc")  # beside it
_HEADERS = (
    *("arena.h", "block_log.h", "block_table.h", "counters.h", "machine.h"),
    *("pages.h", "ranges.h"),
)
_SHOWN_LINES = 15

_NUMBER, _COUNT, _POINTER = ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p
# What `cpp/cpu_allocator.cc` exports: the result, then the arguments.
_SIGNATURES: dict[str, tuple[type | None, ...]] = {
    "install": (_POINTER,),
    "is_current": (ctypes.c_bool,),
    "adjust": (None, _NUMBER),
    "adopt": (_NUMBER, _POINTER),
    "blocks": (_NUMBER,),
    "bytes": (_NUMBER, _POINTER),
    "trim": (_NUMBER,),
    "keep": (None, _NUMBER),
    "log_start": (ctypes.c_bool,),
    "log_stop": (None,),
    "log_events": (_NUMBER,),
    "log_copy": (_NUMBER, _NUMBER, _POINTER, _NUMBER),
    "plan_set": (None, _COUNT, _POINTER, _COUNT, _POINTER, _POINTER, _COUNT),
    "plan_begin": (None, _COUNT, _POINTER),
    "plan_end": (None,),
    "plan_asked": (None, _COUNT, _POINTER, _COUNT),
    "plan_move": (None,),
    "arena": (None, _POINTER),
    "arena_reset": (None,),
    "arena_debug": (None, ctypes.c_bool),
}


class NoShimError(Exception):
    """Say why the allocator cannot be compiled or loaded on this machine."""


def load_shim() -> ctypes.CDLL:
    """Load the allocator's library, compiling it first where that is needed.

    Raises:
        NoShimError: there is no compiler, or it failed, or the result does not load.
    """
    if sys.platform != "linux":
        raise NoShimError(f"lowtide's allocator does not know {sys.platform}")
    source = _source()
    folder = _cache_folder(source)
    library = _cached(folder)
    if library is not None:
        return library
    compiler = _compiler()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=folder))
    except OSError:
        folder = scratch = Path(tempfile.mkdtemp(prefix="lowtide-"))
    try:
        return _build(compiler, source, scratch, folder)
    finally:
        # A loaded library needs its file no longer.
        shutil.rmtree(scratch, ignore_errors=True)


def _cached(folder: Path) -> ctypes.CDLL | None:
    """Load the library from the cache; clear away what is damaged."""
    for path in sorted(folder.glob(f"{_STEM}-*.so")):
        with contextlib.suppress(OSError):
            if path.name == _named_by_content(path):
                return _typed(ctypes.CDLL(str(path)))
            path.unlink()
    return None


def _build(
    compiler: Sequence[str], source: Path, scratch: Path, folder: Path
) -> ctypes.CDLL:
    """Compile in a folder of our own, load, then offer the result to others."""
    print(
        f"lowtide: compiling its allocator for torch {torch.__version__} "
        "(once, a few seconds)",
        file=sys.stderr,
        flush=True,
    )
    built = scratch / f"{_STEM}.so"
    _compile(compiler, source, built)
    try:
        library = _typed(ctypes.CDLL(str(built)))
    except OSError as error:
        raise NoShimError(f"the compiled allocator does not load: {error}") from error
    with contextlib.suppress(OSError):
        built.replace(folder / _named_by_content(built))
    return library


def _named_by_content(path: Path) -> str:
    """Name a library so that damage to it shows."""
    return f"{_STEM}-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}.so"


def _source() -> Path:
    """Find the C++ source: in the installed package, or in the source tree."""
    package = Path(__file__).resolve().parents[1]
    places = (
        package / "_native" / "cpu_allocator.cc",
        package.parents[1] / "cpp" / "cpu_allocator.cc",
    )
    for place in places:
        if place.is_file():
            return place
    raise NoShimError(
        "its source is not where it should be: "
        + " or ".join(str(place) for place in places)
        + "; reinstall lowtide"
    )


def _cache_folder(source: Path) -> Path:
    """Name the folder for this source, torch and machine."""
    root = os.environ.get("LOWTIDE_CACHE_DIR")
    if not root:
        root = os.path.join(
            os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"),
            "lowtide",
        )
    machine = platform.machine()
    facts = (str(torch.version.git_version), sys.platform, machine, str(_abi()))
    digest = hashlib.sha256(source.read_bytes())
    for name in (*_UNITS, *_HEADERS):
        digest.update(source.with_name(name).read_bytes())
    digest.update("\0".join(facts).encode())
    name = f"torch-{torch.__version__}-abi{_abi()}-{machine}-{digest.hexdigest()[:16]}"
    return Path(root) / name


def _abi() -> int:
    """Tell which of the two ABIs of libstdc++ this torch was built with."""
    return int(torch.compiled_with_cxx11_abi())


def _compiler() -> Sequence[str]:
    """Choose the C++ compiler: the environment's, or the first one found."""
    chosen = os.environ.get("CXX", "").split()
    for command in (chosen, *([name] for name in _COMPILERS)):
        if command and shutil.which(command[0]):
            if chosen and command is not chosen:
                print(
                    f"lowtide: $CXX names {chosen[0]!r}, which is not there; "
                    f"using {command[0]}",
                    file=sys.stderr,
                    flush=True,
                )
            return command
    asked = f"$CXX ({chosen[0]}), " if chosen else ""
    raise NoShimError(f"there is no C++ compiler: tried {asked}{', '.join(_COMPILERS)}")


def _compile(compiler: Sequence[str], source: Path, target: Path) -> None:
    """Run the compiler; it links libc10 only, which torch has loaded by now."""
    torch_folder = Path(torch.__file__).resolve().parent
    command = [
        *compiler,
        *("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"),
        f"-D_GLIBCXX_USE_CXX11_ABI={_abi()}",
        *("-isystem", str(torch_folder / "include")),
        *(str(source), *(str(source.with_name(name)) for name in _UNITS)),
        *("-o", str(target)),
        *(f"-L{torch_folder / 'lib'}", "-lc10"),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoShimError(f"{compiler[0]} does not start: {error}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()[:_SHOWN_LINES]
        raise NoShimError(
            f"{compiler[0]} failed with exit code {done.returncode}:\n"
            + "\n".join(f"    {line}" for line in said)
        )


def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the signatures of `cpp/cpu_allocator.cc`.

    Raises:
        OSError: the library lacks one of them, as a truncated file may.
    """
    try:
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(library, f"lowtide_{name}")
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise OSError(str(error)) from error
    return library
