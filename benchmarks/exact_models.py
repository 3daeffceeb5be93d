"""Exactness of whole networks: the same training, plain and at several budgets.

A run leaves digests only (see `tests.compare`), so that comparing takes no memory. The
smallest budget is the one that the error of a hopeless budget names.
"""

import gc
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from benchmarks.samples import Outcome
from lowtide.errors import BudgetError
from lowtide.runtime import allocator
from lowtide.runtime.session import Session
from tests import models
from tests.compare import Digests, differing, gradients, seed_everything, training_state

FRACTIONS = (0.0, 0.25, 0.5, 0.75)  # of the way from the smallest to the plain peak
CURVE_STEPS = 200
HOPELESS = 1 << 12  # bytes that no step fits into


@dataclass(frozen=True, slots=True)
class Training:
    """A model to train from a seed: always the same losses, to the last bit."""

    name: str
    seed: int = 0
    steps: int = 3

    def run(self, budget_bytes: int | None = None) -> "Trained":
        """Build the model and train it, within a budget where one is given."""
        gc.collect()
        counter = allocator.install()
        seed_everything(self.seed)
        model, make_batch, loss_of = models.MODELS[self.name]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses: list[str] = []
        digests: Digests = {}
        counter.reset_peak()
        session = None if budget_bytes is None else Session(budget_bytes)
        with session or nullcontext():
            for step in range(self.steps):
                optimizer.zero_grad()
                loss = loss_of(model, make_batch())
                loss.backward()
                losses.append(loss.item().hex())
                del loss
                found = gradients(model) if self.steps < 10 else {}
                digests.update((f"step {step}: {key}", found[key]) for key in found)
                optimizer.step()
            peak_bytes = counter.peak.value
        digests.update(training_state(model, optimizer))
        trained = Trained(losses, digests, peak_bytes)
        if session is not None:
            trained.replayed = session.replayer.operators
            trained.written_bytes = session.lane.written_bytes if session.lane else 0
        return trained

    def smallest_budget(self) -> int:
        """Ask for the smallest budget, by trying one that is far too small."""
        try:
            self.run(HOPELESS)
        except BudgetError as error:
            if error.smallest_bytes is None:
                raise AssertionError(f"no smallest budget named: {error}") from error
            return error.smallest_bytes
        raise AssertionError(f"{self.name} trained within {HOPELESS} bytes")


@dataclass(slots=True)
class Trained:
    """What a training left behind."""

    losses: list[str]
    digests: Digests
    peak_bytes: int  # of a plain run; a session resets the counter at every step
    replayed: int = 0  # operators
    written_bytes: int = 0  # to disk

    def differences(self, other: "Trained") -> Iterator[str]:
        """Say how another run differs."""
        for step, losses in enumerate(zip(self.losses, other.losses, strict=True)):
            if losses[0] != losses[1]:
                yield f"loss of step {step} is {losses[1]}, not {losses[0]}"
                return
        names = differing(self.digests, other.digests)
        if names:
            yield f"{len(names)} of {len(self.digests)} differ: {', '.join(names[:3])}"


def run(
    name: str, *, seed: int = 0, fractions: tuple[float, ...] = FRACTIONS
) -> Outcome:
    """Compare three steps of a model at several budgets with three plain ones."""
    outcome = Outcome("models", name)
    training = Training(name, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = training.run()
        smallest = training.smallest_budget()
        outcome.note = f"plain peak {plain.peak_bytes}, smallest {smallest} bytes"
        for fraction in fractions:
            budget = round(smallest + fraction * (plain.peak_bytes - smallest))
            _compare(training, plain, budget, outcome)
    return outcome


def run_curve(
    name: str = "gpt2", *, seed: int = 0, steps: int = CURVE_STEPS
) -> Outcome:
    """Compare a long loss curve at half of the plain peak with the plain curve."""
    outcome = Outcome("curve", name)
    training = Training(name, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peak_bytes = training.run().peak_bytes
        training = replace(training, steps=steps)
        _compare(training, training.run(), peak_bytes // 2, outcome)
    return outcome


def _compare(
    training: Training, plain: Trained, budget_bytes: int, outcome: Outcome
) -> None:
    label = f"{training.name} at {budget_bytes} of {plain.peak_bytes} bytes"
    try:
        trained = training.run(budget_bytes)
        found = list(plain.differences(trained))
        outcome.replayed += trained.replayed
        outcome.written_bytes += trained.written_bytes
        if not (trained.replayed or trained.written_bytes):
            found.append("nothing left memory: this checked nothing")
        elif found and list(plain.differences(training.run())):
            found = ["two plain runs differ"]
    except Exception as error:
        found = [f"{type(error).__name__}: {error}"]
    outcome.count(label, found)
