# SPDX-License-Identifier: Apache-2.0
"""What users asked for in public threads: each test names its thread.

Silently wrong gradients, errors of checkpointing, hooks that offload. Threads that
another test covers stand here as a comment, with that test's name.
"""

import gc
import random
import types
import weakref
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lowtide.recorder import dispatch
from lowtide.runtime.hostlane import HostLane
from lowtide.runtime.session import Session
from tests.torch.processes import succeeds
from tests.torch.regimes import (
    POLICIES,
    assert_same,
    check,
    deep,
    forced,
    moved_bytes,
    run_plain,
    run_under,
    train,
)
from tests.virtual_lane import VirtualDriver, VirtualLane, Weather


def leaf(*size: int) -> Tensor:
    return torch.randn(*size, requires_grad=True)


def gradients(net: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in net.parameters()]


# Silently wrong gradients.


def seeded_operators() -> list[Any]:
    x = leaf(32, 32)
    q = x.view(1, 2, 16, 32)
    heads = F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)
    y = F.dropout(x.sin(), 0.4) + F.rrelu(x, training=True) + heads.view(32, 32)
    y = y * torch.bernoulli(x.sigmoid().detach())
    y.exp().clamp(max=5).sum().backward()
    return [x.grad]


def test_random_operators_draw_the_same() -> None:
    """pytorch#190758: a partitioner draws dropout anew in backward."""
    check(seeded_operators)


@pytest.mark.parametrize("part", [0.95, 0.8, 0.65])
def test_random_operators_at_every_budget(part: float) -> None:
    """pytorch#190758: at any budget below the whole."""

    def program() -> list[Any]:
        return train(deep(64, 10), 1024, 4)

    expected = run_plain(program)
    plain = Session("1TiB", policy="keep")
    run_under(plain, program)
    session = Session(int(part * plain.report().peak_bytes))
    assert_same(expected, run_under(session, program), f"{part}")
    assert moved_bytes(session) > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_dropout_gradients_agree_with_differences(policy: str) -> None:
    """pytorch#190758: checked against finite differences, not only against itself."""
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return F.dropout((x.sin() * 2).exp(), 0.4).tanh()

    with forced(policy):
        assert torch.autograd.gradcheck(function, (x,))


def own_generators() -> list[Any]:
    generator, draw = torch.Generator().manual_seed(7), random.Random(3)
    x = leaf(16, 16)
    y = x
    for _ in range(4):
        mask = torch.empty(16, 16).bernoulli_(draw.random(), generator=generator)
        noise = torch.rand(16, 16, generator=generator)
        y = (y * mask + noise * draw.random()).sin().exp()
    y.sum().backward()
    return [x.grad, generator.get_state(), draw.random()]


def test_own_generators_and_pythons_random() -> None:
    """pytorch#190717: dropout's mask differs in backward at a low budget."""
    check(own_generators)


def test_two_hundred_steps_with_dropout() -> None:
    """guided-diffusion#167: checkpointing with dropout lets the loss diverge."""

    def program() -> list[Any]:
        return train(deep(8, 1), 2, 200)

    assert_same(run_plain(program), run_under(forced("random"), program), "200 steps")


def test_the_random_stream_after_the_step() -> None:
    """OLMo-core PR#828: recomputing draws from the stream of the program."""

    def program() -> list[Any]:
        drawn = []
        net = deep(16, 3)
        for _ in range(3):
            net(torch.randn(8, 16)).exp().sum().backward()
            drawn += [torch.rand(2), random.random()]
        return drawn

    check(program)


def test_other_devices_random_states_are_kept_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """pytorch PR#194478: the random state of devices other than CUDA's."""
    own = torch.Generator().manual_seed(11)
    fake = types.SimpleNamespace(default_generators=[None, own])
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    states = dispatch._random_states((), {}, "xpu:1")
    assert [generator for generator, _ in states] == [torch.default_generator, own]
    assert torch.equal(states[1][1], own.get_state())


class Counting(nn.Module):
    """Counts its calls in a buffer and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.calls += 1
        return self.norm(x).tanh()


def test_statistics_are_updated_once() -> None:
    """pytorch#96136: checkpointing updates batch norm's statistics twice."""

    def program() -> list[Any]:
        net = nn.Sequential(nn.Linear(16, 16), Counting(), nn.Linear(16, 16))
        for _ in range(3):
            net(torch.randn(8, 16)).exp().sum().backward()
        return [*net.state_dict().values(), *gradients(net), net[1].seen]

    check(program)


