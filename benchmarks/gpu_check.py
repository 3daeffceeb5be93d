# SPDX-License-Identifier: Apache-2.0
"""Measure lowtide on a device: memory, time, overlap of copies, largest batches.

    python benchmarks/gpu_check.py --device cuda --seconds 270
    python benchmarks/gpu_check.py --device cpu --small        # the same, to try it out

Each model trains plainly, with torch.utils.checkpoint around each block, under
`save_on_cpu(pin_memory=True)`, and within half and a third of its plain peak. `exact`
compares the losses with plain training's, bit for bit; `overlap` is the part of the
time taken by copies (told by events on their streams) that did not lengthen the step.
What the time limit leaves no room for is left out, and said.
"""

import argparse
import functools
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import Row, print_table, write_rows
from lowtide.errors import BudgetError
from lowtide.runtime.devices import install_counter, resolve_device
from lowtide.runtime.session import Session

WARM_UP, TIMED = 3, 5
DEPTHS = {"resnet50": [3, 4, 6, 3], "resnet101": [3, 4, 23, 3]}
BATCHES = {"resnet50": 64, "resnet101": 64, "gpt2-medium": 4, "bert-large": 16}
COLUMNS = [
    "model", "way", "peak_bytes", "of_plain", "seconds", "slowdown", "exact",
    "swapped_bytes", "recomputed_bytes", "overlap",
]  # fmt: skip

Batch = tuple[Tensor, Tensor]


class Subject:
    """One model under training, built anew for each way of training it."""

    def __init__(self, name: str, device: str, *, small: bool, batch: int) -> None:
        self.device = device
        torch.manual_seed(0)
        make = _resnet if name in DEPTHS else _gpt2 if name[0] == "g" else _bert
        self.model, self.blocks, self.loss_of, self.make_batch = make(
            name, batch, small
        )
        self.model.to(device).train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)

    def checkpointed(self) -> None:
        """Put a checkpoint around each block."""
        for block in self.blocks:
            block.forward = functools.partial(
                checkpoint, block.forward, use_reentrant=False
            )

    def step(self) -> float:
        """Train one step; return its loss."""
        inputs, labels = (part.to(self.device) for part in self.make_batch())
        self.optimizer.zero_grad()
        loss = self.loss_of(self.model, inputs, labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()  # waits for the device


Made = tuple[
    nn.Module,
    list[Any],
    Callable[[nn.Module, Tensor, Tensor], Tensor],
    Callable[[], Batch],
]


def _resnet(name: str, batch: int, small: bool) -> Made:
    from transformers import ResNetConfig, ResNetForImageClassification

    width, pixels = (8, 64) if small else (64, 224)
    config = ResNetConfig(
        embedding_size=width,
        hidden_sizes=[4 * width, 8 * width, 16 * width, 32 * width],
        depths=DEPTHS[name],
        num_labels=100,
    )
    model = ResNetForImageClassification(config)
    return (
        model,
        [block for stage in model.resnet.encoder.stages for block in stage.layers],
        lambda m, x, y: F.cross_entropy(m(pixel_values=x).logits, y),
        lambda: (torch.randn(batch, 3, pixels, pixels), torch.randint(100, (batch,))),
    )


def _gpt2(name: str, batch: int, small: bool) -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, heads, length = (3, 64, 4, 64) if small else (24, 1024, 16, 512)
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, n_positions=length, use_cache=False,
        vocab_size=256 if small else 50257, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)

    def loss_of(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m(input_ids=x).logits.flatten(0, 1), y.flatten())

    def make_batch() -> Batch:
        tokens = torch.randint(config.vocab_size, (batch, length + 1))
        return tokens[:, :-1], tokens[:, 1:]

    return model, list(model.transformer.h), loss_of, make_batch


def _bert(name: str, batch: int, small: bool) -> Made:
    from transformers import BertConfig, BertForQuestionAnswering

    layers, width, heads, length = (3, 64, 4, 64) if small else (24, 1024, 16, 384)
    config = BertConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
        intermediate_size=4 * width, vocab_size=256 if small else 30522,
    )  # fmt: skip
    model = BertForQuestionAnswering(config)
    return (
        model,
        list(model.bert.encoder.layer),
        lambda m, x, y: F.cross_entropy(m(input_ids=x).start_logits, y),
        lambda: (
            torch.randint(config.vocab_size, (batch, length)),
            torch.randint(length, (batch,)),
        ),
    )


