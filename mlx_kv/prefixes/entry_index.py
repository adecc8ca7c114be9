"""What the index of an entry says, as JSON: tokens, whose they are, bytes, and which blocks it holds.

Decides when an index is not believed, and how much of one of another version is. An entry without blocks has the
version of the time before there were any. Knows nothing about files.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mlx_kv.prefixes.index import Entry, packed

VERSION, VERSION_WITH_BLOCKS = 2, 3
MOST_NUMBER = 2**62  # bytes of an entry: more is no number of bytes
BLOCK_NAME = re.compile("[0-9a-f]{32}")


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
    told: dict[str, Any] = {"tokens": np.frombuffer(entry.tokens, ">u4").tolist(), "bytes_live": entry.bytes}
    told |= {"least": entry.least, "fingerprint": known.fingerprint, "version": VERSION}
    if known.blocks:
        told |= {"version": VERSION_WITH_BLOCKS, "blocks": known.columns}
    return json.dumps(told | {"checksum": checksum(told)}).encode()


def read_index(content: bytes) -> IndexedEntry | IndexOfOthers:
    """What an index says.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: it is no index, or was damaged.
    """
    told = json.loads(content)
    version = told["version"]
    if type(version) is not int:
        raise ValueError("a version that is no number")
    if version not in (VERSION, VERSION_WITH_BLOCKS):  # whatever it is, it says of its blocks here
        return IndexOfOthers(frozenset(BLOCK_NAME.findall(json.dumps(told.get("blocks")))))
    seal = told.pop("checksum", None)  # 0.1.0 wrote none
    if seal != checksum(told) and (seal is not None or version != VERSION):
        raise ValueError("it is not what was written")
    tokens, numbers, fingerprint = told["tokens"], (told["bytes_live"], told["least"]), told["fingerprint"]
    if type(tokens) is not list or not all(type(token) is int and 0 <= token < 2**32 for token in tokens):
        raise ValueError("tokens that are none")
    if not all(type(number) is int for number in numbers) or type(fingerprint) is not str:
        raise ValueError("a number that is none")
    if not (0 <= numbers[0] < MOST_NUMBER and 0 <= numbers[1] <= len(tokens)):
        raise ValueError("numbers that cannot be")
    columns = tuple(tuple(map(_block, column)) for column in told["blocks"]) if version != VERSION else ()
    return IndexedEntry(Entry(packed(tokens), *numbers), fingerprint, columns)


def _block(told: Any) -> tuple[str, int, int]:
    name, slots, nbytes = told
    if type(name) is not str or BLOCK_NAME.fullmatch(name) is None:
        raise ValueError("a block that has no name")
    if not all(type(number) is int and 0 < number < MOST_NUMBER for number in (slots, nbytes)):
        raise ValueError("numbers of a block that cannot be")
    return name, slots, nbytes


def checksum(told: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=16).hexdigest()


def tokens_digest(entry: Entry, fingerprint: str) -> str:
    """Of the tokens of an entry, and whose they are."""
    return hashlib.blake2b(fingerprint.encode() + b"," + entry.tokens, digest_size=16).hexdigest()