def views_of_one_storage() -> list[Any]:
    x = leaf(12, 12)
    y = x.exp()
    z = y @ y.t() + y[:, 2:5] @ y[2:5] * y.t()
    (z * y[:, 3:4].expand(12, 12)).sum().backward()
    return [x.grad]


def test_views_of_one_storage_keep_their_strides() -> None:
    """ms-swift PR#10157: views told apart by their storage alone get mixed up.

    That one copy is made: test_safety_geometry.py::
    test_a_storage_shared_by_views_is_moved_once.
    """
    check(views_of_one_storage)


# torchtune#1867, TRL PR#7195 (races of streams): test_virtual_device.py, any schedule;
#   that the current stream is asked for each time: test_accelerator.py.
# Megatron-LM#7398 (a reload races its own copy): tests/pure/test_hostlane.py::
#   test_a_read_waits_for_its_copy_on_the_other_stream, and for the disk
#   tests/pure/test_transfer_orders.py::test_a_read_waits_for_a_slow_write.


def test_two_steps_through_one_slab() -> None:
    """torchtitan PR#2581: a slot of the pool is handed out too early."""
    expected = run_plain(lambda: train(deep(64, 6), 64, 2))
    driver = VirtualDriver(4, Weather(delay=60))
    lane = HostLane(driver, limit_bytes=16 << 10, below=None)
    session = forced("swap-only", lane=lane)
    assert_same(expected, run_under(session, lambda: train(deep(64, 6), 64, 2)), "1")
    assert lane.read_bytes > 0
    assert lane.slabs.held_bytes <= 16 << 10
    assert driver.faults == []


# Errors of checkpointing.


class Experts(nn.Module):
    """A mixture of experts whose routing is all but undecided."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        nn.init.constant_(self.router.weight, 1e-8)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1) + torch.rand(len(x), 4) * 1e-6
        weights, chosen = scores.topk(2, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, slots = (chosen == i).nonzero(as_tuple=True)
            if len(rows):
                share = weights[rows, slots].unsqueeze(1)
                out = out.index_add(0, rows, expert(x[rows]).tanh() * share)
        return out


def test_routing_is_not_decided_again() -> None:
    """pytorch#171355: Qwen3's routing comes out otherwise when recomputed."""

    def program() -> list[Any]:
        torch.manual_seed(2)
        net = nn.Sequential(Experts(), nn.Tanh(), Experts())
        losses = []
        for _ in range(3):
            loss = net(torch.randn(32, 16)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        return [*losses, *gradients(net)]

    check(program)


def test_counts_that_differ_from_step_to_step() -> None:
    """NeMo-RL#1203: nonzero() gives another count each time."""

    def program() -> list[Any]:
        x, losses = leaf(64), []
        for step in range(4):
            chosen = (x * (step + 1)).sin()
            kept = chosen[(chosen > 0.1 * step).nonzero().squeeze(1)]
            loss = (kept.exp() * kept).sum()
            loss.backward()
            losses.append(loss.detach())
        return [x.grad, *losses]

    check(program)


def test_a_split_that_differs_at_every_call() -> None:
    """torchtitan#1117: recomputed tensors have other sizes than before."""
    calls = [0]

    def split(x: Tensor) -> Tensor:
        calls[0] += 1
        a, b = x.split([8 + calls[0] % 3, 24 - calls[0] % 3])
        return torch.cat([b.exp(), a.sin()])

    def program() -> list[Any]:
        calls[0] = 0
        x = leaf(32, 4)
        for _ in range(3):
            split(split(x).tanh()).sum().backward()
        return [x.grad, calls[0]]

    check(program)


@pytest.mark.parametrize("warm", [True, False])
def test_autocast(warm: bool) -> None:
    """pytorch#141896: an error under autocast, whose cache of weights is suspected."""

    def program() -> list[Any]:
        net = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        losses = []
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=warm):
                x = torch.randn(8, 16)
                h = net(x) + (net(x) if warm else 0)
                loss = h.exp().float().mean()
            loss.backward()
            losses.append(loss.detach())
        return [*losses, *gradients(net)]

    check(program)


