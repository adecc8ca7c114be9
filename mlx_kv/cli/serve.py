"""`mlx-kv serve`: an OpenAI-compatible server.

Decides what the options mean in terms of the server's parts, and what is refused before anything is loaded. Knows
nothing about requests or rows; MLX and Starlette are imported when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_kv.cli.decoding import Drafting, draft_options
from mlx_kv.cli.loading import Loading, loading_options
from mlx_kv.cli.measured_policy import asked_policy, measured_policy_options
from mlx_kv.cli.notices import say
from mlx_kv.cli.operating import Operating, listed, operating_options
from mlx_kv.cli.options import (
    ByteCount,
    FiniteRange,
    LeadersFile,
    model_option,
    not_needed,
    number_option,
)
from mlx_kv.cli.prompt import prefill_option, read_template_settings
from mlx_kv.cli.ranks import Machine, RankOptions, rank_options
from mlx_kv.cli.sampling_defaults import SamplingDefaults, sampling_defaults_options

if TYPE_CHECKING:
    from mlx_kv.prefixes.rank_shards import RankShards
    from mlx_kv.prefixes.store import PromptStore
    from mlx_kv.server.models import Models

EXTRA = ("starlette", "uvicorn", "prometheus_client")
EXAMPLES = """
\b
Examples:
  mlx-kv serve
  mlx-kv serve --model mlx-community/Qwen3-0.6B-4bit --kv-bits 8 --max-batch-size 16
  mlx-kv serve --draft auto
  mlx-kv serve --kv-budget 256 --draft-model reference --port 9000
  mlx-kv serve --host 0.0.0.0 --api-key-file keys.txt --ssl-certfile server.pem --log-level INFO
  mlx.launch -n 2 mlx-kv serve
\b
With curl:
  curl http://127.0.0.1:8080/v1/completions -H "Content-Type: application/json" \\
    -d '{"prompt": "def fibonacci(n):", "max_tokens": 60}'
\b
With the openai client:
  from openai import OpenAI
  client = OpenAI(base_url="http://127.0.0.1:8080/v1", api_key="none")
  for chunk in client.completions.create(model="reference", prompt="import os", stream=True):
      print(chunk.choices[0].text, end="")
