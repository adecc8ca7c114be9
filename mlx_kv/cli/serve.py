"""`mlx-kv serve`: an OpenAI-compatible server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from mlx_kv.bundled import model_path
from mlx_kv.cli.model import DraftOptions, ModelOptions, draft_options, read_template_settings
from mlx_kv.cli.options import LEADERS_FILE, TABLES, command, listed, not_needed, options, read_bytes
from mlx_kv.cli.output import Progress, say
from mlx_kv.cli.policy import PolicyOptions, policy_options
from mlx_kv.cli.ranks import Machine, on_each_rank
from mlx_kv.generation.settings import SamplingSettings
from mlx_kv.settings import setting, settings_of

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlx_kv.prefixes.store import PromptStore
    from mlx_kv.server.rows import Models, WorkerSettings
    from mlx_kv.server.served import Served

EXTRA = ("starlette", "uvicorn", "prometheus_client", "pydantic")
EXAMPLES = """
\b
Examples:
  mlx-kv serve
  mlx-kv serve --model mlx-community/Qwen3-0.6B-4bit --kv-bits auto --max-batch-size 16
  mlx-kv serve --draft auto
  mlx-kv serve --kv-budget 256 --draft-model reference --port 9000
  mlx-kv serve --model mlx-community/Qwen3-4B-4bit --model mlx-community/gemma-3-270m-it-4bit --memory-limit 12GB
  mlx-kv serve --models-dir ~/models
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
BUNDLED = "reference"  # the model of a server that is given none
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
QUIET = "WARNING"  # the default: nothing is logged
KEY_VARIABLE, PASSWORD_VARIABLE = "MLX_KV_API_KEY", "MLX_KV_SSL_KEYFILE_PASSWORD"


# --- options ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerModel(ModelOptions):
    """The models of a server by name: the first, and others that are loaded in the same way."""

    others: tuple[str, ...] = ()
    models_dir: Path | None = setting(
        None,
        option="--models-dir",
        kind=click.Path(exists=True, file_okay=False, path_type=Path),
        metavar="DIR",
        help="Directory of which each directory with a model is served by its name, loaded with its first request.",
    )

    def __post_init__(self) -> None:
        first, *others = (list(self.name) or [BUNDLED]) if isinstance(self.name, tuple) else [self.name]
        object.__setattr__(self, "name", first)
        object.__setattr__(self, "others", (*others, *self._in_directory()))

    def _in_directory(self) -> Iterator[str]:
        root = self.models_dir
        # LM Studio has directories of publishers.
        configs = [] if root is None else [*root.glob("*/config.json"), *root.glob("*/*/config.json")]
        if root is not None and not configs:
            raise click.UsageError(f"{root} has no directory with a config.json: give one with models in it")
        models = {config.parent for config in configs}
        return (str(model) for model in sorted(models) if model.parent not in models)


