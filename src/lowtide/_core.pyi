# Types of the compiled core (cpp/bindings.cc).
import numpy as np
from numpy.typing import NDArray

class Cancel:
    def __init__(self) -> None: ...
    def set(self) -> None: ...

def live_bytes(
    born: NDArray[np.int64],
    dead: NDArray[np.int64],
    sizes: NDArray[np.int64],
    period: int = 0,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
def independent_parts(
    born: NDArray[np.int64],
    dead: NDArray[np.int64],
    sizes: NDArray[np.int64],
    period: int = 0,
) -> NDArray[np.int32]: ...
def fit(
    born: NDArray[np.int64],
    dead: NDArray[np.int64],
    sizes: NDArray[np.int64],
    order: NDArray[np.int64],
    best: bool = False,
    period: int = 0,
) -> NDArray[np.int64]: ...
def place(
    born: NDArray[np.int64],
    dead: NDArray[np.int64],
    sizes: NDArray[np.int64],
    period: int = 0,
    enough: int = 0,
    seed: int = 0,
    nodes: int = 1 << 20,
    seconds: float | None = None,
    cancel: Cancel | None = None,
) -> tuple[NDArray[np.int64], int, int, bool]: ...

class Simulator:
    def run(
        self, plans: NDArray[np.int8], level: int
    ) -> list[tuple[int, bool, int, int, float, float, float, float]]: ...
    def frontier(
        self, levels: NDArray[np.int64], effort: int
    ) -> tuple[NDArray[np.int8], int]: ...
    def begins(self) -> NDArray[np.int32]: ...
    def ends(self) -> NDArray[np.int32]: ...
    def floor(self) -> NDArray[np.int64]: ...

def simulator(
    seconds: NDArray[np.float64],
    plain: NDArray[np.int64],
    sizes: NDArray[np.int64],
    start: NDArray[np.int32],
    stop: NDArray[np.int32],
    replay: NDArray[np.float64],
    replay_from: NDArray[np.int64],
    ways: NDArray[np.int8],
    write: float,
    read: float,
    tax: float,
    first_parent: NDArray[np.int32],
    parents: NDArray[np.int32],
    longest_chain: int,
) -> Simulator: ...
