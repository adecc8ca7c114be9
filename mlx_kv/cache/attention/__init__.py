"""Attention in MLX operations, for tensors that MLX's fused attention cannot read, and where its softmax is slow."""

from __future__ import annotations

from mlx_kv.cache.attention.answers import Operands, PackedAnswer, ResidualAnswer
from mlx_kv.cache.attention.blocks import Partial, attend, attend_partly, combined, merged
from mlx_kv.cache.attention.operands import Dense, Joined, Operand, Packed, operand_of

__all__ = [
    "Dense",
    "Joined",
    "Operand",
    "Operands",
    "Packed",
    "PackedAnswer",
    "Partial",
    "ResidualAnswer",
    "attend",
    "attend_partly",
    "combined",
    "merged",
    "operand_of",
]
