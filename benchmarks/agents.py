"""Real coding agents in conversations with a server: each request's status, and what it reuses.

    npm install --prefix agents @anthropic-ai/claude-code@2.1.332 @openai/codex@0.171.0 \\
        opencode-ai@1.18.33 @qwen-code/qwen-code@0.24.4
    python benchmarks/agents.py --programs agents [--clients claude,codex] [--model build/smollm2] [--turns 4]

Claude Code, Codex, opencode and Qwen Code, each with an empty home and the limits that it has by itself, and an agent
of pydantic-ai, are asked in each turn to read a file, call their own tool for it, and answer. With --edit they are at
last asked to change one, and `edited` says whether it did (not pydantic-ai's, which has no tool for it). What the model
says is written by a script: a grammar with one text holds each answer to it, so all else is the server's: templates,
caches, tokens, streams. Without --model, the model has two thin layers with random weights, 131,072 positions, and the
tokenizer of the bundled one. With it, a real one has a chat template that shows tools and calls. --requests keeps what
the clients send; benchmarks/replay.py sends it to other servers.

For each request: path, tokens of the prompt, how many were reused, how many an ideal cache would have had (the longest
beginning that it has in common with the texts of earlier requests), and seconds to the first token. At
last another conversation begins in the same folder: `read_anew` is how many tokens are read for it. `changed_by_client`
is how many tokens at the end of the text so far, its answer included, the client sent otherwise the next time, and
`failures` counts answers of 400 and more. A client that is not there is skipped with a word. One JSON line last.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from server import process

NAME = "agents-model"
# The name that a client sends, which need not be the model's.
CLAUDE_NAME = "claude-sonnet-4-5"
READERS = {  # tools that read a file, and their argument for its name
    "Read": "file_path",
    "read": "filePath",
    "read_file": "file_path",
    "exec_command": "cmd",
    "shell": "command",
}
# Tools that replace a text in a file; their arguments for its name, for what is there and for what comes there.
EDITORS, EDITED = ("Edit", "edit", "replace"), ("file_path", "old_string", "new_string")
OPENCODE_EDITED = ("filePath", "oldString", "newString")
ASKED = re.compile(r"Read the file (\S+) please(?:, and replace the word (\w+) by (\w+))?")
EDIT = "Read the file {file} please, and replace the word {old} by {new} in it."
TEMPLATE = r"""{%- for message in messages %}
{{- "<|im_start|>" + ("user" if message.role == "tool" else message.role) + "\n" }}
{%- if message.role == "tool" %}{{ "<tool_response>" + message.content + "</tool_response>" }}
{%- else %}{{ message.content }}{% endif %}
{%- for tool_call in message.tool_calls or [] %}{% set tool_call = tool_call.function %}
{{- '<tool_call>{"name": "' + tool_call.name + '", "arguments": ' + (tool_call.arguments | tojson) + "}</tool_call>" }}
{%- endfor %}{{ "<|im_end|>\n" }}
{%- if loop.first and tools %}{{ "<tools>" + (tools | tojson) + "</tools>\n" }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}"""
THIN: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}
# Full attention; every second layer has a sliding window; every second layer is recurrent.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"sliding_window": 512, "sliding_window_pattern": 2},
    "qwen3_next": {
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 1,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "full_attention_interval": 2,
        "partial_rotary_factor": 0.5,
    },
}
CONTEXT = 32_768  # positions that a model has at least: what it says is the script's


# --- the server -------------------------------------------------------------------------------------------------------


def answer(messages: Sequence[dict[str, Any]], tools: Sequence[Any]) -> str:
    """What the script says: a call of a tool that reads the file or changes it, or after its result an answer."""
    functions = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    reader = next((name for name in READERS if name in functions), None)
    asked = [(index, found) for index, message in enumerate(messages) for found in ASKED.findall(message["content"])]
    done = sum(message["role"] == "tool" for message in messages[asked[-1][0] :]) if asked else 0  # calls since then
    name, old, new = asked[-1][1] if asked else ("", "", "")
    if reader is None or not asked or done > bool(old):
        return f"The file has been read ({len(asked)})."
    known = functions[reader].get("properties", {})
    argument = READERS[reader] if READERS[reader] in known else next(iter(known), READERS[reader])
    value: Any = name
    if argument in ("cmd", "command"):
        value = f"sed -i s/{old}/{new}/ {name}" if done else f"cat {name}"
        value = value.split() if known.get(argument, {}).get("type") == "array" else value
    elif done:
        editor = next((each for each in EDITORS if each in functions), "Edit")
        names = OPENCODE_EDITED if "filePath" in functions.get(editor, {}).get("properties", {}) else EDITED
        return call(editor, dict(zip(names, (name, old, new), strict=True)))
    return call(reader, {argument: value})


def call(tool: str, arguments: dict[str, Any]) -> str:
    """As the template shows calls."""
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def serve(folder: str, log: Path | None, words: list[str]) -> None:
    """A server whose answers are the script's; writes a line for each answer into a log, and its own log beside it.

    Args:
        log: None for neither.
        words: more options.
    """
    from mlx_kv.cli.main import command
    from mlx_kv.generation import grammar
    from mlx_kv.generation.sequence import common_prefix
    from mlx_kv.server import handler
    from mlx_kv.server.handler import CompletionResponse, ModelReader

    before: list[list[int]] = []
    encode, respond, read = ModelReader._encode_chat, CompletionResponse.__call__, handler.read_body

    def scripted(self: Any, request: Any) -> list[int]:
        tokens = encode(self, request)
        request.constraint = grammar.choice([answer(request.messages, request.tools)])
        request.constraint_field, request.tools = "script", []  # they are in the prompt; a call is the script's alone
        return tokens

    async def keep(request: Any, *limits: Any) -> Any:
        body = await read(request, *limits)
        request.state.body = copy.deepcopy(body)
        return body

    async def record(self: Any, scope: Any, receive: Any, send: Any) -> None:
        job = self._choices[0].job
        ideal = max((common_prefix(job.tokens, each) for each in before), default=0)
        try:
            await respond(self, scope, receive, send)
        finally:
            before.append(job.all_tokens)
            first = self._choices[0].first_token
            line = {
                "path": scope["path"],
                "prompt": len(job.tokens),
                "reused": job.cached,
                "ideal": min(ideal, len(job.tokens) - 1),
                "first_token": None if first is None else round(first - job.since, 3),
                "max_tokens": job.max_tokens,
                "text": len(job.all_tokens),
                "body": scope["state"]["body"],
            }
            with log.open("a") as file:
                file.write(json.dumps(line) + "\n")

    ModelReader._encode_chat = scripted  # type: ignore[method-assign]
    if log is not None:
        CompletionResponse.__call__ = record  # type: ignore[method-assign]
        handler.read_body = keep
        os.dup2(os.open(log.with_suffix(".log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    command(["serve", "--model", folder, "--log-level", "INFO", *words])


def make_model(folder: Path, model: str | None, family: str = "llama") -> None:
    """A model in an empty folder: two thin layers of a family, or a real one's files with another chat template."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from mlx_kv.bundled import model_path

    source = Path(model or model_path("reference"))
    for file in source.iterdir():
        if file.suffix in (".json", ".safetensors", ".txt"):
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((source / "config.json").read_text())
    if model is None:
        for file in folder.glob("model*"):
            file.unlink()
        config = {"model_type": family, "vocab_size": config["vocab_size"], **THIN, **FAMILIES[family]}
        module = importlib.import_module(f"mlx_lm.models.{family}")
        mx.random.seed(0)
        weights = dict(tree_flatten(module.Model(module.ModelArgs.from_dict(config)).parameters()))
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
    config["max_position_embeddings"] = max(config["max_position_embeddings"], CONTEXT)
    (folder / "config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").unlink()
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


