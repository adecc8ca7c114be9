"""OpenAI's responses, through its own client; and streams of other APIs that fail."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from reasoning_server import ANSWER, TOOL
from serving import SOURCE, Running

from mlx_kv.generation.sequence import TokenScore
from mlx_kv.server.dialects.responses import Conversations, ResponsesDialect
from mlx_kv.server.json_http import ApiError
from mlx_kv.server.output import ChatOutputParser, Choice, Delta, Job, OutputChunk, TokenTexts
from mlx_kv.server.requests import RequestRules, UnknownFields


def test_a_response_is_what_a_chat_says(reasoner: Running) -> None:
    client = reasoner.client
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
    reasoner.wait_until_empty()


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_thoughts_texts_and_calls(stream: bool, reasoner: Running, says: Any) -> None:
    says(ANSWER)
    asked: Any = [{"role": "user", "content": [{"type": "input_text", "text": "What is in cache.py?"}]}]
    told: dict[str, Any] = {
        "model": "reference",
        "max_output_tokens": 6,
        "tools": [{"type": "function", "name": "look", "parameters": TOOL, "strict": False}],
    }
    if stream:
        with reasoner.client.responses.stream(**told, input=asked) as events:
            answer: Any = events.get_final_response()
    else:
        answer = reasoner.client.responses.create(**told, input=asked)
    thought, text, call = answer.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "I could look.")
    assert (text.type, text.content[0].text.strip(), text.role) == ("message", "Let me look.", "assistant")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "look", {"at": "cache.py"})
    assert answer.status == "completed"
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "A cache."}
    by_id = reasoner.client.responses.create(**told, input=[result], previous_response_id=answer.id)
    again = reasoner.client.responses.create(
        **told, input=[*asked, *(item.to_dict() for item in answer.output), result]
    )
    assert by_id.usage is not None
    assert again.usage is not None
    assert by_id.usage.input_tokens == again.usage.input_tokens
    reasoner.wait_until_empty()


def test_log_probabilities_of_a_response(reasoner: Running) -> None:
    told: dict[str, Any] = {
        "model": "reference", "input": "import os", "max_output_tokens": 8, "top_logprobs": 2, "temperature": 0,
        "include": ["message.output_text.logprobs"],
    }  # fmt: skip
    whole: Any = reasoner.client.responses.create(**told)
    tokens = whole.output[0].content[0].logprobs
    assert len(tokens) == 8
    assert "".join(token.token for token in tokens) == whole.output_text
    assert all(token.logprob == token.top_logprobs[0].logprob and len(token.top_logprobs) == 2 for token in tokens)
    streamed: list[Any] = list(reasoner.client.responses.create(**told, stream=True))
    parts = [token for event in streamed if event.type == "response.output_text.delta" for token in event.logprobs]
    assert [token.token for token in parts] == [token.token for token in tokens]
    assert streamed[-1].response.output[0].content[0].logprobs == tokens
    plain: Any = reasoner.client.responses.create(model="reference", input="import os", max_output_tokens=2)
    assert plain.output[0].content[0].logprobs == []


THOUGHT = "<think>I could look.</think>Let me see."


@pytest.mark.parametrize("tokens", [1, 3, 100])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_log_probabilities_of_a_response_are_those_of_its_text(tokens: int, stream: bool, reasoner: Running) -> None:
    tokenizer = reasoner.worker.default.models.tokenizer
    ids = tokenizer.encode(THOUGHT, add_special_tokens=False)
    body = {"input": "x", "top_logprobs": 1, "stream": stream}  # which asks for them, without include, too
    asked = ResponsesDialect(Conversations())(body, RequestRules())
    assert asked.request.top_logprobs == 1
    job, writer = Job([1], 99), asked.writer("reference")
    choice = Choice(0, 0, job, ChatOutputParser(tokenizer, [1], [], stream), texts=TokenTexts(tokenizer))
    writer.begin([choice])
    for start in range(0, len(ids), tokens):
        part = ids[start : start + tokens]
        scores = tuple((token, TokenScore(-1.0, ((token, -1.0),))) for token in part)
        text = "".join(tokenizer.decode([token]) for token in part)
        end = "length" if start + tokens >= len(ids) else None
        delta = choice.take(OutputChunk(job, text, len(part), end, scores=scores))
        if stream:
            writer.part(choice, delta)
        else:
            choice.answer.add(delta)
    ended = json.loads(writer.end([choice]).split(b"data: ")[1]) if stream else {"response": writer.whole([choice])}
    thought, text = ended["response"]["output"]
    assert (thought["status"], text["status"]) == ("completed", "incomplete")
    (content,) = text["content"]
    shown = "".join(token["token"] for token in content["logprobs"])
    assert shown.endswith("Let me see.")
    assert "look" not in shown


def test_a_conversation_that_is_too_long_is_not_cut(caplog: pytest.LogCaptureFixture) -> None:
    dialect, strict = ResponsesDialect(Conversations()), RequestRules(unknown=UnknownFields(True))
    asked = dialect({"input": "x", "truncation": "auto"}, RequestRules())
    assert "truncation" in caplog.text
    assert b'"truncation": "disabled"' in asked.writer("m").begin([])
    with pytest.raises(ApiError, match="refused, not cut"):
        dialect({"input": "x", "truncation": "auto"}, strict)
    dialect({"input": "x", "truncation": "disabled"}, strict)


def test_responses_that_are_kept(reasoner: Running) -> None:
    client, told = reasoner.client, {"model": "reference", "max_output_tokens": 3}
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
    kept = Conversations(max_bytes=250)
    for number in range(3):
        kept.keep({"id": str(number), "output": "x" * 60}, [], {})
    with pytest.raises(ApiError, match="no longer"):
        kept.find("0")
    kept.find("1")
    kept.keep({"id": "3", "output": "x" * 60}, [], {})
    assert kept.find("1").response["id"] == "1"  # it was asked for last
    kept.keep({"id": "4", "output": "x" * 400}, [], {})
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
    assert ResponsesDialect(Conversations())({"input": items}, RequestRules()).request.messages == [
        {"role": "system", "content": "A"},
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
    assert (request.sampling.seed, request.stop_strings, request.max_tokens) == (7, ("end",), None)
    assert (request.one_call, request.hints) == (True, {"reasoning_effort": "low"})
    assert request.tools == [{"type": "function", "function": {"name": "look", "strict": True}}]


BAD_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input is missing"),
    ({"input": []}, "input is empty"),
    ({"input": [7]}, "input[0] is a JSON number"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference'"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role is"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0] has no text"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id is missing"),
    ({"max_output_tokens": 0}, "max_output_tokens is 0: send at least 1"),
    ({"background": True}, "background is not supported"),
    ({"conversation": "c"}, "conversation is not supported"),
    ({"tools": [{"type": 7, "name": "f"}]}, "tools[0].type is 7: send"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format"),
    ({"reasoning": {"effort": "hard"}}, "reasoning.effort is 'hard': send one of none, minimal"),
]


@pytest.mark.parametrize(("change", "told"), BAD_RESPONSES, ids=[told for _, told in BAD_RESPONSES])
def test_responses_that_are_refused(change: dict[str, Any], told: str, reasoner: Running) -> None:
    answer = reasoner.post("/v1/responses", **({"input": "x", "max_output_tokens": 1} | change))
    assert answer.status_code == 400, answer.text
    assert told in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_stream_that_fails_says_so(path: str, reasoner: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(self: Choice, chunk: Any) -> Delta:
        raise KeyError("a parser of somebody else's")

    monkeypatch.setattr(Choice, "take", take)
    body = {"input": "x"} if "responses" in path else {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    with httpx.stream("POST", f"{reasoner.url}{path}", json=body | {"stream": True}) as answer:
        last = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")][-1]
    told = last["response"]["error"] if "responses" in path else last["error"]
    assert last["type"] == ("response.failed" if "responses" in path else "error")
    assert "see its log" in told["message"]
    reasoner.wait_until_empty()
