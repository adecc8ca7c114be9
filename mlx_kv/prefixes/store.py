"""A directory of processed prompts, so that a prefix is read once: across requests, processes and machines.

Decides how an entry comes to be and to go, so that nobody ever finds half of one, and what leaves when there is too
much. An entry is the caches of one token sequence. Knows nothing about which entry serves a prompt (`prefixes`), which
files of a folder are a store's (`store_folder`), how caches are written to one (`serialization`), nor about requests.

    <id>.used          when it was last of use
    <id>.safetensors   the caches, with a checksum
    <id>.json          tokens, bytes, how far back it can be trimmed, and a checksum; written last

What takes the disk's time (`refresh`, `fetch`, `write`) does nothing with MLX: another thread can do it, one at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_kv.files import serialization
from mlx_kv.files.fingerprint import Whose
from mlx_kv.generation.statistics import cache_statistics
from mlx_kv.mlxlm.convert import trim_prompt_cache
from mlx_kv.prefixes.directory import StoreFolder
from mlx_kv.prefixes.index import LEAST_SHARED, Entry, PrefixIndex, least_tokens, packed

VERSION = 2
MOST_NUMBER = 2**62  # bytes of an entry: more is no number of bytes
ORPHANED_AFTER = 3600.0  # seconds; data without an index is a writer at work, or one that was killed


@dataclass(frozen=True)
class Fetched:
    """An entry that was read for a prompt.

    Attributes:
        count: tokens of the prompt that it stands for.
        excess: tokens that its caches have read beyond them.
    """

    name: str
    count: int
    excess: int
    file: serialization.ReadFile


@dataclass(frozen=True)
class PackedEntry:
    """What is to become an entry."""

    entry: Entry
    fingerprint: str
    caches: serialization.PackedCaches


class PromptStore:
    """Processed prompts in a directory.

    Args:
        directory: a path, or any URL that fsspec knows (memory://prompts, s3://bucket/prompts); made if not there. One
            that holds other things is refused.
        max_bytes: live bytes of all entries; what was of no use for longest leaves first.
        fingerprint: entries of another model or policy are never served. None leaves it to the first `PromptReader`.

    Attributes:
        hits, misses, tokens_reused: of `find`.
        damaged: entries that were set aside.

    Raises:
        ValueError: max_bytes below 1, or a directory that cannot be used; whenever prompts are asked for or kept, that
            nobody has said whose they are.
    """

    def __init__(self, directory: str | Path, max_bytes: int = 8 * 2**30, fingerprint: str | None = None) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes}: give a number of bytes from 1 up")
        self._folder = StoreFolder(directory)
        self.max_bytes, self._whose = max_bytes, Whose("PromptStore", fingerprint)
        self.hits = self.misses = self.tokens_reused = self.damaged = 0
        self._known: dict[str, tuple[Entry, str]] = {}  # all that are there, and whose they are
        self._indexes: defaultdict[str, PrefixIndex] = defaultdict(PrefixIndex)  # by fingerprint
        self._used: dict[str, float] = {}  # when each was last of use, as far as is known: perhaps later
        self._ignored: set[str] = set()  # set aside, or not to be understood
        self._others: set[str] = set()  # of another version
        self._not_ours: set[str] = set()  # files that were looked into
        self._changing = threading.RLock()  # guards the first two: one thread serves while another refreshes

    @property
    def fingerprint(self) -> str | None:
        """Whose caches these are, as far as is known."""
        return self._whose.fingerprint

    @property
    def other_versions(self) -> int:
        """Entries of another version of the format, which are left alone, by what the last refresh saw."""
        return len(self._others)

    def bind(self, find: Callable[[], str]) -> None:
        """Keeps to the model and the policy of a first reader, unless a fingerprint was given.

        Raises:
            ValueError: there was another reader, of another model or policy.
        """
        self._whose.bind(find)

    # --- finding --------------------------------------------------------------------------------------------------

    def find(self, tokens: Sequence[int]) -> tuple[list[Any], int] | None:
        """The caches that have read most of a prompt, all but its last token at the most, and how many tokens of it.

        They are the caller's own, read from a file: nothing else holds them. None where nothing serves.
        """
        self.refresh()
        while (fetched := self.fetch(tokens)) is not None:
            caches = self.restore(fetched)
            if caches is not None:
                self.hits += 1
                self.tokens_reused += fetched.count
                return caches, fetched.count
        self.misses += 1
        return None

    def serves(self, tokens: Sequence[int]) -> int:
        """How many tokens of a prompt `fetch` would come with, by what the last refresh saw."""
        best = self._best(tokens)
        return 0 if best is None else best[1]

    def _best(self, tokens: Sequence[int]) -> tuple[str, int] | None:
        whose, wanted = self._whose.known(), packed(tokens)
        with self._changing:
            return self._indexes[whose].best(wanted)

    def refresh(self) -> None:
        """Looks which entries have come and gone. Each index is read once."""
        self._refreshed()

    def _refreshed(self) -> list[str]:
        """The same; returns the names of all files."""
        files = self._folder.files()
        names = self._folder.indexed(files)
        with self._changing:
            gone = self._known.keys() - names
        for name in gone:
            self._forget(name)
        self._others &= names
        for name in names - self._known.keys() - self._ignored - self._others:
            try:
                found = _index_entry(self._folder.read(f"{name}.json"))
            except OSError:
                continue  # it left in this moment, or it is there the next time
            except (ValueError, TypeError, KeyError, RecursionError):
                self._ignored.add(name)
                continue
            if found is None:
                self._others.add(name)
            else:
                self._learn(name, *found)
        return files

    def entries(self) -> dict[str, Entry]:
        """All entries that are there now, by name."""
        self.refresh()
        with self._changing:
            return {name: entry for name, (entry, _) in self._known.items()}

    def fetch(self, tokens: Sequence[int]) -> Fetched | None:
        """Reads the entry that stands for most of a prompt; what is gone or damaged on the way is forgotten."""
        while (best := self._best(tokens)) is not None:
            name, count = best
            try:
                entry, whose = self._known[name]
                with self._folder.as_local(f"{name}.safetensors") as path:
                    file = serialization.read(path)
                if _told(file).get("store_tokens") != _digest(entry, whose):
                    raise ValueError("its tokens are not those of its index")
            except FileNotFoundError:
                self._remove(name)  # what is left of it
            except ValueError:
                self._set_aside(name)
            except KeyError:
                pass  # it was forgotten meanwhile
            else:
                self._touch(name)
                return Fetched(name, count, len(entry) - count, file)
        return None

    def restore(self, fetched: Fetched) -> list[Any] | None:
        """The caches of what was fetched, trimmed to its count; None where they cannot be made, and never will."""
        try:
            caches = fetched.file.restore().caches
            trim_prompt_cache(caches, fetched.excess)
        except ValueError:
            self._set_aside(fetched.name)
            return None
        return caches

    # --- keeping --------------------------------------------------------------------------------------------------

    def keep(self, tokens: Sequence[int], caches: Sequence[Any]) -> bool:
        """Stores the caches that have read exactly these tokens, unless an entry serves as well; says whether it did.

        Entries that this one makes superfluous leave, and then those of least use until all fit into max_bytes.
        """
        new = self.pack(tokens, caches)
        return new is not None and self.write(new)

    def pack(self, tokens: Sequence[int], caches: Sequence[Any]) -> PackedEntry | None:
        """What `keep` would write, as the caches are now; None if it is not worth it."""
        entry = Entry(packed(tokens), cache_statistics(caches).bytes_live, least_tokens(caches, len(tokens)))
        if len(entry) < LEAST_SHARED or entry.bytes > self.max_bytes:
            return None
        whose = self._whose.known()
        return PackedEntry(entry, whose, serialization.pack(list(caches), {"store_tokens": _digest(entry, whose)}))

    def write(self, new: PackedEntry) -> bool:
        """As `keep`."""
        self.refresh()
        with self._changing:
            covering = self._indexes[new.fingerprint].covering(new.entry)
        if covering is not None:
            self._touch(covering)
            return False
        name = uuid.uuid4().hex
        self._touch(name)  # from now on nobody takes it for what a killed writer left
        try:
            self._folder.write_by(f"{name}.safetensors", new.caches.write)
            self._write(f"{name}.json", _index_text(new.entry, new.fingerprint))
        except Exception:
            self._remove(name)
            raise
        self._learn(name, new.entry, new.fingerprint)
        with self._folder.locked():
            files = self._refreshed()
            self._sweep(files)
            with self._changing:
                covered = self._indexes[new.fingerprint].covered(new.entry)
            for old in covered:
                if old != name:
                    self._remove(old)
            self._enforce()
        return True

    def _enforce(self) -> None:
        with self._changing:
            there = {name: entry for name, (entry, _) in self._known.items()}
        total = sum(entry.bytes for entry in there.values())
        while total > self.max_bytes and there:
            name = min(there, key=lambda name: self._used.get(name, 0.0))
            known, self._used[name] = self._used.get(name, 0.0), self._last_used(name)
            if self._used[name] > known:
                continue  # another process has used it meanwhile
            total -= there.pop(name).bytes
            self._remove(name)

    def _sweep(self, files: list[str]) -> None:
        """Removes what killed writers left, where it is certain that it was a store's writer."""
        for file in sorted(files):  # an index before its data, which tell whose it is if it cannot
            name = self._folder.id_of(file)
            if name is None or name in self._known or name in self._others or file in self._not_ours:
                continue
            age = self._folder.age(file)
            if age is None or min(age, time.time() - self._last_used(name)) <= ORPHANED_AFTER:
                continue
            with contextlib.suppress(OSError):
                if self._folder.wrote(file):
                    self._folder.delete(file)
                else:
                    self._not_ours.add(file)

    @property
    def bytes_live(self) -> int:
        """Of all entries."""
        return sum(entry.bytes for entry in self.entries().values())

    # --- files ----------------------------------------------------------------------------------------------------

    def _learn(self, name: str, entry: Entry, fingerprint: str) -> None:
        with self._changing:
            self._known[name] = entry, fingerprint
            self._indexes[fingerprint].add(name, entry)

    def _forget(self, name: str) -> None:
        with self._changing:
            _, whose = self._known.pop(name, (None, None))
            self._used.pop(name, None)
            if whose is not None:
                self._indexes[whose].remove(name)

    def _write(self, name: str, text: str) -> None:
        self._folder.write(name, text.encode())

    def _touch(self, name: str) -> None:
        self._used[name] = time.time()
        with contextlib.suppress(OSError):
            self._write(f"{name}.used", str(self._used[name]))

    def _last_used(self, name: str) -> float:
        try:
            return float(self._folder.read(f"{name}.used"))
        except (OSError, ValueError):
            return 0.0

    def _remove(self, name: str) -> None:
        """Its index first: nobody finds half an entry."""
        for suffix in ("json", "safetensors", "used"):
            self._folder.delete(f"{name}.{suffix}")
        self._forget(name)

    def _set_aside(self, name: str) -> None:
        self.damaged += 1
        self._ignored.add(name)
        self._folder.set_aside(f"{name}.safetensors", self.max_bytes // 8)
        self._remove(name)


def _index_text(entry: Entry, fingerprint: str) -> str:
    """The index of an entry."""
    told = {"tokens": np.frombuffer(entry.tokens, ">u4").tolist(), "bytes_live": entry.bytes, "least": entry.least}
    told |= {"fingerprint": fingerprint, "version": VERSION}
    return json.dumps(told | {"checksum": _sealed(told)})


def _index_entry(content: bytes) -> tuple[Entry, str] | None:
    """What an index says of an entry, and whose it is; None if it is of another version.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: it is no index, or was damaged.
    """
    told = json.loads(content)
    if type(told["version"]) is not int:
        raise ValueError("a version that is no number")
    if told["version"] != VERSION:
        return None
    seal = told.pop("checksum", None)  # 0.1.0 wrote none
    if seal is not None and seal != _sealed(told):
        raise ValueError("it is not what was written")
    tokens, numbers, whose = told["tokens"], (told["bytes_live"], told["least"]), told["fingerprint"]
    if type(tokens) is not list or not all(type(token) is int and 0 <= token < 2**32 for token in tokens):
        raise ValueError("tokens that are none")
    if not all(type(number) is int for number in numbers) or type(whose) is not str:
        raise ValueError("a number that is none")
    if not (0 <= numbers[0] < MOST_NUMBER and 0 <= numbers[1] <= len(tokens)):
        raise ValueError("numbers that cannot be")
    return Entry(packed(tokens), *numbers), whose


def _sealed(told: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=16).hexdigest()


def _told(file: serialization.ReadFile) -> dict[str, Any]:
    return {} if file.description is None else dict(file.description["metadata"])


def _digest(entry: Entry, fingerprint: str) -> str:
    return hashlib.blake2b(fingerprint.encode() + b"," + entry.tokens, digest_size=16).hexdigest()
