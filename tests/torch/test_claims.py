# SPDX-License-Identifier: Apache-2.0
"""Recording for a CUDA device on a machine without one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.recorder.graph import sequence_of
from lowtide.trace import Graph

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is such a device here"
)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(64, 3 * 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inputs(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def recorded(dtype: torch.dtype | None = None, batch: int = 16) -> Graph:
    def build():  # type: ignore[no-untyped-def]
        assert torch.cuda.is_available()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = Attention().to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        there = next(model.parameters())
        assert there.is_cuda
        assert there.device == torch.device("cuda", 0)
        assert torch.zeros(3, device="cuda").device.type == "cuda"
        assert torch.tensor([1.0], device=device).is_cuda

        def step() -> None:
            optimizer.zero_grad()
            x = torch.randn(batch, 128, 64).cuda()
            assert x.to(device) is x
            assert not x.cpu().is_cuda
            assert (x + 1).is_cuda
            with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
                out = model(x)
            out.float().square().mean().backward()
            optimizer.step()
            torch.cuda.synchronize()

        return step

    return lowtide.record(build=build, fake=True, device="cuda", hardware="rtx4090")


def test_a_program_finds_the_device() -> None:
    graph = recorded()
    names = sequence_of(graph)
    assert "aten::_scaled_dot_product_efficient_attention" in names
    assert "aten::_scaled_dot_product_efficient_attention_backward" in names
    assert any(name.startswith("aten::_foreach_") for name in names)
    assert graph.plain_peak_bytes > 16 * 128 * 64 * 4 * 5


def test_attention_in_half_precision_is_flash_attention() -> None:
    graph = recorded(torch.float16)
    assert "aten::_scaled_dot_product_flash_attention" in graph.names


def test_autocast_widens_what_it_widens_there() -> None:
    def build():  # type: ignore[no-untyped-def]
        model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).cuda()

        def step() -> None:
            with torch.autocast("cuda"):
                narrow = model[0](torch.randn(4096, 64, device="cuda"))
                wide = model[1](narrow)
                assert narrow.dtype is torch.float16
                assert wide.dtype is torch.float32
                assert narrow.softmax(-1).dtype is torch.float32
                assert (narrow + 1).dtype is torch.float16
            wide.sum().backward()

        return step

    lowtide.record(build=build, fake=True, device="cuda")
    with torch.autocast("cpu", torch.float16):  # a CPU does as it did before
        narrow = torch.ones(2, 2) @ torch.ones(2, 2)
        assert narrow.softmax(-1).dtype is torch.float16


def test_what_lies_elsewhere_does_not_count() -> None:
    def build():  # type: ignore[no-untyped-def]
        weight = torch.ones(1 << 20, device="cuda", requires_grad=True)

        def step() -> None:
            host = torch.randn(1 << 26)  # stays there
            (weight * host[: 1 << 20].cuda()).sum().backward()

        return step

    graph = lowtide.record(build=build, fake=True, device="cuda")
    assert graph.plain_peak_bytes < 1 << 26


def test_all_is_put_back() -> None:
    before = [vars(torch.Tensor).get(name) for name in ("to", "device", "is_cuda")]
    attention, available = F.scaled_dot_product_attention, torch.cuda.is_available
    recorded()
    after = [vars(torch.Tensor).get(name) for name in ("to", "device", "is_cuda")]
    assert before == after
    assert attention is F.scaled_dot_product_attention
    assert available is torch.cuda.is_available
    assert not torch.cuda.is_available()
    with pytest.raises((RuntimeError, AssertionError, NotImplementedError)):
        torch.zeros(3, device="cuda")
    assert torch.ones(2).device.type == "cpu"


def test_seconds_are_those_of_the_device() -> None:
    def build():  # type: ignore[no-untyped-def]
        weight = torch.ones(4096, 4096, device="cuda", requires_grad=True)

        def step() -> None:
            (weight @ torch.ones(4096, 4096, device="cuda")).sum().backward()

        return step

    seconds = [
        lowtide.record(build=build, fake=True, device="cuda", hardware=name).seconds
        for name in ("gtx1080ti", "h100")
    ]
    assert seconds[0] > 3 * seconds[1]
