"""Checks of arguments, for the whole package, and of the tensors of an update.

A check runs before the first change, so a refused update leaves the cache unchanged. Messages state the problem and the
fix. Shapes are (B, H, S, D).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Annotated, Any

import mlx.core as mx
from msgspec import Meta

from mlx_kv.cache.buffers import Buffers, signature_of
from mlx_kv.cache.codecs import Codecs, are_plain
from mlx_kv.settings import MOST_TOKENS, SettingError, shown, whole_number

Count = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]  # of tokens: msgspec checks it in files


def check_type(name: str, value: object, kinds: Any, fix: str) -> None:
    """Raises TypeError where an argument is of another type than these.

    Args:
        kinds: as for `isinstance`, such as `Callable | None`.
        fix: what to pass instead.
    """
    if not isinstance(value, kinds):
        raise TypeError(f"{name} is {shown(value)}: {fix}")


def token_ids(given: Any, vocabulary: int = MOST_TOKENS + 1, what: str = "the prompt") -> list[int]:
    """Token ids from a sequence or a one-dimensional array.

    Args:
        vocabulary: number of tokens of the model; with other ids MLX would read out of bounds.
        what: name of the ids in messages.

    Raises:
        ValueError: not whole numbers, or an id outside the vocabulary.
    """
    if getattr(given, "ndim", 1) != 1:
        raise ValueError(f"{what} has shape {tuple(given.shape)}: give one sequence of token ids")
    listed = given.tolist() if hasattr(given, "tolist") else given
    try:
        if isinstance(listed, (str, bytes)):
            raise TypeError
        # Prompts of agents have tens of thousands of tokens, all of them plain.
        ids = list(listed)
        if not set(map(type, ids)) <= {int}:
            ids = [_index(token) for token in ids]
    except TypeError:
        raise ValueError(f"{what} is {shown(given)}: give token ids, whole numbers from 0 up") from None
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        wrong = next(token for token in ids if not 0 <= token < vocabulary)
        raise ValueError(
            f"{what} has the token {shown(wrong)}, but the vocabulary has {vocabulary:,}: "
            f"give ids from 0 to {vocabulary - 1}"
        )
    return ids


def _index(token: Any) -> int:
    if isinstance(token, bool):  # a mask by mistake
        raise TypeError
    return operator.index(token)


def cache_list(name: str, given: Any) -> list[Any]:
    """The caches of a model's layers: ours, mlx-lm's, or others with the interface of `protocol.Cache`.

    Raises:
        TypeError: not a list of caches.
    """
    try:
        listed = given if isinstance(given, list) else list(given)  # ranks identify a list by the object
    except TypeError:
        listed = [None]
    if not all(hasattr(cache, "update_and_fetch") or hasattr(type(cache), "state") for cache in listed):
        raise TypeError(f"{name} is {shown(given)}: give a list of caches, as make_prompt_cache makes it")
    return listed


def whole_numbers(given: object, rows: int) -> tuple[int, ...]:
    """Whole numbers from a sequence or an array; a single number is repeated for each row.

    Raises:
        ValueError: not whole numbers.
    """
    listed: Any = given.tolist() if isinstance(given, mx.array) else given
    try:
        if not isinstance(listed, Sequence) or isinstance(listed, str):
            listed = list(listed) if hasattr(listed, "__len__") else [listed] * rows
        return tuple([operator.index(number) for number in listed])
    except TypeError:
        raise ValueError(f"got {shown(given)}: give whole numbers") from None


def check_storage(codecs: Codecs, growth: object, reserve: object, start: object, residual_length: object) -> None:
    """Raises ValueError where the storage settings of a cache or a policy are wrong, or do not go together.

    Args:
        start: `quantized_start`.
    """
    if isinstance(growth, type) or not callable(getattr(growth, "capacity", None)):
        raise ValueError(f"growth is {shown(growth)}: give a rule such as Tapered() or FixedStep(256)")
    whole_number("reserve", reserve)
    for name, value in (("quantized_start", start), ("residual_length", residual_length)):
        if whole_number(name, value) and are_plain(codecs):
            raise SettingError(
                f"{{{name}:is}}, but {{bits:is}}: give a number of bits, such as {{bits:=8}}", **{name: value}
            )


def check_update(keys: mx.array, values: mx.array, codecs: Codecs, buffers: Buffers | None, empty: bool) -> bool:
    """Raises ValueError for tensors that a cache cannot store.

    Args:
        empty: whether the cache holds no token.

    Returns:
        whether the buffers must be made anew: an empty cache takes tensors of another shape.
    """
    if buffers is not None and _continues(keys, values, buffers):
        return False  # the usual case
    check_tokens(keys, values)
    for name, tensor, codec in zip(("keys", "values"), (keys, values), codecs, strict=True):
        codec.check(name, tensor)
    if buffers is None:
        return False
    if empty and [signature_of(x) for x in (keys, values)] != [each.signature for each in buffers]:
        return True
    for name, tensor, buffer in zip(("keys", "values"), (keys, values), buffers, strict=True):
        kinds = ("rows", "KV heads", "head dim", "dtype")
        for what, new, old in zip(kinds, signature_of(tensor), buffer.signature, strict=True):
            if new != old:
                raise ValueError(
                    f"{name} came with {what} {new}, but this cache holds {what} {old}: "
                    "use one cache for one layer of one batch, and reset() it for a new session"
                )
    return False


def _continues(keys: mx.array, values: mx.array, buffers: Buffers) -> bool:
    """Whether this update has the signature of the buffers; if not, the checks above raise what is wrong, if any."""
    if not (isinstance(keys, mx.array) and isinstance(values, mx.array)) or keys.ndim != 4 or values.ndim != 4:
        return False
    if not keys.shape[2] == values.shape[2] > 0:
        return False
    return signature_of(keys) == buffers[0].signature and signature_of(values) == buffers[1].signature


def check_tokens(keys: mx.array, values: mx.array) -> None:
    """Raises ValueError unless keys and values are floating point, 4-D, not empty, and agree in B, H and S."""
    for name, tensor in (("keys", keys), ("values", values)):
        if not isinstance(tensor, mx.array):
            raise ValueError(f"{name} are a {type(tensor).__name__}, expected an mx.array")
        if tensor.ndim != 4:
            raise ValueError(f"{name} have shape {tensor.shape}, expected (batch, KV heads, tokens, head dim)")
        # Only values may have a head dim of 0: minimax_m3 stores keys alone.
        if 0 in tensor.shape[:3] or keys.shape[3] == 0:
            raise ValueError(f"{name} have shape {tensor.shape}: give at least one row, head, token and head dim")
        if not mx.issubdtype(tensor.dtype, mx.floating):
            raise ValueError(f"{name} are {tensor.dtype}, expected floating point; use .astype(mx.float32)")
    for axis, what in enumerate(("rows", "KV heads", "tokens")):
        if keys.shape[axis] != values.shape[axis]:
            raise ValueError(
                f"keys {keys.shape} and values {values.shape} differ in {what}: "
                "both must describe the same tokens of the same heads"
            )
