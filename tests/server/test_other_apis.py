"""OpenAI's responses and Anthropic's messages, through their own clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from serving import SOURCE, Running, running

from mlx_kv.server.access import ApiKeys
from mlx_kv.server.answers import Choice
from mlx_kv.server.chat_output import Delta
from mlx_kv.server.dialects.blocks import Blocks, Event, Kind
from mlx_kv.server.dialects.conversations import Conversations
from mlx_kv.server.dialects.message_requests import messages
from mlx_kv.server.dialects.response_items import as_messages
from mlx_kv.server.dialects.response_requests import ResponsesDialect
from mlx_kv.server.errors import ApiError
from mlx_kv.server.job import Job
from mlx_kv.server.requests import RequestRules
from mlx_kv.server.stop_strings import StopStrings

TEMPLATE = r"""{%- for message in messages %}{{ message.role }}: {{ message.reasoning }}{{ message.content }}
{%- for call in message.tool_calls or [] %} {{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}
{{- "\n" }}{% endfor %}{{ tools | tojson if tools }}{% if add_generation_prompt %}assistant:{% endif %}"""
CALL = '<tool_call>{"name": "look", "arguments": {"at": "cache.py"}}</tool_call>'
TOOL: dict[str, Any] = {"type": "object", "properties": {"at": {"type": "string"}}}


@pytest.fixture(scope="module")
def chatting() -> Iterator[Running]:
    """A model with a chat template, reasoning and tools; what it says is written over where a test wants that."""

    def change(tokenizer: Any) -> TokenizerWrapper:
        tokenizer._tokenizer.chat_template = TEMPLATE
        marks = {"tool_call_start": "<tool_call>", "tool_call_end": "</tool_call>"}
        changed = TokenizerWrapper(tokenizer._tokenizer, tool_parser=json_tools.parse_tool_call, **marks)
        for name, mark in (("start", "<think>"), ("end", "</think>")):
            ids = tuple(changed.encode(mark, add_special_tokens=False))
            object.__setattr__(changed, f"_think_{name}", mark)
            object.__setattr__(changed, f"_think_{name}_tokens", ids)
        return changed

    with running(change=change, prompt_memory_bytes=2**26) as one:
        yield one


@pytest.fixture(scope="module")
def claude(chatting: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=chatting.url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes another text over what the model says, a few characters for each chunk."""

    def say(text: str) -> None:
        def take(self: Choice, chunk: Any) -> Delta:
            left = getattr(self, "left", text)
            end = bool(chunk.finish_reason)
            piece, self.left = (left, "") if end else (left[:5], left[5:])  # type: ignore[attr-defined]
            said = type(chunk)(chunk.job, piece, chunk.tokens, "stop" if end else None)
            return real(self, said)

        monkeypatch.setattr(Choice, "take", take)

    real = Choice.take
    return say


ANSWER = f"<think>I could look.</think>\n\nLet me look.\n{CALL}"


# --- messages ---------------------------------------------------------------------------------------------------------


def test_a_message_is_what_a_chat_says(chatting: Running, claude: anthropic.Anthropic) -> None:
    asked: Any = [{"role": "user", "content": "import os"}]
    chat = chatting.client.chat.completions.create(
        model="reference", messages=[{"role": "system", "content": SOURCE[:300]}, *asked], max_tokens=12
    )
    wanted = chat.choices[0].message.content
    told: dict[str, Any] = {"model": "reference", "max_tokens": 12, "system": SOURCE[:300], "messages": asked}
    whole = claude.messages.create(**told)
    assert [(block.type, block.text) for block in whole.content] == [("text", wanted)]  # type: ignore[union-attr]
    assert (whole.stop_reason, whole.stop_sequence, whole.role) == ("max_tokens", None, "assistant")
    assert chat.usage is not None
    read = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert (read, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    with claude.messages.stream(**told) as stream:
        assert "".join(stream.text_stream) == wanted
        last = stream.get_final_message()
    assert last.stop_reason == whole.stop_reason
    assert last.usage.cache_read_input_tokens == read - 1  # which the first of them had to read
    assert last.usage.input_tokens == 1
    counted = claude.messages.count_tokens(model="reference", system=SOURCE[:300], messages=asked)
    assert counted.input_tokens == read
    chatting.wait_until_empty()


def test_a_message_ends_at_a_stop_sequence(chatting: Running, claude: anthropic.Anthropic) -> None:
    told: dict[str, Any] = {
        "model": "default_model", "max_tokens": 24, "messages": [{"role": "user", "content": "import os"}]
    }  # fmt: skip
    text = claude.messages.create(**told).content[0].text  # type: ignore[union-attr]
    stop = text[6:9]
    cut = claude.messages.create(**told, stop_sequences=["never", stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text[: text.index(stop)]  # type: ignore[union-attr]


def test_a_message_may_be_begun(chatting: Running, claude: anthropic.Anthropic) -> None:
    """A last message of the assistant is gone on from."""
    told: dict[str, Any] = {"model": "reference", "max_tokens": 6}
    begun = [{"role": "user", "content": "import os"}, {"role": "assistant", "content": "import sys"}]
    answer = claude.messages.create(**told, messages=begun)
    assert answer.content[0].text == chatting.complete(  # type: ignore[union-attr]
        "user: import os\nassistant: import sys", 6
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_has_thoughts_texts_and_calls(
    stream: bool, chatting: Running, claude: anthropic.Anthropic, says: Any
) -> None:
    says(ANSWER)
    told: dict[str, Any] = {
        "model": "reference",
        "max_tokens": 6,
        "system": SOURCE[:300],
        "messages": [{"role": "user", "content": "What is in cache.py?"}],
        "tools": [{"name": "look", "description": "Looks into a file.", "input_schema": TOOL}],
    }
    if stream:
        with claude.messages.stream(**told) as events:
            answer: Any = events.get_final_message()
    else:
        answer = claude.messages.create(**told)
    thought, text, call = answer.content
    assert (thought.type, thought.thinking) == ("thinking", "I could look.")
    assert (text.type, text.text.strip()) == ("text", "Let me look.")
    assert (call.type, call.name, call.input) == ("tool_use", "look", {"at": "cache.py"})
    assert answer.stop_reason == "tool_use"
    told["messages"] += [
        {"role": "assistant", "content": [block.to_dict() for block in answer.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "A cache."}]},
    ]
    assert claude.messages.create(**told).usage.cache_read_input_tokens
    chatting.wait_until_empty()


def test_blocks_become_messages_of_a_chat() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "é"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "no"}], "is_error": True}
    body = {
        "max_tokens": 1,
        "system": [
            {"type": "text", "text": "A"},
            {"type": "text", "text": "B", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "look"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, call]},
            {"role": "user", "content": [result, {"type": "text", "text": "well?"}]},
        ],
        "tools": [{"name": "look", "input_schema": TOOL}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": "me"},
    }
    request = messages(body, RequestRules()).request
    function = {"name": "look", "arguments": '{"at": "é"}'}
    assert request.messages == [
        {"role": "system", "content": "AB"},
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "content": "",
            "reasoning": "hm",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "error: no"},
        {"role": "user", "content": "well?"},
    ]
    assert request.tools[0]["function"] == {"name": "look", "description": "", "parameters": TOOL}
    assert (request.one_call, request.hints, request.continues) == (True, {"enable_thinking": False}, False)


