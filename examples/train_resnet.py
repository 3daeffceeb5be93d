"""Train ResNet-50 on synthetic pictures and print the loss of every step.

A plain PyTorch script: nothing in it knows of memory budgets. Run it as it is, or as
`lowtide run --budget 800MiB examples/train_resnet.py`: the losses, printed to the last
bit in hexadecimal, are the same.
"""

import argparse
import time

import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=224, help="pixels a side")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train on random pictures whose classes shift their mean, so there is a signal."""
    args = arguments()
    torch.manual_seed(args.seed)
    config = ResNetConfig(
        depths=[3, 4, 6, 3],
        hidden_sizes=[256, 512, 1024, 2048],
        layer_type="bottleneck",
        num_labels=args.classes,
    )
    model = ResNetForImageClassification(config).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    loss_function = nn.CrossEntropyLoss()
    for step in range(args.steps):
        started = time.perf_counter()
        labels = torch.randint(args.classes, (args.batch,))
        shift = (labels / args.classes - 0.5).view(-1, 1, 1, 1)
        pictures = torch.randn(args.batch, 3, args.size, args.size) + shift
        optimizer.zero_grad()
        loss = loss_function(model(pixel_values=pictures).logits, labels)
        loss.backward()
        optimizer.step()
        value = loss.item()
        seconds = time.perf_counter() - started
        print(
            f"step {step:3d}  loss {value:.9f}  {value.hex()}  {seconds:6.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
