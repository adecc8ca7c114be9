"""The files of a store's entries: how one comes to be and to go, so that nobody ever finds half of one.

Decides their order (data before its index, and an index gone before its data), what an index says and when it is not
believed, and what of killed writers is removed. Knows nothing about which entry serves a prompt, nor when one is
superfluous (`store`), which files of a folder are a store's (`directory`), nor how caches are written to one
(`serialization`).

    <id>.used          when it was last of use
    <id>.safetensors   the caches, with a checksum
    <id>.json          tokens, bytes, how far back it can be trimmed, and a checksum; written last
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import uuid
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_kv.files import serialization
from mlx_kv.prefixes.directory import StoreFolder, id_of, indexed
from mlx_kv.prefixes.index import Entry, packed

VERSION = 2
MOST_NUMBER = 2**62  # bytes of an entry: more is no number of bytes
ORPHANED_AFTER = 3600.0  # seconds; data without an index is a writer at work, or one that was killed


@dataclass(frozen=True)
class PackedEntry:
    """What is to become an entry.

    Attributes:
        fingerprint: whose it is.
    """

    entry: Entry
    fingerprint: str
    caches: serialization.PackedCaches


def pack(entry: Entry, fingerprint: str, caches: Sequence[Any]) -> PackedEntry:
    """An entry of these caches as they are now; its data say of which tokens and whose they are."""
    told = {"store_tokens": _digest(entry, fingerprint)}
    return PackedEntry(entry, fingerprint, serialization.pack(list(caches), told))


class EntryFiles:
    """Args:
        directory: a path or a URL of fsspec; made if not there.

    Raises:
        ValueError: it cannot be used, or holds other things than a store.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = StoreFolder(directory)
        self._folder = self._directory.folder
        self._not_ours: set[str] = set()  # files that were looked into

    def locked(self) -> AbstractContextManager[None]:
        """One process at a time decides what leaves."""
        return self._directory.locked()

    # --- coming -----------------------------------------------------------------------------------------------------

    def new_name(self) -> str:
        return uuid.uuid4().hex

    def write(self, name: str, new: PackedEntry) -> None:
        """Its index last. Raises whatever the file system does; then some of it may be there."""
        self._folder.write_by(f"{name}.safetensors", new.caches.write)
        self._folder.write(f"{name}.json", index_of(new.entry, new.fingerprint))

    def touch(self, name: str, now: float) -> None:
        """Says to all processes that it is of use, if it can be said."""
        with contextlib.suppress(OSError):
            self._folder.write(f"{name}.used", str(now).encode())

    # --- being there ------------------------------------------------------------------------------------------------

    def files(self) -> tuple[list[str], set[str]]:
        """The names of all files, and the entries that have an index."""
        files = self._folder.names()
        return files, indexed(files)

    def index(self, name: str) -> tuple[Entry, str] | None:
        """What the index of an entry says, and whose it is; None if it is of another version.

        Raises:
            OSError: it cannot be read.
            ValueError, TypeError, KeyError, RecursionError: it is no index, or was damaged.
        """
        return entry_of(self._folder.read(f"{name}.json"))

    def read(self, name: str, entry: Entry, fingerprint: str) -> serialization.ReadFile:
        """The data of an entry.

        Raises:
            FileNotFoundError: they are gone.
            ValueError: they were damaged, or are of other tokens or of another model than the index says.
        """
        with self._folder.as_local(f"{name}.safetensors") as path:
            file = serialization.read(path)
        told = {} if file.description is None else dict(file.description["metadata"])
        if told.get("store_tokens") != _digest(entry, fingerprint):
            raise ValueError("its tokens are not those of its index")
        return file

    def last_used(self, name: str) -> float:
        """When an entry was last of use to any process, in seconds since 1970; 0 where nobody knows."""
        try:
            return float(self._folder.read(f"{name}.used"))
        except (OSError, ValueError):
            return 0.0

    # --- going ------------------------------------------------------------------------------------------------------

    def remove(self, name: str) -> None:
        """Its index first: nobody finds half an entry."""
        for suffix in ("json", "safetensors", "used"):
            self._folder.delete(f"{name}.{suffix}")

    def set_aside(self, name: str, most_bytes: int) -> None:
        """Removes an entry, but keeps its data in `damaged/`, where all that was set aside has so many bytes."""
        self._directory.set_aside(f"{name}.safetensors", most_bytes)
        self.remove(name)

    def sweep(self, files: Sequence[str], known: AbstractSet[str]) -> None:
        """Removes what killed writers left of other entries than these, where it is certain that it was a store's."""
        for file in sorted(files):  # an index before its data, which tell whose it is if it cannot
            name = id_of(file)
            if name is None or name in known or file in self._not_ours:
                continue
            age = self._folder.age(file)
            if age is None or min(age, time.time() - self.last_used(name)) <= ORPHANED_AFTER:
                continue
            with contextlib.suppress(OSError):
                if self._directory.wrote(file):
                    self._folder.delete(file)
                else:
                    self._not_ours.add(file)


# --- the index of an entry --------------------------------------------------------------------------------------------


def index_of(entry: Entry, fingerprint: str) -> bytes:
    told = {"tokens": np.frombuffer(entry.tokens, ">u4").tolist(), "bytes_live": entry.bytes, "least": entry.least}
    told |= {"fingerprint": fingerprint, "version": VERSION}
    return json.dumps(told | {"checksum": checksum(told)}).encode()


def entry_of(content: bytes) -> tuple[Entry, str] | None:
    """The entry of an index, and whose it is; None if it is of another version.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: it is no index, or was damaged.
    """
    told = json.loads(content)
    if type(told["version"]) is not int:
        raise ValueError("a version that is no number")
    if told["version"] != VERSION:
        return None
    seal = told.pop("checksum", None)  # 0.1.0 wrote none
    if seal is not None and seal != checksum(told):
        raise ValueError("it is not what was written")
    tokens, numbers, fingerprint = told["tokens"], (told["bytes_live"], told["least"]), told["fingerprint"]
    if type(tokens) is not list or not all(type(token) is int and 0 <= token < 2**32 for token in tokens):
        raise ValueError("tokens that are none")
    if not all(type(number) is int for number in numbers) or type(fingerprint) is not str:
        raise ValueError("a number that is none")
    if not (0 <= numbers[0] < MOST_NUMBER and 0 <= numbers[1] <= len(tokens)):
        raise ValueError("numbers that cannot be")
    return Entry(packed(tokens), *numbers), fingerprint


def checksum(told: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=16).hexdigest()


def _digest(entry: Entry, fingerprint: str) -> str:
    return hashlib.blake2b(fingerprint.encode() + b"," + entry.tokens, digest_size=16).hexdigest()
