"""Attention of our own, for tensors that MLX's fused attention cannot read, and where its softmax is slow."""

from __future__ import annotations

from mlx_kv.cache.attention.answer import PackedAnswer
from mlx_kv.cache.attention.blocks import attend
from mlx_kv.cache.attention.nearby import ResidualAnswer
from mlx_kv.cache.attention.operands import Dense, Joined, Operand
from mlx_kv.cache.attention.packed import Packed

__all__ = ["Dense", "Joined", "Operand", "Packed", "PackedAnswer", "ResidualAnswer", "attend"]
