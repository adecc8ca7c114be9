"""A directory of processed prompts, so that a prefix is read once: across requests, processes and machines.

Decides which stored entry serves a prompt, what is worth keeping, and what leaves when there is too much. An entry is
the caches of one token sequence. Knows nothing about how caches are written to a file, nor about requests.

    <id>.safetensors   the caches, with a checksum (serialization)
    <id>.json          tokens, hashes of their blocks, bytes, how far back it can be trimmed; written last
    <id>.used          when it was last of use
    damaged/           entries that failed their checksum, set aside

Tokens are hashed in blocks of 64, each hash with the one before it, so equal hashes mean equal prefixes. An entry of N
tokens serves any prompt that begins with N' of them, if its caches can be trimmed back to N' exactly: full caches to
any prefix, rings and compressed caches as far as they can. So one entry is enough of a full cache, and one for each
chunk of the prompt of the others (`PromptReader`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import fsspec
import mlx.core as mx
import mlx.nn as nn

from mlx_kv.adapter import leaves, trim_prompt_cache
from mlx_kv.cache import KVCache
from mlx_kv.generation import cache_statistics, prefill_step
from mlx_kv.layout import NO_LIMIT, Row
from mlx_kv.serialization import load_prompt_cache, save_prompt_cache

BLOCK = 64
VERSION = 1
ORPHANED_AFTER = 3600.0  # seconds; data without an index is a writer at work, or one that was killed


@dataclass(frozen=True)
class Entry:
    """What is known of an entry without reading its caches.

    Attributes:
        tokens: that its caches have read.
        hashes: one for each whole block of them.
        bytes_live: of its caches.
        least: tokens that must stay of them: its caches can be trimmed back that far.
        fingerprint: of the model and the policy.
    """

    tokens: tuple[int, ...]
    hashes: tuple[str, ...]
    bytes_live: int
    least: int
    fingerprint: str
    version: int = VERSION


def block_hashes(tokens: Sequence[int], fingerprint: str = "") -> tuple[str, ...]:
    """A hash for each whole block, of it and all before it."""
    hashes, chained = [], hashlib.blake2b(fingerprint.encode(), digest_size=16)
    for first in range(0, len(tokens) - BLOCK + 1, BLOCK):
        chained.update(b"".join(int(token).to_bytes(4, "little") for token in tokens[first : first + BLOCK]))
        hashes.append(chained.hexdigest())
    return tuple(hashes)


def least_tokens(caches: Sequence[Any], held: int) -> int:
    """How few of `held` tokens caches can be trimmed back to exactly, all layers together."""
    most = held
    for cache in leaves(caches):
        if isinstance(cache, KVCache):
            most = min(most, *(_exact_trim(cache, row) for row in cache._rows))
        elif not cache.is_trimmable():
            most = 0
    return held - most


def _exact_trim(cache: KVCache, row: Row) -> int:
    """Tokens that can be taken back to where a fresh read of the rest would stand.

    With a budget not beyond the last compaction: what was evicted then may have gone for the sake of later tokens.
    """
    if cache.evictor is not None and row.start < 0:
        return max(0, row.end - cache.evictor.layout.budget)
    return cache.layout.most_trim(row)


class PromptStore:
    """Processed prompts in a directory.

    Args:
        directory: a path, or any URL that fsspec knows (memory://prompts, s3://bucket/prompts); made if not there.
        max_bytes: live bytes of all entries; what was of no use for longest leaves first.
        fingerprint: entries of another model or policy are never served; see `serialization.model_fingerprint`.

    Raises:
        ValueError: max_bytes below 1.
    """

    def __init__(self, directory: str | Path, max_bytes: int = 8 * 2**30, fingerprint: str = "") -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes}: give a number of bytes from 1 up")
        self.fs, self.root = fsspec.core.url_to_fs(str(directory))
        self.local = "file" in (self.fs.protocol if isinstance(self.fs.protocol, tuple) else (self.fs.protocol,))
        self.max_bytes, self.fingerprint = max_bytes, fingerprint
        self.fs.makedirs(self.root, exist_ok=True)
        self.hits = self.misses = self.tokens_reused = self.damaged = 0
        self._known: dict[str, Entry] = {}

    # --- finding --------------------------------------------------------------------------------------------------

    def find(self, tokens: Sequence[int]) -> tuple[list[Any], int] | None:
        """The caches that have read most of a prompt, all but its last token at the most, and how many tokens of it.

        They are the caller's own, read from a file: nothing else holds them. None where nothing serves.
        """
        wanted = block_hashes(tokens, self.fingerprint)
        entries = self.entries()
        served = sorted(((self._serves(entry, tokens, wanted), name) for name, entry in entries.items()), reverse=True)
        for count, name in served:
            if count < BLOCK:
                break
            caches = self._load(name, entries[name])
            if caches is None:
                continue
            if count < len(entries[name].tokens):
                trim_prompt_cache(caches, len(entries[name].tokens) - count)
            self._touch(name)
            self.hits += 1
            self.tokens_reused += count
            return caches, count
        self.misses += 1
        return None

    def _serves(self, entry: Entry, tokens: Sequence[int], wanted: Sequence[str]) -> int:
        """How many tokens of a prompt an entry can stand for; 0 where it cannot."""
        if entry.fingerprint != self.fingerprint or entry.hashes[:1] != tuple(wanted[:1]):
            return 0
        blocks = 0
        for own, other in zip(entry.hashes, wanted, strict=False):
            if own != other:
                break
            blocks += 1
        count = blocks * BLOCK
        most = min(len(entry.tokens), len(tokens) - 1)
        count = min(count, most)
        while count < most and entry.tokens[count] == tokens[count]:
            count += 1
        return count if count >= entry.least else 0

    def entries(self) -> dict[str, Entry]:
        """All entries that are there now, by name. Each index is read once."""
        names = {path.rsplit("/", 1)[-1].removesuffix(".json") for path in self._glob("*.json")}
        for name in names - self._known.keys():
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                told = json.loads(self.fs.cat_file(self._path(f"{name}.json")))
                if told.get("version") == VERSION:
                    self._known[name] = Entry(
                        **{**told, "tokens": tuple(told["tokens"]), "hashes": tuple(told["hashes"])}
                    )
        self._known = {name: entry for name, entry in self._known.items() if name in names}
        return dict(self._known)

    def _load(self, name: str, entry: Entry) -> list[Any] | None:
        """The caches of an entry; None if it is gone, or damaged, which sets it aside."""
        try:
            with self._as_file(name) as file:
                caches, metadata = load_prompt_cache(file, return_metadata=True)
            if metadata.get("store_tokens") != _digest(entry.tokens, self.fingerprint):
                raise ValueError("its tokens are not those of its index")
        except FileNotFoundError:
            self._remove(name)  # what is left of it
            return None
        except ValueError:
            self._set_aside(name)
            return None
        return list(caches)

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
        entry = Entry(
            tuple(map(int, tokens)),
            block_hashes(tokens, self.fingerprint),
            cache_statistics(caches).bytes_live,
            least_tokens(caches, len(tokens)),
            self.fingerprint,
        )
        if len(tokens) < BLOCK or entry.bytes_live > self.max_bytes:
            return False
        for name, other in self.entries().items():
            if self._covers(other, entry):
                self._touch(name)
                return False
        name = uuid.uuid4().hex
        metadata = {"store_tokens": _digest(entry.tokens, self.fingerprint)}
        data = self._path(f"{name}.safetensors")
        if self.local:
            save_prompt_cache(data, list(caches), metadata)
        else:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "caches.safetensors"
                save_prompt_cache(file, list(caches), metadata)
                self._put(str(file), data)
        self._touch(name)
        self._write(f"{name}.json", json.dumps(asdict(entry)))
        with self._locked():
            for old, other in self.entries().items():
                if old != name and self._covers(entry, other):
                    self._remove(old)
            self._enforce()
        return True

    def _covers(self, entry: Entry, other: Entry) -> bool:
        """Whether every prompt that `other` serves is served as well by `entry`."""
        return (
            entry.fingerprint == other.fingerprint
            and entry.least <= other.least
            and entry.tokens[: len(other.tokens)] == other.tokens
        )

    def _enforce(self) -> None:
        entries = self.entries()
        total = sum(entry.bytes_live for entry in entries.values())
        for name in sorted(entries, key=self._last_used):
            if total <= self.max_bytes:
                break
            total -= entries[name].bytes_live
            self._remove(name)
        for path in self._glob("*.safetensors"):
            name = path.rsplit("/", 1)[-1].removesuffix(".safetensors")
            if name not in entries and time.time() - self._last_used(name) > ORPHANED_AFTER:
                self._remove(name)

    @property
    def bytes_live(self) -> int:
        """Of all entries."""
        return sum(entry.bytes_live for entry in self.entries().values())

    # --- files ----------------------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _glob(self, pattern: str) -> list[str]:
        self.fs.invalidate_cache()
        found: list[str] = self.fs.glob(self._path(pattern))
        return found

    def _put(self, local: str, path: str) -> None:
        partial = f"{path}.{uuid.uuid4().hex}.partial"
        self.fs.put_file(local, partial)
        self.fs.mv(partial, path)

    def _write(self, name: str, text: str) -> None:
        partial = self._path(f"{name}.{uuid.uuid4().hex}.partial")
        self.fs.pipe_file(partial, text.encode())
        self.fs.mv(partial, self._path(name))

    def _touch(self, name: str) -> None:
        with contextlib.suppress(OSError):
            self._write(f"{name}.used", str(time.time()))

    def _last_used(self, name: str) -> float:
        try:
            return float(self.fs.cat_file(self._path(f"{name}.used")))
        except (OSError, ValueError):
            return 0.0

    def _remove(self, name: str) -> None:
        """Its index first: nobody finds half an entry."""
        for suffix in ("json", "safetensors", "used"):
            with contextlib.suppress(OSError):
                self.fs.rm_file(self._path(f"{name}.{suffix}"))
        self._known.pop(name, None)

    def _set_aside(self, name: str) -> None:
        self.damaged += 1
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


def needs_checkpoints(caches: Sequence[Any]) -> bool:
    """Whether caches will come to where they cannot be trimmed back to any prefix."""
    return not all(isinstance(cache, KVCache) and cache.layout.enough_slots == NO_LIMIT for cache in leaves(caches))


def _digest(tokens: Sequence[int], fingerprint: str) -> str:
    text = fingerprint + "," + ",".join(map(str, tokens))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class Prefixes(Protocol):
    """What a reader asks of a store."""

    def find(self, tokens: Sequence[int]) -> tuple[list[Any], int] | None:
        """The asker's own caches, which have read the first tokens of these, and how many: never all of them."""
        ...

    def keep(self, tokens: Sequence[int], caches: list[Any]) -> object:
        """Is shown caches that have read exactly these tokens."""
        ...


class PromptReader:
    """Reads a prompt chunk by chunk, from what a store has on, and keeps what is new.

    Args:
        model, caches: new caches of the model, if the store has nothing.
        tokens: of the prompt, at least one; the last is left to be read, for the logits that come next.
        store: None reads all of it.
        step: tokens read at once; None is what the caches plan for.

    Attributes:
        caches: those that have read `read` tokens.
        reused: tokens that were in the store.
    """

    def __init__(
        self,
        model: nn.Module,
        caches: list[Any],
        tokens: Sequence[int],
        store: Prefixes | None = None,
        step: int | None = None,
    ) -> None:
        self.model, self.tokens, self.store = model, list(tokens), store
        found = None if store is None else store.find(tokens)
        self.caches, self.reused = (caches, 0) if found is None else found
        self.read = self.reused
        self.step_size = prefill_step(self.caches, step)

    @property
    def done(self) -> bool:
        return self.read >= len(self.tokens) - 1

    def step(self) -> int:
        """Reads the next chunk, and returns how many tokens it had.

        Caches that cannot be trimmed back to any prefix are kept after every chunk, others at the end.
        """
        chunk = self.tokens[self.read : min(self.read + self.step_size, len(self.tokens) - 1)]
        if chunk:
            self.model(mx.array([chunk]), cache=self.caches)
            mx.eval([cache.state for cache in self.caches])
            mx.clear_cache()
            self.read += len(chunk)
        if self.store is not None and self.read > self.reused and (self.done or least_tokens(self.caches, self.read)):
            self.store.keep(self.tokens[: self.read], self.caches)
        return len(chunk)

    def finish(self) -> list[Any]:
        """Reads the rest, and returns the caches."""
        while not self.done:
            self.step()
        return self.caches
