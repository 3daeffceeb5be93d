"""Made-up iterations of common networks, as full graphs, without torch.

Forward operators are written down with their cost; the backward pass, accumulated
gradients and lifetimes follow from them as autograd would have them. Seconds come from
a roofline of a GPU of DTR's time (`DEVICE`), so that the slow-downs are of the kind
that its authors report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from lowtide.trace import ACCESSES, OPERATORS, SAVES, VERSIONS, Graph


@dataclass(frozen=True, slots=True)
class Roofline:
    """A device: what an operator takes, by what it computes and moves."""

    flops: float = 10e12  # per second
    bandwidth: float = 500e9  # bytes per second
    launch: float = 5e-6  # seconds per operator

    def seconds(self, flops: float, nbytes: float) -> float:
        """Return the seconds of one operator."""
        return self.launch + max(flops / self.flops, nbytes / self.bandwidth)


DEVICE = Roofline()


def on_device(graph: Graph, device: Roofline = DEVICE) -> Graph:
    """Give a recorded iteration the seconds that its operators would take elsewhere."""
    moved = np.zeros(len(graph.operators))
    for table in (graph.reads, graph.writes):
        nbytes = graph.versions["bytes"][table["version"]]
        np.add.at(moved, table["operator"], nbytes)
    operators = graph.operators.copy()
    busy = np.maximum(operators["flops"] / device.flops, moved / device.bandwidth)
    operators["seconds"] = device.launch + busy
    return replace(graph, operators=operators)


@dataclass(slots=True)
class _Forward:
    """One forward operator, as far as its backward needs to know it."""

    name: str
    inputs: list[int]
    output: int
    saved: list[int]
    seconds_back: float
    weight: int  # its parameters, -1: none
    flops: float


@dataclass(slots=True)
class Tape:
    """Writes an iteration down, operator by operator."""

    device: Roofline = DEVICE
    names: list[str] = field(default_factory=list)
    operators: list[tuple[int, float, float, int, bool, bool]] = field(
        default_factory=list
    )
    sizes: list[int] = field(default_factory=list)
    makers: list[int] = field(default_factory=list)
    reuses: list[int] = field(default_factory=list)
    lasting: set[int] = field(default_factory=set)
    reads: list[tuple[int, int]] = field(default_factory=list)
    writes: list[tuple[int, int]] = field(default_factory=list)
    outliving: set[int] = field(default_factory=set)
    saved_at: dict[int, int] = field(default_factory=dict)
    uses: list[tuple[int, int]] = field(default_factory=list)  # version, operator
    forward: list[_Forward] = field(default_factory=list)
    weight_gradients: list[tuple[int, int]] = field(default_factory=list)

    def source(self, nbytes: int) -> int:
        """Add something that is there before and after: parameters, a batch."""
        self.lasting.add(len(self.sizes))
        return self._version(nbytes, -1)

    def _version(self, nbytes: int, maker: int, reuses: int = -1) -> int:
        self.sizes.append(int(nbytes))
        self.makers.append(maker)
        self.reuses.append(reuses)
        return len(self.sizes) - 1

    def run(
        self,
        name: str,
        seconds: float,
        inputs: list[int],
        nbytes: int,
        *,
        flops: float = 0.0,
        workspace: int = 0,
        reuses: int = -1,
    ) -> int:
        """Add an operator with one output; returns the output."""
        position = len(self.operators)
        if name not in self.names:
            self.names.append(name)
        need = workspace + (nbytes if reuses < 0 else 0)
        seeded = name == "bernoulli"
        self.operators.append(
            (self.names.index(name), seconds, flops, need, seeded, True)
        )
        self.reads += [(position, i) for i in dict.fromkeys(inputs)]
        output = self._version(nbytes, position, reuses)
        self.writes.append((position, output))
        return output

    def layer(
        self,
        name: str,
        inputs: list[int],
        nbytes: int,
        *,
        flops: float = 0.0,
        weight_bytes: int = 0,
        saves: str = "i",
        mask: int = -1,
    ) -> int:
        """Add a differentiable operator; `saves` its inputs ("i"), output ("o"), both.

        With parameters its backward does twice its work, else as much. A `mask` is read
        and saved, and has no gradient.
        """
        weight = self.source(weight_bytes) if weight_bytes else -1
        moved = nbytes + weight_bytes + sum(self.sizes[i] for i in inputs)
        seconds = self.device.seconds(flops, moved)
        reads = inputs + [i for i in (weight, mask) if i >= 0]
        output = self.run(name, seconds, reads, nbytes, flops=flops)
        saved = [i for i in inputs if "i" in saves and i not in self.lasting]
        saved += [output] if "o" in saves else []
        saved += [mask] if mask >= 0 else []
        for i in saved:
            self.saved_at.setdefault(i, len(self.operators) - 1)
        twice = 2 if weight >= 0 else 1
        self.forward.append(
            _Forward(name, inputs, output, saved, twice * seconds, weight, flops)
        )
        return output

    def dropout(self, x: int) -> int:
        """Draw a mask of a byte for every four, and apply it."""
        nbytes = self.sizes[x]
        seconds = self.device.seconds(0.0, nbytes // 4)
        mask = self.run("bernoulli", seconds, [], nbytes // 4)
        return self.layer("dropout", [x], nbytes, saves="", mask=mask)

    def finish(self, loss: int, *, states: int = -1, at_once: bool = False) -> Graph:
        """Add the backward pass from a loss, and return the graph.

        Arguments:
            loss: what the backward pass begins with.
            states: numbers that an optimizer keeps for a parameter; -1: it has none.
            at_once: each parameter is updated when its gradient is there, which is
                given back then; otherwise all are, at the end.
        """
        gradients = {loss: self.run("ones_like", self.device.launch, [], 4)}
        for layer in reversed(self.forward):
            gradient = gradients.pop(layer.output, None)
            if gradient is None:
                continue
            self._back(layer, gradient, gradients)
            if states >= 0 and at_once:
                self._update(states)
                self.outliving.clear()
                self.weight_gradients.clear()
        if states >= 0:
            self._update(states)
        return self._graph()

    def _update(self, states: int) -> None:
        """Add an update in place of the parameters that have gradients."""
        for weight, gradient in self.weight_gradients:
            nbytes = self.sizes[weight]
            kept = [self.source(nbytes) for _ in range(states)]
            seconds = self.device.seconds(0.0, nbytes * (3 + 2 * states))
            self.run("update_", seconds, [weight, gradient, *kept], 0)

    def _back(self, layer: _Forward, gradient: int, gradients: dict[int, int]) -> None:
        wanted = [i for i in layer.inputs if i not in self.lasting]
        seconds = layer.seconds_back / (len(wanted) + (layer.weight >= 0) or 1)
        reads = [gradient, *layer.saved]
        reads += [layer.weight] if layer.weight >= 0 else []
        for i in wanted:
            new = self._backward_run(layer, seconds, reads, self.sizes[i])
            old = gradients.get(i)
            if old is None:
                gradients[i] = new
            else:
                moved = 3 * self.sizes[i] / self.device.bandwidth
                gradients[i] = self.run(
                    "add_",
                    self.device.launch + moved,
                    [old, new],
                    self.sizes[i],
                    reuses=old,
                )
        if layer.weight >= 0:
            nbytes = self.sizes[layer.weight]
            gradient = self._backward_run(layer, seconds, reads, nbytes)
            self.outliving.add(gradient)
            self.weight_gradients.append((layer.weight, gradient))

    def _backward_run(
        self, layer: _Forward, seconds: float, reads: list[int], nbytes: int
    ) -> int:
        name = f"{layer.name}_backward"
        output = self.run(name, seconds, reads, nbytes, flops=layer.flops)
        self.uses += [(i, len(self.operators) - 1) for i in layer.saved]
        return output

    def _graph(self) -> Graph:
        n = len(self.operators)
        first_use: dict[int, int] = {}
        for version, operator in self.uses:
            first_use.setdefault(version, operator)
        last = list(self.makers)
        last_forward = list(self.makers)
        for operator, version in self.reads:
            last[version] = max(last[version], operator)
            if operator < first_use.get(version, n):
                last_forward[version] = max(last_forward[version], operator)
        versions = np.zeros(len(self.sizes), dtype=VERSIONS)
        for i in range(len(self.sizes)):
            stays = i in self.lasting or i in self.outliving
            saved = i in self.saved_at
            versions[i] = (
                self.sizes[i],
                self.makers[i],
                n + 1 if stays else last[i] + 1,
                last_forward[i] + 1 if saved else -1,
                first_use.get(i, -1),
                self.reuses[i],
                i in self.lasting,
            )
        saves = [(v, self.saved_at[v], operator) for v, operator in self.uses]
        return Graph(
            names=tuple(self.names),
            operators=np.array(self.operators, dtype=OPERATORS),
            versions=versions,
            reads=np.array(self.reads, dtype=ACCESSES),
            writes=np.array(self.writes, dtype=ACCESSES),
            saves=np.array(saves, dtype=SAVES),
        )


def _convolution(
    tape: Tape, x: int, channels: tuple[int, int], pixels: int, batch: int, kernel: int
) -> int:
    """Add a convolution, a batch norm and a ReLU; returns the last one's output."""
    inputs, outputs = channels
    nbytes = 4 * batch * outputs * pixels
    flops = 2.0 * batch * pixels * inputs * outputs * kernel**2
    weight = 4 * inputs * outputs * kernel**2
    x = tape.layer("convolution", [x], nbytes, flops=flops, weight_bytes=weight)
    x = tape.layer("batch_norm", [x], nbytes, weight_bytes=8 * outputs)
    return tape.layer("relu", [x], nbytes, saves="o")


