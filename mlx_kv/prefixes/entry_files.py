"""The files of a store's entries: written and removed in an order in which no reader finds half of one.

Data is written before its index, and an index is removed before its data. What killed writers left is removed. An index
is JSON; one that fails its checksum is not used, and one of another version is read as far as it can be. Which entry
serves a prompt, and when one is removed, is decided in `store`; which files of a folder are a store's in `directory`.

    <id>.used          when it was last of use
    <digest>.block     slots that other entries may have, too
    <id>.safetensors   the rest of the caches, with a checksum
    <id>.json          tokens, bytes, how far back it can be trimmed, which blocks, and a checksum; written last
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mlx_kv.files import blocks, serialization
from mlx_kv.files.tensor_files import TensorFile
from mlx_kv.prefixes.directory import StoreFolder, blocks_among, id_of, indexed
from mlx_kv.prefixes.index import Entry, packed

MOST_NUMBER = 2**62  # bytes of an entry: more is no number of bytes
BLOCK_NAME = re.compile("[0-9a-f]{32}")
MOST_INDEXES = 64  # read at once
ORPHANED_AFTER = 3600.0  # seconds; data without an index is a writer at work, or one that was killed


@dataclass(frozen=True)
class PackedEntry:
    """What is to become an entry.

    Attributes:
        name: that it is to have.
        fingerprint: whose it is.
    """

    name: str
    entry: Entry
    fingerprint: str
    caches: serialization.PackedCaches


@dataclass(frozen=True)
class CutEntry:
    """The same, cut into blocks."""

    indexed: IndexedEntry
    caches: blocks.CutCaches


class DamagedBlockError(ValueError):
    """A block is not what was written.

    Attributes:
        name: of the block.
    """

    def __init__(self, name: str, why: object) -> None:
        super().__init__(str(why))
        self.name = name


def pack(name: str, entry: Entry, fingerprint: str, caches: Sequence[Any], more: int = 0) -> PackedEntry:
    """An entry of these caches as they are now, and its bytes; its data say of which tokens and whose they are.

    Args:
        more: bytes that another part of it has.
    """
    told = {"store_tokens": tokens_digest(entry, fingerprint)}
    found = serialization.pack(list(caches), told)
    return PackedEntry(name, replace(entry, bytes=found.nbytes + more), fingerprint, found)


def cut(new: PackedEntry, wanted: Callable[[int, int], Collection[int]]) -> CutEntry:
    """Cuts an entry into blocks; see `mlx_kv.files.blocks.cut`."""
    found = blocks.cut(new.caches, wanted)
    columns = tuple(tuple((block.name, block.slots, block.nbytes) for block in column) for column in found.columns)
    return CutEntry(IndexedEntry(new.entry, new.fingerprint, columns), found)


class EntryFiles:
    """The files of a store's entries, in one folder.

    Args:
        directory: a path or a URL of fsspec; made if not there.
        deadline: seconds that its answers may take, if it lies elsewhere.
        words: which part of the caches these files have; "" is all.

    Attributes:
        far: whether it lies elsewhere: each question is a request, and has its deadline, or with others `within` one.

    Raises:
        ValueError: it cannot be used, or holds other things than a store.
    """

    def __init__(self, directory: str | Path, deadline: float, words: str) -> None:
        self._directory = StoreFolder(directory, deadline, words)
        self._folder = self._directory.folder
        self.within, self.far = self._folder.within, self._folder.far
        self._not_ours: set[str] = set()  # files that were looked into

    def locked(self) -> AbstractContextManager[None]:
        """One process at a time decides what leaves."""
        return self._directory.locked()

    # --- coming -----------------------------------------------------------------------------------------------------

    def new_name(self) -> str:
        return uuid.uuid4().hex

    def write(self, name: str, new: CutEntry, there: AbstractSet[str]) -> None:
        """All of it but its index, and but for the blocks that are there.

        Raises whatever the file system does; then some of it may be there.
        """
        blocks = [block for column in new.caches.columns for block in column if block.name not in there]
        written: dict[str, Callable[[Path], object]] = {f"{block.name}.block": block.write for block in blocks}
        self._folder.write_by(written | {f"{name}.safetensors": new.caches.rest.write})

    def publish(self, name: str, new: CutEntry, files: Sequence[str]) -> None:
        """Its index, with which it is there; before that what has left meanwhile. Raises as `write`.

        Args:
            files: that are there now.
        """
        missing = new.indexed.blocks.keys() - blocks_among(files)
        if missing:
            self.write(name, new, new.indexed.blocks.keys() - missing)
        self._folder.write(f"{name}.json", index_of(new.indexed))

    def claim(self, name: str, now: float) -> None:
        """Says to all processes that it is to be, if it can be said: nobody takes it for what a killed writer left.

        Where all files are dated by one clock, its data say so themselves.
        """
        if not self._folder.far:
            self.touch(name, now)

    def touch(self, name: str, now: float) -> None:
        """Says to all processes that it is of use, if it can be said."""
        with contextlib.suppress(OSError):
            self._folder.write(f"{name}.used", str(now).encode())

    # --- being there ------------------------------------------------------------------------------------------------

    def files(self) -> tuple[list[str], set[str]]:
        """The names of all files, and the entries that have an index."""
        files = self._directory.names()
        return files, indexed(files)

    def indexes(self, names: Sequence[str]) -> Iterator[tuple[str, IndexedEntry | IndexOfOthers | Exception]]:
        """What the indexes of entries say; an OSError where one cannot be read, a ValueError where it is none.

        Elsewhere some are read at once, and an OSError ends all of it.
        """
        for some in (names[first : first + MOST_INDEXES] for first in range(0, len(names), MOST_INDEXES)):
            for name, content in zip(some, self._folder.read_each([f"{name}.json" for name in some]), strict=True):
                try:
                    yield name, content if isinstance(content, Exception) else read_index(content)
                except (ValueError, TypeError, KeyError, RecursionError) as error:
                    yield name, ValueError(f"no index: {error}")

    def read(self, name: str, known: IndexedEntry) -> serialization.ReadFile:
        """The data of an entry, its blocks among them.

        Raises:
            FileNotFoundError: they are gone, or a block is.
            DamagedBlockError: a block was damaged.
            ValueError: they were damaged, or are of other tokens or of another model than the index says.
        """
        data = f"{name}.safetensors"
        with self._folder.as_local([data, *(f"{block}.block" for block in known.blocks)], known.entry.bytes) as paths:
            rest = serialization.read(paths[data])
            told = {} if rest.description is None else dict(rest.description["metadata"])
            if told.get("store_tokens") != tokens_digest(known.entry, known.fingerprint):
                raise ValueError("its tokens are not those of its index")
            if blocks.blocks_of(rest) != [[block for block, _, _ in column] for column in known.columns if column]:
                raise ValueError("its blocks are not those of its index")
            return blocks.joined(rest, lambda block: _read_block(paths[f"{block}.block"], block))

    def dated(self, name: str) -> float:
        """The same where the last look at all files has told; else 0."""
        return max(self._folder.written(f"{name}.{suffix}") or 0.0 for suffix in ("used", "json"))

    def last_used(self, name: str) -> float:
        """When an entry was last of use to any process, in seconds since 1970; 0 where nobody knows."""
        if dated := self.dated(name):
            return dated
        try:
            return float(self._folder.read(f"{name}.used"))
        except (OSError, ValueError):
            return 0.0

    # --- going ------------------------------------------------------------------------------------------------------

    def remove(self, name: str) -> None:
        """Its index first: nobody finds half an entry."""
        self._folder.delete(f"{name}.json")
        self._folder.delete(f"{name}.safetensors", f"{name}.used")

    def is_old(self, name: str) -> bool:
        """Whether an entry was written so long ago that nobody is at it any more."""
        age = self._folder.age(f"{name}.json")
        return age is not None and age > ORPHANED_AFTER

    def remove_blocks(self, *names: str) -> None:
        self._folder.delete(*(f"{name}.block" for name in names))

    def set_aside(self, name: str, most_bytes: int) -> None:
        """Removes an entry, but keeps its data in `damaged/`, where all that was set aside has so many bytes."""
        self._directory.set_aside(f"{name}.safetensors", most_bytes)
        self.remove(name)

    def set_block_aside(self, name: str, most_bytes: int) -> None:
        """The same of a block. Whoever keeps what was in it writes it again."""
        self._directory.set_aside(f"{name}.block", most_bytes)
        self.remove_blocks(name)

    def sweep(self, files: Sequence[str], known: AbstractSet[str]) -> None:
        """Removes what killed writers left, where it is certain that it was a store's.

        Args:
            known: entries and blocks that stay.
        """
        for file in sorted(files):  # an index before its data, which tell whose it is if it cannot
            name = id_of(file)
            if name is None or name in known or file in self._not_ours:
                continue
            age = self._folder.age(file)
            if age is None or age <= ORPHANED_AFTER or time.time() - self.last_used(name) <= ORPHANED_AFTER:
                continue
            with contextlib.suppress(OSError):
                if self._directory.wrote(file):
                    self._folder.delete(file)
                else:
                    self._not_ours.add(file)


def _read_block(path: Path, name: str) -> TensorFile:
    try:
        return blocks.read_block(path, name)
    except ValueError as error:
        raise DamagedBlockError(name, error) from error


VERSION, VERSION_WITH_BLOCKS = 2, 3
# --- what an index says -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IndexedEntry:
    """An entry as its index has it.

    Attributes:
        fingerprint: whose it is.
        columns: blocks of its slots, in their order: of each its name, slots and bytes.
    """

    entry: Entry
    fingerprint: str
    columns: tuple[tuple[tuple[str, int, int], ...], ...] = ()

    @cached_property
    def blocks(self) -> dict[str, int]:
        """The bytes of each block, by its name."""
        return {name: nbytes for column in self.columns for name, _, nbytes in column}

    @property
    def own_bytes(self) -> int:
        """Bytes that lie in no block."""
        return max(0, self.entry.bytes - sum(self.blocks.values()))


@dataclass(frozen=True)
class IndexOfOthers:
    """An index of another version.

    Attributes:
        blocks: names of all that it may hold.
    """

    blocks: frozenset[str]


def index_of(known: IndexedEntry) -> bytes:
    entry = known.entry
    fields: dict[str, Any] = {"tokens": np.frombuffer(entry.tokens, ">u4").tolist(), "bytes_live": entry.bytes}
    fields |= {"least": entry.least, "fingerprint": known.fingerprint, "version": VERSION}
    if known.blocks:
        fields |= {"version": VERSION_WITH_BLOCKS, "blocks": known.columns}
    return json.dumps(fields | {"checksum": checksum(fields)}).encode()


def read_index(content: bytes) -> IndexedEntry | IndexOfOthers:
    """What an index says.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: it is no index, or was damaged.
    """
    fields = json.loads(content)
    version = fields["version"]
    if type(version) is not int:
        raise ValueError("a version that is no number")
    if version not in (VERSION, VERSION_WITH_BLOCKS):  # whatever it is, it says of its blocks here
        return IndexOfOthers(frozenset(BLOCK_NAME.findall(json.dumps(fields.get("blocks")))))
    seal = fields.pop("checksum", None)  # 0.1.0 wrote none
    if seal != checksum(fields) and (seal is not None or version != VERSION):
        raise ValueError("it is not what was written")
    tokens, numbers, fingerprint = fields["tokens"], (fields["bytes_live"], fields["least"]), fields["fingerprint"]
    if type(tokens) is not list or not all(type(token) is int and 0 <= token < 2**32 for token in tokens):
        raise ValueError("tokens that are none")
    if not all(type(number) is int for number in numbers) or type(fingerprint) is not str:
        raise ValueError("a number that is none")
    if not (0 <= numbers[0] < MOST_NUMBER and 0 <= numbers[1] <= len(tokens)):
        raise ValueError("numbers that cannot be")
    columns = tuple(tuple(map(_block, column)) for column in fields["blocks"]) if version != VERSION else ()
    return IndexedEntry(Entry(packed(tokens), *numbers), fingerprint, columns)


def _block(block: Any) -> tuple[str, int, int]:
    name, slots, nbytes = block
    if type(name) is not str or BLOCK_NAME.fullmatch(name) is None:
        raise ValueError("a block that has no name")
    if not all(type(number) is int and 0 < number < MOST_NUMBER for number in (slots, nbytes)):
        raise ValueError("numbers of a block that cannot be")
    return name, slots, nbytes


def checksum(fields: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()


def tokens_digest(entry: Entry, fingerprint: str) -> str:
    """Of the tokens of an entry, and whose they are."""
    return hashlib.blake2b(fingerprint.encode() + b"," + entry.tokens, digest_size=16).hexdigest()
