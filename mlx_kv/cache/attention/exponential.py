"""The exponential in float32, in a few operations that a compiler makes vectors of.

MLX's own takes 17 to 20 ns a number on an x86-64 CPU, which is nine tenths of its attention over a prompt; this one 1
to 2, with a relative error below 3e-7.

e^x = 2^n e^r: n is x / ln 2, rounded to a whole number by adding 1.5 * 2^23, after which the lowest bits of the float
are n; r = x - n ln 2 lies within ln 2 / 2, where Cephes' polynomial of degree 7 will do; and n goes to the exponent
(Schraudolph 1999). ln 2 comes in two parts, the first of which times n is exact: 2^y of y = x / ln 2 as it is would be
off by 4e-6 where y is large, for y has but 24 bits.
"""

from __future__ import annotations

import mlx.core as mx

LOG2_E = 1.4426950408889634
LN_2 = (0.693359375, -2.12194440e-4)  # its first 9 bits, and the rest
ROUNDS = 12582912.0  # 1.5 * 2^23: floats of this size are whole numbers
EXPONENT_OF_1 = 127 << 23
# (e^r - 1 - r) / r^2, the highest power first.
SERIES = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
LEAST = -126.0  # 2^y below is no normal number: 0
MOST = 88.0  # e^x above is no float any more


@mx.compile
def exponential(x: mx.array) -> mx.array:
    """e^x of float32 from -3e38 to MOST; what is below e^-87.3 is 0, exactly."""
    y = x * LOG2_E
    rounded = y + ROUNDS
    whole = rounded - ROUNDS
    rest = (x - whole * LN_2[0]) - whole * LN_2[1]
    power = mx.array(SERIES[0], mx.float32)
    for factor in SERIES[1:]:
        power = factor + rest * power
    power = 1.0 + (rest + rest * rest * power)
    scale = ((rounded.view(mx.int32) << 23) + EXPONENT_OF_1).view(mx.float32)
    return mx.where(y < LEAST, 0.0, power * scale)
