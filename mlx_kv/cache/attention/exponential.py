"""The exponential of numbers up to 0 in float32, in a few operations that a compiler makes vectors of.

MLX's own takes 17 to 20 ns a number on an x86-64 CPU, which is nine tenths of its attention over a prompt; this one 1
to 2, with a relative error of 2.4e-7.

2^y, y = x / ln 2: y is rounded to a whole number n by adding 1.5 * 2^23, after which the lowest bits of the float are
n; what is left of y lies within a half, where a polynomial of degree 6 (the series of 2^f) will do; and n goes to the
exponent. Cephes and Schraudolph (1999) are the usual sources.
"""

from __future__ import annotations

import mlx.core as mx

LOG2_E = 1.4426950408889634
ROUNDS = 12582912.0  # 1.5 * 2^23: floats of this size are whole numbers
EXPONENT_OF_1 = 127 << 23
SERIES = (0.000154035, 0.0013333558, 0.009618129, 0.05550411, 0.24022651, 0.6931472)  # (ln 2)^k / k!, the highest first
LEAST = -126.0  # 2^y below is no normal number: 0


@mx.compile
def exponential(x: mx.array) -> mx.array:
    """e^x of float32 from -3e38 to 0; what is below e^-87 is 0, exactly."""
    y = x * LOG2_E
    rounded = y + ROUNDS
    rest = y - (rounded - ROUNDS)
    power = mx.array(SERIES[0], mx.float32)
    for factor in SERIES[1:]:
        power = factor + rest * power
    power = 1.0 + rest * power
    scale = ((rounded.view(mx.int32) << 23) + EXPONENT_OF_1).view(mx.float32)
    return mx.where(y < LEAST, 0.0, power * scale)
