"""The interface of a cache for models and generation loops: the names that mlx-lm's models call.

Third parties implement `Cache`, without a base class: mlx-lm's loop, `trim_prompt_cache`, `can_trim_prompt_cache` with
a number and `cache_statistics` work with it. Batches, files and budgets need a `KVCache`.
B rows, H KV heads, S new tokens, D head dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx

from mlx_kv.cache.codecs import Planes
from mlx_kv.cache.mask import Mask

Fetched = tuple[mx.array, mx.array] | tuple[Planes, Planes]


# Its arguments, in the order in which mlx-lm gives them; some models give them by name, some by place.
ARGUMENTS = ("queries", "keys", "values", "cache", "scale", "mask", "sinks")


class AttentionCall:
    """One call of attention: its arguments, and the function that computes it.

    Attributes:
        queries: (B, Hq, S, D), after RoPE.
        keys, values: mostly what the cache returned, (B, H, N, D) or packed planes.
        cache: the cache of the layer.
        scale: of the products of queries and keys.
        mask: "causal", an array of bool or of addends that broadcasts to (B, Hq, S, N), or None.
        sinks: (Hq,) logits of attention sinks, or None.
    """

    __slots__ = (*ARGUMENTS, "_function", "_named", "_placed")

    queries: mx.array
    keys: Any
    values: Any
    cache: Any
    scale: float
    mask: Mask
    sinks: mx.array | None

    def __init__(self, function: Callable[..., mx.array], placed: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._function, self._placed, self._named = function, placed, named
        given = dict(zip(ARGUMENTS, placed, strict=False)) | named
        for name in ARGUMENTS:
            setattr(self, name, given.get(name))

    def forward(self, **changes: Any) -> mx.array:
        """(B, Hq, S, D): computes attention, with some arguments changed.

        Raises:
            TypeError: a change of something that is no argument of attention.
        """
        if not isinstance(changes.get("keys", self.keys), mx.array) and "queries" not in changes:
            changes["queries"] = self.queries[...]  # mlx-lm scales them in place there
        placed, named = self._arguments(changes)
        return self._function(*placed, **named)

    def changed(self, **changes: Any) -> AttentionCall:
        """The same call with other arguments.

        Raises:
            TypeError: as `forward`.
        """
        return AttentionCall(self._function, *self._arguments(changes))

    def before(self, hook: Hook) -> AttentionCall:
        """The same call, but `forward` calls a hook."""

        def function(*placed: Any, **named: Any) -> mx.array:
            return hook.attend(AttentionCall(self._function, placed, named))

        return AttentionCall(function, self._placed, self._named)

    def _arguments(self, changes: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not changes.keys() <= set(ARGUMENTS):
            raise TypeError(f"attention has no {', '.join(changes.keys() - set(ARGUMENTS))}: {', '.join(ARGUMENTS)}")
        placed = tuple([changes.pop(name, value) for name, value in zip(ARGUMENTS, self._placed, strict=False)])
        return placed, self._named | changes


Call = AttentionCall


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
