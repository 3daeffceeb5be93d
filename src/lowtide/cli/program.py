# SPDX-License-Identifier: Apache-2.0
"""Run somebody's program as `python` itself would.

The program gets a fresh `__main__` in `sys.modules`, so that pickle, dataclasses and
multiprocessing find its names there; `sys.argv` and `sys.path[0]` are what they would
be without lowtide. A child that multiprocessing spawns is told to import the file or
module named by that `__main__`, and so never comes near lowtide's command line.
"""

import builtins
import importlib.machinery
import importlib.util
import io
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from lowtide.errors import LowtideError


class ProgramError(LowtideError):
    """Report that there is no such program to run."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program that was found and compiled, but has not begun to run."""

    code: CodeType
    main: ModuleType

    def run(self) -> None:
        """Execute the program; whatever it raises, SystemExit too, comes out."""
        exec(self.code, self.main.__dict__)


def load_program(target: str, args: Sequence[str], *, is_module: bool) -> Program:
    """Find a program and put it where the interpreter keeps its main program.

    Arguments:
        target: a file, a directory or zip archive with a `__main__.py`, or the
            name of a module.
        args: what follows the target on the command line.
        is_module: whether the target is a module's name.

    Raises:
        ProgramError: there is no such program.
        SyntaxError: the program does not compile.
    """
    if is_module:
        _set_path(Path.cwd())
        sys.argv = ["-m", *args]
        program = _from_spec(_find_module(target))
        sys.argv = [str(program.main.__file__), *args]
    else:
        sys.argv = [target, *args]
        program = _load_path(target)
    sys.modules["__main__"] = program.main
    return program


def _load_path(target: str) -> Program:
    if target == "-":
        raise ProgramError(
            "a program cannot be read from standard input; save it to a file first"
        )
    path = Path(target).absolute()
    if not path.exists():
        raise ProgramError(f"cannot find the script {target!r} (in {Path.cwd()})")
    if path.is_dir() or zipfile.is_zipfile(path):
        _set_path(path)
        spec = PathFinder.find_spec("__main__", [str(path)])
        if spec is None:
            raise ProgramError(f"cannot find a __main__ module in {target!r}")
        return _from_spec(spec)
    _set_path(path.resolve().parent)
    try:
        with io.open_code(str(path)) as file:
            source = file.read()
    except OSError as error:
        raise ProgramError(f"cannot read {target!r}: {error.strerror}") from None
    code = compile(source, str(path), "exec", dont_inherit=True)
    main = _new_main()
    main.__file__ = str(path)
    main.__loader__ = SourceFileLoader("__main__", str(path))
    return Program(code, main)


def _find_module(name: str) -> ModuleSpec:
    """Find what `python -m name` would run: the module, or the package's __main__."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            package, spec = spec, importlib.util.find_spec(f"{name}.__main__")
            if spec is None:
                raise ProgramError(
                    f"{name!r} is a package without a __main__ module "
                    f"({package.origin}); name one of its modules"
                )
    except ValueError:  # the module is loaded already and cannot be found anew
        spec = None
    except ImportError as error:
        if not name.startswith(".") and not _is_part(error.name, name):
            raise  # the package was found, and itself imports something missing
        spec = None
    if spec is None or spec.loader is None:
        hint = f"; to run the file, drop -m: {name}" if name.endswith(".py") else ""
        raise ProgramError(f"no module named {name!r}{hint}")
    return spec


def _is_part(missing: str | None, name: str) -> bool:
    return missing is not None and f"{name}.__main__.".startswith(f"{missing}.")


def _from_spec(spec: ModuleSpec) -> Program:
    get_code = getattr(spec.loader, "get_code", None)
    code = None if get_code is None else get_code(spec.name)
    if code is None:
        raise ProgramError(f"{spec.name!r} has no Python code to run ({spec.origin})")
    main = _new_main()
    main.__file__ = code.co_filename if spec.origin is None else spec.origin
    main.__loader__ = spec.loader
    main.__package__ = spec.parent
    main.__spec__ = spec
    vars(main)["__cached__"] = spec.cached
    return Program(code, main)


def _new_main() -> ModuleType:
    main = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __cached__=None)
    return main


def _set_path(first: Path) -> None:
    """Replace the folder of lowtide's launcher by that of the program."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(first)