BAD_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"max_tokens": 0}, "max_tokens is no whole number"),
    ({"messages": []}, "messages is missing"),
    ({"messages": [7]}, "no array of objects"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "has the role 'wizard'"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0] has no content"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "of the type 'image'"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}]}, "'tool_use'"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}]},
        "input is a JSON",
    ),
    ({"system": 7}, "system is a JSON number"),
    ({"temperature": 1.5}, "temperature is no number from 0 to 1"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "only tools that clients run"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type can be"),
    ({"thinking": {"type": "hard"}}, "thinking.type can be"),
    ({"stop_sequences": [""]}, "stop"),
    ({"output_config": {"format": {"type": "xml"}}}, "json_schema"),
    ({"model": "claude"}, "there is no model 'claude'"),
]


@pytest.mark.parametrize(("change", "told"), BAD_MESSAGES, ids=[told for _, told in BAD_MESSAGES])
def test_messages_that_are_refused(change: dict[str, Any], told: str, chatting: Running) -> None:
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]} | change
    answer = chatting.post("/v1/messages", **body)
    error = answer.json()
    assert (answer.status_code, error["type"]) == (404 if "model" in change else 400, "error")
    assert error["error"]["type"] == ("not_found_error" if "model" in change else "invalid_request_error")
    assert told in error["error"]["message"]


