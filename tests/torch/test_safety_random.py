# SPDX-License-Identifier: Apache-2.0
"""Programs drawn at random: views, writes, drops, repeated backwards, in any order.

Where PyTorch refuses a program (a saved tensor was changed in place, a graph is used
up), it must be refused under every regime too, and everything else must be equal.
"""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.recorder import dispatch
from tests.torch.regimes import POLICIES, assert_same, forced, run_plain, run_under

N_PROGRAMS = 60
SIDE = 6


class Twice(torch.autograd.Function):
    """Saves an intermediate and its output; reads what it saved twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        inner = x.sin()
        out = inner * inner
        ctx.save_for_backward(x, inner, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, inner, _ = ctx.saved_tensors
        again = ctx.saved_tensors[2]
        return 2 * grad * inner * x.cos() + 0 * again


class Machine:
    """Runs random instructions on a pool of tensors of one shape."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.leaves = [torch.randn(SIDE, SIDE, requires_grad=True) for _ in range(2)]
        with torch.no_grad():  # whose making nobody has recorded
            self.outside = [torch.randn(SIDE, SIDE) for _ in range(2)]
        self.pool: list[Tensor] = [leaf * 1 for leaf in self.leaves]
        self.losses: list[Tensor] = []
        self.results: list[Any] = []

    def any_tensor(self) -> Tensor:
        return self.draw.choice([*self.pool, *self.pool, *self.outside, *self.leaves])

    def run(self, n_steps: int) -> list[Any]:
        instructions = [
            self.unary, self.unary, self.binary, self.binary, self.view, self.write,
            self.write_outside, self.forget, self.forget, self.sum_up, self.backward,
            self.unseen, self.out, self.quiet, self.differentiate,
        ]  # fmt: skip
        for _ in range(n_steps):
            try:
                self.draw.choice(instructions)()
            except RuntimeError as error:
                self.results.append(str(error).split(":")[0])
        self.results += [leaf.grad for leaf in self.leaves]
        return [
            r.detach().clone() if isinstance(r, Tensor) else r for r in self.results
        ]

    def unary(self) -> None:
        x = self.any_tensor()
        operators = [
            torch.sin, torch.tanh, torch.sigmoid, torch.clone, Twice.apply, F.gelu,
            lambda x: F.dropout(x, 0.3), lambda x: x.softmax(0), lambda x: x.cumsum(1),
            lambda x: F.layer_norm(x, (SIDE,)), lambda x: x.clamp(-1, 1).exp(),
            lambda x: F.batch_norm(x, None, None, training=True), F.rrelu,
            lambda x: torch.where(x > 0, x, -x), lambda x: x.sort(1)[0],
            lambda x: x * torch.rand_like(x), torch.relu,
        ]  # fmt: skip
        self.pool.append(self.draw.choice(operators)(x))

    def binary(self) -> None:
        x, y = self.any_tensor(), self.any_tensor()
        operators = [
            torch.add, torch.mul, torch.matmul, torch.maximum, torch.atan2,
            lambda x, y: torch.addmm(x, y.tanh(), x.t().sigmoid()),
            lambda x, y: torch.cat([x[:3], y[3:]]),
        ]  # fmt: skip
        self.pool.append(self.draw.choice(operators)(x, y).clamp(-5, 5))

    def view(self) -> None:
        x = self.any_tensor()
        views = [
            lambda x: x.t(), lambda x: x.flip(0).t(), lambda x: x[0].expand(SIDE, SIDE),
            lambda x: x.view(-1).view(SIDE, SIDE), lambda x: x.detach(),
            lambda x: x.as_strided((SIDE, SIDE), (1, SIDE)),
            lambda x: x[:, :3].repeat(1, 2), lambda x: x.unbind(0)[2].expand(6, 6),
        ]  # fmt: skip
        self.pool.append(self.draw.choice(views)(x))

    def write(self) -> None:
        x, y = self.draw.choice(self.pool), self.any_tensor()
        writes = [
            lambda: x.add_(y), lambda: x.mul_(0.5), lambda: x[1].zero_(),
            lambda: x[:, 2].copy_(y[0]), lambda: x.relu_(), lambda: x.t_(),
            lambda: x.normal_(), lambda: x.masked_fill_(y > 1, 0.5),
            lambda: x.copy_(y), lambda: F.dropout(x, 0.2, inplace=True),
        ]  # fmt: skip
        self.draw.choice(writes)()

    def write_outside(self) -> None:
        self.draw.choice(self.outside).mul_(0.9).add_(0.1)

    def unseen(self) -> None:
        x = self.draw.choice(self.outside)
        if self.draw.random() < 0.5:
            x.data.add_(0.5)
        else:
            x.numpy()[2] = 0.25

    def out(self) -> None:
        x, target = self.any_tensor().detach(), self.draw.choice(self.outside)
        torch.sin(x, out=target)

    def quiet(self) -> None:
        with torch.no_grad():
            self.outside.append(self.any_tensor().sigmoid())
            del self.outside[0]

    def forget(self) -> None:
        if len(self.pool) > 2:
            del self.pool[self.draw.randrange(len(self.pool))]

    def sum_up(self) -> None:
        self.losses.append(self.any_tensor().sin().sum() + self.any_tensor().mean())

    def backward(self) -> None:
        if self.losses:
            loss = self.draw.choice(self.losses)
            self.results.append(loss)
            loss.backward(retain_graph=self.draw.random() < 0.6)

    def differentiate(self) -> None:
        x = self.draw.choice(self.leaves)
        loss = self.any_tensor().sigmoid().sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True, allow_unused=True)
        if slope is not None:
            self.results.append(slope)
            self.pool.append(slope)


@pytest.mark.parametrize("seed", range(N_PROGRAMS))
def test_a_random_program(seed: int) -> None:
    def program() -> list[Any]:
        return Machine(seed).run(40)

    expected = run_plain(program)
    for policy in POLICIES:
        assert_same(expected, run_under(forced(policy, seed), program), policy)


def test_room_is_made_before_a_random_state_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The state takes 5,056 bytes of the budget itself."""
    events: list[str] = []
    original = dispatch._random_states

    def states(args: Any, kwargs: Any, device: str) -> Any:
        events.append("state")
        return original(args, kwargs, device)

    monkeypatch.setattr(dispatch, "_random_states", states)
    with forced("recompute-only") as session:
        before = session.steward.before

        def room(func: Any, args: Any, kwargs: Any) -> Any:
            events.append("room")
            return before(func, args, kwargs)

        monkeypatch.setattr(session.steward, "before", room)
        x = torch.randn(64, requires_grad=True)
        events.clear()
        F.dropout(x * 2, 0.5).sum().backward()
    assert "state" in events
    assert all(events[i - 1] == "room" for i, e in enumerate(events) if e == "state")
