"""Safetensors files: named arrays and words in, the same out, or a refusal in one line.

Decides which files are not even looked into. It parses the format itself, because a file may be cut off, altered or
made up: nothing is trusted before it was compared with the size of the file, nothing is left to be read later, and an
array's digest is of the very bytes that it is made of. Knows nothing about caches, nor how a file comes to be whole or
not at all (`replacing`). The format: 8 bytes with the length of a header, the header in JSON, the bytes of all arrays.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import mlx.core as mx

from mlx_kv.files.replacing import regular, replacing

MOST_HEADER_BYTES = 100_000_000  # what the safetensors library allows, too
MOST_AXES, MOST_ELEMENTS = 16, 2**31 - 1
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


@dataclass(frozen=True)
class Content:
    """An array as bytes in row-major order: what any thread can read or write, without MLX.

    Attributes:
        dtype: by its name in a file.
    """

    dtype: str
    shape: tuple[int, ...]
    bytes: bytearray | memoryview

    def digest(self, name: str) -> str:
        """Of the name, the dtype, the shape and the bytes."""
        sealed = hashlib.blake2b(f"{name} {self.dtype} {list(self.shape)} ".encode(), digest_size=16)
        sealed.update(self.bytes)
        return sealed.hexdigest()

    def array(self) -> mx.array:
        """Evaluated."""
        if not self.bytes:
            return mx.zeros(self.shape, DTYPES[self.dtype])
        words: Any = memoryview(self.bytes)
        array = mx.array(words).view(DTYPES[self.dtype]).reshape(self.shape)
        mx.eval(array)
        return array


def contents(arrays: Mapping[str, mx.array]) -> dict[str, Content]:
    """Arrays as bytes, copied only where an array is a part of another.

    Raises:
        ValueError: an array has a dtype that no file can hold.
    """
    found = {}
    for name, array in arrays.items():
        if array.dtype not in NAMES:
            raise ValueError(f"array {name} is {array.dtype}, which these files do not hold: convert it first")
        words: Any = mx.contiguous(array).reshape(-1).view(mx.uint8)
        found[name] = Content(NAMES[array.dtype], array.shape, memoryview(words))
    return found


@dataclass(frozen=True)
class TensorFile:
    """What a file holds.

    Attributes:
        words: the header's metadata.
        contents: of the arrays, by name.
        digests: of the arrays, as they were read.
    """

    words: dict[str, str]
    contents: dict[str, Content]
    digests: dict[str, str]

    @cached_property
    def arrays(self) -> dict[str, mx.array]:
        """By name, evaluated; made by the thread that asks first."""
        return {name: content.array() for name, content in self.contents.items()}


# --- writing ----------------------------------------------------------------------------------------------------------


def write(path: str | Path, arrays: Mapping[str, mx.array], words: Mapping[str, str]) -> None:
    """Writes a file that is there whole, and on the disk, when this returns; until then the old one is.

    Raises:
        ValueError: there is no such folder, the path is one, or an array has a dtype that no file can hold.
        OSError: it cannot be written.
    """
    write_contents(path, contents(arrays), words)


def write_contents(path: str | Path, named: Mapping[str, Content], words: Mapping[str, str]) -> None:
    """As `write`, in any thread."""
    header: dict[str, Any] = {"__metadata__": dict(words)}
    last = 0
    for name, content in named.items():
        first, last = last, last + len(content.bytes)
        header[name] = {"dtype": content.dtype, "shape": list(content.shape), "data_offsets": [first, last]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MOST_HEADER_BYTES:
        raise ValueError(f"the header would have {len(text):,} bytes, of at most {MOST_HEADER_BYTES:,}: save less")
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for content in named.values():
            file.write(content.bytes)


# --- reading ----------------------------------------------------------------------------------------------------------


def read(path: str | Path) -> TensorFile:
    """Reads a file wholly.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is no regular file, no safetensors file, or cut off, or longer than it says.
    """
    regular(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        words, headers = _read_header(path, file, size)
        named, digests = {}, {}
        for first, last, name, dtype, shape in headers:
            content = bytearray(last - first)
            if file.readinto(content) != len(content):
                raise ValueError(f"{path} was cut off while it was read: make it again")
            named[name] = Content(dtype, shape, content)
            digests[name] = named[name].digest(name)
    return TensorFile(words, named, digests)


def words_of(file: IO[bytes], size: int) -> dict[str, str] | None:
    """The metadata of a safetensors file that is open and has so many bytes, whole or not; None if it is none."""
    try:
        return _read_header("", file, size, whole=False)[0]
    except ValueError:
        return None


ArrayHeader = tuple[int, int, str, str, tuple[int, ...]]  # first and last byte, name, dtype, shape


def _read_header(
    path: str | Path, file: IO[bytes], size: int, whole: bool = True
) -> tuple[dict[str, str], list[ArrayHeader]]:
    """The words and the arrays of a file, these in the order of their bytes, after every check that there is."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or not 2 <= length <= min(size - 8, MOST_HEADER_BYTES):
        raise ValueError(
            f"{path} is no safetensors file, or was cut off: its header has {length:,} bytes, the file {size:,}; "
            "give another, or make it again"
        )
    try:
        header = json.loads(file.read(length).decode("utf-8"))
        words = header.pop("__metadata__", {})
        headers = sorted(_array_header(name, told) for name, told in header.items())
        if not all(isinstance(word, str) for word in words.values()):
            raise ValueError("metadata that is no text")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{path} is no safetensors file, or was damaged: its header cannot be read; give another, or make it again"
        ) from error
    ends = [0, *(last for _, last, *_ in headers)]
    if not whole:
        return words, headers
    if [first for first, *_ in headers] != ends[:-1] or ends[-1] != size - 8 - length:
        raise ValueError(
            f"{path} was cut off or damaged: its arrays have {ends[-1]:,} bytes, the file has {size - 8 - length:,}; "
            "make it again"
        )
    return words, headers


def _array_header(name: str, told: Any) -> ArrayHeader:
    """One array of the header.

    Raises:
        ValueError, TypeError, KeyError: what is told of it cannot be.
    """
    name.encode()  # refuses what is no text
    dtype, (first, last), shape = told["dtype"], told["data_offsets"], told["shape"]
    numbers = [first, last, *shape]
    if not all(type(number) is int and number >= 0 for number in numbers) or len(shape) > MOST_AXES:
        raise ValueError("a shape or an offset that is no number")
    if max(shape, default=0) > MOST_ELEMENTS or last - first != math.prod(shape) * DTYPES[dtype].size:
        raise ValueError("a shape that is not that of its bytes")
    return first, last, name, dtype, tuple(shape)
