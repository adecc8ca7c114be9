"""The folder of a prompt store: which of its files are the store's own.

Decides by names and by content: a marker says that a folder is a store, and what is deleted has a name that only a
store gives and holds what only a store writes. Whatever else lies there is somebody else's. Knows nothing about what an
index says (`entry_files`), which entry serves a prompt, nor when one is superfluous (`store`).

    mlx-kv-store             the marker
    <id>.json, .safetensors, .used   an entry; an id is 32 hex digits
    <digest>.block                   slots that entries share; a digest is 32 hex digits
    damaged/<time>-<id>.safetensors  entries that were set aside, the newest of them; blocks, too
    lock                     held by who decides what leaves
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

from mlx_kv.files import tensor_files
from mlx_kv.files.blocks import BLOCK_WORD
from mlx_kv.files.serialization import VERSION_WORD
from mlx_kv.prefixes.folder import PARTIAL, Folder

MARKER, FORMAT = "mlx-kv-store", 1
OF_PARTS = "parts"  # the format of a store that has a part of the caches, which no older version takes for its own
ABOUT = "Processed prompts, kept here by mlx-kv. To free the space, delete the whole folder."
DAMAGED, MOST_DAMAGED = "damaged", 16
_ID = "[0-9a-f]{32}"
_FILE = re.compile(rf"({_ID})\.(json|safetensors|used|block)")
# What is not there yet: its name has two random parts, and can be nobody else's.
_HALF = re.compile(
    rf"(?:{_ID}\.(?:json|safetensors|used|block)|{MARKER}){PARTIAL}|\.{_ID}\.(?:safetensors|block)\.[0-9a-f]{{16}}\.tmp"
)
_SET_ASIDE = re.compile(rf"(?:([0-9]{{10}})-)?{_ID}\.(?:safetensors|block)")


def id_of(file: str) -> str | None:
    """The entry that a file is a part of, or the block that it is; None if it has no name that a store gives."""
    if not (_FILE.fullmatch(file) or _HALF.fullmatch(file)):
        return None
    match = re.match(rf"\.?({_ID})\.", file)
    return "" if match is None else match[1]


def indexed(files: Iterable[str]) -> set[str]:
    """The entries that have an index."""
    return _with_suffix(files, "json")


def blocks_among(files: Iterable[str]) -> set[str]:
    """The digests of all files that may be blocks."""
    return _with_suffix(files, "block")


def _with_suffix(files: Iterable[str], suffix: str) -> set[str]:
    matches = map(_FILE.fullmatch, files)
    return {match[1] for match in matches if match is not None and match[2] == suffix}


class StoreFolder:
    """A folder as a store's own.

    Args:
        directory: a path or a URL of fsspec; made if not there.
        deadline: seconds that its answers may take, if it lies elsewhere.
        words: which part of the caches a store here has, as its marker says; "" is all. Another one is refused.

    Attributes:
        folder: its files.

    Raises:
        ValueError: it cannot be used, or holds other things than a store. One elsewhere that does not answer is no
            error: it is looked at again before it is used.
    """

    def __init__(self, directory: str | Path, deadline: float, words: str) -> None:
        self._named, self._words_of_parts, self._checked = str(directory), words, False
        try:
            self.folder = Folder(directory, deadline)
        except (OSError, ImportError) as error:
            raise self._refusal(error) from error
        try:
            with self.folder.within(deadline):
                self._check()
        except OSError as error:
            if not self.folder.far or isinstance(error, FileNotFoundError | PermissionError):
                raise self._refusal(error) from error

    def _refusal(self, error: Exception) -> ValueError:
        why = getattr(error, "strerror", None) or error
        return ValueError(f"cannot keep prompts in {self._named}: {why}; give another place")

    def names(self) -> list[str]:
        """Of all files.

        Raises:
            ValueError: it turns out to hold other things than a store.
        """
        return self.folder.names() if self._checked else self._check()

    def _check(self) -> list[str]:
        files = self.folder.names()
        if MARKER in files:
            self._check_format()
        else:
            if strange := [file for file in files if not self._as_of_old(file)]:
                named = ", ".join(sorted(strange)[:3]) + (", …" if len(strange) > 3 else "")
                raise ValueError(
                    f"cannot keep prompts in {self._named}: it is no prompt store and holds {named}; "
                    "give a new or an empty folder"
                )
            self._check_parts("" if files else self._words_of_parts)
            told = (
                {"format": FORMAT} if not self._words_of_parts else {"format": OF_PARTS, "parts": self._words_of_parts}
            )
            self.folder.write(MARKER, json.dumps(told | {"about": ABOUT}).encode())
        self._checked = True
        return files

    def _check_format(self) -> None:
        told: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            told = json.loads(self.folder.read(MARKER))
        found = told.get("format") if isinstance(told, dict) else None
        if found is None:
            return  # a marker that cannot be read is one all the same
        if found not in (FORMAT, OF_PARTS):
            raise ValueError(
                f"cannot keep prompts in {self._named}: it is a prompt store of format {found!r}, and this mlx-kv has "
                f"format {FORMAT}; give another folder"
            )
        self._check_parts(str(told.get("parts", "")))

    def _check_parts(self, there: str) -> None:
        if there != self._words_of_parts:
            made, wanted = (words or "one process, which has all" for words in (there, self._words_of_parts))
            raise ValueError(
                f"cannot keep prompts in {self._named}: it was made by {made}, not by {wanted}; "
                "give another folder, or start as many ranks with the same split"
            )

    def _as_of_old(self, file: str) -> bool:
        """Whether this may be part of a store that has no marker, as those of mlx-kv 0.1.0 had none."""
        if file == DAMAGED:
            return self.folder.is_folder(file) and all(map(_SET_ASIDE.fullmatch, self.folder.names(DAMAGED)))
        return (file == "lock" and self.folder.size(file) == 0) or self.wrote(file)

    def wrote(self, file: str) -> bool:
        """Whether a store wrote this file, by its name and by what is in it.

        Raises:
            OSError: it cannot be read.
        """
        if _HALF.fullmatch(file):
            return True
        match = _FILE.fullmatch(file)
        if match is None:
            return False
        name, suffix = match.groups()
        with contextlib.suppress(ValueError, RecursionError, FileNotFoundError, IsADirectoryError):
            if suffix == "used":
                return float(self.folder.read(file)) > 0
            if suffix == "safetensors":
                return self._is_data(file)
            if suffix == "block":
                return BLOCK_WORD in self._words(file)
            with contextlib.suppress(ValueError, RecursionError):
                told = json.loads(self.folder.read(file))
                return isinstance(told, dict) and {"version", "tokens", "fingerprint"} <= told.keys()
            return self._is_data(f"{name}.safetensors")  # an index that cannot be read, beside what it is of
        return False

    def _words(self, file: str) -> dict[str, str]:
        length = int.from_bytes(self.folder.beginning(file, 8), "little")
        if length > tensor_files.MOST_HEADER_BYTES:
            return {}
        return tensor_files.words_of(BytesIO(self.folder.beginning(file, 8 + length)), self.folder.size(file)) or {}

    def _is_data(self, file: str) -> bool:
        words = self._words(file)
        if VERSION_WORD not in words:
            return False
        told = json.loads(words.get("description", ""))
        return isinstance(told, dict) and "store_tokens" in dict(told.get("metadata", {}))

    def set_aside(self, file: str, most_bytes: int) -> None:
        """Moves data to `damaged/`, where the newest stay: MOST_DAMAGED of them, and so many bytes."""
        with contextlib.suppress(OSError):
            self.folder.move(file, DAMAGED, f"{int(time.time()):010}-{file}")
        with contextlib.suppress(OSError):
            held = 0
            names = self.folder.names(DAMAGED)
            found = [(match[1] or "", name) for name in names if (match := _SET_ASIDE.fullmatch(name))]
            for count, (_, name) in enumerate(sorted(found, reverse=True), 1):
                held += self.folder.size(f"{DAMAGED}/{name}")
                if count > MOST_DAMAGED or held > most_bytes:
                    self.folder.delete(f"{DAMAGED}/{name}")

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """One process at a time decides what leaves. Elsewhere than on a local disk, two may remove the same."""
        return self.folder.locked("lock")
