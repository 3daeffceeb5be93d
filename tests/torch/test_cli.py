# SPDX-License-Identifier: Apache-2.0
"""`lowtide run` with torch in earnest: same output as `python`, within the budget."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lowtide.cli.run import Request, open_session
from lowtide.runtime.session import Session

LOWTIDE = [sys.executable, "-m", "lowtide", "run"]

TRAIN = """
import argparse
import torch
from torch import nn

def block():
    return nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1))

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--budget", default="the script's own")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(*[block() for _ in range(12)])
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(args.steps):
        optimizer.zero_grad()
        loss = model(torch.randn(2048, 256)).square().mean()
        loss.backward()
        optimizer.step()
        print(step, loss.item().hex(), args.budget, flush=True)
    print(torch.rand(1).item().hex())

if __name__ == "__main__":
    main()
"""


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def lowtide(
    folder: Path, budget: object, *args: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run a program under a budget; return how it ended and its report."""
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    command = [*LOWTIDE, f"--budget={budget}", f"--report={report}", *args]
    done = run(command, folder)
    return done, json.loads(report.read_text()) if report.exists() else {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("program")
    (folder / "train.py").write_text(TRAIN)
    return folder


@pytest.fixture(scope="module")
def plain_output(folder: Path) -> str:
    return run([sys.executable, "train.py"], folder).stdout


@pytest.fixture(scope="module")
def plain_peak(folder: Path) -> int:
    done, timeline = lowtide(folder, "100%", "--policy=keep", "train.py")
    assert done.returncode == 0, done.stderr
    assert timeline["plain_peak_known"]
    assert "Nothing was moved or recomputed" in done.stderr
    return int(timeline["peak_bytes"])


@pytest.mark.parametrize("policy", ["auto", "swap-only", "recompute-only"])
def test_the_same_output_in_less_memory(
    policy: str, folder: Path, plain_output: str, plain_peak: int
) -> None:
    budget = plain_peak * 6 // 10
    done, timeline = lowtide(folder, budget, f"--policy={policy}", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain_output
    assert timeline["peak_bytes"] <= budget
    assert timeline["steps"] == 4
    assert timeline["swapped_bytes"] + timeline["recomputed_bytes"] > 0
    assert "4 steps trained within" in done.stderr


def test_options_and_modules(folder: Path) -> None:
    plain = run([sys.executable, "train.py", "--budget", "x", "--steps=1"], folder)
    done, _ = lowtide(folder, "75%", "-m", "train", "--budget", "x", "--steps=1")
    assert (done.returncode, done.stdout) == (0, plain.stdout)


def test_a_plan_is_kept_followed_and_refused(
    folder: Path, plain_output: str, plain_peak: int
) -> None:
    budget = plain_peak * 6 // 10
    done, _ = lowtide(folder, budget, "--save-plan=plan.tide", "train.py")
    assert (done.returncode, done.stdout) == (0, plain_output), done.stderr
    done, timeline = lowtide(folder, budget, "--plan=plan.tide", "train.py")
    assert (done.returncode, done.stdout) == (0, plain_output), done.stderr
    assert 0 < timeline["first_peak_bytes"] <= budget
    assert not any("plan" in note for note in timeline["notes"])
    done, timeline = lowtide(folder, 2 * budget, "--plan=plan.tide", "train.py")
    assert (done.returncode, done.stdout, timeline) == (2, "", {})
    assert f"made for budget {budget} bytes" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_cap_on_what_a_step_writes() -> None:
    request = Request(
        budget="1GiB",
        host="auto",
        disk_writes="4KiB",
        spill_dir=None,
        policy="auto",
        verify=False,
        pool=False,
        report=None,
        plan=None,
        save_plan=None,
        target="train.py",
        is_module=False,
        args=(),
    )
    session = open_session(request, None)
    assert isinstance(session, Session)
    assert session.tiers.disk_writes == 4096


def test_verify(folder: Path, plain_output: str, plain_peak: int) -> None:
    done, timeline = lowtide(folder, plain_peak * 6 // 10, "--verify", "train.py")
    assert (done.returncode, done.stdout) == (0, plain_output), done.stderr
    assert timeline["verified_tensors"] > 0


def test_a_budget_too_small_names_one_that_works(folder: Path, plain_peak: int) -> None:
    done, timeline = lowtide(folder, plain_peak // 20, "train.py")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("lowtide: a budget of ")
    assert "aten" in last
    assert str(timeline["smallest_bytes"]) in last
    again, _ = lowtide(folder, timeline["smallest_bytes"], "train.py")
    assert again.returncode == 0, again.stderr


def test_a_program_that_does_not_train(folder: Path) -> None:
    script = "import torch; print(torch.ones(3).sum().item())"
    (folder / "count.py").write_text(script)
    done, timeline = lowtide(folder, "1GiB", "count.py")
    assert (done.returncode, done.stdout) == (0, "3.0\n")
    *compiling, line = done.stderr.splitlines()
    assert "ran no backward pass" in line
    assert len(compiling) <= 1
    assert timeline["trained"] is False


FAILS = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(9, 9)

    def forward(self, x):
        return self.second(self.first(x).relu())

Net()(torch.ones(2, 8)).sum().backward()
"""

FAILS_IN_BACKWARD = """
import torch

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        x, = ctx.saved_tensors
        raise ValueError(f"wrong on purpose: {gradient.sum() + x.sum()}")

Square.apply(torch.ones(3, requires_grad=True)).sum().backward()
"""

CHANGED_IN_PLACE = """
import torch
x = torch.ones(3, requires_grad=True)
y = x.exp()
y.add_(1)
y.sum().backward()
"""


@pytest.mark.parametrize("script", [FAILS, FAILS_IN_BACKWARD])
def test_errors_are_the_users_own(script: str, folder: Path) -> None:
    (folder / "fails.py").write_text(script)
    plain = run([sys.executable, "fails.py"], folder)
    done, _ = lowtide(folder, "1GiB", "fails.py")
    assert done.returncode == plain.returncode == 1
    start = done.stderr.index("Traceback")
    assert done.stderr[start:] == plain.stderr


def test_a_saved_tensor_changed_in_place_is_shown_where_it_is_used(
    folder: Path,
) -> None:
    (folder / "changed.py").write_text(CHANGED_IN_PLACE)
    plain = run([sys.executable, "changed.py"], folder)
    done, _ = lowtide(folder, "1GiB", "changed.py")
    lines = done.stderr[done.stderr.index("Traceback") :].splitlines()
    expected = plain.stderr.splitlines()
    assert lines[:-1] == expected[:-1]
    beginning = "RuntimeError: one of the variables needed for gradient computation has"
    assert expected[-1].startswith(beginning)
    assert lines[-1].startswith(beginning)


# Waits in its third step until it is interrupted.
INTERRUPTED = TRAIN.replace(
    "        loss.backward()",
    "        if step == 2: __import__('threading').Event().wait()\n"
    "        loss.backward()",
)


def test_interrupt_in_the_middle_of_training(folder: Path, plain_peak: int) -> None:
    (folder / "interrupted.py").write_text(INTERRUPTED)
    budget = plain_peak * 6 // 10
    process = subprocess.Popen(
        [*LOWTIDE, f"--budget={budget}", "interrupted.py"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("0 ")
    assert process.stdout.readline().startswith("1 ")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGINT
    assert "lowtide: interrupted after 2 steps, up to then within " in errors
    assert "trained within" not in errors
    assert errors.endswith("KeyboardInterrupt\n")
    assert f"lowtide{os.sep}runtime" not in errors


WORKERS = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        torch.manual_seed(index)
        return torch.randn(256)

if __name__ == "__main__":
    torch.manual_seed(0)
    layers = [(nn.Linear(256, 256), nn.Tanh()) for _ in range(12)]
    model = nn.Sequential(*[layer for pair in layers for layer in pair])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    context = sys.argv[1] if sys.argv[1] != "none" else None
    loader = DataLoader(
        Numbers(), batch_size=1024, num_workers=2 if context else 0,
        multiprocessing_context=context,
    )
    for epoch in range(1):
        for batch in loader:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            print(loss.item().hex())
"""


@pytest.fixture(scope="module")
def peak_with_workers(folder: Path) -> int:
    (folder / "workers.py").write_text(WORKERS)
    done, timeline = lowtide(folder, "100%", "--policy=keep", "workers.py", "none")
    assert done.returncode == 0, done.stderr
    return int(timeline["peak_bytes"])


@pytest.mark.parametrize("context", ["none", "fork", "spawn"])
def test_data_loaders_with_workers(
    context: str, folder: Path, peak_with_workers: int
) -> None:
    plain = run([sys.executable, "workers.py", context], folder)
    budget = peak_with_workers * 7 // 10
    done, timeline = lowtide(folder, budget, "workers.py", context)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    assert done.stderr.count("(policy auto)") == 1, "a worker must not report"
    assert timeline["peak_bytes"] <= budget
    assert timeline["swapped_bytes"] + timeline["recomputed_bytes"] > 0


CHILDREN = """
import multiprocessing
import torch

def train(rank, results):
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 4)
    model(torch.ones(2, 4)).sum().backward()
    results.put((rank, model.weight.grad.sum().item()))

if __name__ == "__main__":
    torch.nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        results = context.Queue()
        children = [context.Process(target=train, args=(i, results)) for i in (0, 1)]
        for child in children:
            child.start()
        print(method, sorted(results.get(timeout=60) for _ in children))
        for child in children:
            child.join()
            assert child.exitcode == 0
"""


def test_children_that_train_are_left_alone(folder: Path) -> None:
    (folder / "children.py").write_text(CHILDREN)
    plain = run([sys.executable, "children.py"], folder)
    done, _ = lowtide(folder, "1GiB", "children.py")
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
    assert done.stderr.count("(policy auto)") == 1
