"""Calibrations with random weights, for caches of any number of layers and heads; centred keys of a model."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.cache.codecs import Affine, CentredByLayer, Codec
from mlx_kv.cache.eviction.calibration import Calibration, FittedLayer, Rotation
from mlx_kv.calibration.loss import measure_centres

FOUR = Affine(4, 64, rotate=True)


def random_calibration(
    heads: int, dim: int, layers: int, value_dim: int | None = None, fingerprint: str = "random", seed: int = 0
) -> Calibration:
    """Keys are rotated by a RoPE over all but the last two of their channels, so that scores depend on positions."""
    value_dim = dim if value_dim is None else value_dim
    half = dim // 2 - 1
    pairs = mx.stack([mx.arange(half), half + mx.arange(half)], axis=1).astype(mx.int32)
    rope = Rotation(pairs, 0.5 ** mx.arange(half).astype(mx.float32), mx.array(1.0))
    features = heads * (dim + value_dim + 2) + 1
    fitted = [
        FittedLayer(
            0.2 * mx.random.normal((features, heads), key=mx.random.key(seed + layer)),
            mx.array([-3.0 - head for head in range(heads)]),
            key_rope=rope,
        )
        for layer in range(layers)
    ]
    table = [[1.0 + (layer + head) % 3 for head in range(heads)] for layer in range(layers)]
    return Calibration(fingerprint, table, tuple(fitted))


def centred(model: nn.Module, tokens: Sequence[int], codec: Codec = FOUR) -> CentredByLayer:
    """A codec of keys that subtracts their mean over a text."""
    return CentredByLayer(measure_centres(model, tokens), codec)
