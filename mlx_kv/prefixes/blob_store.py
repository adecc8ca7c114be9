"""Files in one folder of any fsspec file system, each written whole or not at all.

Object stores write an object whole or not at all. Elsewhere a file is written under a temporary name and renamed. Large
local files are also synchronised to the disk, by their writer (`mlx_kv.files`). On remote file systems a listing is
reused, as every call is a request.

Calls to asynchronous fsspec file systems, as most remote ones are, have a deadline (`TimedFS`) and run concurrently.
Synchronous remote ones (`sftp://`) have none.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import tempfile
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import fsspec.asyn

from mlx_kv.files.atomic_write import locked

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)  # errors of network drives
PARTIAL = r"\.[0-9a-f]{32}\.partial"  # suffix of a file that is being written
MAX_CONCURRENT = 8  # calls
RETRY_AFTER = 5.0  # seconds without calls to a file system that did not answer
MIN_BANDWIDTH = 2**20  # bytes per second; extends the deadline of large transfers
# Protocols without folders, and with atomic writes.
OBJECT_STORES = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss"))


class TimedFS:
    """Calls to an fsspec file system. Errors of remote ones become OSError, and calls have a deadline if possible.

    Args:
        fs: of fsspec.
        where: its name, for errors.
        deadline: seconds for one call, more for large transfers; see also `within`.

    Attributes:
        timed: whether calls have a deadline.
        local: whether this is the local file system.
    """

    def __init__(self, fs: Any, where: str, deadline: float) -> None:
        self._fs, self._where, self._deadline = fs, where, deadline
        self.timed = bool(fs.async_impl) and not fs.asynchronous
        self.local = "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)
        self._ends = threading.local()  # when this thread's `within` ends
        self._retry_at = 0.0

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Gives all calls of this thread in the block one common deadline."""
        before = getattr(self._ends, "at", None)
        self._ends.at = min(time.monotonic() + seconds, float("inf") if before is None else before)
        try:
            yield
        finally:
            self._ends.at = before

    def call(self, method: str, *arguments: Any, nbytes: int = 0, **options: Any) -> Any:
        """Calls a method of the file system.

        Args:
            nbytes: that the call transfers.

        Raises:
            TimeoutError: there was no answer, now or within the last RETRY_AFTER seconds.
            OSError: any other error.
        """
        (found,) = self.call_many(method, [arguments], nbytes, **options)
        if isinstance(found, Exception):
            raise found
        return found

    def call_many(self, method: str, calls: Sequence[Sequence[Any]], nbytes: int = 0, **options: Any) -> list[Any]:
        """The result of a method, or the error it raised, for each of several lists of arguments.

        Raises:
            TimeoutError: some calls had no answer, now or within the last RETRY_AFTER seconds.
        """
        if self.timed:
            asynchronous = getattr(self._fs, f"_{method}")
            found = self._timed([partial(asynchronous, *arguments, **options) for arguments in calls], nbytes)
        else:
            found = [_attempt(partial(getattr(self._fs, method), *arguments, **options)) for arguments in calls]
        return found if self.local else [_as_os_error(one) for one in found]

    def _timed(self, calls: Sequence[Callable[[], Awaitable[Any]]], nbytes: int) -> list[Any]:
        if not calls:
            return []
        ends = getattr(self._ends, "at", None)
        seconds = self._deadline + nbytes / MIN_BANDWIDTH if ends is None else ends - time.monotonic()
        late = TimeoutError(errno.ETIMEDOUT, f"{self._where} has not answered in time")
        if time.monotonic() < self._retry_at:
            raise TimeoutError(errno.ETIMEDOUT, f"{self._where} did not respond a moment ago")
        if seconds <= 0:
            raise late
        try:
            found: list[Any] = fsspec.asyn.sync(self._fs.loop, _gather, calls, timeout=seconds)
        except TimeoutError:
            self._retry_at = time.monotonic() + RETRY_AFTER
            raise late from None
        if all(map(_is_unreachable, found)):
            self._retry_at = time.monotonic() + RETRY_AFTER
        return found


async def _gather(calls: Sequence[Callable[[], Awaitable[Any]]]) -> list[Any]:
    """The results or errors of all calls, MAX_CONCURRENT at a time."""
    slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def run(call: Callable[[], Awaitable[Any]]) -> Any:
        async with slots:
            return await call()

    return await asyncio.gather(*map(run, calls), return_exceptions=True)


def _attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


def _is_unreachable(found: Any) -> bool:
    """Whether this is an error of the connection; an OSError is an answer of the file system."""
    return isinstance(found, Exception) and (isinstance(found, ConnectionError) or not isinstance(found, OSError))


def _as_os_error(found: Any) -> Any:
    """Converts the errors of botocore and HTTP clients; returns anything else unchanged."""
    if not isinstance(found, Exception) or isinstance(found, OSError | MemoryError):
        return found
    return OSError(errno.EIO, " ".join(f"{type(found).__name__}: {found}".split()))


# --- a folder ---------------------------------------------------------------------------------------------------------


