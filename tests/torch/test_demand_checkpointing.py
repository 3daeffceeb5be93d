# SPDX-License-Identifier: Apache-2.0
"""Demand: the errors of checkpointing.

What users asked for in public threads: each test names its thread, and other tests name
others (tests/pure/test_demand_named.py has the list).
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.torch.processes import succeeds
from tests.torch.regimes import check


def leaf(*size: int) -> Tensor:
    return torch.randn(*size, requires_grad=True)


def gradients(net: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in net.parameters()]


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


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # by Dynamo
def test_a_compiled_part_of_several_lengths() -> None:
    """pytorch#166926: checkpointing around a compiled part fails as lengths change."""

    def program() -> list[Any]:
        torch.compiler.reset()
        first, second = nn.Linear(16, 16), nn.Linear(16, 16)
        inner = torch.compile(nn.Sequential(first, nn.Tanh()), backend="aot_eager")
        losses = []
        for rows in (4, 6, 9):
            x = torch.randn(rows, 16)
            h = checkpoint(inner, second(x).exp(), use_reentrant=False)
            loss = (h * inner(x)).exp().sum()
            loss.backward()
            losses.append(loss.detach())
        return [*losses, *gradients(first), *gradients(second)]

    check(program, must_move=())


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
