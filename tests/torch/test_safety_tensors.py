# SPDX-License-Identifier: Apache-2.0
"""Tensors that are written, viewed, shared or strange: the same bits, or kept whole.

Every program runs plainly and with all that may leave memory gone at once.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.torch.regimes import (
    check,
    check_error,
)

CHANGED = "modified by an inplace operation"


def leaf(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, dtype=dtype, requires_grad=True)


def grads(*leaves: Tensor) -> list[Tensor | None]:
    return [tensor.grad for tensor in leaves]


def outside(*size: int) -> Tensor:
    """Make a tensor whose making nobody has recorded."""
    with torch.no_grad():
        return torch.randn(*size)


# Changed in place after it was saved: PyTorch's usual error, never a wrong gradient.


@pytest.mark.parametrize("late", [False, True])
def test_a_saved_result_changed_in_place_is_an_error(late: bool) -> None:
    def program() -> None:
        y = leaf(8).exp()
        if late:
            y.sin().cos()
        y.add_(1)
        y.sum().backward()

    check_error(program, CHANGED)


def test_a_saved_input_changed_through_a_view_is_an_error() -> None:
    def program() -> None:
        x = leaf(8) * 2
        y = x.sin()
        x[2:4].zero_()
        y.sum().backward()

    check_error(program, CHANGED)


def test_a_saved_parameter_changed_under_no_grad_is_an_error() -> None:
    def program() -> None:
        weight, x = leaf(4, 4), leaf(4)
        loss = (weight @ x).sum()
        with torch.no_grad():
            weight.mul_(2)
        loss.backward()

    check_error(program, CHANGED)


def test_a_tensor_changed_between_two_backwards_is_an_error() -> None:
    def program() -> None:
        x = leaf(8) * 1
        loss = x.sin().sum()
        loss.backward(retain_graph=True)
        x.mul_(2)
        loss.backward()

    check_error(program, CHANGED)


def test_a_saved_tensor_changed_by_a_backward_is_an_error_the_second_time() -> None:
    class Careless(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x * 2
            ctx.save_for_backward(y)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (y,) = ctx.saved_tensors
            return grad * y.add_(1)

    def program() -> None:
        loss = Careless.apply(leaf(8)).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    check_error(program, CHANGED)


# Legal changes in place.


def legal_external() -> list[Any]:
    x, buf = leaf(64), outside(64)
    h = torch.exp(x + buf).sum()
    buf.add_(1)
    h.backward()
    return [x.grad, h, buf]


def legal_external_view() -> list[Any]:
    x, buf = leaf(64), outside(2, 64)
    h = torch.tanh(x + buf[0]).sigmoid().sum()
    buf[0].copy_(buf[1])
    h.backward()
    return [x.grad, h]


def legal_external_twice() -> list[Any]:
    x, buf = leaf(64), outside(64)
    total = torch.zeros(())
    for _ in range(3):
        total = total + torch.exp(x + buf).sum()
        buf.mul_(0.5)
    total.backward()
    return [x.grad, total]


def legal_data_write() -> list[Any]:
    x, buf = leaf(64), outside(64)
    loss = torch.exp(x + buf).sqrt().sum()
    buf.data.add_(1)
    x.data.mul_(2)
    loss.backward()
    return [x.grad, loss]


def legal_relu() -> list[Any]:
    x = leaf(6, 8)
    y = torch.relu_((x * 3)[1:4])
    z = (torch.relu_((x @ x.t()).view(4, 9)) + 1).log()
    (y.sum() + z.sum()).backward()
    return [x.grad, y, z]


def legal_add_on_views() -> list[Any]:
    x = leaf(6, 8)
    y = x * 2
    y[0].add_(x[1])
    y[:, 2].mul_(x[:, 3])
    y.t()[1].copy_(x[:, 0])
    z = y.exp()
    y.add_(1)
    z.sum().backward()
    return [x.grad, y, z]


def legal_part_overwritten() -> list[Any]:
    x = leaf(6, 8)
    y = x * 2
    y[0].zero_()
    y[2:4].copy_(x[:2])
    y.view(-1)[40:].fill_(0.5)
    loss = y.sin().sum()
    del y
    loss.backward()
    return [x.grad, loss]


def legal_chain_in_place() -> list[Any]:
    x = leaf(64)
    y = x.clone()
    for i in range(4):
        y = y.add_(0.1).sigmoid_() if i % 2 else y.tanh() + 0.1
    y.sum().backward()
    return [x.grad, y]


def legal_out() -> list[Any]:
    x, w = leaf(64), outside(64)
    scale, other = torch.empty(64), torch.empty(0)
    torch.mul(w, 2, out=scale)
    torch.add(w, w, out=other)
    loss = ((x + scale).exp() + (x + other).sin().exp()).sum()
    torch.add(scale, 1, out=scale)
    torch.mul(scale, 2, out=other)
    loss.backward()
    return [x.grad, loss, scale, other]


def legal_data_assigned() -> list[Any]:
    p = nn.Parameter(outside(64))
    losses = []
    for _ in range(3):
        loss = (p.exp() * p).sum()
        loss.backward()
        losses.append(loss.detach())
        p.data = p.data - 0.1 * p.grad
    return [p, p.grad, *losses]


def legal_resize() -> list[Any]:
    x, buf, other = leaf(64), outside(64), outside(8)
    loss = (x + buf).exp().sin().sum() + (x[:8] + other).exp().sum()
    buf.resize_(4096).fill_(3)
    other.resize_(0)
    loss.backward()
    return [x.grad, loss]


def legal_set() -> list[Any]:
    x, buf, other = leaf(64), outside(64), outside(64)
    loss = (x + buf).exp().sin().sum()
    buf.set_(other)
    buf.zero_()
    loss.backward()
    return [x.grad, loss]


LEGAL = [
    legal_external,
    legal_external_view,
    legal_external_twice,
    legal_data_write,
    legal_relu,
    legal_add_on_views,
    legal_part_overwritten,
    legal_chain_in_place,
    legal_out,
    legal_data_assigned,
    legal_resize,
    legal_set,
]


@pytest.mark.parametrize("program", LEGAL, ids=lambda p: p.__name__)
def test_legal_changes_in_place(program: Callable[[], list[Any]]) -> None:
    check(program)


def test_what_an_operator_left_half_written_is_not_computed_again() -> None:
    def program() -> list[Any]:
        x, buf = leaf(64), outside(64)
        with pytest.raises(RuntimeError):
            buf.scatter_(0, torch.tensor([0, 1, 99]), 5.0)
        loss = (x + buf).exp().sum()
        del buf
        loss.backward()
        return [x.grad, loss]

    check(program, must_move=["swap-only"])


# Written through NumPy, where no operator is seen.


def numpy_of_an_intermediate() -> list[Any]:
    x = leaf(64)
    t = x * 2
    loss = t.exp().sin().sum()
    t.detach().numpy()[:] = 7
    loss.backward()
    return [x.grad]


def numpy_of_an_input_afterwards() -> list[Any]:
    x, buf = leaf(64), outside(64)
    loss = (x + buf).exp().sin().sum()
    buf.numpy()[:] = 7
    loss.backward()
    return [x.grad]


def numpy_array_held_before() -> list[Any]:
    x, array = leaf(64), np.arange(64, dtype=np.float32) / 64
    buf = torch.from_numpy(array)
    loss = (x + buf).exp().sin().sum()
    array[:] = 7
    loss.backward()
    return [x.grad]


def numpy_by_array_protocol() -> list[Any]:
    x, buf = leaf(64), outside(64)
    loss = (x + buf).exp().sin().sum()
    np.asarray(buf)[:] = 7
    loss.backward()
    return [x.grad]


def numpy_by_dlpack() -> list[Any]:
    x, buf = leaf(64), outside(64)
    loss = (x + buf).exp().sin().sum()
    np.from_dlpack(buf)[:] = 7
    loss.backward()
    return [x.grad]


def numpy_read_in_a_backward() -> list[Any]:
    class ByNumpy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x.exp()
            ctx.save_for_backward(y)
            return torch.from_numpy(np.sin(y.numpy()))

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (y,) = ctx.saved_tensors
            return grad * torch.from_numpy(np.cos(y.numpy()) * y.numpy())

    x = leaf(64)
    loss = ByNumpy.apply(x * 2).exp().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return [x.grad]


def numpy_writes_between_two_backwards() -> list[Any]:
    class Peek(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x * 2)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (y,) = ctx.saved_tensors
            grad = grad * y
            y.numpy()[:] = 5
            return grad

    x = leaf(64)
    loss = Peek.apply(x + 1).sin().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return [x.grad]


NUMPY = [
    numpy_read_in_a_backward,
    numpy_writes_between_two_backwards,
    numpy_of_an_intermediate,
    numpy_of_an_input_afterwards,
    numpy_array_held_before,
    numpy_by_array_protocol,
    numpy_by_dlpack,
]


@pytest.mark.parametrize("program", NUMPY, ids=lambda p: p.__name__)
def test_writes_through_numpy(program: Callable[[], list[Any]]) -> None:
    check(program, must_move=["swap-only"])


def test_a_storage_held_without_a_tensor_is_not_moved() -> None:
    def program() -> list[Any]:
        x = leaf(64)
        t = x * 2
        storage = t.untyped_storage()
        y = t.sin()
        del t
        torch.zeros(1).add_(1)
        storage.fill_(0)
        y.sum().backward()
        return [x.grad]

    check(program, must_move=[])
