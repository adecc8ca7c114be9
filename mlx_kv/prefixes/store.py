"""A directory of processed prompts, shared by requests, processes and machines.

An entry is the caches of one token sequence. Its slots are in blocks that several entries can share; a block is removed
after the last entry that uses it. This module decides what is served, kept and removed; `store_layout` reads and writes
the files. `refresh`, `fetch` and `write` take the disk's time and do not use MLX, so another thread may call them, one
at a time.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mlx_kv.cache.checks import cache_list, check_type
from mlx_kv.files import serialization
from mlx_kv.generation.statistics import cache_statistics
from mlx_kv.mlxlm.traverse import trim_prompt_cache
from mlx_kv.prefixes.index import Entry, packed
from mlx_kv.prefixes.prefix_cache import PrefixCache, Shards, min_tokens
from mlx_kv.prefixes.store_index import IndexedEntry, PackedEntry, cut, pack
from mlx_kv.prefixes.store_layout import Listing, StoreLayout
from mlx_kv.settings import is_number, shown

DEADLINE, DISK_DEADLINE = 2.0, 10.0  # seconds
TOUCH_EVERY = 60.0  # seconds between two records of a use on remote file systems
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredPrompt:
    """An entry that was read for a prompt.

    Attributes:
        count: tokens of the prompt that it serves.
        excess: tokens that its caches have read beyond them.
    """

    name: str
    count: int
    excess: int
    file: serialization.ReadFile


class PromptStore(PrefixCache[IndexedEntry]):
    """Processed prompts in a directory.

    Args:
        directory: a path, or any URL that fsspec supports (memory://prompts, s3://bucket/prompts); created if missing.
            A directory with other files is refused.
        max_bytes: of all entries, what several share counted once; the least recently used are removed first.
        fingerprint: entries of another model or policy are never served. None takes that of the first `PromptReader`.
        deadline: seconds that `find` and `keep` may take in a remote directory (a URL of an object store). What has not
            arrived by then counts as missing, errors of the file system included, and is logged. None is 2 there; on a
            disk it is 10, which a server waits, while `find` and `keep` wait as long as it takes.
        parts: the other ranks, if each has a part of the caches: a `mlx_kv.prefixes.rank_shards.RankShards`. They keep
            theirs beside this one, and an entry exists when all ranks have their part.

    Attributes:
        far: whether the directory is remote.
        hits, misses, tokens_reused: of `find`.
        damaged: number of entries that were set aside.
        unanswered: number of `find` and `keep` calls that failed because a remote directory did.

    Raises:
        ValueError: max_bytes below 1, a deadline that is not above 0, or a directory that can't be used; from `find`
            and `keep`, that there is no fingerprint yet.
    """

    def __init__(
        self,
        directory: str | Path,
        max_bytes: int = 8 * 2**30,
        fingerprint: str | None = None,
        deadline: float | None = None,
        parts: Shards | None = None,
    ) -> None:
        check_type("directory", directory, str | os.PathLike, "give a path or a URL")
        if not (isinstance(max_bytes, int | float) and max_bytes >= 1):
            raise ValueError(f"max_bytes is {shown(max_bytes)}: give a number of bytes from 1 up")
        if deadline is not None and not (is_number(deadline) and deadline > 0):
            raise ValueError(f"deadline is {shown(deadline)}: give a number of seconds above 0")
        super().__init__(max_bytes, fingerprint, parts)
        self._layout = StoreLayout(directory, deadline or DEADLINE, self._shards.description, max_bytes // 8)
        self.far = self._layout.blobs.far
        self.deadline = deadline or (DEADLINE if self.far else DISK_DEADLINE)
        self.hits = self.misses = self.tokens_reused = self.damaged = self.unanswered = 0
        self._ignored: set[str] = set()  # entries that are damaged, or set aside
        self._unusable: list[str] = []  # entries that are yet to be set aside, by the thread for the disk
        self._others: dict[str, frozenset[str]] = {}  # entries of another version, and their blocks
        self._released: set[str] = set()  # blocks of entries that were removed
        self._unread = False  # whether an index could not be read the last time, whose blocks are unknown
        self._others_removed = False  # whether the other ranks have removed entries that are missing here
        self._shards.open(str(directory), self.deadline)

    @property
    def other_versions(self) -> int:
        """Number of entries of another version of the format at the last refresh; they are left alone."""
        return len(self._others)

    @property
    def bytes_live(self) -> int:
        """Of all entries, what several share counted once."""
        self.refresh()
        return self._table.nbytes

    def entries(self) -> dict[str, Entry]:
        """All entries by name."""
        self.refresh()
        return {**self._table.entries()}

    # --- finding --------------------------------------------------------------------------------------------------

    def find(self, tokens: Sequence[int]) -> tuple[list[Any], int] | None:
        """New caches for the longest prefix of a prompt, all but its last token at most.

        Returns:
            The caches, read from files, and the number of tokens they have read; None if no entry serves.
        """
        found = self._answered(lambda: self._find(tokens))
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self.tokens_reused += found[1]
        return found

    def _find(self, tokens: Sequence[int]) -> tuple[list[Any], int] | None:
        self.refresh()
        while (fetched := self.fetch(tokens)) is not None:
            caches = self.restore(fetched)
            if caches is not None:
                return caches, fetched.count
            self._set_unusable_aside()
        return None

    def _answered(self, work: Callable[[], T]) -> T | None:
        """The result of some work; None if a remote directory fails, or not within the deadline."""
        if not self.far:
            return work()
        try:
            with self.within():
                return work()
        except OSError as error:
            self.unanswered += 1
            log.warning("the prompt store could not be used: %s", error)
            return None

    def within(self) -> AbstractContextManager[None]:
        """Gives all calls of this thread to a remote directory one common deadline."""
        return self._layout.blobs.within(self.deadline)

    def refresh(self) -> None:
        """Lists the directory, and reads the indexes of new entries."""
        self._refreshed()

    def _refreshed(self) -> Listing:
        self._set_unusable_aside()
        listing = self._layout.listing()
        known = self._table.entries().keys()
        for name in known - listing.entries:
            self._forget(name)
        self._others = {name: blocks for name, blocks in self._others.items() if name in listing.entries}
        self._unread, unread = True, False  # stays true if an error ends the loop
        new = listing.entries - known - self._ignored - self._others.keys()
        for name, found in self._layout.read_indexes(sorted(new)):
            if isinstance(found, IndexedEntry):
                self._table.add(name, found)
            elif isinstance(found, frozenset):
                self._others[name] = found
            elif isinstance(found, ValueError):
                self._ignored.add(name)
            elif not isinstance(found, FileNotFoundError):  # which another process has just removed
                unread = True
        self._unread = unread
        return listing

    def fetch(self, tokens: Sequence[int]) -> StoredPrompt | None:
        """Reads the entry for the longest prefix of a prompt; skips missing and damaged ones."""
        while (best := self._best(tokens)) is not None:
            name, count = best
            try:
                entry = self._table[name]
                with self._shards.reading(name, self.deadline):
                    file = self._layout.read(name, entry)
            except FileNotFoundError:
                self._remove(name)
            except ValueError:
                self._set_aside(name)
            except KeyError:
                pass  # another thread has removed it
            else:
                self._touch(name)
                return StoredPrompt(name, count, len(entry) - count, file)
        return None

    def restore(self, fetched: StoredPrompt) -> list[Any] | None:
        """The caches of an entry, trimmed to `fetched.count`; None, and the entry is removed, if they can't be made."""
        try:
            caches = fetched.file.restore().caches
            trim_prompt_cache(caches, fetched.excess, strict=True)
            return self._shards.restore(fetched.name, caches, fetched.excess)
        except ValueError:
            self.damaged += 1
            self._ignored.add(fetched.name)
            self._forget(fetched.name)
            self._unusable.append(fetched.name)
            return None

    # --- keeping --------------------------------------------------------------------------------------------------

    def keep(self, tokens: Sequence[int], caches: Sequence[Any]) -> bool:
        """Stores the caches that have read exactly these tokens, unless an entry serves as well.

        Removes entries that the new one makes superfluous, and then the least recently used until all fit.

        Returns:
            Whether there is a new entry.
        """
        new = self.pack(tokens, caches)
        return new is not None and self._answered(lambda: self.write(new)) is True

    def pack(self, tokens: Sequence[int], caches: Sequence[Any]) -> PackedEntry | None:
        """The entry that `keep` would write, from the caches as they are now; None if it is too short or too large."""
        caches = cache_list("caches", caches)
        live = cache_statistics(caches).bytes_live
        entry = self._entry(tokens, caches, "live", live)
        if entry is None:
            return None
        new = pack(uuid.uuid4().hex, entry, caches, entry.bytes - live)
        if new.entry.bytes > self.max_bytes:
            return None
        self._shards.pack(new.name, caches, tokens, entry.fingerprint)
        return new

    def discard(self, new: PackedEntry) -> None:
        """Frees a packed entry on all ranks, in place of `write`."""
        self._shards.remove(new.name)

    def write(self, new: PackedEntry) -> bool:
        """Writes a packed entry; returns the same as `keep`."""
        written = False
        try:
            listing = self._refreshed()
            covering = self._table.covering(new.entry)
            if covering is not None:
                self._touch(covering)
            else:
                self._write(new, listing, self._tidy)
                written = True
        finally:
            if not written:
                self.discard(new)
        return written

    def _write(self, new: PackedEntry, listing: Listing, tidy: Callable[[str, IndexedEntry, Listing], None]) -> None:
        """Writes an entry, and then removes others with `tidy`."""
        name, published = new.name, False
        self._table.touch(name, now := time.time())
        if not self.far:
            self._layout.touch(name, now)  # other processes see that a writer is at work, and remove nothing
        entry, caches = cut(new, self._table.nearest(new.entry.tokens, new.entry.fingerprint))
        try:
            with self._shards.writing(name):
                self._layout.write(name, caches, listing.blocks)
            with self._layout.blobs.locked("lock"):  # files are removed under this lock only
                listing = self._refreshed()
                self._layout.publish(name, entry, caches, listing.blocks)
                published = True
                self._table.add(name, entry)
                tidy(name, entry, listing)
        except Exception:
            if not published:
                self._remove(name)
                self._released.update(entry.blocks)
            raise

    def _touch(self, name: str) -> None:
        now = time.time()
        before = max(self._table.touched(name), self._layout.last_used_in_listing(name))
        self._table.touch(name, now)
        if not self.far or now - before >= TOUCH_EVERY:
            self._layout.touch(name, now)

    def _last_used(self, name: str) -> float:
        return self._layout.last_used(name)

    def by_themselves(self) -> None:
        """From now on the calling thread only waits for the one that uses the disk, which may send to other ranks."""
        self._shards.use_this_thread()

    # --- removing ---------------------------------------------------------------------------------------------------

    def _tidy(self, name: str, entry: IndexedEntry, listing: Listing) -> None:
        self._sweep(name, entry, listing)
        self._make_room(name, entry)
        self._remove_released()

    def _sweep(self, name: str, entry: IndexedEntry, listing: Listing) -> None:
        """Removes files that killed writers left."""
        if self._unread:
            return
        self._layout.sweep(listing.files, self._table.entries().keys() | self._others.keys() | self._used_blocks())
        if not self._others_removed:
            self._others_removed = True
            self._shards.remove_others(self._table.entries())

    def _used_blocks(self) -> set[str]:
        return self._table.blocks.union(*self._others.values())

    def _remove_released(self) -> None:
        """Removes blocks that no entry uses any more, unless an index that can't be read may."""
        if not self._released:
            return
        self._refreshed()  # without locks, other processes may have added entries meanwhile
        if not self._unread:
            unused = self._released - self._used_blocks()
            self._released = set()
            self._layout.remove_blocks(*unused)

    def _remove(self, name: str) -> None:
        """Removes an entry; its blocks follow in `_remove_released`."""
        self._layout.remove(name)
        self._shards.remove(name)
        self._forget(name)

    def _forget(self, name: str) -> None:
        self._released.update(self._table.remove(name))

    def _set_aside(self, name: str) -> None:
        self.damaged += 1
        self._ignored.add(name)
        self._layout.set_aside(name)
        self._shards.remove(name)
        self._forget(name)

    def _set_unusable_aside(self) -> None:
        while self._unusable:
            self._shards.remove(self._unusable[-1])
            self._layout.set_aside(self._unusable.pop())

    # --- on ranks that follow another -------------------------------------------------------------------------------

    def pack_as(self, name: str, tokens: Sequence[int], caches: Sequence[Any], fingerprint: str) -> PackedEntry:
        """Packs this rank's shard of an entry."""
        live, least = cache_statistics(caches).bytes_live, min_tokens(caches, len(tokens))
        return pack(name, Entry(packed(tokens), live, least, fingerprint), caches)

    def write_as(self, new: PackedEntry) -> None:
        """Writes a packed shard, and removes nothing else."""
        self._write(new, self._refreshed(), self._sweep)

    def fetch_as(self, name: str) -> serialization.ReadFile:
        """Reads the shard of an entry.

        Raises:
            FileNotFoundError: it is missing.
            ValueError: it is damaged.
        """
        self.refresh()
        if name not in self._table.entries():
            raise FileNotFoundError(f"{name} is not there")
        return self._layout.read(name, self._table[name])

    def remove(self, name: str) -> None:
        """Removes an entry, and blocks that no other entry uses."""
        self._remove(name)
        self._remove_released()

    def only(self, names: Collection[str]) -> None:
        """Removes all old entries but these."""
        self.refresh()
        for name in self._table.entries().keys() - set(names):
            if self._layout.is_old(name):
                self.remove(name)
