"""Exactness of single operators: torch's own samples of them, in forced regimes."""

import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from benchmarks.samples import Outcome, Sample, compare_samples, fold
from tests.compare import seed_everything

# Operators on which two plain runs differ, which therefore cannot be compared.
_LAPACK = "LAPACK's least squares round by the addresses of their workspace"
LEFT_OUT: dict[str, str] = {
    "linalg_lstsq": _LAPACK,
    "linalg_lstsq_grad_oriented": _LAPACK,
}


@cache
def operators() -> dict[str, Any]:
    """Return the operators that support autograd in float64 on a CPU, by full name."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {
        op.formatted_name: op
        for op in op_db
        if op.supports_autograd and torch.float64 in op.supported_backward_dtypes("cpu")
    }


def samples_of(op: Any, *, seed: int, limit: int | None) -> Iterator[Sample]:
    """List the samples of an operator; no more than `limit` of them, drawn by seed."""
    seed_everything(seed)
    inputs = list(op.sample_inputs("cpu", torch.float64, requires_grad=True))
    numbers = list(range(len(inputs)))
    if limit is not None and len(numbers) > limit:
        numbers = sorted(random.Random(f"{seed} {op.name}").sample(numbers, limit))
    for number in numbers:
        given = inputs[number]
        flat, shape = fold((given.input, *given.args), given.kwargs)
        for mark, form in _forms(op, given):
            yield Sample(
                label=f"{op.formatted_name}{mark} #{number}",
                make=lambda form=form: _wrapped(op, form),
                inputs=flat,
                shape=shape,
                hold=number % 2 == 1,
                seed=seed + number,
                finish=given.output_process_fn_grad,
            )


def _forms(op: Any, given: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """List the operator's usual form and, where the sample allows, the in-place one."""
    yield "", op.op
    inplace = op.get_inplace()
    if inplace and op.supports_inplace_autograd and not given.broadcasts_input:
        yield "_", inplace


def _wrapped(op: Any, form: Callable[..., Any]) -> Callable[..., Any]:
    """Put the operator's own wrapper around it (it makes Hermitian inputs and such)."""
    return lambda *args, **kwargs: op.gradcheck_wrapper(form, *args, **kwargs)


def run(
    name: str, *, seed: int = 0, limit: int | None = None, learnt: bool = False
) -> Outcome:
    """Compare the samples of an operator in every regime with their plain runs."""
    outcome = Outcome("operators", name)
    if name in LEFT_OUT:
        outcome.note = f"left out: {LEFT_OUT[name]}"
        return outcome
    samples = samples_of(operators()[name], seed=seed, limit=limit)
    compare_samples(samples, outcome, seed=seed, learnt=learnt)
    return outcome
