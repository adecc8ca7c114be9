"""Safetensors files and strict JSON: what a file or a request holds, with every check before any use.

Safetensors files are named arrays and metadata, written atomically. The format is parsed here and not by MLX or the
safetensors library, because a file may be cut off, altered or made up: sizes are compared with the size of the file
before anything is allocated, nothing is read later, and the digest of an array is computed of the bytes that it is made
of. The safetensors library holds all bytes twice, and with digests takes a third longer. The format: 8 bytes with the
length of a header, the header in JSON, the bytes of all arrays.

JSON is decoded by msgspec: types, ranges and fields, and the shapes of arrays.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Annotated, Any, Never, TypeVar

import mlx.core as mx
import msgspec
from msgspec import Meta, Struct

from mlx_kv.cache.checks import Count
from mlx_kv.files.atomic_write import atomic_write, regular_file

T = TypeVar("T")
MAX_NESTED = 128  # arrays and objects within each other; Python's own bound depends on the depth of all calls
# Raised where a made-up description reaches code that expects other types: codecs, growth rules, layouts.
INVALID = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
Array = mx.array
MAX_HEADER_BYTES = 100_000_000  # as in the safetensors library
Offset = Annotated[int, Meta(ge=0, le=2**63 - 1)]
DTYPES = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "F32": mx.float32,
    "U64": mx.uint64,
    "I64": mx.int64,
    "C64": mx.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


# --- JSON -------------------------------------------------------------------------------------------------------------


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
    tree = dict(pairs)
    if len(tree) < len(pairs):
        ((most, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise DuplicateKeyError(most)
    return tree


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


# --- arrays as bytes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Content:
    """An array as bytes in row-major order, which any thread can read or write without MLX.

    Attributes:
        dtype: a key of `DTYPES`.
    """

    dtype: str
    shape: tuple[int, ...]
    bytes: bytearray | memoryview

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].size

    def digest(self, name: str) -> str:
        """Of the name, the dtype, the shape and the bytes."""
        digest = hashlib.blake2b(f"{name} {self.dtype} {list(self.shape)} ".encode(), digest_size=16)
        digest.update(self.bytes)
        return digest.hexdigest()

    def array(self) -> mx.array:
        """Evaluated."""
        if not self.bytes:
            return mx.zeros(self.shape, DTYPES[self.dtype])
        words: Any = memoryview(self.bytes)
        array = mx.array(words).view(DTYPES[self.dtype]).reshape(self.shape)
        mx.eval(array)
        return array


def contents(arrays: Mapping[str, mx.array]) -> dict[str, Content]:
    """Arrays as bytes; only a part of another array is copied.

    Raises:
        ValueError: an array has a dtype that no file can hold.
    """
    contents_by_name = {}
    for name, array in arrays.items():
        if array.dtype not in NAMES:
            raise ValueError(f"array {name} is {array.dtype}, which these files do not hold: convert it first")
        words: Any = mx.contiguous(array).reshape(-1).view(mx.uint8)
        contents_by_name[name] = Content(NAMES[array.dtype], array.shape, memoryview(words))
    return contents_by_name


@dataclass(frozen=True)
class TensorFile:
    """The contents of a file.

    Attributes:
        words: its metadata.
        contents: the arrays, by name.
        digests: of the arrays, computed when they were read.
    """

    words: dict[str, str]
    contents: dict[str, Content]
    digests: dict[str, str]

    @cached_property
    def arrays(self) -> dict[str, mx.array]:
        """By name, evaluated; made by the thread that accesses it first."""
        return {name: content.array() for name, content in self.contents.items()}


# --- writing ----------------------------------------------------------------------------------------------------------


def write(path: str | Path, arrays: Mapping[str, mx.array], words: Mapping[str, str]) -> None:
    """Writes a file atomically; it is on the disk when this returns.

    Raises:
        ValueError: the folder does not exist, the path is one, or an array has a dtype that no file can hold.
        OSError: it cannot be written.
    """
    write_contents(path, contents(arrays), words)


def write_contents(path: str | Path, named: Mapping[str, Content], words: Mapping[str, str], mode: int = 0o666) -> None:
    """As `write`, in any thread.

    Args:
        mode: of a new file, as of `atomic_write`.
    """
    header: dict[str, Any] = {"__metadata__": dict(words)}
    last = 0
    for name, content in named.items():
        first, last = last, last + len(content.bytes)
        header[name] = {"dtype": content.dtype, "shape": list(content.shape), "data_offsets": [first, last]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"the header would have {len(text):,} bytes, of at most {MAX_HEADER_BYTES:,}: save less")
    with atomic_write(path, mode) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for content in named.values():
            file.write(content.bytes)


# --- reading ----------------------------------------------------------------------------------------------------------


def read(path: str | Path) -> TensorFile:
    """Reads a file wholly.

    Raises:
        FileNotFoundError: it does not exist.
        ValueError: it is no regular file, no safetensors file, or cut off, or longer than its header says.
    """
    regular_file(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        words, headers = _read_header(path, file, size)
        named, digests = {}, {}
        for name, header in headers.items():
            first, last = header.data_offsets
            content = bytearray(last - first)
            if file.readinto(content) != len(content):
                raise ValueError(f"{path} was cut off while it was read: make it again")
            named[name] = Content(header.dtype, tuple(header.shape), content)
            digests[name] = named[name].digest(name)
    return TensorFile(words, named, digests)


def read_metadata(path: str | Path) -> dict[str, str] | None:
    """The metadata of a file, which may be cut off; None if it is no safetensors file. Raises OSError as `open`."""
    with open(path, "rb") as file:
        try:
            return _read_header(path, file, os.fstat(file.fileno()).st_size, whole=False)[0]
        except ValueError:
            return None


def has_format(path: Path, name: str) -> bool:
    """Whether a file, complete or cut off, says in its metadata that it is of a format."""
    try:
        words = read_metadata(path)
    except OSError:
        return False
    return words is not None and words.get("format") == name


class ArrayHeader(Part):
    """An array in the header of a file."""

    dtype: str
    shape: Annotated[list[Count], Meta(max_length=16)]
    data_offsets: tuple[Offset, Offset]

    def __post_init__(self) -> None:
        first, last = self.data_offsets
        if self.dtype not in DTYPES or last - first != math.prod(self.shape) * DTYPES[self.dtype].size:
            raise ValueError("a dtype or a shape that is not that of its bytes")


def _read_header(
    path: str | Path, file: IO[bytes], size: int, whole: bool = True
) -> tuple[dict[str, str], dict[str, ArrayHeader]]:
    """The metadata and the arrays of a file, these in the order of their bytes.

    Args:
        whole: whether all bytes of the arrays must be there.

    Raises:
        ValueError: it is no safetensors file, or cut off, or longer than its header says.
    """
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
        raise ValueError(
            f"{path} is not a safetensors file, or was cut off: its header has {length:,} bytes, the file {size:,}; "
            "give another, or make it again"
        )
    try:
        tree = decode(read_json(file.read(length).decode()), dict[str, Any])
        metadata = decode(tree.pop("__metadata__", {}), dict[str, str])
        headers = sorted(decode(tree, dict[str, ArrayHeader]).items(), key=lambda item: (item[1].data_offsets, item[0]))
        "".join(tree).encode()  # refuses names that are no text
    except ValueError as error:
        raise ValueError(
            f"{path} is not a safetensors file, or was damaged: its header cannot be read; give another, or make it "
            "again"
        ) from error
    ends = [0, *(header.data_offsets[1] for _, header in headers)]
    if whole and ([header.data_offsets[0] for _, header in headers] != ends[:-1] or ends[-1] != size - 8 - length):
        raise ValueError(
            f"{path} was cut off or damaged: its arrays have {ends[-1]:,} bytes, the file has {size - 8 - length:,}; "
            "make it again"
        )
    return metadata, dict(headers)