@dataclass(frozen=True)
class TableSettings:
    """What a table of one model in a configuration file has beside the options of `mlx-kv serve`."""

    path: str | None = setting(None, option="--path", metavar="PATH_OR_HUB_ID", help="The model, as of --model.")
    alias: tuple[str, ...] = setting((), option=("--alias", "--aliases"), multiple=True, metavar="NAME,...")
    pin: bool = setting(False, option="--pin", help="Keep the weights in memory, from the start.")
    ttl: float | None = setting(None, option="--ttl", metavar="SECONDS", above=0)
    chat_template_args: dict[str, Any] | None = setting(
        None, option="--chat-template-args", kind=read_template_settings, metavar="JSON"
    )


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server; each is an option of this name."""

    SECTION: ClassVar = "Server"

    # --- network and access ---
    host: str = setting("127.0.0.1", option="--host", metavar="ADDRESS", summary="Address to listen on.")
    port: int = setting(
        8080,
        option="--port",
        summary="Port; 0 is a free one.",
        metavar="N",
        minimum=0,
        maximum=65535,
    )
    api_key: tuple[str, ...] = setting(
        (),
        option="--api-key",
        multiple=True,
        metavar="KEY",
        environment=KEY_VARIABLE,
        help=f"Key that clients must send, one of them if repeated; {KEY_VARIABLE} in the environment, where it is not "
        "visible to other users.",
    )
    api_key_file: Path | None = setting(
        None,
        option="--api-key-file",
        summary="File with API keys, one per line.",
        kind=LEADERS_FILE,
        metavar="FILE",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        option="--allowed-hosts",
        multiple=True,
        metavar="NAME,...",
        help="Host names that requests may use, besides this machine's and --host: mac.lan, *.lan, or * for all.",
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        option="--allowed-origins",
        multiple=True,
        metavar="ORIGIN,...",
        help="Sites with pages that may use the server: https://example.com, http://localhost:*, "
        "vscode-webview://*, or * for all; by default no site may.",
    )
    ssl_certfile: Path | None = setting(
        None, option="--ssl-certfile", kind=LEADERS_FILE, metavar="FILE", help="Certificate for TLS (https)."
    )
    ssl_keyfile: Path | None = setting(
        None, option="--ssl-keyfile", kind=LEADERS_FILE, metavar="FILE", help="Key of the certificate, if separate."
    )
    ssl_keyfile_password: str | None = setting(
        None,
        option="--ssl-keyfile-password",
        metavar="TEXT",
        environment=PASSWORD_VARIABLE,
        help=f"Password of the key; {PASSWORD_VARIABLE} in the environment.",
    )
    ssl_ca_certs: Path | None = setting(
        None,
        option="--ssl-ca-certs",
        kind=LEADERS_FILE,
        metavar="FILE",
        help="Certificates of authorities, one of which must have signed a client's certificate.",
    )
    log_level: str = setting(
        QUIET,
        option="--log-level",
        summary="DEBUG, INFO (each request), …",
        kind=click.Choice(LEVELS, case_sensitive=False),
        metavar="LEVEL",
        help="Lowest level of messages in the log: DEBUG, INFO (logs each request), WARNING, ERROR or CRITICAL.",
    )

    # --- requests ---
    alias: tuple[str, ...] = setting(
        (),
        option="--alias",
        multiple=True,
        metavar="NAME,...",
        help="More names of the model in requests; repeatable.",
    )
    strict_model_name: bool = setting(
        False,
        option="--strict-model-name",
        help="Refuse requests for other names of a model, instead of answering them.",
    )
    strict: bool = setting(
        False, option="--strict", help="Refuse requests with unknown fields, instead of ignoring them."
    )
    keep_client_headers: bool = setting(
        False,
        option="--keep-client-headers",
        summary="Keep Claude Code's first line in prompts.",
        help="Keep the line that Claude Code puts before each prompt (x-anthropic-billing-header), which is left out "
        "otherwise: it differs from request to request, and nothing after it could be reused.",
    )
    allow_image_urls: bool = setting(
        False,
        option="--allow-image-urls",
        help="Fetch images that requests name by their URLs (http, https), from public addresses alone.",
    )
    max_batch_size: int = setting(
        16,
        option=("--max-batch-size", "--decode-concurrency"),
        summary="Maximum requests in a batch.",
        metavar="N",
        minimum=1,
        help="Maximum requests in a batch; more wait.",
    )
    max_queue: int = setting(
        64, option="--max-queue", metavar="N", minimum=0, help="Maximum requests that wait; more are refused."
    )
    max_tokens: int = setting(
        512,
        option="--max-tokens",
        summary="Maximum tokens, unless a request sets it.",
        metavar="N",
        minimum=1,
    )
    max_answer_tokens: int | None = setting(
        None,
        option="--max-answer-tokens",
        metavar="N",
        minimum=1,
        default_text="what a request says",
        help="Maximum tokens of an answer, whatever a request says: answers are cut there.",
    )
    max_answers: int | None = setting(
        None,
        option="--max-answers",
        metavar="N",
        minimum=1,
        default_text="rows and queue",
        help="Maximum answers to one request (n, times its prompts); more are refused.",
    )
    max_prompt_tokens: int | None = setting(
        None,
        option="--max-prompt-tokens",
        metavar="N",
        minimum=1,
        default_text="the model's context",
        help="Maximum tokens of a prompt; longer ones are refused.",
    )
    max_body_bytes: int = setting(
        4 * 2**20,
        option="--max-body-bytes",
        metavar="N",
        minimum=1,
        help="Maximum bytes of a request; unless it is given, 32 MiB where a model reads images.",
    )
    max_token_wait: float = setting(
        0.5,
        option="--max-token-wait",
        metavar="SECONDS",
        above=0,
        help="Longest wait of other requests for their next token while a prompt is read, as far as small chunks help.",
    )
    prefill_step_size: int | None = setting(
        None,
        option="--prefill-step-size",
        metavar="N",
        minimum=1,
        default_text="2048; on a CPU 512 to 64, as generate",
        help="Prompt tokens of a request per pass of the model.",
    )
    no_warmup: bool = setting(
        False,
        option="--no-warmup",
        help="Be ready at once: by default a GPU first prepares itself for prompts of all lengths, which takes it some "
        "seconds.",
    )
    drain_seconds: int = setting(
        30,
        option="--drain-seconds",
        metavar="N",
        minimum=0,
        help="Time in which requests in progress may finish after SIGTERM or Ctrl-C.",
    )
    chat_template_args: dict[str, Any] | None = setting(
        None,
        option="--chat-template-args",
        kind=read_template_settings,
        metavar="JSON",
        help="Settings for the chat template, an object, unless a request sets them.",
    )

    thinking_budget: int | None = setting(
        None,
        option="--thinking-budget",
        metavar="N",
        minimum=0,
        help="Maximum tokens that a model thinks before it answers, unless a request says how many; then its thinking "
        "is ended.",
    )
    thinking_closing: str = setting(
        "",
        option="--thinking-closing",
        metavar="TEXT",
        help="Text that ends thinking at its limit, before the model's own mark.",
    )

    # --- memory ---
    memory_limit: int | None = setting(
        None,
        option="--memory-limit",
        summary="Memory to use at most, such as 12GB.",
        kind=read_bytes,
        metavar="BYTES",
        default_text="that of the device",
        help="Memory for weights, keys and values, and cached prompts, such as 12GB. Requests wait until it suffices.",
    )
    unload_after: float | None = setting(
        None,
        option="--unload-after",
        metavar="SECONDS",
        above=0,
        help="Time without requests after which weights are freed; the next request loads them again.",
    )
    prompt_memory_bytes: int | None = setting(
        None,
        option=("--prompt-memory-bytes", "--prompt-cache-bytes"),
        summary="Memory for cached prompts.",
        kind=read_bytes,
        metavar="BYTES",
        default_text="what the memory limit leaves beside weights and requests",
        help="Memory for cached prompts, which speed up prompts with the same beginning; 0 caches none.",
    )
    prompt_store: str | None = setting(
        None,
        option="--prompt-store",
        summary="Store for cached prompts, for restarts.",
        metavar="DIR",
        help="Directory where cached prompts are stored as well, for the next start and other servers.",
    )
    prompt_store_bytes: int = setting(
        8 * 2**30, option="--prompt-store-bytes", metavar="N", minimum=1, help="Maximum bytes in the prompt store."
    )

    def __post_init__(self) -> None:
        for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
            if self.ssl_certfile is None and getattr(self, name):
                raise click.UsageError(f"--{name.replace('_', '-')} needs --ssl-certfile")

    @property
    def keys(self) -> list[str]:
        """The keys, one of which clients must send; none: all clients are accepted.

        Raises:
            click.UsageError: a key that no client could send, or a file without a key or that cannot be read.
        """
        keys = {f"--api-key or {KEY_VARIABLE}": list(self.api_key)}
        if (file := self.api_key_file) is not None:
            try:
                lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
            except (OSError, UnicodeError) as error:
                raise click.UsageError(f"cannot read {file}: {error}") from error
            keys[str(file)] = list(filter(None, lines))
            if not keys[str(file)]:
                raise click.UsageError(f"{file} has no key in it: write one in each line")
        for where, values in keys.items():
            for number, key in enumerate(values, 1):
                if not key or not key.isascii() or not key.isprintable() or " " in key:
                    raise click.UsageError(f"key {number} in {where} is not plain ASCII without spaces: choose another")
        return [key for values in keys.values() for key in values]


def _default_of(name: str) -> Any:
    """An option of the server for requests without a field of this setting, with the bounds of that field."""
    described = settings_of(SamplingSettings)[name]
    assert described.served is not None
    low, high = described.served
    default_text = f"the model's, else {described.default:g}"
    option = replace(described, minimum=max(low, 0), maximum=high, default_text=default_text)
    return field(default=None, metadata={"setting": option})


@dataclass(frozen=True)
class SamplingDefaults:
    """How a server samples where a request does not decide; None is as the model's generation_config.json."""

    SECTION: ClassVar = "Sampling"

    temperature: float | None = _default_of("temperature")
    top_p: float | None = _default_of("top_p")
    top_k: int | None = _default_of("top_k")
    min_p: float | None = _default_of("min_p")
    generation_config: str = setting(
        "auto",
        option="--generation-config",
        choices=("auto", "none"),
        help="Sampling defaults from the model's generation_config.json (auto), or none.",
    )

    def of(self, model: str) -> SamplingSettings:
        """The defaults for a model, as the option --model names it."""
        from mlx_kv.mlxlm.loading import generation_config

        config = generation_config(model_path(model)) if self.generation_config == "auto" else {}
        values = vars(self).items()
        options = {name: value for name, value in values if name != "generation_config" and value is not None}
        return replace(SamplingSettings.of_model(config), **options)


