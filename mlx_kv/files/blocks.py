"""Packed caches cut into blocks of slots, each of which becomes a file of its own, and joined again.

A block is named by a digest of its contents, so the same slots have the same name in every process. Works on bytes, in
any thread. Layers of one layout and length are cut together: each block has some slots of all of their planes, keys
and values. Slots after the last block stay with the rest: the description, and arrays that hold no slots.
H KV heads, n slots.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mlx_kv.files import tensor_files
from mlx_kv.files.schema import BlockColumn
from mlx_kv.files.serialization import PackedCaches, ReadFile
from mlx_kv.files.tensor_files import Content, TensorFile

BLOCK_WORD, VERSION = "mlx_kv_prompt_block", "1"  # in the metadata of each block
BLOCK_SLOTS = 512
LEAST_SLOTS = 64  # of a block: fewer are not worth a file


@dataclass(frozen=True)
class SlotBlock:
    """Slots [first, last) of the planes of some layers.

    Args:
        wholes: the arrays that they are a part of, by name, each (H, n, width).
    """

    wholes: dict[str, Content]
    first: int
    last: int

    @property
    def slots(self) -> int:
        return self.last - self.first

    @property
    def contents(self) -> dict[str, Content]:
        """By the same names, each (H, slots, width); copied on each access."""
        return {name: _slots(whole, self.first, self.last) for name, whole in self.wholes.items()}

    @cached_property
    def name(self) -> str:
        """32 hex digits."""
        return _name({name: content.digest(name) for name, content in self.contents.items()})

    @property
    def nbytes(self) -> int:
        return sum(len(whole.bytes) // whole.shape[1] * self.slots for whole in self.wholes.values())

    def write(self, path: str | Path) -> None:
        """Raises ValueError and OSError as `tensor_files.write`."""
        tensor_files.write_contents(path, self.contents, {BLOCK_WORD: VERSION})


def _name(digests: Mapping[str, str]) -> str:
    text = " ".join(f"{name} {digests[name]}" for name in sorted(digests))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_block(path: str | Path, name: str) -> TensorFile:
    """A block of this name.

    Raises:
        FileNotFoundError: it does not exist.
        ValueError: it is no block, has another name, or was damaged.
    """
    file = tensor_files.read(path)
    if file.words != {BLOCK_WORD: VERSION} or _name(file.digests) != name:
        raise ValueError(f"{path} was damaged: it is not what was written; make it again")
    return file


def _view(content: Content) -> np.ndarray:
    """The bytes of an array (H, n, width), as (H, n, bytes of a slot)."""
    heads, slots, width = content.shape
    return np.frombuffer(content.bytes, np.uint8).reshape(heads, slots, width * content.itemsize)


def _slots(content: Content, first: int, last: int) -> Content:
    """A copy of some slots of an array (H, n, width)."""
    part = np.ascontiguousarray(_view(content)[:, first:last])
    return Content(content.dtype, (content.shape[0], last - first, content.shape[2]), part.reshape(-1).data)


# --- cutting ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CutCaches:
    """Packed caches as blocks and the rest.

    Attributes:
        columns: of each layout, its blocks in the order of their slots.
    """

    rest: PackedCaches
    columns: list[list[SlotBlock]]


def block_ends(slots: int, wanted: Collection[int] = ()) -> list[int]:
    """Where the blocks of so many slots end: at every multiple of BLOCK_SLOTS, and at the wanted ends.

    A prompt shares blocks with an earlier one if it is cut at the same ends, as far as they have the same tokens.
    """
    ends, first = [], 0
    for end in sorted({*range(BLOCK_SLOTS, slots + 1, BLOCK_SLOTS), *wanted}):
        if end <= slots and end - first >= LEAST_SLOTS:
            ends.append(end)
            first = end
    return ends


def cut(packed: PackedCaches, wanted: Callable[[int, int], Collection[int]]) -> CutCaches:
    """Cuts all slots into blocks, except for a short rest.

    Args:
        wanted: the other ends of blocks, by the number of the column and of its slots.
    """
    rest, columns, described = dict(packed.contents), [], []
    for number, (slots, names) in enumerate(_columns(packed.description["caches"]).items()):
        ends = block_ends(slots[0], wanted(number, slots[0]))
        wholes = {name: rest[name] for name in names}
        blocks = [SlotBlock(wholes, first, last) for first, last in pairwise([0, *ends])]
        if blocks:
            rest |= {name: _slots(whole, ends[-1], slots[0]) for name, whole in wholes.items()}
            described.append({"arrays": names, "blocks": [[block.name, block.slots] for block in blocks]})
        columns.append(blocks)
    description = {**packed.description, "blocks": described} if described else packed.description
    return CutCaches(replace(packed, contents=rest, description=description), columns)


def _columns(described: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], list[str]]:
    """The arrays that hold slots, by the number of slots and the layout."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for cache in _own_caches(described):
        if len(cache["live"]) == 1:  # one sequence: what is kept of prompts
            names = [f"{cache['name']}.{which}.{i}.0" for which, count in cache["planes"].items() for i in range(count)]
            found.setdefault((cache["live"][0], *cache["state"][2]), []).extend(names)
    return {column: names for column, names in found.items() if names}


def _own_caches(described: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for cache in described:
        if cache["kind"] == "list":
            yield from _own_caches(cache["members"])
        elif cache["kind"] == "mlx-kv":
            yield cache


# --- joining ----------------------------------------------------------------------------------------------------------


def blocks_of(rest: ReadFile) -> list[list[str]]:
    """The names of the blocks that go with a rest, by column."""
    return [[name for name, _ in column.blocks] for column in _described(rest)]


def _described(rest: ReadFile) -> list[BlockColumn]:
    return [] if rest.description is None else rest.description.blocks or []


def joined(rest: ReadFile, read: Callable[[str], TensorFile]) -> ReadFile:
    """The file that would have been written in one piece.

    Args:
        read: reads the block of a name.

    Raises:
        ValueError: the blocks do not fit. Also anything that `read` raises.
    """
    contents = dict(rest.file.contents)
    for column in _described(rest):
        if any(name not in contents or len(contents[name].shape) != 3 for name in column.arrays):
            raise ValueError("its blocks are of arrays that it does not have")
        total = sum(slots for _, slots in column.blocks)
        tails = {name: contents[name] for name in column.arrays}
        wholes = {name: _with_space(tail, total) for name, tail in tails.items()}
        first = 0
        for block, slots in column.blocks:
            parts = read(block).contents
            if parts.keys() != wholes.keys():
                raise ValueError("a block of other layers")
            for name, part in parts.items():
                _put(part, wholes[name], first, slots)
            first += slots
        for name, tail in tails.items():
            _put(tail, wholes[name], first, tail.shape[1])
        contents |= wholes
    description = rest.description and msgspec.structs.replace(rest.description, blocks=msgspec.UNSET)
    return replace(rest, file=replace(rest.file, contents=contents), description=description)


def _with_space(tail: Content, slots: int) -> Content:
    """An array with space for so many slots in front of those of the tail (H, n, width)."""
    heads, more, width = tail.shape
    whole = np.empty(heads * (slots + more) * width * tail.itemsize, np.uint8)
    return Content(tail.dtype, (heads, slots + more, width), whole.data)


def _put(part: Content, whole: Content, first: int, slots: int) -> None:
    """Copies all slots of a part into the whole."""
    if (part.dtype, part.shape) != (whole.dtype, (whole.shape[0], slots, whole.shape[2])):
        raise ValueError("a block of other shapes")
    _view(whole)[:, first : first + slots] = _view(part)
