"""The folder of a prompt store: which of its files are the store's own, how one comes to be, and how one goes.

Decides by names and by content: a marker says that a folder is a store, and what is deleted has a name that only a
store gives and holds what only a store writes. Whatever else lies there is somebody else's. Knows nothing about which
entry serves a prompt, nor when one is superfluous (`prompt_store`).

    mlx-kv-store             the marker
    <id>.json, .safetensors, .used   an entry; an id is 32 hex digits
    damaged/<time>-<id>.safetensors  entries that were set aside, the newest of them
    lock                     held by who decides what leaves
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec

from mlx_kv.files import tensor_files
from mlx_kv.files.locks import locked
from mlx_kv.files.serialization import VERSION_WORD

MARKER, FORMAT = "mlx-kv-store", 1
ABOUT = "Processed prompts, kept here by mlx-kv. To free the space, delete the whole folder."
DAMAGED, MOST_DAMAGED = "damaged", 16
_ID = "[0-9a-f]{32}"
_ENTRY = re.compile(rf"({_ID})\.(json|safetensors|used)")
# What is not there yet: its name has two random parts, and can be nobody else's.
_HALF = re.compile(
    rf"(?:{_ID}\.(?:json|safetensors|used)|{MARKER})\.{_ID}\.partial|\.{_ID}\.safetensors\.[0-9a-f]{{16}}\.tmp"
)
_SET_ASIDE = re.compile(rf"(?:([0-9]{{10}})-)?{_ID}\.safetensors")


class StoreFolder:
    """A folder on any file system of fsspec, as a store's own.

    Args:
        directory: a path or a URL; made if not there.

    Raises:
        ValueError: it cannot be used, or holds other things than a store.
    """

    def __init__(self, directory: str | Path) -> None:
        try:
            self.fs, self.root = fsspec.core.url_to_fs(str(directory))
            self.local = "file" in (self.fs.protocol if isinstance(self.fs.protocol, tuple) else (self.fs.protocol,))
            self.fs.makedirs(self.root, exist_ok=True)
            files = self.files()
            if MARKER in files:
                self._check_format(directory)
                return
            if strange := [file for file in files if not self._as_of_old(file)]:
                named = ", ".join(sorted(strange)[:3]) + (", …" if len(strange) > 3 else "")
                raise ValueError(
                    f"cannot keep prompts in {directory}: it is no prompt store and holds {named}; "
                    "give a new or an empty folder"
                )
            self.write(MARKER, json.dumps({"format": FORMAT, "about": ABOUT}).encode())
        except (OSError, ImportError) as error:
            raise ValueError(
                f"cannot keep prompts in {directory}: {getattr(error, 'strerror', None) or error}; give another place"
            ) from error

    def _check_format(self, directory: str | Path) -> None:
        told: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            told = json.loads(self.read(MARKER))
        found = told.get("format") if isinstance(told, dict) else None
        if found not in (FORMAT, None):  # a marker that cannot be read is one all the same
            raise ValueError(
                f"cannot keep prompts in {directory}: it is a prompt store of format {found!r}, and this mlx-kv has "
                f"format {FORMAT}; give another folder"
            )

    def _as_of_old(self, file: str) -> bool:
        """Whether this may be part of a store that has no marker, as those of mlx-kv 0.1.0 had none."""
        path = self.path(file)
        if file == DAMAGED:
            return self.fs.isdir(path) and all(map(_SET_ASIDE.fullmatch, self.files(DAMAGED)))
        return (file == "lock" and self.fs.info(path)["size"] == 0) or self.wrote(file)

    # --- which files ----------------------------------------------------------------------------------------------

    def path(self, file: str) -> str:
        return f"{self.root}/{file}"

    def files(self, folder: str = "") -> list[str]:
        """The names of all there is."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(self.path(folder) if folder else self.root, detail=False)
        except FileNotFoundError:  # where folders are no more than the beginnings of names
            return []
        return [path.rstrip("/").rsplit("/", 1)[-1] for path in found]

    @staticmethod
    def id_of(file: str) -> str | None:
        """The entry that a file is a part of, by its name; None if it has none that a store gives."""
        if not (_ENTRY.fullmatch(file) or _HALF.fullmatch(file)):
            return None
        match = re.match(rf"\.?({_ID})\.", file)
        return "" if match is None else match[1]

    @staticmethod
    def indexed(files: list[str]) -> set[str]:
        """The entries that have an index."""
        return {file.removesuffix(".json") for file in files if file.endswith(".json") and _ENTRY.fullmatch(file)}

    def wrote(self, file: str) -> bool:
        """Whether a store wrote this file, by its name and by what is in it.

        Raises:
            OSError: it cannot be read.
        """
        if _HALF.fullmatch(file):
            return True
        match = _ENTRY.fullmatch(file)
        if match is None:
            return False
        name, suffix = match.groups()
        with contextlib.suppress(ValueError, RecursionError, FileNotFoundError, IsADirectoryError):
            if suffix == "used":
                return float(self.read(file)) > 0
            if suffix == "safetensors":
                return self._is_data(file)
            with contextlib.suppress(ValueError, RecursionError):
                told = json.loads(self.read(file))
                return isinstance(told, dict) and {"version", "tokens", "fingerprint"} <= told.keys()
            return self._is_data(f"{name}.safetensors")  # an index that cannot be read, beside what it is of
        return False

    def _is_data(self, file: str) -> bool:
        path = self.path(file)
        with self.fs.open(path, "rb") as opened:
            words = tensor_files.words_of(opened, self.fs.info(path)["size"])
        if words is None or VERSION_WORD not in words:
            return False
        told = json.loads(words.get("description", ""))
        return isinstance(told, dict) and "store_tokens" in dict(told.get("metadata", {}))

    def age(self, file: str) -> float | None:
        """Seconds since it was written; None where nobody knows."""
        try:
            written: float = self.fs.modified(self.path(file)).timestamp()
            return time.time() - written
        except (OSError, NotImplementedError, KeyError):
            return None

    # --- one file ---------------------------------------------------------------------------------------------------

    def read(self, file: str) -> bytes:
        content: bytes = self.fs.cat_file(self.path(file))
        return content

    def write(self, file: str, content: bytes) -> None:
        """Whole, or not at all."""
        with self._moved_to(file) as partial:
            self.fs.pipe_file(partial, content)

    def write_by(self, file: str, write: Callable[[Path], object]) -> None:
        """The same, by somebody who writes local files whole or not at all."""
        if self.local:
            write(Path(self.path(file)))
            return
        with tempfile.TemporaryDirectory() as folder, self._moved_to(file) as partial:
            made = Path(folder) / "made.safetensors"
            write(made)
            self.fs.put_file(str(made), partial)

    @contextlib.contextmanager
    def _moved_to(self, file: str) -> Iterator[str]:
        partial = f"{file}.{uuid.uuid4().hex}.partial"
        try:
            yield self.path(partial)
            self.fs.mv(self.path(partial), self.path(file))
        except BaseException:
            self.delete(partial)
            raise

    @contextlib.contextmanager
    def as_local(self, file: str) -> Iterator[Path]:
        if self.local:
            yield Path(self.path(file))
            return
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "copy.safetensors"
            self.fs.get_file(self.path(file), str(copy))
            yield copy

    def delete(self, file: str) -> None:
        """If it can be; what cannot is found again."""
        with contextlib.suppress(OSError):
            self.fs.rm_file(self.path(file))

    def set_aside(self, file: str, most_bytes: int) -> None:
        """Moves data to `damaged/`, where the newest stay: MOST_DAMAGED of them, and so many bytes."""
        with contextlib.suppress(OSError):
            self.fs.makedirs(self.path(DAMAGED), exist_ok=True)
            self.fs.mv(self.path(file), self.path(f"{DAMAGED}/{int(time.time()):010}-{file}"))
        with contextlib.suppress(OSError):
            held = 0
            found = [(match[1] or "", name) for name in self.files(DAMAGED) if (match := _SET_ASIDE.fullmatch(name))]
            for count, (_, name) in enumerate(sorted(found, reverse=True), 1):
                held += self.fs.info(self.path(f"{DAMAGED}/{name}"))["size"]
                if count > MOST_DAMAGED or held > most_bytes:
                    self.delete(f"{DAMAGED}/{name}")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time decides what leaves. Elsewhere than on a local disk, two may remove the same."""
        if not self.local:
            yield
            return
        with locked(self.path("lock")):
            yield
