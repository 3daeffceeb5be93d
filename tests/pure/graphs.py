# SPDX-License-Identifier: Apache-2.0
"""Iterations made up for the simulator's tests, by hand and at random."""

from hypothesis import strategies as st

from lowtide.simulator.networks import Roofline, Tape
from lowtide.trace import Graph

SIZE = 16 << 10  # bytes: some values are too small for a planned move, most are not
SECOND_EACH = Roofline(flops=1e30, bandwidth=1e30, launch=1.0)


def chain_of(sizes: list[int], *, saves: str = "i") -> Graph:
    """Make a chain whose operators take a second each, the backward ones too."""
    tape = Tape(device=SECOND_EACH)
    x = tape.source(1)
    for nbytes in sizes:
        x = tape.layer("step", [x], nbytes, saves=saves)
    return tape.finish(tape.layer("loss", [x], 4, saves=saves))


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Draw networks with branches, joins, parameters and operators that save little."""
    tape = Tape(device=Roofline(flops=1.0, bandwidth=1e30, launch=0.0))
    known = [tape.source(draw(st.integers(1, 64)) * SIZE)]
    for _ in range(draw(st.integers(1, 14))):
        count = draw(st.integers(1, 2))
        picks = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
        inputs = list(dict.fromkeys(known[-1 - i % len(known)] for i in picks))
        known.append(
            tape.layer(
                "step",
                inputs,
                draw(st.integers(1, 64)) * SIZE,
                flops=draw(st.integers(0, 8)),
                weight_bytes=draw(st.sampled_from([0, 0, 16])) * SIZE,
                saves=draw(st.sampled_from(["i", "o", "io", ""])),
            )
        )
    return tape.finish(tape.layer("loss", known[-3:], 4))
