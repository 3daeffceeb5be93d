# SPDX-License-Identifier: Apache-2.0
"""Bayesian optimisation of weights, by Optuna's tree-structured Parzen estimator.

AutoSwap weighs its four scores and looks for the weights that stall least, with each
score alone to begin with. Optuna is an optional dependency (`lowtide[search]`), loaded
on first use. The same seed gives the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from lowtide.errors import LowtideError

TRIALS = 20  # beside those it begins with

Weights: TypeAlias = tuple[float, ...]


def best_weights(
    cost: Callable[[Weights], float],
    begin_with: Sequence[Weights],
    *,
    trials: int = TRIALS,
    seed: int = 0,
) -> Weights:
    """Find weights in [-1, 1] of the least cost; none is looked for below zero.

    Raises:
        LowtideError: Optuna is not installed.
    """
    costs = [cost(weights) for weights in begin_with]
    best = min(range(len(costs)), key=costs.__getitem__)
    if costs[best] <= 0:
        return begin_with[best]
    optuna = _load()
    names = [f"weight {i}" for i in range(len(begin_with[0]))]
    space = {name: optuna.distributions.FloatDistribution(-1, 1) for name in names}
    sampler = optuna.samplers.TPESampler(n_startup_trials=len(begin_with), seed=seed)
    study = optuna.create_study(sampler=sampler)
    for weights, known in zip(begin_with, costs, strict=True):
        params = dict(zip(names, weights, strict=True))
        study.add_trial(
            optuna.trial.create_trial(
                params=params, distributions=space, value=float(known)
            )
        )
    while len(study.trials) < len(begin_with) + trials and study.best_value > 0:
        trial = study.ask(space)
        study.tell(trial, cost(tuple(trial.params[name] for name in names)))
    return tuple(float(study.best_params[name]) for name in names)


def _load() -> Any:
    try:
        import optuna
    except ModuleNotFoundError:
        raise LowtideError(
            'score "BO" looks for weights with Optuna, which is not installed: '
            "pip install 'lowtide[search]'."
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
