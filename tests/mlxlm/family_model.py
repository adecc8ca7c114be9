"""One model family, tiny, and what mlx-lm itself says of it: the truth that our caches are held against.

The truth is what mlx-lm says when it reads everything in one pass into caches of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from families import shared_family
from family_parts import VOCAB
from mlx_lm.models import cache as stock

from mlx_kv import CachePolicy
from mlx_kv.mlxlm.traverse import leaves

LENGTH = 48
CHUNKS = (21, 11, 1, 1, 1, 9, 1, 1, 1, 1)  # longer than a window, past it, decoding, and a prompt that goes on
TOLERANCE = 1e-4  # of the largest logit: float32 in other shapes of the same sums
# Models that round to bfloat16 between layers themselves.
ROUNDED = {"muse_spark": 0.02}
Kind = Literal["exact", "refused", "nothing to do", "as mlx-lm", "mlx-lm fails", "seen", "derived", "hidden", "WRONG"]


@dataclass(frozen=True)
class Verdict:
    """What a column found.

    Attributes:
        kind: "exact"; "refused", with our message; "nothing to do" where no layer has what the column is about;
            "as mlx-lm" where we answer as mlx-lm's own caches do in the same chunks, but the model looks ahead in each;
            "mlx-lm fails" where its own caches end in a traceback; of attention "seen", "derived" or "hidden", as
            `mlx_kv.mlxlm.attention` says it; "WRONG".
        reason: in words; of "exact" what is exact although mlx-lm's own caches are not.
    """

    kind: Kind
    reason: str = ""


class WrongError(AssertionError):
    """What was read is not what should have been."""


@dataclass
class Family:
    """One family and what mlx-lm itself says of it."""

    name: str

    @cached_property
    def model(self) -> nn.Module:
        return shared_family(self.name)

    @property
    def tolerance(self) -> float:
        return ROUNDED.get(self.name, TOLERANCE)

    @cached_property
    def windowed(self) -> bool:
        return bool(kinds(self.model) & {stock.RotatingKVCache, stock.ChunkedKVCache})

    def policy(self, max_write: int = 6, max_rollback: int = 0, **settings: Any) -> CachePolicy:
        """A policy; with slots for short writes where there are windows, which longer ones exceed now and then."""
        for_rings = {"max_write": max_write} if self.windowed else {}
        if self.windowed or stock.ArraysCache in kinds(self.model):
            for_rings["max_rollback"] = max_rollback
        return CachePolicy(**for_rings, **settings)

    @cached_property
    def truth(self) -> mx.array:
        """Logits of every position of `tokens()`, read in one pass."""
        return read(self.model, stock.make_prompt_cache(self.model), tokens(), [LENGTH])

    @cached_property
    def own(self) -> mx.array:
        """The same from mlx-lm's own caches, read in chunks."""
        return read(self.model, stock.make_prompt_cache(self.model), tokens(), CHUNKS)

    @cached_property
    def looks_ahead(self) -> bool:
        """Whether the model itself sees tokens that come later: nothing is then the answer to a prompt."""
        prompt = tokens()
        other = mx.concatenate([prompt[:, :-1], (prompt[:, -1:] + 1) % VOCAB], axis=1)
        changed = read(self.model, stock.make_prompt_cache(self.model), other, [LENGTH])
        return distance(changed[:, :-1], self.truth[:, :-1]) > self.tolerance

    def check(self, got: mx.array, wanted: mx.array, what: str = "logits") -> None:
        far = distance(got, wanted)
        if not far <= self.tolerance:
            raise WrongError(f"{what} are off by {100 * far:.2g}%")


def kinds(model: nn.Module) -> set[type]:
    """Of mlx-lm's own caches."""
    return {type(cache) for cache in leaves(stock.make_prompt_cache(model))}


def tokens(seed: int = 0, length: int = LENGTH) -> mx.array:
    return mx.random.randint(1, VOCAB, (1, length), key=mx.random.key(seed))


def distance(got: mx.array, wanted: mx.array) -> float:
    """The largest difference, as a share of the largest value."""
    far: Any = (mx.abs(got - wanted).max() / mx.abs(wanted).max()).item()
    return float(far)


def read(
    model: nn.Module, caches: list[Any], prompt: mx.array, chunks: Sequence[int], most: int | None = VOCAB
) -> mx.array:
    """Logits (B, n, most) of every position, the prompt (B, n) fed in chunks; of all tokens if most is None."""
    out, first = [], 0
    for chunk in chunks:
        out.append(model(prompt[:, first : first + chunk], cache=caches)[..., :most])
        mx.eval(out[-1], [cache.state for cache in caches])
        first += chunk
    return mx.concatenate(out, axis=1).astype(mx.float32)
