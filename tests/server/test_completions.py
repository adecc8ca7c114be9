"""The server: what clients get, what they must not do to it, and what it shows of itself. Real HTTP, bundled models."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from prometheus_client.parser import text_string_to_metric_families
from starlette.datastructures import Headers

from mlx_kv import CachePolicy, PromptStore, batch_generate
from mlx_kv.bundled import model_path
from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.mlxlm.convert import load
from mlx_kv.server.access import AccessRules
from mlx_kv.server.api import Api, Limits
from mlx_kv.server.chat_output import ChatOutputParser, Delta
from mlx_kv.server.errors import ApiError
from mlx_kv.server.metrics import Metrics
from mlx_kv.server.occupancy import position_ranges
from mlx_kv.server.run import Server, bound
from mlx_kv.server.stop_strings import StopStrings
from mlx_kv.server.worker import Models, Worker

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
SOURCE = (Path(__file__).parent.parent.parent / "mlx_kv" / "cache" / "kv_cache.py").read_text()
PROMPTS = [SOURCE[start : start + 20 + 97 * start // 100] for start in range(0, 1600, 100)]
POLICIES = {
    "full": CachePolicy(),
    "a budget of 8 bits": CachePolicy(budget=128, keep_recent=32, bits=8),
    "a window": CachePolicy(max_kv_size=160),
}


@dataclass
class Running:
    """A server at work, in threads of this process."""

    url: str
    worker: Worker
    api: Api
    metrics: Metrics

    @cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    @cached_property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt: str, max_tokens: int = 24, **options: Any) -> str:
        answer = self.post(prompt=prompt, max_tokens=max_tokens, **options)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def wait_until(self, what: Callable[[], bool], seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, f"did not happen in {seconds} s: {self.worker.snapshot}"
            time.sleep(0.02)

    def wait_until_empty(self) -> None:
        """No row is left, neither in the engine nor in the snapshot, and nobody holds a place."""
        self.wait_until(lambda: not self.worker._active and not self.worker._waiting and not self.worker._engine.busy)
        self.wait_until(
            lambda: not self.worker.snapshot.decoding and self.worker.snapshot.occupancy.bytes_allocated == 0
        )
        self.wait_until(lambda: self.api.admission.admitted == 0 and not self.api.admission.jobs)

    def wait_until_kept(self) -> None:
        """What was read for answers that have ended is in memory, and on the disk."""
        taken = threading.Event()
        self.worker._inbox.put(taken.set)
        assert taken.wait(20)
        self.worker._prefixes._disk.submit(int).result()


@contextlib.contextmanager
def running(
    policy: CachePolicy | None = None,
    max_batch_size: int = 16,
    limits: Limits | None = None,
    keys: tuple[str, ...] = (),
    draft: bool = False,
    prompt_memory_bytes: int = 0,
    open_store: Any = None,
    change: Callable[[Any], Any] = lambda tokenizer: tokenizer,
    access: AccessRules | None = None,
) -> Iterator[Running]:
    def models() -> Models:
        model, tokenizer = load(model_path("reference"))
        return Models(model, change(tokenizer), load(model_path("draft"))[0] if draft else None)

    metrics = Metrics()
    worker = Worker(
        models,
        lambda chunks: None,
        metrics,
        policy,
        max_batch_size,
        prompt_memory_bytes=prompt_memory_bytes,
        open_store=open_store,
    )
    worker.start()
    api = Api(worker, metrics, "reference", limits, keys, access)
    server = Server(api, drain_seconds=5)
    with bound("127.0.0.1", 0) as listening:
        listening.listen()
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield Running(f"http://127.0.0.1:{listening.getsockname()[1]}", worker, api, metrics)
        finally:
            server.should_exit = True
            thread.join()
            worker.stop()
            assert not worker.alive


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(limits=Limits(body_bytes=50_000, prompt_tokens=1000, queue=16, max_tokens=32)) as one:
        yield one


def texts(pieces: Any) -> str:
    return "".join(piece.choices[0].text for piece in pieces if piece.choices)


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
    assert [model.id for model in server.client.models.list()] == ["reference"]
    assert server.client.models.retrieve("reference").id == "reference"
    with pytest.raises(openai.NotFoundError, match="no such model"):
        server.client.models.retrieve("gpt-4o")
    with pytest.raises(openai.NotFoundError, match="use 'reference'"):
        server.client.completions.create(model="gpt-4o", prompt="x")


@pytest.mark.parametrize("policy", [*POLICIES, "a draft"])
def test_sixteen_clients_get_what_they_get_alone(policy: str, reference: Any, draft: Any) -> None:
    model, tokenizer = reference
    lengths = [8 + 4 * index for index in range(16)]
    alone = []
    for prompt, length in zip(PROMPTS, lengths, strict=True):
        tokens = batch_generate(
            model, tokenizer, [prompt], POLICIES.get(policy), length, draft if policy == "a draft" else None
        )
        alone.append("".join(token.text for token in tokens))
    with running(POLICIES.get(policy), draft=policy == "a draft") as server:

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


def test_seeds_make_sampling_repeatable(server: Running) -> None:
    def sample(seed: int | None) -> str:
        return server.complete("def ", 16, temperature=1.0, top_p=0.95, seed=seed)

    with ThreadPoolExecutor(8) as pool:
        first = list(pool.map(sample, range(8)))
    assert first == [sample(seed) for seed in range(8)]
    assert len(set(first)) > 4
    assert len({sample(None) for _ in range(6)}) > 2
    assert server.complete("def ", 16, temperature=1.0, top_p=0) == server.complete("def ", 16)


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
    assert text.called


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
        assert text.called == bool(arguments)


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


# --- what is refused --------------------------------------------------------------------------------------------------


def called(**function: Any) -> dict[str, Any]:
    """A chat in which the assistant has called such a function."""
    return {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [1, 99_999]}, "prompt"),
    ({"prompt": [1, -1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": "x " * 2000}, "prompt"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens"),
    ({"prompt": "x", "temperature": -1}, "temperature"),
    ({"prompt": "x", "temperature": "hot"}, "temperature"),
    ({"prompt": "x", "top_p": 2}, "top_p"),
    ({"prompt": "x", "seed": 2**70}, "seed"),
    ({"prompt": "x", "n": 2}, "n"),
    ({"prompt": "x", "logprobs": 0}, "logprobs"),
    ({"prompt": "x", "echo": True}, "echo"),
    ({"prompt": "x", "stop": ""}, "stop"),
    ({"prompt": "x", "stop": [1]}, "stop"),
    ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
    ({"prompt": "x", "stream": 1}, "stream"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "x", "model": 5}, "model"),
    ({"prompt": "x", "surprise": 1}, "surprise"),
    ({"prompt": "x", "template": {}}, "template"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": "x"}], "prompt": "x"}, "prompt"),
    ({"messages": ["x"]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}, "tools"),
    ({"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}, "tool_choice"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": {"name": "f"}}]}, "messages[0].tool_calls"),
    (called(), "messages[0].tool_calls[0].function.name"),
    (called(name="f"), "messages[0].tool_calls[0].function.arguments"),
    (called(name="f", arguments="{"), "messages[0].tool_calls[0].function.arguments"),
    (called(name="f", arguments="[" * 9000), "messages[0].tool_calls[0].function.arguments"),
    (called(name="f", arguments="[]"), "messages[0].tool_calls[0].function.arguments"),
    (called(name="f", arguments=7), "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {}}]}, "tools"),
    (
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"return_dict": True}},
        "chat_template_kwargs",
    ),
    ({"prompt": "x", "\ud800": 1}, "?"),
    ({"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": [{"role": "user", "content": "x"}], "logprobs": True}, "logprobs"),
]


def check_error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=[json.dumps(body)[:60] for body, _ in REFUSED])
def test_what_cannot_be_honoured_is_refused(server: Running, body: dict[str, Any], param: str) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = server.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert check_error(answer, 400)["param"] == param


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400", "-1e999"])
@pytest.mark.parametrize("where", ['"temperature": %s', '"top_p": %s', '"metadata": {"note": [%s]}'])
def test_a_number_that_is_none_is_refused(server: Running, where: str, value: str) -> None:
    body = '{"prompt": "x", "max_tokens": 1, ' + where % value + "}"
    answer = server.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert value in check_error(answer, 400)["message"]


@pytest.mark.parametrize("near", [5e-324, 1e-310, 1e-46, 1e-40])
def test_temperatures_and_top_p_near_0_are_greedy(server: Running, near: float) -> None:
    greedy = server.complete("def ", 16, temperature=0)
    for seed in (None, 1):
        assert server.complete("def ", 16, temperature=near, seed=seed) == greedy
        assert server.complete("def ", 16, temperature=1, top_p=near, seed=seed) == greedy


def test_names_that_are_there_twice_are_refused(server: Running) -> None:
    for body, told in (
        (b'{"prompt": "x", "max_tokens": 1, "max_tokens": 1000}', "'max_tokens' is there twice"),
        (b'{"prompt": "x", "metadata": {"a": 1, "a": 2}}', "'a' is there twice"),
        (b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", "the body is no JSON"),
    ):
        answer = server.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert told in check_error(answer, 400)["message"]


TEMPLATE = """{%- for message in messages %}<{{ message.role }}>{{ message.content | trim }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}: {{ call.function.arguments | tojson }}
{%- for name, value in call.function.arguments.items() %}{{ name + value }}{% endfor %}{% endfor %}
{%- if message.role == "function" %}{{ raise_exception("functions are " + message.name.first) }}{% endif %}
{%- endfor %}{{ tools | tojson if tools }}"""


@pytest.fixture(scope="module")
def chatting() -> Iterator[Running]:
    """A model with a chat template that is easily upset, and calls tools."""
    marks = {"tool_call_start": "<tool_call>", "tool_call_end": "</tool_call>"}

    def change(tokenizer: Any) -> TokenizerWrapper:
        tokenizer._tokenizer.chat_template = TEMPLATE
        return TokenizerWrapper(tokenizer._tokenizer, tool_parser=json_tools.parse_tool_call, **marks)

    with running(change=change) as one:
        yield one


def test_a_chat_with_tool_calls(chatting: Running) -> None:
    def ask(*messages: dict[str, Any], **more: Any) -> httpx.Response:
        return chatting.post("/v1/chat/completions", messages=[*messages], max_tokens=2, **more)

    def call(arguments: Any) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    user = {"role": "user", "content": "x"}
    lengths = []
    for arguments in ('{"a": "b"}', {"a": "b"}, "{}", "", {}):
        answer = ask(user, call(arguments), {"role": "tool", "content": "y"})
        assert answer.status_code == 200, answer.text
        lengths.append(answer.json()["usage"]["prompt_tokens"])
    assert lengths[0] == lengths[1] > lengths[2] == lengths[3] == lengths[4]
    assert ask(user, {"role": "assistant", "reasoning": "hm", "content": None}, user).status_code == 200
    assert ask(user, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}]).status_code == 200
    told = check_error(ask(user, call({"a": 7})), 400)
    assert "the chat template refuses these messages: TypeError" in told["message"]
    told = check_error(ask({"role": "function", "content": "x"}), 400)
    assert told["param"] == "messages"
    nested: Any = []
    for _ in range(400):
        nested = [nested]
    assert ask(user | {"extra": nested}).status_code in (200, 400)
    assert ask(user, tools=[{"type": "function", "function": {"name": "f", "x": nested}}]).status_code in (200, 400)


def test_no_chat_is_a_failure_of_the_server(chatting: Running) -> None:
    """Messages of every shape: an answer, or an error that names what is wrong with them."""
    chance = random.Random(0)
    odd = [None, True, -1, 1.5, "", "x", [], {}, [[]], [None], {"a": [1]}, "\ud800", "{", "[]", [{"type": "text"}]]

    def shaped(depth: int = 0) -> Any:
        """A message, one part of which is something else."""
        function = {"name": "f", "arguments": '{"a": "b"}'}
        call = {"id": "1", "type": "function", "function": function}
        message = {"role": chance.choice(["user", "assistant", "tool", "system", "function"]), "content": "x"}
        message |= {"name": "n", "tool_calls": [call], "tool_call_id": "1"}
        for part in chance.choices([function, call, message], k=2):
            name = chance.choice(list(part))
            if chance.random() < 0.3:
                del part[name]  # type: ignore[attr-defined]
            else:
                part[name] = chance.choice(odd)  # type: ignore[index]
        return chance.choice([message, message, message, chance.choice(odd)])

    statuses = set()
    for _ in range(1000 if THOROUGH else 200):
        body = {"messages": [shaped() for _ in range(chance.randrange(1, 3))], "max_tokens": 1}
        if chance.random() < 0.3:
            body["tools"] = [chance.choice([{"type": "function", "function": {"name": "f"}}, *odd])]
        if chance.random() < 0.3:
            body["chat_template_kwargs"] = {
                chance.choice(["tools", "documents", "x", "truncation"]): chance.choice(odd)
            }
        answer = chatting.http.post(
            "/v1/chat/completions", content=json.dumps(body), headers={"Content-Type": "application/json"}
        )
        statuses.add(answer.status_code)
        assert answer.status_code == 200 or check_error(answer, 400)["param"], body
    assert statuses == {200, 400}
    assert chatting.metrics.total("engine_failures") == 0


def test_what_says_nothing_is_accepted(server: Running) -> None:
    neutral = {"n": 1, "logprobs": None, "presence_penalty": 0.0, "frequency_penalty": 0, "user": "me", "suffix": None}
    assert server.complete("import", 3, **neutral) == server.complete("import", 3)


def test_limits_on_bodies(server: Running) -> None:
    def chunks(n: int) -> Iterator[bytes]:
        for _ in range(n):
            yield b" " * 1000

    send = {"Content-Type": "application/json"}
    url = f"{server.url}/v1/completions"
    assert check_error(httpx.post(url, content=b" " * 50_001, headers=send), 413)["code"] == "request_too_large"
    check_error(httpx.post(url, content=chunks(60), headers=send), 413)  # of unknown length
    check_error(httpx.post(url, content=b" " * 50_000, headers=send), 400)
    check_error(httpx.post(url, content=b"{}", headers={"Content-Type": "text/plain"}), 415)
    for size in (5_000_000, 1_000_000_000):  # hopeless: not even read
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as raw:
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % size
            )
            assert b" 413 " in raw.recv(1000).splitlines()[0]
    assert server.complete("import", 3)


def test_unknown_paths_and_methods(server: Running) -> None:
    check_error(server.http.get("/v1/engines"), 404)
    check_error(server.http.get("/v1/completions"), 405)
    check_error(server.http.delete("/"), 405)


def test_a_full_queue_turns_away() -> None:
    with running(max_batch_size=1, limits=Limits(queue=1)) as server, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(server.complete, "import", 300) for _ in range(2)]
        server.wait_until(lambda: server.api.admission._admitted == 2)
        answer = server.post(prompt="x")
        assert check_error(answer, 429)["type"] == "rate_limit_error"
        assert int(answer.headers["Retry-After"]) >= 1
        with pytest.raises(openai.RateLimitError):
            server.client.completions.create(model="reference", prompt="x")
        assert server.http.get("/health").json() == {"status": "ok"}
        assert waiting[0].result() == waiting[1].result()
        assert server.complete("import", 3)


def test_keys() -> None:
    with running(keys=("first-key", "second-key")) as server:
        for key in ("first-key", "second-key"):
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
            assert client.completions.create(model="reference", prompt="import", max_tokens=2).choices[0].text
        for headers in ({}, {"Authorization": "Bearer first"}, {"Authorization": "Basic first-key"},
                        {"Authorization": b"Bearer \xff"}):  # fmt: skip
            for path in ("/v1/models", "/metrics", "/memory"):
                answer = server.http.get(path, headers=headers)  # type: ignore[arg-type]
                assert check_error(answer, 401)["code"] == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            server.client.models.list()
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/").status_code == 200


@pytest.mark.parametrize("path", ["/", "/health", "/memory", "/metrics", "/v1/models"])
def test_it_answers_to_its_own_names_only(server: Running, path: str) -> None:
    port = server.url.rsplit(":", 1)[1]
    for host in ("localhost", f"LocalHost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "localhost."):
        answer = server.http.get(path, headers={"Host": host})
        assert answer.status_code == (403 if host.endswith(".") else 200), host
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "localhost.evil.example",
        "10.0.0.5",
        "",
        "[",
        "localhost@evil",
    ):
        error = check_error(server.http.get(path, headers={"Host": host}), 403)
        assert error["code"] == "host_not_allowed"
        assert "--allowed-hosts" in error["message"]


def test_names_that_are_let_in() -> None:
    def has(rules: AccessRules, host: str, origin: str | None = None) -> bool:
        headers = {"host": host} | ({} if origin is None else {"origin": origin})
        with contextlib.suppress(ApiError):
            rules.check(Headers(headers))
            return True
        return False

    wide = AccessRules("0.0.0.0")
    assert all(has(wide, host) for host in ("192.168.1.5:8080", "[fe80::1]:8080", "localhost", socket.gethostname()))
    assert not has(wide, "evil.example")
    assert "any IP address" in wide.allowed_names
    named = AccessRules("mac.lan", ["Box", "*.home.arpa", "[fd00::1]"])
    assert all(has(named, host) for host in ("mac.lan:80", "box", "a.b.home.arpa", "[fd00::1]", "127.0.0.1"))
    assert not any(has(named, host) for host in ("home.arpa", "evilhome.arpa", "192.168.1.5", "x.box"))
    assert has(AccessRules(hosts=["*"]), "evil.example")
    for bad in ("http://mac.lan", "mac.lan:8080", "*lan", "a.*.lan", "a/b", "*."):
        with pytest.raises(ValueError, match="is no host name"):
            AccessRules(hosts=[bad])
    for bad in ("example.com", "https://example.com/", "https://"):
        with pytest.raises(ValueError, match="is no origin"):
            AccessRules(origins=[bad])


def test_pages_of_other_sites_are_kept_out(server: Running) -> None:
    """What a browser sends unasked for a page of another site: nothing of it is done."""
    before = server.metrics.total("generated_tokens")
    for origin in ("https://evil.example", "null", "http://localhost:1", "http://[", "evil.example"):
        for kind in ("text/plain", "application/json"):
            headers = {"Origin": origin, "Content-Type": kind}
            answer = server.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
            error = check_error(answer, 403)
            assert error["code"] == "origin_not_allowed"
            assert "--allowed-origins" in error["message"]
            assert not any(name.startswith("access-control") for name in answer.headers)
    asks = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    check_error(server.http.options("/v1/completions", headers=asks), 403)
    assert server.metrics.total("generated_tokens") == before
    own = server.http.get("/memory", headers={"Origin": server.url})
    assert own.status_code == 200
    assert not any(name.startswith("access-control") for name in own.headers)


def test_sites_that_are_let_in() -> None:
    with running(keys=("a-key",), access=AccessRules(origins=["https://good.example"])) as server:
        asks = {
            "Origin": "https://good.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization, content-type",
        }
        preflight = server.http.options("/v1/completions", headers=asks)
        assert preflight.status_code == 200
        assert preflight.headers["Access-Control-Allow-Origin"] == "https://good.example"
        assert "authorization" in preflight.headers["Access-Control-Allow-Headers"]
        headers = {"Origin": "https://good.example", "Authorization": "Bearer a-key"}
        answer = server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["Access-Control-Allow-Origin"] == "https://good.example"
        refused = server.http.post("/v1/completions", json={}, headers={"Origin": "https://good.example"})
        check_error(refused, 401)  # which the page may read
        assert refused.headers["Access-Control-Allow-Origin"] == "https://good.example"
        check_error(server.http.get("/memory", headers={"Origin": "https://evil.example"}), 403)


def garbage(chance: random.Random) -> bytes:
    """A body that is no request, or nearly one."""
    values: list[Any] = [
        None,
        True,
        -1,
        1e308,
        "",
        "x",
        [],
        {},
        [[]],
        [None],
        {"a": [1]},
        "\ud800",
        2**80,
        float("nan"),
    ]
    names = [
        "prompt",
        "messages",
        "max_tokens",
        "temperature",
        "stop",
        "stream",
        "stream_options",
        "model",
        "tools",
        "n",
    ]
    kind = chance.randrange(4)
    if kind == 0:
        return chance.randbytes(chance.randrange(200))
    if kind == 1:
        return json.dumps(chance.choice(values)).encode()
    if kind == 2:
        return b"[" * chance.choice([1, 100, 49_000])
    return json.dumps({name: chance.choice(values) for name in chance.sample(names, 5)}).encode()


def test_garbage_does_not_hurt(server: Running) -> None:
    chance, before = random.Random(0), server.complete("import", 5)
    with httpx.Client(base_url=server.url, headers={"Content-Type": "application/json"}, timeout=30) as client:
        for index in range(1000 if THOROUGH else 300):
            path = chance.choice(["/v1/completions", "/v1/chat/completions"])
            answer = client.post(path, content=garbage(chance))
            # A few of them are requests, by chance.
            assert answer.status_code == 200 or check_error(answer, answer.status_code), index
            assert answer.status_code in (200, 400, 404), answer.text
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as raw:
            begin = chance.choice([b"", b"GET / HTTP/9\r\n\r\n", b"POST /v1/chat HTTP/1.1\r\nContent-Length: x"])
            raw.sendall(begin + chance.randbytes(100))
    server.wait_until_empty()
    assert server.complete("import", 5) == before
    assert server.metrics.total("engine_failures") == 0


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


def test_one_that_hangs_up_while_it_waits() -> None:
    with running(max_batch_size=1) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.complete, "import", 400)
        server.wait_until(lambda: len(server.worker._active) == 1)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 3000}, timeout=0.1)
        assert first.result()
        server.wait_until_empty()
        assert server.metrics.total("generated_tokens") == 400


def test_a_step_that_fails_ends_its_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:

        def fail() -> Any:
            raise RuntimeError("out of memory")

        first = server.worker._engine
        monkeypatch.setattr(first, "step", fail)
        with pytest.raises(openai.InternalServerError, match="see its log"):
            server.client.completions.create(model="reference", prompt="x")
        monkeypatch.undo()
        while getattr(server.worker, "_engine", first) is first:
            time.sleep(0.01)  # the client hears of it before the engine is made anew
        monkeypatch.setattr(server.worker._engine, "step", fail)
        with pytest.raises(openai.APIError, match="see its log"):
            list(server.client.completions.create(model="reference", prompt="x", stream=True))
        assert server.complete("import", 5)
        assert server.metrics.total("engine_failures") == 2
        server.wait_until_empty()


LONG = (SOURCE * (1 + 5000 // len(SOURCE)))[:5000]  # some 1,400 tokens
ENDS = ("\n\ndef first():", "\n\nclass Second:", "\n\nimport", "\n\nreturn")
PLENTY = 2**28


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("stop", [None, "="], ids=["to the last token", "to a stop string"])
@pytest.mark.parametrize("draft", [False, True], ids=["plain", "draft"])
def test_a_conversation_goes_on_from_its_answer(draft: bool, stop: str | None) -> None:
    with running() as plain, running(draft=draft, prompt_memory_bytes=PLENTY) as server:
        first = server.post(prompt=SOURCE[:400], max_tokens=20, stop=stop).json()
        text = SOURCE[:400] + first["choices"][0]["text"] + "\n\n    def other"
        second = server.post(prompt=text, max_tokens=20).json()
        assert cached(first) == 0
        # A stop string ends within a token that is then another one in the next prompt; and a draft is a step behind.
        assert 0 <= first["usage"]["total_tokens"] - cached(second) <= (0 if stop is None and not draft else 4)
        assert second["choices"][0]["text"] == plain.complete(text, 20)
        assert (server.metrics.total("prefix_hits"), server.metrics.total("prefix_misses")) == (1, 1)
        assert server.metrics.total("prompt_tokens_cached") == cached(second)
        server.wait_until_empty()
        server.wait_until(lambda: server.http.get("/memory").json()["prompt_memory"] > 0)


@pytest.mark.parametrize("draft", [False, True], ids=["plain", "draft"])
@pytest.mark.parametrize("where", ["memory", "store", "both"])
@pytest.mark.parametrize(
    "policy",
    [CachePolicy(), CachePolicy(bits=8), CachePolicy(max_kv_size=200), CachePolicy(budget=200)],
    ids=["full", "8 bits", "windowed", "budget"],
)
def test_a_shared_prefix_is_read_once(policy: CachePolicy, where: str, draft: bool, tmp_path: Path) -> None:
    """Also by a second server, where there is a store: only the rest is read, and the text is the same."""
    asked = [LONG + end for end in ENDS[:3]]

    def open_store(models: Models) -> PromptStore:
        store = PromptStore(tmp_path, fingerprint="reference")
        store.refresh()
        return store

    answers = []
    for prompts in (asked[:2], asked[2:]) if where != "memory" else (asked,):
        with running(
            policy,
            draft=draft,
            prompt_memory_bytes=0 if where == "store" else PLENTY,
            open_store=None if where == "memory" else open_store,
        ) as server:
            for prompt in prompts:
                answers.append(server.post(prompt=prompt, max_tokens=20).json())
                server.wait_until_kept()
            server.wait_until_empty()
    assert cached(answers[0]) == 0
    for answer in answers[1:]:
        assert cached(answer) >= 0.95 * answer["usage"]["prompt_tokens"]
    if policy.budget is None:  # what a budget keeps depends on where a prompt was read from
        with running(policy) as plain:
            wanted = [plain.complete(prompt, 20) for prompt in asked]
        assert [answer["choices"][0]["text"] for answer in answers] == wanted


def test_prompts_that_come_together_read_what_they_share_once() -> None:
    asked = [LONG + end for end in ENDS]
    with running() as plain:
        wanted = [plain.complete(prompt, 20) for prompt in asked]
    with running(prompt_memory_bytes=PLENTY) as server, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: server.post(prompt=prompt, max_tokens=20).json(), asked))
        assert [answer["choices"][0]["text"] for answer in answers] == wanted
        assert sorted(cached(answer) > 0.95 * answer["usage"]["prompt_tokens"] for answer in answers) == [
            False,
            True,
            True,
            True,
        ]
        server.wait_until_empty()


@pytest.mark.parametrize("draft", [False, True], ids=["plain", "draft"])
def test_a_prompt_goes_on_from_a_row_that_still_decodes(draft: bool) -> None:
    with running() as plain:
        wanted = plain.complete(LONG + ENDS[0], 20)
    with running(draft=draft, prompt_memory_bytes=PLENTY) as server, ThreadPoolExecutor(1) as pool:
        long = pool.submit(server.post, prompt=LONG, max_tokens=600)
        server.wait_until(lambda: bool(server.worker.snapshot.decoding))
        answer = server.post(prompt=LONG + ENDS[0], max_tokens=20).json()
        assert not long.done()
        assert cached(answer) >= 0.95 * answer["usage"]["prompt_tokens"]
        assert answer["choices"][0]["text"] == wanted
        assert long.result().json()["usage"]["completion_tokens"] == 600


def test_a_long_prompt_is_read_between_the_tokens_of_others() -> None:
    """Caches of a window are read chunk by chunk; the longest silence of another row is that of a chunk, not of all."""
    with running(CachePolicy(max_kv_size=200, max_write=64), prompt_memory_bytes=PLENTY) as server:
        reading: list[int] = []  # tokens that the other row had got when the prompt was seen to be read

        def other() -> None:
            body = {"prompt": "import os", "max_tokens": 500, "stream": True}
            with server.http.stream("POST", "/v1/completions", json=body) as answer:
                for _ in filter(lambda line: line.startswith("data: {"), answer.iter_lines()):
                    now = sum(job.joined and not job.answer for job in server.api.admission.jobs)
                    reading.append(now)

        thread = threading.Thread(target=other)
        thread.start()
        server.wait_until(lambda: len(reading) > 10)
        server.post(prompt=LONG, max_tokens=1)
        thread.join()
        assert sum(reading) >= 5


class Troubled(PromptStore):
    """A store on a disk that is slow or broken, at will."""

    def __init__(self, path: Path, trouble: str) -> None:
        super().__init__(path, fingerprint="reference")
        self.trouble, self.go_on = trouble, threading.Event()

    def fetch(self, tokens: Sequence[int]) -> Any:
        if self.trouble == "slow":
            assert self.go_on.wait(20)
        if self.trouble == "broken":
            raise RuntimeError("no such bucket")
        return super().fetch(tokens)

    def write(self, new: Any) -> bool:
        if self.trouble == "full":
            raise OSError(28, "No space left on device")
        return super().write(new)


@pytest.mark.parametrize("trouble", ["slow", "broken", "full", "damaged", "cancelled"])
def test_nobody_waits_for_a_disk(trouble: str, tmp_path: Path) -> None:
    """Rows that decode go on; a prompt whose entry cannot be had is read; the answer is the same."""
    stores: list[Troubled] = []

    def open_store(models: Models) -> PromptStore:
        stores.append(Troubled(tmp_path, "slow" if trouble == "cancelled" else trouble))
        stores[-1].refresh()
        return stores[-1]

    with running(open_store=open_store) as server:
        wanted = server.complete(LONG + ENDS[0], 20)
        server.wait_until_empty()
    if trouble == "damaged":
        for path in tmp_path.glob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:-1])
    with running(open_store=open_store) as server, ThreadPoolExecutor(2) as pool:
        if trouble == "cancelled":
            with contextlib.suppress(httpx.ReadTimeout):
                server.http.post("/v1/completions", json={"prompt": LONG + ENDS[0]}, timeout=0.5)
            server.wait_until(lambda: not server.worker._active)
            other = pool.submit(server.post, prompt=LONG + ENDS[0], max_tokens=20)
            server.wait_until(lambda: bool(server.worker._active))
            stores[-1].go_on.set()
            answer = other.result().json()
        else:
            slow = pool.submit(server.post, prompt=LONG + ENDS[0], max_tokens=20)
            server.wait_until(lambda: server.metrics.total("prefix_misses") > 0 or server.worker._prefill.waits)
            if trouble == "slow":
                server.complete("class A:\n    ", 30)
                assert not slow.done()
                stores[-1].go_on.set()
            answer = slow.result().json()
        assert answer["choices"][0]["text"] == wanted
        assert (cached(answer) > 0) == (trouble in ("slow", "cancelled"))
        assert stores[-1].damaged == (trouble == "damaged")
        server.wait_until_empty()


# --- what it shows of itself ------------------------------------------------------------------------------------------


def test_metrics_are_prometheus_text(server: Running) -> None:
    server.complete("import", 5)
    answer = server.http.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    samples = {(s.name, *s.labels.values()): s.value for family in families.values() for s in family.samples}
    assert samples["mlx_kv_requests_total", "completions", "200"] >= 1
    assert samples["mlx_kv_generated_tokens_total",] >= 5
    assert samples["mlx_kv_time_to_first_token_seconds_count",] >= 1
    for name in ("kv_bytes_live", "kv_bytes_allocated", "tokens_evicted", "prefix_hits", "tokens_per_second", "rows"):
        assert f"mlx_kv_{name}" in families


def test_rows_in_memory() -> None:
    """Each row is shown with its own tokens, and with the positions that are really kept."""
    with running(CachePolicy(budget=128, keep_recent=32)) as server, ThreadPoolExecutor(6) as pool:
        prompts = [SOURCE[: 150 * n] for n in (6, 1, 4, 2, 5, 3)]
        asked = [pool.submit(server.complete, prompt, 400) for prompt in prompts]
        seen, most = [], 0
        while not all(each.done() for each in asked):
            seen = server.http.get("/memory").json()["rows"]
            for row in (row for row in seen if row["state"] == "decoding" and row["layers"]):
                (layer,) = row["layers"]
                assert 0 <= layer["offset"] - row["prompt_tokens"] - row["generated_tokens"] <= 2
                assert layer["live"] + layer["evicted"] == layer["offset"]
                assert layer["live"] <= layer["capacity"]
                if layer["kept"] is not None:
                    most = max(most, layer["evicted"])
                    assert sum(last - first for first, last in layer["kept"]) == layer["live"]
                    assert layer["kept"][0][0] == 0  # the sinks
                    assert layer["kept"][-1][1] == layer["offset"]
            time.sleep(0.05)
        assert most > 200
        server.wait_until_empty()
        assert server.http.get("/memory").json()["rows"] == []


def test_all_that_was_let_in_is_shown() -> None:
    """Also what the worker has not heard of yet, and what is no tokens yet."""
    with running(max_batch_size=2) as server, ThreadPoolExecutor(8) as pool:
        go_on, encoding = threading.Event(), threading.Event()
        asked = [pool.submit(server.complete, "import os", 400) for _ in range(5)]
        server.wait_until(lambda: len(server.worker.snapshot.decoding) == 2 and len(server.worker._waiting) == 3)
        try:
            server.worker._inbox.put(lambda: go_on.wait(20) and None)
            asked += [pool.submit(server.complete, "import os", 4)]
            server.wait_until(lambda: len(server.api.admission.jobs) == 6)
            server.api._tokenizing.submit(lambda: encoding.wait(20))
            asked += [pool.submit(server.complete, "import os", 4)]
            server.wait_until(lambda: server.api.admission.admitted == 7)
            seen = server.http.get("/memory").json()
            assert (seen["in_flight"], seen["waiting"]) == (7, 5)
            states = [row["state"] for row in seen["rows"]]
            assert states == ["decoding"] * 2 + ["waiting"] * 4
            text = server.http.get("/metrics").text
            assert "mlx_kv_rows 2.0" in text
            assert "mlx_kv_requests_waiting 5.0" in text
        finally:
            go_on.set()
            encoding.set()
        assert all(each.result() for each in asked)
        seen = server.http.get("/memory").json()
        assert (seen["in_flight"], seen["waiting"], seen["rows"]) == (0, 0, [])


@pytest.mark.parametrize("kept", [0, PLENTY], ids=["nothing kept", "prompts kept"])
def test_what_is_evicted_is_counted_once(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that go on from others, texts that stop, clients that hang up: as many as compactions evict."""
    evicted, real = [0], Evictor.compact_if_due

    def compact_if_due(self: Evictor, rows: Any, on_demand: bool = False) -> Any:
        after = real(self, rows, on_demand)
        if self.layer == 0:
            evicted[0] += sum(before.start - row.start for before, row in zip(rows, after, strict=True))
        return after

    monkeypatch.setattr(Evictor, "compact_if_due", compact_if_due)
    policy = CachePolicy(budget=64, keep_recent=16, margin=8)
    with running(policy, prompt_memory_bytes=kept) as server, ThreadPoolExecutor(4) as pool:
        first = [pool.submit(server.complete, SOURCE[: 300 * n], 30 * n) for n in (1, 2, 3, 4)]
        wanted = [each.result() for each in first]
        stops = [text[len(text) // 2 :][:8] for text in wanted]
        again = [
            pool.submit(server.complete, SOURCE[: 300 * n], 30 * n, stop=stops[n - 1] if n % 2 else None)
            for n in (4, 3, 2, 1)
        ]
        assert all(each.result() for each in again)
        body = {"prompt": SOURCE[:1500], "max_tokens": 3000, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            for _ in range(100):
                next(lines)
        server.wait_until_empty()
        assert (server.metrics.total("prefix_hits") >= 4) == bool(kept)
        assert server.metrics.total("tokens_evicted") == evicted[0] > 1000


def test_positions_as_ranges() -> None:
    assert position_ranges([]) == []
    assert position_ranges([0, 1, 2, 5, 6, 9]) == [(0, 3), (5, 7), (9, 10)]
    assert position_ranges([0, 1, 2, 5, 6, 9], gap=2) == [(0, 10)]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs Debian's chromium and chromium-driver: apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    switches = ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync")
    for switch in (*switches, "disable-background-networking", "disable-component-update"):
        options.add_argument(f"--{switch}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    yield started
    started.quit()


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page(browser: Any, width: int) -> None:
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    with running(CachePolicy(budget=128, keep_recent=32)) as server, ThreadPoolExecutor(3) as pool:
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        browser.get(server.url)
        asked = [pool.submit(server.complete, SOURCE[: 400 * n], 900) for n in (1, 2, 3)]

        def script(code: str) -> Any:
            return browser.execute_script(f"return {code}")

        server.wait_until(lambda: len(script("document.querySelectorAll('.row canvas')")) == 3)
        assert script("document.documentElement.scrollWidth <= innerWidth")
        assert "evicted" in script("document.querySelector('.row .what').textContent")
        server.wait_until(lambda: not script("document.getElementById('evicted').textContent").startswith("0"))
        colours = """(() => {
            const strip = document.querySelector('.row canvas');
            const data = strip.getContext('2d').getImageData(0, 5, strip.width, 1).data, seen = new Set();
            for (let i = 0; i < data.length; i += 4) if (data[i + 3]) seen.add(data.slice(i, i + 3).join());
            return [...seen];
        })()"""
        server.wait_until(lambda: len(script(colours)) >= 3)  # kept, evicted, dead
        assert "tokens/s" in script("document.getElementById('rate').textContent")
        assert all(each.result() for each in asked)
        server.wait_until(lambda: "No request" in script("document.getElementById('list').textContent"))
        assert [said for said in browser.get_log("browser") if said["level"] == "SEVERE"] == []
        browser.get("about:blank")  # or the page says in the next test's log that this server has ended


def test_the_page_asks_for_a_key(browser: Any) -> None:
    with running(keys=("open-sesame",)) as server:
        browser.get(server.url)

        def shown() -> bool:
            return bool(browser.execute_script("return !document.getElementById('ask').hidden"))

        server.wait_until(shown)
        browser.execute_script("document.getElementById('key').value = 'open-sesame'")
        browser.execute_script("document.getElementById('ask').requestSubmit()")
        server.wait_until(lambda: not shown())
        assert browser.execute_script("return document.getElementById('model').textContent") == "reference"


# --- the command ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def command(
    *options: str, program: Sequence[str] = ("-m", "mlx_kv.cli", "serve", "--port", "0")
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`mlx-kv serve` as a process, and its address."""
    process = subprocess.Popen([sys.executable, *program, *options], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert " at http://127.0.0.1:" in line, line + process.stderr.read()
        yield process, line.split(" at ")[1].split("/v1")[0]
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def terminated_while_it_answers(process: subprocess.Popen[str], url: str, max_tokens: int) -> Iterator[Iterator[str]]:
    """The lines that still come of an answer, after the first, when the server has got SIGTERM."""
    body = {"prompt": "import", "max_tokens": max_tokens, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        yield filter(None, lines)


def test_sigterm_lets_requests_finish() -> None:
    with command("--kv-bits", "8") as (process, url):
        with terminated_while_it_answers(process, url, 600) as lines:
            time.sleep(0.3)
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/health")
            rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason": "length"' in rest[-2]
        assert process.wait(20) == 0
        assert process.stderr is not None
        (line,) = process.stderr.read().splitlines()
        assert line.startswith("mlx-kv: stopping: 1 request to be finished within 30 s;")


def test_sigterm_waits_only_so_long() -> None:
    with command("--drain-seconds", "0") as (process, url):
        with terminated_while_it_answers(process, url, 4000) as lines:
            rest = list(lines)
        assert "shutting down" in rest[-2]
        assert process.wait(20) == 0


def failing(*options: str, **environment: str) -> str:
    words = [sys.executable, "-m", "mlx_kv.cli", "serve", *options]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | environment, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


def test_bad_options_are_one_line(tmp_path: Path, server: Running) -> None:
    empty, odd = tmp_path / "empty", tmp_path / "odd"
    empty.write_text("\n \n")
    odd.write_text("good\nnot good\n")
    assert "has no key in it" in failing("--api-key-file", str(empty))
    assert "key 2 in" in failing("--api-key-file", str(odd))
    assert "bits" in failing("--kv-bits", "7")
    assert "neither a directory nor a hub id" in failing("--model", "/nowhere", "--port", "0")
    assert "cannot listen on 127.0.0.1" in failing("--port", server.url.rsplit(":", 1)[1])
    hidden = tmp_path / "starlette.py"
    hidden.write_text("raise ModuleNotFoundError('hidden', name='starlette')")
    assert 'pip install "mlx-kv[server]"' in failing(PYTHONPATH=str(tmp_path))
