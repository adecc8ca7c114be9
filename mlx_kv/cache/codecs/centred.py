"""A codec that stores the difference of each channel from its centre by another codec.

Keys have channels that lie far from zero for all tokens alike (KIVI, Liu et al. 2024), so that within a group of
channels they take its whole range. KIVI scales each channel over a group of tokens; a centre that was measured once for
a layer removes the same offset at no bytes a token, and tokens are still encoded independently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx

from mlx_kv.cache.codecs.base import Codec, Packing, Plane, Planes
from mlx_kv.cache.codecs.centre import Centre


@dataclass(frozen=True)
class Centred:
    """The planes of `codec`, of a tensor (B, H, S, D) less the centre of its channels.

    Args:
        centre: of this layer.
        codec: how the difference is stored.
    """

    name: ClassVar[str] = "centred"
    centre: Centre
    codec: Codec

    @property
    def parameters(self) -> dict[str, Any]:
        own = {"heads": self.centre.heads, "numbers": self.centre.numbers}
        return own | {"codec": [self.codec.name, self.codec.parameters]}

    @property
    def packed(self) -> Packing | None:
        packed = self.codec.packed
        return None if packed is None else packed._replace(centre=self.centre)

    def of_head(self, head: int) -> Codec:
        """What decodes the planes of one head alone."""
        return Centred(self.centre.of_head(head), self.codec)

    def check(self, name: str, x: mx.array) -> None:
        self.codec.check(name, x)
        heads, dim = x.shape[1], x.shape[3]
        if (heads, dim) != (self.centre.heads, self.centre.dim):
            raise ValueError(
                f"{name} have {heads} heads of {dim} channels and their centre {self.centre.heads} of "
                f"{self.centre.dim}: it is another model's or layer's; measure that of this one"
            )

    def planes(self, head_dim: int, dtype: mx.Dtype) -> tuple[Plane, ...]:
        return self.codec.planes(head_dim, dtype)

    def encode(self, x: mx.array) -> Planes:
        return self.codec.encode(x - self.centre.array(x.dtype))

    def decode(self, planes: Planes, dtype: mx.Dtype) -> mx.array:
        return self.codec.decode(planes, dtype) + self.centre.array(dtype)


@dataclass(frozen=True)
class CentredByLayer:
    """`Centred` with another centre in each layer: for policies. A cache takes that of its layer (`of_layer`).

    Args:
        centres: of each of a model's caches, in their order; None where there are no keys.
        codec: as in `Centred`.
    """

    name: ClassVar[str] = Centred.name
    centres: tuple[Centre | None, ...]
    codec: Codec

    @property
    def parameters(self) -> dict[str, Any]:
        layers = [None if each is None else [each.heads, each.numbers] for each in self.centres]
        return {"layers": layers, "codec": [self.codec.name, self.codec.parameters]}

    @property
    def packed(self) -> Packing | None:
        packed = self.codec.packed
        return None if packed is None else packed._replace(centre=next(filter(None, self.centres)))

    def of_layer(self, layer: int) -> Codec:
        """The codec of one of the caches.

        Raises:
            ValueError: a layer whose centre is not among these.
        """
        centre = self.centres[layer] if layer < len(self.centres) else None
        if centre is None:
            raise ValueError(f"there is no centre of cache {layer}: they are of another model; measure those of this")
        return Centred(centre, self.codec)

    def check(self, name: str, x: mx.array) -> None:
        raise ValueError(
            f"the centre of {name} is another in each layer: make caches with make_prompt_cache(model, policy), or "
            "take that of one layer: codec.of_layer(3)"
        )

    def planes(self, head_dim: int, dtype: mx.Dtype) -> tuple[Plane, ...]:
        return self.codec.planes(head_dim, dtype)

    def encode(self, x: mx.array) -> Planes:
        raise NotImplementedError("checked before")

    def decode(self, planes: Planes, dtype: mx.Dtype) -> mx.array:
        raise NotImplementedError("checked before")
