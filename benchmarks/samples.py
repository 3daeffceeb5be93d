"""One sample of an operator or module, run plainly and in the forced regimes.

A sample's differentiable inputs reach it as copies that nobody else holds, and its
outputs are gone when the backward pass begins, so that all it saves may leave memory.
Outputs, gradients, written arguments and buffers and the random state must equal a
plain run's to the last bit.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lowtide.plan import KEEP, RECOMPUTE, SWAP
from lowtide.recorder.values import Value
from lowtide.runtime.iterations import Forecast
from lowtide.runtime.session import Session
from tests.compare import describe_difference, random_state, seed_everything

LEARNT_RUNS = 3  # of a sample: one to learn, two that follow what was learnt
REGIMES = {"recompute": "recompute-only", "swap": "swap-only", "random": "random"}


def forced_session(regime: str, *, seed: int) -> Session:
    """Return a session that releases whatever it may, at once, whatever the budget."""
    return Session("1TiB", policy=REGIMES[regime], force=True, seed=seed)


@dataclass(slots=True)
class Outcome:
    """What became of one operator, module or model."""

    group: str
    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0  # samples on which the plain run raises, or has no gradient
    failures: list[str] = field(default_factory=list)
    note: str = ""
    replayed: int = 0  # operators; that something was released at all shows here
    written_bytes: int = 0
    followed: int = 0  # iterations that a plan was there for

    def count(self, label: str, found: list[str]) -> None:
        """Count a comparison, given the differences that it found."""
        if found:
            self.failed += 1
            self.failures.append(f"{label}: {'; '.join(found[:3])}")
        else:
            self.passed += 1


class NoGradientError(Exception):
    """No output of a sample depends differentiably on its inputs."""


@dataclass(slots=True)
class Sample:
    """Inputs and a way to make what they are fed to."""

    label: str
    make: Callable[[], Callable[..., Any]]  # a module made here is compared too
    inputs: list[Any]  # flat; differentiable tensors are leaves
    shape: Any  # how to fold the inputs into (args, kwargs)
    hold: bool  # keep the other tensor inputs alive, and compare them afterwards
    seed: int
    finish: Callable[[Any], Any] = lambda output: output
    weights: dict[int, Tensor] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        """Run forward and backward; return everything that must be the same."""
        seed_everything(self.seed)
        subject = self.make()
        held: list[Tensor] = []
        outputs = self._forward(subject, held)
        results = {f"output {i}": _copy(output) for i, output in enumerate(outputs)}
        loss = self._weigh(outputs)
        del outputs
        leaves = {
            f"gradient of input {i}": value
            for i, value in enumerate(self.inputs)
            if isinstance(value, Tensor) and value.requires_grad
        }
        if isinstance(subject, nn.Module):
            for name, parameter in subject.named_parameters():
                if parameter.requires_grad:
                    leaves[f"gradient of {name}"] = parameter
            results.update(subject.named_buffers())
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        results.update(zip(leaves, grads, strict=True))
        results.update((f"input {i}", tensor) for i, tensor in enumerate(held))
        return {**results, **random_state()}

    def _forward(self, subject: Callable[..., Any], held: list[Tensor]) -> list[Any]:
        inputs = []
        for value in self.inputs:
            if isinstance(value, Tensor):
                value = value.clone()
                if self.hold and not value.requires_grad:
                    held.append(value)
            inputs.append(value)
        args, kwargs = tree_unflatten(inputs, self.shape)
        return tree_leaves(self.finish(subject(*args, **kwargs)))

    def _weigh(self, outputs: list[Any]) -> Tensor:
        """Reduce the outputs to a number in which each element has its own weight."""
        terms = []
        for index, output in enumerate(outputs):
            if not isinstance(output, Tensor) or not output.requires_grad:
                continue
            dense = output if output.layout == torch.strided else output.to_dense()
            if index not in self.weights:
                generator = torch.Generator().manual_seed(index)
                self.weights[index] = torch.randn(
                    dense.shape, dtype=dense.dtype, generator=generator
                )
            term = (dense * self.weights[index]).sum()
            terms.append(term.real if term.is_complex() else term)
        if not terms:
            raise NoGradientError
        return torch.stack([term.double() for term in terms]).sum()


def fold(args: Iterable[Any], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Flatten arguments into (inputs, shape), with tensors turned into leaves."""
    flat, shape = tree_flatten((tuple(args), kwargs))
    leaves = [
        value.detach().requires_grad_(value.requires_grad)
        if isinstance(value, Tensor)
        else value
        for value in flat
    ]
    return leaves, shape


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def compare_samples(
    samples: Iterable[Sample], outcome: Outcome, *, seed: int, learnt: bool = False
) -> None:
    """Compare every sample's run in every regime with its plain run.

    `learnt`: it runs several times, and what leaves is what a plan of the run before
    says, in the regime's way, saved value by saved value.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain: list[tuple[Sample, dict[str, Any]]] = []
        for sample in samples:
            try:
                plain.append((sample, sample.run()))
            except Exception:  # whatever a sample raises, it raises without us
                outcome.skipped += 1
        for regime in REGIMES:
            _compare_regime(regime, plain, outcome, seed, learnt)


def _compare_regime(
    regime: str,
    plain: list[tuple[Sample, dict[str, Any]]],
    outcome: Outcome,
    seed: int,
    learnt: bool,
) -> None:
    results: list[list[dict[str, Any] | str]] = []
    with forced_session(regime, seed=seed) as session:
        if learnt:
            follow_plans(session, regime, seed)
        for sample, _ in plain:
            results.append([])
            for _ in range(LEARNT_RUNS if learnt else 1):
                try:
                    results[-1].append(sample.run())
                except Exception as error:
                    results[-1].append(f"{type(error).__name__}: {error!s:.300}")
    outcome.replayed += session.replayer.operators
    outcome.written_bytes += session.report().written_bytes
    outcome.followed += session.iterations.repeated
    for (sample, expected), runs in zip(plain, results, strict=True):
        found = [text for result in runs for text in _differences(expected, result)]
        if found and _differences(expected, sample.run()):
            found = ["two plain runs differ"]
        outcome.count(f"{sample.label} {regime}", found)


def follow_plans(session: Session, regime: str, seed: int) -> None:
    """Have a forced session follow the plan of an iteration seen before.

    Such a plan says for each saved value how it leaves, in the regime's way, and at
    random when it is read back. An iteration seen for the first time keeps everything.
    """
    draw = np.random.default_rng(seed)
    iterations, force = session.iterations, session.ledger.force

    def plan(forecast: Forecast, base: int) -> None:
        values = forecast.trace.values
        codes = {
            "swap": np.full(len(values), SWAP),
            "recompute": np.where(values["replayable"], RECOMPUTE, KEEP),
            "random": draw.integers(KEEP, RECOMPUTE + 1, len(values)),
        }[regime]
        last = np.maximum(values["first_use"], values["saved"] + 1)
        forecast.plan = codes.astype(np.int8)
        forecast.reads = draw.integers(values["saved"] + 1, last + 1).astype(np.int32)
        forecast.growth = base - forecast.base

    def judge(value: Value) -> int:
        forecast = iterations.forecast
        known = forecast is not None and 0 <= value.slot < len(forecast.plan)
        return int(forecast.plan[value.slot]) if forecast and known else KEEP

    def act() -> None:
        force()
        session.steward._prefetch()

    session.ledger.lead.seconds = 0.0  # what a plan does not read is not read ahead
    iterations.plan = plan  # type: ignore[method-assign]
    session.scheduler._judge = judge  # type: ignore[method-assign]
    session.ledger.force = act  # type: ignore[method-assign]


def _differences(expected: dict[str, Any], result: dict[str, Any] | str) -> list[str]:
    if isinstance(result, str):
        return [result]
    if expected.keys() != result.keys():
        return [f"{', '.join(expected.keys() ^ result.keys())} only in one run"]
    found = {k: describe_difference(expected[k], result[k]) for k in expected}
    return [f"{name}: {text}" for name, text in found.items() if text is not None]
