"""Several servers and one store: what one has read, another finds."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serving import ENDS, LONG, PLENTY, Running, cached, running

from mlx_kv import PromptStore
from mlx_kv.server.rows import Models


def ask(server: Running, end: str) -> tuple[str, int]:
    """The answer to a long prompt, and how many tokens of it had been read before."""
    answer = server.post(prompt=LONG + end, max_tokens=12).json()
    return answer["choices"][0]["text"], cached(answer)


@pytest.mark.slow
def test_the_first_request_of_an_idle_server_finds_what_another_has_stored(tmp_path: Path) -> None:
    """It has looked at the store once, when nothing was there; two come at once, and both find it."""

    def open_store(models: Models) -> PromptStore:
        store = PromptStore(tmp_path, fingerprint="reference")
        store.refresh()
        return store

    with running(prompt_memory_bytes=PLENTY, open_store=open_store) as idle:
        with running(prompt_memory_bytes=PLENTY, open_store=open_store) as other:
            wanted = [ask(other, end)[0] for end in ENDS]
            other.wait_until_kept()
        time.sleep(1.1)  # for as long, what was seen counts
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(ask, idle, end) for end in ENDS[:2]]
            answers = [each.result() for each in both]
        answers.append(ask(idle, ENDS[2]))
    assert [text for text, _ in answers] == wanted[:3]
    assert all(count > 1000 for _, count in answers)
