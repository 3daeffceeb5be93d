# SPDX-License-Identifier: Apache-2.0
"""What adds up in any order is never recomputed: a replay would find other bits."""

import pytest
import torch
from torch import Tensor, nn

from lowtide.recorder.schemas import facts_of
from lowtide.runtime.session import Session

MIB = 1 << 20


@pytest.mark.parametrize(
    "operator",
    [
        torch.ops.aten.index_put.default,
        torch.ops.aten.index_put_.default,
        torch.ops.aten._unsafe_index_put.default,
        torch.ops.aten.index_add.default,
        torch.ops.aten.scatter_add_.default,
        torch.ops.aten.scatter_reduce.two,
    ],
)
def test_sums_in_any_order_are_not_replayed(operator: torch._ops.OpOverload) -> None:
    assert not facts_of(operator).replayable


def test_what_follows_from_such_a_sum_starts_there() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(64, 1024))

        def forward(self, x: Tensor) -> Tensor:
            spread = torch.zeros(64, 1024).index_put((rows,), x, accumulate=True)
            for _ in range(12):
                spread = torch.tanh(spread * self.table)
            return spread

    def train(policy: str | None) -> list[float]:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        session = None if policy is None else Session(4 * MIB, policy=policy)
        losses = []
        with session or torch.enable_grad():
            for _ in range(4):
                loss = net(torch.randn(512, 1024)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        if session is not None:
            assert session.report().recomputed_bytes > 0
        return losses

    rows = torch.randint(0, 64, (512,))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # where even plain PyTorch repeats its bits
    try:
        assert train("recompute-only") == train(None)
    finally:
        torch.set_num_threads(threads)
