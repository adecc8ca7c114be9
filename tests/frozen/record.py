"""What users of mlx-kv rely on, as data: public names, commands, the server's fields, answers and metrics.

`outside.json` holds it as it was; `tests/test_frozen.py` compares. Files and stores of earlier versions are in
`tests/files/written_before`. After an addition, `python tests/frozen/record.py` writes what is there now: what its diff
takes away or changes breaks programs of users.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))

import mlx_kv

# isort: split
import click
from serving import Running, running

from mlx_kv.cli.main import command
from mlx_kv.server.api import Limits

FILE = Path(__file__).parent / "outside.json"
Outside = dict[str, Any]

# --- Python -----------------------------------------------------------------------------------------------------------


def _default(value: object) -> str:
    return "required" if value is inspect.Parameter.empty else re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def signature(function: Callable[..., Any]) -> list[list[str]] | None:
    """Name, kind and default of each parameter."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return [[each.name, each.kind.name, _default(each.default)] for each in found]


def public_names() -> Outside:
    """Of each public name its signature, and of a class those of its public attributes."""
    found: Outside = {}
    for name in mlx_kv.__all__:
        value = getattr(mlx_kv, name)
        found[name] = {"call": signature(value)} if callable(value) else {"value": type(value).__name__}
        if inspect.isclass(value):
            fields = {each: None for base in value.__mro__ for each in vars(base).get("__annotations__", ())}
            attributes = fields | {each: getattr(value, each) for each in dir(value)}
            found[name]["attributes"] = {
                each: signature(attribute) if inspect.isroutine(attribute) else None
                for each, attribute in attributes.items()
                if not each.startswith("_")
            }
    return found


# --- commands ---------------------------------------------------------------------------------------------------------


def _commands(group: click.Group, name: str = "mlx-kv") -> Iterator[tuple[str, click.Command]]:
    for each in group.commands.values():
        path = f"{name} {each.name}"
        if isinstance(each, click.Group):
            yield from _commands(each, path)
        else:
            yield path, each


def _option(each: click.Parameter) -> Outside:
    choices = list(each.type.choices) if isinstance(each.type, click.Choice) else None
    default = each.to_info_dict()["default"]
    shown = default if isinstance(default, (str, int, float, bool, list, type(None))) else _default(default)
    same = {"default": shown, "required": each.required, "multiple": each.multiple, "nargs": each.nargs}
    return {**same, "choices": choices, "flag": bool(getattr(each, "is_flag", False))}


def commands() -> Outside:
    """Of each command its options by every name that they have, and its arguments."""
    return {
        path: {name: _option(each) for each in own.params for name in (*each.opts, *each.secondary_opts)}
        for path, own in _commands(command)
    }


# --- the server -------------------------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "def"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SAMPLING: Outside = {
    **{"temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "xtc_probability": 0.0, "xtc_threshold": 0.1, "top_k": 3},
    **{"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_context_size": 8},
    **{"presence_context_size": 8, "frequency_context_size": 8, "logit_bias": {"5": 1.0}, "seed": 3, "n": 2},
}
COMMON: Outside = {
    **SAMPLING,
    **{"metadata": {"a": "b"}, "prompt_cache_key": "a", "prompt_cache_retention": "24h", "safety_identifier": "a"},
    **{"service_tier": "auto", "store": False, "user": "a", "verbosity": "low", "model": "reference"},
    **{"cache": {"keep": False}, "max_tokens": 2, "stop": ["zzz"], "stream": False, "id_slot": 0},
    **{"response_format": {"type": "text"}, "structured_outputs": {"regex": "[0-9]"}, "json_schema": {"const": 1}},
    **{"guided_json": {"const": 1}, "regex": "[0-9]", "guided_regex": "[0-9]", "grammar": 'root ::= "1"'},
    **{"guided_grammar": 'root ::= "1"', "guided_choice": ["1", "2"], "modalities": ["text"], "suffix": ""},
    **{"function_call": "none", "functions": []},
}
OLLAMA: Outside = {
    **{"model": "reference:latest", "keep_alive": "5m", "format": {"const": 1}, "think": False, "logprobs": True},
    "options": {
        **{"num_predict": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 3, "stop": ["zzz"]},
        **{"repeat_penalty": 1.1, "repeat_last_n": 8, "presence_penalty": 0.1, "frequency_penalty": 0.1},
        **{"num_ctx": 4096, "num_gpu": 1, "num_thread": 4, "num_keep": 4, "mirostat": 0, "tfs_z": 1.0},
    },
}
# Of each endpoint: the least body, and fields with a value that is accepted beside it.
FIELDS: dict[str, tuple[Outside, Outside]] = {
    "/v1/completions": (
        {"prompt": "def", "max_tokens": 2},
        COMMON | {"prompt": [5, 6], "echo": True, "logprobs": 2, "best_of": 1},
    ),
    "/v1/chat/completions": (
        {"messages": CHAT, "max_tokens": 2},
        COMMON
        | {"messages": CHAT, "max_completion_tokens": 2, "chat_template_kwargs": {}, "enable_thinking": False}
        | {"continue_final_message": False, "parallel_tool_calls": True, "reasoning_effort": "low"}
        | {"role_mapping": {"user": "U: "}, "tool_choice": "none", "tools": [], "logprobs": True},
    ),
    "/v1/responses": (
        {"input": "def", "max_output_tokens": 2},
        {name: SAMPLING[name] for name in ("temperature", "top_p", "top_k", "seed", "min_p")}
        | {"include": [], "instructions": "a", "parallel_tool_calls": True, "previous_response_id": None}
        | {"reasoning": {"effort": "low"}, "store": False, "text": {"format": {"type": "text"}}, "tools": []}
        | {"tool_choice": "none", "context_management": [], "max_tool_calls": 1, "prompt_cache_options": {}}
        | {"background": False, "truncation": "disabled", "metadata": {}, "user": "a", "model": "reference"},
    ),
    "/v1/messages": (
        {"messages": CHAT, "max_tokens": 2},
        {name: SAMPLING[name] for name in ("temperature", "top_p", "top_k", "seed", "min_p")}
        | {"system": "a", "stop_sequences": ["zzz"], "thinking": {"type": "disabled"}, "tools": []}
        | {"betas": [], "cache_control": {"type": "ephemeral"}, "container": "a", "context_management": {}}
        | {"inference_geo": "us", "speed": "fast", "metadata": {"user_id": "a"}, "model": "reference"},
    ),
    "/api/chat": (
        {"messages": CHAT, "stream": False, "options": {"num_predict": 2}},
        OLLAMA | {"tools": []},
    ),
    "/api/generate": (
        {"prompt": "def", "stream": False, "options": {"num_predict": 2}},
        OLLAMA | {"system": "a", "raw": True, "context": [1], "images": [], "suffix": "", "template": ""},
    ),
}
STREAMED = {
    "/v1/completions": {"stream": True, "stream_options": {"include_usage": True}},
    "/v1/chat/completions": {"stream": True, "stream_options": {"include_usage": True}},
    "/v1/responses": {"stream": True},
    "/v1/messages": {"stream": True},
    "/api/chat": {"stream": True},
    "/api/generate": {"stream": True},
}
READ = (
    *("/v1/models", "/models", "/v1/models/reference", "/memory", "/health", "/ready"),
    *("/api/tags", "/api/ps", "/api/version"),
)
PAGES = ("/", "/chat")


