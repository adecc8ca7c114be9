"""`mlx-kv cache diff`: where two prompts differ, in tokens, and so how much of one is reused for the other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from mlx_kv.cli.help import command, option
from mlx_kv.cli.model import ModelOptions
from mlx_kv.cli.options import EXISTING_FILE, options

EXAMPLES = """
\b
Examples:
  mlx-kv cache diff monday.txt tuesday.txt
  mlx-kv cache diff turn-1.json turn-2.json --model mlx-community/Qwen3-0.6B-4bit
"""


@command("cache diff", epilog=EXAMPLES, short_help="Show where two prompts first differ, in tokens.")
@click.argument("first", type=EXISTING_FILE, metavar="A")
@click.argument("second", type=EXISTING_FILE, metavar="B")
@options(ModelOptions, "model", "name", "trust_remote_code", "chat_template")
@option("--ignore-chat-template", is_flag=True, section="Prompt", help="Read texts as they are, not as chat messages.")
def cache_diff(first: Path, second: Path, model: ModelOptions, ignore_chat_template: bool) -> None:
    """Print the first difference of two prompts, in tokens, with the text on both sides.

    A and B are files: texts, or JSON bodies of requests to the server (chat completions, completions, responses,
    messages).
    """
    from mlx_kv.prefixes.index import MIN_SHARED, packed
    from mlx_kv.prefixes.prefix_match import Difference

    _, tokenizer = replace(model, lazy_load=True).load()  # weights are not read
    prompts = [_tokens(path, tokenizer, ignore_chat_template) for path in (first, second)]
    found = Difference.of(*map(packed, prompts))
    lines = [f"{name}       {len(tokens)} tokens" for name, tokens in zip("AB", prompts, strict=True)]
    reused = found.position if found.position >= MIN_SHARED else 0
    short = f"; below {MIN_SHARED} tokens nothing is reused" if found.position and not reused else ""
    lines.append(f"common  {found.position} tokens{short}")
    if found.first or found.second:
        before, one, other = found.texts(tokenizer.decode)
        lines += [
            f"They differ at token {found.position}:",
            f"before  {before!r}",
            f"A       {one!r}",
            f"B       {other!r}",
        ]
    else:
        lines.append("They are equal.")
    click.echo("\n".join(lines))


def _tokens(path: Path, tokenizer: Any, plain: bool) -> list[int]:
    """The token ids of a file with a text or a request.

    Raises:
        click.UsageError: it cannot be read, or the server would refuse the request.
    """
    from mlx_kv.generation.encoding import encode_text

    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeError as error:
        raise click.UsageError(f"cannot read {path}: it is not a text in UTF-8") from error
    except OSError as error:
        raise click.UsageError(f"cannot read {path}: {error.strerror}") from error
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    if isinstance(body, dict) and {"messages", "prompt", "input"} & body.keys():
        return _tokens_of_request(path, body, tokenizer)
    return encode_text(tokenizer, text, plain)


def _tokens_of_request(path: Path, body: dict[str, Any], tokenizer: Any) -> list[int]:
    from mlx_kv.generation.encoding import encode_prompt
    from mlx_kv.server.dialects.completions import chats, completions
    from mlx_kv.server.dialects.messages import messages
    from mlx_kv.server.dialects.response_writer import Conversations
    from mlx_kv.server.dialects.responses import ResponsesDialect
    from mlx_kv.server.errors import ApiError
    from mlx_kv.server.handler import ParsedRequest, encode_chat
    from mlx_kv.server.requests import RequestRules

    if "messages" in body:
        dialect = messages if "system" in body else chats
    else:
        dialect = completions if "prompt" in body else ResponsesDialect(Conversations())
    rules = RequestRules()
    try:
        parsed = dialect(body, rules)
        if not isinstance(parsed, ParsedRequest):
            raise click.UsageError(f"{path}: this request generates nothing")
        if parsed.request.chat:
            return encode_chat(tokenizer, parsed.request, rules.unknown, {})
    except ApiError as error:
        raise click.UsageError(f"{path}: {error.message}") from error
    prompts = parsed.request.prompts
    if len(prompts) != 1:
        raise click.UsageError(f"{path} has {len(prompts)} prompts: give a request with one")
    return encode_prompt(tokenizer, prompts[0]) if isinstance(prompts[0], str) else list(prompts[0])
