"""Answers are JSON, whatever clients sent and models wrote: half of a character, no numbers, deep nesting."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from reasoning_server import TOOL
from serving import Running, check_error

from mlx_kv.files.tensor_files import MAX_NESTED, read_json
from mlx_kv.generation.settings import SamplingSettings

USER = [{"role": "user", "content": "x"}]
FUNCTION = {"name": "look", "parameters": TOOL}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 6, "tools": [{"type": "function", "function": FUNCTION}]},
    "/v1/responses": {"input": "x", "max_output_tokens": 6, "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {"messages": USER, "max_tokens": 6, "tools": [{"name": "look", "input_schema": TOOL}]},
}
HALF = "half \ud800"
WRITTEN = '<tool_call>{"name": "look", "arguments": {"at": %s}}</tool_call>'


def send(server: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    """Python's JSON says half of a surrogate pair, and httpx's does not."""
    return server.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})


def answered(answer: httpx.Response, stream: bool) -> list[Any]:
    """The JSON of a whole answer, or of each event; read as its standard has it."""
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")] if stream else [answer.text]
    return [read_json(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", BODIES)
def test_half_of_a_surrogate_pair_is_a_question_mark(path: str, stream: bool, reasoner: Running, says: Any) -> None:
    says("Well. " + WRITTEN % json.dumps(HALF))
    body = BODIES[path] | {"metadata": {"note": HALF}, "stream": stream}
    told = answered(send(reasoner, path, body), stream)
    assert "half ?" in json.dumps(told[-1] if path == "/v1/responses" else told)
    assert "see its log" not in json.dumps(told)
    if path == "/v1/responses":
        response = told[-1]["response"] if stream else told[0]
        assert response["metadata"] == {"note": "half ?"}
        assert reasoner.http.get(f"/v1/responses/{response['id']}").json() == response
        again = send(reasoner, path, {"input": "y", "max_output_tokens": 6, "previous_response_id": response["id"]})
        assert again.status_code == 200, again.text
    reasoner.wait_until_empty()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", ["NaN", "-1e999"])
def test_a_call_with_a_number_that_is_none_stays_text(
    value: str, path: str, stream: bool, reasoner: Running, says: Any
) -> None:
    says(WRITTEN % value)
    told = json.dumps(answered(send(reasoner, path, BODIES[path] | {"stream": stream}), stream))
    assert value in told
    assert "see its log" not in told
    assert '"tool_use"' not in told
    reasoner.wait_until_empty()


@pytest.mark.parametrize("levels", [200, 961])
@pytest.mark.parametrize("path", BODIES)
def test_what_is_nested_too_deeply_is_refused(path: str, levels: int, reasoner: Running) -> None:
    schema = '{"items":' * levels + "{}" + "}" * levels  # deeper than Python's JSON writes
    for field in ({"metadata": 0}, {"tools": [{"input_schema": 0}]}, {"output_config": {"format": {"schema": 0}}}):
        body = json.dumps(BODIES[path] | field).replace(": 0", f": {schema}")
        answer = reasoner.http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert (answer.status_code, "nested more than 128 deep" in answer.text) == (400, True)
    told = reasoner.post("/v1/completions", prompt="x", json_schema=schema)
    assert "nested more than 128 deep" in check_error(told, 400)["message"]


def test_how_deep_json_may_be() -> None:
    for begin, end in (("[", "]"), ('{"a":', "}")):
        text = begin * MAX_NESTED + "1" + end * MAX_NESTED
        read_json(text), read_json(text.encode())
        with pytest.raises(ValueError, match="nested more"):
            read_json(begin + text + end)
    read_json('["' + "[" * 999 + '"]')
    assert len(read_json("[" + "[1]," * 999 + "[]]")) == 1000


def test_penalties_that_leave_no_probabilities_are_refused() -> None:
    with pytest.raises(ValueError, match=r"give 0, or 0\.01 up"):
        SamplingSettings(repetition_penalty=1e-40)
    assert SamplingSettings.of_model({"repetition_penalty": 1e-40}).repetition_penalty == 1
