"""What models of mlx-lm do with Metal kernels, in plain operations, so that they run on every machine.

Nothing of it has to do with caches. Shapes: B rows, L tokens, H heads of dim D, K experts chosen of E.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn


def _norm(x: mx.array, eps: float, weight: mx.array | None = None) -> mx.array:
    return mx.fast.rms_norm(x, weight, eps)


def qk_norm(
    qkvg: mx.array, *, n_heads: int, n_kv_heads: int, head_dim: int, eps: float, query_scale: float
) -> list[mx.array]:
    """Queries (B, L, H, D) and keys out of one projection (B, L, ·) that holds both, values and gates; normalised."""
    heads = qkvg[..., : (n_heads + n_kv_heads) * head_dim].reshape(*qkvg.shape[:-1], -1, head_dim)
    return [query_scale * _norm(heads[..., :n_heads, :], eps), _norm(heads[..., n_heads:, :], eps)]


def qk_norm_rope(qkvg: mx.array, *, rope_base: float, offset: Any, **how: Any) -> list[mx.array]:
    """The same, then rotated; the first token is at position offset, a number or one for each row."""
    dims = how["head_dim"]

    def rotated(x: mx.array) -> mx.array:
        x = x.swapaxes(1, 2)
        return mx.fast.rope(x, dims, traditional=True, base=rope_base, scale=1.0, offset=offset).swapaxes(1, 2)

    return [rotated(x) for x in qk_norm(qkvg, **how)]


def rms_norm_sigmoid_gate(x: mx.array, gate: mx.array, *, eps: float) -> mx.array:
    """x (B, H, L, D) and gate (B, L, H * D) to (B, L, H * D)."""
    return _norm(x, eps).swapaxes(1, 2).reshape(gate.shape) * mx.sigmoid(gate)


def expert_routing(
    logits: mx.array, expert_bias: mx.array, *, top_k: int, multiplier: float, score_eps: float, route_scale: float
) -> list[mx.array]:
    """Logits (..., E) to the best experts (..., K) and their weights."""
    scores = mx.sigmoid(logits * multiplier)
    chosen = mx.argsort(-(scores + expert_bias), axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    return [chosen, route_scale * weights / (weights.sum(-1, keepdims=True) + score_eps)]


def post_expert_norm_combine(experts: mx.array, weights: mx.array, *, norm_weight: mx.array, eps: float) -> mx.array:
    """Experts (..., K, D), normalised and added up with weights (..., K)."""
    return (_norm(experts * norm_weight, eps) * weights[..., None]).sum(-2)


def norm_add_norm(
    branch: mx.array,
    stream: mx.array,
    *,
    alpha: mx.array,
    beta: mx.array,
    post_weight: mx.array | None,
    post_eps: float,
    next_norm: nn.RMSNorm | None,
) -> tuple[mx.array, mx.array | None]:
    """The stream with a normalised branch added, and that normalised for the next block."""
    branch = branch if post_weight is None else post_weight * branch
    stream = alpha * stream + beta * _norm(branch, post_eps)
    return stream, None if next_norm is None else _norm(stream, next_norm.eps, next_norm.weight)


@contextmanager
def experts_of_sixteen_bits() -> Iterator[None]:
    """Lets experts of half precision run where MLX has them in float32 only: on a CPU."""
    if mx.default_device().type != mx.DeviceType.cpu:
        yield
        return
    plain = mx.gather_mm

    def gather_mm(a: mx.array, b: mx.array, *arguments: Any, **options: Any) -> mx.array:
        return plain(a.astype(mx.float32), b.astype(mx.float32), *arguments, **options).astype(a.dtype)

    with mock.patch.object(mx, "gather_mm", gather_mm):
        yield


STAND_INS: dict[str, dict[str, Any]] = {
    "bitnet": {"BitLinear": nn.Linear},
    "muse_spark": {
        f.__name__: f
        for f in (
            qk_norm,
            qk_norm_rope,
            rms_norm_sigmoid_gate,
            expert_routing,
            post_expert_norm_combine,
            norm_add_norm,
        )
    },
}