\b
http://127.0.0.1:8080/ shows what is in memory, /metrics is for Prometheus.
"""
MOST_POLICIES = 4  # engines at once, where requests may choose


@click.command(epilog=EXAMPLES)
@model_option()
@loading_options("adapter_path", "trust_remote_code", "chat_template", "lazy_load")
@click.option(
    "--unload-after",
    type=FiniteRange(0, min_open=True),
    metavar="SECONDS",
    help="Let weights go when nobody has asked anything for so long; the next request reads them again.",
)
@click.option(
    "--chat-template-args",
    callback=read_template_settings,
    metavar="JSON",
    help="An object of settings for the chat template, where a request does not say.",
)
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Where to listen.")
@number_option("--port", click.IntRange(0, 65535), 8080, "0 takes a free one.")
@number_option("--max-batch-size", click.IntRange(1), 16, "Requests at once; more wait.", also="--decode-concurrency")
@draft_options
@prefill_option("Prompt tokens of a row read at once.  [default: 2048; on a CPU 512 to 64, as generate]")
@operating_options
@click.option(
    "--alias", multiple=True, metavar="NAME,...", help="Other names by which clients may ask for the model; * for any."
)
@click.option("--strict", is_flag=True, help="Refuse requests with fields that nobody knows, instead of ignoring them.")
@number_option("--max-tokens", click.IntRange(1), 512, "Where a request does not say.")
@sampling_defaults_options
@click.option(
    "--max-prompt-tokens", type=click.IntRange(1), metavar="N", help="Longer prompts are refused.  [default: context]"
)
@number_option("--max-body-bytes", click.IntRange(1), 4 * 2**20, "Of one request.")
@number_option("--max-queue", click.IntRange(0), 64, "Requests that wait; more are turned away.")
@number_option(
    "--drain-seconds", click.IntRange(0), 30, "After SIGTERM or Ctrl-C, requests in progress have so long to finish."
)
@click.option(
    "--memory-limit",
    type=ByteCount(),
    metavar="BYTES",
    help="Of weights, keys and values, and kept prompts: 12GB, say. Requests wait for room.  [default: of the device]",
)
@number_option(
    "--max-token-wait",
    FiniteRange(0, min_open=True),
    0.5,
    "While a prompt is read, others wait no longer for their next token, as far as small chunks help.",
    "SECONDS",
)
@click.option(
    "--allow-cache",
    multiple=True,
    metavar="SETTING=VALUES",
    help="What requests may say of their cache: budget=256-4096, bits=8,8/4 or score=key_diff; repeat it.",
)
@number_option(
    "--prompt-memory-bytes",
    ByteCount(),
    2**30,
    "What was read of prompts is kept in memory, for those that begin alike; 0 keeps nothing.",
    also="--prompt-cache-bytes",
)
@click.option(
    "--slot-save-path",
    type=LeadersFile(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Clients may save slots there, and restore them, by POST /slots/N?action=save.",
)
@click.option("--prompt-store", metavar="DIR", help="Keep it on a disk as well, for the next start; or a URL.")
@number_option("--prompt-store-bytes", click.IntRange(1), 8 * 2**30, "At the most, live.")
@click.option(
    "--prompt-store-deadline",
    type=FiniteRange(0, min_open=True),
    metavar="SECONDS",
    help="A prompt waits no longer for the store.  [default: 2 for a URL, 10 for a disk]",
)
@not_needed("--prompt-cache-size", "bytes decide what is kept: --prompt-memory-bytes")
@not_needed("--prompt-concurrency", "as many prompts are read together as pay")
@measured_policy_options
@rank_options
def serve(model: str, loading: Loading, drafting: Drafting, ranks: RankOptions, **given: Any) -> None:
    """Serve completions and chats to OpenAI clients, many at once.

    Requests are batched as they come. It listens on this machine only, unless --host says otherwise. Ctrl-C and SIGTERM
    end it: what is being answered is finished first, or, after another Ctrl-C, ended with an error.
    """
    with ranks.joined(model, loading) as machine:
        code = serve_on(machine, model, loading, drafting, **given)
    sys.exit(code)


def serve_on(
    machine: Machine,
    model: str,
    loading: Loading,
    drafting: Drafting,
    unload_after: float | None,
    operating: Operating,
    chat_template_args: dict[str, Any] | None,
    host: str,
    port: int,
    max_batch_size: int,
    prefill_step_size: int | None,
    alias: Sequence[str],
    strict: bool,
    max_tokens: int,
    sampling: SamplingDefaults,
    max_prompt_tokens: int | None,
    max_body_bytes: int,
    max_queue: int,
    drain_seconds: int,
    memory_limit: int | None,
    allow_cache: Sequence[str],
    max_token_wait: float,
    prompt_memory_bytes: int,
    slot_save_path: Path | None,
    prompt_store: str | None,
    prompt_store_bytes: int,
    prompt_store_deadline: float | None,
    **policy: Any,
) -> int:
    """What `serve` does on one machine, to the end; returns the exit code. HTTP is for the one that leads."""
    if unload_after is not None and machine.group is not None:
        raise click.UsageError("--unload-after is for one machine: several ranks keep their weights; leave it out")
    keys = operating.keys if machine.leads else []
    asked, drafts = asked_policy(**policy), drafting.settings  # refuses bad settings before anything is loaded
    try:
        from mlx_kv.server.access import is_loopback
        from mlx_kv.server.api import HttpSettings, Limits
        from mlx_kv.server.cache_requests import AllowedCache
        from mlx_kv.server.models import IdleUnload, Models, WorkerSettings
        from mlx_kv.server.run import WorkerError
        from mlx_kv.server.run import serve as serve_http
        from mlx_kv.server.worker import Worker
    except ImportError as error:
        if error.name not in EXTRA:
            raise
        raise click.ClickException(f'{error.name} is not installed: pip install "mlx-kv[server]"') from error

    allowed = AllowedCache.of(allow_cache)
    if allowed.any and machine.group is not None:
        raise click.UsageError("--allow-cache is for one machine: leave it out, or serve each policy by itself")

    def load() -> Models:
        network, tokenizer = machine.load()
        if not machine.leads:
            return Models(network, tokenizer)
        cache_policy = asked.for_model(network, tokenizer, model)
        return Models(network, tokenizer, drafting.load_model(), sampling.of(model), cache_policy)

    def unload(loaded: Models) -> None:
        loading.let_go(loaded.model, model)
        drafting.let_go(loaded.draft)

    def open_store(loaded: Models, shards: RankShards | None) -> PromptStore:
        from mlx_kv.prefixes.store import PromptStore

        store = PromptStore(str(prompt_store), prompt_store_bytes, deadline=prompt_store_deadline, parts=shards)
        try:
            with store.within():
                store.refresh()
        except OSError as error:
            if not store.far:
                raise
            say(f"note: the prompt store does not answer, and is asked again: {error}")
        return store

    access, certificates = operating.access(host), operating.certificates if machine.leads else None
    if not is_loopback(host):
        say(f"note: it answers to {access.allowed_names}; --allowed-hosts adds names")
        if not keys:
            say(f"note: whoever reaches {host} can use this server: consider --api-key-file")
    operating.begin_log()
    settings = WorkerSettings(
        asked.policy,
        max_batch_size,
        prefill_step_size,
        max_token_wait,
        drafts,
        prompt_memory_bytes,
        None if prompt_store is None else open_store,
        "device" if memory_limit is None else memory_limit,
        MOST_POLICIES if allowed.any else 1,
    )
    worker = Worker(load, settings, machine.group, IdleUnload(unload_after, unload, loading.lazy_load))
    if not machine.leads:
        worker.follow()
        return 0
    limits = Limits(
        body_bytes=max_body_bytes,
        prompt_tokens=max_prompt_tokens,
        queue=max_queue,
        max_tokens=max_tokens,
        strict=strict,
        cache=allowed,
        slot_folder=slot_save_path,
        template=chat_template_args or {},
    )
    http = HttpSettings(host, port, limits, keys, access, certificates, listed(alias), drain_seconds)
    try:
        return serve_http(worker, model, http, lambda url: say(f"{model} at {url}/v1, its memory at {url}/"), say)
    except WorkerError as error:
        say(f"error: {error}")
        return 1
