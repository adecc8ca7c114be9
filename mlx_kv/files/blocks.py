"""Packed caches cut into blocks of slots, each to be a file of its own, and put together again.

Decides where blocks end, and what they are called: by a digest of what is in them, so the same slots have the same name
whoever writes them. Bytes alone, for any thread. Knows nothing about who refers to a block or where it lies
(`mlx_kv.prefixes`). Files of `save_prompt_cache` are never cut.

Layers of one layout and length have their slots together: each block has some slots of all of their planes, keys and
values. What is left behind the last block stays with the rest: the description, and all that is no slot.
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

from mlx_kv.files import tensor_files
from mlx_kv.files.serialization import PackedCaches, ReadFile
from mlx_kv.files.tensor_files import Content, TensorFile

BLOCK_WORD, VERSION = "mlx_kv_prompt_block", "1"  # the word's presence says that a file is one of these
BLOCK_SLOTS = 512
LEAST_SLOTS = 64  # of a block: fewer are not worth a file
MOST_SLOTS = 2**31


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
        """By the same names, each (H, slots, width); copies, made when they are asked for."""
        return {name: _slots(whole, self.first, self.last) for name, whole in self.wholes.items()}

    @cached_property
    def name(self) -> str:
        """32 hex digits."""
        return _name({name: content.digest(name) for name, content in self.contents.items()})

    @property
    def nbytes(self) -> int:
        return sum(len(whole.bytes) // whole.shape[1] * self.slots for whole in self.wholes.values())

    def write(self, path: str | Path) -> None:
        """Raises what `tensor_files.write` raises."""
        tensor_files.write_contents(path, self.contents, {BLOCK_WORD: VERSION})


def _name(digests: Mapping[str, str]) -> str:
    told = " ".join(f"{name} {digests[name]}" for name in sorted(digests))
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def read_block(path: str | Path, name: str) -> TensorFile:
    """A block of this name.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is no block, or another one, or was damaged.
    """
    file = tensor_files.read(path)
    if file.words != {BLOCK_WORD: VERSION} or _name(file.digests) != name:
        raise ValueError(f"{path} was damaged: it is not what was written; make it again")
    return file


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
    """Where the blocks of so many slots end: at every multiple of BLOCK_SLOTS, and where somebody wants one to end.

    What another prompt was cut at before, this one is cut at, too, if its ends are wanted, as far as they go.
    """
    ends, first = [], 0
    for end in sorted({*range(BLOCK_SLOTS, slots + 1, BLOCK_SLOTS), *wanted}):
        if end <= slots and end - first >= LEAST_SLOTS:
            ends.append(end)
            first = end
    return ends


def cut(packed: PackedCaches, wanted: Callable[[int, int], Collection[int]]) -> CutCaches:
    """Cuts all slots into blocks, but for a short rest.

    Args:
        wanted: where else blocks are to end, by the number of the column and of its slots.
    """
    rest, columns, told = dict(packed.contents), [], []
    for number, (slots, names) in enumerate(_columns(packed.description["caches"]).items()):
        ends = block_ends(slots[0], wanted(number, slots[0]))
        wholes = {name: rest[name] for name in names}
        blocks = [SlotBlock(wholes, first, last) for first, last in pairwise([0, *ends])]
        if blocks:
            rest |= {name: _slots(whole, ends[-1], slots[0]) for name, whole in wholes.items()}
            told.append({"arrays": names, "blocks": [[block.name, block.slots] for block in blocks]})
        columns.append(blocks)
    description = {**packed.description, "blocks": told} if told else packed.description
    return CutCaches(replace(packed, contents=rest, description=description), columns)


def _columns(described: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], list[str]]:
    """The arrays that hold slots, by how many slots that is and by the layout."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for cache in _ours(described):
        if len(cache["live"]) == 1:  # one sequence: what is kept of prompts
            names = [f"{cache['name']}.{which}.{i}.0" for which, count in cache["planes"].items() for i in range(count)]
            found.setdefault((cache["live"][0], *cache["state"][2]), []).extend(names)
    return {column: names for column, names in found.items() if names}


def _ours(described: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for cache in described:
        if cache["kind"] == "list":
            yield from _ours(cache["members"])
        elif cache["kind"] == "mlx-kv":
            yield cache


def _slots(content: Content, first: int, last: int) -> Content:
    """Some slots of an array (H, n, width)."""
    heads, slots, width = content.shape
    size = len(content.bytes) // max(1, heads * slots)
    whole = memoryview(content.bytes)
    parts = [whole[(head * slots + first) * size : (head * slots + last) * size] for head in range(heads)]
    return Content(content.dtype, (heads, last - first, width), bytearray().join(parts))


# --- putting together -------------------------------------------------------------------------------------------------


def blocks_of(rest: ReadFile) -> list[list[str]]:
    """The names of the blocks that go with a rest, by column.

    Raises:
        ValueError: it does not say so as it should.
    """
    return [[name for name, _ in blocks] for _, blocks in _told(rest)]


def _told(rest: ReadFile) -> list[tuple[list[str], list[tuple[str, int]]]]:
    told = [] if rest.description is None else rest.description.get("blocks", [])
    try:
        found = [([*column["arrays"]], [(name, slots) for name, slots in column["blocks"]]) for column in told]
        flat = [(name, slots) for _, blocks in found for name, slots in blocks]
        fit = all(type(name) is str and type(slots) is int and 0 < slots < MOST_SLOTS for name, slots in flat)
        fit = fit and all(len(rest.file.contents[name].shape) == 3 for names, _ in found for name in names)
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError("its blocks are told otherwise than blocks are") from error
    if not fit:
        raise ValueError("its blocks are none")
    return found


def joined(rest: ReadFile, read: Callable[[str], TensorFile]) -> ReadFile:
    """The file that would have been written in one piece.

    Args:
        read: reads the block of a name.

    Raises:
        ValueError: the blocks do not fit. Whatever `read` raises.
    """
    if rest.description is None:
        return rest
    contents = dict(rest.file.contents)
    for names, blocks in _told(rest):
        total = sum(slots for _, slots in blocks)
        wholes = {name: _room(contents[name], total) for name in names}
        first = 0
        for block, slots in blocks:
            parts = read(block).contents
            if parts.keys() != set(names):
                raise ValueError("a block of other layers")
            for name in names:
                _put(parts[name], wholes[name], first, slots)
            first += slots
        for name in names:
            _put(contents[name], wholes[name], first, contents[name].shape[1])
        contents |= wholes
    description = {part: told for part, told in rest.description.items() if part != "blocks"}
    return replace(rest, file=replace(rest.file, contents=contents), description=description)


def _room(tail: Content, slots: int) -> Content:
    """Room for so many slots in front of others."""
    heads, more, width = tail.shape
    size = heads * (slots + more) * width * tensor_files.DTYPES[tail.dtype].size
    return Content(tail.dtype, (heads, slots + more, width), bytearray(size))


def _put(part: Content, whole: Content, first: int, slots: int) -> None:
    """Copies all slots of a part to where they begin in the whole."""
    heads, held, width = part.shape if len(part.shape) == 3 else (0, 0, 0)
    if (part.dtype, heads, held, width) != (whole.dtype, whole.shape[0], slots, whole.shape[2]):
        raise ValueError("a block of other shapes")
    size, every = len(part.bytes) // max(1, heads * held), whole.shape[1]
    source, target = memoryview(part.bytes), memoryview(whole.bytes)
    for head in range(heads):
        place = (head * every + first) * size
        target[place : place + held * size] = source[head * held * size : (head + 1) * held * size]
