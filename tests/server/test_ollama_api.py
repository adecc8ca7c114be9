"""Ollama's API, through its own client, and the requests that a desktop client sends."""

from __future__ import annotations

import json
from typing import Any

import ollama
import pytest
from reasoning_server import ANSWER, TOOL
from serving import SOURCE, Running, running

from mlx_kv.server.api import Limits
from mlx_kv.server.dialects.ollama import OllamaChatBody, Options, parameter_size
from mlx_kv.server.json_http import ApiError
from mlx_kv.server.requests import UnknownFields

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "import os"}]
LOOK = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": TOOL}}
GREEDY = {"temperature": 0, "num_predict": 12}


@pytest.fixture(scope="module")
def client(reasoner: Running) -> ollama.Client:
    return ollama.Client(host=reasoner.url, timeout=60)


def refused(call: Any) -> ollama.ResponseError:
    with pytest.raises(ollama.ResponseError) as error:
        call()
    return error.value


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_chat_is_what_openai_clients_get(reasoner: Running, client: ollama.Client) -> None:
    messages = [{"role": "system", "content": SOURCE[:300]}, *ASKED]
    wanted = reasoner.client.chat.completions.create(model="reference", messages=messages, max_tokens=12)  # type: ignore[arg-type]
    whole = client.chat("reference", messages, options=GREEDY)
    assert whole.message.content == wanted.choices[0].message.content
    assert (whole.done, whole.done_reason, whole.message.role) == (True, "length", "assistant")
    assert wanted.usage is not None
    assert (whole.prompt_eval_count, whole.eval_count) == (wanted.usage.prompt_tokens, 12)
    parts = list(client.chat("reference", messages, options=GREEDY, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == 12
    reasoner.wait_until_empty()


def test_the_last_line_has_durations_in_nanoseconds(reasoner: Running) -> None:
    with reasoner.http.stream("POST", "/api/chat", json={"messages": ASKED, "options": GREEDY}) as answer:
        assert answer.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in answer.iter_lines()]
    end = lines[-1]
    assert 0 < end["prompt_eval_duration"] < end["total_duration"] < 60 * 10**9
    assert end["total_duration"] == pytest.approx(end["prompt_eval_duration"] + end["eval_duration"], abs=10)
    assert all(isinstance(value, int) for name, value in end.items() if name.endswith(("duration", "count")))
    assert all("total_duration" not in line and line["created_at"].endswith("Z") for line in lines[:-1])


def test_a_prompt_is_a_chat_unless_it_is_raw(reasoner: Running, client: ollama.Client) -> None:
    chat = client.chat("reference", [{"role": "system", "content": "x = 1"}, *ASKED], options=GREEDY)
    asked = client.generate("reference", "import os", system="x = 1", options=GREEDY)
    assert asked.response == chat.message.content
    raw = client.generate("reference", "import os", raw=True, options=GREEDY)
    assert raw.response == reasoner.complete("import os", 12)
    assert raw.response != asked.response
    streamed = client.generate("reference", "import os", raw=True, options=GREEDY, stream=True)
    assert "".join(part.response or "" for part in streamed) == raw.response


def test_a_model_without_a_template_continues_the_prompt(server: Running) -> None:
    body = {"prompt": "import os", "stream": False, "options": GREEDY}
    assert server.post("/api/generate", **body).json()["response"] == server.complete("import os", 12)
    together = server.post("/api/generate", system="x = 1", **body).json()["response"]
    assert together == server.complete("x = 1\n\nimport os", 12)


@pytest.mark.slow
def test_thinking_and_calls(client: ollama.Client, says: Any) -> None:
    says(ANSWER)
    whole = client.chat("reference", ASKED, tools=[LOOK], think=True)
    assert whole.message.thinking == "I could look."
    assert (whole.message.content or "").strip() == "Let me look."
    assert whole.message.tool_calls is not None
    (call,) = whole.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("look", {"at": "cache.py"})
    assert whole.done_reason == "stop"
    says(ANSWER)
    parts = list(client.chat("reference", ASKED, tools=[LOOK], think=True, stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == "I could look."
    assert [call for part in parts for call in part.message.tool_calls or []] == [call]
    says(ANSWER)
    generated = client.generate("reference", "import os", think=True)
    assert generated.thinking == "I could look."


def test_calls_and_results_get_the_ids_of_a_chat() -> None:
    called: Any = [{"function": {"name": name, "arguments": {"at": name}}} for name in ("look", "read")]
    messages: Any = [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": called},
        {"role": "tool", "content": "b", "tool_name": "read"},
        {"role": "tool", "content": "a"},
    ]
    body = OllamaChatBody.parse({"messages": messages}, UnknownFields())
    _, assistant, read, look = body.chat_messages()
    ids = [call["id"] for call in assistant["tool_calls"]]
    assert [json.loads(call["function"]["arguments"]) for call in assistant["tool_calls"]] == [
        {"at": "look"},
        {"at": "read"},
    ]
    assert (look["tool_call_id"], look["name"]) == (ids[0], "look")
    assert (read["tool_call_id"], read["name"]) == (ids[1], "read")


def test_a_conversation_with_a_call_goes_on(client: ollama.Client, says: Any) -> None:
    says("Done.")
    called = [{"function": {"name": "look", "arguments": {"at": "cache.py"}}}]
    messages = [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": called},
        {"role": "tool", "content": "nothing", "tool_name": "look"},
    ]
    assert client.chat("reference", messages, tools=[LOOK]).message.content == "Done."


@pytest.mark.parametrize("streamed", [False, True])
def test_a_format_is_followed(server: Running, streamed: bool) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    own = ollama.Client(host=server.url, timeout=60)
    options = {"temperature": 0, "num_predict": 32}
    chat: Any = own.chat("reference", ASKED, format=schema, options=options, stream=streamed)  # type: ignore[call-overload]
    parts = chat if streamed else [chat]
    assert json.loads("".join(part.message.content for part in parts))["n"] in (1, 2)
    prompt: Any = own.generate("reference", "n", format=schema, options=options, stream=streamed)  # type: ignore[call-overload]
    parts = prompt if streamed else [prompt]
    assert json.loads("".join(part.response for part in parts))["n"] in (1, 2)


def test_log_probabilities(client: ollama.Client) -> None:
    whole = client.chat("reference", ASKED, options=GREEDY, logprobs=True, top_logprobs=2)
    assert whole.logprobs is not None
    assert len(whole.logprobs) == 12
    assert all(len(each.top_logprobs or []) == 2 and each.logprob <= 0 for each in whole.logprobs)


def test_a_last_message_of_the_assistant_is_continued(client: ollama.Client, reasoner: Running) -> None:
    begun = [*ASKED, {"role": "assistant", "content": "import sys"}]
    whole = client.chat("reference", begun, options=GREEDY)
    wanted = reasoner.post("/v1/chat/completions", messages=begun, max_tokens=12, continue_final_message=True).json()
    assert whole.message.content == wanted["choices"][0]["message"]["content"]


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 3}, None),
        ({"stop": ["a", "b"], "presence_penalty": 0.5, "frequency_penalty": 0.5}, None),
        ({"num_predict": 7}, {"max_tokens": 7}),
        ({"num_predict": -1}, {"max_tokens": 2**24}),
        ({"num_predict": 0}, {}),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, {"repetition_penalty": 1.1, "repetition_context_size": 64}),
        ({"repeat_penalty": 1.1, "repeat_last_n": -1}, {"repetition_penalty": 1.1, "repetition_context_size": 0}),
        ({"repeat_penalty": 1.1, "repeat_last_n": 0}, {}),
        ({"num_ctx": 4096, "num_gpu": 99, "mirostat": 1, "num_thread": 4}, {}),
    ],
)
def test_options_become_fields(given: dict[str, Any], wanted: dict[str, Any] | None) -> None:
    assert Options.parse(given, UnknownFields(strict=True)).fields() == (given if wanted is None else wanted)


