"""Attention on a Linux CPU, where MLX's own spends nine tenths of its time on the exponential.

Decides which calls are answered here: those in float32 that are large enough. The environment variable
MLX_KV_ATTENTION=mlx leaves all to MLX. On a GPU nothing is changed.
"""

from __future__ import annotations

import os
import sys
import weakref

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.cache.attention import Dense, PackedAnswer, attend
from mlx_kv.cache.codecs import Packing
from mlx_kv.mlxlm.attention import AttentionCall, AttentionSeam

LEAST_SCORES = 2**14  # of a call: below, MLX's one operation costs less than several


class CpuAttention:
    """Answers attention over arrays of float32; all else is mlx-lm's."""

    def attend(self, call: AttentionCall) -> mx.array:
        """(B, Hq, S, Dv)."""
        queries, keys, values = call.queries, call.keys, call.values
        if isinstance(keys, mx.array):
            exact = queries.dtype == keys.dtype == values.dtype == mx.float32
            if not exact or queries.size // queries.shape[3] * keys.shape[2] < LEAST_SCORES:
                return call.hand_on()
            return attend(queries, Dense(keys), Dense(values), call.scale, call.mask, call.sinks)
        packing = Packing(call.cache.bits, call.cache.group_size)
        if queries.dtype != mx.float32 or call.sinks is not None:  # which mlx-lm refuses there
            return call.hand_on()
        return PackedAnswer(packing, packing).attend(call)


def slow_exponential(variable: str) -> bool:
    """Whether MLX's exponential is worth going around here, and the environment variable does not say `mlx`."""
    on_cpu = sys.platform == "linux" and mx.default_device().type == mx.DeviceType.cpu  # elsewhere MLX has vectors, too
    return on_cpu and os.environ.get(variable) != "mlx"


def use_cpu_attention(model: nn.Module) -> None:
    """On a CPU, attention of this model's layers is computed here, for as long as the model lives."""
    if slow_exponential("MLX_KV_ATTENTION"):
        weakref.finalize(model, AttentionSeam(model, answering=CpuAttention()).close).atexit = False
