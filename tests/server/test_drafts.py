"""A server that drafts without a model: what it looks into, and whose kept prompts it takes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
from serving import ENDS, LONG, PLENTY, SOURCE, cached, running

from mlx_kv import CachePolicy, PromptStore
from mlx_kv.generation.speculation.drafters.suffix import SuffixDrafter
from mlx_kv.generation.speculation.settings import DraftSettings
from mlx_kv.server.worker import Models


class Watched(SuffixDrafter):
    """Remembers what it was told of the rows that came."""

    joined: ClassVar[list[list[int]]] = []

    def join(self, prompts: Any, caches: list[Any]) -> None:
        self.joined.extend(map(list, prompts))
        super().join(prompts, caches)


def test_what_was_read_before_is_looked_into() -> None:
    """Also where most of a prompt comes from memory, or from a row that still decodes."""
    Watched.joined.clear()
    with running(prompt_memory_bytes=PLENTY, drafting=DraftSettings(Watched)) as server:
        tokenizer = server.worker.models.tokenizer
        asked = [LONG[:2000] + end for end in ENDS]
        first = server.post(prompt=asked[0], max_tokens=10).json()
        with ThreadPoolExecutor(2) as pool:
            answers = [first, *pool.map(lambda text: server.post(prompt=text, max_tokens=40).json(), asked[1:3])]
        answers.append(server.post(prompt=asked[3], max_tokens=10).json())
        assert [cached(answer) > 300 for answer in answers] == [False, True, True, True]
        server.wait_until_empty()
    assert sorted(Watched.joined) == sorted(tokenizer.encode(text) for text in asked)


@pytest.mark.parametrize(
    ("policy", "same"), [(CachePolicy(), True), (CachePolicy(bits=8), True), (CachePolicy(max_kv_size=200), False)]
)
def test_prompts_that_were_kept_without_drafts_serve_with_them(policy: CachePolicy, same: bool, tmp_path: Path) -> None:
    """And the other way round; but rings have other room, and are kept apart."""

    def open_store(models: Models) -> PromptStore:
        store = PromptStore(tmp_path)
        store.refresh()
        return store

    texts, found = [], []
    for drafting in (None, DraftSettings("ngram"), DraftSettings("suffix"), None):
        with running(policy, open_store=open_store, drafting=drafting) as server:
            answer = server.post(prompt=SOURCE[:900], max_tokens=12).json()
            texts.append(answer["choices"][0]["text"])
            found.append(cached(answer) > 200)
            server.wait_until_empty()
            server.wait_until_kept()
    assert len(set(texts)) == 1
    assert found == [False, same, True, True]


def test_the_same_again_comes_of_its_first_answer() -> None:
    """From recent answers: of the second, passes are a fraction of tokens."""
    with running(drafting=DraftSettings("auto")) as server:
        first = server.complete(SOURCE[:500], 60)
        passes = _passes(server)
        assert server.complete(SOURCE[:500], 60) == first
        assert _passes(server) - passes < 20
        with running() as plain:
            assert plain.complete(SOURCE[:500], 60) == first


def _passes(server: Any) -> int:
    server.wait_until_empty()
    return int(server.worker._engine._statistics.rounds)
