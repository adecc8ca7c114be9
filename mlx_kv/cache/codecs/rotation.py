"""An orthogonal matrix that spreads what is large in one channel over many, for head dims that 16 divides.

A Hadamard matrix of 2^k channels where the head dim is such a power (QuaRot, Ashkboos et al. 2024), 256 at most. Where
it is m times that, the Kronecker product of I - 2/m, a reflection of the m blocks, and the Hadamard matrix: of 576
channels, the width of MLA, 9 times 64; of 512, two times 256, each mixed for itself. Both are symmetric, so the matrix
is its own inverse. MLX's transform is only asked for powers of two up to 256, where it was found to be right: on
a CPU it corrupts memory for other sizes.
"""

from __future__ import annotations

import mlx.core as mx

LEAST_POWER, MOST_POWER = 16, 256  # channels that one transform mixes


def power_of_two_in(dim: int) -> int:
    """The largest power of two that divides it, MOST_POWER at most."""
    return min(dim & -dim, MOST_POWER)


def check_rotation(name: str, dim: int) -> None:
    """Raises ValueError for a head dim of "keys" or "values" (`name`) that cannot be mixed well."""
    if dim < LEAST_POWER or power_of_two_in(dim) < LEAST_POWER:
        raise ValueError(
            f"{name} have head dim {dim}, which {LEAST_POWER} does not divide, so they cannot be rotated; leave it out"
        )


def rotated(x: mx.array) -> mx.array:
    """x (..., D) times the matrix, which is its own inverse."""
    dim = x.shape[-1]
    power = power_of_two_in(dim)
    turned: mx.array = mx.hadamard_transform(x.reshape(*x.shape[:-1], -1, power))  # (..., m, 2^k)
    blocks = dim // power
    if blocks > 1:
        turned = turned - turned.mean(axis=-2, keepdims=True) * 2  # mx.mean is 1/m of the sum
    return turned.reshape(x.shape)
