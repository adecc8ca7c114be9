"""Anthropic's messages, through its own client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from reasoning_server import ANSWER, NO_ANTHROPIC, TOOL
from serving import SOURCE, Running

from mlx_kv.generation.generate import StopStrings
from mlx_kv.server.api import ApiKeys
from mlx_kv.server.chat import Call, Reasoning, Text
from mlx_kv.server.dialects.messages import messages
from mlx_kv.server.output import Blocks, Delta, Event, Job
from mlx_kv.server.requests import RequestRules, UnknownFields

if TYPE_CHECKING:
    import anthropic


def test_a_message_is_what_a_chat_says(reasoner: Running, claude: anthropic.Anthropic) -> None:
    asked: Any = [{"role": "user", "content": "import os"}]
    chat = reasoner.client.chat.completions.create(
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
    reasoner.wait_until_empty()


def test_a_message_ends_at_a_stop_sequence(reasoner: Running, claude: anthropic.Anthropic) -> None:
    told: dict[str, Any] = {
        "model": "default_model", "max_tokens": 24, "messages": [{"role": "user", "content": "import os"}]
    }  # fmt: skip
    text = claude.messages.create(**told).content[0].text  # type: ignore[union-attr]
    stop = text[6:9]
    cut = claude.messages.create(**told, stop_sequences=["never", stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text[: text.index(stop)]  # type: ignore[union-attr]


def test_a_message_may_be_begun(reasoner: Running, claude: anthropic.Anthropic) -> None:
    """A last message of the assistant is gone on from."""
    told: dict[str, Any] = {"model": "reference", "max_tokens": 6}
    begun = [{"role": "user", "content": "import os"}, {"role": "assistant", "content": "import sys"}]
    answer = claude.messages.create(**told, messages=begun)
    assert answer.content[0].text == reasoner.complete(  # type: ignore[union-attr]
        "user: import os\nassistant: import sys", 6
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_has_thoughts_texts_and_calls(
    stream: bool, reasoner: Running, claude: anthropic.Anthropic, says: Any
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
    reasoner.wait_until_empty()


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
        {"role": "system", "content": "A\nB"},
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
    body["messages"][2]["content"].pop()  # type: ignore[index]
    assert messages(body, RequestRules()).request.messages[3:] == [request.messages[3]]  # there is nothing else to say
    assert request.tools[0]["function"] == {"name": "look", "description": "", "parameters": TOOL}
    assert (request.one_call, request.hints, request.continues) == (True, {"enable_thinking": False}, False)


def test_fields_of_messages_are_honoured() -> None:
    strict = RequestRules(unknown=UnknownFields(True))
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    body["cache_control"] = {"type": "ephemeral"}  # changes nothing
    assert messages(body | {"stop": "a"}, strict).request.stop_strings == ("a",)
    tool = {"name": "f", "input_schema": TOOL, "strict": True}
    request = messages(body | {"tools": [tool], "tool_choice": {"type": "any"}}, strict).request
    assert request.tools[0]["function"]["strict"] is True
    for given in (True, False):
        form = {"type": "json_schema", "schema": TOOL, "strict": given}
        constraint = messages(body | {"output_config": {"format": form}}, strict).request.constraint
        assert constraint is not None
        assert constraint.lenient is not given


BAD_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"max_tokens": 0}, "max_tokens is 0: send the maximum number of tokens of the answer, at least 1"),
    ({"messages": []}, "messages is empty"),
    ({"messages": [7]}, "messages[0] is 7: send an object"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role is 'wizard': send"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content is missing or empty"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is missing"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}]}, "'tool_use'"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}]},
        "input is missing",
    ),
    ({"system": 7}, "system is 7: send a text, or blocks"),
    ({"temperature": 1.5}, "temperature is 1.5: send at most 1"),
    ({"tools": [{"name": "web_search"}]}, "tools[0].input_schema is missing"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type is 'some': send one of auto, any, tool, none"),
    ({"thinking": {"type": "hard"}}, "thinking.type is 'hard': send one of"),
    ({"stop_sequences": [""]}, "stop"),
    ({"stop_sequences": ["a"], "stop": "b"}, "send one"),
    ({"output_config": {"format": {"type": "xml"}}}, "json_schema"),
]


@pytest.mark.parametrize(("change", "told"), BAD_MESSAGES, ids=[told for _, told in BAD_MESSAGES])
def test_messages_that_are_refused(change: dict[str, Any], told: str, reasoner: Running) -> None:
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]} | change
    answer = reasoner.post("/v1/messages", **body)
    error = answer.json()
    assert (answer.status_code, error["type"]) == (404 if "model" in change else 400, "error")
    assert error["error"]["type"] == ("not_found_error" if "model" in change else "invalid_request_error")
    assert told in error["error"]["message"]


def test_anthropics_clients_send_keys_their_way(reasoner: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    anthropic = pytest.importorskip("anthropic", reason=NO_ANTHROPIC)
    monkeypatch.setattr(reasoner.api, "_keys", ApiKeys(["secret"]))
    told: dict[str, Any] = {
        "model": "reference", "max_tokens": 1, "messages": [{"role": "user", "content": "import"}]
    }  # fmt: skip
    client = anthropic.Anthropic(base_url=reasoner.url, api_key="secret", max_retries=0)
    assert client.messages.create(**told).content
    assert [model.id for model in client.models.list()] == ["reference", "default_model"]
    for key, status in (("secret", 200), ("wrong", 401)):
        assert reasoner.http.post("/v1/messages", json=told, headers={"x-api-key": key}).status_code == status
        both = {"x-api-key": "wrong", "Authorization": f"Bearer {key}"}
        assert reasoner.http.post("/v1/messages", json=told, headers=both).status_code == status
    with pytest.raises(anthropic.AuthenticationError, match="no valid API key"):
        anthropic.Anthropic(base_url=reasoner.url, api_key="wrong", max_retries=0).messages.create(**told)


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
        (Reasoning, "ab"), (Text, "\n\nc\n"), (Call, "{}"), (Call, "{}")
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


def test_which_stop_string_it_was() -> None:
    stops = StopStrings(["b", "abc"])
    assert (stops.feed("xa"), stops.feed("bc"), stops.matched) == ("x", "a", "b")
    assert Job([1], 1, stop_strings=stops).stop_strings.matched == "b"
