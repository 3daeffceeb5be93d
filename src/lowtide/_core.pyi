# Types of the compiled core (cpp/bindings.cc).
import numpy as np
from numpy.typing import NDArray

def live_bytes(
    born: NDArray[np.int64],
    dead: NDArray[np.int64],
    bytes: NDArray[np.int64],
    period: int = 0,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
def independent_parts(
    born: NDArray[np.int64],
    dead: NDArray[np.int64],
    bytes: NDArray[np.int64],
    period: int = 0,
) -> NDArray[np.int32]: ...
