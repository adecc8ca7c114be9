"""A server whose model has a chat template, reasoning and tools, and says what a test wants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from serving import Running, running
from thinking_models import TEMPLATE, with_thinking

from mlx_kv.server.output import Choice, Delta

if TYPE_CHECKING:
    import anthropic

CALL = '<tool_call>{"name": "look", "arguments": {"at": "cache.py"}}</tool_call>'
NO_ANTHROPIC = "its client is in the extra dev: make test-all"
TOOL: dict[str, Any] = {"type": "object", "properties": {"at": {"type": "string"}}}


def changed_tokenizer(tokenizer: Any) -> TokenizerWrapper:
    """The tokenizer with a chat template, and marks of reasoning and of calls."""
    tokenizer._tokenizer.chat_template = TEMPLATE
    marks = {"tool_call_start": "<tool_call>", "tool_call_end": "</tool_call>"}
    return with_thinking(TokenizerWrapper(tokenizer._tokenizer, tool_parser=json_tools.parse_tool_call, **marks))


@pytest.fixture(scope="session")
def reasoner() -> Iterator[Running]:
    """A model with a chat template, reasoning and tools; what it says is written over where a test wants that."""

    with running(change=changed_tokenizer, prompt_memory_bytes=2**26) as one:
        yield one


@pytest.fixture(scope="session")
def claude(reasoner: Running) -> anthropic.Anthropic:
    anthropic = pytest.importorskip("anthropic", reason=NO_ANTHROPIC)
    return anthropic.Anthropic(base_url=reasoner.url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes other texts over what the model says, answer by answer, a few characters for each chunk."""

    def say(*texts: str) -> None:
        answers = iter([*texts, *[texts[-1]] * 9])

        def take(self: Choice, chunk: Any) -> Delta:
            left = getattr(self, "left", None)
            left = next(answers) if left is None else left
            end = bool(chunk.finish_reason)
            piece, self.left = (left, "") if end else (left[:5], left[5:])  # type: ignore[attr-defined]
            said = type(chunk)(chunk.job, piece, chunk.tokens, "stop" if end else None)
            return real(self, said)

        monkeypatch.setattr(Choice, "take", take)

    real = Choice.take
    return say


ANSWER = f"<think>I could look.</think>\n\nLet me look.\n{CALL}"