def _show_warm_up() -> Callable[[int, int], None]:
    """Shows how far the warm-up of a GPU is, and how long it took."""
    bars: list[tuple[Progress, float]] = []

    def show(done: int, total: int) -> None:
        if done == 0:
            bars.append((Progress([1.0] * total, "shape").__enter__(), time.monotonic()))
            return
        bar, started = bars[-1]
        bar.step("warm-up")
        if done == total:
            bar.__exit__(None, None, None)
            say(f"note: the warm-up took {time.monotonic() - started:.1f} s")

    return show


# --- one of the models ------------------------------------------------------------------------------------------------


OF_ALL_MODELS = ("lazy_load", "wired_limit")


@dataclass(frozen=True)
class ModelSetup:
    """A model of a server with all that is chosen for it.

    Attributes:
        name: for clients.
    """

    name: str
    model: ModelOptions
    sampling: SamplingDefaults
    drafts: DraftOptions
    policy: PolicyOptions
    table: TableSettings = field(default_factory=TableSettings)

    def served(
        self, settings: WorkerSettings, machine: Machine, default: bool, networks: dict[tuple[Any, ...], Any]
    ) -> Served:
        """The model of the server.

        Args:
            settings: of the server, with the policy and drafts of its first model.
            default: whether it is the first model.
            networks: models that were loaded, which several names may share; this one is added.
        """
        from mlx_kv.server.rows import Models
        from mlx_kv.server.served import Served

        lazy = self.model.lazy_load or not (default or self.table.pin)
        options = replace(self.model, lazy_load=lazy)
        folders: dict[tuple[Any, ...], str] = {}
        key = tuple(getattr(options, each.name) for each in fields(ModelOptions) if each.name not in OF_ALL_MODELS)

        def load() -> Models:
            if key not in networks:
                networks[key] = machine.load() if machine.group is not None else options.load()
            network, tokenizer = networks[key]
            folder = str(tokenizer.name_or_path)
            if Path(folder).is_dir():  # so that weights come back without asking a hub
                folders[key] = folder
            if not machine.leads:
                return Models(network, tokenizer)
            cache_policy = self.policy.for_model(network, self.model.name)
            draft = machine.load_draft(self.drafts, network, tokenizer, lazy)
            return Models(network, tokenizer, draft, self.sampling.of(self.model.name), cache_policy)

        def release(network: nn.Module) -> None:
            if network is networks[key][0]:
                replace(options, name=folders.get(key, options.name)).release(network)
            else:
                self.drafts.release(network)

        # Bad settings are refused before anything is loaded.
        own = replace(settings, policy=self.policy.checked(), drafting=self.drafts.settings)
        table = self.table
        return Served(
            self.name,
            load,
            own,
            release=release,
            aliases=listed(table.alias),
            default=default,
            lazy=lazy,
            pinned=table.pin,
            idle_seconds=table.ttl,
            template=table.chat_template_args,
        )


