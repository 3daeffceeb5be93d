"""Random placement problems, and judges that know their least height."""

from itertools import permutations

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from lowtide.planner.pool import BLOCK


def blocks_of(*rows: tuple[int, int, int]) -> NDArray[np.void]:
    """Make blocks from (born, dead, bytes)."""
    return np.array(list(rows), BLOCK)


@st.composite
def problems(
    draw: st.DrawFn, *, most: int = 24, events: int = 30, rounds: int = 4
) -> tuple[NDArray[np.void], int]:
    """Draw blocks and their period: 0, or so long that no life is `rounds` long."""
    period = draw(st.integers(3, events)) if rounds and draw(st.booleans()) else 0
    longest = draw(st.sampled_from([3, rounds * period or events]))
    sizes = draw(st.sampled_from([4, 40, 10**12]))
    row = st.tuples(
        st.integers(0, (period or events) - 1),
        st.integers(1, longest),
        st.integers(1, sizes),
    )
    rows = draw(st.lists(row, min_size=1, max_size=most))
    return blocks_of(*((b, b + length, s) for b, length, s in rows)), period


def tiles(n: int, *, seed: int) -> NDArray[np.void]:
    """Cut a rectangle of 100 events and 1000 bytes into `n` blocks: hard to undo."""
    random = np.random.default_rng(seed)
    rectangles = [(0, 100, 0, 1000)]
    while len(rectangles) < n:
        at = random.integers(len(rectangles))
        born, dead, low, high = rectangles[at]
        if random.random() < 0.5 and dead - born > 1:
            cut = int(random.integers(born + 1, dead))
            rectangles[at : at + 1] = [(born, cut, low, high), (cut, dead, low, high)]
        elif high - low > 1:
            cut = int(random.integers(low + 1, high))
            rectangles[at : at + 1] = [(born, dead, low, cut), (born, dead, cut, high)]
    return blocks_of(*((b, d, high - low) for b, d, low, high in rectangles))


def unrolled(blocks: NDArray[np.void], period: int) -> tuple[NDArray[np.void], int]:
    """Write out the lives on a circle of iterations, and its length; 0 for a line."""
    if period == 0:
        return blocks, 0
    slots = -(-int((blocks["dead"] - blocks["born"]).max()) // period)
    rounds = [blocks.copy() for _ in range(slots)]
    for k, copies in enumerate(rounds):
        copies["born"] += k * period
        copies["dead"] += k * period
    return np.concatenate(rounds), slots * period


def conflicts(blocks: NDArray[np.void], circle: int) -> list[tuple[int, int]]:
    """List the pairs that are alive at once."""
    lives = [(int(b["born"]), int(b["dead"])) for b in blocks]
    return [
        (i, j)
        for i, (born, dead) in enumerate(lives)
        for j in range(i)
        if any(
            max(born, lives[j][0] + turn) < min(dead, lives[j][1] + turn)
            for turn in (-circle, 0, circle)
        )
    ]


def least_height_of_all_orders(blocks: NDArray[np.void], circle: int) -> int:
    """Try first fit in every order; one of them is no higher than any placement.

    (Take the blocks of a lowest placement in order of their offsets: first fit puts
    none of them higher.)
    """
    sizes = [int(size) for size in blocks["bytes"]]
    near: list[set[int]] = [set() for _ in sizes]
    for i, j in conflicts(blocks, circle):
        near[i].add(j)
        near[j].add(i)
    best = sum(sizes)
    for order in permutations(range(len(sizes))):
        offsets: dict[int, int] = {}
        for i in order:
            offset = 0
            for low, j in sorted((offsets[j], j) for j in near[i] if j in offsets):
                if low - offset >= sizes[i]:
                    break
                offset = max(offset, low + sizes[j])
            offsets[i] = offset
            if offset + sizes[i] >= best:
                break
        else:
            best = max(offsets[i] + sizes[i] for i in order)
    return best


def least_height_by_cp_sat(
    blocks: NDArray[np.void], circle: int, *, effort: float
) -> int | None:
    """Ask OR-tools for the least height; None when it does not prove one.

    The effort is about seconds of a quick machine, but counted, not timed.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    sizes = [int(size) for size in blocks["bytes"]]
    most = sum(sizes)
    height = model.new_int_var(0, most, "height")
    offsets = [model.new_int_var(0, most - size, "") for size in sizes]
    for offset, size in zip(offsets, sizes, strict=True):
        model.add(offset + size <= height)
    for i, j in conflicts(blocks, circle):
        below = model.new_bool_var("")
        model.add(offsets[i] + sizes[i] <= offsets[j]).only_enforce_if(below)
        model.add(offsets[j] + sizes[j] <= offsets[i]).only_enforce_if(~below)
    model.minimize(height)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort
    if solver.solve(model) != cp_model.OPTIMAL:
        return None
    return round(solver.objective_value)
