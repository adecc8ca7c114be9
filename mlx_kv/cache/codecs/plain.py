"""Tensors stored as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx

from mlx_kv.cache.codecs.base import Plane, Planes


@dataclass(frozen=True)
class Plain:
    """One plane: the tensor itself."""

    name: ClassVar[str] = "plain"
    packed: ClassVar[None] = None

    @property
    def parameters(self) -> dict[str, Any]:
        return {}

    def check(self, name: str, x: mx.array) -> None:
        pass

    def planes(self, head_dim: int, dtype: mx.Dtype) -> tuple[Plane, ...]:
        return (Plane(head_dim, dtype),)

    def encode(self, x: mx.array) -> Planes:
        return (x,)

    def decode(self, planes: Planes, dtype: mx.Dtype) -> mx.array:
        return planes[0]