@command("model")
@options(ModelOptions, "model", "name", "adapter_path", "trust_remote_code", "chat_template", "extra_eos_token")
@options(SamplingDefaults, "sampling")
@options(TableSettings, "table", section="Model")
@draft_options
@policy_options()
def table_model(
    model: ModelOptions, sampling: SamplingDefaults, drafts: DraftOptions, policy: PolicyOptions, table: TableSettings
) -> Callable[[str], ModelSetup]:
    """A table [models.NAME] of a configuration file: the model of a name."""
    return lambda name: ModelSetup(name, replace(model, name=table.path or model.name), sampling, drafts, policy, table)


OF_ONE_MODEL = ("model", "adapter_path", "chat_template", "draft_model", "draft_head", "kv_calibration", "alias")


def read_tables(first: ModelSetup) -> list[ModelSetup]:
    """The models of a configuration file's tables. What a table leaves out is as the options for all models say."""
    ctx = click.get_current_context()
    given = (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.DEFAULT_MAP)
    common = {
        str(param.name): ctx.params[str(param.name)]
        for param in table_model.params
        if param.name in ctx.params and param.name not in OF_ONE_MODEL
        if ctx.get_parameter_source(str(param.name)) in given
    }
    setups: list[ModelSetup] = []
    for name, values in ctx.meta.get(TABLES, {}).get("models", {}).items():
        if not {"path", "model"} & values.keys():
            raise click.UsageError(f"[models.{name}] has no path: give that of the model, or its hub id")
        with table_model.make_context(f"[models.{name}]", [], default_map=common | values) as own:
            setup = table_model.invoke(own)(name)
        ttl = first.table.ttl if setup.table.ttl is None else setup.table.ttl
        lazily = replace(setup.model, lazy_load=first.model.lazy_load)
        setups.append(replace(setup, model=lazily, table=replace(setup.table, ttl=ttl)))
    return setups


