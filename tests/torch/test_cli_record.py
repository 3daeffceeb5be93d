# SPDX-License-Identifier: Apache-2.0
"""`lowtide record` in earnest: scripts that know nothing of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide import archive
from lowtide.cli.scripts import Script
from lowtide.trace import Graph

TRAIN = """
import argparse
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--steps", type=int, default=100)
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
data = TensorDataset(torch.randn(6400, args.width), torch.randint(10, (6400,)))
model = nn.Sequential(nn.Linear(args.width, args.width), nn.ReLU(), nn.Dropout(0.1),
                      nn.Linear(args.width, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(data, batch_size=32, shuffle=True)
try:
    for step, (x, y) in zip(range(args.steps), loader):
        optimizer.zero_grad()
        out = model(x.to(device))
        loss = nn.functional.cross_entropy(out, y.to(device))
        loss.backward()
        optimizer.step()
        right = (out.argmax(1) == y.to(device)).float().mean().item()
        print(step, f"{loss.item():.3f} {right:.2f}", flush=True)
except Exception:
    print("caught")
finally:
    print("tidied up")
"""


def record(
    folder: Path, *arguments: str, script: str = TRAIN
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    return subprocess.run(
        [sys.executable, "-m", "lowtide", "record", "-o", "train.tide", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def graph_in(folder: Path) -> Graph:
    graph = archive.load(folder / "train.tide")
    assert isinstance(graph, Graph)
    return graph


def test_a_script_is_recorded_and_ended(tmp_path: Path) -> None:
    done = record(tmp_path, "train.py")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line[0] for line in lines[:2]] == ["0", "1"]  # the third is not printed
    assert "tidied up" in lines
    assert "caught" not in lines
    assert "ended train.py after iteration 3" in done.stderr
    graph = graph_in(tmp_path)
    assert f"{len(graph.operators):,} operators" in lines[-1]
    assert "plain peak" in lines[-1]
    faked = record(tmp_path, "--fake", "--force", "train.py")
    assert faked.returncode == 0, faked.stderr
    fake = graph_in(tmp_path)
    assert [fake.names[i] for i in fake.operators["name"]] == [
        graph.names[i] for i in graph.operators["name"]
    ]
    assert fake.versions["bytes"].sum() == graph.versions["bytes"].sum()


def test_a_size_that_no_machine_has(tmp_path: Path) -> None:
    done = record(tmp_path, "--fake", "--batch", "3000", "train.py", "--width", "90000")
    assert done.returncode == 0, done.stderr
    graph = graph_in(tmp_path)
    assert graph.plain_peak_bytes > 100 << 30
    assert 3000 * 90000 * 4 in graph.versions["bytes"]


def test_for_a_device_that_is_not_there(tmp_path: Path) -> None:
    done = record(tmp_path, "--fake", "--gpu", "rtx4090", "train.py")
    assert done.returncode == 0, done.stderr
    assert "aten::_foreach_sqrt" in graph_in(tmp_path).names


def test_the_batch_stands_among_the_arguments(tmp_path: Path) -> None:
    script = TRAIN.replace("batch_size=32", "batch_size=args.steps")
    arguments = ("--fake", "--batch", "48", "train.py", "--steps", "{batch}")
    done = record(tmp_path, *arguments, script=script)
    assert done.returncode == 0, done.stderr
    assert 48 * 128 * 4 in graph_in(tmp_path).versions["bytes"]


def test_a_script_that_trains_without_an_optimizer(tmp_path: Path) -> None:
    script = """
import torch
w = torch.ones(64, 64, requires_grad=True)
for step in range(9):
    (torch.randn(32, 64) @ w).tanh().sum().backward()
    with torch.no_grad():
        w -= 0.1 * w.grad
        w.grad = None
"""
    done = record(tmp_path, "--fake", "train.py", script=script)
    assert done.returncode == 0, done.stderr
    graph = graph_in(tmp_path)
    assert list(graph.operators["name"]).count(graph.names.index("aten::tanh")) == 1


def test_the_last_iteration_of_a_short_script_counts(tmp_path: Path) -> None:
    done = record(tmp_path, "--fake", "train.py", "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert "ended after 2 iterations" in done.stderr
    assert graph_in(tmp_path).plain_peak_bytes > 0


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("print('hello')", "did not train"),
        (TRAIN.replace("default=100", "default=1"), "one iteration only"),
    ],
)
def test_a_script_that_does_not_train(tmp_path: Path, script: str, says: str) -> None:
    done = record(tmp_path, "--fake", "train.py", script=script)
    assert done.returncode == 1
    assert says in done.stderr
    assert not (tmp_path / "train.tide").exists()


def test_errors_are_the_scripts_own(tmp_path: Path) -> None:
    done = record(tmp_path, "train.py", script="import sys\nraise KeyError('mine')")
    assert done.returncode == 1
    assert "KeyError: 'mine'" in done.stderr
    assert "lowtide/" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--steps", "1", "train.py"), "--steps"),
        (("--gpu", "rtx4090", "train.py"), "need --fake"),
        (("--fake", "--gpu", "abacus", "train.py"), "abacus"),
        (("--fake", "train.py", "{batch}"), "give --batch"),
        (("nowhere.py",), "cannot find the script"),
    ],
)
def test_mistakes_have_status_2(
    tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    done = record(tmp_path, *arguments)
    assert done.returncode == 2
    assert says in done.stderr


def test_a_file_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "train.tide").write_text("precious")
    done = record(tmp_path, "train.py")
    assert done.returncode == 2
    assert "--force" in done.stderr
    assert (tmp_path / "train.tide").read_text() == "precious"


def test_a_script_that_puts_nothing_on_a_gpu_is_planned_as_if_it_did(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])\n"
        "for _ in range(4):\n"
        "    net(torch.ones(4096, 64)).exp().sum().backward()\n"
    )
    here = Script(str(script), (), is_module=False, gpu="rtx4090").record(None)
    assert (here.versions["held"] >= 0).any()
    assert here.plain_peak_bytes > 6 * 4096 * 64 * 4
    assert 0 < here.seconds < 0.01  # as fast as the card