def make_chain(length: int = 64, *, mib: int = 8) -> Graph:
    """Make a chain of equal layers, each of which saves its input."""
    tape = Tape()
    nbytes = mib << 20
    x = tape.source(nbytes)
    for _ in range(length):
        x = tape.layer("linear", [x], nbytes, flops=2e9, weight_bytes=nbytes // 64)
    return tape.finish(tape.layer("sum", [x], 4))


def make_resnet(blocks: int = 16, *, batch: int = 32, width: int = 64) -> Graph:
    """Make a residual network of bottleneck blocks in four stages."""
    tape = Tape()
    pixels, channels = 56 * 56, width
    x = tape.source(4 * batch * 3 * 4 * pixels)
    x = _convolution(tape, x, (3, channels), pixels, batch, 7)
    for block in range(blocks):
        stage = 4 * block // blocks
        narrow = width << stage
        here = pixels >> (2 * stage)
        y = _convolution(tape, x, (channels, narrow), here, batch, 1)
        y = _convolution(tape, y, (narrow, narrow), here, batch, 3)
        y = _convolution(tape, y, (narrow, 4 * narrow), here, batch, 1)
        if channels != 4 * narrow:
            x = _convolution(tape, x, (channels, 4 * narrow), here, batch, 1)
        channels = 4 * narrow
        total = tape.layer("add", [x, y], 4 * batch * channels * here, saves="")
        x = tape.layer("relu", [total], 4 * batch * channels * here, saves="o")
    x = tape.layer("mean", [x], 4 * batch * channels, saves="")
    return tape.finish(tape.layer("cross_entropy", [x], 4))


def make_unet(levels: int = 4, *, batch: int = 4, width: int = 32) -> Graph:
    """Make a U-Net, whose skip connections are wanted early and late."""
    tape = Tape()
    pixels = 512 * 512
    x = tape.source(4 * batch * 3 * pixels)
    channels, skips = 3, []
    for level in range(levels + 1):
        outputs = width << level
        if level:
            pixels //= 4
            x = tape.layer("max_pool", [x], 4 * batch * channels * pixels)
        x = _convolution(tape, x, (channels, outputs), pixels, batch, 3)
        x = _convolution(tape, x, (outputs, outputs), pixels, batch, 3)
        channels = outputs
        skips.append(x)
    skips.pop()
    while skips:
        pixels *= 4
        nbytes = 4 * batch * channels // 2 * pixels
        flops = 2.0 * batch * pixels * channels * channels // 2
        weight = 8 * channels * channels
        x = tape.layer("up", [x], nbytes, flops=flops, weight_bytes=weight)
        x = tape.layer("cat", [skips.pop(), x], 2 * nbytes, saves="")
        x = _convolution(tape, x, (channels, channels // 2), pixels, batch, 3)
        channels //= 2
        x = _convolution(tape, x, (channels, channels), pixels, batch, 3)
    return tape.finish(tape.layer("cross_entropy", [x], 4))


def make_transformer(
    layers: int = 12, *, batch: int = 8, length: int = 512, width: int = 768
) -> Graph:
    """Make a transformer without fused attention: scores and dropout are saved."""
    tape = Tape()
    rows = batch * length
    plain = 4 * rows * width
    scores = 4 * rows * length * (width // 64)

    def dense(x: int, inputs: int, outputs: int) -> int:
        flops = 2.0 * rows * inputs * outputs
        weight = 4 * inputs * outputs
        nbytes = 4 * rows * outputs
        return tape.layer("linear", [x], nbytes, flops=flops, weight_bytes=weight)

    x = tape.layer("embedding", [tape.source(8 * rows)], plain, saves="")
    for _ in range(layers):
        y = tape.layer("layer_norm", [x], plain, weight_bytes=8 * width)
        q, k, v = (dense(y, width, width) for _ in range(3))
        work = 2.0 * rows * length * width
        y = tape.layer("bmm", [q, k], scores, flops=work)
        y = tape.layer("softmax", [y], scores, saves="o")
        y = tape.layer("bmm", [tape.dropout(y), v], plain, flops=work)
        y = tape.dropout(dense(y, width, width))
        x = tape.layer("add", [x, y], plain, saves="")
        y = tape.layer("layer_norm", [x], plain, weight_bytes=8 * width)
        y = tape.layer("gelu", [dense(y, width, 4 * width)], 4 * plain)
        y = tape.dropout(dense(y, 4 * width, width))
        x = tape.layer("add", [x, y], plain, saves="")
    return tape.finish(tape.layer("cross_entropy", [x], 4))


NETWORKS: dict[str, Callable[[], Graph]] = {
    "chain": make_chain,
    "resnet": make_resnet,
    "unet": make_unet,
    "transformer": make_transformer,
}