def test_anthropics_clients_send_keys_their_way(chatting: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chatting.api, "_keys", ApiKeys(["secret"]))
    told: dict[str, Any] = {
        "model": "reference", "max_tokens": 1, "messages": [{"role": "user", "content": "import"}]
    }  # fmt: skip
    client = anthropic.Anthropic(base_url=chatting.url, api_key="secret", max_retries=0)
    assert client.messages.create(**told).content
    assert [model.id for model in client.models.list()] == ["reference", "default_model"]
    with pytest.raises(anthropic.AuthenticationError, match="no valid API key"):
        anthropic.Anthropic(base_url=chatting.url, api_key="wrong", max_retries=0).messages.create(**told)


# --- responses --------------------------------------------------------------------------------------------------------


def test_a_response_is_what_a_chat_says(chatting: Running) -> None:
    client = chatting.client
    chat = client.chat.completions.create(
        model="reference",
        messages=[{"role": "system", "content": SOURCE[:300]}, {"role": "user", "content": "import sys"}],
        max_tokens=12,
    )
    told: dict[str, Any] = {
        "model": "reference", "instructions": SOURCE[:300], "input": "import sys", "max_output_tokens": 12
    }  # fmt: skip
    whole = client.responses.create(**told)
    assert whole.output_text == chat.choices[0].message.content
    assert (whole.status, whole.incomplete_details and whole.incomplete_details.reason) == (
        "incomplete", "max_output_tokens"
    )  # fmt: skip
    assert whole.usage is not None
    assert chat.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    assert whole.usage.input_tokens_details.cached_tokens == chat.usage.prompt_tokens - 1
    events = list(client.responses.create(**told, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == whole.output_text
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == said
    chatting.wait_until_empty()


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_thoughts_texts_and_calls(stream: bool, chatting: Running, says: Any) -> None:
    says(ANSWER)
    asked: Any = [{"role": "user", "content": [{"type": "input_text", "text": "What is in cache.py?"}]}]
    told: dict[str, Any] = {
        "model": "reference",
        "max_output_tokens": 6,
        "tools": [{"type": "function", "name": "look", "parameters": TOOL, "strict": False}],
    }
    if stream:
        with chatting.client.responses.stream(**told, input=asked) as events:
            answer: Any = events.get_final_response()
    else:
        answer = chatting.client.responses.create(**told, input=asked)
    thought, text, call = answer.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "I could look.")
    assert (text.type, text.content[0].text.strip(), text.role) == ("message", "Let me look.", "assistant")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "look", {"at": "cache.py"})
    assert answer.status == "completed"
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "A cache."}
    by_id = chatting.client.responses.create(**told, input=[result], previous_response_id=answer.id)
    again = chatting.client.responses.create(
        **told, input=[*asked, *(item.to_dict() for item in answer.output), result]
    )
    assert by_id.usage is not None
    assert again.usage is not None
    assert by_id.usage.input_tokens == again.usage.input_tokens
    chatting.wait_until_empty()


def test_responses_that_are_kept(chatting: Running) -> None:
    client, told = chatting.client, {"model": "reference", "max_output_tokens": 3}
    first = client.responses.create(**told, input="import os", instructions=SOURCE[:300])  # type: ignore[call-overload]
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    for find in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="or no longer"):
            find(first.id)
    with pytest.raises(openai.NotFoundError, match="send the whole conversation"):
        client.responses.create(**told, input="x", previous_response_id=first.id)  # type: ignore[call-overload]
    alone = client.responses.create(**told, input="import os", store=False)  # type: ignore[call-overload]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(alone.id)


def test_the_oldest_responses_are_let_go() -> None:
    kept = Conversations(most_bytes=250)
    for number in range(3):
        kept.keep({"id": str(number), "output": "x" * 60}, [])
    with pytest.raises(ApiError, match="no longer"):
        kept.find("0")
    kept.find("1")
    kept.keep({"id": "3", "output": "x" * 60}, [])
    assert kept.find("1").response["id"] == "1"  # it was asked for last
    kept.keep({"id": "4", "output": "x" * 400}, [])
    with pytest.raises(ApiError, match="or no longer"):
        kept.find("4")