class BlobStore:
    """Files by name in one folder.

    Args:
        directory: a path or a URL; created if missing, except for a bucket.
        deadline: seconds for one call to a remote file system, more for large transfers.

    Attributes:
        far: whether calls have a deadline, and each is a request.
        within: see `TimedFS.within`.

    Raises:
        OSError, ValueError, ImportError: the folder can't be used.
    """

    def __init__(self, directory: str | Path, deadline: float) -> None:
        fs, self._root = fsspec.core.url_to_fs(str(directory))
        self._fs = TimedFS(fs, str(directory), deadline)
        self._invalidate_cache = fs.invalidate_cache
        self.far, self.within = self._fs.timed, self._fs.within
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        self._is_object_store = self.far and bool(protocols & OBJECT_STORES)
        self._listed: dict[str, Mapping[str, Any]] = {}  # what the last listing has of each file, if remote
        if not self._is_object_store:
            self._fs.call("makedirs", self._root, exist_ok=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def names(self, inside: str = "") -> list[str]:
        """Lists the folder, or a folder in it."""
        self._invalidate_cache()
        try:
            found = self._fs.call("ls", self._path(inside) if inside else self._root, detail=self.far)
        except FileNotFoundError:  # an object store has no empty folders
            return []
        if not self.far:
            return [_name(path) for path in found]
        listed = {_name(info["name"]): info for info in found}
        if not inside:
            self._listed = listed
        return list(listed)

    def size(self, name: str) -> int:
        """The size of a file in bytes."""
        info = self._listed.get(name) or self._fs.call("info", self._path(name))
        return int(info["size"])

    def written(self, name: str) -> float:
        """When a file was written according to the last listing, in seconds since 1970; 0 if that has no dates."""
        date = self._listed.get(name, {}).get("LastModified")
        return date.timestamp() if isinstance(date, datetime.datetime) else 0.0

    def age(self, name: str) -> float:
        """Seconds since a file was written; 0 if unknown."""
        written = self.written(name)
        if not written and not self.far:
            with contextlib.suppress(OSError, NotImplementedError, KeyError):
                written = self._fs.call("modified", self._path(name)).timestamp()
        return time.time() - written if written else 0.0

    # --- reading ----------------------------------------------------------------------------------------------------

    def read(self, name: str, end: int | None = None) -> bytes:
        """The content of a file, or its first bytes."""
        content: bytes = self._fs.call("cat_file", self._path(name), start=0 if end else None, end=end)
        return content

    def read_many(self, names: Sequence[str]) -> list[bytes | Exception]:
        """The content of each file, or the error of reading it."""
        return self._fs.call_many("cat_file", [[self._path(name)] for name in names])

    @contextlib.contextmanager
    def local_paths(self, names: Collection[str], nbytes: int = 0) -> Iterator[dict[str, Path]]:
        """Paths of the files by name, or of temporary local copies, which are fetched concurrently.

        Args:
            nbytes: of all files together.

        Raises:
            FileNotFoundError: a file is missing; on a local disk only when it is opened.
        """
        if self._fs.local:
            yield {name: Path(self._path(name)) for name in names}
            return
        with tempfile.TemporaryDirectory() as folder:
            copies = {name: Path(folder) / f"{number}.safetensors" for number, name in enumerate(names)}
            pairs = [(self._path(name), str(copy)) for name, copy in copies.items()]
            _raise_first(self._fs.call_many("get_file", pairs, nbytes))
            yield copies

    # --- writing ----------------------------------------------------------------------------------------------------

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file."""
        with self._renamed_to([name]) as (path,):
            self._fs.call("pipe_file", path, content, nbytes=len(content))

    def write_many(self, writers: Mapping[str, Callable[[Path], object]]) -> None:
        """Writes files concurrently, each with a function that writes a local file whole or not at all."""
        if self._fs.local:
            for name, write in writers.items():
                write(Path(self._path(name)))
            return
        names = list(writers)
        for batch in (names[first : first + MAX_CONCURRENT] for first in range(0, len(names), MAX_CONCURRENT)):
            with tempfile.TemporaryDirectory() as folder, self._renamed_to(batch) as paths:
                made = [Path(folder) / f"{number}.safetensors" for number in range(len(batch))]
                for name, path in zip(batch, made, strict=True):
                    writers[name](path)
                total = sum(path.stat().st_size for path in made)
                _raise_first(self._fs.call_many("put_file", list(zip(map(str, made), paths, strict=True)), total))

    @contextlib.contextmanager
    def _renamed_to(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Paths to write to; the files are renamed at the end, or removed after an error."""
        if self._is_object_store:
            yield [self._path(name) for name in names]
            return
        partial_names = [f"{name}.{uuid.uuid4().hex}.partial" for name in names]
        try:
            yield [self._path(name) for name in partial_names]
            for before, name in zip(partial_names, names, strict=True):
                self._rename(before, name)
        except BaseException:
            for name in partial_names:
                self.delete(name)
            raise

    def _rename(self, name: str, new: str) -> None:
        if self.far:
            self._fs.call("cp_file", self._path(name), self._path(new))
            self._fs.call("rm_file", self._path(name))
        else:
            self._fs.call("mv", self._path(name), self._path(new))

    def move(self, name: str, inside: str, new: str) -> None:
        """Moves a file to a new name in a folder of this one, which is created if missing."""
        if not self._is_object_store:
            self._fs.call("makedirs", self._path(inside), exist_ok=True)
        self._rename(name, f"{inside}/{new}")

    def delete(self, *names: str) -> None:
        """Deletes files if possible; the next listing has those that are left."""
        with contextlib.suppress(OSError):
            self._fs.call_many("rm_file", [[self._path(name)] for name in names])

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Holds a lock between processes, on a local disk with locks; otherwise does nothing."""
        with contextlib.ExitStack() as stack:
            if self._fs.local:
                try:
                    stack.enter_context(locked(self._path(name)))
                except OSError as error:
                    if error.errno not in NO_LOCKS:
                        raise
            yield


def _name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


def _raise_first(results: Sequence[Any]) -> None:
    for result in results:
        if isinstance(result, Exception):
            raise result
