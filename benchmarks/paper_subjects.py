"""What `benchmarks/paper.py` computes with: networks, and what was published."""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lowtide.simulator import attention, networks, vision
from lowtide.trace import Graph

Make = Callable[[int], Graph]

DATA = Path(
    os.environ.get(
        "LOWTIDE_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"
    )
)

CIFAR: dict[str, Make] = {
    "alexnet-cifar": lambda b: vision.make_alexnet(batch=b, size=64),
    "vgg16-cifar": lambda b: vision.make_vgg(16, batch=b, size=32),
    "resnet-cifar": lambda b: vision.make_cifar_resnet(batch=b),
}
IMAGENET: dict[str, Callable[..., Graph]] = {
    "vgg11": partial(vision.make_vgg, 11),
    "vgg16": partial(vision.make_vgg, 16),
    "vgg19": partial(vision.make_vgg, 19),
    "alexnet": vision.make_alexnet,
    **{
        f"resnet{depth}": partial(vision.make_imagenet_resnet, depth)
        for depth in vision.RESNET
    },
    "densenet121": vision.make_densenet,
    "inception-v4": vision.make_inception,
}
LARGE: dict[str, Make] = {
    "resnet50": lambda b: vision.make_imagenet_resnet(50, batch=b),
    "resnet101": lambda b: vision.make_imagenet_resnet(101, batch=b),
    "bert-large": lambda b: attention.make_bert(batch=b),
    "swin-t": lambda b: attention.make_swin(batch=b),
    "unet": lambda b: networks.make_unet(batch=b, width=64),
    "gpt2-large": lambda b: attention.make_gpt2(batch=b),
    "gpt2-xl": lambda b: attention.make_gpt2(48, 1600, 25, batch=b),
}
PUBLISHED_BATCH = {"resnet50": 2.04, "resnet101": 2.25, "gpt2-large": 5.5, "gpt2-xl": 6}
PUBLISHED_SAVED = "0.40-0.72"  # of all models together
AUTHOR_RATIO = {"alexnet": 1.001, "vgg": 1.051, "resnet-cifar": 1.00482}
AUTHOR_ZERO = "0.305; up to 0.342"  # VGG by the author's figure; the abstract

# The networks of DTR's logs that are made up here, with their batches, and h_DTR_eq in
# its authors' simulator at these parts of the peak.
PARTS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
DTR: dict[str, tuple[Callable[[], Graph], str]] = {
    "densenet121": (
        lambda: vision.make_densenet(batch=84),
        "1.03 1.06 1.10 1.14 1.18 1.29 1.43",
    ),
    "inception-v4": (
        lambda: vision.make_inception(batch=64),
        "1.01 1.02 1.04 1.07 1.09 1.14 1.24",
    ),
    "resnet32-cifar": (
        lambda: vision.make_cifar_resnet(batch=56, blocks=5),
        "1.01 1.02 1.05 1.07 1.11 1.14 1.18",
    ),
    "transformer": (
        lambda: networks.make_transformer(batch=10, length=512),
        "1.01 1.02 1.03 1.04 1.06 1.09 1.12",
    ),
    "unet": (
        lambda: networks.make_unet(batch=6, width=64),
        "1.03 1.06 1.08 1.15 1.16 O O",
    ),
}
