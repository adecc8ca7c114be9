"""Several servers and one object store: what one has read another finds, and one that is silent costs only time."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from s3 import BUCKET, ObjectStore, object_store
from serving import ENDS, LONG, PLENTY, Running, cached, command, running

from mlx_kv import PromptStore
from mlx_kv.server.models import Models
from mlx_kv.server.tiered_prefixes import TieredPrefixes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def objects() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


@pytest.fixture
def url(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("mlx_kv.prefixes.blob_store.RETRY_AFTER", 0.0)
    yield f"s3://{BUCKET}/{uuid.uuid4().hex}"
    objects.go_on()


def opened(url: str, deadline: float = 10.0) -> Callable[[Models], PromptStore]:
    def open_store(models: Models) -> PromptStore:
        store = PromptStore(url, fingerprint="reference", deadline=deadline)
        with contextlib.suppress(OSError), store.within():
            store.refresh()
        return store

    return open_store


def ask(server: Running, end: str) -> tuple[str, int]:
    """The answer to a long prompt, and how many tokens of it had been read before."""
    answer = server.post(prompt=LONG + end, max_tokens=12).json()
    return answer["choices"][0]["text"], cached(answer)


class Fetches:
    """Counts prompts that wait for the store."""

    def __init__(self, prefixes: TieredPrefixes) -> None:
        self.count, self._fetch = 0, prefixes.fetch
        prefixes.fetch = self  # type: ignore[method-assign,assignment]

    def __call__(self, *arguments: Any) -> None:
        self.count += 1
        self._fetch(*arguments)


def test_the_first_request_of_an_idle_server_finds_what_another_has_stored(url: str) -> None:
    """It has looked at the store once, when nothing was there; two come at once, and both find it."""
    with running(prompt_memory_bytes=PLENTY, open_store=opened(url)) as idle:
        with running(prompt_memory_bytes=PLENTY, open_store=opened(url)) as other:
            wanted = [ask(other, end)[0] for end in ENDS]
            other.wait_until_kept()
        time.sleep(1.1)  # for as long, what was seen counts
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(ask, idle, end) for end in ENDS[:2]]
            answers = [each.result() for each in both]
        answers.append(ask(idle, ENDS[2]))
    assert [text for text, _ in answers] == wanted[:3]
    assert all(count > 1000 for _, count in answers)


@pytest.mark.parametrize("trouble", ["hangs", "is gone"])
def test_a_store_that_does_not_answer_costs_time_once(trouble: str, url: str, objects: ObjectStore) -> None:
    """A server goes on, starts and stops meanwhile; when it answers again, it is used again."""
    with running(open_store=opened(url, 0.3)) as server:
        wanted = [ask(server, end)[0] for end in ENDS]
        time.sleep(1.1)
        (objects.hang if trouble == "hangs" else objects.stop)()
        assert ask(server, ENDS[0]) == (wanted[0], 0)
        prefixes = server.worker._rows.prefixes
        server.wait_until(lambda: prefixes._failing)
        fetched = Fetches(prefixes)
        assert ask(server, ENDS[1]) == (wanted[1], 0)
        assert fetched.count == 0  # nobody waits for it any longer
        with running(open_store=opened(url, 0.3)) as late:
            assert ask(late, ENDS[2])[0] == wanted[2]
        objects.go_on()
        if trouble == "is gone":
            objects.start()
        assert prefixes.store is not None
        prefixes.store.deadline = 20.0
        ask(server, ENDS[2])  # for which it is looked whether it answers again
        server.wait_until(lambda: not prefixes._failing)
        ask(server, ENDS[3])
        server.wait_until_kept()
        time.sleep(1.1)
        text, count = ask(server, ENDS[0])
        assert text == wanted[0]
        assert count > 1000
        assert fetched.count > 0


def test_a_server_starts_while_its_store_is_silent(objects: ObjectStore) -> None:
    objects.hang()
    options = ("--prompt-store", f"s3://{BUCKET}/{uuid.uuid4().hex}", "--prompt-store-deadline", "0.5")
    try:
        with command(*options, notes=1) as (process, url):
            assert url
            assert process.poll() is None
    finally:
        objects.go_on()
