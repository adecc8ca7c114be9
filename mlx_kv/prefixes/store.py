"""A folder of processed prompts, shared by requests and processes.

An entry is the caches of one token sequence. Its slots are in blocks that several entries can share; a block is removed
after the last entry that uses it.

    mlx-kv-store          marks the folder as a store
    <id>.used             when an entry was last used
    <digest>.block        slots that several entries may share
    <id>.safetensors      the rest of an entry's caches, with a checksum
    <id>.json             its index: tokens, bytes, how far it can be trimmed, its blocks, and a checksum
    lock                  locked while files are published or removed

An id or a digest is 32 hex digits. The index is written last and removed first, so readers never find half an entry.
Damaged entries are removed. Files that killed writers left are removed after an hour. A file is only removed if an
index names it, or if its name and its content are those of a store's file: any other file in the folder is left alone.
An index of another version is left alone, too, with the blocks that it names.

`refresh`, `fetch` and `write` take the disk's time and do not use MLX, so another thread may call them, one at a time.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from mlx_kv.cache.checks import cache_list, check_type
from mlx_kv.files import serialization, tensor_files
from mlx_kv.files.atomic_write import PRIVATE, locked
from mlx_kv.files.tensor_files import decode, read_json
from mlx_kv.generation.statistics import cache_statistics
from mlx_kv.mlxlm.traverse import trim_prompt_cache
from mlx_kv.prefixes.index import Entry, PrefixCache, packed, refuse_removed
from mlx_kv.settings import as_int, shown

MARKER, FORMAT = "mlx-kv-store", 1
ABOUT = "Processed prompts, kept here by mlx-kv. To free the space, delete the whole folder."
ORPHANED_AFTER = 3600.0  # seconds; younger files without an index may be those of a writer at work
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)  # errors of network drives
ID = "[0-9a-f]{32}"  # of entries and blocks
_FILE = re.compile(rf"({ID})\.(json|safetensors|used|block)")
# Files that are being written; two random parts make the names unique to a store.
_PARTIAL = re.compile(
    rf"(?:({ID})\.(?:json|safetensors|used|block)|{MARKER})\.{ID}\.partial"
    rf"|\.({ID})\.(?:safetensors|block)\.[0-9a-f]{{16}}\.tmp"
)


# --- index files ------------------------------------------------------------------------------------------------------

VERSION, VERSION_WITH_BLOCKS = 2, 3  # 0.1.0 wrote no checksum
MAX_NUMBER = 2**62  # bytes of an entry, and slots
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


class IndexFile(Struct):
    """The fields of an index file."""

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
    """Of the tokens and the fingerprint of an entry: its data carry it."""
    return hashlib.blake2b(entry.fingerprint.encode() + b"," + entry.tokens, digest_size=16).hexdigest()


# --- the store --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredPrompt:
    """An entry that was read for a prompt, as bytes.

    Attributes:
        count: tokens of the prompt that it serves.
        excess: tokens that its caches have read beyond them.
    """

    name: str
    count: int
    excess: int
    file: serialization.ReadFile


@dataclass(frozen=True)
class PackedEntry:
    """An entry to be written, its caches as bytes."""

    name: str
    entry: Entry
    caches: serialization.PackedCaches


def _file_mode(folder: int) -> int:
    """The mode of files in a folder of this mode: prompts are their owner's, and others' who may write there."""
    shared = PRIVATE
    for writes, reads_and_writes in ((stat.S_IWGRP, 0o060), (stat.S_IWOTH, 0o006)):
        if folder & writes and not folder & stat.S_ISVTX:  # a sticky folder, as /tmp, is everybody's and not shared
            shared |= reads_and_writes
    return shared


class PromptStore(PrefixCache[IndexedEntry]):
    """Processed prompts in a folder.

    Args:
        directory: a path; created if missing. Several processes may share it, also over a network drive or a mounted
            bucket. A directory with other files is refused.
        max_bytes: of all entries, what several share counted once; the least recently used are removed first.
        fingerprint: entries of another model or policy are never served. None takes that of the first `PromptReader`.

    Attributes:
        hits, misses, tokens_reused: of `find`.
        damaged: number of damaged entries and blocks that were removed.

    Raises:
        ValueError: max_bytes below 1, or a directory that can't be used; from `find` and `keep`, that there is no
            fingerprint yet.
    """

    def __init__(
        self, directory: str | Path, max_bytes: int = 8 * 2**30, fingerprint: str | None = None, **removed: object
    ) -> None:
        refuse_removed("PromptStore", removed)
        check_type("directory", directory, str | os.PathLike, "give a path")
        max_bytes = as_int(max_bytes)
        if not (isinstance(max_bytes, int | float) and max_bytes >= 1):
            raise ValueError(f"max_bytes is {shown(max_bytes)}: give a number of bytes from 1 up")
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", str(directory)):
            raise self._refusal(directory, "a store is a folder", "mount the bucket or drive, and give its path")
        super().__init__(max_bytes, fingerprint)
        self._folder = Path(directory)
        self.hits = self.misses = self.tokens_reused = self.damaged = 0
        self._ignored: set[str] = set()  # entries that are damaged
        self._unusable: list[str] = []  # those of them that are yet to be removed, by the thread for the disk
        self._others: dict[str, frozenset[str]] = {}  # entries of another version, and their blocks
        self._foreign: set[str] = set()  # other files with a name like ours
        self._released: set[str] = set()  # blocks of entries that were removed
        self._unread = False  # whether an index could not be read the last time, whose blocks are unknown
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._mode = _file_mode(self._folder.stat().st_mode)
            self._check_folder(os.listdir(self._folder))
        except OSError as error:
            raise self._refusal(directory, error.strerror or error) from error

    @staticmethod
    def _refusal(directory: object, why: object, fix: str = "give another folder") -> ValueError:
        return ValueError(f"cannot keep prompts in {directory}: {why}; {fix}")

    def _check_folder(self, files: Sequence[str]) -> None:
        """Marks an empty folder as a store; raises ValueError if the folder is not a store of this format."""
        if MARKER in files:
            try:
                marker = json.loads((self._folder / MARKER).read_bytes())
            except (ValueError, RecursionError):
                return  # a damaged marker is still one
            layout = marker.get("format", FORMAT) if isinstance(marker, dict) else FORMAT
            if layout == "parts":
                why = f"it was made by {marker.get('parts')}, of which each has a part"
                raise self._refusal(self._folder, why, "give another folder, on one machine")
            if layout != FORMAT:
                why = f"it is a prompt store of format {layout!r}, and this mlx-kv has format {FORMAT}"
                raise self._refusal(self._folder, why)
            return
        # A store of mlx-kv 0.1.0 had no marker. It may have a folder of damaged files.
        if foreign := sorted(file for file in files if file not in ("lock", "damaged") and not self._is_ours(file)):
            named = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
            raise self._refusal(
                self._folder, f"it is not a prompt store and holds {named}", "give a new or an empty folder"
            )
        self._replace(MARKER, json.dumps({"format": FORMAT, "about": ABOUT}).encode())

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

    # --- finding ------------------------------------------------------------------------------------------------------

    def find(self, tokens: Sequence[int]) -> tuple[list[Any], int] | None:
        """New caches for the longest prefix of a prompt, all but its last token at most.

        Returns:
            The caches, read from files, and the number of tokens they have read; None if no entry serves.
        """
        self.refresh()
        while (fetched := self.fetch(tokens)) is not None:
            if (caches := self.restore(fetched)) is not None:
                self.hits += 1
                self.tokens_reused += fetched.count
                return caches, fetched.count
        self.misses += 1
        return None

    def refresh(self) -> tuple[list[str], set[str]]:
        """Lists the folder, and reads the indexes of new entries; returns all names, and the digests of all blocks."""
        while self._unusable:
            self._remove(self._unusable.pop())
        files = os.listdir(self._folder)
        matches = [match for file in files if (match := _FILE.fullmatch(file))]
        entries, digests = ({match[1] for match in matches if match[2] == suffix} for suffix in ("json", "block"))
        known = self._table.entries().keys()
        for name in known - entries:
            self._forget(name)
        self._others = {name: used for name, used in self._others.items() if name in entries}
        self._unread = False
        for name in sorted(entries - known - self._ignored - self._others.keys()):
            try:
                entry = decode_index((self._folder / f"{name}.json").read_bytes())
            except FileNotFoundError:
                continue  # another process has just removed it
            except OSError:
                self._unread = True
            except ValueError:
                self._ignored.add(name)
            else:
                if isinstance(entry, IndexedEntry):
                    self._table.add(name, entry)
                else:
                    self._others[name] = entry
        return files, digests

    def fetch(self, tokens: Sequence[int]) -> StoredPrompt | None:
        """Reads the entry for the longest prefix of a prompt; skips missing ones, and removes damaged ones."""
        while (best := self._table.best(packed(tokens), self._bound())) is not None:
            name, count = best
            entry = self._table[name]
            try:
                file = self._read(name, entry)
            except FileNotFoundError:
                self._remove(name)
            except ValueError:
                self._skip(name)
                self._remove(name)
            else:
                self._touch(name)
                return StoredPrompt(name, count, len(entry) - count, file)
        return None

    def _read(self, name: str, entry: IndexedEntry) -> serialization.ReadFile:
        """The data of an entry, with its blocks.

        Raises:
            FileNotFoundError: the data or a block are missing.
            ValueError: the data or a block are damaged, or do not belong to the index. A damaged block is removed.
        """
        rest = serialization.read(self._folder / f"{name}.safetensors")
        metadata = {} if rest.description is None else rest.description.metadata
        if metadata.get("store_tokens") != tokens_digest(entry):
            raise ValueError("its tokens are not those of its index")
        if serialization.block_names(rest) != [[block for block, _, _ in column] for column in entry.columns if column]:
            raise ValueError("its blocks are not those of its index")
        return serialization.join_blocks(rest, self._read_block)

    def _read_block(self, block: str) -> tensor_files.TensorFile:
        try:
            return serialization.read_block(self._folder / f"{block}.block", block)
        except ValueError:
            self._delete(f"{block}.block")
            raise

    def restore(self, fetched: StoredPrompt) -> list[Any] | None:
        """The caches of an entry, trimmed to `fetched.count`; None, and the entry is removed, if they can't be made."""
        try:
            caches = fetched.file.restore().caches
            trim_prompt_cache(caches, fetched.excess, strict=True)
        except ValueError:
            self._skip(fetched.name)
            self._unusable.append(fetched.name)
            return None
        return caches

    def _skip(self, name: str) -> None:
        """A damaged entry is not found again, even if its files can't be removed."""
        self.damaged += 1
        self._ignored.add(name)
        self._forget(name)

    # --- keeping ------------------------------------------------------------------------------------------------------

    def keep(self, tokens: Sequence[int], caches: Sequence[Any]) -> bool:
        """Stores the caches that have read exactly these tokens, unless an entry serves as well.

        Removes entries that the new one makes superfluous, and then the least recently used until all fit.

        Returns:
            Whether there is a new entry.
        """
        new = self.pack(tokens, caches)
        return new is not None and self.write(new)

    def pack(self, tokens: Sequence[int], caches: Sequence[Any]) -> PackedEntry | None:
        """The entry that `keep` would write, from the caches as they are now; None if it is too short or too large."""
        caches = cache_list("caches", caches)
        entry = self._entry(tokens, caches, cache_statistics(caches).bytes_live)
        if entry is None:
            return None
        packed_caches = serialization.pack(caches, {"store_tokens": tokens_digest(entry)})
        if packed_caches.nbytes > self.max_bytes:
            return None
        return PackedEntry(uuid.uuid4().hex, replace(entry, bytes=packed_caches.nbytes), packed_caches)

    def write(self, new: PackedEntry) -> bool:
        """Writes a packed entry; returns the same as `keep`."""
        (_, existing), name, published = self.refresh(), new.name, False
        if (covering := self._table.covering(new.entry)) is not None:
            self._touch(covering)
            return False
        entry, cut = self._cut(new)
        self._touch(name)  # other processes see that a writer is at work, and remove nothing
        try:
            self._write_data(name, cut, existing)
            with self._locked():
                files, existing = self.refresh()
                if missing := entry.blocks.keys() - existing:  # which were removed meanwhile
                    self._write_data(name, cut, entry.blocks.keys() - missing)
                self._replace(f"{name}.json", encode_index(entry))
                published = True
                self._table.add(name, entry)
                self._sweep(files)
                self._make_room(name, entry)
                self._remove_released()
        except Exception:
            if not published:
                self._remove(name)
                self._released.update(entry.blocks)
            raise
        return True

    def _cut(self, new: PackedEntry) -> tuple[IndexedEntry, serialization.CutCaches]:
        """Cuts a packed entry into blocks.

        Blocks end where those of the nearest entry do, so that both share them, and where the two diverge, so that the
        next entry that diverges there shares that block, too.
        """
        nearest = self._table.nearest(new.entry.tokens, new.entry.fingerprint)

        def ends_to_share(column: int, slots: int) -> list[int]:
            if nearest is None or slots != len(new.entry):  # if slots are not positions, all are cut alike
                return []
            other, shared = nearest
            columns = other.columns[column : column + 1]
            ends = [end for end in accumulate(slots for blocks in columns for _, slots, _ in blocks) if end <= shared]
            return ends if shared == len(other) else [*ends, shared]

        cut, entry = serialization.cut_into_blocks(new.caches, ends_to_share), new.entry
        columns = tuple(tuple((block.name, block.slots, block.nbytes) for block in column) for column in cut.columns)
        return IndexedEntry(entry.tokens, entry.bytes, entry.least, entry.fingerprint, columns), cut

    def _write_data(self, name: str, cut: serialization.CutCaches, existing: set[str]) -> None:
        """Writes everything but the index and the existing blocks; after an error some files may be there."""
        for column in cut.columns:
            for block in column:
                if block.name not in existing:
                    block.write(self._folder / f"{block.name}.block", self._mode)
        cut.rest.write(self._folder / f"{name}.safetensors", self._mode)

    def _replace(self, file: str, content: bytes) -> None:
        """Writes a small file, whole or not at all."""
        partial = self._folder / f"{file}.{uuid.uuid4().hex}.partial"
        try:
            partial.touch(self._mode, exist_ok=False)
            partial.write_bytes(content)
            os.replace(partial, self._folder / file)
        except BaseException:
            self._delete(partial.name)
            raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Locks the store against other processes, on a drive with locks. Files are removed under this lock only."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self._folder / "lock", self._mode))
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            yield

    # --- times of use -------------------------------------------------------------------------------------------------

    def _touch(self, name: str) -> None:
        """Records for all processes that an entry is used, if possible."""
        now = time.time()
        self._table.touch(name, now)
        with contextlib.suppress(OSError):
            self._replace(f"{name}.used", str(now).encode())

    def _last_used(self, name: str) -> float:
        """In seconds since 1970; 0 if unknown."""
        try:
            return float((self._folder / f"{name}.used").read_bytes())
        except (OSError, ValueError):
            return 0.0

    # --- removing -----------------------------------------------------------------------------------------------------

    def remove(self, name: str) -> None:
        """Removes an entry, and blocks that no other entry uses."""
        self._remove(name)
        self._remove_released()

    def _remove(self, name: str) -> None:
        """Removes an entry; its blocks follow in `_remove_released`."""
        self._delete(f"{name}.json", f"{name}.safetensors", f"{name}.used")
        self._forget(name)

    def _forget(self, name: str) -> None:
        self._released.update(self._table.remove(name))

    def _delete(self, *files: str) -> None:
        """Deletes files if possible; the next listing has those that are left."""
        for file in files:
            with contextlib.suppress(OSError):
                (self._folder / file).unlink()

    def _used_blocks(self) -> set[str]:
        return self._table.blocks.union(*self._others.values())

    def _remove_released(self) -> None:
        """Removes blocks that no entry uses any more, unless an index that can't be read may."""
        if self._released:
            self.refresh()  # without locks, other processes may have added entries meanwhile
        if self._released and not self._unread:
            unused, self._released = self._released - self._used_blocks(), set()
            self._delete(*(f"{block}.block" for block in unused))

    def _sweep(self, files: Sequence[str]) -> None:
        """Removes files that killed writers left, unless an index that can't be read may name them."""
        if self._unread:
            return
        known = self._table.entries().keys() | self._others.keys() | self._used_blocks()
        for file in sorted(files):  # an index before its data, which identify a damaged index
            match = _FILE.fullmatch(file) or _PARTIAL.fullmatch(file)
            if match is None or file in self._foreign or (name := match[1] or match[2] or "") in known:
                continue
            with contextlib.suppress(OSError):
                last = max((self._folder / file).stat().st_mtime, self._last_used(name))
                if time.time() - last <= ORPHANED_AFTER:
                    continue
                if self._is_ours(file):
                    self._delete(file)
                else:
                    self._foreign.add(file)

    def _is_ours(self, file: str) -> bool:
        """Whether a store wrote this file, by its name and its content.

        Raises:
            OSError: it can't be read.
        """
        if _PARTIAL.fullmatch(file):
            return True
        match, path = _FILE.fullmatch(file), self._folder / file
        if match is None:
            return False
        with contextlib.suppress(ValueError, RecursionError, FileNotFoundError, IsADirectoryError):
            if match[2] == "used":
                return float(path.read_bytes()) > 0
            if match[2] == "block":
                return serialization.BLOCK_WORD in _metadata(path)
            if match[2] == "json":
                with contextlib.suppress(ValueError, RecursionError):
                    fields = json.loads(path.read_bytes())
                    return isinstance(fields, dict) and {"version", "tokens", "fingerprint"} <= fields.keys()
            words = _metadata(path.with_suffix(".safetensors"))  # also of an index that can't be decoded
            if serialization.VERSION_WORD in words:
                description = json.loads(words.get("description", ""))
                return isinstance(description, dict) and "store_tokens" in dict(description.get("metadata", {}))
        return False


def _metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file; empty if it is none."""
    return tensor_files.read_metadata(path) or {}
