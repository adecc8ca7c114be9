"""Options of `mlx-kv serve` for who runs it: who may use the server, over what, and what is logged.

Decides how words become rules, keys and certificates, and what is refused before anything is loaded. Imports what needs
Starlette when it is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_kv.cli.options import Command, LeadersFile, applied

if TYPE_CHECKING:
    from mlx_kv.server.access import AccessRules, Certificates

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
QUIET = "WARNING"  # what is said of a server that was not asked to say more
KEY_VARIABLE = "MLX_KV_API_KEY"


@dataclass(frozen=True)
class Operating:
    """What `operating_options` say; each attribute is an option."""

    api_key: Sequence[str]
    api_key_file: Path | None
    allowed_hosts: Sequence[str]
    allowed_origins: Sequence[str]
    ssl_certfile: Path | None
    ssl_keyfile: Path | None
    ssl_keyfile_password: str | None
    ssl_ca_certs: Path | None
    log_level: str

    def __post_init__(self) -> None:
        given = [name for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs") if getattr(self, name)]
        if self.ssl_certfile is None and given:
            raise click.UsageError(f"--{given[0].replace('_', '-')} needs --ssl-certfile")

    @property
    def keys(self) -> list[str]:
        """One of which clients must send; none: all are let in.

        Raises:
            click.UsageError: one that no client could send, or a file that has none.
        """
        from_file = [] if self.api_key_file is None else read_keys(self.api_key_file)
        check_keys(self.api_key, f"--api-key or {KEY_VARIABLE}")
        return [*self.api_key, *from_file]

    def access(self, host: str) -> AccessRules:
        """By which names clients may come, and from pages of which sites."""
        from mlx_kv.server.access import AccessRules

        return AccessRules(host, listed(self.allowed_hosts), listed(self.allowed_origins))

    @property
    def certificates(self) -> Certificates | None:
        """What the server encrypts with; None is not at all."""
        if self.ssl_certfile is None:
            return None
        from mlx_kv.server.access import Certificates

        return Certificates(self.ssl_certfile, self.ssl_keyfile, self.ssl_keyfile_password, self.ssl_ca_certs)

    def begin_log(self) -> None:
        """From here on, what the level lets through is said on stderr."""
        from mlx_kv.server.access import configure_logging

        if self.log_level != QUIET:
            configure_logging(self.log_level)


def operating_options(function: Command) -> Command:
    """The options of who runs a server, for a command that gets an `Operating`."""

    @functools.wraps(function)
    def command(**given: Any) -> None:
        operating = Operating(**{each.name: given.pop(each.name) for each in fields(Operating)})
        function(operating=operating, **given)

    file = LeadersFile(exists=True, dir_okay=False, path_type=Path)
    options = (
        click.option(
            "--api-key",
            multiple=True,
            envvar=KEY_VARIABLE,
            metavar="KEY",
            help=f"Clients must send it, or another one; {KEY_VARIABLE} in the environment, where nobody can see it.",
        ),
        click.option("--api-key-file", type=file, metavar="FILE", help="The same: one key in each line."),
        click.option(
            "--allowed-hosts",
            multiple=True,
            metavar="NAME,...",
            help="Names by which clients may come, besides this machine's and --host: mac.lan, *.lan, or * for all.",
        ),
        click.option(
            "--allowed-origins",
            multiple=True,
            metavar="ORIGIN,...",
            help="Sites whose pages may use the server: https://example.com, or * for all; none by itself.",
        ),
        click.option("--ssl-certfile", type=file, metavar="FILE", help="Speak TLS (https) with this certificate."),
        click.option("--ssl-keyfile", type=file, metavar="FILE", help="Its key, if it is in a file of its own."),
        click.option(
            "--ssl-keyfile-password",
            envvar="MLX_KV_SSL_KEYFILE_PASSWORD",
            metavar="TEXT",
            help="Of the key; MLX_KV_SSL_KEYFILE_PASSWORD in the environment.",
        ),
        click.option(
            "--ssl-ca-certs",
            type=file,
            metavar="FILE",
            help="Clients must show a certificate that one of these signed.",
        ),
        click.option(
            "--log-level",
            type=click.Choice(LEVELS, case_sensitive=False),
            default=QUIET,
            show_default=True,
            help="INFO says a line for each request.",
        ),
    )
    return applied(options, command)


def listed(values: Sequence[str]) -> list[str]:
    """What an option that can be repeated, and takes several separated by commas, was given."""
    return [each.strip() for value in values for each in value.split(",") if each.strip()]


def read_keys(path: Path) -> list[str]:
    """The keys in a file, one in each line; empty lines are none.

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
