# SPDX-License-Identifier: Apache-2.0
"""The transformers of the published experiments, as full graphs.

Attention as it was then: its scores, their softmax and its dropout are operators of
their own, and saved. The vocabulary's matrix is counted twice, tied or not.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.simulator.networks import Tape
from lowtide.trace import Graph

FLOAT = 4


@dataclass(slots=True)
class _Rows:
    """Vectors on a tape: `rows` of `width` numbers, in sequences of `length`."""

    tape: Tape
    rows: int
    length: int
    width: int
    heads: int

    @property
    def nbytes(self) -> int:
        return FLOAT * self.rows * self.width

    def dense(self, x: int, inputs: int, outputs: int) -> int:
        return self.tape.layer(
            "linear",
            [x],
            FLOAT * self.rows * outputs,
            flops=2.0 * self.rows * inputs * outputs,
            weight_bytes=FLOAT * inputs * outputs,
        )

    def norm(self, x: int) -> int:
        return self.tape.layer(
            "layer_norm", [x], self.nbytes, weight_bytes=8 * self.width
        )

    def attend(self, x: int, *, dropout: bool) -> int:
        """Add attention, with its projections."""
        width, tape = self.width, self.tape
        scores = FLOAT * self.rows * self.length * self.heads
        work = 2.0 * self.rows * self.length * width
        q, k, v = (self.dense(x, width, width) for _ in range(3))
        y = tape.layer("bmm", [q, k], scores, flops=work)
        y = tape.layer("softmax", [y], scores, saves="o")
        y = tape.dropout(y) if dropout else y
        y = tape.layer("bmm", [y, v], self.nbytes, flops=work)
        y = self.dense(y, width, width)
        return tape.dropout(y) if dropout else y

    def feed(self, x: int, *, dropout: bool, factor: int = 4) -> int:
        """Add the two layers of a feed-forward part."""
        wide = factor * self.width
        y = self.dense(x, self.width, wide)
        y = self.tape.layer("gelu", [y], factor * self.nbytes)
        y = self.dense(y, wide, self.width)
        return self.tape.dropout(y) if dropout else y

    def add(self, x: int, y: int) -> int:
        return self.tape.layer("add", [x, y], self.nbytes, saves="")


def _embedded(rows: _Rows, vocabulary: int) -> int:
    words = rows.tape.source(8 * rows.rows)
    x = rows.tape.layer(
        "embedding",
        [words],
        rows.nbytes,
        weight_bytes=FLOAT * vocabulary * rows.width,
        saves="",
    )
    return rows.tape.dropout(x)


def make_gpt2(
    layers: int = 36,
    width: int = 1280,
    heads: int = 20,
    *,
    batch: int = 1,
    length: int = 512,
    vocabulary: int = 50257,
    states: int = 0,
) -> Graph:
    """Make a GPT-2, by default the large one, trained by SGD without momentum."""
    rows = _Rows(Tape(), batch * length, length, width, heads)
    x = _embedded(rows, vocabulary)
    for _ in range(layers):
        x = rows.add(x, rows.attend(rows.norm(x), dropout=True))
        x = rows.add(x, rows.feed(rows.norm(x), dropout=True))
    logits = rows.dense(rows.norm(x), width, vocabulary)
    return _finish(rows, logits, vocabulary, states)


def make_bert(
    layers: int = 24,
    width: int = 1024,
    heads: int = 16,
    *,
    batch: int = 4,
    length: int = 384,
    states: int = 2,
) -> Graph:
    """Make a BERT, by default the large one, answering questions; trained by Adam."""
    rows = _Rows(Tape(), batch * length, length, width, heads)
    x = _embedded(rows, 30522)
    for _ in range(layers):
        x = rows.norm(rows.add(x, rows.attend(x, dropout=True)))
        x = rows.norm(rows.add(x, rows.feed(x, dropout=True)))
    return _finish(rows, rows.dense(x, width, 2), 2, states)


def _finish(rows: _Rows, logits: int, outputs: int, states: int) -> Graph:
    n_bytes = FLOAT * rows.rows * outputs
    x = rows.tape.layer("log_softmax", [logits], n_bytes, saves="o")
    return rows.tape.finish(rows.tape.layer("nll_loss", [x], FLOAT), states=states)


def make_swin(*, batch: int = 16, states: int = 2) -> Graph:
    """Make Swin-T for pictures of 224 pixels: attention in windows of 7 by 7."""
    tape = Tape()
    side, width = 56, 96
    picture = tape.source(FLOAT * batch * 3 * 224 * 224)
    x = tape.layer(
        "convolution",
        [picture],
        FLOAT * batch * side * side * width,
        flops=2.0 * batch * side * side * width * 3 * 16,
        weight_bytes=FLOAT * width * 3 * 16,
    )
    for stage, depth in enumerate((2, 2, 6, 2)):
        if stage:
            merging = _Rows(tape, batch * side * side // 4, 49, 4 * width, 1)
            side, width = side // 2, 2 * width
            y = tape.layer("cat", [x], merging.nbytes, saves="")
            x = merging.dense(merging.norm(y), 2 * width, width)
        rows = _Rows(tape, batch * side * side, 49, width, 3 << stage)
        for block in range(depth):
            y = rows.norm(x)
            if block % 2:
                y = tape.layer("roll", [y], rows.nbytes, saves="")
            y = tape.layer("clone", [y], rows.nbytes, saves="")  # into windows
            y = rows.attend(y, dropout=False)
            y = tape.layer("clone", [y], rows.nbytes, saves="")
            x = rows.add(x, y)
            x = rows.add(x, rows.feed(rows.norm(x), dropout=False))
    last = _Rows(tape, batch, 1, width, 1)
    x = tape.layer("mean", [x], last.nbytes, saves="")
    return _finish(last, last.dense(x, width, 1000), 1000, states)
