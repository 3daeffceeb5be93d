# SPDX-License-Identifier: Apache-2.0
"""Iterations to plan: drawn at random, and such as training leaves behind."""

import random
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from lowtide.trace import OPS, VALUES, Trace

MIB = 1 << 20


@dataclass(frozen=True)
class Link:
    """Bytes a second to the lower tier and back."""

    write: float
    read: float


CLOSED = Link(0.0, 0.0)
SLOW = Link(1.0 * MIB, 1.0 * MIB)
UNEVEN = Link(4.0 * MIB, 0.5 * MIB)
FAST = Link(1e6 * MIB, 1e6 * MIB)
LINKS = (CLOSED, SLOW, UNEVEN, FAST)


@dataclass(frozen=True)
class Value:
    """A saved value; away it frees its bytes at operators saved + 1 to use - 1."""

    bytes: int
    saved: int
    use: int  # -1: never
    seconds: float | None = None  # to compute it again; None: impossible


def trace_of(
    values: Iterable[Value], loads: Iterable[int], seconds: Iterable[float] = ()
) -> Trace:
    """Make a trace of operators (of one second each) that load memory as given."""
    values, loads = list(values), list(loads)
    times = list(seconds) or [1.0] * len(loads)
    rows = [
        (v.bytes, v.saved, v.use, v.seconds or 0.0, v.seconds is not None, 0)
        for v in values
    ]
    saved = loaded(values, [0] * len(loads))
    ops = [
        (t, load, 0, min(load, managed), 0)
        for t, load, managed in zip(times, loads, saved, strict=True)
    ]
    return Trace(np.array(ops, dtype=OPS), np.array(rows, dtype=VALUES), key=7)


def loaded(values: Iterable[Value], others: Iterable[int]) -> list[int]:
    """Add to the bytes of others what the values hold while all of them stay."""
    loads = list(others)
    for value in values:
        end = len(loads) if value.use < 0 else value.use + 1
        for op in range(value.saved, end):
            loads[op] += value.bytes
    return loads


def wild(seed: int, n_values: int) -> Trace:
    """Draw values of any size, life and cost."""
    draw = random.Random(seed)
    n_ops = n_values * 2 + draw.randrange(4)
    values = []
    for saved in sorted(draw.randrange(n_ops - 2) for _ in range(n_values)):
        use = draw.choice([-1, *[draw.randrange(saved + 1, n_ops)] * 7])
        seconds = draw.choice([None, *[draw.uniform(0.0, 2.0)] * 4])
        values.append(Value(draw.randrange(MIB // 2, 4 * MIB), saved, use, seconds))
    others = [draw.randrange(MIB) for _ in range(n_ops)]
    times = [draw.uniform(0.1, 2.0) for _ in range(n_ops)]
    return trace_of(values, loaded(values, others), times)


def trained(seed: int, n_values: int, ops_per_value: int = 3) -> Trace:
    """Draw what a network leaves: saved forward, used backward in reverse order."""
    draw = random.Random(seed)
    n_forward = n_values * ops_per_value // 3
    n_ops = n_values * ops_per_value
    times = [draw.expovariate(1.0) * 2e-3 for _ in range(n_ops)]
    values = []
    saves = sorted(draw.sample(range(n_forward), n_values))
    for saved in saves:
        back = n_forward + (n_forward - saved) * 2 - 1 - draw.randrange(2)
        heavy = draw.random() < 0.5  # a convolution or a product, else elementwise
        cost = times[saved] * (4 if heavy else 0.2)
        seconds = cost if draw.random() < 0.95 else None
        size = int(MIB * draw.choice([0.25, 1, 1, 4, 8]) * draw.uniform(0.8, 1.2))
        values.append(Value(size, saved, min(back, n_ops - 1), seconds))
    others = [32 * MIB + draw.randrange(8 * MIB) for _ in range(n_ops)]
    return trace_of(values, loaded(values, others), times)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Draw an iteration of up to seven values."""
    n_ops = draw(st.integers(6, 14))
    values = []
    for _ in range(draw(st.integers(1, 7))):
        saved = draw(st.integers(0, n_ops - 2))
        use = draw(st.integers(saved + 1, n_ops - 1) | st.just(-1))
        size = draw(st.sampled_from([1024, MIB // 4, MIB, 2 * MIB, 3 * MIB, 8 * MIB]))
        seconds = draw(st.none() | st.sampled_from([0.0, 0.01, 0.1, 1.0, 9.0]))
        values.append(Value(size, saved, use, seconds))
    others = draw(
        st.lists(
            st.integers(0, 8).map(lambda n: n * MIB // 2),
            min_size=n_ops,
            max_size=n_ops,
        )
    )
    return trace_of(values, loaded(values, others))
