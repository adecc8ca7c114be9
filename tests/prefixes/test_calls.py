"""Calls to a remote file system: errors become OSError, and no call outlasts its deadline."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import botocore.exceptions
import pytest
from fsspec.asyn import get_loop

from mlx_kv.prefixes.blob_store import MAX_CONCURRENT, TimedFS


class Elsewhere:
    """As much of an asynchronous file system as is called.

    Attributes:
        cancelled: calls that were broken off.
        most: calls that were made at once.
    """

    async_impl, asynchronous, protocol = True, False, ("elsewhere", "far")

    def __init__(self) -> None:
        self.loop = get_loop()
        self.called = self.cancelled = self.now = self.most = 0

    async def _cat_file(self, what: Any) -> Any:
        self.called += 1
        if isinstance(what, Exception):
            raise what
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(what)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.now -= 1
        return what


def calls(deadline: float = 5.0) -> tuple[TimedFS, Elsewhere]:
    there = Elsewhere()
    return TimedFS(there, "far://a", deadline), there


@pytest.mark.parametrize(
    "error",
    [
        botocore.exceptions.EndpointConnectionError(endpoint_url="http://a"),
        botocore.exceptions.NoCredentialsError(),
        ValueError("a path\nof two lines"),
        KeyError("Contents"),
        PermissionError("not now"),
        FileNotFoundError("gone"),
    ],
)
def test_every_error_is_one_of_a_file_system(error: Exception) -> None:
    with pytest.raises(OSError, match=str(error).split()[0].strip("'")) as raised:
        calls()[0].call("cat_file", error)
    assert isinstance(raised.value, type(error)) or not isinstance(error, OSError)
    assert "\n" not in str(raised.value)


def test_memory_that_is_full_is_no_error_of_a_file_system() -> None:
    with pytest.raises(MemoryError):
        calls()[0].call("cat_file", MemoryError())


def test_many_are_made_at_once_and_each_has_its_end() -> None:
    far, there = calls()
    found = far.call_many("cat_file", [[0.01]] * 20 + [[OSError("a")]])
    assert found[:20] == [0.01] * 20
    assert str(found[20]) == "a"
    assert there.most == MAX_CONCURRENT


def test_a_place_that_does_not_answer_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    far, there = calls(0.05)
    with pytest.raises(TimeoutError, match="far://a has not answered in time"):
        far.call("cat_file", 1000)
    while there.now:
        time.sleep(0.01)
    assert (there.called, there.cancelled) == (1, 1)
    with pytest.raises(TimeoutError, match="far://a did not respond a moment ago"):
        far.call("cat_file", 0)
    assert there.called == 1
    monkeypatch.setattr("mlx_kv.prefixes.blob_store.RETRY_AFTER", 0.0)
    far, there = calls(0.05)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="in time"):
            far.call("cat_file", 1000)
    assert far.call("cat_file", 0) == 0


def test_a_place_that_cannot_be_reached_is_left_alone_and_one_that_refuses_is_not() -> None:
    far, there = calls()
    for _ in range(2):
        with pytest.raises(PermissionError):
            far.call("cat_file", PermissionError())
    with pytest.raises(OSError, match="EndpointConnectionError"):
        far.call("cat_file", botocore.exceptions.EndpointConnectionError(endpoint_url="http://a"))
    with pytest.raises(TimeoutError, match="a moment ago"):
        far.call("cat_file", 0)
    assert there.called == 3


def test_several_calls_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_kv.prefixes.blob_store.RETRY_AFTER", 0.0)
    far, there = calls(1000)
    with far.within(0.2):
        assert far.call("cat_file", 0.001) == 0.001
        with far.within(1000), pytest.raises(TimeoutError):  # what is inside has no more
            far.call("cat_file", 1000)
        with pytest.raises(TimeoutError):
            far.call("cat_file", 0)
    assert there.called == 2
    assert far.call("cat_file", 0.001) == 0.001


def test_what_carries_much_has_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_kv.prefixes.blob_store.MIN_BANDWIDTH", 100)
    far, _ = calls(0.01)
    assert far.call("cat_file", 0.3, nbytes=1000) == 0.3


def test_no_calls_are_answered_at_once() -> None:
    """As when no block is left to be removed: it was taken for a file system without an answer."""
    far, _ = calls()
    assert far.call_many("cat_file", []) == []
    assert far.call("cat_file", 0) == 0
