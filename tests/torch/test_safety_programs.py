# SPDX-License-Identifier: Apache-2.0
"""Whole training programs: every loss, gradient, weight, buffer and random draw.

Optimizers, accumulation, evaluation in between, several models, checkpoints of the
training, recurrent layers, other processes.
"""

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compare import training_state
from tests.torch.regimes import check

Optimizers = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


def network() -> nn.Sequential:
    """Build a small network with batch norm and dropout."""
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Linear(16, 16),
        nn.Softplus(),
        nn.Linear(16, 4),
    )


def batch(n: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 8), torch.randint(4, (n,))


def loss_of(net: nn.Module, n: int = 6) -> Tensor:
    x, labels = batch(n)
    return F.cross_entropy(net(x), labels)


def state(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return [f"{k} {v}" for k, v in training_state(net, optimizer).items()]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


OPTIMIZERS: dict[str, Any] = {
    "sgd": sgd,
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    def program() -> list[Any]:
        net = network()
        optimizer = OPTIMIZERS[name](net.parameters())
        losses = []
        for _ in range(4):
            optimizer.zero_grad(set_to_none=name != "sgd")
            loss = loss_of(net)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
        return [*losses, *state(net, optimizer)]

    check(program)


def lbfgs_with_closure() -> list[Any]:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4)
    x, labels = batch(12)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), labels)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).detach() for _ in range(3)]
    return [*losses, *net.parameters()]


def step_in_backward() -> list[Any]:
    net = network()
    own = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in net.parameters()}

    def step(parameter: nn.Parameter) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in own:
        parameter.register_post_accumulate_grad_hook(step)
    losses = []
    for _ in range(4):
        loss = loss_of(net)
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *net.parameters(), *net.buffers()]


def hand_written_updates() -> list[Any]:
    net, losses = network(), []
    average = copy.deepcopy(net)
    for _ in range(4):
        loss = loss_of(net)
        found = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for p, g, a in zip(
                net.parameters(), found, average.parameters(), strict=True
            ):
                p -= 0.1 * g
                a.lerp_(p, 0.1)
        losses.append(loss.detach())
    return [*losses, *net.parameters(), *average.parameters()]


def accumulation() -> list[Any]:
    net = network()
    optimizer = sgd(net.parameters())
    for _ in range(3):
        for n in (6, 5, 4):
            (loss_of(net, n) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(net, optimizer)


def summed_losses() -> list[Any]:
    net = network()
    optimizer = sgd(net.parameters())
    for _ in range(2):
        losses = [loss_of(net) for _ in range(3)]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
    return state(net, optimizer)


def two_players() -> list[Any]:
    maker = nn.Sequential(
        nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ELU(), nn.Linear(16, 8)
    )
    judge = nn.Sequential(
        nn.Linear(8, 16), nn.LeakyReLU(), nn.Dropout(), nn.Linear(16, 1)
    )
    makes = torch.optim.Adam(maker.parameters(), lr=0.01)
    judges = torch.optim.Adam(judge.parameters(), lr=0.01)
    score = F.binary_cross_entropy_with_logits
    for _ in range(3):
        fake, real = maker(torch.randn(6, 3)), torch.randn(6, 8)
        judges.zero_grad()
        bad, good = judge(fake.detach()), judge(real)
        (score(good, torch.ones(6, 1)) + score(bad, torch.zeros(6, 1))).backward()
        judges.step()
        makes.zero_grad()
        score(judge(fake), torch.ones(6, 1)).backward()
        makes.step()
    return [*state(maker, makes), *state(judge, judges)]


def gradient_scaler() -> list[Any]:
    net = network()
    optimizer = sgd(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scales = []
    for i in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(net)
        if i == 1:
            loss = loss * float("inf")  # this step is skipped
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [*scales, *state(net, optimizer)]


def skipped_steps() -> list[Any]:
    net = network()
    optimizer = sgd(net.parameters())
    for i in range(5):
        loss = loss_of(net)
        if i % 2:
            del loss
            continue
        optimizer.zero_grad()
        loss.backward()
        if i != 2:
            optimizer.step()
    return state(net, optimizer)


def evaluation_between() -> list[Any]:
    net = network()
    optimizer = sgd(net.parameters())
    scores = []
    for _ in range(3):
        loss = loss_of(net)
        net.eval()
        with torch.no_grad():
            scores.append(loss_of(net))
        with torch.inference_mode():
            scores.append(loss_of(net).item())
            scores.append(net(torch.randn(3, 8)).numpy().tolist())
        net.train()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scores.append(loss_of(net).item())
    return [*map(repr, scores), *state(net, optimizer)]


def evaluation_mode_then_training_mode() -> list[Any]:
    net = network().eval()
    x = torch.randn(6, 8, requires_grad=True)
    loss = net(x).exp().sum()
    net.train()
    loss = loss + net(x * 2).exp().sum()
    loss.backward()
    return [x.grad, *net.buffers(), *(p.grad for p in net.parameters())]


def changing_shapes() -> list[Any]:
    net = network()
    optimizer = sgd(net.parameters())
    for n in (6, 3, 9, 6, 12, 3, 2, 9):
        optimizer.zero_grad()
        loss_of(net, n).backward()
        optimizer.step()
    return state(net, optimizer)


def changing_depth() -> list[Any]:
    layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    for i in range(5):
        h = torch.randn(4, 8)
        for layer in layers:
            if random.random() < 0.7:
                h = h + F.dropout(layer(h).tanh(), 0.1 * i) * (1 - 0.1 * i)
        optimizer.zero_grad()
        h.exp().mean().add(0 * layers[0].weight.sum()).backward()
        optimizer.step()
    return state(layers, optimizer)


def own_generators() -> list[Any]:
    draws = torch.Generator().manual_seed(5)
    x = torch.randn(16, requires_grad=True)
    for _ in range(2):
        mask = torch.empty(16).bernoulli_(0.5, generator=draws)
        noise = torch.randn(16, generator=draws) + float(np.random.rand())
        y = (x * mask + noise * torch.rand_like(x)).exp() * random.random()
        y = F.dropout(F.rrelu(y, training=True).sin(), 0.5)
        y = y + F.gumbel_softmax(y, dim=0) + torch.normal(y.detach(), 1.0).tanh()
        (y * torch.rand(16, generator=draws)).exp().sum().backward()
    return [x.grad, draws.get_state()]


def batch_norm_counters() -> list[Any]:
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, momentum=None), nn.ReLU(),
        nn.InstanceNorm2d(3, track_running_stats=True), nn.Flatten(),
    )  # fmt: skip
    nn.utils.parametrizations.spectral_norm(net[0])
    for _ in range(3):
        net(torch.randn(4, 1, 6, 6)).exp().sum().backward()
    return [*net.buffers(), *(p.grad for p in net.parameters())]


