"""What the clients that people use get of a server, with a model of yours: chats, streams, tools, forms, going on.

    python benchmarks/clients.py --model PATH_OR_HUB_ID [--url http://127.0.0.1:8080]

`mlx-kv serve` runs as a process of its own, or is one that runs. The openai client asks chats, completions and
responses, the anthropic client messages, and an agent of pydantic-ai wants an object by each of these: each check is
a few requests, most of them greedy. Checked is what a client relies on: that what is streamed is what comes whole, that
JSON is as its schema says, that a forced call is one, that a turn more reads no more than what is new, that a seed
repeats itself. What a small model says is its own affair. A check that the server refuses is told with its reason. One
line for each; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai

SYSTEM = "You are a helpful assistant who answers briefly. " * 12
ASKED = "What is the capital of France?"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 40}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
PARAMETERS: dict[str, Any] = {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 40}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
MOST = 48  # tokens


class Checks:
    """By what each client asks."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=300)

    def chat(self, messages: list[dict[str, Any]], **more: Any) -> Any:
        asked: Any = {"model": self.model, "messages": messages, "max_tokens": MOST, "temperature": 0} | more
        return self.openai.chat.completions.create(**asked)

    @property
    def turns(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASKED}]

    def chats_stream_what_comes_whole(self) -> str:
        whole = self.chat(self.turns).choices[0].message.content
        streamed = "".join(
            piece.choices[0].delta.content or "" for piece in self.chat(self.turns, stream=True) if piece.choices
        )
        assert streamed == whole, (streamed, whole)
        return repr(whole[:60])

    def chats_go_on(self) -> str:
        turns = self.turns
        cached = 0
        for _ in range(3):
            answer = self.chat(turns)
            usage = answer.usage
            new = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
            cached = usage.prompt_tokens_details.cached_tokens
            turns += [
                {"role": "assistant", "content": answer.choices[0].message.content},
                {"role": "user", "content": "And of Italy?"},
            ]
        assert cached > 100, usage
        assert new < 40, usage
        return f"{cached} tokens found again, {new} read"

    def chats_seed(self) -> str:
        said = [self.chat(self.turns, temperature=1.0, seed=seed).choices[0].message.content for seed in (1, 1, 2)]
        assert said[0] == said[1] != said[2], said
        return "repeated"

    def chats_logprobs(self) -> str:
        answer = self.chat(self.turns, logprobs=True, top_logprobs=3, max_tokens=6)
        tokens = answer.choices[0].logprobs.content
        assert len(tokens) == answer.usage.completion_tokens
        assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in tokens)
        return f"{tokens[0].token!r} {tokens[0].logprob:.3f}"

    def chats_schema(self) -> str:
        form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
        said = json.loads(self.chat(self.turns, response_format=form, max_tokens=200).choices[0].message.content)
        assert set(said) == {"city", "people"}, said
        assert isinstance(said["people"], int)
        return json.dumps(said)[:60]

    def chats_call(self) -> str:
        tools = [{"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS}}]
        answer = self.chat(self.turns, tools=tools, tool_choice="required", max_tokens=200).choices[0]
        (call,) = answer.message.tool_calls
        assert set(json.loads(call.function.arguments)) == {"city"}
        result = {"role": "tool", "tool_call_id": call.id, "content": "Paris has 2 million people."}
        after = self.chat([*self.turns, answer.message.to_dict(), result], tools=tools)
        assert after.choices[0].finish_reason in ("stop", "length", "tool_calls")
        return f"{call.function.name}({call.function.arguments})"

    def several_answers(self) -> str:
        answer = self.chat(self.turns, n=3, temperature=1.0, seed=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return f"{len({choice.message.content for choice in answer.choices})} of 3 differ"

    def completions_of_several_prompts(self) -> str:
        asked: Any = {"model": self.model, "max_tokens": 12, "temperature": 0}
        prompts = ["The capital of France is", "One, two, three,"]
        alone = [self.openai.completions.create(prompt=prompt, **asked).choices[0].text for prompt in prompts]
        both = self.openai.completions.create(prompt=prompts, **asked)
        assert [choice.text for choice in both.choices] == alone
        return repr(alone[1])

    def responses_stream_and_go_on(self) -> str:
        asked: Any = {"model": self.model, "instructions": SYSTEM, "max_output_tokens": MOST, "temperature": 0}
        whole = self.openai.responses.create(input=ASKED, **asked)
        with self.openai.responses.stream(input=ASKED, **asked) as events:
            said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert said == whole.output_text
        after = self.openai.responses.create(input="And of Italy?", previous_response_id=whole.id, **asked)
        assert after.usage is not None
        assert after.usage.input_tokens_details.cached_tokens > 100
        return f"{after.usage.input_tokens_details.cached_tokens} tokens found again"

    def responses_schema(self) -> str:
        form: Any = {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}}
        answer = self.openai.responses.create(model=self.model, input=ASKED, text=form, max_output_tokens=200)
        assert set(json.loads(answer.output_text)) == {"city", "people"}
        return answer.output_text[:60]

    def messages_stream_what_comes_whole(self) -> str:
        asked: Any = {
            "model": self.model, "max_tokens": MOST, "system": SYSTEM, "extra_body": {"temperature": 0},
            "messages": [{"role": "user", "content": ASKED}],
        }  # fmt: skip
        whole = self.anthropic.messages.create(**asked)
        with self.anthropic.messages.stream(**asked) as stream:
            said = "".join(stream.text_stream)
        assert said == "".join(block.text for block in whole.content if block.type == "text")
        counted = self.anthropic.messages.count_tokens(
            model=self.model, system=SYSTEM, messages=[{"role": "user", "content": ASKED}]
        )
        read = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
        assert counted.input_tokens == read
        return f"{read} tokens, {whole.stop_reason}"

    def messages_call(self) -> str:
        tool: Any = {"name": "look_up", "input_schema": PARAMETERS}
        answer = self.anthropic.messages.create(
            model=self.model, max_tokens=200, messages=[{"role": "user", "content": ASKED}], tools=[tool],
            tool_choice={"type": "tool", "name": "look_up"},
        )  # fmt: skip
        call = answer.content[-1]
        assert call.type == "tool_use", answer
        assert answer.stop_reason == "tool_use"
        return f"{call.name}({json.dumps(call.input)})"

    def agent(self, api: str) -> str:
        from pydantic import BaseModel
        from pydantic_ai import Agent, NativeOutput
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.anthropic import AnthropicProvider
        from pydantic_ai.providers.openai import OpenAIProvider

        class City(BaseModel):
            city: str
            people: int

        provider = OpenAIProvider(openai_client=openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none"))
        model: Any = {
            "chat": lambda: OpenAIChatModel(self.model, provider=provider),
            "responses": lambda: OpenAIResponsesModel(self.model, provider=provider),
            "messages": lambda: AnthropicModel(
                self.model, provider=AnthropicProvider(base_url=self.url, api_key="none")
            ),
        }[api]()
        form: Any = City if api == "messages" else NativeOutput(City)
        answer = Agent(model, output_type=form, retries=2).run_sync(ASKED, model_settings={"max_tokens": 200})
        assert isinstance(answer.output, City)
        return repr(answer.output)

    def of_all(self) -> dict[str, Callable[[], str]]:
        named = {
            name.replace("_", " "): getattr(self, name)
            for name in vars(Checks)
            if name.partition("_")[0] in ("chats", "several", "completions", "responses", "messages")
        }
        agents = ("chat", "responses", "messages")
        return named | {f"an agent by {api}": lambda api=api: self.agent(api) for api in agents}


@contextlib.contextmanager
def served(model: str) -> Iterator[str]:
    """The address of a server of its own."""
    command = [sys.executable, "-m", "mlx_kv.cli", "serve", "--port", "0", "--model", model]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = ""
        while " at http://" not in line:
            line = process.stderr.readline()
            if not line:
                raise SystemExit("the server did not start")
        yield line.split(" at ")[1].split("/v1")[0]
    finally:
        process.terminate()
        process.communicate(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference")
    parser.add_argument("--url", help="of a server that runs")
    parser.add_argument("--only", default="", help="checks with this in their name")
    given = parser.parse_args()
    results: dict[str, str] = {}
    with contextlib.nullcontext(given.url) if given.url else served(given.model) as url:
        for name, check in Checks(url, "default_model").of_all().items():
            if given.only not in name:
                continue
            since = time.perf_counter()
            try:
                told, results[name] = check(), "good"
            except Exception as error:
                told, results[name] = f"{type(error).__name__}: {error}"[:300], "bad"
            print(f"{results[name]:4}  {name:36} {time.perf_counter() - since:5.1f} s  {told}", flush=True)
    good = sum(result == "good" for result in results.values())
    print(json.dumps({"model": given.model, "good": good, "of": len(results), "results": results}))
    if good < len(results):
        sys.exit(1)


if __name__ == "__main__":
    main()
