"""Embeddings of a server: OpenAI's and Ollama's clients, beside chats, and what is refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import ollama
import pytest
from serving import SOURCE, Running, check_error, running, running_models
from test_several_models import model, states, three

from mlx_kv import PromptStore
from mlx_kv.generation.embedding import EmbeddingCard
from mlx_kv.server.json_http import ApiError
from mlx_kv.server.served import Served

TEXTS = ["import os", "def main():\n    return 3", SOURCE[:700], "x"]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as one:
        yield one


def wanted(server: Running, texts: list[str], pooling: str = "last") -> list[Any]:
    """Of mlx-lm's own inner model, one text at a time; in the worker's thread."""
    found: list[Any] = []

    def compute() -> None:
        models = server.worker.default.models
        for text in texts:
            hidden = models.model["model"](mx.array([models.tokenizer.encode(text)]))[0]
            pooled = hidden[-1] if pooling == "last" else hidden.mean(axis=0)
            found.append(np.array(pooled / mx.linalg.norm(pooled)))

    server.in_worker(compute)
    return found


def test_vectors_of_the_openai_client(server: Running) -> None:
    answer = server.client.embeddings.create(model="reference", input=TEXTS)  # asks for base64
    for each, vector in zip(answer.data, wanted(server, TEXTS), strict=True):
        np.testing.assert_allclose(each.embedding, vector, atol=1e-5)
    assert [each.index for each in answer.data] == [0, 1, 2, 3]
    count = sum(len(server.worker.default.models.tokenizer.encode(text)) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
    one = server.client.embeddings.create(model="reference", input="import os", encoding_format="float", dimensions=16)
    first = np.array(answer.data[0].embedding[:16])
    np.testing.assert_allclose(one.data[0].embedding, first / np.linalg.norm(first), atol=1e-5)
    ids = server.worker.default.models.tokenizer.encode("import os")
    by_ids = server.post("/v1/embeddings", input=[ids, ids], pooling="mean", encoding_format="base64").json()["data"]
    told = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in by_ids]
    np.testing.assert_allclose(told, wanted(server, ["import os"] * 2, "mean"), atol=1e-5)


def test_vectors_of_the_ollama_client(server: Running) -> None:
    client = ollama.Client(host=server.url)
    answer = client.embed("reference", TEXTS)
    np.testing.assert_allclose(answer.embeddings, wanted(server, TEXTS), atol=1e-5)
    long = client.embed("reference", SOURCE * 20)
    assert long.prompt_eval_count == server.worker.default.context
    with pytest.raises(ollama.ResponseError, match="takes at most"):
        client.embed("reference", SOURCE * 20, truncate=False)
    assert len(client.embed("reference", "x", dimensions=8).embeddings[0]) == 8


def test_what_is_refused(server: Running) -> None:
    for body, words in (
        ({"input": ""}, "input 0 is empty"),
        ({"input": []}, "input"),
        ({"input": [[99_999]]}, "99999"),
        ({"input": "x", "dimensions": 10_000}, "dimensions is 10,000: reference has 256"),
        ({"input": "x", "input_type": "query"}, "this model has instructions for none"),
        ({"input": "x", "pooling": "max"}, "pooling"),
        ({"input": ["x"] * 2_049}, "input"),
        ({"input": SOURCE * 20}, "takes at most"),
        ({}, "input is missing"),
    ):
        assert words in check_error(server.post("/v1/embeddings", **body), 400)["message"]
    assert check_error(server.post("/v1/embeddings", model="nobody", input="x", pooling=3), 400)


def test_instructions_of_the_card_come_before_texts(server: Running, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "find: "}}))
    monkeypatch.setitem(vars(server.worker.default), "card", EmbeddingCard.of(tmp_path))
    answer = server.post("/v1/embeddings", input="import os", input_type="query").json()
    np.testing.assert_allclose(answer["data"][0]["embedding"], wanted(server, ["find: import os"])[0], atol=1e-5)
    assert (
        "instructions for 'query'"
        in check_error(server.post("/v1/embeddings", input="x", input_type="document"), 400)["message"]
    )


def test_tokens_of_answers_come_between_passes(server: Running) -> None:
    alone = server.complete(SOURCE[:300], 60)
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(server.complete, SOURCE[:300], 60)
        server.wait_until(lambda: bool(server.rows.decoding))
        before = server.metrics.total("generated_tokens")
        texts = [SOURCE[start : start + 900] for start in range(0, 2_000, 100)]
        vectors = server.post("/v1/embeddings", input=texts).json()["data"]
        assert server.metrics.total("generated_tokens") > before + 5
        assert answer.result() == alone
    np.testing.assert_allclose([each["embedding"] for each in vectors], wanted(server, texts), atol=1e-5)


def test_a_model_is_loaded_for_its_embeddings_and_stays_for_them() -> None:
    with running_models([model("reference"), model("draft")]) as server:
        assert len(server.post("/v1/embeddings", model="draft", input="x").json()["data"][0]["embedding"]) == 128
        assert states(server) == {"reference": "unloaded", "draft": "loaded"}
        assert server.post("/api/embed", model="draft", input="x", keep_alive=0).status_code == 200
        server.wait_until(lambda: states(server)["draft"] == "unloaded")


def test_a_model_without_hidden_states_is_refused_in_a_line(server: Running, monkeypatch: Any) -> None:
    def refused(self: Served, *arguments: Any) -> Any:
        raise ValueError("reference has no embeddings: llama has no output head that could be found")
        yield

    monkeypatch.setattr(Served, "embed", refused)
    error = check_error(server.post("/v1/embeddings", input="x"), 400)
    assert error["message"] == "reference has no embeddings: llama has no output head that could be found"
    monkeypatch.undo()
    assert server.post("/v1/embeddings", input="x").status_code == 200


def test_weights_that_cannot_be_read_and_models_beside(monkeypatch: Any) -> None:
    models = three()
    with running_models(models) as server:

        def broken(nbytes: int) -> None:
            raise OSError("the file is gone")

        monkeypatch.setattr(models[1].weights[0], "read", broken)
        answer = server.post("/v1/embeddings", model="other", input="x")
        assert "the file is gone" in check_error(answer, 503)["message"]
        monkeypatch.undo()
        # One embeds, and the other two do not fit beside it: they wait.
        with ThreadPoolExecutor(3) as pool:
            texts = [SOURCE[start : start + 600] for start in range(0, 3_000, 60)]
            one = pool.submit(server.post, "/v1/embeddings", model="reference", input=texts)
            server.wait_until(lambda: bool(server.worker._embedding))
            other = pool.submit(server.complete, SOURCE[:200], 4, model="other")
            third = pool.submit(server.post, "/v1/embeddings", model="other", input="x")
            assert one.result().status_code == third.result().status_code == 200
            assert other.result()
        assert server.rows.engine._pace is None or server.rows.engine._pace.engines == 1


def test_the_server_ends_while_texts_are_embedded(tmp_path: Path) -> None:
    """Those who wait get an error, and prompts are stored all the same."""
    with running(open_store=lambda models: PromptStore(tmp_path)) as server:
        server.complete(SOURCE[:900], 4)
        texts = [SOURCE[start : start + 2_000] for start in range(400)]
        vectors = server.worker.embed(server.worker.default, [[1] * 900 for _ in texts])
        hung_up = server.worker.embed(server.worker.default, [[1] * 900 for _ in texts])
        hung_up.cancel()
        server.wait_until(lambda: len(server.worker._embedding) == 2)
        assert server.worker.stop(30)
        assert server.worker.failure is None
        with pytest.raises(ApiError):
            vectors.result(0)
    assert list(tmp_path.iterdir())
