# SPDX-License-Identifier: Apache-2.0
"""Every public thread that asked for right gradients or for offloading has a test.

A test that covers one names it in its docstring, wherever it stands; most are in
tests/torch/test_demand_*.py.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
THREADS = {
    "silently wrong gradients": (
        *("pytorch#190758", "pytorch#190717", "guided-diffusion#167"),
        *("OLMo-core PR#828", "pytorch PR#194478", "pytorch#96136"),
        *("ms-swift PR#10157", "torchtune#1867", "TRL PR#7195"),
        *("Megatron-LM#7398", "torchtitan PR#2581"),
    ),
    "errors of checkpointing": (
        *("pytorch#171355", "NeMo-RL#1203", "torchtitan#1117", "pytorch#141896"),
        *("pytorch#155171", "pytorch#166926", "transformers#34928"),
        *("Lightning#19267", "pytorch#82156", "pytorch#103726", "pytorch#24005"),
        *("transformers#23018", "peft#313"),
    ),
    "hooks that offload, and host memory": (
        *("TRL#4280", "TRL PR#5694", "TRL PR#5700", "pytorch#86097"),
        *("pytorch#95823", "unsloth#338", "unsloth#3828", "cache-dit PR#1111"),
        *("pytorch#64729", "pytorch PR#198016", "pytorch#115255"),
        *("pytorch#181832", "pytorch#191236", "discuss.pytorch.org/t/208243"),
        *("DeepSpeed#522", "DeepSpeed#3779"),
    ),
}


@cache
def docstrings() -> str:
    found = []
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.append(" ".join((ast.get_docstring(node) or "").split()))
    return "\n".join(found)


@pytest.mark.parametrize("group", THREADS)
def test_every_thread_is_named_by_a_test(group: str) -> None:
    words = docstrings().replace(",", " ").replace(":", " ").replace(";", " ")
    spaced = f" {words} ".replace("\n", " ").replace(")", " ").replace("(", " ")
    missing = [name for name in THREADS[group] if f" {name} " not in spaced]
    assert missing == []
