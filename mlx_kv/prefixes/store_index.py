"""Entries of a prompt store: cut into blocks to be written, and as index files.

An index file is JSON with a checksum. Its format has versions: 2 without blocks (0.1.0 wrote no checksum), 3 with.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from mlx_kv.files import blocks, serialization
from mlx_kv.files.decoding import decode, read_json
from mlx_kv.prefixes.index import Entry

VERSION, VERSION_WITH_BLOCKS = 2, 3
MAX_NUMBER = 2**62  # bytes of an entry, and slots
ID = "[0-9a-f]{32}"  # of entries and blocks


Positive = Annotated[int, Meta(gt=0, lt=MAX_NUMBER)]
IndexedBlock = tuple[Annotated[str, Meta(pattern=rf"\A{ID}\Z")], Positive, Positive]  # name, slots, bytes


@dataclass(frozen=True)
class IndexedEntry(Entry):
    """An entry with the blocks of its slots.

    Attributes:
        columns: for each layout, its blocks in the order of their slots.
    """

    columns: tuple[tuple[IndexedBlock, ...], ...] = ()

    @cached_property
    def blocks(self) -> dict[str, int]:
        return {name: nbytes for column in self.columns for name, _, nbytes in column}


@dataclass(frozen=True)
class PackedEntry:
    """An entry to be written, its caches as bytes."""

    name: str
    entry: Entry
    caches: serialization.PackedCaches


def pack(name: str, entry: Entry, caches: Sequence[Any], more: int = 0) -> PackedEntry:
    """Packs caches, and sets the bytes of the entry; the data carry a digest of tokens and fingerprint.

    Args:
        more: bytes of the largest shard beyond those of this one.
    """
    packed = serialization.pack(list(caches), {"store_tokens": tokens_digest(entry)})
    return PackedEntry(name, replace(entry, bytes=packed.nbytes + more), packed)


def cut(new: PackedEntry, nearest: tuple[IndexedEntry, int] | None) -> tuple[IndexedEntry, blocks.CutCaches]:
    """Cuts a packed entry into blocks.

    Blocks end where those of the nearest entry do, so that both share them, and where the two diverge, so that the next
    entry that diverges there shares that block, too.

    Args:
        nearest: the entry with the longest common prefix, and its length in tokens.
    """

    def wanted_ends(column: int, slots: int) -> list[int]:
        if nearest is None or slots != len(new.entry):  # if slots are not positions, all are cut alike
            return []
        other, shared = nearest
        columns = other.columns[column : column + 1]
        ends = [end for end in accumulate(slots for blocks in columns for _, slots, _ in blocks) if end <= shared]
        return ends if shared == len(other) else [*ends, shared]

    caches, entry = blocks.cut(new.caches, wanted_ends), new.entry
    columns = tuple(tuple((block.name, block.slots, block.nbytes) for block in column) for column in caches.columns)
    return IndexedEntry(entry.tokens, entry.bytes, entry.least, entry.fingerprint, columns), caches


class IndexFile(Struct):
    """The fields of an index file; 0.1.0 wrote no checksum."""

    version: int
    tokens: list[Annotated[int, Meta(ge=0, lt=2**32)]]
    bytes_live: Annotated[int, Meta(ge=0, lt=MAX_NUMBER)]
    least: Annotated[int, Meta(ge=0)]
    fingerprint: str
    blocks: tuple[tuple[IndexedBlock, ...], ...] | None = None
    checksum: str | None = None


def encode_index(entry: IndexedEntry) -> bytes:
    """The content of an index file."""
    fields: dict[str, Any] = {"tokens": np.frombuffer(entry.tokens, ">u4").tolist(), "bytes_live": entry.bytes}
    fields |= {"least": entry.least, "fingerprint": entry.fingerprint, "version": VERSION}
    if entry.blocks:
        fields |= {"version": VERSION_WITH_BLOCKS, "blocks": entry.columns}
    return json.dumps(fields | {"checksum": checksum(fields)}).encode()


def decode_index(content: bytes) -> IndexedEntry | frozenset[str]:
    """The entry of an index file; of another version, the blocks that it may use.

    Raises:
        ValueError: it is not an index, or damaged.
    """
    fields = read_json(content)
    version = fields.get("version") if isinstance(fields, dict) else None
    if type(version) is int and version not in (VERSION, VERSION_WITH_BLOCKS):
        return frozenset(re.findall(ID, json.dumps(fields.get("blocks"))))
    index = decode(fields, IndexFile)
    seal = fields.pop("checksum", None)
    if seal != checksum(fields) and (seal is not None or version != VERSION):
        raise ValueError("it is not what was written")
    if index.least > len(index.tokens) or (index.blocks is None) != (version == VERSION):
        raise ValueError("fields that do not fit each other")
    tokens = np.array(index.tokens, ">u4").tobytes()
    return IndexedEntry(tokens, index.bytes_live, index.least, index.fingerprint, index.blocks or ())


def checksum(fields: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()


def tokens_digest(entry: Entry) -> str:
    """Of the tokens and the fingerprint of an entry."""
    return hashlib.blake2b(entry.fingerprint.encode() + b"," + entry.tokens, digest_size=16).hexdigest()
