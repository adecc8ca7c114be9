"""What clients must not do to a server: every request that cannot be honoured is an error that says so."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from effort import THOROUGH
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from serving import Running, check_error, running

from mlx_kv.files.tensor_files import read_json
from mlx_kv.server.api import Limits

# --- what is refused --------------------------------------------------------------------------------------------------


def called(**function: Any) -> dict[str, Any]:
    """A chat in which the assistant has called such a function."""
    return {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", 7]}, "prompt"),
    ({"prompt": ["a"] * 1025}, "prompt"),
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
    ({"prompt": "x", "echo": 1}, "echo"),
    ({"prompt": "x", "stop": ""}, "stop"),
    ({"prompt": "x", "stop": [1]}, "stop"),
    ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
    ({"prompt": "x", "stream": 1}, "stream"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "x", "model": 5}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "hard"}, "reasoning_effort"),
    ({"messages": [{"role": "user", "content": "x"}], "role_mapping": {"user": 1}}, "role_mapping"),
    ({"messages": [{"role": "user", "content": "x"}], "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"messages": ["x"]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}, "tools"),
    ({"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}, "tool_choice"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": {"name": "f"}}]}, "messages[0].tool_calls"),
    (called(), "messages[0].tool_calls[0].function.name"),
    ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "messages[0].tool_calls[0]"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {}}]}, "tools"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {"name": ""}}]}, "tools"),
    (
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"return_dict": True}},
        "chat_template_kwargs",
    ),
    ({"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "yaml"}}, "response_format"),
]


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
        (b'{"prompt": "x", "max_tokens": 1, "max_tokens": 1000}', "'max_tokens' appears twice"),
        (b'{"prompt": "x", "metadata": {"a": 1, "a": 2}}', "'a' appears twice"),
        (b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", "the body is not JSON"),
    ):
        answer = server.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert told in check_error(answer, 400)["message"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_json_is_utf_8(server: Running, encoding: str) -> None:
    def post(body: bytes) -> httpx.Response:
        return server.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})

    text = '{"prompt": "import os \u2014", "max_tokens": 1}'
    for marked in (text, f"\ufeff{text}"):
        error = check_error(post(marked.encode(encoding)), 400)
        assert error["message"] == f"the body looks like {encoding[:6].upper()}: send JSON in UTF-8"
        assert error["code"] == "invalid_json"
        assert post(marked.encode("utf-8")).status_code == 200
    for cut in (text.encode("latin-1", "replace") + b"\xe9", b'{"prompt": "\xed\xa0\x80"}'):
        assert "is no UTF-8 from byte" in check_error(post(cut), 400)["message"]


@pytest.mark.parametrize("path", ["/slots", "/slots/3?action=save", "/slots/0?action=restore", "/slots/1?action=erase"])
def test_slots_name_the_way_on(path: str, server: Running) -> None:
    answer = server.http.get(path) if path == "/slots" else server.post(path, filename="talk.safetensors")
    message = check_error(answer, 404)["message"]
    assert message.startswith("slots were removed in 0.4")
    assert "--prompt-store DIR" in message
    assert server.post(prompt="x", max_tokens=1, id_slot=3).status_code == 200  # as clients of llama.cpp send


def test_what_is_refused_says_what_to_send(server: Running) -> None:
    said: dict[str, Any] = {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": said | {"tools": [{"function": {"name": ""}}]},
        "/v1/responses": {"input": "x", "tools": [{"type": "function", "name": ""}]},
        "/v1/messages": said | {"tools": [{"name": "", "input_schema": {}}]},
    }
    for path, body in bodies.items():
        answer = server.post(path, **body)
        assert answer.status_code == 400
        where = "tools[0].function.name" if "chat" in path else "tools[0].name"
        assert answer.json()["error"]["message"] == f"{where} is empty: send a text"


TEMPLATE = """{%- for message in messages %}<{{ message.role }}>{{ message.content | trim }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}: {{ call.function.arguments | tojson }}
{%- for name, value in call.function.arguments.items() %}{{ name + value }}{% endfor %}{% endfor %}
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


def test_large_bodies_are_parsed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[bool, str] = {}

    def read(text: str) -> Any:
        threads[len(text) > 2**20] = threading.current_thread().name
        return read_json(text)

    monkeypatch.setattr("mlx_kv.server.json_http.read_json", read)
    with running() as server:
        assert server.complete("import", 3) == server.complete("import", 3, user="x" * 2**20)
        broken = server.http.post("/v1/completions", content=b"[" * 2**21, headers={"Content-Type": "application/json"})
        assert "nested more than" in check_error(broken, 400)["message"]
    assert threads[True] != threads[False]


def test_unknown_paths_and_methods(server: Running) -> None:
    check_error(server.http.get("/v1/engines"), 404)
    check_error(server.http.get("/v1/completions"), 405)
    check_error(server.http.delete("/"), 405)


@pytest.mark.slow
def test_a_full_queue_turns_away() -> None:
    with running(max_batch_size=1, limits=Limits(queue=1)) as server, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(server.complete, "import", 300) for _ in range(2)]
        server.wait_until(lambda: server.api.admission.admitted == 2)
        answer = server.post(prompt="x")
        assert check_error(answer, 429)["type"] == "rate_limit_error"
        assert int(answer.headers["Retry-After"]) >= 1
        with pytest.raises(openai.RateLimitError):
            server.client.completions.create(model="reference", prompt="x")
        assert server.http.get("/health").json() == {"status": "ok"}
        assert waiting[0].result() == waiting[1].result()
        assert server.complete("import", 3)


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


@pytest.mark.slow
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
