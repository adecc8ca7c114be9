"""Calls of a file system that may lie elsewhere: how long one waits for it, and what comes of its errors.

Decides that nobody waits for longer than a deadline, that a place which has not answered is left alone for a while, and
that whatever a file system raises is an OSError. What lies on this machine is waited for, and raises what it does.
Knows nothing about files (`folder`).

Of fsspec's file systems those elsewhere are nearly all asynchronous: calls are coroutines in a thread of fsspec, so one
that takes too long is cancelled, many are made at once, and nothing is left behind. A file system elsewhere that is not
(`sftp://`) is waited for; a server has a thread for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any

AT_ONCE = 8  # calls
SILENT = 5.0  # seconds for which a place that did not answer is not asked again
SLOWEST = 2**20  # bytes a second; what carries many has more time


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
