"""An agent of a framework that people use, through each API that it speaks: calls, their results, and what is said."""

from __future__ import annotations

import pytest
from reasoning_server import CALL
from serving import Running

pydantic_ai = pytest.importorskip("pydantic_ai", reason="in the extra dev: make test-all")


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_calls_a_tool_and_goes_on(api: str, stream: bool, reasoner: Running, says: object) -> None:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    ours = OpenAIProvider(base_url=f"{reasoner.url}/v1", api_key="none")
    model = {
        "chat": lambda: OpenAIChatModel("reference", provider=ours),
        "responses": lambda: OpenAIResponsesModel("reference", provider=ours),
        "messages": lambda: AnthropicModel(
            "reference", provider=AnthropicProvider(base_url=reasoner.url, api_key="none")
        ),
    }[api]()
    agent, asked = pydantic_ai.Agent(model, instructions="Look first."), []

    @agent.tool_plain  # type: ignore[untyped-decorator]
    def look(at: str) -> str:
        """Looks into a file."""
        asked.append(at)
        return "A cache."

    says(f"<think>I could look.</think>{CALL}", "It is a cache.")  # type: ignore[operator]
    settings = {"max_tokens": 24}
    if stream:
        answer = agent.run_stream_sync("What is in cache.py?", model_settings=settings)
        assert "".join(answer.stream_text(delta=True, debounce_by=None)) == "It is a cache."
    else:
        answer = agent.run_sync("What is in cache.py?", model_settings=settings)
        assert answer.output == "It is a cache."
    assert asked == ["cache.py"]
    kinds = [part.part_kind for message in answer.all_messages() for part in message.parts]
    assert kinds == ["user-prompt", "thinking", "tool-call", "tool-return", "text"]
    usage = answer.usage() if callable(answer.usage) else answer.usage
    assert usage.requests == 2
    assert usage.output_tokens > 0
    reasoner.wait_until_empty()
