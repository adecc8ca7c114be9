"""Commands on several machines: who this process is among those that were started alike.

Decides what must be the same on all of them and what only the first one reads, and that the others print nothing. Knows
nothing about what a command does; imports neither MLX nor what needs it before there are ranks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_kv.bundled import model_path
from mlx_kv.cli.config import find_config, read_config
from mlx_kv.cli.decoding import asks_for_drafts
from mlx_kv.cli.loading import Loading
from mlx_kv.cli.options import Command, FiniteRange, applied
from mlx_kv.cli.split_options import split_options
from mlx_kv.ranks.environment import launched
from mlx_kv.ranks.watchdog import STEP_SECONDS, leave_signals_to_leader

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlx_kv.communicator import Communicator
    from mlx_kv.generation.engine import Engine
    from mlx_kv.generation.statistics import CacheStatistics
    from mlx_kv.ranks.group import RankGroup

# Words that may differ: places on one machine, and what the first rank alone reads. Models are compared by content.
MAY_DIFFER = {
    *("adapter_path", "api_key", "log_level", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password"),
    *("model", "draft_model", "secret_file", "api_key_file", "prompt_memory_bytes", "link_address"),
    *("source", "prompt", "prompt_file", "prompts_file", "output_file", "host", "port", "prompt_store"),
    *("json_schema", "grammar"),
}
WHOLE = Loading()  # nothing was asked for
NEEDS_RANKS = "several ranks: start them with mlx.launch -n 2 mlx-kv …"


@dataclass(frozen=True)
class Machine:
    """This process among those that run the command.

    Attributes:
        group: all of them; None where it is alone.
    """

    group: RankGroup | None
    _model: str
    _layers: Sequence[int] | None
    _loading: Loading = WHOLE

    @property
    def leads(self) -> bool:
        """Whether it reads prompts, writes answers and decides."""
        return self.group is None or self.group.leads

    def load(self) -> tuple[nn.Module, Any]:
        """The model of the command and its tokenizer; of several ranks, each its part."""
        if self.group is None:
            return self._loading.load(self._model)
        from mlx_kv.ranks.group import files_fingerprint
        from mlx_kv.ranks.splitting import check_split, load_part

        config = find_config(self._model)
        self.group.compare(model=files_fingerprint([config]))
        self.group.split = check_split(read_config(config), self.group.size, self.group.split, self._layers)
        model, tokenizer = load_part(model_path(self._model), self.group, self._layers)
        self.group.compare(model=files_fingerprint(config.parent.iterdir()))
        return model, self._loading.told(tokenizer)

    def lead_or_follow(self, make: Callable[..., Engine]) -> Engine:
        """The engine that leads on all ranks; on another one it does what that one does until it ends, and then ends.

        Args:
            make: called with the `communicator` of the ranks.

        Raises:
            LeaderEndedError: this rank has followed to the end.
        """
        if self.group is None:
            return make()
        from mlx_kv.ranks.engine import follow, lead
        from mlx_kv.ranks.link import LeaderEndedError

        def make_for(communicator: Communicator) -> Engine:
            return make(communicator=communicator)

        if self.group.leads:
            return lead(make_for, self.group)
        follow(make_for, self.group)
        raise LeaderEndedError("the leader has ended")

    def totals(self, held: CacheStatistics, peak: int) -> tuple[CacheStatistics, int]:
        """What the caches of all ranks hold, and the largest peak; each rank gives its own."""
        if self.group is None:
            return held, peak
        from mlx_kv.ranks.group import total_statistics

        return total_statistics(self.group, held), max(self.group.gathered(peak))

    @property
    def of_each(self) -> str:
        """What is said behind a figure that is the largest of all ranks."""
        return "" if self.group is None else f", the largest of {self.group.size} ranks"


@dataclass(frozen=True)
class RankOptions:
    """What `rank_options` say; each attribute is an option."""

    split: str | None
    layers: Sequence[int] | None
    link_address: str | None
    secret_file: Path | None
    step_timeout: float

    def __post_init__(self) -> None:
        if launched() is not None:
            return
        for name in ("split", "layers", "link_address", "secret_file"):
            if getattr(self, name) is not None:
                raise click.UsageError(f"--{name.replace('_', '-')} is for {NEEDS_RANKS}")

    @contextlib.contextmanager
    def joined(self, model: str, loading: Loading = WHOLE) -> Iterator[Machine]:
        """This process and all that were started with it; what one of them ends with, all end with.

        Args:
            model: as the option says it.
            loading: how it is loaded.
        """
        group = None if launched() is None else self._join()
        if group is None:
            yield Machine(None, model, self.layers, loading)
            return
        from mlx_kv.ranks.link import LeaderEndedError

        with group, quiet(group):
            try:
                loading.check_parts()
                yield Machine(group, model, self.layers, loading)
            except click.ClickException as error:
                group.close(2, error.format_message())
                raise
            except LeaderEndedError:
                sys.exit(0)  # it had nothing to do
            group.finish()

    def _join(self) -> RankGroup | None:
        from mlx_kv.ranks.group import join_ranks

        context = click.get_current_context()
        settings = {
            f"--{name.replace('_', '-')}": None if value is None else str(value)
            for name, value in sorted(context.params.items())
            if name not in MAY_DIFFER
        }
        # Ranks may have another draft model, or none, but all know whether there are drafts.
        drafts = asks_for_drafts(context.params.get("draft"), context.params.get("draft_model"))
        split: Any = self.split
        return join_ranks(
            split,
            settings={"command": context.info_name, **settings, "word on drafting": drafts},
            address=self.link_address,
            secret=None if self.secret_file is None else read_secret(self.secret_file),
            step_seconds=self.step_timeout,
        )


def rank_options(function: Command) -> Command:
    """Options of commands that run on several machines: they get `RankOptions`."""

    @functools.wraps(function)
    def command(**given: Any) -> None:
        ranks = RankOptions(**{each.name: given.pop(each.name) for each in fields(RankOptions)})
        function(ranks=ranks, **given)

    options = (
        split_options,
        click.option(
            "--link-address",
            metavar="ADDRESS",
            help="Of the first rank, where it listens for the others.  [default: as the launcher says]",
        ),
        click.option(
            "--secret-file",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="FILE",
            help="One line that all ranks know; needed where they are on several machines.",
        ),
        click.option(
            "--step-timeout",
            type=FiniteRange(0, min_open=True),
            default=STEP_SECONDS,
            show_default=True,
            metavar="SECONDS",
            help="Ranks whose steps take longer, and 20 times as long as any before, end.",
        ),
    )
    return applied(options, command)


def read_secret(path: Path) -> bytes:
    """What is in a file, without white space around it.

    Raises:
        click.UsageError: it cannot be read, or is empty.
    """
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise click.UsageError(f"cannot read {path}: {error.strerror}") from error
    if not secret:
        raise click.UsageError(f"{path} is empty: write a secret in it, the same on all ranks")
    return secret


@contextlib.contextmanager
def quiet(group: RankGroup) -> Iterator[None]:
    """A rank that follows prints nothing but its last line, and leaves signals to the first one."""
    if group.leads:
        yield
        return
    if threading.current_thread() is threading.main_thread():
        leave_signals_to_leader(group.rank, group.fail)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        out, err = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = nowhere
        try:
            yield
        finally:
            sys.stdout, sys.stderr = out, err
