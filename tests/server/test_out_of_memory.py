"""Memory that runs out ends one request: the others go on, and nobody can tell by their text."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from serving import LONG, Running, check_error, running

from mlx_kv.server.rows import out_of_memory

PROMPTS = ["def first():\n", LONG[:300], "class A:\n    ", LONG[500:1100]]


def fail_once(server: Running, monkeypatch: pytest.MonkeyPatch, answered: int) -> None:
    """The step after the one in which so many rows had an answer finds no memory."""
    rows = server.rows
    step = rows.engine.step

    def failing() -> Any:
        if sum(len(job.answer) > 4 for job in rows.active.values()) >= answered:
            step()  # whose tokens are lost
            raise RuntimeError("[malloc] Unable to allocate 123456 bytes.")
        return step()

    monkeypatch.setattr(rows.engine, "step", failing)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, 2**28], ids=["", "kept"])
@pytest.mark.parametrize("draft", [False, True], ids=["plain", "draft"])
def test_the_others_go_on_where_they_were(draft: bool, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [
        {},
        {"temperature": 0.9, "seed": 3},
        {"stop": ["zzz", "\n\n\n\n\n"], "repetition_penalty": 1.3},
        {"temperature": 0.5, "seed": 4},
    ]
    with (
        running(draft=draft, prompt_memory_bytes=kept, max_batch_size=4) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        alone = [server.complete(prompt, 40, **more) for prompt, more in zip(PROMPTS, options, strict=True)]
        fail_once(server, monkeypatch, answered=4)

        def ask(index: int) -> httpx.Response:
            return server.post(prompt=PROMPTS[index], max_tokens=40, **options[index])

        answers = list(pool.map(ask, range(4)))
        ended = [index for index, answer in enumerate(answers) if answer.status_code != 200]
        assert len(ended) == 1
        assert "ran out of memory" in check_error(answers[ended[0]], 503)["message"]
        for index in {0, 1, 2, 3} - set(ended):
            said = answers[index].json()
            assert said["choices"][0]["text"] == alone[index]
            assert said["usage"]["prompt_tokens"] == len(server.worker.default.models.tokenizer.encode(PROMPTS[index]))
            assert said["usage"]["completion_tokens"] <= 40
        assert server.metrics.total("out_of_memory") == 1
        server.wait_until_empty()


def test_who_is_alone_ends_and_the_server_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:
        fail_once(server, monkeypatch, answered=1)
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={"prompt": "import os", "max_tokens": 30, "stream": True}
        ) as answer:
            events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert "ran out of memory" in json.loads(events[-2])["error"]["message"]
        assert server.complete("import os", 20)


def test_other_errors_are_no_lack_of_memory() -> None:
    assert out_of_memory(MemoryError())
    assert out_of_memory(RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory (00000008)"))
    assert out_of_memory(RuntimeError("[metal::malloc] Attempting to allocate 9 bytes which is greater than …"))
    assert not out_of_memory(RuntimeError("[matmul] Last dimension of first input with shape (1,2) must match"))