# --- the clients ------------------------------------------------------------------------------------------------------


class Client:
    """A program that is run once in each turn, in a repository of its own and with an empty home.

    Args:
        programs: the folder of npm.
        url: of the server.
    """

    def __init__(self, name: str, programs: Path, url: str, folder: Path) -> None:
        self.name, self._url, self._home, self._at = name, url, folder / f"{name}-home", folder / f"{name}-repository"
        self._programs = programs / "node_modules" / ".bin"
        for each in (self._home, self._at):
            each.mkdir()
        subprocess.run(["git", "init", "-q", "."], cwd=self._at, check=True)
        self._messages: Any = None

    @property
    def program(self) -> Path | None:
        """None for a part of this process."""
        return None if self.name == "pydantic-ai" else self._programs / self.name

    def ask(self, turn: int, anew: bool = False) -> str:
        """Asks for a turn, or anew for the first of another conversation; returns what the client says."""
        notes = self._at / f"notes{turn}.txt"
        notes.write_text(f"Notes of turn {turn}: " + "what was decided. " * 20)
        return self._run(f"Read the file {notes} please.", 0 if anew else turn)

    def edits(self, turn: int) -> bool:
        """Asks to change a file; returns whether the client did so."""
        file = self._at / "stock.py"
        file.write_text("shelf = []\n")
        self._run(EDIT.format(file=file, old="shelf", new="shelves"), turn)
        return file.read_text() == "shelves = []\n"

    def _run(self, asked: str, turn: int) -> str:
        if self.program is None:
            return self._ask_here(asked)
        words, environment = getattr(self, f"_{self.name}")(asked, turn)
        environment = {"HOME": str(self._home), "PATH": os.environ["PATH"], **environment}
        done = subprocess.run(
            [str(self.program), *words], cwd=self._at, env=environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=1200,
        )  # fmt: skip
        return done.stdout[-2000:] + (f"\n{done.stderr[-2000:]}" if done.returncode else "")

    def _claude(self, asked: str, turn: int) -> tuple[list[str], dict[str, str]]:
        words = [*(["-c"] if turn else []), "-p", asked, "--allowedTools", "Read,Edit"]
        quiet = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER")
        server = {"ANTHROPIC_BASE_URL": self._url, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": CLAUDE_NAME}
        return words, server | dict.fromkeys(quiet, "1")

    def _codex(self, asked: str, turn: int) -> tuple[list[str], dict[str, str]]:
        folder = self._home / ".codex"
        folder.mkdir(exist_ok=True)
        provider = f'name = "m"\nbase_url = "{self._url}/v1"\nwire_api = "responses"'
        (folder / "config.toml").write_text(
            f'model = "{NAME}"\nmodel_provider = "m"\n[model_providers.m]\n{provider}\n'
        )
        flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        return ["exec", *(["resume", "--last"] if turn else []), *flags, asked], {}

    def _opencode(self, asked: str, turn: int) -> tuple[list[str], dict[str, str]]:
        limit = {"context": 131_072, "output": 32_000}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{self._url}/v1", "apiKey": "none"},
            "models": {NAME: {"limit": limit}},
        }
        settings = {"model": f"m/{NAME}", "small_model": f"m/{NAME}", "provider": {"m": provider}}
        (self._at / "opencode.json").write_text(json.dumps(settings))
        return ["run", *(["-c"] if turn else []), asked], {"OPENCODE_DISABLE_AUTOUPDATE": "1"}

    def _qwen(self, asked: str, turn: int) -> tuple[list[str], dict[str, str]]:
        server = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{self._url}/v1", "OPENAI_MODEL": NAME}
        return ["-y", *(["--continue"] if turn else []), "-p", asked], server

    def _ask_here(self, asked: str) -> str:
        import pydantic_ai
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        provider = OpenAIProvider(base_url=f"{self._url}/v1", api_key="none")
        agent = pydantic_ai.Agent(OpenAIChatModel(NAME, provider=provider), instructions="You help with code.")

        @agent.tool_plain
        def read_file(file_path: str) -> str:
            """Reads a file."""
            return Path(file_path).read_text()

        answer = agent.run_sync(asked, message_history=self._messages, model_settings={"max_tokens": 32_000})
        self._messages = answer.all_messages()
        return answer.output


