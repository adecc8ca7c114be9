"""What clients get, many at once, and when they hang up. Real HTTP, bundled models."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from serving import SOURCE, Running, check_error, running, texts

from mlx_kv import CachePolicy, batch_generate
from mlx_kv.generation.generate import StopStrings
from mlx_kv.generation.speculation import DraftSettings
from mlx_kv.server.output import ChatOutputParser, Delta

# Of places where, for as long as answers are, no two tokens are as good as equal (by 0.02 at the least, under any of
# the policies below): rows that are added up in another order round otherwise, and 8 bits make that larger.
PLACES = (0, 130, 200, 300, 430, 530, 600, 700, 980, 900, 1030, 1130, 1260, 1360, 1430, 1530)
PROMPTS = [SOURCE[place : place + 20 + 97 * number] for number, place in enumerate(PLACES)]
POLICIES = {
    "full": CachePolicy(),
    "a budget of 8 bits": CachePolicy(budget=128, keep_recent=32, bits=8),
    "a window": CachePolicy(max_kv_size=160),
}


# --- what clients get -------------------------------------------------------------------------------------------------


def test_completions_through_the_openai_client(server: Running, reference: Any) -> None:
    model, tokenizer = reference
    (alone,) = ["".join(t.text for t in batch_generate(model, tokenizer, [SOURCE[:300]], max_tokens=40))]
    asked: dict[str, Any] = {"model": "reference", "prompt": SOURCE[:300], "max_tokens": 40, "temperature": 0}
    whole = server.client.completions.create(**asked)
    assert whole.choices[0].text == alone
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.completion_tokens, whole.usage.total_tokens) == (40, whole.usage.prompt_tokens + 40)
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    pieces = list(server.client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert texts(pieces) == alone
    assert len(pieces) > 20
    assert [piece.choices[0].finish_reason for piece in pieces if piece.choices][-1] == "length"
    assert pieces[-1].usage == whole.usage
    assert all(piece.usage is None for piece in pieces[:-1])
    ids = tokenizer.encode(SOURCE[:300])
    assert server.client.completions.create(**asked | {"prompt": ids}).choices[0].text == alone


def test_chats_through_the_openai_client(server: Running) -> None:
    """The reference model has no chat template: it gets what mlx_lm.server would make of the messages."""
    messages: Any = [
        {"role": "system", "content": "Write Python."},
        {"role": "user", "content": [{"type": "text", "text": "import"}, {"type": "text", "text": " os"}]},
    ]
    asked: dict[str, Any] = {"model": "reference", "messages": messages, "max_completion_tokens": 20}
    whole = server.client.chat.completions.create(**asked)
    pieces = list(server.client.chat.completions.create(**asked, stream=True))
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content
    assert whole.choices[0].message.tool_calls is None
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
    assert pieces[0].choices[0].delta.role == "assistant"
    assert pieces[-1].choices[0].finish_reason == "length"
    assert server.complete("ASSISTANT's RULE: Write Python.\nUSER: import os\nASSISTANT:", 20) == (
        whole.choices[0].message.content
    )


def test_the_models_are_listed(server: Running) -> None:
    assert [model.id for model in server.client.models.list()] == ["reference", "default_model"]
    assert server.client.models.retrieve("reference").id == "reference"
    with pytest.raises(openai.NotFoundError, match="no such model"):
        server.client.models.retrieve("gpt-4o")
    assert server.client.completions.create(model="gpt-4o", prompt="x", max_tokens=1).model == "reference"


@pytest.mark.slow
@pytest.mark.parametrize("policy", [*POLICIES, "a draft", "lookup"])
def test_sixteen_clients_get_what_they_get_alone(policy: str, reference: Any, draft: Any) -> None:
    model, tokenizer = reference
    lengths = [8 + 4 * index for index in range(16)]
    alone = []
    for prompt, length in zip(PROMPTS, lengths, strict=True):
        tokens = batch_generate(
            model, tokenizer, [prompt], POLICIES.get(policy), length, draft if policy == "a draft" else None
        )
        alone.append("".join(token.text for token in tokens))
    with running(
        POLICIES.get(policy),
        draft=policy == "a draft",
        drafting=DraftSettings("auto") if policy == "lookup" else None,
    ) as server:

        def ask(index: int) -> str:
            options: Any = {"model": "reference", "prompt": PROMPTS[index], "max_tokens": lengths[index]}
            if index % 2:
                return texts(server.client.completions.create(**options, stream=True))
            return str(server.client.completions.create(**options).choices[0].text)

        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(ask, range(16))) == alone
        assert sum(lengths) * 0.9 < server.metrics.total("generated_tokens") <= sum(lengths)
        server.wait_until_empty()
        assert (server.metrics.total("tokens_evicted") > 0) == (policy == "a budget of 8 bits")


def test_stop_strings_are_cut_exactly(server: Running) -> None:
    text = server.complete(SOURCE[:200], 60)
    for start, end in ((7, 19), (11, 12), (30, 45), (len(text) - 3, len(text))):
        stop = text[start:end]
        wanted = text[: text.index(stop)]
        answer = server.post(prompt=SOURCE[:200], max_tokens=60, stop=stop).json()
        assert answer["choices"][0]["text"] == wanted
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] <= 60
        pieces = server.client.completions.create(
            model="reference", prompt=SOURCE[:200], max_tokens=60, stop=["never", stop], stream=True
        )
        assert texts(pieces) == wanted
    assert server.complete(SOURCE[:200], 60, stop=text + "!") == text  # held back to the end, then said
    server.wait_until_empty()


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.randoms())
def test_how_a_text_falls_into_pieces_does_not_matter(text: str, strings: list[str], random: Any) -> None:
    ends = [(text.find(string) + len(string), text.find(string)) for string in strings if string in text]
    wanted = text[: min(ends)[1]] if ends else text
    stops, said = StopStrings(strings), ""
    rest = text
    while rest:
        n = random.randint(1, len(rest))
        said += stops.feed(rest[:n])
        assert wanted.startswith(said)
        rest = rest[n:]
    assert said + stops.finish() == wanted
    assert stops.stopped == bool(ends)


@pytest.mark.slow
def test_seeds_make_sampling_repeatable(server: Running) -> None:
    def sample(seed: int | None) -> str:
        return server.complete("def ", 16, temperature=1.0, top_p=0.95, seed=seed)

    with ThreadPoolExecutor(8) as pool:
        first = list(pool.map(sample, range(8)))
    assert first == [sample(seed) for seed in range(8)]
    assert len(set(first)) > 4
    assert len({sample(None) for _ in range(6)}) > 2
    assert server.complete("def ", 16, temperature=1.0, top_p=0) == server.complete("def ", 16)


@pytest.mark.slow
def test_a_seed_with_a_draft_model_does_not_depend_on_other_clients() -> None:
    """How many tokens are drafted follows from all rows: near the end of an answer most of all."""
    with running(draft=True) as one:

        def sample(seed: int | None, tokens: int = 20) -> str:
            return one.complete("class Stack:\n    def ", tokens, temperature=1.0, top_p=0.95, seed=seed)

        alone = [sample(seed) for seed in range(12)]
        with ThreadPoolExecutor(16) as pool:
            company = [pool.submit(sample, None, 60) for _ in range(2)]
            assert list(pool.map(sample, range(12))) == alone
            assert all(other.result() for other in company)
    assert len(set(alone)) > 8
    with running() as one:
        assert [sample(seed) for seed in range(12)] == alone


def test_tool_calls_and_reasoning_are_taken_apart(reference: Any) -> None:
    marks = {"tool_call_start": "<tool_call>", "tool_call_end": "</tool_call>"}
    tokenizer = TokenizerWrapper(reference[1]._tokenizer, tool_parser=json_tools.parse_tool_call, **marks)
    said, text = Delta(), ChatOutputParser(tokenizer, [1], [{"type": "function"}], stream=False)
    call = '{"name": "look", "arguments": {"at": "cache.py"}}'
    for character in f"Well, <tool_call>\n{call}\n</tool_call> a < b":
        said.add(text.feed(character))
    said.add(text.finish())
    assert said.content == "Well,  a < b"
    assert [each["function"] for each in said.tool_calls] == [{"name": "look", "arguments": '{"at": "cache.py"}'}]
    assert text.has_call


@pytest.mark.parametrize(
    ("written", "content", "arguments"),
    [
        ('{"name": "look"}', "", ["{}"]),
        ('{"name": "look", "arguments": {"a": 1}}', "", ['{"a": 1}']),
        ('[{"name": "look"}, {"name": "look"}]', "", ["{}", "{}"]),
        ('{"arguments": {}}', '{"arguments": {}}', []),
        ("5", "5", []),
        ('{"name": "lo', '{"name": "lo', []),
    ],
)
def test_what_a_model_writes_as_a_call_is_one_or_is_text(
    written: str, content: str, arguments: list[str], reference: Any
) -> None:
    """A call without arguments was an error of the server; what is no call was dropped."""
    marks = {"tool_call_start": "<tool_call>", "tool_call_end": "</tool_call>"}
    tokenizer = TokenizerWrapper(reference[1]._tokenizer, tool_parser=json_tools.parse_tool_call, **marks)
    for end in ("</tool_call>", ""):
        said, text = Delta(), ChatOutputParser(tokenizer, [1], [{"type": "function"}], stream=True)
        said.add(text.feed(f"<tool_call>{written}{end}"))
        said.add(text.finish())
        assert said.content == content
        assert [call["function"]["arguments"] for call in said.tool_calls] == arguments
        assert text.has_call == bool(arguments)


def test_an_answer_that_fails_midway_ends_properly(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ChatOutputParser.feed

    def feed(self: ChatOutputParser, text: str) -> Delta:
        if len(text) % 7 == 3:
            raise KeyError("a parser of somebody else's")
        return real(self, text)

    monkeypatch.setattr(ChatOutputParser, "feed", feed)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "import"}], "max_tokens": 32}
    check_error(server.post("/v1/chat/completions", **body), 500)
    streamed = server.post("/v1/chat/completions", **body, stream=True).text
    assert '"error"' in streamed.split("\n\n")[-3]
    assert streamed.endswith("data: [DONE]\n\n")
    server.wait_until_empty()


def test_answers_do_not_wait_for_acknowledgements(server: Running) -> None:
    """With Nagle's algorithm on, headers and body of every answer are 40 ms apart."""
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        assert server.http.get("/health").json() == {"status": "ok"}
        seconds.append(time.perf_counter() - started)
    assert sorted(seconds)[10] < 0.02


