"""Options of `mlx-kv serve` alone: network, access, requests and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from mlx_kv.cli.model import read_template_settings
from mlx_kv.cli.options import LEADERS_FILE, listed, read_bytes
from mlx_kv.settings import setting

if TYPE_CHECKING:
    from mlx_kv.server.api import AccessRules, Certificates

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
QUIET = "WARNING"  # the default: nothing is logged
KEY_VARIABLE, PASSWORD_VARIABLE = "MLX_KV_API_KEY", "MLX_KV_SSL_KEYFILE_PASSWORD"


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server; each is an option of this name."""

    SECTION: ClassVar = "Server"

    # --- network and access ---
    host: str = setting(
        "127.0.0.1", option="--host", summary="Address to listen on.", metavar="ADDRESS", help="Address to listen on."
    )
    port: int = setting(
        8080,
        option="--port",
        summary="Port; 0 is a free one.",
        metavar="N",
        minimum=0,
        maximum=65535,
        help="Port; 0 is a free one.",
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
        summary="File with keys; clients must send one.",
        kind=LEADERS_FILE,
        metavar="FILE",
        help="File with one such key per line.",
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
        help="Sites with pages that may use the server: https://example.com, or * for all; by default no site may.",
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
        help="Other names of the model in requests; * for any; repeatable.",
    )
    strict: bool = setting(
        False, option="--strict", help="Refuse requests with unknown fields, instead of ignoring them."
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
        summary="Maximum tokens of an answer.",
        metavar="N",
        minimum=1,
        help="Maximum tokens of an answer, unless a request sets it.",
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
        4 * 2**20, option="--max-body-bytes", metavar="N", minimum=1, help="Maximum bytes of a request."
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
    prompt_memory_bytes: int = setting(
        2**30,
        option=("--prompt-memory-bytes", "--prompt-cache-bytes"),
        summary="Memory for cached prompts.",
        kind=read_bytes,
        metavar="BYTES",
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
            click.UsageError: a key that no client could send, or a file without a key.
        """
        from_file = [] if self.api_key_file is None else read_keys(self.api_key_file)
        check_keys(self.api_key, f"--api-key or {KEY_VARIABLE}")
        return [*self.api_key, *from_file]

    @property
    def access(self) -> AccessRules:
        """The host names and origins that are accepted."""
        from mlx_kv.server.api import AccessRules

        return AccessRules(self.host, listed(self.allowed_hosts), listed(self.allowed_origins))

    @property
    def certificates(self) -> Certificates | None:
        """The files for TLS; None: no TLS."""
        if self.ssl_certfile is None:
            return None
        from mlx_kv.server.api import Certificates

        return Certificates(self.ssl_certfile, self.ssl_keyfile, self.ssl_keyfile_password, self.ssl_ca_certs)

    def start_log(self) -> None:
        """Logs on stderr from the level on."""
        from mlx_kv.server.api import configure_logging

        if self.log_level != QUIET:
            configure_logging(self.log_level)


def read_keys(path: Path) -> list[str]:
    """The keys in a file, one per line; empty lines are skipped.

    Raises:
        click.UsageError: there is no key in it, one that no client could send, or it cannot be read.
    """
    try:
        keys = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeError) as error:
        raise click.UsageError(f"cannot read {path}: {error}") from error
    if not keys:
        raise click.UsageError(f"{path} has no key in it: write one in each line")
    check_keys(keys, str(path))
    return keys


def check_keys(keys: Sequence[str], where: str) -> None:
    """Raises click.UsageError for a key that no client could send."""
    for number, key in enumerate(keys, 1):
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise click.UsageError(f"key {number} in {where} is not plain ASCII without spaces: choose another")