class Check:
    """All measurements on one device, within a limit of time."""

    def __init__(self, device: str, *, small: bool, seconds: float) -> None:
        self.device = resolve_device(device)
        self.small = small
        self.until = time.monotonic() + seconds
        self.counter = install_counter(self.device)
        self.skipped: list[str] = []

    def has_time(self, what: str, seconds: float = 0.0) -> bool:
        """Say whether there is time for something; else note that it was left out."""
        if time.monotonic() + seconds < self.until:
            return True
        self.skipped.append(what)
        return False

    def start(self, name: str, batch: int) -> Subject:
        """Build a model, after clearing away the one before."""
        gc.collect()
        if self.device != "cpu":
            torch.get_device_module(self.device).empty_cache()
        return Subject(name, self.device, small=self.small, batch=batch)

    def train(
        self, subject: Subject, within: AbstractContextManager[Any]
    ) -> tuple[list[float], float, int]:
        """Train some steps; return the losses, seconds a step, and the peak."""
        torch.manual_seed(1)
        losses, seconds, peak = [], [], 0
        with within:
            for i in range(WARM_UP + TIMED):
                if not isinstance(within, Session):
                    self.counter.reset_peak()
                start = time.perf_counter()
                losses.append(subject.step())
                if i >= WARM_UP:
                    seconds.append(time.perf_counter() - start)
                peak = max(peak, int(self.counter.peak.value) if i else 0)
        if isinstance(within, Session):
            peak = within.report().peak_bytes
        return losses, median(seconds), peak

    def compare(self, name: str) -> Iterator[Row]:
        """Train one model in every way."""
        batch = 4 if self.small else BATCHES[name]
        subject = self.start(name, batch)
        plain, plain_seconds, plain_peak = self.train(subject, nullcontext())
        del subject
        yield {
            "model": name, "way": "plain", "peak_bytes": plain_peak, "of_plain": 1.0,
            "seconds": plain_seconds, "slowdown": 1.0, "exact": True,
        }  # fmt: skip
        ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
            "checkpoint": nullcontext,
            "save_on_cpu": lambda: save_on_cpu(pin_memory=self.device != "cpu"),
            "lowtide 50%": lambda: Session(plain_peak // 2, device=self.device),
            "lowtide 35%": lambda: Session(int(0.35 * plain_peak), device=self.device),
            "lowtide 50%, swap-only": lambda: Session(
                plain_peak // 2, device=self.device, policy="swap-only"
            ),
        }
        for way, make in ways.items():
            expected = 3 * plain_seconds * (WARM_UP + TIMED)
            if not self.has_time(f"{name}, {way}", expected):
                continue
            row: Row = {"model": name, "way": way}
            subject, within = self.start(name, batch), make()
            if way == "checkpoint":
                subject.checkpointed()
            try:
                losses, seconds, peak = self.train(subject, within)
            except (BudgetError, torch.OutOfMemoryError) as error:
                yield {**row, "exact": type(error).__name__, "error": str(error)}
                continue
            finally:
                del subject
            row.update(
                peak_bytes=peak,
                of_plain=peak / plain_peak,
                seconds=seconds,
                slowdown=seconds / plain_seconds,
                exact=losses == plain,
            )
            if isinstance(within, Session):
                row.update(self.moved(within, seconds - plain_seconds))
            yield row

    def moved(self, session: Session, longer: float) -> Row:
        """Say what a session moved a step, and how much of that was hidden."""
        report, lane = session.report(), session.lane
        row: Row = {
            "swapped_bytes": report.swapped_bytes,
            "recomputed_bytes": report.recomputed_bytes,
        }
        if lane is not None and report.swapped_bytes:
            copying = report.swapped_bytes / lane.write_bandwidth
            copying += report.swapped_bytes / lane.read_bandwidth
            longer = max(0.0, longer - report.replay_seconds)
            row["overlap"] = max(0.0, 1 - longer / copying)
        return row

    def largest_batch(self, name: str, cap: int, *, plain: bool) -> int:
        """Search the largest batch under a cap, to an eighth."""
        low, high, bounded = 0, 4 if self.small else BATCHES[name], False
        while not bounded or high - low > max(4, low // 8):
            batch = (low + high) // 2 if bounded else high
            if not self.has_time(f"{name}, batch {batch}", 0 if self.small else 5):
                break
            if self.fits(name, batch, cap, plain=plain):
                low, high = batch, high if bounded else 2 * high
            else:
                high, bounded = batch, True
        return low

    def fits(self, name: str, batch: int, cap: int, *, plain: bool) -> bool:
        """Try two steps under a cap."""
        subject = self.start(name, batch)
        self.counter.reset_peak()
        with ExitStack() as stack:
            try:
                if not plain:
                    stack.enter_context(Session(cap, device=self.device))
                for _ in range(2):
                    subject.step()
                    if plain and self.counter.peak.value > cap:
                        return False
                stack.close()
            except (BudgetError, torch.OutOfMemoryError):
                return False
        return True


def main(arguments: list[str] | None = None) -> list[Row]:
    """Run all checks and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small models")
    parser.add_argument("--seconds", type=float, default=270.0)
    parser.add_argument("--models", default=",".join(BATCHES))
    parser.add_argument("--cap", type=int, default=16 << 30, help="bytes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    check = Check(args.device, small=args.small, seconds=args.seconds)
    rows: list[Row] = []
    for name in args.models.split(","):
        if check.has_time(name):
            rows += check.compare(name)
    print_table(rows, COLUMNS)
    for row in rows:
        if "error" in row:
            print(f"{row['model']}, {row['way']}: {row['error']}")
    name = args.models.split(",")[0]
    batches: list[Row] = [
        {
            "model": name,
            "way": "plain" if plain else "lowtide",
            "cap_bytes": args.cap,
            "largest_batch": check.largest_batch(name, args.cap, plain=plain),
        }
        for plain in (True, False)
    ]
    print_table(batches, ["model", "way", "cap_bytes", "largest_batch"])
    for what in check.skipped:
        print(f"left out for want of time: {what}")
    write_rows(args.out, [*rows, *batches])
    torch.use_deterministic_algorithms(False)
    return [*rows, *batches]


if __name__ == "__main__":
    main()