def shape(value: Any) -> Any:
    """Objects with the shapes of their fields, arrays with that of their first element, and the kind of everything."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value[:1]]
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def fields(server: Running) -> Outside:
    """Of each endpoint and field: the status of a request with it, of a server that refuses unknown fields."""
    found: Outside = {}
    for path, (least, more) in FIELDS.items():
        found[path] = {}
        for name, value in more.items():
            found[path][name] = server.post(path, **{**least, name: value}).status_code
    return found


def answers(server: Running) -> Outside:
    """Of each endpoint the shape of its answer, and of each kind of event of a streamed one."""
    found: Outside = {}
    for path, (least, _) in FIELDS.items():
        found[path] = shape(server.post(path, **least).json())
        events: Outside = {}
        with server.http.stream("POST", path, json=least | STREAMED[path]) as answer:
            for line in answer.iter_lines():
                if line.startswith(("data: {", "{")):
                    event = json.loads(line.removeprefix("data: "))
                    kind = f"done: {event['done']}" if "done" in event else event.get("object", "?")
                    events.setdefault(event.get("type", kind), shape(event))
        found[f"{path}, streamed"] = events
        found[f"{path}, refused"] = shape(server.post(path, **least, unknown_field=1).json())
    for path in READ:
        found[path] = shape(server.http.get(path).json())
    found["/api/show"] = shape(server.post("/api/show", model="reference").json())
    for path in PAGES:
        found[path] = server.http.get(path).headers["content-type"]
    found["/v1/messages/count_tokens"] = shape(server.post("/v1/messages/count_tokens", messages=CHAT).json())
    return found


def metrics(server: Running) -> Outside:
    """Of each metric its kind and the labels of its samples."""
    found: Outside = {}
    for line in server.http.get("/metrics").text.splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            found[name] = kind
        elif not line.startswith("#"):
            name, _, labels = line.split(" ")[0].partition("{")
            found.setdefault(name, sorted(re.findall(r'(\w+)="', labels)))
    return found


def outside() -> Outside:
    """All of it, as it is now."""
    with running(limits=Limits(max_tokens=4, strict=True), prompt_memory_bytes=2**24, max_batch_size=2) as server:
        served = {"fields": fields(server), "answers": answers(server), "metrics": metrics(server)}
    return {"names": public_names(), "commands": commands(), **served}


def write(found: Outside) -> None:
    """Writes it to the file, with a line for each name, so that a diff shows what has changed."""
    parts = []
    for part, names in sorted(found.items()):
        lines = [f"  {json.dumps(name)}: {json.dumps(names[name], sort_keys=True)}" for name in sorted(names)]
        parts.append(f" {json.dumps(part)}: {{\n" + ",\n".join(lines) + "\n }")
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    write(outside())
