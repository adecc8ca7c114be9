"""Requests of real clients, captured once and sent again.

`client_logs` has one log for each client, recorded by a proxy between the client and this server:

- `ollama-js`: Ollama's JavaScript client 0.6.4, one call of each kind.
- `llm-ollama`: the command `llm` 0.36 with llm-ollama 0.19.1, which uses Ollama's Python client 0.6.3: a conversation,
  a schema, and a tool that was run.
- `oterm`: the terminal client oterm 0.26.1, driven by keys: it lists and checks models through Ollama's API, and chats
  through OpenAI's (pydantic-ai 2.59.0).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from serving import Running

LOGS = {path.stem: json.loads(path.read_text()) for path in sorted(Path(__file__).parent.glob("client_logs/*.json"))}
REQUESTS = [(name, number) for name, log in LOGS.items() for number in range(len(log["requests"]))]


def lines_of(text: str) -> list[Any]:
    """The JSON of an answer: of its only line, of each line, or of each event of a stream."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line and not line.startswith("event: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def check_end(path: str, lines: list[Any]) -> None:
    """An answer is complete: text or a call, and why it ended."""
    if path in ("/api/chat", "/api/generate"):
        assert lines[-1]["done"] is True
        assert lines[-1]["done_reason"] in ("stop", "length", "load")
        assert all(line["done"] is False for line in lines[:-1])
    if path == "/api/chat":
        fields = [line["message"] for line in lines]
        assert any(field.get(name) for field in fields for name in ("content", "thinking", "tool_calls"))
    if path.endswith("/chat/completions"):
        reasons = [choice.get("finish_reason") for line in lines for choice in line["choices"]]
        assert [reason for reason in reasons if reason] in (["stop"], ["length"])


@pytest.mark.parametrize(("name", "number"), REQUESTS)
def test_requests_of_clients_are_answered_as_before(reasoner: Running, name: str, number: int) -> None:
    """With the same status; an error names the problem, an answer is complete."""
    sent = LOGS[name]["requests"][number]
    answer = reasoner.http.request(sent["method"], sent["path"], json=sent["body"], headers=sent["headers"])
    assert answer.status_code == sent["status"], answer.text
    lines = lines_of(answer.text)
    assert lines
    if sent["status"] == 200:
        assert not any("error" in line for line in lines)
        check_end(sent["path"], lines)
    else:
        assert len(lines[0]["error"]) > 10


def test_logs_are_complete() -> None:
    """Every log has a conversation, and no header but those that clients of all machines send."""
    for log in LOGS.values():
        assert any("chat" in request["path"] for request in log["requests"])
        headers = {name for request in log["requests"] for name in request["headers"]}
        assert headers <= {"accept", "authorization", "content-type", "user-agent"}