def test_options_are_honoured(client: ollama.Client, reasoner: Running) -> None:
    options = {"temperature": 0.9, "top_p": 0.95, "seed": 5, "num_predict": 16}
    first, second = (client.generate("reference", "import os", raw=True, options=options) for _ in range(2))
    assert first.response == second.response
    other = reasoner.complete("import os", 16, temperature=0.9, top_p=0.95, seed=5)
    assert first.response == other
    assert first.response is not None
    stop = first.response[4:7]
    cut = client.generate("reference", "import os", raw=True, options=options | {"stop": [stop]})
    assert cut.response == first.response[: first.response.index(stop)]
    assert cut.done_reason == "stop"


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "/api/chat",
            {"messages": [{**ASKED[0], "images": "aGk="}]},
            "messages[0].images is a JSON string",
        ),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, "suffix is not supported by this server: leave it out"),
        ("/api/generate", {"prompt": "a", "format": "yaml"}, 'format is not a format: send "json", or a JSON schema'),
        ("/api/generate", {"prompt": "a", "options": {"num_predict": -3}}, "num_predict is -3: send at least -2"),
        ("/api/generate", {"prompt": "a", "options": {"temperature": 9}}, "temperature is 9: send at most 2"),
        ("/api/generate", {"prompt": "a", "options": 1}, "options is 1: send an object"),
        ("/api/chat", {"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role is 'robot': send one of"),
    ],
)
def test_refusals_are_one_line_in_words(reasoner: Running, path: str, body: dict[str, Any], message: str) -> None:
    answer = reasoner.post(path, **body)
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]
    assert answer.json()["error"].startswith(message)


