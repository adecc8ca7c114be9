"""Reasoning and tool calls as mlx_lm.server tells them, for each of mlx-lm's tool parsers; its own requests, here."""

from __future__ import annotations

import importlib
import io
import json
import pkgutil
import random
from types import SimpleNamespace
from typing import Any

import mlx_lm.tool_parsers
import pytest
from mlx_lm.generate import make_text_state_machine
from mlx_lm.server import APIHandler, CompletionRequest, GenerationContext, Response
from mlx_lm.tokenizer_utils import TokenizerWrapper
from serving import Running
from thinking_models import with_thinking

from mlx_kv.server.output import ChatOutputParser, Choice, Job, OutputChunk

PARSERS = sorted(module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__))
JSON = '{"name": "look", "arguments": {"at": "x.py", "deep": 2}}'
GLM = "look\n<arg_key>at</arg_key>\n<arg_value>x.py</arg_value>\n"
CALLS = {
    "function_gemma": "call:look{at:<escape>x.py<escape>}",
    "gemma4": 'call:look{at:<|"|>x.py<|"|>,deep:2}',
    "glm47": GLM,
    "kimi_k2": '<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"at": "x.py"}<|tool_call_end|>',
    "laguna": GLM,
    "longcat": GLM.replace("arg_", "longcat_arg_"),
    "minicpm5": '"look"><param name="at">x.py</param>',
    "minimax_m2": '\n<invoke name="look">\n<parameter name="at">x.py</parameter>\n</invoke>\n',
    "mistral": 'look[ARGS]{"at": "x.py"}',
    "muse_spark": '<atem:invoke name="look"><atem:parameter name="at">x.py</atem:parameter></atem:invoke>',
    "pythonic": '[look(at="x.py", deep=2)]',
    "qwen3_coder": "\n<function=look>\n<parameter=at>\nx.py\n</parameter>\n</function>\n",
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {"at": {"type": "string"}, "deep": {"type": "integer"}},
                "required": ["at"],
            },
        },
    }
]


class Handler(APIHandler):
    """mlx_lm.server's, which answers into memory with pieces of text that are there already."""

    def __init__(self, tokenizer: Any, pieces: list[str]) -> None:
        for name in ("requested_model", "requested_draft_model", "adapter", "system_fingerprint", "request_id"):
            setattr(self, name, "x")
        self.created, self.stream, self.object_type, self.wfile = 1, False, "chat.completion", io.BytesIO()
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "xtc_probability",
            "xtc_threshold",
            "logit_bias",
            "seed",
        ):
            setattr(self, name, None)
        for kind in ("repetition", "presence", "frequency"):
            setattr(self, f"{kind}_penalty", 0.0)
            setattr(self, f"{kind}_context_size", 20)
        self.max_tokens, self.num_draft_tokens, self.logprobs, self.top_logprobs = 9, 3, False, 0
        self.chat_template_kwargs = None
        said = [Response(piece, 1, 0.0, None, ()) for piece in pieces] + [Response("", 2, 0.0, "stop", ())]
        machine = make_text_state_machine(tokenizer)
        context = GenerationContext(True, True, tokenizer.tool_parser, machine, "normal", [1])
        self.response_generator = SimpleNamespace(generate=lambda *given, **named: (context, iter(said)))

    def _set_completion_headers(self, status_code: int = 200) -> None: ...

    def send_header(self, keyword: str, value: str) -> None: ...

    def end_headers(self) -> None: ...


def theirs(tokenizer: Any, pieces: list[str]) -> tuple[Any, ...]:
    handler = Handler(tokenizer, pieces)
    handler.handle_completion(CompletionRequest("chat", "", [], TOOLS, None), [])
    choice = json.loads(handler.wfile.getvalue())["choices"][0]
    return told(choice["message"], choice["finish_reason"])