CLIENTS = ("claude", "codex", "opencode", "qwen", "pydantic-ai")


@contextlib.contextmanager
def scripted_server(folder: Path, model: str | None) -> Iterator[tuple[str, Path]]:
    """The server's address, and the file with a line for each answer."""
    weights, log = folder / NAME, folder / "answers.jsonl"
    weights.mkdir()
    log.touch()
    subprocess.run(
        [sys.executable, __file__, "--make", str(weights), *(["--model", model] if model else [])], check=True
    )
    with process([sys.executable, __file__, "--serve", str(weights), "--log", str(log)]) as (url, _):
        yield url, log


def converse(client: Client, turns: Sequence[int], log: Path, anew: bool = False) -> list[dict[str, Any]]:
    """The requests of a client, in these turns, or in one of another conversation."""
    begins, requests = len(log.read_text().splitlines()), []
    for turn in turns:
        said, known = client.ask(turn, anew), len(requests)
        time.sleep(0.5)  # the last line is written after the answer
        lines = [json.loads(line) for line in log.read_text().splitlines()[begins + known :]]
        requests += [{"turn": turn + 1, **line} for line in lines]
        for line in lines:
            print(
                f"{client.name:12} turn {turn + 1}  {line['path']:22} {line['prompt']:7,} tokens, {line['reused']:7,} "
                f"reused of {line['ideal']:7,}, first token {line['first_token']} s",
                flush=True,
            )
        if "has been read" not in said:
            print(f"{client.name:12} turn {turn + 1}: {said.strip()[-500:]}", flush=True)
    return requests


