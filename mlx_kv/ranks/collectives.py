"""What ranks tell each other by MLX's own collectives, besides what the model itself tells.

All go by the stream on which mlx-lm's loop runs the model, and are waited for: two on different streams could meet each
other's.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.generate import generation_stream


def gathered(x: mx.array, group: mx.distributed.Group) -> mx.array:
    """Of all ranks, one after the other on axis 0, as it is now."""
    mx.eval(x)
    with mx.stream(generation_stream):
        every = mx.distributed.all_gather(x, group=group)
        mx.eval(every)
    return every