def ours(tokenizer: Any, pieces: list[str]) -> tuple[Any, ...]:
    choice = Choice(0, 0, Job([1], 9), ChatOutputParser(tokenizer, [1], TOOLS, stream=False))
    for piece in pieces:
        choice.answer.add(choice.take(OutputChunk(choice.job, piece, 1)))
    choice.answer.add(choice.take(OutputChunk(choice.job, "", 1, "stop")))
    return told(choice.answer.fields, choice.finish_reason)


def told(message: dict[str, Any], finish_reason: str) -> tuple[Any, ...]:
    calls = [(call["type"], call["function"]) for call in message.get("tool_calls") or ()]
    return message.get("content") or "", message.get("reasoning") or "", calls, finish_reason


@pytest.mark.parametrize("name", PARSERS)
def test_reasoning_and_calls_are_told_as_mlx_lm_does(name: str, reference: Any) -> None:
    parser, chance = importlib.import_module(f"mlx_lm.tool_parsers.{name}"), random.Random(name)
    tokenizer = with_thinking(
        TokenizerWrapper(
            reference[1]._tokenizer,
            tool_call_start=parser.tool_call_start,
            tool_call_end=parser.tool_call_end,
            tool_parser=parser.parse_tool_call,
        )
    )
    call = f"{parser.tool_call_start}{CALLS.get(name, JSON)}{parser.tool_call_end}"
    for text in (
        "Plain words, a < b.",
        "<think>Hm, 1 < 2.</think>\n\nWell.",
        f"<think>Hm.</think>{call}",
        f"Well, {call}" + ("" if name == "mistral" else " then."),
        f"<think>Hm.</think>Well.{call}" + ("" if name == "mistral" else f"{call}<think>And?</think>Done."),
    ):
        for _ in range(5):
            cuts = sorted(chance.sample(range(1, len(text)), 6))
            pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            wanted = theirs(tokenizer, pieces)
            if wanted[2] or call not in text:  # of a call that it cannot parse, it tells nothing
                assert ours(tokenizer, pieces) == wanted, pieces
    said = ours(tokenizer, [f"Well, {call}"])
    assert [function["name"] for _, function in said[2]] == (["look"] if name in {*CALLS, "json_tools"} else [])
    assert said[3] == ("tool_calls" if said[2] else "stop")


# --- what its own tests ask of it over HTTP ---------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["default_model", None])
def test_a_seeded_completion_repeats_itself(model: str | None, server: Running) -> None:
    body = {
        "model": model, "prompt": "Once upon a time", "max_tokens": 10, "temperature": 0.5, "top_p": 0.9, "seed": 999,
        "stop": "stop sequence",
    }  # fmt: skip
    answers = [server.post(**body).json() for _ in range(2)]
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
    assert answers[0]["id"] != answers[1]["id"]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": "Hello!"}],
        [
            {"role": "system", "content": [{"type": "text", "text": "You are helpful."}]},
            {"role": "user", "content": [{"type": "text", "text": "Hello!"}]},
        ],
        [
            {"role": "user", "content": "what is 2+3?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"type": "function", "id": "1", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
                ],
            },
            {"role": "tool", "content": "5", "tool_call_id": "1"},
        ],
    ],
    ids=["texts", "parts", "a call without content"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions"])
def test_chats_of_its_tests(messages: list[dict[str, Any]], path: str, server: Running) -> None:
    body = {"messages": messages, "max_tokens": 10, "temperature": 0.7, "top_p": 0.85}
    answer = server.post(path, **body).json()
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] > 0
    with server.http.stream("POST", path, json=body | {"stream": True}) as stream:
        lines = [line for line in stream.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    assert all(len(chunk["choices"]) == 1 and "delta" in chunk["choices"][0] for chunk in chunks)


def test_models_of_its_tests(server: Running) -> None:
    told = server.http.get("/v1/models").json()
    assert told["object"] == "list"
    assert all(model["object"] == "model" and {"id", "created"} <= model.keys() for model in told["data"])
