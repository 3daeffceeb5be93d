# SPDX-License-Identifier: Apache-2.0
"""Who may import whom: read from the sources, without importing them.

The table is the architecture. A part not named here may not exist, and a part may
import itself, the parts in its row, NumPy and the standard library, and what else its
row allows. Imports for type checkers count too, since they bind the design as much;
only in circles they do no harm.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
PACKAGE = SOURCE / "lowtide"


@dataclass(frozen=True)
class Rule:
    """What a part may import."""

    ours: frozenset[str]
    others: frozenset[str] = field(default_factory=frozenset)


def rule(ours: str = "", others: str = "") -> Rule:
    return Rule(frozenset(ours.split()), frozenset(others.split()))


NOUNS = (
    "errors units version tidefile hardware kinds trace history plan timeline archive"
)
STAGES = f"{NOUNS} frames recorder planner scheduler _core"
RULES = {
    "errors": rule(),
    "version": rule(),
    "units": rule("errors"),
    "frames": rule("errors"),
    "tidefile": rule("errors"),
    "hardware": rule("errors units"),
    "kinds": rule(),
    "trace": rule("errors units tidefile"),
    "plan": rule("errors units tidefile trace"),
    "timeline": rule("errors units tidefile trace"),
    "archive": rule("errors units tidefile trace history plan timeline"),
    "history": rule("errors units tidefile trace"),
    "recorder": rule("errors units hardware trace history", others="torch"),
    # Optuna is optional: weights.py loads it on first use.
    "planner": rule("errors units hardware trace plan _core", others="optuna"),
    "scheduler": rule("errors hardware trace plan"),
    "simulator": rule(f"{NOUNS} scheduler _core"),
    "elsewhere": rule(f"{NOUNS} planner scheduler simulator"),
    "runtime": rule(STAGES, others="torch"),
    "reports": rule("errors units trace plan timeline elsewhere"),
    "integrations": rule("runtime", others="torch"),
    # The root resolves names that need torch on first use: it does not count as one.
    "": rule(f"{STAGES} simulator runtime reports integrations"),
    "cli": rule(
        f"{STAGES} simulator elsewhere runtime reports integrations __root__",
        others="typer rich",
    ),
    "__main__": rule("cli"),
}
READERS = ("files", "lives", "logs", "profiler", "snapshot", "steady")
WITHOUT_TORCH = {f"recorder/{name}.py" for name in READERS}
STANDARD = sys.stdlib_module_names | {"numpy"}

FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """Return the folder or root module that a file belongs to; "" for the root."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imports_of(path: Path, *, executed_only: bool = False) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of everything a file imports, at any depth."""
    todo: list[ast.AST] = [ast.parse(path.read_text(), str(path))]
    while todo:
        node = todo.pop()
        if executed_only and isinstance(node, ast.If) and is_for_checkers(node.test):
            todo += node.orelse
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def is_for_checkers(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def module_of(dotted: str) -> str:
    """Cut an imported name down to the module of ours that it comes from."""
    parts = dotted.split(".")
    while len(parts) > 1:
        path = SOURCE.joinpath(*parts)
        if path.with_suffix(".py").exists() or path.with_suffix(".pyi").exists():
            break
        if (path / "__init__.py").exists():
            break
        parts.pop()
    return ".".join(parts)


def part_imported(dotted: str) -> str:
    parts = module_of(dotted).split(".")
    return parts[1] if len(parts) > 1 else "__root__"


def faults_of(path: Path) -> Iterator[str]:
    part = part_of(path)
    allowed = RULES[part]
    for line, dotted in imports_of(path):
        top = dotted.split(".")[0]
        where = f"{path.relative_to(SOURCE)}:{line} imports {dotted}"
        if top == "lowtide":
            if part_imported(dotted) not in {part, *allowed.ours}:
                yield f"{where}, but may import only: {' '.join(sorted(allowed.ours))}"
        elif top not in STANDARD and top not in allowed.others:
            yield f"{where}, which is not for {part or 'the root'}"
        elif top == "torch" and str(path.relative_to(PACKAGE)) in WITHOUT_TORCH:
            yield f"{where}, but this file works without torch"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_table(path: Path) -> None:
    assert part_of(path) in RULES, "a new part needs a row in the table above"
    assert list(faults_of(path)) == []


def test_nothing_imports_the_command_line() -> None:
    importers = {
        part_of(path)
        for path in FILES
        for _, dotted in imports_of(path)
        if dotted.startswith("lowtide.cli")
    }
    assert importers <= {"cli", "__main__"}


def test_no_import_goes_round_in_a_circle() -> None:
    graph = {
        name_of(path): {
            module_of(dotted)
            for _, dotted in imports_of(path, executed_only=True)
            if dotted.startswith("lowtide.")
        }
        for path in FILES
    }
    assert circles_in(graph) == []


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles_in(graph: dict[str, set[str]]) -> list[str]:
    """Take away modules that import nothing left, or that nothing left imports."""
    left = {name: to - {name} for name, to in graph.items()}
    while left:
        used = set().union(*left.values())
        ends = [n for n, to in left.items() if not to & left.keys() or n not in used]
        if not ends:
            break
        for name in ends:
            del left[name]
    return sorted(left)


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert circles_in(graph) == ["b", "c"]


def test_no_name_hides_a_module_beside_it() -> None:
    """`import a.b.c as d` fails where the package a.b has a name c of its own."""
    clashes = []
    for path in FILES:
        if path.name != "__init__.py":
            continue
        modules = {p.stem for p in path.parent.glob("*.py")} | {
            p.parent.name for p in path.parent.glob("*/__init__.py")
        }
        for _, dotted in imports_of(path):
            name = dotted.rsplit(".", 1)[-1]
            if name in modules and module_of(dotted) != dotted:
                clashes.append(f"{path.relative_to(SOURCE)} exports {name}")
    assert clashes == []


@pytest.mark.parametrize(
    "module",
    [
        "lowtide",
        "lowtide.cli",
        "lowtide.hardware",
        "lowtide.recorder.files",
        "lowtide.reports.text",
        "lowtide.scheduler",
    ],
)
def test_importing_loads_no_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 0
