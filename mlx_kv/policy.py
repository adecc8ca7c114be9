"""How a model's attention layers keep their keys and values: one frozen description for all of them.

Decides nothing itself: it holds the settings, checks them when it is made, and makes the cache of one layer. Knows
nothing about models; `adapter.make_prompt_cache` applies a policy to one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from mlx_kv.cache import KVCache
from mlx_kv.growth import Geometric, Growth


@dataclass(frozen=True)
class CachePolicy:
    """Settings for the caches of a model. Every default is "as the model wants it".

    Args:
        bits: quantise keys and values to 2, 3, 4, 5, 6 or 8 bits; None keeps them as they are.
        group_size: elements that share a scale when quantised: 32, 64 or 128.
        growth: how capacity grows, `Geometric()` or `FixedStep(256)` or a rule of your own.
        reserve: tokens to make room for at once, so that nothing grows within them.
        quantized_start: quantise only once a sequence holds this many tokens.

    Raises:
        ValueError: a value that does not exist, or quantized_start without bits.
    """

    bits: int | None = None
    group_size: int = 64
    growth: Growth = Geometric()
    reserve: int = 0
    quantized_start: int = 0

    def __post_init__(self) -> None:
        if self.quantized_start and self.bits is None:
            raise ValueError(
                f"quantized_start is {self.quantized_start}, but bits is None: say how many bits, or drop it"
            )
        self.make_cache()  # the cache checks the rest

    def make_cache(self, packed_decode: bool = True) -> KVCache:
        """The cache of one full-attention layer."""
        return KVCache(
            bits=self.bits,
            group_size=self.group_size,
            growth=self.growth,
            reserve=self.reserve,
            quantized_start=self.quantized_start,
            packed_decode=packed_decode,
        )

    def changed(self) -> list[str]:
        """The names of the settings that are not at their default."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]
