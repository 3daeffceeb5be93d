# SPDX-License-Identifier: Apache-2.0
"""How a tensor lies over its bytes, and tensors whose bytes lowtide does not move."""

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.torch.regimes import (
    POLICIES,
    assert_same,
    check,
    forced,
    run_plain,
    run_under,
)


def leaf(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, dtype=dtype, requires_grad=True)


def views_and_transposes() -> list[Any]:
    x = leaf(6, 8)
    y = x * 2
    loss = y.sin() + y.t().exp().t() + (y[:, 1:3] * y[:, 3:5]).sum()
    loss = loss.sum() + (y.view(48) ** 3).sum() + y.unbind(1)[2].pow(2).sum()
    loss.backward()
    return [x.grad, loss]


def expanded() -> list[Any]:
    x, w = leaf(1, 8), leaf(6, 1)
    y = (x * 3).expand(6, 8)
    z = (w.exp().expand(6, 8) * y).sin()
    (z * y).sum().backward()
    return [x.grad, w.grad]


def as_strided() -> list[Any]:
    x = leaf(64)
    y = x * 2
    windows = y.as_strided((6, 8), (3, 2), 5)
    (windows.exp() * y.as_strided((6, 8), (8, 1), 16)).sum().backward()
    return [x.grad]


def overlapping_unfold() -> list[Any]:
    x = leaf(64)
    (x.mul(2).unfold(0, 8, 3).sin() ** 2).sum().backward()
    return [x.grad]


def complex_and_conj_bits() -> list[Any]:
    x = leaf(8, 8, dtype=torch.complex64)
    y = (x * 2).conj()
    z = (y @ x.mH).sin() * y.imag
    (z.real.sum() + z.abs().sum()).backward()
    return [x.grad, z]


def neg_bits() -> list[Any]:
    x = leaf(8, 8, dtype=torch.complex64)
    y = (x * 2).conj().imag
    assert y.is_neg()
    (y * y.exp() + torch.view_as_real(x).sum()).sum().backward()
    return [x.grad]


def channels_last() -> list[Any]:
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    net = net.to(memory_format=torch.channels_last)
    y = net(x)
    y.sin().sum().backward()
    return [*(p.grad for p in net.parameters()), y, str(y.stride())]


def zero_dimensions() -> list[Any]:
    x = leaf(())
    y = (x * 2).exp().sin() * torch.tensor(3.0)
    (y / x).backward()
    return [x.grad, y]


def empty_tensors() -> list[Any]:
    x, w = leaf(0, 4), leaf(4, 5)
    y = (x * 2).exp() @ w
    loss = y.sin().sum() + torch.cat([y, w.t()[:, :5] if False else w]).pow(2).sum()
    loss.backward()
    return [x.grad, w.grad]


def bool_masks() -> list[Any]:
    x = leaf(8, 8)
    mask = x > 0
    y = torch.where(mask, x * 2, x.exp())
    z = y.masked_fill(~mask, 0.5)[mask]
    loss = (z.sin() * z).sum() + y[mask.any(1)].prod() + y.cumsum(0)[mask].sum()
    loss.backward()
    return [x.grad, z]


def integers_from_data() -> list[Any]:
    x, table = leaf(16, 4), leaf(10, 4)
    rows = (x.sum(1) > 0).nonzero().squeeze(1)
    values, order = x.sort(0)
    y = table[order[:, 0] % 10] * values.exp()
    (y[rows] ** 2).sum().backward()
    return [x.grad, table.grad]


def tied_weights() -> list[Any]:
    embedding = nn.Embedding(20, 8)
    head = nn.Linear(8, 20, bias=False)
    head.weight = embedding.weight
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        logits = head(torch.tanh(embedding(torch.randint(20, (6,)))))
        loss = logits.logsumexp(1).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, head.weight, head.weight.grad]


def bfloat16_autocast() -> list[Any]:
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    total = []
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(torch.randn(4, 8)).float().logsumexp(1).sum()
            loss = loss + net(torch.randn(4, 8)).float().pow(2).sum()
        loss.backward()
        total.append(loss.detach())
    return [*total, *(p.grad for p in net.parameters())]


def half_types() -> list[Any]:
    x = leaf(8, 8, dtype=torch.bfloat16)
    y = leaf(8, 8, dtype=torch.float16)
    ((x * 2).exp().sum() + (y.sin() * y).sum().to(torch.bfloat16)).backward()
    return [x.grad, y.grad]


GEOMETRY = [
    views_and_transposes,
    expanded,
    as_strided,
    overlapping_unfold,
    complex_and_conj_bits,
    neg_bits,
    channels_last,
    zero_dimensions,
    empty_tensors,
    bool_masks,
    integers_from_data,
    tied_weights,
    bfloat16_autocast,
    half_types,
]


@pytest.mark.parametrize("program", GEOMETRY, ids=lambda p: p.__name__)
def test_geometry_and_types(program: Callable[[], list[Any]]) -> None:
    check(program)


def test_a_storage_shared_by_views_is_moved_once() -> None:
    with forced("swap-only") as session:
        x = leaf(1000)
        y = x * 2
        loss = y.sin().sum() + y.view(10, 100).t().exp().sum() + (y[5:] ** 3).sum()
        del y
        torch.zeros(1).add_(1)
        loss.backward()
        assert session.lane is not None
        # what must be on disk: y, its exp and its sin's input are two storages
        assert session.lane.written_bytes == 2 * 4000


