"""Strict JSON, and its typed decoding by msgspec: types, ranges and fields, and the shapes of arrays."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Annotated, Any, Never, TypeVar

import mlx.core as mx
import msgspec
from msgspec import Meta, Struct

from mlx_kv.settings import MOST_TOKENS

T = TypeVar("T")
MAX_NESTED = 128  # arrays and objects within each other; Python's own bound depends on the depth of all calls
# Raised where a made-up description reaches code that expects other types: codecs, growth rules, layouts.
INVALID = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
Array = mx.array
Count = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]


class Part(Struct, forbid_unknown_fields=True):
    """An object in JSON."""


class Listed(Struct, array_like=True, forbid_unknown_fields=True):
    """A list in JSON: fields in this order."""


def decode(tree: object, kind: type[T], arrays: dict[str, mx.array] | None = None) -> T:
    """Parsed JSON as a type of this schema.

    Args:
        tree: also with arrays themselves in place of their names.
        arrays: by name; those that are named are removed from it.

    Raises:
        ValueError: the tree does not follow the schema.
    """
    left = {} if arrays is None else arrays

    def array(_: type, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if value.keys() != {"array"}:
            raise ValueError("something else than the name of an array")
        return take(left, value["array"])

    try:
        return msgspec.convert(tree, kind, dec_hook=array)
    except msgspec.ValidationError as error:
        raise ValueError(in_one_line(error)) from error


def in_one_line(error: Exception) -> str:
    """The beginning of the message of an error of this package or of msgspec; other errors have no useful one."""
    if not isinstance(error, ValueError | msgspec.ValidationError):
        return "a cache in it is not valid"
    return " ".join(str(error).split())[:300]


def take(arrays: dict[str, mx.array], name: object) -> mx.array:
    """Removes an array from those of a file. Raises ValueError where there is none of this name."""
    if not isinstance(name, str) or name not in arrays:
        raise ValueError(f"it needs an array {str(name)[:40]!r} that the file does not have")
    return arrays.pop(name)


def check_shape(x: mx.array | None, axes: str, sizes: dict[str, int], dtype: mx.Dtype | None = None) -> None:
    """Checks an array, if there is one.

    Args:
        axes: such as "B H n": a letter of `sizes` is that size, another any size, which is added to it.
        dtype: None is any floating point.

    Raises:
        ValueError: another shape or dtype.
    """
    if x is None:
        return
    names = axes.split()
    if x.ndim != len(names) or any(sizes.setdefault(*each) != each[1] for each in zip(names, x.shape, strict=True)):
        raise ValueError(f"an array of shape {x.shape} in place of {axes}")
    if x.dtype != dtype if dtype is not None else not mx.issubdtype(x.dtype, mx.floating):
        raise ValueError(f"an array of {x.dtype}")


class DuplicateKeyError(ValueError):
    """An object with a duplicate name.

    Attributes:
        key: the name.
    """

    def __init__(self, key: str) -> None:
        super().__init__(f"{key[:80]!r} appears twice: send it once")
        self.key = key


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of its pairs: the `object_pairs_hook` of `json.loads`.

    Raises:
        DuplicateKeyError: a name is there twice.
    """
    made = dict(pairs)
    if len(made) < len(pairs):
        ((most, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise DuplicateKeyError(most)
    return made


def read_json(raw: bytes | str) -> Any:
    """Parses JSON of finite numbers: Python's own parser accepts NaN, and 1e400 as infinity.

    Raises:
        ValueError: it is no JSON, is nested too deeply, has a number that no float can hold, or a duplicate name.
    """

    def constant(text: str) -> Never:
        raise ValueError(f"{text} is not a number there")

    def finite(text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            raise ValueError(f"{text[:40]} is too large a number")
        return number

    too_deep = f"it is nested more than {MAX_NESTED} deep"
    try:
        value = json.loads(raw, parse_constant=constant, parse_float=finite, object_pairs_hook=unique_keys)
    except RecursionError:
        raise ValueError(too_deep) from None
    opened = (raw.count(b"[") + raw.count(b"{")) if isinstance(raw, bytes) else (raw.count("[") + raw.count("{"))
    if opened > MAX_NESTED and _is_deeper(value, MAX_NESTED):  # most JSON has fewer
        raise ValueError(too_deep)
    return value


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        if not level:
            break
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [one for each in inner for one in each if isinstance(one, (dict, list))]  # a tuple is faster here
    return bool(level)
