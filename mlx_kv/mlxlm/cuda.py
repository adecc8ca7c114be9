"""Attention over quantised caches on CUDA, whose products take no slices of a buffer.

mlx-lm's attention would get copies of all codes, scales and biases of each layer at every step: six calls, and another
shape for each length, for which MLX may have to compile a kernel. It reads whole buffers instead, as long as a model
of `mlx_kv.load` lives.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.cache.codecs import takes_slices
from mlx_kv.cache.protocol import AttentionCall
from mlx_kv.mlxlm.attention import use_backend
from mlx_kv.mlxlm.traverse import parts_of


class CudaAttention:
    """Computes attention over packed planes of our caches; other calls are handed on."""

    def attend(self, call: AttentionCall) -> mx.array:
        """(B, Hq, S, Dv)."""
        parts = parts_of(call.cache)
        if len(parts) != 1 or isinstance(call.keys, mx.array) or call.sinks is not None:
            return call.forward()
        attention = parts[0].own_attention(parts[0].packing)
        return call.forward() if attention is None else attention.attend(call)


def use_cuda_attention(model: nn.Module) -> None:
    """On CUDA, attention over quantised caches of this model is computed here, for as long as the model lives."""
    if not takes_slices():
        use_backend(model, CudaAttention())
