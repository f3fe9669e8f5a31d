"""Power-of-two bins, for accuracy sliced by a distance, a length or a count."""

import numpy as np


def labels(top: int) -> tuple[str, ...]:
    """Names of the bins that hold 1..top: "1", "2-3", "4-7", ..."""
    lows = [2**b for b in range(top.bit_length())]
    return tuple(str(low) if low == 1 else f"{low}-{2 * low - 1}" for low in lows)


def number(x: np.ndarray) -> np.ndarray:
    """Bin numbers floor(log2 x), int32, of whole numbers x >= 1; exact, as frexp reads the exponent."""
    return np.frexp(x)[1] - 1