# Kept whole, and said so in the report.


class Tagged(Tensor):
    """A subclass that any operator hands on."""


def sparse(directory: Path) -> list[Any]:
    x = leaf(6, 4)
    indices = torch.tensor([[0, 1, 3], [2, 0, 5]])
    values = torch.randn(3, requires_grad=True)
    matrix = torch.sparse_coo_tensor(indices, values, (4, 6))
    y = torch.sparse.mm(matrix, x.exp())
    csr = torch.eye(4).to_sparse_csr()
    (y.sin().sum() + (csr @ x[:4]).exp().sum()).backward()
    return [x.grad, values.grad]


def subclass(directory: Path) -> list[Any]:
    x = leaf(8).as_subclass(Tagged)
    base = leaf(8)
    y = (base.as_subclass(Tagged) * 2).exp() * x
    y.sin().sum().backward()
    return [base.grad]


def quantized(directory: Path) -> list[Any]:
    class ThroughQuantized(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            packed = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
            ctx.save_for_backward(packed)
            return packed.dequantize()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (packed,) = ctx.saved_tensors
            return grad * packed.dequantize()

    x = leaf(8)
    ThroughQuantized.apply(x * 2).exp().sum().backward()
    return [x.grad]


@pytest.mark.parametrize(
    "program", [sparse, subclass, quantized], ids=lambda p: p.__name__
)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*quantize")
def test_strange_tensors_are_kept_and_reported(
    policy: str, program: Callable[[Path], list[Any]], tmp_path: Path
) -> None:
    expected = run_plain(lambda: program(tmp_path))
    session = forced(policy)
    assert_same(expected, run_under(session, lambda: program(tmp_path)), policy)
    assert any("not a plain" in row.reason for row in session.report().kept)


def test_foreign_memory_changed_unseen(tmp_path: Path) -> None:
    numbers = np.arange(64, dtype=np.float32) / 64
    file = tmp_path / "numbers"

    def program() -> list[Any]:
        numbers.tofile(file)
        x, array, region = leaf(64), numbers.copy(), mmap.mmap(-1, 256)
        held = torch.from_numpy(array)
        mapped = torch.from_file(str(file), shared=True, size=64)
        buffer = torch.frombuffer(region, dtype=torch.float32)
        shared = torch.ones(64).share_memory_()
        loss = (x + held).exp().sum() + (x + mapped).tanh().sum()
        loss = loss + (x + buffer).sin().exp().sum() + (x + shared).sigmoid().sum()
        array[:] = 3
        region.write(b"\x01" * 256)
        np.full(64, 3, dtype=np.float32).tofile(file)
        loss.backward()
        return [x.grad, loss]

    check(program, must_move=["swap-only"])


def test_a_saved_tensor_in_foreign_memory_is_kept() -> None:
    def program() -> list[Any]:
        x, array = leaf(64), np.ones(64, dtype=np.float32)
        loss = (x * torch.from_numpy(array)).exp().sum()
        torch.zeros(1).add_(1)
        array[:] = 3  # PyTorch itself does not notice
        loss.backward()
        return [x.grad, loss]

    check(program, must_move=[])


def test_parameters_from_a_mapped_file_are_sources_like_others(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    torch.save(nn.Linear(8, 8).state_dict(), file)

    def program() -> list[Any]:
        with torch.device("meta"):
            net = nn.Linear(8, 8)
        net.load_state_dict(torch.load(file, mmap=True), assign=True)
        loss = net(torch.randn(4, 8)).exp().sum()
        loss.backward()
        return [loss, net.weight.grad]

    check(program)


class Wrapped(Tensor):
    """Wraps a plain tensor and runs operators on it, as sharded tensors do."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapped":
        made = Tensor._make_wrapper_subclass(
            cls, inner.size(), dtype=inner.dtype, requires_grad=inner.requires_grad
        )
        made.inner = inner.detach()
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def bare(item: Any) -> Any:
            return item.inner if isinstance(item, Wrapped) else item

        result = func(
            *map(bare, args), **{k: bare(v) for k, v in (kwargs or {}).items()}
        )
        return cls(result) if isinstance(result, Tensor) else result


class Logged(Tensor):
    """Sees its operators and lets PyTorch run them with dispatch switched off."""

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs or {})


@pytest.mark.parametrize("policy", POLICIES)
def test_subclasses_with_a_dispatch_of_their_own(policy: str) -> None:
    def program() -> list[Any]:
        plain = leaf(6)
        wrapped = Wrapped(leaf(6))
        (wrapped * 2).exp().sin().sum().backward()
        logged = torch.randn(6).as_subclass(Logged).requires_grad_()
        (logged * 2).exp().sin().sum().backward()
        (plain * 2).exp().sin().sum().backward()
        assert wrapped.grad is not None
        assert logged.grad is not None
        return [plain.grad, wrapped.grad.inner, logged.grad.as_subclass(Tensor)]

    session = forced(policy)
    assert_same(run_plain(program), run_under(session, program), policy)
    assert any("not a plain" in row.reason for row in session.report().kept)