def test_items_become_messages_of_a_chat() -> None:
    items = [
        {"role": "developer", "content": "A"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "look"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "no"},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    called = [{"id": str(n), "type": "function", "function": {"name": "look", "arguments": "{}"}} for n in (1, 2)]
    assert as_messages(items) == [
        {"role": "developer", "content": "A"},
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "Well.", "reasoning": "hm", "tool_calls": called},
        {"role": "tool", "tool_call_id": "1", "content": "no"},
        {"role": "assistant", "content": "No."},
    ]


def test_fields_of_a_response_become_those_of_a_chat() -> None:
    body = {
        "input": "x",
        "reasoning": {"effort": "low"},
        "parallel_tool_calls": False,
        "tools": [{"type": "function", "name": "look", "strict": True}],
        "text": {"format": {"type": "text"}},
        "truncation": "auto",
        "seed": 7,
        "stop": "end",
        "messages": [],
        "max_tokens": 9,
    }
    request = ResponsesDialect(Conversations())(body, RequestRules()).request
    assert (request.seed, request.stop_strings, request.max_tokens) == (7, ("end",), None)
    assert (request.one_call, request.hints) == (True, {"reasoning_effort": "low"})
    assert request.tools == [{"type": "function", "function": {"name": "look", "strict": True}}]


BAD_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input is missing"),
    ({"input": []}, "input is missing"),
    ({"input": [7]}, "input[0] is a JSON number"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference'"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "input[0] has the role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0] is not text"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "call_id is a JSON null"),
    ({"max_output_tokens": 0}, "max_output_tokens is no whole number"),
    ({"background": True}, "background is not supported"),
    ({"conversation": "c"}, "conversation is not supported"),
    ({"tools": [{"type": "web_search"}]}, "only tools that clients run"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format"),
    ({"reasoning": {"effort": "hard"}}, "reasoning_effort can be"),
]


@pytest.mark.parametrize(("change", "told"), BAD_RESPONSES, ids=[told for _, told in BAD_RESPONSES])
def test_responses_that_are_refused(change: dict[str, Any], told: str, chatting: Running) -> None:
    answer = chatting.post("/v1/responses", **({"input": "x", "max_output_tokens": 1} | change))
    assert answer.status_code == 400, answer.text
    assert told in answer.json()["error"]["message"]


# --- both -------------------------------------------------------------------------------------------------------------


def test_blocks_are_parts_in_their_order() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    blocks, seen = Blocks(), []
    for delta in (
        Delta(reasoning="a"), Delta(reasoning="b"), Delta("\n"), Delta("\nc"), Delta("\n"), Delta(tool_calls=[call]),
        Delta("\n"), Delta(tool_calls=[call]), Delta("  "),
    ):  # fmt: skip
        seen += [(what, block.index, text) for what, block, text in blocks.add(delta)]
    seen += [(what, block.index, text) for what, block, text in blocks.finish()]
    assert [(block.kind, block.text) for block in blocks.all] == [
        (Kind.REASONING, "ab"), (Kind.TEXT, "\n\nc\n"), (Kind.CALL, "{}"), (Kind.CALL, "{}")
    ]  # fmt: skip
    for index in range(4):
        mine = [what for what, at, _ in seen if at == index]
        assert (mine[0], mine[-1]) == (Event.BEGINS, Event.ENDS)
        assert set(mine[1:-1]) == {Event.GROWS}
    assert [at for _, at, _ in seen] == sorted(at for _, at, _ in seen)
    empty = Blocks()
    assert [what for what, _, _ in (*empty.add(Delta(" ")), *empty.finish())] == [
        Event.BEGINS, Event.GROWS, Event.ENDS
    ]  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_stream_that_fails_says_so(path: str, chatting: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(self: Choice, chunk: Any) -> Delta:
        raise KeyError("a parser of somebody else's")

    monkeypatch.setattr(Choice, "take", take)
    body = {"input": "x"} if "responses" in path else {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    with httpx.stream("POST", f"{chatting.url}{path}", json=body | {"stream": True}) as answer:
        last = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")][-1]
    told = last["response"]["error"] if "responses" in path else last["error"]
    assert last["type"] == ("response.failed" if "responses" in path else "error")
    assert "see its log" in told["message"]
    chatting.wait_until_empty()


def test_which_stop_string_it_was() -> None:
    stops = StopStrings(["b", "abc"])
    assert (stops.feed("xa"), stops.feed("bc"), stops.matched) == ("x", "a", "b")
    assert Job([1], 1, stop_strings=stops).stop_strings.matched == "b"