def test_a_model_that_keeps_keys_and_values() -> None:
    """pytorch#155171: use_cache=True while training doubles what is saved."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16, use_cache=True,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip

    def program() -> list[Any]:
        torch.manual_seed(3)
        net = GPT2LMHeadModel(config).train()
        tokens = torch.randint(32, (2, 12))
        losses = []
        for _ in range(2):
            out = net(input_ids=tokens, labels=tokens, use_cache=True)
            assert out.past_key_values is not None
            out.loss.backward()
            losses.append(out.loss.detach())
        return [*losses, *gradients(net)]

    check(program)


# pytorch#166926 (a compiled part and several shapes): test_safety_processes.py::
#   test_a_compiled_module.


def test_parameters_without_storage_between_forward_and_backward() -> None:
    """transformers#34928, Lightning#19267: FSDP frees parameters in between."""

    def program() -> list[Any]:
        first, second = nn.Linear(16, 16), nn.Linear(16, 16)
        results = []
        for _ in range(2):
            x = leaf(8, 16)
            loss = second(first(x).exp().tanh()).square().sum()
            storage = second.weight.untyped_storage()
            kept, size = second.weight.detach().clone(), storage.nbytes()
            storage.resize_(0)
            storage.resize_(size)
            second.weight.data.copy_(kept)
            loss.backward()
            results += [loss.detach(), x.grad]
        return [*results, *gradients(first), *gradients(second)]

    check(program)


def test_saved_tensors_may_be_asked_for_again() -> None:
    """pytorch#82156: what is saved may be unpacked more than once."""

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            (again,) = ctx.saved_tensors
            assert torch.equal(x, again)
            return grad * again.cos()

    def program() -> list[Any]:
        x = leaf(16)
        y = (x * 2).exp()
        loss, node = Reads.apply(y).sum(), y.grad_fn
        del y
        torch.zeros(1).add_(1)
        seen = node._saved_result.clone()
        assert torch.equal(seen, node._saved_result)
        loss.backward(retain_graph=True)
        loss.backward()
        return [x.grad, seen]

    check(program)


class Square(torch.autograd.Function):
    """Saves an intermediate of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        inner = x.sin()
        ctx.save_for_backward(x, inner)
        return inner * inner

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, inner = ctx.saved_tensors
        return 2 * grad * inner * x.cos()


def test_a_function_that_saves_what_is_neither_input_nor_output() -> None:
    """pytorch#103726: a fused attention's Function under checkpointing."""

    def program() -> list[Any]:
        x = leaf(16)
        y = Square.apply((x * 2).exp())
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [x.grad]

    check(program)


def test_data_parallel_training() -> None:
    """pytorch#24005, transformers#23018, peft#313: parameters marked ready twice.

    Two processes, with and without unused parameters, a block called twice.
    """
    out = succeeds(
        """
        import os, sys, tempfile, warnings
        import torch, torch.distributed as dist, torch.multiprocessing as mp
        from torch.nn.parallel import DistributedDataParallel
        from lowtide.runtime.session import Session

        warnings.simplefilter("ignore")

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.block = torch.nn.Linear(16, 16)
                self.head = torch.nn.Linear(16, 16)
                self.unused = torch.nn.Linear(16, 16)

            def forward(self, x, all_used):
                x = self.head(self.block(self.block(x).exp().tanh()).sin())
                return x + self.unused(x) if all_used else x

        def train(rank, unused):
            torch.manual_seed(1)
            net = Net()
            wrapped = DistributedDataParallel(net, find_unused_parameters=unused)
            torch.manual_seed(rank)
            for _ in range(3):
                wrapped(torch.randn(8, 16), not unused).square().mean().backward()
            return [p.grad for p in net.parameters() if p.grad is not None]

        def rank_of(rank, file):
            torch.set_num_threads(1)
            dist.init_process_group(
                "gloo", init_method=f"file://{file}", rank=rank, world_size=2
            )
            for unused in (False, True):
                expected = train(rank, unused)
                for policy in ("recompute-only", "swap-only"):
                    with Session("1TiB", policy=policy, force=True) as session:
                        found = train(rank, unused)
                    same = all(map(torch.equal, expected, found))
                    assert same and len(expected) == len(found), (unused, policy)
            dist.destroy_process_group()
            os._exit(0)

        children = []
        file = tempfile.mktemp()
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                try:
                    rank_of(rank, file)
                except BaseException:
                    import traceback
                    traceback.print_exc()
                    os._exit(1)
            children.append(pid)
        assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]
        os.unlink(file)
        print("equal")
        """
    )
    assert "equal" in out


# Offload hooks and host memory.


def test_graphs_that_are_not_used_whole() -> None:
    """TRL#4280: evaluation under grad, a part of a backward, an error in mid-step."""

    def program() -> list[Any]:
        net, x = deep(16, 3), leaf(4, 16)
        net(x).exp().sum()  # nobody wants its gradient
        net.eval()
        net(x).exp()
        net.train()
        h = net[:4](x)
        torch.autograd.grad(net[4:](h).exp().sum(), h, retain_graph=True)
        with pytest.raises(RuntimeError):
            net(x).exp() @ torch.randn(3, 3)
        return train(net, 8)

    check(program)