def test_another_model_is_not_there(client: ollama.Client) -> None:
    assert client.chat("llama3.2", ASKED).model == "reference"  # it is the only one
    assert refused(lambda: client.pull("llama3.2")).status_code == 404


def test_unknown_fields_are_refused_where_that_is_wanted() -> None:
    with running(limits=Limits(strict=True)) as strict:
        assert strict.post("/api/generate", prompt="a", options={"shape": 1}).status_code == 400
        assert strict.post("/api/generate", prompt="a", shape=1).json()["error"].startswith("unknown field 'shape'")
        fine = {"prompt": "a", "stream": False, "keep_alive": "5m", "options": {"num_ctx": 4096, "num_predict": 2}}
        assert strict.post("/api/generate", **fine).status_code == 200
    with pytest.raises(ApiError):
        Options.parse({"num_predict": "many"}, UnknownFields())


# --- models -----------------------------------------------------------------------------------------------------------


def test_the_model_is_listed_and_shown(client: ollama.Client, reasoner: Running) -> None:
    names = [each.model for each in client.list().models]
    assert "reference" in names
    assert "default_model" not in names
    first = client.list().models[0]
    assert first.details is not None
    assert (first.details.format, first.details.family) == ("mlx", "llama")
    weights = sum(array.nbytes for _, array in _leaves(reasoner))
    assert first.size == weights
    shown = client.show("reference")
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == reasoner.worker.default.context
    assert set(shown.capabilities or []) == {"completion", "tools", "thinking"}
    assert "message.role" in (shown.template or "")
    client.generate("reference", "")
    (loaded,) = client.ps().models
    assert loaded.size_vram == weights


def _leaves(reasoner: Running) -> Any:
    from mlx.utils import tree_flatten

    return tree_flatten(reasoner.worker.default.models.model.parameters())  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("count", "words"), [(999, "999"), (1_540_000, "1.54M"), (7_000_000_000, "7B")])
def test_numbers_of_parameters(count: int, words: str) -> None:
    assert parameter_size(count) == words


def test_a_request_without_a_prompt_loads_or_unloads(client: ollama.Client) -> None:
    loaded = client.generate("reference", "")
    assert (loaded.response, loaded.done_reason) == ("", "load")
    assert client.chat("reference", [], keep_alive=0).done_reason == "unload"


# --- a desktop client -------------------------------------------------------------------------------------------------

# Requests in the form of Open WebUI's to a connection of the kind "Ollama", written by hand, not captured: it lists
# and checks when it starts, loads nothing itself, adds ":latest" to names, sends its parameters as options, and makes
# titles by a second chat that is not streamed.
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer none", "X-OpenWebUI-User-Name": "A"}
OPEN_WEBUI: list[tuple[str, str, dict[str, Any] | None]] = [
    ("GET", "/api/version", None),
    ("GET", "/api/tags", None),
    ("GET", "/api/ps", None),
    ("POST", "/api/show", {"model": "reference:latest"}),
    (
        "POST",
        "/api/chat",
        {
            "model": "reference:latest",
            "messages": [
                {"role": "system", "content": "Answer briefly."},
                {"role": "user", "content": "import os"},
            ],
            "stream": True,
            "options": {"temperature": 0, "num_predict": 8, "num_ctx": 4096, "repeat_penalty": 1.1, "mirostat": 0},
            "keep_alive": "5m",
        },
    ),
    (
        "POST",
        "/api/chat",
        {
            "model": "reference:latest",
            "messages": [
                {"role": "user", "content": "weather?"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"index": 0, "id": "c1", "function": {"name": "look", "arguments": {"at": "x"}}}],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            ],
            "tools": [LOOK],
            "stream": True,
            "options": {"num_predict": 8},
        },
    ),
    (
        "POST",
        "/api/chat",
        {
            "model": "reference:latest",
            "messages": [{"role": "user", "content": "### Task:\nGenerate a title."}],
            "stream": False,
            "options": {"num_predict": 4},
        },
    ),
    ("POST", "/api/generate", {"model": "reference:latest", "keep_alive": 0, "prompt": ""}),
]


@pytest.mark.parametrize("place", range(len(OPEN_WEBUI)))
def test_requests_of_open_webui_are_answered(reasoner: Running, place: int) -> None:
    method, path, body = OPEN_WEBUI[place]
    answer = reasoner.http.request(method, path, json=body, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines
    assert not any("error" in line for line in lines)
    if path == "/api/chat":
        assert lines[-1]["done"] is True
        assert lines[-1]["model"] == "reference:latest"
        assert "".join(line["message"]["content"] for line in lines)
        assert lines[-1]["eval_count"] <= 8
    if path == "/api/version":
        assert tuple(map(int, lines[0]["version"].split("."))) >= (0, 6, 4)  # that some clients need