# --- clients that only stop sending -----------------------------------------------------------------------------------


def test_half_a_request_gets_no_answer(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=30) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        raw.sendall(b"Content-Length: 100\r\n\r\n{")
        raw.shutdown(socket.SHUT_WR)
        assert raw.recv(100) == b""
    server.wait_until_empty()


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_stops_sending_counts_as_gone(server: Running, stream: bool) -> None:
    body = json.dumps({"prompt": "import os", "max_tokens": 100_000, "stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=30) as raw:
        raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        server.wait_until(lambda: server.api.admission.admitted == 1)
        raw.shutdown(socket.SHUT_WR)
        server.wait_until(lambda: server.api.admission.admitted == 0, seconds=5)
    server.wait_until_empty()


# --- clients that hang up, and other mishaps --------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_row(server: Running, stream: bool) -> None:
    cancelled = server.metrics.finished.labels("cancelled")._value.get  # type: ignore[attr-defined]
    before = cancelled()
    body = {"prompt": SOURCE[:900], "max_tokens": 3000, "stream": stream}
    for _ in range(3):
        if stream:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
                next(answer.iter_bytes())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.3)
    server.wait_until_empty()
    assert cancelled() == before + 3


@pytest.mark.slow
def test_one_that_hangs_up_while_it_waits() -> None:
    with running(max_batch_size=1) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.complete, "import", 400)
        server.wait_until(lambda: len(server.rows.active) == 1)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 3000}, timeout=0.1)
        assert first.result()
        server.wait_until_empty()
        assert server.metrics.total("generated_tokens") == 400


def test_a_step_that_fails_ends_its_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:

        def fail() -> Any:
            raise RuntimeError("made to fail")

        first = server.rows.engine
        monkeypatch.setattr(first, "step", fail)
        with pytest.raises(openai.InternalServerError, match="see its log"):
            server.client.completions.create(model="reference", prompt="x")
        monkeypatch.undo()
        while getattr(server.rows, "engine", first) is first:
            time.sleep(0.01)  # the client hears of it before the engine is made anew
        monkeypatch.setattr(server.rows.engine, "step", fail)
        with pytest.raises(openai.APIError, match="see its log"):
            list(server.client.completions.create(model="reference", prompt="x", stream=True))
        assert server.complete("import", 5)
        assert server.metrics.total("engine_failures") == 2
        server.wait_until_empty()
