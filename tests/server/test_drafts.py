"""A server that drafts without a model: what it looks into, and whose kept prompts it takes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import mlx.nn as nn
import pytest
from draft_heads import random_head
from prometheus_client.parser import text_string_to_metric_families
from serving import ENDS, LONG, PLENTY, SOURCE, Running, cached, running, running_models

from mlx_kv import CachePolicy, PromptStore, SpeculationStatistics
from mlx_kv.bundled import model_path
from mlx_kv.generation.speculation import DraftSettings
from mlx_kv.generation.speculation.drafters import SuffixDrafter
from mlx_kv.mlxlm.loading import load, release_weights
from mlx_kv.server.monitor import Monitor
from mlx_kv.server.rows import Models, WorkerSettings
from mlx_kv.server.served import Served


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
        tokenizer = server.worker.default.models.tokenizer
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
@pytest.mark.slow
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
    """From recent answers: of the second, passes are a fraction of tokens. And what was drafted is shown."""
    with running(drafting=DraftSettings("auto")) as server:
        first = server.complete(SOURCE[:500], 60)
        before = drafts(server)
        assert server.complete(SOURCE[:500], 60) == first
        after = drafts(server)
        assert after["passes"] - before["passes"] < 20
        assert after["accepted"] - before["accepted"] > 40
        assert after["tokens_per_pass"] > before["tokens_per_pass"] >= 1
        with running() as plain:
            assert plain.complete(SOURCE[:500], 60) == first
            assert drafts(plain) is None


@pytest.mark.parametrize("policy", [CachePolicy(), CachePolicy(bits=8), CachePolicy(budget=64)], ids=str)
def test_a_head_of_the_model_drafts(policy: CachePolicy) -> None:
    """Its weights come and go with the model's, and what it has read is kept with prompts."""
    made: list[Models] = []

    def models() -> Models:
        network, tokenizer = load(model_path("reference"))
        made.append(Models(network, tokenizer, random_head(network)))
        return made[0]

    settings = WorkerSettings(policy, 4, prompt_memory_bytes=PLENTY, drafting=DraftSettings("auto"))

    def release(freed: nn.Module) -> None:
        is_head = freed is made[0].draft
        again = random_head(made[0].model) if is_head else load(model_path("reference"), lazy=True)[0]
        release_weights(freed, lambda: again)

    with running(policy) as plain:
        wanted = [plain.complete(text, 30) for text in (SOURCE[:900], SOURCE[300:700])]
    with running_models([Served("reference", models, settings, release=release)]) as server:
        for _ in range(2):
            with ThreadPoolExecutor(2) as pool:
                told = list(pool.map(lambda text: server.complete(text, 30), (SOURCE[:900], SOURCE[300:700])))
            assert told == wanted
            shown = drafts(server)
            assert shown["drafter"] == "mtp and suffix"
            assert server.rows.plan.draft.layers
            assert server.post("/models/unload", model="reference").json() == {"success": True}
        answer = server.post(prompt=SOURCE[:900], max_tokens=30).json()
        assert (answer["choices"][0]["text"], cached(answer) > 200) == (wanted[0], True)


def test_what_is_not_to_be_kept_is_nobody_elses_draft() -> None:
    """A row of it beside another, of which drafts are made."""
    with running(drafting=DraftSettings("suffix")) as server, ThreadPoolExecutor(2) as pool:
        texts = [SOURCE[:200], SOURCE[300:500]]
        asked = [pool.submit(server.complete, texts[n], 9, cache={"keep": n == 1}) for n in range(2)]
        said = [each.result() for each in asked]
        server.wait_until_empty()
        engine: Any = server.rows.engine
        (recent,) = engine._decoder.drafter._recent.generations
        told = server.worker.default.models.tokenizer.decode([token for token in recent.text if token >= 0])
        assert said[1] in told
        assert said[0] not in told


def drafts(server: Running) -> Any:
    """What the page shows when the last row has ended, which /metrics says, too."""
    server.wait_until_empty()
    server.wait_until(lambda: server.worker.monitor.snapshot.speculation == server.rows.engine.speculation)
    shown = server.http.get("/memory").json()["drafts"]
    said = {
        sample.name: sample.value
        for family in text_string_to_metric_families(server.http.get("/metrics").text)
        for sample in family.samples
        if sample.name.startswith("mlx_kv_draft") and not sample.name.endswith("created")
    }
    if shown is None:
        assert set(said.values()) == {0}
        return None
    assert said == {
        "mlx_kv_drafter": 1,
        "mlx_kv_draft_tokens_total": shown["drafted"],
        "mlx_kv_draft_tokens_accepted_total": shown["accepted"],
        "mlx_kv_draft_passes_total": shown["passes"],
        "mlx_kv_draft_length": shown["draft_length"],
        "mlx_kv_draft_tokens_per_pass": pytest.approx(shown["tokens_per_pass"], abs=0.01),
        "mlx_kv_draft_gain": pytest.approx(shown["draft_gain"] or 0, abs=0.01),
    }
    return shown


def test_an_engine_that_is_made_anew_counts_on() -> None:
    monitor = Monitor()
    metrics = monitor.metrics
    for statistics in (SpeculationStatistics(rounds=3, drafted=9, accepted=4), SpeculationStatistics(rounds=1)):
        for _ in range(2):
            monitor.update((), (), 0, [statistics])
            statistics.drafted += 1
    assert [metrics.total(name) for name in ("draft_tokens", "draft_tokens_accepted", "draft_passes")] == [11, 4, 4]
    assert monitor.snapshot.speculation == SpeculationStatistics(rounds=1, drafted=1)
