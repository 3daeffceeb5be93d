"""What an operator needs is judged before its first run: a first step fits too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide import BudgetError
from lowtide.recorder.schemas import facts_of
from lowtide.runtime import allocator, estimate
from lowtide.runtime.estimate import estimate_need

Step = Callable[[], None]
TRIFLE = 256 << 10  # bytes: needs below it decide nothing


def trainer(model: nn.Module, make: Callable[[], torch.Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        loss = model(make()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def convolutions(dtype: torch.dtype) -> Step:
    """Channels that fill no block, and results beside running statistics."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 30), (30, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers).to(dtype)
    return trainer(model, lambda: torch.randn(8, 3, 48, 48, dtype=dtype))


def volumes() -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv3d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose3d(16, 8, 2, stride=2),
        nn.GroupNorm(2, 8),
        nn.Conv3d(8, 2, 1),
    )
    return trainer(model, lambda: torch.randn(2, 1, 8, 32, 32))


def sequences() -> Step:
    torch.manual_seed(0)

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(2000, 128)
            self.memory = nn.LSTM(128, 128, 2, batch_first=True)
            self.block = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)

        def forward(self, tokens: torch.Tensor) -> Any:
            return self.block(self.memory(self.words(tokens))[0])

    return trainer(Tagger(), lambda: torch.randint(0, 2000, (8, 128)))


PROGRAMS: dict[str, Callable[[], Step]] = {
    "convolutions": lambda: convolutions(torch.float32),
    "convolutions in double": lambda: convolutions(torch.float64),
    "volumes": volumes,
    "sequences": sequences,
}


class Watch(TorchDispatchMode):
    """Compares each operator's need with what was estimated before it ran."""

    def __init__(self, counter: Any) -> None:
        super().__init__()
        self.counter = counter
        self.short: list[str] = []
        self.seen = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        certain, estimated = estimate_need(func, args, kwargs)
        before = self.counter.op_peak.value = self.counter.live.value
        result = func(*args, **kwargs)
        need = self.counter.op_peak.value - before
        self.seen += need > TRIFLE
        if need > estimated + TRIFLE:
            self.short.append(f"{func}: {need} needed, {estimated} estimated")
        if certain > need + TRIFLE and need:
            self.short.append(f"{func}: {need} needed, {certain} held for certain")
        return result


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_operator_needs_more_than_estimated(name: str) -> None:
    counter = allocator.install()
    if not counter.sees_workspace:
        pytest.skip("without a compiler workspace cannot be counted")
    step = PROGRAMS[name]()
    with Watch(counter) as watch:
        step()
    assert watch.seen
    assert not watch.short


def train(name: str, size: int | str) -> lowtide.Timeline:
    with lowtide.budget(size) as budget:
        step = PROGRAMS[name]()
        for _ in range(3):
            step()
    return budget.report()


def smallest_of(name: str) -> int:
    """Return the budget that the error names, and let go of all that it holds."""
    try:
        train(name, "4KiB")
    except BudgetError as error:
        return error.smallest_bytes or 0
    return 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_first_step_keeps_the_smallest_budget(name: str) -> None:
    smallest = smallest_of(name)
    assert smallest
    report = train(name, smallest)
    assert report.swapped_bytes + report.recomputed_bytes > 0
    assert report.first_peak_bytes <= 1.05 * smallest
    assert report.peak_bytes <= smallest


def ways_to_call() -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    aten = torch.ops.aten
    a, b, row = torch.randn(6, 5), torch.randn(6, 5), torch.randn(5)
    half = a.to(torch.bfloat16)
    cube = torch.randn(3, 6, 5)
    return [
        *((op, (a, b), {}) for op in (aten.mul.Tensor, aten.sub.Tensor)),
        (aten.add.Tensor, (a, row), {"alpha": 2}),
        (aten.add.Tensor, (a[:, :1], row), {}),
        (aten.add.Tensor, (torch.randn(0, 5), row), {}),
        (aten.mul.Tensor, (a, half), {}),
        (aten.mul.Scalar, (a, 2), {}),
        (aten.sigmoid.default, (a.t(),), {}),
        (aten.tanh.default, (row.expand(7, 5),), {}),
        (aten.tanh_backward.default, (a, b), {}),
        (aten.gelu_backward.default, (a, b), {}),
        (aten.threshold_backward.default, (a, b, 0), {}),
        (aten.where.self, (a > 0, a, b), {}),
        (aten.gt.Scalar, (a, 0), {}),
        (aten.isnan.default, (a,), {}),
        (aten._to_copy.default, (a,), {"dtype": torch.float64}),
        (aten.add_.Tensor, (a, row), {}),
        (aten.addcdiv_.default, (a, a, b.abs()), {"value": 2}),
        (aten.frexp.Tensor, (a,), {}),
        (aten.complex.default, (a, b), {}),
        (aten.mm.default, (a, b.t()), {}),
        (aten.mm.default, (half, half.t()), {}),
        (aten.addmm.default, (row[:1], a, b.t()), {}),
        (aten.addmm.default, (row, a, torch.randn(5, 5)), {"beta": 0}),
        (aten.bmm.default, (cube, cube.mT), {}),
        (aten.baddbmm.default, (a[0, 0], cube, cube.mT), {}),
        (aten.mul.out, (a, b), {"out": torch.empty(0)}),
        (aten._foreach_add.List, ([a, a], [b, b]), {}),
        (aten.bitwise_not.default, (torch.ones(4, dtype=torch.int),), {}),
    ]


@pytest.mark.parametrize("call", ways_to_call(), ids=lambda call: str(call[0]))
def test_what_is_estimated_by_sizes_is_what_meta_says(call: Any) -> None:
    func, args, kwargs = call
    found = estimate._plainly(func, args, kwargs)
    assert found is None or found == estimate._on_meta(func, args, kwargs)


def test_most_is_estimated_by_sizes() -> None:
    found = [estimate._plainly(*call) for call in ways_to_call()]
    assert sum(one is not None for one in found) >= 17


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_pointwise_operator_of_floats_keeps_to_its_sizes(dtype: Any) -> None:
    """Whatever torch calls pointwise: what is said of it is what it returns."""
    x = torch.rand(4, 3, dtype=dtype) / 2 + 0.25
    tried, wrong = 0, []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            func = getattr(packet, overload)
            required = [a for a in func._schema.arguments if not a.has_default_value()]
            if torch.Tag.pointwise not in func.tags or any(
                str(a.type) not in ("Tensor", "number") for a in required
            ):
                continue
            args = tuple(x if str(a.type) == "Tensor" else 0.5 for a in required)
            found = estimate._plainly(func, args, {})
            if found is None or facts_of(func).writes:
                continue
            try:
                result = func(*args)
            except (RuntimeError, NotImplementedError):
                continue  # not for these
            if found[0] != result.untyped_storage().nbytes():
                wrong.append(str(func))
            tried += 1
    assert wrong == []
    assert tried > 100
