"""A directory of processed prompts, so that a prefix is read once: across requests, processes and machines.

Decides how an entry comes to be and to go, so that nobody ever finds half of one, and what leaves when there is too
much. An entry is the caches of one token sequence. Knows nothing about which entry serves a prompt (`prefixes`), how
caches are written to a file (`serialization`), nor about requests.

    <id>.used          when it was last of use
    <id>.safetensors   the caches, with a checksum
    <id>.json          tokens, bytes, how far back it can be trimmed; written last
    damaged/           entries that failed their checksum, set aside

What takes the disk's time (`refresh`, `fetch`, `write`) does nothing with MLX: another thread can do it, one at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from mlx_kv import serialization
from mlx_kv.adapter import trim_prompt_cache
from mlx_kv.generation import cache_statistics
from mlx_kv.prefixes import LEAST_SHARED, Entry, PrefixIndex, least_tokens, packed

VERSION = 2
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
    caches: serialization.PackedCaches


class PromptStore:
    """Processed prompts in a directory.

    Args:
        directory: a path, or any URL that fsspec knows (memory://prompts, s3://bucket/prompts); made if not there.
        max_bytes: live bytes of all entries; what was of no use for longest leaves first.
        fingerprint: entries of another model or policy are never served; see `serialization.model_fingerprint`.

    Raises:
        ValueError: max_bytes below 1, or a directory that cannot be used.
    """

    def __init__(self, directory: str | Path, max_bytes: int = 8 * 2**30, fingerprint: str = "") -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes}: give a number of bytes from 1 up")
        try:
            self.fs, self.root = fsspec.core.url_to_fs(str(directory))
            self.fs.makedirs(self.root, exist_ok=True)
        except (OSError, ImportError) as error:
            raise ValueError(
                f"cannot keep prompts in {directory}: {getattr(error, 'strerror', None) or error}; give another place"
            ) from error
        self.local = "file" in (self.fs.protocol if isinstance(self.fs.protocol, tuple) else (self.fs.protocol,))
        self.max_bytes, self.fingerprint = max_bytes, fingerprint
        self.hits = self.misses = self.tokens_reused = self.damaged = 0
        self._known: dict[str, Entry] = {}  # all that are there
        self._index = PrefixIndex()  # those of our fingerprint
        self._used: dict[str, float] = {}  # when each was last of use, as far as is known: perhaps later
        self._ignored: set[str] = set()  # set aside, or not to be understood
        self._changing = threading.RLock()  # guards the first two: one thread serves while another refreshes

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
        return next((count for _, count in self._serving(tokens)), 0)

    def _serving(self, tokens: Sequence[int]) -> list[tuple[str, int]]:
        with self._changing:
            return list(self._index.serving(packed(tokens)))

    def refresh(self) -> None:
        """Looks which entries have come and gone. Each index is read once."""
        self._refreshed()

    def _refreshed(self) -> list[str]:
        """The same; returns the names of all files."""
        self.fs.invalidate_cache()
        files = [path.rsplit("/", 1)[-1] for path in self.fs.ls(self.root, detail=False)]
        names = {file.removesuffix(".json") for file in files if file.endswith(".json")}
        with self._changing:
            for name in self._known.keys() - names:
                self._forget(name)
        for name in names - self._known.keys() - self._ignored:
            try:
                told = json.loads(self.fs.cat_file(self._path(f"{name}.json")))
                if told["version"] != VERSION:
                    raise ValueError("another version")
                entry = Entry(packed(told["tokens"]), int(told["bytes_live"]), int(told["least"]))
                self._learn(name, entry, told["fingerprint"])
            except FileNotFoundError:
                pass  # it left in this moment
            except (OSError, ValueError, TypeError, KeyError, OverflowError):
                self._ignored.add(name)
        return files

    def entries(self) -> dict[str, Entry]:
        """All entries that are there now, by name."""
        self.refresh()
        with self._changing:
            return dict(self._known)

    def fetch(self, tokens: Sequence[int]) -> Fetched | None:
        """Reads the entry that stands for most of a prompt; what is gone or damaged on the way is forgotten."""
        for name, count in self._serving(tokens):
            try:
                entry = self._known[name]
                with self._as_file(name) as path:
                    file = serialization.read(path)
                if _told(file).get("store_tokens") != _digest(entry, self.fingerprint):
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

    @contextlib.contextmanager
    def _as_file(self, name: str) -> Iterator[Path]:
        """The data of an entry as a local file."""
        if self.local:
            yield Path(self._path(f"{name}.safetensors"))
            return
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "caches.safetensors"
            self.fs.get_file(self._path(f"{name}.safetensors"), str(file))
            yield file

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
        metadata = {"store_tokens": _digest(entry, self.fingerprint)}
        return PackedEntry(entry, serialization.pack(list(caches), metadata))

    def write(self, new: PackedEntry) -> bool:
        """As `keep`."""
        self.refresh()
        with self._changing:
            covering = self._index.covering(new.entry)
        if covering is not None:
            self._touch(covering)
            return False
        name, told = uuid.uuid4().hex, {"tokens": np.frombuffer(new.entry.tokens, ">u4").tolist()}
        told |= {"bytes_live": new.entry.bytes, "least": new.entry.least}
        self._touch(name)  # from now on nobody takes it for what a killed writer left
        self._write_data(new.caches, self._path(f"{name}.safetensors"))
        self._write(f"{name}.json", json.dumps(told | {"fingerprint": self.fingerprint, "version": VERSION}))
        self._learn(name, new.entry, self.fingerprint)
        with self._locked():
            files = self._refreshed()
            self._sweep(files)
            with self._changing:
                covered = self._index.covered(new.entry)
            for old in covered:
                if old != name:
                    self._remove(old)
            self._enforce()
        return True

    def _write_data(self, caches: serialization.PackedCaches, path: str) -> None:
        if self.local:
            caches.write(path)
            return
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "caches.safetensors"
            caches.write(file)
            partial = f"{path}.{uuid.uuid4().hex}.partial"
            self.fs.put_file(str(file), partial)
            self.fs.mv(partial, path)

    def _enforce(self) -> None:
        with self._changing:
            there = dict(self._known)
        total = sum(entry.bytes for entry in there.values())
        while total > self.max_bytes and there:
            name = min(there, key=lambda name: self._used.get(name, 0.0))
            known, self._used[name] = self._used.get(name, 0.0), self._last_used(name)
            if self._used[name] > known:
                continue  # another process has used it meanwhile
            total -= there.pop(name).bytes
            self._remove(name)

    def _sweep(self, files: list[str]) -> None:
        """Removes what killed writers left."""
        for file in files:
            name = file.removeprefix(".").split(".")[0]
            ours = file.endswith((".safetensors", ".json", ".used", ".partial", ".tmp"))
            if ours and name not in self._known and time.time() - self._last_used(name) > ORPHANED_AFTER:
                self._delete(file)

    @property
    def bytes_live(self) -> int:
        """Of all entries."""
        return sum(entry.bytes for entry in self.entries().values())

    # --- files ----------------------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _learn(self, name: str, entry: Entry, fingerprint: str) -> None:
        with self._changing:
            self._known[name] = entry
            if fingerprint == self.fingerprint:
                self._index.add(name, entry)

    def _forget(self, name: str) -> None:
        with self._changing:
            self._known.pop(name, None)
            self._used.pop(name, None)
            self._index.remove(name)

    def _write(self, name: str, text: str) -> None:
        partial = self._path(f"{name}.{uuid.uuid4().hex}.partial")
        self.fs.pipe_file(partial, text.encode())
        self.fs.mv(partial, self._path(name))

    def _touch(self, name: str) -> None:
        self._used[name] = time.time()
        with contextlib.suppress(OSError):
            self._write(f"{name}.used", str(self._used[name]))

    def _last_used(self, name: str) -> float:
        try:
            return float(self.fs.cat_file(self._path(f"{name}.used")))
        except (OSError, ValueError):
            return 0.0

    def _delete(self, file: str) -> None:
        with contextlib.suppress(OSError):
            self.fs.rm_file(self._path(file))

    def _remove(self, name: str) -> None:
        """Its index first: nobody finds half an entry."""
        for suffix in ("json", "safetensors", "used"):
            self._delete(f"{name}.{suffix}")
        self._forget(name)

    def _set_aside(self, name: str) -> None:
        self.damaged += 1
        self._ignored.add(name)
        with contextlib.suppress(OSError):
            self.fs.makedirs(self._path("damaged"), exist_ok=True)
            self.fs.mv(self._path(f"{name}.safetensors"), self._path(f"damaged/{name}.safetensors"))
        self._remove(name)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time decides what leaves. Elsewhere than on a local disk, two may remove the same."""
        if not self.local:
            yield
            return
        import fcntl

        with open(self._path("lock"), "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _told(file: serialization.ReadFile) -> dict[str, Any]:
    return {} if file.description is None else dict(file.description["metadata"])


def _digest(entry: Entry, fingerprint: str) -> str:
    return hashlib.blake2b(fingerprint.encode() + b"," + entry.tokens, digest_size=16).hexdigest()
