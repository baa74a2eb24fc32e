"""Many hashes at once. Wrapping 64-bit arithmetic, which numpy does for unsigned integers without a warning."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of the 64-bit integers that looks random: different values never share a hash.

    Source: the finaliser of splitmix64, Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".

    Args:
        values: uint64, any shape.
    """
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