LAYOUTS = st.tuples(
    st.lists(st.integers(0, 4), min_size=0, max_size=3),
    st.lists(st.integers(0, 5), min_size=3, max_size=3),
    st.integers(0, 9),
    st.sampled_from(POLICIES),
)


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(LAYOUTS)
def test_any_layout(layout: tuple[list[int], list[int], int, str]) -> None:
    """TRL PR#5694: tensors that are not contiguous crash an offloader."""
    size, stride, offset, policy = layout

    def program() -> list[Any]:
        x = torch.linspace(-1, 1, 64, requires_grad=True)
        y = (x * 2).as_strided(size, stride[: len(size)], offset)
        (y.exp() * y.sin()).sum().backward()
        picture = leaf(1, 2, 3, 3)
        moved = (picture * 2).to(memory_format=torch.channels_last)
        (moved.exp() * moved.expand(4, 2, 3, 3).sin()).sum().backward()
        return [x.grad, picture.grad]

    expected = run_plain(program)
    assert_same(expected, run_under(forced(policy), program), f"{layout}")


# TRL PR#5700 (a leak between steps): test_safety_faults.py::
#   test_many_steps_with_mishaps_leave_nothing_behind.
# pytorch#86097 (pinning is not free): tests/pure/test_hostlane.py::
#   test_after_the_first_step_nothing_is_pinned_any_more, and in training:


def test_slabs_are_used_again_at_every_step() -> None:
    """pytorch#86097: pin_memory for CPU offload, within a host budget."""
    lane = HostLane(VirtualDriver(2), limit_bytes=4 << 20, below=None)
    pins: list[int] = []
    with forced("swap-only", lane=lane):
        net = deep(64, 6)
        for _ in range(5):
            net(torch.randn(64, 64)).exp().mean().backward()
            pins.append(lane.slabs.pins)
    assert pins[0] > 0
    assert len(set(pins[1:])) == 1
    assert lane.slabs.held_bytes <= 4 << 20


# pytorch#95823 (twice the memory for pinned tensors): tests/pure/test_hostlane.py::
#   test_slabs_are_as_large_as_what_they_hold.


def test_training_where_pinning_is_refused() -> None:
    """unsloth#338: pinning fails on WSL."""
    expected = run_plain(lambda: train(deep(16, 4), 16))
    driver = VirtualDriver(1, Weather(pinning=False))
    lane = HostLane(driver, limit_bytes=None, below=None)
    session = forced("swap-only", lane=lane)
    assert_same(expected, run_under(session, lambda: train(deep(16, 4), 16)), "WSL")
    notes = [n for n in session.report().notes if "could not be pinned" in n]
    assert len(notes) == 1
    assert moved_bytes(session) > 0


def test_first_evaluation_under_inference_mode_then_training() -> None:
    """unsloth#3828: buffers made under inference mode crash training."""

    def program() -> list[Any]:
        net = deep(16, 3)
        with torch.inference_mode():
            made = torch.randn(16)
            net(torch.randn(4, 16)).exp().sum()
        x = leaf(4, 16)
        (net(x) + made).exp().sum().backward()
        return [x.grad, *train(net, 4)]

    check(program)


def test_tied_weights_are_not_moved() -> None:
    """cache-dit PR#1111: weights that are tied get torn apart."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(32, 16)
            self.head = nn.Linear(16, 32, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens).tanh().exp())

    def program() -> list[Any]:
        net = Tied()
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(3):
            tokens = torch.randint(32, (4, 8))
            F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
        assert net.head.weight is net.embedding.weight
        return [*net.parameters(), *gradients(net)]

    check(program)


def test_parameters_their_views_and_buffers_are_never_moved() -> None:
    """pytorch#64729: parameters should be left out of what is packed."""

    class Watching(VirtualLane):
        places: set[int] = set()  # noqa: RUF012

        def write(self, address: int, nbytes: int) -> Any:
            assert address not in self.places
            return super().write(address, nbytes)

    lane = Watching(1)
    weight, buffer = nn.Parameter(torch.randn(16, 16)), torch.randn(16)
    lane.places = {weight.data_ptr(), buffer.data_ptr()}
    x = leaf(8, 16)
    with forced("swap-only", lane=lane):
        h = (x * 2).exp() @ weight.t()
        ((h * buffer).sin() @ weight[:, :4]).sum().backward()
    assert lane.written_bytes > 0
    assert lane.faults == []


