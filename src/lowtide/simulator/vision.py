# SPDX-License-Identifier: Apache-2.0
"""The convolutional networks of the published experiments, as full graphs.

Layers, kernels, strides and widths are those of the papers that introduced them;
activations of a ReLU overwrite what it reads, as usual. Workspace is not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lowtide.simulator.networks import Tape
from lowtide.trace import Graph

FLOAT = 4
MOMENTUM = 1  # numbers that the optimizer keeps for a parameter

Pair = tuple[int, int]
VGG = {
    11: (1, 1, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}
RESNET = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}


class Pictures:
    """A batch of feature maps on a tape, and the layers that change it."""

    def __init__(self, batch: int, size: int, channels: int = 3) -> None:
        self.tape = Tape()
        self.batch = batch
        self.sizes: dict[int, tuple[int, int, int]] = {}
        self.x = self._known(
            self.tape.source(FLOAT * batch * channels * size * size), channels, size
        )

    def _known(self, x: int, channels: int, height: int, width: int = 0) -> int:
        self.sizes[x] = (channels, height, width or height)
        return x

    def shape(self, x: int) -> tuple[int, int, int]:
        """Return (channels, height, width)."""
        return self.sizes[x]

    def nbytes(self, channels: int, height: int, width: int) -> int:
        """Return the bytes of feature maps."""
        return FLOAT * self.batch * channels * height * width

    def conv(
        self,
        x: int,
        channels: int,
        kernel: int | Pair = 3,
        *,
        stride: int = 1,
        pad: bool = True,
        norm: bool = True,
        relu: bool = True,
    ) -> int:
        """Add a convolution, with a batch norm and a ReLU where wanted."""
        before, height, width = self.sizes[x]
        tall, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
        height = _after(height, tall, stride, pad)
        width = _after(width, wide, stride, pad)
        n_bytes = self.nbytes(channels, height, width)
        weights = before * channels * tall * wide
        x = self.tape.layer(
            "convolution",
            [x],
            n_bytes,
            flops=2.0 * self.batch * height * width * weights,
            weight_bytes=FLOAT * weights,
        )
        if norm:
            x = self.norm(x, (channels, height, width))
        if relu:
            x = self.tape.layer("relu", [x], n_bytes, saves="o")
        return self._known(x, channels, height, width)

    def norm(self, x: int, shape: tuple[int, int, int] | None = None) -> int:
        """Add a batch norm."""
        channels, height, width = shape or self.sizes[x]
        n_bytes = self.nbytes(channels, height, width)
        x = self.tape.layer("batch_norm", [x], n_bytes, weight_bytes=8 * channels)
        return self._known(x, channels, height, width)

    def relu(self, x: int) -> int:
        """Add a ReLU."""
        shape = self.sizes[x]
        x = self.tape.layer("relu", [x], self.nbytes(*shape), saves="o")
        return self._known(x, *shape)

    def pool(
        self,
        x: int,
        kernel: int = 2,
        stride: int = 2,
        *,
        pad: bool = False,
        name: str = "max_pool",
    ) -> int:
        """Add a pooling layer."""
        channels, height, width = self.sizes[x]
        height = _after(height, kernel, stride, pad)
        width = _after(width, kernel, stride, pad)
        x = self.tape.layer(name, [x], self.nbytes(channels, height, width))
        return self._known(x, channels, height, width)

    def flatten(self, x: int, *, mean: bool) -> int:
        """Turn feature maps into vectors, by their mean or as they are."""
        channels, height, width = self.sizes[x]
        if not mean:
            return self._known(x, channels * height * width, 1)
        x = self.tape.layer("mean", [x], self.nbytes(channels, 1, 1), saves="")
        return self._known(x, channels, 1)

    def dense(self, x: int, outputs: int, *, relu: bool = False) -> int:
        """Add a linear layer."""
        inputs = self.sizes[x][0]
        n_bytes = self.nbytes(outputs, 1, 1)
        x = self.tape.layer(
            "linear",
            [x],
            n_bytes,
            flops=2.0 * self.batch * inputs * outputs,
            weight_bytes=FLOAT * inputs * outputs,
        )
        if relu:
            x = self.tape.layer("relu", [x], n_bytes, saves="o")
        return self._known(x, outputs, 1)

    def dropout(self, x: int) -> int:
        """Add a dropout."""
        shape = self.sizes[x]
        return self._known(self.tape.dropout(x), *shape)

    def add(self, *xs: int) -> int:
        """Add feature maps up."""
        shape = self.sizes[xs[0]]
        total = self.tape.layer("add", list(xs), self.nbytes(*shape), saves="")
        return self._known(total, *shape)

    def cat(self, xs: Sequence[int]) -> int:
        """Put feature maps one behind another."""
        channels = sum(self.sizes[x][0] for x in xs)
        _, height, width = self.sizes[xs[0]]
        n_bytes = self.nbytes(channels, height, width)
        joined = self.tape.layer("cat", list(xs), n_bytes, saves="")
        return self._known(joined, channels, height, width)

    def finish(self, x: int, *, at_once: bool) -> Graph:
        """Add the loss, the backward pass and the update."""
        loss = self.tape.layer("cross_entropy", [x], FLOAT)
        return self.tape.finish(loss, states=MOMENTUM, at_once=at_once)


def _after(size: int, kernel: int, stride: int, pad: bool) -> int:
    room = 2 * ((kernel - 1) // 2) if pad else 0
    return max((size + room - kernel) // stride + 1, 1)


def make_alexnet(*, batch: int = 128, size: int = 224, at_once: bool = False) -> Graph:
    """Make AlexNet, in the form of one column."""
    net = Pictures(batch, size)
    plain = {"norm": False}
    x = net.pool(net.conv(net.x, 64, 11, stride=4, **plain), 3)
    x = net.pool(net.conv(x, 192, 5, **plain), 3)
    x = net.conv(net.conv(x, 384, **plain), 256, **plain)
    x = net.pool(net.conv(x, 256, **plain), 3)
    x = net.flatten(x, mean=False)
    for _ in range(2):
        x = net.dense(net.dropout(x), 4096, relu=True)
    return net.finish(net.dense(x, 1000), at_once=at_once)


def make_vgg(
    depth: int = 16, *, batch: int = 64, size: int = 224, at_once: bool = False
) -> Graph:
    """Make a VGG network; at CIFAR's size with batch norm and small ends."""
    net = Pictures(batch, size)
    small = size <= 32
    x = net.x
    for stage, count in enumerate(VGG[depth]):
        for _ in range(count):
            x = net.conv(x, min(64 << stage, 512), norm=small)
        x = net.pool(x)
    x = net.flatten(x, mean=False)
    width = 512 if small else 4096
    for _ in range(2):
        x = net.dropout(net.dense(x, width, relu=True))
    return net.finish(net.dense(x, 10 if small else 1000), at_once=at_once)