# --- command ----------------------------------------------------------------------------------------------------------


@command(epilog=EXAMPLES, short_help="Serve completions and chats to OpenAI clients.", tables={"models": table_model})
@options(
    ServerModel,
    "model",
    *("name", "models_dir", "adapter_path", "trust_remote_code", "chat_template", "lazy_load", "wired_limit"),
    name={
        "multiple": True,
        "default": None,
        "default_text": BUNDLED,
        "summary": "Model, directory or hub id; repeatable.",
    },
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
    model: ServerModel,
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
    table = TableSettings(alias=server.alias, ttl=server.unload_after, pin=False)
    first = ModelSetup(model.name, model, sampling, drafts, policy, table)
    others = [replace(first, name=name, model=replace(model, name=name, models_dir=None)) for name in model.others]
    others = [replace(each, table=replace(table, alias=())) for each in others]
    if others and drafts.draft_head is not None:
        raise click.UsageError("--draft-head is of one model: give it in a table [models.NAME] of a --config file")
    setups = [first, *others, *read_tables(first)]
    source = click.get_current_context().get_parameter_source("model")
    if source is click.core.ParameterSource.DEFAULT and len(setups) > 1:
        del setups[0]  # the bundled model is for those who name none
    tables = click.get_current_context().meta.get(TABLES, {}).get("models")
    if machine.group is not None and (len(setups) > 1 or tables or model.models_dir):
        raise click.UsageError("several models are for one machine: several ranks have parts of one; give one --model")
    for setup in setups:
        setup.policy.checked()  # bad settings are refused before anything is loaded
    try:
        from mlx_kv.server.api import AccessRules, Certificates, HttpSettings, Limits, configure_logging, is_loopback
        from mlx_kv.server.remote_images import fetch_image
        from mlx_kv.server.rows import WorkerSettings
        from mlx_kv.server.run import WorkerError
        from mlx_kv.server.run import serve as serve_http
        from mlx_kv.server.served import ModelTable
        from mlx_kv.server.worker import Worker
    except ImportError as error:
        if error.name not in EXTRA:
            raise
        raise click.ClickException(f'{error.name} is not installed: pip install "mlx-kv[server]"') from error
    model.set_wired_limit()

    def open_store(loaded: Models) -> PromptStore:
        from mlx_kv.prefixes.store import PromptStore

        store = PromptStore(str(server.prompt_store), server.prompt_store_bytes)
        store.refresh()
        return store

    access = AccessRules(server.host, listed(server.allowed_hosts), listed(server.allowed_origins))
    if not is_loopback(server.host):
        say(f"note: accepted host names: {access.allowed_names}; --allowed-hosts adds more")
        if not keys:
            say(f"note: any client that reaches {server.host} can use this server: consider --api-key-file")
    if server.log_level != QUIET:
        configure_logging(server.log_level)
    settings = WorkerSettings(
        setups[0].policy.checked(),
        server.max_batch_size,
        server.prefill_step_size,
        server.max_token_wait,
        setups[0].drafts.settings,
        server.prompt_memory_bytes,
        None if server.prompt_store is None else open_store,
        "device" if server.memory_limit is None else server.memory_limit,
        None if server.no_warmup or model.lazy_load else _show_warm_up(),
    )
    networks: dict[tuple[Any, ...], Any] = {}
    served = [setup.served(settings, machine, setup is setups[0], networks) for setup in setups]
    ModelTable(served)  # names that two models have are refused before anything is loaded
    worker = Worker(served, machine.group)
    if not machine.leads:
        worker.follow()
        return 0
    source = click.get_current_context().get_parameter_source("max_body_bytes")
    limits = Limits(
        body_bytes=server.max_body_bytes,
        image_body_bytes=(
            Limits.image_body_bytes if source is click.core.ParameterSource.DEFAULT else server.max_body_bytes
        ),
        prompt_tokens=server.max_prompt_tokens,
        queue=server.max_queue,
        max_tokens=server.max_tokens,
        answer_tokens=server.max_answer_tokens,
        answers=server.max_answers,
        strict=server.strict,
        template=server.chat_template_args or {},
        client_headers=server.keep_client_headers,
        thinking_budget=server.thinking_budget,
        thinking_closing=server.thinking_closing,
        fetch_image=fetch_image if server.allow_image_urls else None,
    )
    certificates = None
    if server.ssl_certfile is not None:
        more = server.ssl_keyfile, server.ssl_keyfile_password, server.ssl_ca_certs
        certificates = Certificates(server.ssl_certfile, *more)
    http = HttpSettings(
        server.host,
        server.port,
        limits,
        keys,
        access,
        certificates,
        server.drain_seconds,
        server.strict_model_name,
    )

    def started(url: str) -> None:
        say(f"note: {worker.memory_in_words}")
        say(f"{', '.join(each.names.name for each in served)} at {url}/v1, chat at {url}/chat, memory at {url}/")

    try:
        return serve_http(
            worker,
            http,
            started,
            say,
        )
    except WorkerError as error:
        say(f"error: {error}")
        return 1
