# SPDX-License-Identifier: Apache-2.0
"""Uses of autograd beside one forward and one backward: the same bits as plainly."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.torch.regimes import check, check_error


def leaf(*size: int) -> Tensor:
    return torch.randn(*size, requires_grad=True)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU())


def grads(net: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in net.parameters()]


# Graphs used twice, or otherwise than backwards.


def retained_twice() -> list[Any]:
    net, x = mlp(), leaf(4, 8)
    loss = net(x).exp().sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    return [x.grad, *grads(net)]


def double_backward() -> list[Any]:
    net, x = mlp(), leaf(4, 8)
    (slope,) = torch.autograd.grad(net(x).exp().sum(), x, create_graph=True)
    (slope.pow(2).sum() + slope.sin().sum()).backward()
    return [x.grad, *grads(net)]


def triple_derivative() -> list[Any]:
    x = leaf(16)
    y = (x * 2).sin().exp().sum()
    for _ in range(3):
        (y,) = torch.autograd.grad(y, x, create_graph=True)
        y = y.sum()
    y.backward()
    return [x.grad]


def gradient_penalty() -> list[Any]:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.SiLU(), nn.Flatten(), nn.Linear(32, 1))
    x = leaf(3, 1, 6, 6)
    for _ in range(2):
        score = net(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        (score.mean() + (slope.flatten(1).norm(dim=1) - 1).pow(2).mean()).backward()
    return [x.grad, *grads(net)]


def partial_backward() -> list[Any]:
    net, x = mlp(), leaf(4, 8)
    hidden = net[:2](x)
    loss = net[2:](hidden).exp().sum()
    (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    loss.backward(inputs=[net[2].weight])
    hidden.exp().sum().backward()
    return [first, x.grad, *grads(net)]


def saved_fields_read() -> list[Any]:
    x = leaf(16)
    y = (x * 2).exp()
    z = y.sin()
    nodes = [z.grad_fn, y.grad_fn]
    loss = z.sum()
    del y, z
    torch.zeros(1).add_(1)
    seen = [nodes[0]._saved_self.clone(), nodes[1]._saved_result.clone()]
    seen += [nodes[0]._saved_self.clone()]
    loss.backward()
    return [x.grad, *seen]


def anomaly_mode() -> list[Any]:
    net, x = mlp(), leaf(4, 8)
    with torch.autograd.set_detect_anomaly(True):
        net(x).exp().sum().backward()
    return [x.grad, *grads(net)]


def tensor_hooks() -> list[Any]:
    net, x = mlp(), leaf(4, 8)
    hidden = net[:2](x)
    seen: list[Tensor] = []
    hidden.register_hook(lambda grad: grad * 2)
    net[2].register_full_backward_hook(lambda _, __, out: seen.append(out[0].clone()))
    net[2:](hidden).exp().sum().backward()
    return [x.grad, *grads(net), *seen]


def collected_at_odd_moments() -> list[Any]:
    class Cycle:
        def __init__(self, tensor: Tensor) -> None:
            self.me, self.tensor = self, tensor

    old = gc.get_threshold()
    gc.set_threshold(3, 2, 2)
    try:
        net, x = mlp(), leaf(4, 8)
        for _ in range(4):
            Cycle(net(x * 2).exp())
            net(x * 2).exp().sum().backward()
    finally:
        gc.set_threshold(*old)
    return [x.grad, *grads(net)]


@pytest.mark.filterwarnings("ignore:Anomaly")
@pytest.mark.parametrize(
    "program",
    [
        retained_twice,
        double_backward,
        triple_derivative,
        gradient_penalty,
        partial_backward,
        saved_fields_read,
        anomaly_mode,
        tensor_hooks,
        collected_at_odd_moments,
    ],
    ids=lambda p: p.__name__,
)
def test_graphs(program: Callable[[], list[Any]]) -> None:
    check(program)


# Functions of the user's own.


class Keeper(torch.autograd.Function):
    """Saves input, intermediate and output, and reads them twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        inner = x.sin() * w
        out = inner.exp()
        ctx.save_for_backward(x, w, inner, out)
        ctx.attribute = inner + 1
        return out, inner.cos()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        x, w, inner, out = ctx.saved_tensors
        again = ctx.saved_tensors
        assert all(
            torch.equal(a, b) for a, b in zip(ctx.saved_tensors, again, strict=True)
        )
        slope = grad * out - other * inner.sin() + 0 * ctx.attribute
        return slope * x.cos() * w, (slope * again[0].sin()).sum(0)


def custom_function() -> list[Any]:
    x, w = leaf(4, 8), leaf(8)
    one, two = Keeper.apply(x * 2, w * 3)
    loss = (one.tanh() + two.exp()).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return [x.grad, w.grad]


