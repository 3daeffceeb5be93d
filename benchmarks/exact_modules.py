"""Exactness of single modules: torch's own samples of them, in forced regimes."""

import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn

from benchmarks.samples import Outcome, Sample, compare_samples, fold
from tests.compare import seed_everything

# Modules on which two plain runs differ, which therefore cannot be compared.
LEFT_OUT: dict[str, str] = {}


@cache
def modules() -> dict[str, Any]:
    """Return the modules that train in float64 on a CPU, by name."""
    from torch.testing._internal.common_modules import module_db

    found: dict[str, Any] = {}
    for info in module_db:
        if torch.float64 in info.supported_dtypes("cpu"):
            name = info.formatted_name
            found[name if name not in found else f"{name}_{len(found)}"] = info
    return found


def samples_of(info: Any, *, seed: int, limit: int | None) -> Iterator[Sample]:
    """List a module's samples, training and evaluating; at most `limit` of each."""
    for training in (True, False):
        seed_everything(seed)
        given = info.module_inputs_func(
            info,
            device="cpu",
            dtype=torch.float64,
            requires_grad=True,
            training=training,
        )
        given = [one for one in given if one.forward_input is not None]
        numbers = list(range(len(given)))
        if limit is not None and len(numbers) > limit:
            numbers = sorted(
                random.Random(f"{seed} {info.name}").sample(numbers, limit)
            )
        for number in numbers:
            forward = given[number].forward_input
            flat, shape = fold(forward.args, forward.kwargs)
            mode = "training" if training else "evaluating"
            yield Sample(
                label=f"{info.name} {mode} #{number}",
                make=_maker(info.module_cls, given[number].constructor_input, training),
                inputs=flat,
                shape=shape,
                hold=number % 2 == 1,
                seed=seed + number,
            )


def _maker(
    kind: type[nn.Module], given: Any, training: bool
) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = kind(*given.args, **given.kwargs)
        return module.to(torch.float64).train(training)

    return make


def run(
    name: str, *, seed: int = 0, limit: int | None = None, learnt: bool = False
) -> Outcome:
    """Compare the samples of a module in every regime with their plain runs."""
    outcome = Outcome("modules", name)
    if name in LEFT_OUT:
        outcome.note = f"left out: {LEFT_OUT[name]}"
        return outcome
    samples = samples_of(modules()[name], seed=seed, limit=limit)
    compare_samples(samples, outcome, seed=seed, learnt=learnt)
    return outcome
