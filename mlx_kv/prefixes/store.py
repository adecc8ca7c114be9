"""A directory of processed prompts, so that a prefix is read once: across requests, processes and machines.

What is served, kept and removed is decided here. An entry is the caches of one token sequence; slots that several have
in common are in blocks, and a block is removed with the last entry that holds it. `index` and `table` find an entry
among many; `entry_files` writes and removes its files. `refresh`, `fetch` and `write`, which take the disk's time, do
nothing with MLX: another thread can call them, one at a time.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mlx_kv.cache.checks import cache_list, check_type, is_number, shown
from mlx_kv.files import serialization
from mlx_kv.generation.statistics import cache_statistics
from mlx_kv.mlxlm.trimming import trim_prompt_cache
from mlx_kv.prefixes.directory import blocks_among
from mlx_kv.prefixes.entry_files import (
    DamagedBlockError,
    EntryFiles,
    IndexedEntry,
    IndexOfOthers,
    PackedEntry,
    cut,
    pack,
)
from mlx_kv.prefixes.index import Entry, packed
from mlx_kv.prefixes.parts import Parts
from mlx_kv.prefixes.place import PromptPlace, least_tokens
from mlx_kv.prefixes.table import EntryTable

DEADLINE, DISK_DEADLINE = 2.0, 10.0  # seconds
TOUCH_EVERY = 60.0  # seconds; elsewhere, where each note is a request, who was of use when is known no better
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredPrompt:
    """An entry that was read for a prompt.

    Attributes:
        count: tokens of the prompt that it stands for.
        excess: tokens that its caches have read beyond them.
    """

    name: str
    count: int
    excess: int
    file: serialization.ReadFile


class PromptStore(PromptPlace):
    """Processed prompts in a directory.

    Args:
        directory: a path, or any URL that fsspec knows (memory://prompts, s3://bucket/prompts); made if not there. One
            that holds other things is refused.
        max_bytes: of all entries, what several share counted once; what was of no use for longest leaves first.
        fingerprint: entries of another model or policy are never served. None leaves it to the first `PromptReader`.
        deadline: seconds that `find`, and `keep`, may take where the directory lies elsewhere (a URL of an object
            store): what has not come by then is not there, whatever the place raises, and a line in the log says so.
            None is 2 there, and 10 on a disk, which a server waits for, but `find` and `keep` as long as it takes.
        parts: the other ranks, where each has a part of the caches: they keep theirs beside this, and an entry is there
            when all have theirs.

    Attributes:
        far: whether the directory lies elsewhere.
        hits, misses, tokens_reused: of `find`.
        damaged: entries that were set aside.
        unanswered: times that `find` or `keep` went without a place that did not answer.

    Raises:
        ValueError: max_bytes below 1, a deadline that is none, or a directory that cannot be used; whenever prompts are
            asked for or kept, that nobody has said whose they are.
    """

    def __init__(
        self,
        directory: str | Path,
        max_bytes: int = 8 * 2**30,
        fingerprint: str | None = None,
        deadline: float | None = None,
        parts: Parts | None = None,
    ) -> None:
        check_type("directory", directory, str | os.PathLike, "give a path or a URL")
        if not (isinstance(max_bytes, int | float) and max_bytes >= 1):
            raise ValueError(f"max_bytes is {shown(max_bytes)}: give a number of bytes from 1 up")
        if deadline is not None and not (is_number(deadline) and deadline > 0):
            raise ValueError(f"deadline is {shown(deadline)}: give a number of seconds above 0")
        super().__init__(max_bytes, fingerprint, parts)
        self._files = EntryFiles(directory, DEADLINE if deadline is None else deadline, self._parts.words)
        self._table = EntryTable()
        self.far = self._files.far
        self.deadline = deadline or (DEADLINE if self.far else DISK_DEADLINE)
        self.hits = self.misses = self.tokens_reused = self.damaged = self.unanswered = 0
        self._ignored: set[str] = set()  # set aside, or not to be understood
        self._unusable: list[str] = []  # forgotten, and yet to be set aside
        self._told_others = False  # which entries there are
        self._parts.open(str(directory), self.deadline)
        self._others: dict[str, frozenset[str]] = {}  # of another version, and the blocks of each
        self._released: set[str] = set()  # blocks that some entry held which has left
        self._unread = False  # whether any index could not be read the last time: nobody knows what it holds

    @property
    def other_versions(self) -> int:
        """Entries of another version of the format, which are left alone, by what the last refresh saw."""
        return len(self._others)

    @property
    def bytes_live(self) -> int:
        """Of all entries, what several share counted once."""
        self.refresh()
        return self._table.nbytes

    def entries(self) -> dict[str, Entry]:
        """All entries that are there now, by name."""
        self.refresh()
        return self._table.entries()

    # --- finding --------------------------------------------------------------------------------------------------

    def find(self, tokens: Sequence[int]) -> tuple[list[Any], int] | None:
        """The caches that have read most of a prompt, all but its last token at the most, and how many tokens of it.

        They are the caller's own, read from a file: nothing else holds them. None where nothing serves.
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
            self._tidy_unusable()
        return None

    def _answered(self, what: Callable[[], T]) -> T | None:
        """What comes of it; None where a place elsewhere does not answer in time, or with an error."""
        if not self.far:
            return what()
        try:
            with self.within():
                return what()
        except OSError as error:
            self.unanswered += 1
            log.warning("the prompt store could not be used: %s", error)
            return None

    def within(self) -> AbstractContextManager[None]:
        """All that this thread asks of a place elsewhere meanwhile takes no longer than the deadline, together."""
        return self._files.within(self.deadline)

    def _best(self, tokens: Sequence[int]) -> tuple[str, int] | None:
        whose = self._owner()
        return self._table.best(packed(tokens), whose)

    def refresh(self) -> None:
        """Looks which entries have come and gone. Each index is read once."""
        self._refreshed()

    def _refreshed(self) -> list[str]:
        """The same; returns the names of all files."""
        self._tidy_unusable()
        files, names = self._files.files()
        for name in self._table.names() - names:
            self._released.update(self._table.remove(name))
        self._others = {name: held for name, held in self._others.items() if name in names}
        self._unread, unread = True, False  # it stays so if what follows is broken off
        new = names - self._table.names() - self._ignored - self._others.keys()
        for name, found in self._files.indexes(sorted(new)):
            if isinstance(found, IndexedEntry):
                self._table.add(name, found)
            elif isinstance(found, IndexOfOthers):
                self._others[name] = found.blocks
            elif isinstance(found, ValueError):
                self._ignored.add(name)
            elif not isinstance(found, FileNotFoundError):  # that one left in this moment
                unread = True  # perhaps it can be read the next time
        self._unread = unread
        return files

    def fetch(self, tokens: Sequence[int]) -> StoredPrompt | None:
        """Reads the entry that stands for most of a prompt; what is gone or damaged on the way is forgotten."""
        while (best := self._best(tokens)) is not None:
            name, count = best
            try:
                entry = self._table[name].entry
                with self._parts.reading(name, self.deadline):
                    file = self._files.read(name, self._table[name])
            except FileNotFoundError:
                self._remove(name)  # what is left of it
            except DamagedBlockError as error:
                self._files.set_block_aside(error.name, self.max_bytes // 8)
                self._set_aside(name)
            except ValueError:
                self._set_aside(name)
            except KeyError:
                pass  # it was forgotten meanwhile
            else:
                self._touch(name)
                return StoredPrompt(name, count, len(entry) - count, file)
        return None

    def restore(self, fetched: StoredPrompt) -> list[Any] | None:
        """The caches of what was fetched, trimmed to its count; None where they cannot be made, and never will."""
        try:
            caches = fetched.file.restore().caches
            trim_prompt_cache(caches, fetched.excess, strict=True)
            caches = self._parts.restore(fetched.name, caches, fetched.excess)
        except ValueError:
            self.damaged += 1
            self._ignored.add(fetched.name)
            self._released.update(self._table.remove(fetched.name))
            self._unusable.append(fetched.name)  # its files are for who waits for the disk
            return None
        return caches

    def _tidy_unusable(self) -> None:
        while self._unusable:
            self._parts.remove(self._unusable[-1])
            self._files.set_aside(self._unusable.pop(), self.max_bytes // 8)

    # --- keeping --------------------------------------------------------------------------------------------------

    def keep(self, tokens: Sequence[int], caches: Sequence[Any]) -> bool:
        """Stores the caches that have read exactly these tokens, unless an entry serves as well; says whether it did.

        Entries that this one makes superfluous leave, and then those of least use until all fit into max_bytes.
        """
        new = self.pack(tokens, caches)
        return new is not None and self._answered(lambda: self.write(new)) is True

    def pack(self, tokens: Sequence[int], caches: Sequence[Any]) -> PackedEntry | None:
        """What `keep` would write, as the caches are now; None if it is not worth it."""
        caches = cache_list("caches", caches)
        live = cache_statistics(caches).bytes_live
        entry = self._entry(tokens, caches, "live", live)
        if entry is None:
            return None
        new = pack(self._files.new_name(), entry, self._owner(), caches, entry.bytes - live)
        if new.entry.bytes > self.max_bytes:
            return None
        self._parts.pack(new.name, caches, tokens, new.fingerprint)
        return new

    def discard(self, new: PackedEntry) -> None:
        """What was packed is not to be written."""
        self._parts.remove(new.name)

    def write(self, new: PackedEntry) -> bool:
        """As `keep`."""
        written = False
        try:
            there = blocks_among(self._refreshed())
            covering = self._table.covering(new.entry, new.fingerprint)
            if covering is not None:
                self._touch(covering)
            else:
                self._write(new, there, lambda files: self._tidy(new, files))
                written = True
        finally:
            if not written:  # other ranks hold their parts of it
                self.discard(new)
        return written

    def _write(self, new: PackedEntry, there: AbstractSet[str], tidy: Callable[[Sequence[str]], None]) -> None:
        """Writes an entry, beside blocks that are there; when it is published, tidies up among all files."""
        name, published = new.name, False
        self._table.touch(name, now := time.time())
        self._files.claim(name, now)
        made = cut(new, partial(self._table.wanted_ends, new.entry, new.fingerprint))
        try:
            with self._parts.writing(name):
                self._files.write(name, made, there)
            with self._files.locked():  # what leaves does so under this lock: what is there now is there with the index
                files = self._refreshed()
                self._files.publish(name, made, files)
                published = True
                self._table.add(name, made.indexed)
                tidy(files)
        except Exception:
            if not published:
                self._remove(name)
                self._released.update(made.indexed.blocks)
            raise

    def _tidy(self, new: PackedEntry, files: Sequence[str]) -> None:
        """Removes what a new entry makes superfluous, what is too much, and what was left of others."""
        self._sweep(files)
        for old in self._table.covered(new.entry, new.fingerprint):
            if old != new.name:
                self._remove(old)
        there = self._table.entries()
        while self._table.nbytes > self.max_bytes and there:
            old = self._table.least_recent(there, self._files.last_used)
            del there[old]
            self._remove(old)
        self._remove_released()

    def _sweep(self, files: Sequence[str]) -> None:
        if self._unread:
            return
        self._files.sweep(files, self._table.names() | self._others.keys() | self._held())
        if not self._told_others:
            self._told_others = True
            self._parts.only(self._table.names())

    def _held(self) -> set[str]:
        """All blocks that anybody holds, as far as is known."""
        return self._table.blocks.union(*self._others.values())

    def _remove_released(self) -> None:
        """Removes blocks that nobody holds any longer, unless somebody may whose index could not be read."""
        if not self._released:
            return
        self._refreshed()  # elsewhere than on a local disk, others may have come meanwhile
        if not self._unread:
            free = self._released - self._held()
            self._released = set()
            self._files.remove_blocks(*free)

    def _touch(self, name: str) -> None:
        now, before = time.time(), max(self._table.touched(name), self._files.dated(name))
        self._table.touch(name, now)
        if not self.far or now - before >= TOUCH_EVERY:
            self._files.touch(name, now)

    def _remove(self, name: str) -> None:
        """Its blocks leave when it is next looked for what is superfluous."""
        self._files.remove(name)
        self._parts.remove(name)
        self._released.update(self._table.remove(name))

    def _set_aside(self, name: str) -> None:
        self.damaged += 1
        self._ignored.add(name)
        self._files.set_aside(name, self.max_bytes // 8)
        self._parts.remove(name)
        self._released.update(self._table.remove(name))

    def by_themselves(self) -> None:
        """From now on the thread that has made this does nothing but wait for the one that asks the disk."""
        self._parts.by_themselves()

    # --- what another rank decides --------------------------------------------------------------------------------

    def pack_as(self, name: str, tokens: Sequence[int], caches: Sequence[Any], fingerprint: str) -> PackedEntry:
        """This rank's part of an entry, under the name that it has on all."""
        entry = Entry(packed(tokens), cache_statistics(caches).bytes_live, least_tokens(caches, len(tokens)))
        return pack(name, entry, fingerprint, caches)

    def write_as(self, new: PackedEntry) -> None:
        """Writes it; what leaves is for the other rank to say."""
        self._write(new, blocks_among(self._refreshed()), self._sweep)

    def fetch_as(self, name: str) -> serialization.ReadFile:
        """Reads the entry of a name.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it was damaged.
        """
        self.refresh()
        try:
            return self._files.read(name, self._table[name])
        except KeyError:
            raise FileNotFoundError(f"{name} is not there") from None
        except DamagedBlockError as error:
            self._files.set_block_aside(error.name, self.max_bytes // 8)
            raise

    def remove(self, name: str) -> None:
        """Removes an entry, and the blocks that nobody holds then."""
        self._remove(name)
        self._remove_released()

    def only(self, names: Collection[str]) -> None:
        """Removes all entries but these, and those that are new."""
        self.refresh()
        for name in self._table.names() - set(names):
            if self._files.is_old(name):
                self.remove(name)
