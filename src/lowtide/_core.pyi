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