def test_gradients_asked_for_in_another_order() -> None:
    """pytorch PR#198016: the order of unpacking is not that of packing, reversed."""

    def program() -> list[Any]:
        x = leaf(64, 256)
        results = []
        for step in range(4):
            hidden = [(x * i).sin().exp() for i in range(1, 9)]
            losses = [h.square().sum() for h in hidden]
            del hidden
            random.Random(step).shuffle(losses)
            for loss in losses:
                loss.backward()
            results.append(x.grad)
        return results

    check(program)
    expected = run_plain(program)
    plain = Session("1TiB", policy="keep")
    run_under(plain, program)
    for seed in range(3):
        lane = VirtualLane(seed, Weather(delay=100))
        session = Session(int(0.7 * plain.report().peak_bytes), lane=lane)
        assert_same(expected, run_under(session, program), f"seed {seed}")
        assert lane.faults == []


@pytest.mark.parametrize("policy", POLICIES)
def test_a_dropped_graph_leaves_no_cycle(policy: str) -> None:
    """pytorch#115255: hooks made of lambdas keep what they saved alive."""

    class Token:
        pass

    gc.collect()
    gc.disable()
    try:
        with forced(policy):
            token = Token()
            x = leaf(64)
            y = (x * 2).exp()
            y.sin().sum().grad_fn.metadata["token"] = token  # type: ignore[union-attr]
            loss = y.sin().sum()
            loss.grad_fn.metadata["token"] = token  # type: ignore[union-attr]
            gone = weakref.ref(token)
            del token, y, loss
            torch.zeros(1).add_(1)
            assert gone() is None
    finally:
        gc.enable()


def errors_in_place() -> list[Any]:
    results: list[Any] = []
    x = leaf(8, 8)
    y = (x * 2).exp()
    y[2:4].relu_()  # a view of what exp has saved
    try:
        y.sum().backward()
    except RuntimeError as error:
        results.append(str(error).split(":")[0])
    z = (x * 3).sin()
    F.relu_(z[1:3])
    (z * 2).sum().backward()
    return [*results, x.grad]


def test_views_changed_in_place() -> None:
    """pytorch#181832: an in-place operator on a view loses a hook."""
    found = run_plain(errors_in_place)
    assert "modified by an inplace operation" in str(found[0])
    check(errors_in_place)


def its_own_checkpointing() -> list[Any]:
    net = deep(16, 4)
    x = leaf(8, 16)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    h = checkpoint(net[:3], x * 2, use_reentrant=False)
    h = checkpoint(net[3:6], h, use_reentrant=False, context_fn=contexts)
    with save_on_cpu():
        h = net[6:9](h)
    checkpoint(net[9:], h, use_reentrant=False).exp().sum().backward()
    return [x.grad, *gradients(net)]


def test_a_model_with_checkpointing_and_hooks_of_its_own() -> None:
    """pytorch#191236: selective checkpointing inside the user's own hooks."""
    check(its_own_checkpointing, must_move=())


# What is said.


def holding(keep: Callable[[Tensor], None]) -> Session:
    with forced("swap-only") as session:
        x = leaf(128, 128)
        y = (x * 2).exp()
        keep(y)
        y.sin().sum().backward()
        session.step()
    return session


def test_the_report_names_who_holds_what_stayed() -> None:
    """discuss.pytorch.org/t/208243: why does offloading not reduce memory?"""
    held: list[Tensor] = []
    kept = holding(held.append).report().kept
    reasons = {entry.reason: entry for entry in kept}
    entry = reasons["held by the program at the start of backward"]
    assert entry.bytes >= 128 * 128 * 4
    assert "exp" in entry.example or entry.tensors > 1


def test_nothing_moved_is_said_with_the_reason() -> None:
    """DeepSpeed#522: why does cpu_checkpointing not work?"""
    with Session("1TiB") as session:
        train(deep(64, 4), 256)
    report = session.report()
    assert report.swapped_bytes == report.recomputed_bytes == 0
    assert report.kept_bytes == report.saved_bytes > 0
    assert any(entry.reason == "it fitted" for entry in report.kept)


def test_planned_and_measured_peaks_are_told() -> None:
    """DeepSpeed#3779: partitioned checkpointing does not reduce memory."""

    def program() -> list[Any]:
        return train(deep(64, 10), 1024, 5)

    plain = Session("1TiB", policy="keep")
    run_under(plain, program)
    session = Session(int(0.8 * plain.report().peak_bytes))
    run_under(session, program)
    report = session.report()
    assert 0 < report.peak_bytes <= report.budget_bytes
    assert 0 < report.planned_peak_bytes <= report.budget_bytes
    assert report.swapped_bytes + report.recomputed_bytes > 0