def make_cifar_resnet(
    *, batch: int = 100, blocks: int = 3, at_once: bool = False
) -> Graph:
    """Make the residual network for CIFAR: three stages of equal blocks."""
    net = Pictures(batch, 32)
    x = net.conv(net.x, 16)
    for stage, width in enumerate((16, 32, 64)):
        for block in range(blocks):
            stride = 2 if stage and block == 0 else 1
            x = _basic(net, x, width, stride)
    return net.finish(net.dense(net.flatten(x, mean=True), 10), at_once=at_once)


def make_imagenet_resnet(
    depth: int = 50, *, batch: int = 64, size: int = 224, at_once: bool = False
) -> Graph:
    """Make a residual network for ImageNet."""
    net = Pictures(batch, size)
    x = net.pool(net.conv(net.x, 64, 7, stride=2), 3, 2, pad=True)
    block: Callable[[Pictures, int, int, int], int] = (
        _basic if depth < 50 else _bottleneck
    )
    for stage, count in enumerate(RESNET[depth]):
        for i in range(count):
            x = block(net, x, 64 << stage, 2 if stage and i == 0 else 1)
    return net.finish(net.dense(net.flatten(x, mean=True), 1000), at_once=at_once)


def _basic(net: Pictures, x: int, width: int, stride: int) -> int:
    y = net.conv(x, width, stride=stride)
    y = net.conv(y, width, relu=False)
    return net.relu(net.add(_shortcut(net, x, width, stride), y))


def _bottleneck(net: Pictures, x: int, width: int, stride: int) -> int:
    y = net.conv(net.conv(x, width, 1), width, stride=stride)
    y = net.conv(y, 4 * width, 1, relu=False)
    return net.relu(net.add(_shortcut(net, x, 4 * width, stride), y))


def _shortcut(net: Pictures, x: int, width: int, stride: int) -> int:
    if net.shape(x)[0] == width and stride == 1:
        return x
    return net.conv(x, width, 1, stride=stride, relu=False)