def summary(requests: list[dict[str, Any]], failures: int) -> dict[str, Any]:
    """The figures of a client's conversation."""
    later = [each for each in requests if each["turn"] > 1]
    # The first of a conversation is the longest to be read; clients may ask for a title before.
    first = max((each["first_token"] or 0 for each in requests if each["turn"] == 1), default=0)
    second = next((each["first_token"] for each in later if each["first_token"]), None)
    changed = [before["text"] - each["ideal"] for before, each in pairwise(requests) if each["turn"] > 1]
    return {
        "requests": len(requests),
        "failures": failures,
        "max_tokens": max((each["max_tokens"] for each in requests), default=0),
        "prompt_tokens": max((each["prompt"] for each in requests), default=0),
        "reused_of_ideal": round(sum(e["reused"] for e in later) / max(sum(e["ideal"] for e in later), 1), 4),
        "read_again": max((each["ideal"] - each["reused"] for each in later), default=0),
        "changed_by_client": max(changed, default=0),
        "first_token_ratio": round(second / first, 3) if first and second else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("agents"), help="folder in which npm has installed them")
    parser.add_argument("--clients", default=",".join(CLIENTS), help="which of them")
    parser.add_argument("--model", help="a folder with a model; two thin layers otherwise")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--requests", type=Path, help="a file, for a line of JSON for each request, with its body")
    parser.add_argument("--edit", action="store_true", help="at last, let each change a file")
    for hidden in ("--serve", "--make", "--log"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    given, words = parser.parse_known_args()
    if given.model is not None and not (Path(given.model) / "config.json").exists():
        parser.error(f"--model {given.model}: there is no config.json in it; give the folder of a model")
    if given.make:
        make_model(Path(given.make), given.model)
    elif given.serve:
        serve(given.serve, given.log and Path(given.log), words)
    else:
        run(given)


def run(given: argparse.Namespace) -> None:
    """All conversations."""
    if given.requests is not None:
        given.requests.write_text("")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, scripted_server(Path(name), given.model) as (url, log):
        access = log.with_suffix(".log")
        for client_name in given.clients.split(","):
            client, seen = Client(client_name, given.programs, url, Path(name)), len(access.read_text())
            if client.program is not None and not client.program.exists():
                print(f"{client_name}: skipped, since {client.program} is not there: see --help", flush=True)
                continue
            requests = converse(client, range(given.turns), log)
            anew = converse(client, [given.turns], log, anew=True) if client.program is not None else []
            edited = client.edits(given.turns + 1) if given.edit and client.program is not None else None
            failed = re.findall(r'"(?:GET|POST|HEAD) [^"]*" [45]\d\d', access.read_text()[seen:])
            print(*failed, sep="\n", end="\n" if failed else "", flush=True)
            if given.requests is not None:
                with given.requests.open("a") as file:
                    file.writelines(json.dumps({"client": client_name, **each}) + "\n" for each in requests)
            results[client_name] = summary(requests, len(failed)) | ({} if edited is None else {"edited": edited})
            if anew:
                results[client_name]["read_anew"] = max(each["prompt"] - each["reused"] for each in anew)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
