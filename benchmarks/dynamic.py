"""Benchmark models that do something else at every step.

`tree` is a tree-structured LSTM (Tai et al., 2015; the child-sum kind) over a tree of
another shape at every step. `experts` is a mixture of experts whose router sends other
rows to other experts each time. `gan` trains two networks in turn, with two optimizers
and two backward passes a step. They are built and driven as those of `models.py` are:

    python benchmarks/budget.py --model dynamic --at 50
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import models
from benchmarks.models import Batch, Flags, Training

SIZES: dict[str, Flags] = {
    "tree": {"rows": 256, "width": 384, "leaves": 24},
    "experts": {"rows": 8192, "width": 256, "layers": 4, "experts": 4},
    "gan": {"batch": 64, "pixels": 64, "width": 32, "depth": 2},
}
QUICK: dict[str, Flags] = {
    "tree": {"rows": 128, "width": 96, "leaves": 16},
    "experts": {"rows": 2048, "width": 64, "layers": 3, "experts": 4},
    "gan": {"batch": 32, "pixels": 32, "width": 8, "depth": 3},
}


class TreeLSTM(nn.Module):
    """Compose a tree from its leaves upwards; a tree is a leaf or a pair of trees."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.leaf = nn.Linear(width, 3 * width)
        self.gates = nn.Linear(width, 3 * width)
        self.forget = nn.Linear(width, width)
        self.head = nn.Linear(width, 8)

    def compose(self, tree: object, leaves: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden and the memory state of a tree's root."""
        if isinstance(tree, int):
            inputs, output, update = self.leaf(leaves[tree]).chunk(3, 1)
            memory = inputs.sigmoid() * update.tanh()
            return output.sigmoid() * memory.tanh(), memory
        assert isinstance(tree, tuple)
        children = [self.compose(child, leaves) for child in tree]
        total = children[0][0] + children[1][0]
        inputs, output, update = self.gates(total).chunk(3, 1)
        memory = inputs.sigmoid() * update.tanh()
        for hidden, below in children:
            memory = memory + self.forget(hidden).sigmoid() * below
        return output.sigmoid() * memory.tanh(), memory

    def forward(self, tree: object, leaves: Tensor) -> Tensor:
        """Classify the root."""
        return self.head(self.compose(tree, leaves)[0])


def random_tree(draw: random.Random, first: int, stop: int) -> object:
    """Draw a tree over the leaves from `first` up to `stop`."""
    if stop == first + 1:
        return first
    split = draw.randrange(first + 1, stop)
    return random_tree(draw, first, split), random_tree(draw, split, stop)


class Experts(nn.Module):
    """Send each row to two experts, and add up what they make of it."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add the chosen experts' share to each row."""
        y = self.norm(x)
        weights, chosen = self.router(y).softmax(-1).topk(2, -1)
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                share = weights[rows, places].unsqueeze(1)
                x = x.index_add(0, rows, expert(y[rows]) * share)
        return x


@dataclass(slots=True)
class Adversaries:
    """A generator and a discriminator that are trained in turn."""

    model: nn.ModuleDict
    optimizer: torch.optim.Optimizer  # the discriminator's
    other: torch.optim.Optimizer  # the generator's
    make_batch: Callable[[], Batch]

    def step(self) -> float:
        """Run one iteration of both and return the sum of their losses."""
        made, judge = self.model["generator"], self.model["discriminator"]
        batch = self.make_batch()
        fake = made(batch["noise"])
        self.optimizer.zero_grad()
        real = judge(batch["x"])
        loss = F.softplus(-real).mean() + F.softplus(judge(fake.detach())).mean()
        loss.backward()
        self.optimizer.step()
        self.other.zero_grad()
        fooled = F.softplus(-judge(fake)).mean()
        fooled.backward()
        self.other.step()
        return loss.item() + fooled.item()


def _tree(sizes: Flags) -> Training:
    width, rows, most = (int(sizes[k]) for k in ("width", "rows", "leaves"))
    model = TreeLSTM(width)
    draw = random.Random(int(torch.randint(1 << 30, ())))
    trees: list[object] = []

    def make_batch() -> Batch:
        leaves = draw.randint(most // 2, most)
        trees[:] = [random_tree(draw, 0, leaves)]
        labels = torch.randint(8, (rows,))
        x = torch.randn(leaves, rows, width) + (labels / 8).view(1, -1, 1)
        return {"x": x, "y": labels}

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(trees[0], batch["x"]), batch["y"])

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Training(model, optimizer, make_batch, loss_of)


def _experts(sizes: Flags) -> Training:
    width, rows = int(sizes["width"]), int(sizes["rows"])
    layers = [
        Experts(width, int(sizes["experts"])) for _ in range(int(sizes["layers"]))
    ]
    model = nn.Sequential(*layers, nn.LayerNorm(width), nn.Linear(width, 8))

    def make_batch() -> Batch:
        labels = torch.randint(8, (rows,))
        return {"x": torch.randn(rows, width) + (labels / 8).view(-1, 1), "y": labels}

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Training(model, optimizer, make_batch, loss_of)


def _gan(sizes: Flags) -> Adversaries:
    width, batch, pixels = (int(sizes[k]) for k in ("width", "batch", "pixels"))
    halvings, depth = (pixels // 4).bit_length() - 1, int(sizes["depth"])
    up: list[nn.Module] = [nn.ConvTranspose2d(64, width << halvings, 4)]
    down: list[nn.Module] = []
    for i in range(halvings):
        fewer, more = width << (halvings - i - 1), width << (halvings - i)
        up += [nn.BatchNorm2d(more), nn.ReLU(inplace=True)]
        up += [nn.ConvTranspose2d(more, fewer, 4, stride=2, padding=1)]
        for _ in range(depth):
            up += [nn.BatchNorm2d(fewer), nn.ReLU(inplace=True)]
            up += [nn.Conv2d(fewer, fewer, 3, padding=1)]
        down += [nn.Conv2d(width << i if i else 3, width << (i + 1), 4, 2, 1)]
        for _ in range(depth):
            down += [nn.BatchNorm2d(width << (i + 1)), nn.LeakyReLU(0.2, inplace=True)]
            down += [nn.Conv2d(width << (i + 1), width << (i + 1), 3, padding=1)]
        down += [nn.BatchNorm2d(width << (i + 1)), nn.LeakyReLU(0.2, inplace=True)]
    up += [nn.ReLU(inplace=True), nn.Conv2d(width, 3, 3, padding=1), nn.Tanh()]
    down += [nn.Conv2d(width << halvings, 1, 4), nn.Flatten()]
    model = nn.ModuleDict(
        {"generator": nn.Sequential(*up), "discriminator": nn.Sequential(*down)}
    )

    def make_batch() -> Batch:
        pictures = torch.randn(batch, 3, pixels, pixels).tanh()
        return {"x": pictures, "noise": torch.randn(batch, 64, 1, 1)}

    judging, making = (
        torch.optim.Adam(model[part].parameters(), lr=2e-4, betas=(0.5, 0.999))
        for part in ("discriminator", "generator")
    )
    return Adversaries(model, judging, making, make_batch)


def build(
    name: str,
    *,
    seed: int = 0,
    checkpoint: bool = False,
    quick: bool = False,
    **flags: int | float,
) -> Training | Adversaries:
    """Build one of these models, or one of `models`, where it has that name."""
    if name not in SIZES:
        return models.build(
            name, seed=seed, checkpoint=checkpoint, quick=quick, **flags
        )
    if checkpoint:
        raise ValueError(f"{name} has no blocks to put a checkpoint around")
    sizes = models.sizes_of(name, SIZES[name], QUICK[name] if quick else {}, flags)
    torch.manual_seed(seed)
    training = {"tree": _tree, "experts": _experts, "gan": _gan}[name](sizes)
    training.model.train()
    return training