def custom_function_twice_differentiable() -> list[Any]:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return 2 * x * grad.sin()

    x = leaf(16)
    loss = Square.apply(x * 2).exp().sum()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    slope.pow(2).sum().backward()
    return [x.grad, slope]


def custom_function_in_place() -> list[Any]:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            x.mul_(2)
            ctx.mark_dirty(x)
            ctx.save_for_backward(x)
            return x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad * ctx.saved_tensors[0].sign()

    x = leaf(16)
    Doubled.apply(x * 1).exp().sum().backward()
    return [x.grad]


def reversible_block() -> list[Any]:
    class Swap(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, run: Any) -> Tensor:
            ctx.run = run
            y = run(x)
            ctx.save_for_backward(x + (y - run(x)).sum())
            return y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.run(x)
            torch.autograd.backward(y, grad)
            return x.grad, None

    net, x = mlp(), leaf(4, 8)
    Swap.apply(x * 2, net).exp().sum().backward()
    return [x.grad, *grads(net)]


@pytest.mark.parametrize(
    "program",
    [
        custom_function,
        custom_function_twice_differentiable,
        custom_function_in_place,
        reversible_block,
    ],
    ids=lambda p: p.__name__,
)
def test_custom_functions(program: Callable[[], list[Any]]) -> None:
    check(program)


# Others' ways to save memory, and torch.func.


def blocks(run: Callable[[nn.Module, Tensor], Tensor]) -> list[Any]:
    net = nn.ModuleList([nn.Sequential(mlp(), nn.Dropout(0.3)) for _ in range(2)])
    down, x = nn.Linear(16, 8), leaf(4, 8)
    for _ in range(2):
        h = x * 2
        for block in net:
            h = down(run(block, h)).tanh()
        h.exp().sum().backward()
    return [x.grad, *grads(net), *grads(down)]


def checkpointed() -> list[Any]:
    return blocks(lambda block, h: checkpoint(block, h, use_reentrant=False))


def checkpointed_reentrant() -> list[Any]:
    return blocks(lambda block, h: checkpoint(block, h, use_reentrant=True))


def saved_on_cpu() -> list[Any]:
    def run(block: nn.Module, h: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return block(h)

    return blocks(run)


def own_hooks() -> list[Any]:
    def run(block: nn.Module, h: Tensor) -> Tensor:
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor.double(), lambda packed: packed.float()
        )
        with hooks:
            return block(h)

    return blocks(run)


def own_hooks_around_checkpoint() -> list[Any]:
    def run(block: nn.Module, h: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t + 0, lambda t: t):
            return checkpoint(block, h, use_reentrant=False)

    return blocks(run)


def copied_on_write() -> list[Any]:
    x = leaf(16)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        y = x * 2
        z = y.sin()
        y.mul_(3)
        (z.exp() * y).sum().backward()
    return [x.grad]


def functional_transforms() -> list[Any]:
    net, x = mlp(), torch.randn(4, 8)
    weights = dict(net.named_parameters())

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(net, weights, (x,)).exp().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    slope = torch.func.jacrev(lambda x: loss(weights, x))(x)
    _, tangent = torch.func.jvp(lambda x: net(x).sum(), (x,), (x,))
    net(x).exp().sum().backward()
    found = [t.detach() for t in (*each.values(), slope, tangent)]
    return [*found, *grads(net)]


def transform_inside_a_graph() -> list[Any]:
    x, w = leaf(4, 8), leaf(8)
    slopes = torch.func.vmap(torch.func.grad(lambda row: (row * w).sin().sum()))(x * 2)
    mapped = torch.func.vmap(lambda row: (row * w).exp())(x)
    (slopes.pow(2).sum() + mapped.sum()).backward()
    return [x.grad, w.grad]


def hessian() -> list[Any]:
    x = torch.randn(6)
    inner = torch.autograd.functional.hessian(lambda x: (x.sin() * x).exp().sum(), x)
    outer = torch.func.hessian(lambda x: (x.sin() * x).exp().sum())(x)
    y = leaf(6)
    (y * 2).exp().sum().backward()
    return [inner, outer, y.grad]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize(
    ("program", "moves"),
    [
        (checkpointed, True),
        (checkpointed_reentrant, True),
        (saved_on_cpu, True),
        (own_hooks, True),
        (own_hooks_around_checkpoint, True),
        (copied_on_write, False),
        (functional_transforms, True),
        (transform_inside_a_graph, False),
        (hessian, True),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_with_others(program: Callable[[], list[Any]], moves: bool) -> None:
    check(program, must_move=("swap-only", "recompute-only") if moves else ())


def test_a_graph_freed_by_its_backward_is_an_error_as_ever() -> None:
    def program() -> None:
        loss = leaf(8).exp().sum()
        loss.backward()
        loss.backward()

    check_error(program, "Trying to backward through the graph a second time")
