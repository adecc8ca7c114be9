"""The files of a prompt store: their names, which of them are the store's own, and in which order they change.

    mlx-kv-store                     marks the folder as a store
    <id>.used                        when an entry was last used
    <digest>.block                   slots that several entries may share
    <id>.safetensors                 the rest of an entry's caches, with a checksum
    <id>.json                        its index: tokens, bytes, how far it can be trimmed, its blocks, and a checksum
    damaged/<time>-<id>.safetensors  damaged entries that were set aside, the newest of them; blocks, too
    lock                             held while files are published or removed

An id or a digest is 32 hex digits. The index is written last and removed first, so readers never find half an entry.
Files that killed writers left are removed after an hour. A file is only deleted if its name and its content are those
of a store's file: any other file in the folder is left alone. An index of another version is left alone, too, with the
blocks that it names.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from mlx_kv.files import blocks, serialization, tensor_files
from mlx_kv.prefixes.blob_store import PARTIAL, BlobStore
from mlx_kv.prefixes.store_index import ID, IndexedEntry, decode_index, encode_index, tokens_digest

MARKER, FORMAT = "mlx-kv-store", 1
FORMAT_OF_SHARDS = "parts"  # of a store with a part of the caches, which older versions refuse
ABOUT = "Processed prompts, kept here by mlx-kv. To free the space, delete the whole folder."
DAMAGED, MAX_DAMAGED = "damaged", 16
READ_AT_ONCE = 64  # indexes
ORPHANED_AFTER = 3600.0  # seconds; younger files without an index may be those of a writer at work
_FILE = re.compile(rf"({ID})\.(json|safetensors|used|block)")
# Files that are being written; two random parts make the names unique to a store.
_PARTIAL = re.compile(
    rf"(?:{ID}\.(?:json|safetensors|used|block)|{MARKER}){PARTIAL}|\.{ID}\.(?:safetensors|block)\.[0-9a-f]{{16}}\.tmp"
)
_SET_ASIDE = re.compile(rf"(?:([0-9]{{10}})-)?{ID}\.(?:safetensors|block)")


class Listing(NamedTuple):
    """The files of a store: all names, the entries with an index, and the digests of blocks."""

    files: list[str]
    entries: set[str]
    blocks: set[str]

    @classmethod
    def of(cls, files: list[str]) -> Listing:
        def ids(suffix: str) -> set[str]:
            return {file[:32] for file in files if file.endswith(suffix) and _FILE.fullmatch(file)}

        return cls(files, ids(".json"), ids(".block"))


class StoreLayout:
    """The files of a store in one folder.

    Args:
        directory: a path or a URL; created if missing.
        deadline: seconds for the first look at a remote folder.
        shards: which part of the caches the store has, recorded in its marker; "" is all.
        max_damaged_bytes: of all damaged files that are set aside.

    Attributes:
        blobs: the folder.

    Raises:
        ValueError: the folder can't be used, or is not a store of these shards. A remote one that does not answer is
            checked later.
    """

    def __init__(self, directory: str | Path, deadline: float, shards: str, max_damaged_bytes: float) -> None:
        self._named, self._shards, self._max_damaged_bytes = str(directory), shards, max_damaged_bytes
        self._checked = False
        self._foreign: set[str] = set()  # other files with a name like ours
        try:
            self.blobs = BlobStore(directory, deadline)
        except (OSError, ImportError) as error:
            raise self._refusal(getattr(error, "strerror", None) or error) from error
        try:
            with self.blobs.within(deadline):
                self.listing()
        except OSError as error:
            if not self.blobs.far or isinstance(error, FileNotFoundError | PermissionError):
                raise self._refusal(getattr(error, "strerror", None) or error) from error

    def _refusal(self, why: object, fix: str = "give another folder") -> ValueError:
        return ValueError(f"cannot keep prompts in {self._named}: {why}; {fix}")

    def listing(self) -> Listing:
        """All files.

        Raises:
            ValueError: the folder was not checked before, and is not a store of these shards.
        """
        files = self.blobs.names()
        if not self._checked:
            self._check(files)
            self._checked = True
        return Listing.of(files)

    # --- which files are the store's ----------------------------------------------------------------------------------

    def _check(self, files: list[str]) -> None:
        if MARKER in files:
            marker: Any = None
            with contextlib.suppress(ValueError, RecursionError):
                marker = json.loads(self.blobs.read(MARKER))
            found = marker.get("format") if isinstance(marker, dict) else None
            if found is None:
                return  # a damaged marker is still one
            if found not in (FORMAT, FORMAT_OF_SHARDS):
                raise self._refusal(f"it is a prompt store of format {found!r}, and this mlx-kv has format {FORMAT}")
            self._check_shards(str(marker.get("parts", "")))
            return
        if foreign := sorted(file for file in files if not self._may_be_of_0_1(file)):
            named = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
            raise self._refusal(f"it is not a prompt store and holds {named}", "give a new or an empty folder")
        if files:
            self._check_shards("")
        fields = {"format": FORMAT_OF_SHARDS, "parts": self._shards} if self._shards else {"format": FORMAT}
        self.blobs.write(MARKER, json.dumps(fields | {"about": ABOUT}).encode())

    def _check_shards(self, found: str) -> None:
        if found != self._shards:
            made, wanted = (shards or "one process, which has all" for shards in (found, self._shards))
            fix = "give another folder, or start as many ranks with the same split"
            raise self._refusal(f"it was made by {made}, not by {wanted}", fix)

    def _may_be_of_0_1(self, file: str) -> bool:
        """Whether a store of mlx-kv 0.1.0, which had no marker, may have this file."""
        if file == DAMAGED:
            return all(map(_SET_ASIDE.fullmatch, self.blobs.names(DAMAGED)))
        return (file == "lock" and self.blobs.size(file) == 0) or self._is_ours(file)

    def _is_ours(self, file: str) -> bool:
        """Whether a store wrote this file, by its name and its content.

        Raises:
            OSError: it can't be read.
        """
        if _PARTIAL.fullmatch(file):
            return True
        match = _FILE.fullmatch(file)
        if match is None:
            return False
        with contextlib.suppress(ValueError, RecursionError, FileNotFoundError, IsADirectoryError):
            if match[2] == "used":
                return float(self.blobs.read(file)) > 0
            if match[2] == "block":
                return blocks.BLOCK_WORD in self._header(file)
            if match[2] == "json":
                with contextlib.suppress(ValueError, RecursionError):
                    fields = json.loads(self.blobs.read(file))
                    return isinstance(fields, dict) and {"version", "tokens", "fingerprint"} <= fields.keys()
            words = self._header(f"{match[1]}.safetensors")  # also of an index that can't be decoded
            if serialization.VERSION_WORD in words:
                description = json.loads(words.get("description", ""))
                return isinstance(description, dict) and "store_tokens" in dict(description.get("metadata", {}))
        return False

    def _header(self, file: str) -> dict[str, str]:
        """The metadata of a safetensors file; empty if it is none."""
        length = int.from_bytes(self.blobs.read(file, 8), "little")
        if length > tensor_files.MAX_HEADER_BYTES:
            return {}
        return tensor_files.words_of(BytesIO(self.blobs.read(file, 8 + length)), self.blobs.size(file)) or {}

    # --- reading ----------------------------------------------------------------------------------------------------

    def read_indexes(self, names: Sequence[str]) -> Iterator[tuple[str, IndexedEntry | frozenset[str] | Exception]]:
        """What `decode_index` returns for each entry; or an OSError of reading it, or a ValueError if it is damaged."""
        for batch in (names[first : first + READ_AT_ONCE] for first in range(0, len(names), READ_AT_ONCE)):
            for name, content in zip(batch, self.blobs.read_many([f"{name}.json" for name in batch]), strict=True):
                try:
                    yield name, content if isinstance(content, Exception) else decode_index(content)
                except ValueError as error:
                    yield name, error

    def read(self, name: str, entry: IndexedEntry) -> serialization.ReadFile:
        """The data of an entry, with its blocks. A damaged block is set aside.

        Raises:
            FileNotFoundError: the data or a block are missing.
            ValueError: the data or a block are damaged, or do not belong to the index.
        """
        data = f"{name}.safetensors"
        with self.blobs.local_paths([data, *(f"{block}.block" for block in entry.blocks)], entry.bytes) as paths:
            rest = serialization.read(paths[data])
            metadata = {} if rest.description is None else rest.description.metadata
            if metadata.get("store_tokens") != tokens_digest(entry):
                raise ValueError("its tokens are not those of its index")
            if blocks.blocks_of(rest) != [[block for block, _, _ in column] for column in entry.columns if column]:
                raise ValueError("its blocks are not those of its index")
            return blocks.joined(rest, lambda block: self._read_block(block, paths[f"{block}.block"]))

    def _read_block(self, block: str, path: Path) -> tensor_files.TensorFile:
        try:
            return blocks.read_block(path, block)
        except ValueError:
            self._set_aside(f"{block}.block")
            self.remove_blocks(block)
            raise

    # --- writing, and removing --------------------------------------------------------------------------------------

    def write(self, name: str, caches: blocks.CutCaches, existing: AbstractSet[str]) -> None:
        """Writes everything but the index and the existing blocks.

        Raises:
            OSError: then some files may be there.
        """
        new = [block for column in caches.columns for block in column if block.name not in existing]
        writers: dict[str, Callable[[Path], object]] = {f"{block.name}.block": block.write for block in new}
        self.blobs.write_many(writers | {f"{name}.safetensors": caches.rest.write})

    def publish(self, name: str, entry: IndexedEntry, caches: blocks.CutCaches, existing: AbstractSet[str]) -> None:
        """Writes the index, after blocks that were removed meanwhile. Raises OSError."""
        missing = entry.blocks.keys() - existing
        if missing:
            self.write(name, caches, entry.blocks.keys() - missing)
        self.blobs.write(f"{name}.json", encode_index(entry))

    def touch(self, name: str, now: float) -> None:
        """Records for all processes that an entry was used, if possible."""
        with contextlib.suppress(OSError):
            self.blobs.write(f"{name}.used", str(now).encode())

    def last_used(self, name: str) -> float:
        """When any process last used an entry, in seconds since 1970; 0 if unknown."""
        if dated := self.last_used_in_listing(name):
            return dated
        try:
            return float(self.blobs.read(f"{name}.used"))
        except (OSError, ValueError):
            return 0.0

    def last_used_in_listing(self, name: str) -> float:
        """The same, without a request: 0 on file systems whose listings have no dates."""
        return max(self.blobs.written(f"{name}.{suffix}") for suffix in ("used", "json"))

    def remove(self, name: str) -> None:
        """Removes an entry, but not its blocks."""
        self.blobs.delete(f"{name}.json")
        self.blobs.delete(f"{name}.safetensors", f"{name}.used")

    def remove_blocks(self, *names: str) -> None:
        self.blobs.delete(*(f"{name}.block" for name in names))

    def set_aside(self, name: str) -> None:
        """Removes an entry, but keeps its data in `damaged/`."""
        self._set_aside(f"{name}.safetensors")
        self.remove(name)

    def _set_aside(self, file: str) -> None:
        """Moves a file to `damaged/`, where the newest MAX_DAMAGED stay, and no more than max_damaged_bytes."""
        with contextlib.suppress(OSError):
            self.blobs.move(file, DAMAGED, f"{int(time.time()):010}-{file}")
        with contextlib.suppress(OSError):
            total, names = 0, self.blobs.names(DAMAGED)
            found = [(match[1] or "", name) for name in names if (match := _SET_ASIDE.fullmatch(name))]
            for count, (_, name) in enumerate(sorted(found, reverse=True), 1):
                total += self.blobs.size(f"{DAMAGED}/{name}")
                if count > MAX_DAMAGED or total > self._max_damaged_bytes:
                    self.blobs.delete(f"{DAMAGED}/{name}")

    def is_old(self, name: str) -> bool:
        """Whether an entry is too old for its writer to be still at work."""
        return self.blobs.age(f"{name}.json") > ORPHANED_AFTER

    def sweep(self, files: Iterable[str], known: AbstractSet[str]) -> None:
        """Removes files that killed writers left.

        Args:
            known: entries and blocks that stay.
        """
        for file in sorted(files):  # an index before its data, which identify a damaged index
            match = re.match(rf"\.?({ID})\.", file)
            name = "" if match is None else match[1]
            if not (_FILE.fullmatch(file) or _PARTIAL.fullmatch(file)) or name in known or file in self._foreign:
                continue
            if self.blobs.age(file) <= ORPHANED_AFTER or time.time() - self.last_used(name) <= ORPHANED_AFTER:
                continue
            with contextlib.suppress(OSError):
                if self._is_ours(file):
                    self.blobs.delete(file)
                else:
                    self._foreign.add(file)
