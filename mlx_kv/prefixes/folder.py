"""A folder on any file system of fsspec: files by name, each whole or not at all.

Decides how a file comes to be where renaming is all that one can count on: beside its place, under a name with two
random parts, and then by its own. What is written to a local disk by somebody who does more than that, such as to wait
for the disk (`mlx_kv.files.replacing`), is left to them. Knows nothing about what the files are for.
"""

from __future__ import annotations

import contextlib
import errno
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import fsspec

from mlx_kv.files.locks import locked

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)  # what network drives say
PARTIAL = r"\.[0-9a-f]{32}\.partial"  # how the name of a file that is not there yet goes on


class Folder:
    """Args:
        directory: a path or a URL; made if not there.

    Raises:
        OSError, ValueError, ImportError: it cannot be used.
    """

    def __init__(self, directory: str | Path) -> None:
        self._fs, self._root = fsspec.core.url_to_fs(str(directory))
        self._local = "file" in (self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,))
        self._fs.makedirs(self._root, exist_ok=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    # --- what is there --------------------------------------------------------------------------------------------

    def names(self, inside: str = "") -> list[str]:
        """Of all there is, here or in a folder of this name."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._path(inside) if inside else self._root, detail=False)
        except FileNotFoundError:  # where folders are no more than the beginnings of names
            return []
        return [path.rstrip("/").rsplit("/", 1)[-1] for path in found]

    def is_folder(self, name: str) -> bool:
        return bool(self._fs.isdir(self._path(name)))

    def size(self, name: str) -> int:
        """In bytes."""
        size: int = self._fs.info(self._path(name))["size"]
        return size

    def age(self, name: str) -> float | None:
        """Seconds since it was written; None where nobody knows."""
        try:
            written: float = self._fs.modified(self._path(name)).timestamp()
            return time.time() - written
        except (OSError, NotImplementedError, KeyError):
            return None

    # --- reading --------------------------------------------------------------------------------------------------

    def read(self, name: str) -> bytes:
        content: bytes = self._fs.cat_file(self._path(name))
        return content

    def open(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        opened: contextlib.AbstractContextManager[IO[bytes]] = self._fs.open(self._path(name), "rb")
        return opened

    @contextlib.contextmanager
    def as_local(self, name: str) -> Iterator[Path]:
        """The file, or a copy of it, by a path for the time being."""
        if self._local:
            yield Path(self._path(name))
            return
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "copy.safetensors"
            self._fs.get_file(self._path(name), str(copy))
            yield copy

    # --- changing -------------------------------------------------------------------------------------------------

    def write(self, name: str, content: bytes) -> None:
        """Whole, or not at all."""
        with self._moved_to(name) as partial:
            self._fs.pipe_file(partial, content)

    def write_by(self, name: str, write: Callable[[Path], object]) -> None:
        """The same, by somebody who writes local files whole or not at all."""
        if self._local:
            write(Path(self._path(name)))
            return
        with tempfile.TemporaryDirectory() as folder, self._moved_to(name) as partial:
            made = Path(folder) / "made.safetensors"
            write(made)
            self._fs.put_file(str(made), partial)

    @contextlib.contextmanager
    def _moved_to(self, name: str) -> Iterator[str]:
        partial = f"{name}.{uuid.uuid4().hex}.partial"
        try:
            yield self._path(partial)
            self._fs.mv(self._path(partial), self._path(name))
        except BaseException:
            self.delete(partial)
            raise

    def move(self, name: str, inside: str, new: str) -> None:
        """To this name in a folder of this one, which is made if not there."""
        self._fs.makedirs(self._path(inside), exist_ok=True)
        self._fs.mv(self._path(name), self._path(f"{inside}/{new}"))

    def delete(self, name: str) -> None:
        """If it can be; what cannot is found again."""
        with contextlib.suppress(OSError):
            self._fs.rm_file(self._path(name))

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """One process at a time goes on, on a local disk; where there are no locks nobody waits for anybody."""
        with contextlib.ExitStack() as held:
            if self._local:
                try:
                    held.enter_context(locked(self._path(name)))
                except OSError as error:
                    if error.errno not in NO_LOCKS:
                        raise
            yield
