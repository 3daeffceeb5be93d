# SPDX-License-Identifier: Apache-2.0
"""Rest: what fits whole and repeats runs unwatched, until something is different."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.errors import BudgetError
from lowtide.recorder.key import observe_with, stop_observing
from lowtide.runtime import allocator
from lowtide.runtime.session import Session
from tests.compare import seed_everything

LEARNING = 3  # equal iterations before rest
BATCH = 256


def network() -> nn.Sequential:
    seed_everything(0)
    blocks = [
        nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)
    ]
    return nn.Sequential(*blocks)


def resting(session: Session) -> bool:
    return session.recorder.resting is not None


def losses(batches: Iterable[int], each: Callable[[int], None] | None = None) -> Any:
    """Train on batches of the given sizes; losses, and the weights at the end."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = model(torch.randn(batch, 128)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item().hex())
        if each is not None:
            each(step)
    return found, [p.detach().clone() for p in model.parameters()]


def same(one: Any, other: Any) -> bool:
    return one[0] == other[0] and all(
        torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True)
    )


def plain_peak(batches: Iterable[int]) -> int:
    counter = allocator.install()
    counter.reset_peak()
    losses(batches)
    return counter.peak.value


def test_equal_iterations_that_fit_are_not_watched_any_more() -> None:
    plain = losses([BATCH] * 8)
    seen = []
    with Session("1GiB") as session:
        ours = losses([BATCH] * 8, lambda _: seen.append(resting(session)))
        operators = session.recorder.serial
    assert same(plain, ours)
    assert seen[-1]
    assert seen.index(True) >= LEARNING - 1
    with Session("1GiB") as session:
        losses([BATCH] * 4)
        assert session.recorder.serial == operators  # lineage ends where rest begins


def test_gradients_are_added_up_in_place_while_watched_too() -> None:
    """A storage that has a Python object is no longer autograd's alone."""
    plain: list[str] = []
    watched: list[str] = []

    def step() -> None:
        x = torch.ones(64, 64, requires_grad=True) * 2
        (x * x.tanh() + x.pow(3) + x.sin()).sum().backward()

    def note(into: list[str], func: Any) -> None:
        if func.name().startswith("aten::add"):
            into.append(func.name())

    def observe(func: Any, facts: Any, args: Any, kwargs: Any) -> Any:
        note(plain, func)
        return func(*args, **kwargs)

    observe_with(observe)
    try:
        step()
    finally:
        stop_observing()
    assert plain.count("aten::add_.Tensor") >= 2
    seen = []
    with Session("1GiB") as session:
        own = session.recorder.listener.before
        session.recorder.listener.before = lambda func, args, kwargs: (
            note(watched, func),
            own(func, args, kwargs),
        )[1]
        for _ in range(LEARNING + 4):
            step()
            session.step()
            seen.append(resting(session))
    assert watched[: len(plain)] == plain
    assert all(seen[LEARNING:])


