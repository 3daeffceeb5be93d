"""The five benchmark models, as somebody would write them who knows no lowtide.

`build(name)` returns a `Training`: a model with random weights, its optimizer and an
endless seeded stream of batches. `checkpoint=True` puts `torch.utils.checkpoint`
around each block, the peer that lowtide is measured against. Every size is a flag;
`QUICK` holds sizes that take a second a step.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpointed

Batch = dict[str, Tensor]
Flags = dict[str, int | float]


@dataclass(slots=True)
class Training:
    """A model under training: each `step()` draws a batch and updates the weights."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    make_batch: Callable[[], Batch]
    loss_of: Callable[[nn.Module, Batch], Tensor]

    def step(self) -> float:
        """Run one iteration and return its loss."""
        batch = self.make_batch()
        self.optimizer.zero_grad()
        loss = self.loss_of(self.model, batch)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def build(
    name: str,
    *,
    seed: int = 0,
    checkpoint: bool = False,
    quick: bool = False,
    **flags: int | float,
) -> Training:
    """Build a benchmark model, in full size unless `quick` or a flag says otherwise."""
    sizes = sizes_of(name, SIZES[name], QUICK[name] if quick else {}, flags)
    torch.manual_seed(seed)
    training, blocks = BUILDERS[name](sizes)
    training.model.train()
    if checkpoint:
        for block in blocks:
            # Set on the instance, so that hooks and state_dict keys stay as they are.
            forward = functools.partial(
                checkpointed, block.forward, use_reentrant=False
            )
            block.forward = forward
    return training


def sizes_of(name: str, full: Flags, smaller: Flags, flags: Flags) -> Flags:
    """Put sizes together, the flags given last."""
    unknown = sorted(set(flags) - set(full))
    if unknown:
        known = ", ".join(full)
        raise ValueError(f"{name} has no flag {unknown[0]!r}; it has {known}")
    return {**full, **smaller, **flags}


def _pictures(sizes: Flags, classes: int) -> Batch:
    labels = torch.randint(classes, (int(sizes["batch"]),))
    shift = (labels / classes - 0.5).view(-1, 1, 1, 1)
    pixels = int(sizes["pixels"])
    return {"x": torch.randn(len(labels), 3, pixels, pixels) + shift, "y": labels}


def _tokens(sizes: Flags) -> Tensor:
    vocabulary, batch = int(sizes["vocabulary"]), int(sizes["batch"])
    start = torch.randint(vocabulary, (batch, 1))
    stride = torch.randint(1, 4, (batch, 1))
    return (start + stride * torch.arange(int(sizes["length"]))) % vocabulary


def _classify(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(pixel_values=batch["x"]).logits, batch["y"])


