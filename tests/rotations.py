"""The rotation of the codecs as a matrix, in NumPy."""

from __future__ import annotations

from functools import cache

import numpy as np

MOST_AT_ONCE = 256  # channels that are mixed by a Hadamard matrix


def hadamard(n: int) -> np.ndarray:
    """Sylvester's, orthonormal, of a power of two."""
    made = np.ones((1, 1))
    while len(made) < n:
        made = np.kron(np.array([[1, 1], [1, -1]]), made)
    return made / np.sqrt(n)


@cache
def matrix(dim: int) -> np.ndarray:
    """(D, D): of m blocks of a power of two, a reflection of the blocks times Sylvester's matrix of each."""
    power = 1
    while power < MOST_AT_ONCE and dim % (2 * power) == 0:
        power *= 2
    blocks = dim // power
    reflection = np.eye(blocks) - 2 / blocks if blocks > 1 else np.ones((1, 1))
    return np.kron(reflection, hadamard(power))