def make_densenet(*, batch: int = 64, size: int = 224, at_once: bool = False) -> Graph:
    """Make DenseNet-121, which puts together all that a block has made."""
    net = Pictures(batch, size)
    x = net.pool(net.conv(net.x, 64, 7, stride=2), 3, 2, pad=True)
    for stage, layers in enumerate((6, 12, 24, 16)):
        if stage:
            x = net.conv(net.relu(net.norm(x)), net.shape(x)[0] // 2, 1, norm=False,
                         relu=False)  # fmt: skip
            x = net.pool(x, name="avg_pool")
        parts = [x]
        for _ in range(layers):
            y = net.relu(net.norm(net.cat(parts) if len(parts) > 1 else parts[0]))
            y = net.conv(y, 128, 1)
            parts.append(net.conv(y, 32, norm=False, relu=False))
        x = net.cat(parts)
    x = net.flatten(net.relu(net.norm(x)), mean=True)
    return net.finish(net.dense(x, 1000), at_once=at_once)


def make_inception(*, batch: int = 32, size: int = 299, at_once: bool = False) -> Graph:
    """Make Inception-v4."""
    net = Pictures(batch, size)
    x = _stem(net)
    for _ in range(4):
        x = _inception_a(net, x)
    x = _reduce(net, x, 384, ((192, 1), (224, 3), (256, 3)))
    for _ in range(7):
        x = _inception_b(net, x)
    x = _reduce_b(net, x)
    for _ in range(3):
        x = _inception_c(net, x)
    x = net.dropout(net.flatten(x, mean=True))
    return net.finish(net.dense(x, 1000), at_once=at_once)


def _stem(net: Pictures) -> int:
    x = net.conv(net.x, 32, 3, stride=2, pad=False)
    x = net.conv(net.conv(x, 32, 3, pad=False), 64, 3)
    x = net.cat([net.pool(x, 3), net.conv(x, 96, 3, stride=2, pad=False)])
    a = net.conv(net.conv(x, 64, 1), 96, 3, pad=False)
    b = net.conv(net.conv(net.conv(x, 64, 1), 64, (7, 1)), 64, (1, 7))
    x = net.cat([a, net.conv(b, 96, 3, pad=False)])
    return net.cat([net.conv(x, 192, 3, stride=2, pad=False), net.pool(x, 3)])


def _average(net: Pictures, x: int, width: int) -> int:
    return net.conv(net.pool(x, 3, 1, pad=True, name="avg_pool"), width, 1)


def _inception_a(net: Pictures, x: int) -> int:
    c = net.conv(net.conv(x, 64, 1), 96)
    d = net.conv(net.conv(net.conv(x, 64, 1), 96), 96)
    return net.cat([_average(net, x, 96), net.conv(x, 96, 1), c, d])


def _reduce(net: Pictures, x: int, width: int, chain: Sequence[Pair]) -> int:
    y = x
    for channels, kernel in chain[:-1]:
        y = net.conv(y, channels, kernel)
    last = net.conv(y, chain[-1][0], 3, stride=2, pad=False)
    straight = net.conv(x, width, 3, stride=2, pad=False)
    return net.cat([net.pool(x, 3), straight, last])


def _inception_b(net: Pictures, x: int) -> int:
    c = net.conv(net.conv(net.conv(x, 192, 1), 224, (1, 7)), 256, (7, 1))
    d = net.conv(net.conv(net.conv(x, 192, 1), 192, (1, 7)), 224, (7, 1))
    d = net.conv(net.conv(d, 224, (1, 7)), 256, (7, 1))
    return net.cat([_average(net, x, 128), net.conv(x, 384, 1), c, d])


def _reduce_b(net: Pictures, x: int) -> int:
    a = net.conv(net.conv(x, 192, 1), 192, 3, stride=2, pad=False)
    b = net.conv(net.conv(net.conv(x, 256, 1), 256, (1, 7)), 320, (7, 1))
    return net.cat([net.pool(x, 3), a, net.conv(b, 320, 3, stride=2, pad=False)])


def _inception_c(net: Pictures, x: int) -> int:
    c = net.conv(x, 384, 1)
    d = net.conv(net.conv(net.conv(x, 384, 1), 448, (1, 3)), 512, (3, 1))
    ends = [net.conv(c, 256, (1, 3)), net.conv(c, 256, (3, 1))]
    ends += [net.conv(d, 256, (3, 1)), net.conv(d, 256, (1, 3))]
    return net.cat([_average(net, x, 256), net.conv(x, 256, 1), *ends])