def _resnet50(sizes: Flags) -> tuple[Training, Iterable[nn.Module]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    width = int(sizes["width"])
    config = ResNetConfig(
        embedding_size=width,
        hidden_sizes=[4 * width, 8 * width, 16 * width, 32 * width],
        num_labels=1000,
    )
    model = ResNetForImageClassification(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    training = Training(model, optimizer, lambda: _pictures(sizes, 1000), _classify)
    stages = model.resnet.encoder.stages
    return training, [block for stage in stages for block in stage.layers]


def _swin(sizes: Flags) -> tuple[Training, Iterable[nn.Module]]:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=int(sizes["pixels"]), embed_dim=int(sizes["width"]), num_labels=1000
    )
    model = SwinForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    training = Training(model, optimizer, lambda: _pictures(sizes, 1000), _classify)
    return training, [
        block for stage in model.swin.encoder.layers for block in stage.blocks
    ]


def _gpt2(sizes: Flags) -> tuple[Training, Iterable[nn.Module]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = sizes["dropout"]
    config = GPT2Config(
        n_layer=int(sizes["layers"]),
        n_embd=int(sizes["width"]),
        n_head=int(sizes["heads"]),
        vocab_size=int(sizes["vocabulary"]),
        n_positions=int(sizes["length"]),
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(input_ids=batch["x"]).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch["x"][:, 1:].flatten())

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    training = Training(model, optimizer, lambda: {"x": _tokens(sizes)}, loss_of)
    return training, model.transformer.h


def _bert(sizes: Flags) -> tuple[Training, Iterable[nn.Module]]:
    from transformers import BertConfig, BertForQuestionAnswering

    config = BertConfig(
        num_hidden_layers=int(sizes["layers"]),
        hidden_size=int(sizes["width"]),
        intermediate_size=4 * int(sizes["width"]),
        num_attention_heads=int(sizes["heads"]),
        vocab_size=int(sizes["vocabulary"]),
        max_position_embeddings=int(sizes["length"]),
        hidden_dropout_prob=sizes["dropout"],
        attention_probs_dropout_prob=sizes["dropout"],
    )
    model = BertForQuestionAnswering(config)

    def make_batch() -> Batch:
        tokens = _tokens(sizes)
        answers = torch.randint(int(sizes["length"]), (2, len(tokens)))
        return {"x": tokens, "start": answers[0], "end": answers[1]}

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        answer = model(input_ids=batch["x"])
        start = F.cross_entropy(answer.start_logits, batch["start"])
        return (start + F.cross_entropy(answer.end_logits, batch["end"])) / 2

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Training(model, optimizer, make_batch, loss_of), model.bert.encoder.layer


class DoubleConvolution(nn.Sequential):
    """Convolve, normalise and rectify, twice: one block of the U-Net."""

    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [
                nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
            ]
        super().__init__(*layers)


class UNet(nn.Module):
    """Segment pictures: down `levels` halvings of the resolution and up again.

    Its long skip connections keep early activations in use until late, which makes it
    the one model here that is not a chain of blocks.
    """

    def __init__(self, *, width: int, levels: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(
            DoubleConvolution(a, b) for a, b in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths[-2::-1]
        )
        self.join = nn.ModuleList(DoubleConvolution(2 * w, w) for w in widths[-2::-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each pixel's class."""
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


def _unet(sizes: Flags) -> tuple[Training, Iterable[nn.Module]]:
    model = UNet(width=int(sizes["width"]), levels=int(sizes["levels"]), classes=8)

    def make_batch() -> Batch:
        pictures = _pictures(sizes, 8)["x"]
        return {"x": pictures, "y": (pictures.mean(1).abs() * 4).long().clamp(max=7)}

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Training(model, optimizer, make_batch, loss_of), [*model.down, *model.join]


_TEXT: Flags = {"width": 512, "heads": 8, "vocabulary": 16384, "dropout": 0.1}

SIZES: dict[str, Flags] = {
    "resnet50": {"batch": 16, "pixels": 224, "width": 64},
    "gpt2": {"batch": 4, "length": 512, "layers": 8, **_TEXT},
    "bert": {"batch": 8, "length": 384, "layers": 6, **_TEXT},
    "swin": {"batch": 16, "pixels": 224, "width": 96},
    "unet": {"batch": 4, "pixels": 256, "levels": 4, "width": 32},
}

QUICK: dict[str, Flags] = {
    "resnet50": {"batch": 8, "pixels": 96, "width": 16},
    "gpt2": {"batch": 8, "length": 128, "layers": 4, "width": 128, "vocabulary": 1024},
    "bert": {"batch": 8, "length": 128, "layers": 3, "width": 128, "vocabulary": 1024},
    "swin": {"batch": 4, "pixels": 224, "width": 24},
    "unet": {"batch": 4, "pixels": 96, "width": 8},
}

BUILDERS: dict[str, Callable[[Flags], tuple[Training, Iterable[Any]]]] = {
    "resnet50": _resnet50,
    "gpt2": _gpt2,
    "bert": _bert,
    "swin": _swin,
    "unet": _unet,
}
