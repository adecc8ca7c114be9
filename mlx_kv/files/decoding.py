"""Typed decoding of what files say, by msgspec: strict types, ranges and fields, and the shapes of arrays."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import mlx.core as mx
import msgspec
from msgspec import Meta, Struct

from mlx_kv.cache.checks import MOST_TOKENS

T = TypeVar("T")
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
