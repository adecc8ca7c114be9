"""The interface of a cache for models and generation loops: the names that mlx-lm's models call.

Third parties implement `Cache`, without a base class: mlx-lm's loop, `trim_prompt_cache`, `can_trim_prompt_cache` with
a number and `cache_statistics` work with it. Batches, files and budgets need a `KVCache`.
B rows, H KV heads, S new tokens, D head dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx

from mlx_kv.cache.codecs import Planes
from mlx_kv.cache.mask import Mask

Fetched = tuple[mx.array, mx.array] | tuple[Planes, Planes]


class Call(Protocol):
    """One call of attention over a cache, implemented by `mlxlm.attention.AttentionCall`."""

    @property
    def queries(self) -> mx.array:
        """(B, Hq, S, D), after RoPE."""
        ...

    @property
    def keys(self) -> Any:
        """What the cache returned, (B, H, N, D) or packed planes."""
        ...

    @property
    def values(self) -> Any:
        """(B, H, N, Dv) or packed planes."""
        ...

    @property
    def scale(self) -> float:
        """Of the products of queries and keys."""
        ...

    @property
    def mask(self) -> Any:
        """ "causal", an array of bool or of addends that broadcasts to (B, Hq, S, N), or None."""
        ...

    @property
    def sinks(self) -> mx.array | None:
        """(Hq,) logits of attention sinks, or None."""
        ...

    def changed(self, **changes: Any) -> Call:
        """The same call with other arguments."""
        ...

    def before(self, hook: Hook) -> Call:
        """The same call, which a hook computes when it is forwarded."""
        ...

    def forward(self, **changes: Any) -> mx.array:
        """The result of the model's own attention, (B, Hq, S, Dv), optionally with other arguments."""
        ...


class Hook(Protocol):
    """Observes the attention over a cache, or computes it."""

    def attend(self, call: Call) -> mx.array:
        """(B, Hq, S, Dv): the result of `call.forward()`, perhaps with other arguments, or the hook's own."""
        ...


@runtime_checkable
class Cache(Protocol):
    """The keys and values of one attention layer."""

    @property
    def offset(self) -> int | mx.array:
        """The next position, for RoPE: an int where all rows agree, an array (B,) where they differ."""
        ...

    @property
    def state(self) -> Any:
        """A pytree of arrays and plain values, to evaluate."""
        ...

    @state.setter
    def state(self, value: Any) -> None: ...

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """The mask for the next N tokens; called before `update_and_fetch`.

        Args:
            return_array: return an array instead of "causal".
            window_size: a query sees at most so many tokens, itself included; None is no limit.

        Returns:
            None (one token that sees all), "causal", or booleans (N, K) or (B, 1, N, K), True where a query may attend.
        """
        ...

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Fetched:
        """Stores keys (B, H, S, Dk) and values (B, H, S, Dv); returns what attention reads."""
        ...

    def size(self) -> int:
        """Tokens held by the longest row."""
        ...

    def can_trim(self, n: int | Sequence[int]) -> bool:
        """Whether a trim by n, or of row i by n[i], would be exact."""
        ...

    def trim(self, n: int) -> int:
        """Drops the last n tokens of every row and returns n; where it can't, raises ValueError and changes nothing."""
        ...

    def trim_per_sequence(self, n: Sequence[int]) -> None:
        """Drops the last n[i] tokens of row i; where a row can't, raises ValueError and changes nothing."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes allocated; 0 before the first update."""
        ...

    def reset(self) -> None:
        """Removes every token, for a new session; allocated memory stays."""
        ...
