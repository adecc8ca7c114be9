"""A folder on any file system of fsspec: files by name, each whole or not at all.

An object store puts an object whole or not at all. Elsewhere a file is written under a name with two random parts and
renamed. Local files that must be synchronised to the disk are written with `mlx_kv.files.replacing`. A listing is
reused: elsewhere, every question is a request.

Calls have a deadline (`Calls`): a file system that has not answered is not asked again for a while, and whatever it
raises becomes an OSError. Local file systems are waited for, and raise what they raise. Most remote file systems of
fsspec are asynchronous: a call is a coroutine in a thread of fsspec, so one that takes too long is cancelled, and many
are made at once. A remote one that is not (`sftp://`) is waited for; a server has a thread for that.
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
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fsspec

from mlx_kv.files.replacing import locked

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)  # what network drives say
PARTIAL = r"\.[0-9a-f]{32}\.partial"  # how the name of a file that is not there yet goes on
AT_ONCE = 8  # calls
SILENT = 5.0  # seconds for which a place that did not answer is not asked again
SLOWEST = 2**20  # bytes a second; what carries many has more time
# Where folders need not be made, and what is put is there whole or not at all.
OBJECT_STORES = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss"))


class Folder:
    """Files by name in one folder, here or elsewhere.

    Args:
        directory: a path or a URL; made if not there, but for a bucket.
        deadline: seconds for one call of what lies elsewhere, and more where it carries bytes.

    Attributes:
        far: whether calls have a deadline, and each is a request.

    Raises:
        OSError, ValueError, ImportError: it cannot be used.
    """

    def __init__(self, directory: str | Path, deadline: float = 10.0) -> None:
        fs, self._root = fsspec.core.url_to_fs(str(directory))
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        self._fs, self._calls = fs, Calls(fs, str(directory), deadline)
        self._local, self.far = "file" in protocols, self._calls.timed
        self._objects = self.far and bool(protocols & OBJECT_STORES)
        self._seen: dict[str, Mapping[str, Any]] = {}  # what the last look told of each file
        self.within = self._calls.within
        if not self._objects:
            self._calls.one("makedirs", self._root, exist_ok=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    # --- what is there --------------------------------------------------------------------------------------------

    def names(self, inside: str = "") -> list[str]:
        """Of all there is, here or in a folder of this name."""
        self._fs.invalidate_cache()
        try:
            found = self._calls.one("ls", self._path(inside) if inside else self._root, detail=self.far)
        except FileNotFoundError:  # where folders are no more than the beginnings of names
            return []
        if not self.far:
            return [_name(path) for path in found]
        seen = {_name(told["name"]): told for told in found}
        if not inside:
            self._seen = seen
        return list(seen)

    def is_folder(self, name: str) -> bool:
        return bool(self._calls.one("isdir", self._path(name)))

    def size(self, name: str) -> int:
        """In bytes."""
        told = self._seen.get(name) or self._calls.one("info", self._path(name))
        size: int = told["size"]
        return size

    def written(self, name: str) -> float | None:
        """When a file was written, as the last look told; None where that does not tell."""
        told = self._seen.get(name, {}).get("LastModified")
        return told.timestamp() if isinstance(told, datetime.datetime) else None

    def age(self, name: str) -> float | None:
        """Seconds since it was written; None where nobody knows."""
        written = self.written(name)
        if written is None and not self.far:
            with contextlib.suppress(OSError, NotImplementedError, KeyError):
                written = self._calls.one("modified", self._path(name)).timestamp()
        return None if written is None else time.time() - written

    # --- reading --------------------------------------------------------------------------------------------------

    def read(self, name: str) -> bytes:
        content: bytes = self._calls.one("cat_file", self._path(name))
        return content

    def read_each(self, names: Sequence[str]) -> list[bytes | Exception]:
        """What is in each of these files, or the error with which it cannot be read."""
        return self._calls.several("cat_file", [[self._path(name)] for name in names])

    def beginning(self, name: str, count: int) -> bytes:
        """The first bytes of a file."""
        content: bytes = self._calls.one("cat_file", self._path(name), start=0, end=count)
        return content

    @contextlib.contextmanager
    def as_local(self, names: Collection[str], nbytes: int = 0) -> Iterator[dict[str, Path]]:
        """The files, or copies of them, by paths for the time being; copies are fetched side by side.

        Args:
            nbytes: of all of them.

        Raises:
            FileNotFoundError: one is not there; on a local disk when it is opened.
        """
        if self._local:
            yield {name: Path(self._path(name)) for name in names}
            return
        with tempfile.TemporaryDirectory() as folder:
            copies = {name: Path(folder) / f"{number}.safetensors" for number, name in enumerate(names)}
            pairs = [(self._path(name), str(copy)) for name, copy in copies.items()]
            _raise_first(self._calls.several("get_file", pairs, nbytes))
            yield copies

    # --- changing -------------------------------------------------------------------------------------------------

    def write(self, name: str, content: bytes) -> None:
        """Whole, or not at all."""
        with self._moved_to([name]) as (partial,):
            self._calls.one("pipe_file", partial, content, nbytes=len(content))

    def write_by(self, writers: Mapping[str, Callable[[Path], object]]) -> None:
        """The same of several files, by somebody who writes local files whole or not at all."""
        if self._local:
            for name, write in writers.items():
                write(Path(self._path(name)))
            return
        names = list(writers)
        for some in (names[first : first + AT_ONCE] for first in range(0, len(names), AT_ONCE)):
            with tempfile.TemporaryDirectory() as folder, self._moved_to(some) as there:
                made = [Path(folder) / f"{number}.safetensors" for number in range(len(some))]
                for name, path in zip(some, made, strict=True):
                    writers[name](path)
                total = sum(path.stat().st_size for path in made)
                _raise_first(self._calls.several("put_file", list(zip(map(str, made), there, strict=True)), total))

    @contextlib.contextmanager
    def _moved_to(self, names: Sequence[str]) -> Iterator[list[str]]:
        if self._objects:
            yield [self._path(name) for name in names]
            return
        partial = [f"{name}.{uuid.uuid4().hex}.partial" for name in names]
        try:
            yield [self._path(name) for name in partial]
            for name, left in zip(names, partial, strict=True):
                self._move(left, name)
        except BaseException:
            for name in partial:
                self.delete(name)
            raise

    def _move(self, name: str, new: str) -> None:
        if self.far:
            self._calls.one("cp_file", self._path(name), self._path(new))
            self._calls.one("rm_file", self._path(name))
        else:
            self._calls.one("mv", self._path(name), self._path(new))

    def move(self, name: str, inside: str, new: str) -> None:
        """To this name in a folder of this one, which is made if not there."""
        if not self._objects:
            self._calls.one("makedirs", self._path(inside), exist_ok=True)
        self._move(name, f"{inside}/{new}")

    def delete(self, *names: str) -> None:
        """If they can be; what cannot is found again."""
        with contextlib.suppress(OSError):
            self._calls.several("rm_file", [[self._path(name)] for name in names])

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


def _name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


def _raise_first(found: Sequence[Any]) -> None:
    for one in found:
        if isinstance(one, Exception):
            raise one


# --- calls with a deadline --------------------------------------------------------------------------------------------


class Calls:
    """Calls of one file system, each with its deadline.

    Args:
        fs: of fsspec.
        where: its name, for errors.
        deadline: seconds for one call, and more where it carries bytes; `within` sets less for several together.

    Attributes:
        timed: whether calls have a deadline.
    """

    def __init__(self, fs: Any, where: str, deadline: float) -> None:
        self._fs, self._where, self._deadline = fs, where, deadline
        self.timed = bool(fs.async_impl) and not fs.asynchronous
        self._here = "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)
        self._ends = threading.local()  # when what a thread does now is to be over
        self._silent_until = 0.0

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """All that this thread calls meanwhile takes no longer together."""
        before = getattr(self._ends, "at", None)
        self._ends.at = min(time.monotonic() + seconds, float("inf") if before is None else before)
        try:
            yield
        finally:
            self._ends.at = before

    def one(self, name: str, *arguments: Any, nbytes: int = 0, **options: Any) -> Any:
        """What the file system's method of this name returns.

        Args:
            nbytes: that it carries.

        Raises:
            TimeoutError: there was no answer, now or a moment ago.
            OSError: whatever else was raised.
        """
        (found,) = self.several(name, [arguments], nbytes, **options)
        if isinstance(found, Exception):
            raise found
        return found

    def several(self, name: str, each: Sequence[Sequence[Any]], nbytes: int = 0, **options: Any) -> list[Any]:
        """What it returns for each of these arguments, or the error that it raises.

        Raises:
            TimeoutError: there was no answer to some of them, now or a moment ago.
        """
        if not self.timed:
            found = [_attempt(partial(getattr(self._fs, name), *given, **options)) for given in each]
        else:
            method = getattr(self._fs, f"_{name}")
            found = self._timed([partial(method, *given, **options) for given in each], nbytes)
        return found if self._here else [_as_os_error(one) for one in found]

    def _timed(self, calls: Sequence[Callable[[], Awaitable[Any]]], nbytes: int) -> list[Any]:
        ends = getattr(self._ends, "at", None)
        seconds = self._deadline + nbytes / SLOWEST if ends is None else ends - time.monotonic()
        if time.monotonic() < self._silent_until:
            raise TimeoutError(errno.ETIMEDOUT, f"{self._where} did not answer a moment ago")
        if seconds <= 0:
            raise self._late
        work = asyncio.run_coroutine_threadsafe(_together(calls, seconds), self._fs.loop)
        try:
            found = work.result(seconds + 1)  # the loop itself may be kept busy
        except TimeoutError:
            self._silent_until = time.monotonic() + SILENT
            raise self._late from None
        finally:
            work.cancel()
        if all(map(_unreached, found)):
            self._silent_until = time.monotonic() + SILENT
        return found

    @property
    def _late(self) -> TimeoutError:
        return TimeoutError(errno.ETIMEDOUT, f"{self._where} has not answered in time")


async def _together(calls: Sequence[Callable[[], Awaitable[Any]]], seconds: float) -> list[Any]:
    """What each comes to, its error included; AT_ONCE of them at a time."""
    places = asyncio.Semaphore(AT_ONCE)

    async def placed(call: Callable[[], Awaitable[Any]]) -> Any:
        async with places:
            return await call()

    work: Coroutine[Any, Any, list[Any]] = _gathered([placed(call) for call in calls])
    return await asyncio.wait_for(work, seconds)


async def _gathered(work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    return await asyncio.gather(*work, return_exceptions=True)


def _attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


def _unreached(found: Any) -> bool:
    """Whether this is an error of who has not come to speak with the place: one of its own is an OSError."""
    return isinstance(found, Exception) and (isinstance(found, ConnectionError) or not isinstance(found, OSError))


def _as_os_error(found: Any) -> Any:
    """The same, but errors that are no OSError, as botocore's are none, nor those of an HTTP client."""
    if not isinstance(found, Exception) or isinstance(found, OSError | MemoryError):
        return found
    return OSError(errno.EIO, " ".join(f"{type(found).__name__}: {found}".split()))