def recurrent() -> list[Any]:
    lstm = nn.LSTM(8, 6, num_layers=2, dropout=0.3, bidirectional=True)
    gru = nn.GRU(12, 5, num_layers=2, dropout=0.3)
    cell = nn.LSTMCell(5, 4)
    nets = nn.ModuleList([lstm, gru, cell])
    optimizer = torch.optim.Adam(nets.parameters())
    for length in (5, 3):
        out, _ = gru(lstm(torch.randn(length, 2, 8))[0])
        hidden = None
        for step in out:
            hidden = cell(step, hidden)
        optimizer.zero_grad()
        hidden[0].exp().sum().backward()
        optimizer.step()
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 8), [5, 3])
    lstm(packed)[0].data.exp().sum().backward()
    return state(nets, optimizer)


def truncated_through_time() -> list[Any]:
    lstm = nn.LSTM(8, 6, num_layers=2, dropout=0.3)
    optimizer = sgd(lstm.parameters())
    hidden = None
    for _ in range(3):
        out, hidden = lstm(torch.randn(4, 2, 8), hidden)
        optimizer.zero_grad()
        out.exp().sum().backward()
        optimizer.step()
        hidden = tuple(h.detach() for h in hidden)
    return state(lstm, optimizer)


def attention() -> list[Any]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    optimizer = torch.optim.AdamW(layer.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.randn(2, 5, 8), src_mask=mask).exp().sum().backward()
        optimizer.step()
    return state(layer, optimizer)


def copied_in_mid_training() -> list[Any]:
    net = network()
    optimizer = sgd(net.parameters())
    for _ in range(2):
        loss = loss_of(net)
        twin = copy.deepcopy(net)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(twin).backward()
    return [*state(net, optimizer), *twin.parameters(), twin[0].weight.grad]


PROGRAMS = [
    lbfgs_with_closure,
    step_in_backward,
    hand_written_updates,
    accumulation,
    summed_losses,
    two_players,
    gradient_scaler,
    skipped_steps,
    evaluation_between,
    evaluation_mode_then_training_mode,
    changing_shapes,
    changing_depth,
    own_generators,
    batch_norm_counters,
    recurrent,
    truncated_through_time,
    attention,
    copied_in_mid_training,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_programs(program: Callable[[], list[Any]]) -> None:
    check(program)


def test_resuming_from_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"

    def program() -> list[Any]:
        net = network()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for i in range(5):
            loss = loss_of(net)
            if i == 2:
                saved = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**saved, "random": torch.get_rng_state()}, file)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        first = state(net, optimizer)
        loaded = torch.load(file, weights_only=True)
        net = network()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        net.load_state_dict(loaded["net"])
        optimizer.load_state_dict(loaded["optimizer"])
        torch.set_rng_state(loaded["random"])
        for _ in range(2):
            loss_of(net).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*first, *state(net, optimizer)]

    check(program)
