"""What requests may have besides their sampling: several prompts, an echo, other names, fields that nobody knows."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from serving import SOURCE, Running, check_error, running

from mlx_kv.server.api import Limits
from mlx_kv.server.output import ChatOutputParser, ContentStops, Delta, answer_state
from mlx_kv.server.requests import MAX_LOGGED, UnknownFields
from mlx_kv.server.served import ModelNames, ModelTable, Served


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    with running(limits=Limits(strict=True, queue=4), max_batch_size=4) as one:
        yield one


# --- several prompts, and echo ----------------------------------------------------------------------------------------


def test_several_prompts_get_what_each_gets_alone(server: Running) -> None:
    prompts = [SOURCE[:60], SOURCE[200:300], SOURCE[:60], SOURCE[430:450]]
    alone = [server.complete(prompt, 12) for prompt in prompts]
    whole = server.client.completions.create(model="reference", prompt=prompts, max_tokens=12)
    assert [choice.text for choice in whole.choices] == alone
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 48
    each = [server.post(prompt=prompt, max_tokens=1).json()["usage"]["prompt_tokens"] for prompt in prompts]
    assert whole.usage.prompt_tokens == sum(each)
    said, ends = [""] * 4, [""] * 4
    for piece in server.client.completions.create(model="reference", prompt=prompts, max_tokens=12, stream=True):
        said[piece.choices[0].index] += piece.choices[0].text
        ends[piece.choices[0].index] += piece.choices[0].finish_reason or ""
    assert (said, ends) == (alone, ["length"] * 4)
    server.wait_until_empty()


def test_each_prompt_ends_at_its_own_stop_string(server: Running) -> None:
    prompts = [SOURCE[:60], SOURCE[200:300]]
    texts = [server.complete(prompt, 12) for prompt in prompts]
    stop = texts[1][4:9]
    assert stop not in texts[0]
    choices = server.post(prompt=prompts, max_tokens=12, stop=stop).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["length", "stop"]
    assert [choice["text"] for choice in choices] == [texts[0], texts[1][: texts[1].index(stop)]]


def test_prompts_count_against_the_queue(strict: Running) -> None:
    assert len(strict.post(prompt=["import"] * 8, max_tokens=1).json()["choices"]) == 8
    assert "accepts at most 8" in check_error(strict.post(prompt=["import"] * 9, max_tokens=1), 400)["message"]
    strict.wait_until_empty()


def test_an_error_of_one_prompt_is_one_of_the_request(server: Running) -> None:
    error = check_error(server.post(prompt=["import", "x " * 2000]), 400)
    assert error["code"] == "context_length_exceeded"
    assert re.match(r"prompt is too long: \d+ tokens > \d+ maximum: ", error["message"])
    assert check_error(server.post(prompt=[[1], [99_999]]), 400)["param"] == "prompt"
    server.wait_until_empty()


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_begins_with_the_prompt(server: Running, stream: bool) -> None:
    ids = server.worker.default.models.tokenizer.encode("import os")
    options: dict[str, Any] = {"model": "reference", "max_tokens": 6, "echo": True}
    for prompt in ("import os", ids):
        alone = server.post(prompt=prompt, max_tokens=6).json()["choices"][0]["text"]
        answer = server.client.completions.create(**options, prompt=prompt, stream=stream)
        said = "".join(piece.choices[0].text for piece in answer) if stream else answer.choices[0].text
        assert said == "import os" + alone


# --- names and fields -------------------------------------------------------------------------------------------------


def test_names_of_the_model(server: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert ModelNames("mlx-community/Qwen3-4bit").all == ("mlx-community/Qwen3-4bit", "Qwen3-4bit", "default_model")
    here = tmp_path / "smol"
    here.mkdir()
    assert ModelNames(str(here), ["small"]).all == ("smol", "small", str(here), "default_model")
    any_name = Served("reference", lambda: None, aliases=["*"])  # type: ignore[arg-type]
    assert ModelTable([any_name], strict=True).find("gpt-9") is any_name
    assert any_name.names.all == ("reference", "default_model")
    for name in (None, "reference", "default_model", "reference:latest", "claude-sonnet-4-5", "claude-sonnet-4-5"):
        answer = server.post(model=name, prompt="x", max_tokens=1)
        assert answer.json()["model"] == "reference"
    told = [record.getMessage() for record in caplog.records if "strict-model-name" in record.getMessage()]
    assert told == ["'reference' answers requests for 'claude-sonnet-4-5': --strict-model-name refuses them"]
    assert server.http.get("/v1/models/default_model").json()["id"] == "default_model"


def test_other_names_are_refused_in_each_dialect_where_names_are_strict() -> None:
    messages = [{"role": "user", "content": "x"}]
    with running(strict_names=True) as server:
        check_error(server.post(model="smol", prompt="x"), 404)
        for path, body in (
            ("/v1/messages", {"messages": messages, "max_tokens": 1}),
            ("/api/chat", {"messages": messages}),
            ("/api/show", {}),
        ):
            answer = server.post(path, model="smol", **body)
            assert answer.status_code == 404
            assert "there is no model 'smol' here: use 'reference'" in answer.text
        assert server.post(model="reference", prompt="x", max_tokens=1).json()["model"] == "reference"


def test_fields_that_nobody_knows(
    server: Running, strict: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "import", "max_tokens": 3, "surprise": {"a": 1}, "\ud800": 1}

    def send(to: Running) -> Any:
        return to.http.post("/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"})

    with caplog.at_level(logging.WARNING, "mlx_kv.server"):
        for _ in range(3):
            assert send(server).json()["choices"][0]["text"] == server.complete("import", 3)
    assert len([line for line in caplog.messages if "'surprise'" in line]) == 1
    assert check_error(send(strict), 400)["param"] == "surprise"
    del body["surprise"]
    assert check_error(send(strict), 400)["param"] == "?"
    unknown, caplog.records[:] = UnknownFields(), []
    unknown.check(str(number) for number in range(2 * MAX_LOGGED))
    assert len(caplog.records) <= MAX_LOGGED


def test_paths_without_a_version_and_what_is_not_offered(server: Running) -> None:
    text = server.complete("import", 3)
    assert server.post("/completions", prompt="import", max_tokens=3).json()["choices"][0]["text"] == text
    chat = {"messages": [{"role": "user", "content": "import"}], "max_tokens": 1}
    assert server.post("/chat/completions", **chat).json()["object"] == "chat.completion"
    assert server.http.get("/models").json() == server.http.get("/v1/models").json()
    assert "suffix is not supported" in check_error(server.post(prompt="x", suffix="y"), 400)["message"]


def test_whether_requests_are_taken(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.http.get("/ready").json() == {"status": "ready"}
    monkeypatch.setattr(server.api.admission, "closing", "the server is shutting down")
    answer = server.http.get("/ready")
    assert (answer.status_code, answer.json()["reason"]) == (503, "the server is shutting down")
    assert server.http.get("/health").status_code == 200


# --- chats ------------------------------------------------------------------------------------------------------------


def test_roles_and_efforts(server: Running) -> None:
    """A model without a chat template gets the text that mlx_lm.server would make of the messages."""
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "import os"}], "max_tokens": 6}
    answer = server.post("/v1/chat/completions", **chat, role_mapping={"user": "Q: ", "assistant": "A:", "stop": "\n"})
    assert answer.json()["choices"][0]["message"]["content"] == server.complete("Q: import os\nA:", 6)
    plain = server.post("/v1/chat/completions", **chat).json()["choices"]
    for hint in ({"reasoning_effort": "low"}, {"enable_thinking": False}):  # there is no template that would hear them
        assert server.post("/v1/chat/completions", **chat, **hint).json()["choices"] == plain
    answer = server.post("/v1/chat/completions", **chat, chat_template_kwargs={"reasoning_effort": "low"})
    assert "no chat_template_kwargs" in check_error(answer, 400)["message"]
    chat["messages"] += [{"role": "assistant", "content": "import sys"}]
    begun = server.post("/v1/chat/completions", **chat, continue_final_message=True).json()["choices"][0]
    assert begun["message"]["content"] == server.complete("USER: import os\nASSISTANT: import sys", 6)
    chat["messages"] += [{"role": "user", "content": "x"}]
    answer = server.post("/v1/chat/completions", **chat, continue_final_message=True)
    assert check_error(answer, 400)["param"] == "continue_final_message"


def test_tools_that_cannot_be_called(server: Running, strict: Running) -> None:
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": "import os"}],
        "tools": [{"type": "function", "function": {"name": "look"}}],
        "max_tokens": 6,
    }
    told = server.post("/v1/chat/completions", **chat).json()["choices"][0]["message"]
    del chat["tools"]
    assert told == server.post("/v1/chat/completions", **chat).json()["choices"][0]["message"]
    refused = strict.post("/v1/chat/completions", **chat, tools=[{"function": {"name": "f"}}])
    assert check_error(refused, 400)["param"] == "tools"


@pytest.mark.parametrize("written", ["{0}{0}", "[{0}, {0}]"])
def test_one_tool_call_at_the_most(written: str, reference: Any) -> None:
    call = '{"name": "look", "arguments": {}}'
    text = (
        written.format(f"<tool_call>{call}</tool_call>")
        if "[" not in written
        else (f"<tool_call>{written.format(call)}</tool_call>")
    )
    marks = {"tool_call_start": "<tool_call>", "tool_call_end": "</tool_call>"}
    tokenizer = TokenizerWrapper(reference[1]._tokenizer, tool_parser=json_tools.parse_tool_call, **marks)
    for one_call, count in ((False, 2), (True, 1)):
        said, parser = Delta(), ChatOutputParser(tokenizer, [1], [], stream=False, one_call=one_call)
        said.add(parser.feed(text))
        said.add(parser.finish())
        assert len(said.tool_calls) == count


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_a_mark_of_reasoning_in_a_message_is_text(role: str, reasoner: Running, says: Any) -> None:
    """Only a template, or the beginning of the answer, opens reasoning: not a question about the mark."""
    says("It opens reasoning.")
    messages = [{"role": role, "content": "The tag <think> is what I ask about."}]
    if role != "user":
        messages.append({"role": "user", "content": "What is it?"})
    body: dict[str, Any] = {"messages": messages, "max_tokens": 30}
    message = reasoner.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    assert (message["content"], message.get("reasoning")) == ("It opens reasoning.", None)
    body["messages"] = [*messages, {"role": "assistant", "content": "<think>It"}]
    message = reasoner.post("/v1/chat/completions", **body, continue_final_message=True).json()["choices"][0]["message"]
    assert message["reasoning"] == "It opens reasoning."


def test_a_question_about_the_mark_of_reasoning_has_an_answer_in_form(reasoner: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {"enum": ["yes", "no"]}}}
    messages = [{"role": "user", "content": "Is <think> a tag?"}]
    answer = reasoner.post("/v1/chat/completions", messages=messages, max_tokens=60, response_format=form).json()
    assert answer["choices"][0]["message"]["content"] in ('"yes"', '"no"')


# --- stop strings -----------------------------------------------------------------------------------------------------

MARKED = [("normal", "<think>", "reasoning"), ("reasoning", "</think>", "normal")]
MARKED += [("normal", "<tool_call>", "tool"), ("tool", "</tool_call>", "normal")]


def passed_on(text: str, strings: list[str]) -> str:
    """What comes of a text, as it is defined: parts between marks, of which only content ends at a stop string."""
    state, part, whole = "normal", "", ""
    while True:
        mark = next(
            ((mark, after) for before, mark, after in MARKED if before == state and text.startswith(mark)), None
        )
        if (mark is not None or not text) and state == "normal":
            ends = [(part.index(string) + len(string), part.index(string)) for string in strings if string in part]
            if ends:
                return whole + part[: min(ends)[1]]
        if mark is not None:
            whole, part, state, text = whole + part + mark[0], "", mark[1], text[len(mark[0]) :]
        elif text:
            part, text = part + text[0], text[1:]
        else:
            return whole + part


@given(
    parts=st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "<", "th", "a", "b", "ab"])),
    strings=st.lists(st.sampled_from(["a", "ba", "<", "th", "</think>", "aab"]), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 9), min_size=60, max_size=60),
)
def test_stop_strings_end_content_alone(
    parts: list[str], strings: list[str], sizes: list[int], reasoner: Running
) -> None:
    text, stops = "".join(parts), ContentStops(strings, answer_state(reasoner.worker.default.models.tokenizer, [1]))
    said, left = "", text
    for size in (*sizes, len(text)):
        said, left = said + stops.feed(left[:size]), left[size:]
    said += "" if stops.stopped else stops.finish()
    assert said == passed_on(text, strings)
    assert stops.stopped == (said != text)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_a_stop_string_does_not_end_reasoning(path: str, reasoner: Running) -> None:
    messages = [{"role": "user", "content": "def f(x):"}, {"role": "assistant", "content": "<think>"}]
    if path == "/api/chat":
        body: dict[str, Any] = {"options": {"num_predict": 30, "stop": []}, "stream": False}
        options, name = body["options"], "stop"
    else:
        body = {"max_tokens": 30} | ({} if path == "/v1/messages" else {"continue_final_message": True})
        options, name = body, "stop_sequences" if path == "/v1/messages" else "stop"
    first = reasoner.post(path, model="reference", messages=messages, **body).json()
    for thinking in (("choices", 0, "message", "reasoning"), ("content", 0, "thinking"), ("message", "thinking")):
        with contextlib.suppress(KeyError, IndexError):
            text = functools.reduce(lambda value, key: value[key], thinking, first)
    options[name] = [text[6:9]]
    again = reasoner.post(path, model="reference", messages=messages, **body).json()
    for answer in (first, again):
        for field in ("id", "created", "created_at", "usage"):
            answer.pop(field, None)
        for field in [field for field in answer if field.endswith("duration")]:
            answer.pop(field)
    assert again == first