def test_other_shapes_in_turn_are_always_watched() -> None:
    seen = []
    with Session("1GiB") as session:
        losses([BATCH, BATCH // 2] * 4, lambda _: seen.append(resting(session)))
    assert not any(seen)


def test_a_larger_batch_wakes_and_the_budget_holds() -> None:
    batches = [BATCH] * 6 + [4 * BATCH] * 3 + [BATCH] * 5
    plain = losses(batches)
    budget = int(0.8 * plain_peak([4 * BATCH] * 2))
    assert plain_peak([BATCH] * 2) < budget
    seen: list[bool] = []
    peaks: list[int] = []
    with Session(budget) as session:

        def note(_: int) -> None:
            seen.append(resting(session))
            peaks.append(session.report().peak_bytes)

        ours = losses(batches, note)
    assert same(plain, ours)
    assert seen[5]
    assert not any(seen[6:9])
    assert seen[-1]
    assert max(peaks) <= budget
    assert session.lane is not None
    assert session.lane.written_bytes > 0


def test_growth_between_iterations_wakes() -> None:
    """Memory that the program takes elsewhere is noticed, and room is made."""
    peak = plain_peak([BATCH] * 2)
    hoard: list[torch.Tensor] = []

    def take(step: int) -> None:
        if step == 5:
            hoard.append(torch.ones(peak // 8, dtype=torch.uint8))

    plain = losses([BATCH] * 9, take)
    hoard.clear()
    with Session(int(1.02 * peak)) as session:
        ours = losses([BATCH] * 9, take)
        assert not resting(session)
    assert same(plain, ours)
    assert session.report().peak_bytes <= int(1.02 * peak)


def test_what_does_not_fit_at_rest_is_an_error() -> None:
    budget = 64 << 20
    with Session(budget) as session:
        losses([BATCH] * 6)
        assert resting(session)
        large = torch.empty(2 * budget, dtype=torch.uint8)
        with pytest.raises(BudgetError):
            large.add_(1)


def test_saved_tensors_changed_in_place_at_rest_raise() -> None:
    model = network()
    with Session("1GiB") as session:
        for _ in range(6):
            model(torch.randn(BATCH, 128)).sum().backward()
        assert resting(session)
        x = torch.randn(BATCH, 128, requires_grad=True)
        y = model[0](x).exp()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_versions_of_one_storage_are_told_apart() -> None:
    """A storage is saved, written unseen, saved again; then memory gets short."""

    def program(small: int, large: int) -> list[torch.Tensor]:
        seed_everything(0)
        weight = torch.randn(512, 512, requires_grad=True)
        found = []
        for rows in [small] * 6 + [large] * 2:
            dropped = weight.sin()
            del dropped
            with torch.no_grad():
                weight.mul_(0.5).add_(0.01)
            h = torch.randn(rows, 512)
            for _ in range(6):
                h = (h @ weight).tanh() * 3
            h.sum().backward()
            assert weight.grad is not None
            found.append(weight.grad.clone())
            weight.grad = None
        return found

    counter = allocator.install()
    counter.reset_peak()
    plain = program(64, 1024)
    budget = int(0.7 * counter.peak.value)
    with Session(budget) as session:
        ours = program(64, 1024)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert session.report().swapped_bytes + session.report().recomputed_bytes > 0


def test_a_graph_kept_from_before_is_not_touched_by_rest() -> None:
    def program() -> list[torch.Tensor]:
        model = network()
        kept = model(torch.randn(BATCH, 128)).sum()
        for _ in range(6):
            model(torch.randn(BATCH, 128)).sum().backward()
        kept.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = program()
    with Session("1GiB"):
        ours = program()
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_an_operator_that_meets_the_beginning_of_rest_leaves_no_lineage() -> None:
    """Its result is written unseen at rest, and dropped after waking."""

    def program() -> list[torch.Tensor]:
        seed_everything(0)
        layers = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 128, bias=False), nn.Tanh()) for _ in range(12)
        )
        for step in range(4):
            x = torch.randn(2048, 128)  # the first operator after backward
            x.add_(1)
            h = x
            del x
            for layer in [*layers[:3], *(layers[3:] if step == 3 else [])]:
                h = layer(h)
            loss = h.square().mean()
            del h
            layers.zero_grad()
            loss.backward()
        return [p.grad.clone() for p in layers.parameters() if p.grad is not None]

    plain = program()
    with Session("12MiB", policy="recompute-only") as session:
        ours = program()
    assert session.replayer.operators > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_what_dlpack_shared_is_nothing_to_compute_from() -> None:
    def program(share: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
        seed_everything(0)
        buffer = torch.randn(256, 512)
        other = share(buffer)
        x = torch.randn(256, 512, requires_grad=True)
        h = x
        for _ in range(6):
            h = (h + buffer).exp().tanh()
        other[:] = 0
        h.sum().backward()
        assert x.grad is not None
        return [x.grad.clone()]

    for share in (
        lambda t: torch.from_dlpack(t),
        lambda t: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(t)),
    ):
        plain = program(share)
        with Session("1GiB", policy="recompute-only", force=True):
            ours = program(share)
        assert torch.equal(plain[0], ours[0])


def test_another_operator_in_the_middle_of_an_iteration_wakes() -> None:
    """It saves nothing, and needs more than there is: room is made before it runs."""

    def program(note: Callable[[int], None]) -> list[str]:
        model = network()
        found = []
        for step in range(8):
            h = torch.randn(BATCH, 128)
            for layer in model:
                h = layer(h)
            if step == 6:
                with torch.no_grad():
                    found.append(h.repeat(20, 1).sum().item().hex())
            loss = h.square().mean()
            del h
            model.zero_grad()
            loss.backward()
            found.append(loss.item().hex())
            note(step)
        return found

    counter = allocator.install()
    peaks: list[int] = []
    counter.reset_peak()
    plain = program(lambda _: peaks.append(counter.peak.value))
    assert peaks[6] > 1.4 * peaks[5]
    budget = int(0.85 * peaks[6])
    seen: list[bool] = []
    with Session(budget) as session:
        ours = program(lambda _: seen.append(resting(session)))
        assert counter.peak.value <= budget
    assert plain == ours
    assert seen[5]
    assert not seen[6]


def test_rest_follows_the_iteration_before_it_not_an_older_one() -> None:
    """What is saved is the same throughout, but not the operators that save nothing."""

    def program(note: Callable[[int], None]) -> list[str]:
        model = network()
        found = []
        for step in range(14):
            h = torch.randn(BATCH, 128)
            for layer in model:
                h = layer(h)
            if step < 6:
                with torch.no_grad():
                    found.append(h.abs().sum().item().hex())
            h.square().mean().backward()
            del h
            found.append(str(model[0][0].weight.grad.sum().item()))
            model.zero_grad()
            note(step)
        return found

    plain = program(lambda _: None)
    seen: list[bool] = []
    with Session("1GiB") as session:
        ours = program(lambda _: seen.append(resting(session)))
    assert plain == ours
    assert seen[5]
    assert not seen[6]
    assert seen[-1]
