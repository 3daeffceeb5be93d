# SPDX-License-Identifier: Apache-2.0
"""Run a program plainly and under every forced regime; all must agree to the bit.

Forced means: every saved tensor that may leave memory does so at once, whatever the
budget. A program takes no argument and returns what it computed; it builds all that it
needs itself, from random states that are the same each time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.runtime.session import Session
from tests.compare import describe_difference, random_state, seed_everything

Program = Callable[[], Sequence[Any]]

POLICIES = ("recompute-only", "swap-only", "random")
PLENTY = "1TiB"


def run_plain(program: Program) -> list[Any]:
    """Run a program without lowtide; its results, then the random states."""
    seed_everything(1)
    return [*program(), *random_state().values()]


def run_under(session: Session, program: Program) -> list[Any]:
    """Run a program under a budget; its results, then the random states."""
    seed_everything(1)
    with session:
        return [*program(), *random_state().values()]


def forced(policy: str, seed: int = 0, **options: Any) -> Session:
    """Make a session that releases whatever may be released."""
    return Session(PLENTY, policy=policy, force=True, seed=seed, **options)


def moved_bytes(session: Session) -> int:
    """Count the bytes that left and came back."""
    lane = session.lane
    read = 0 if lane is None else lane.read_bytes
    return read + session.replayer.bytes


def assert_same(expected: Sequence[Any], found: Sequence[Any], what: str) -> None:
    """Compare two lists of results to the last bit."""
    assert len(expected) == len(found), what
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        difference = describe_difference(one, other)
        assert difference is None, f"{what}, result {index}: {difference}"


def check(program: Program, *, must_move: Sequence[str] = POLICIES) -> None:
    """Assert that a program computes the same bits plainly and under each regime.

    `must_move` names the policies under which some tensor must have left memory and
    come back, so that the comparison is not an empty one.
    """
    expected = run_plain(program)
    for policy in POLICIES:
        seeds = (0, 1) if policy == "random" else (0,)
        moved = 0
        for seed in seeds:
            session = forced(policy, seed)
            found = run_under(session, program)
            assert_same(expected, found, f"{policy}, seed {seed}")
            moved += moved_bytes(session)
        if policy in must_move:
            assert moved > 0, f"{policy}: nothing left memory"


def raised_by(program: Callable[[], object]) -> str:
    """Return the type and the first line of the error that a program ends with."""
    try:
        program()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "no error"


def check_error(program: Callable[[], object], words: str) -> None:
    """Assert that a program fails with the same words plainly and under each regime."""
    assert words in raised_by(program), "without lowtide"
    for policy in POLICIES:
        torch.manual_seed(1)
        with forced(policy):
            found = raised_by(program)
        assert words in found, f"{policy}: {found}"


def deep(width: int = 64, depth: int = 6) -> nn.Sequential:
    """Build a network with dropout that is as deep as asked."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1)]
    return nn.Sequential(*layers)


def train(net: nn.Module, rows: int = 64, steps: int = 3) -> list[Any]:
    """Train a network; its losses, parameters and gradients."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    width = net[0].in_features
    losses = []
    for _ in range(steps):
        loss = net(torch.randn(rows, width)).exp().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *net.parameters(), *(p.grad for p in net.parameters())]
