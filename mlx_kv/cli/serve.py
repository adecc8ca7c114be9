"""`mlx-kv serve`: an OpenAI-compatible server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mlx_kv.cli.decoding import DraftOptions, SamplingDefaults, draft_options
from mlx_kv.cli.model import ModelOptions
from mlx_kv.cli.options import command, listed, not_needed, options
from mlx_kv.cli.output import say
from mlx_kv.cli.policy import PolicyOptions, policy_options
from mlx_kv.cli.ranks import Machine, on_each_rank
from mlx_kv.cli.server_options import ServerSettings

if TYPE_CHECKING:
    from mlx_kv.prefixes.store import PromptStore
    from mlx_kv.server.models import Models

EXTRA = ("starlette", "uvicorn", "prometheus_client", "pydantic")
EXAMPLES = """
\b
Examples:
  mlx-kv serve
  mlx-kv serve --model mlx-community/Qwen3-0.6B-4bit --kv-bits auto --max-batch-size 16
  mlx-kv serve --draft auto
  mlx-kv serve --kv-budget 256 --draft-model reference --port 9000
  mlx-kv serve --config serve.toml
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


@command(epilog=EXAMPLES, short_help="Serve completions and chats to OpenAI clients.")
@options(
    ModelOptions,
    "model",
    *("name", "adapter_path", "trust_remote_code", "chat_template", "lazy_load", "wired_limit"),
)
@options(ServerSettings, "server")
@options(SamplingDefaults, "sampling")
@draft_options
@not_needed("--prompt-cache-size", "bytes decide what is kept: --prompt-memory-bytes")
@not_needed("--prompt-concurrency", "as many prompts are read together as pay")
@policy_options()
@on_each_rank
def serve(
    machine: Machine,
    model: ModelOptions,
    server: ServerSettings,
    sampling: SamplingDefaults,
    drafts: DraftOptions,
    policy: PolicyOptions,
) -> int:
    """Serve completions and chats to OpenAI clients, many at once.

    Requests join the running batch as they arrive. The server listens on this machine only, unless --host is given.
    Ctrl-C and SIGTERM stop it: requests in progress are finished first, or, after another Ctrl-C, end with an error.
    """
    keys = server.keys if machine.leads else []
    before_loading = policy.checked()  # bad settings are refused before anything is loaded
    try:
        from mlx_kv.server.api import HttpSettings, Limits, is_loopback
        from mlx_kv.server.models import IdleUnload, Models, WorkerSettings
        from mlx_kv.server.run import WorkerError
        from mlx_kv.server.run import serve as serve_http
        from mlx_kv.server.worker import Worker
    except ImportError as error:
        if error.name not in EXTRA:
            raise
        raise click.ClickException(f'{error.name} is not installed: pip install "mlx-kv[server]"') from error
    model.set_wired_limit()

    def load() -> Models:
        network, tokenizer = machine.load()
        if not machine.leads:
            return Models(network, tokenizer)
        cache_policy = policy.for_model(network, model.name)
        return Models(network, tokenizer, drafts.load_model(), sampling.of(model.name), cache_policy)

    def unload(loaded: Models) -> None:
        model.release(loaded.model)
        drafts.release(loaded.draft)

    def open_store(loaded: Models) -> PromptStore:
        from mlx_kv.prefixes.store import PromptStore

        store = PromptStore(str(server.prompt_store), server.prompt_store_bytes)
        store.refresh()
        return store

    access, certificates = server.access, server.certificates if machine.leads else None
    if not is_loopback(server.host):
        say(f"note: accepted host names: {access.allowed_names}; --allowed-hosts adds more")
        if not keys:
            say(f"note: any client that reaches {server.host} can use this server: consider --api-key-file")
    server.start_log()
    settings = WorkerSettings(
        before_loading,
        server.max_batch_size,
        server.prefill_step_size,
        server.max_token_wait,
        drafts.settings,
        server.prompt_memory_bytes if machine.group is None else 0,
        None if server.prompt_store is None else open_store,
        "device" if server.memory_limit is None else server.memory_limit,
    )
    worker = Worker(load, settings, machine.group, IdleUnload(server.unload_after, unload, model.lazy_load))
    if not machine.leads:
        worker.follow()
        return 0
    limits = Limits(
        body_bytes=server.max_body_bytes,
        prompt_tokens=server.max_prompt_tokens,
        queue=server.max_queue,
        max_tokens=server.max_tokens,
        strict=server.strict,
        template=server.chat_template_args or {},
    )
    http = HttpSettings(
        server.host, server.port, limits, keys, access, certificates, listed(server.alias), server.drain_seconds
    )
    try:
        return serve_http(
            worker,
            model.name,
            http,
            lambda url: say(f"{model.name} at {url}/v1, chat at {url}/chat, memory at {url}/"),
            say,
        )
    except WorkerError as error:
        say(f"error: {error}")
        return 1
