"""Commands on several ranks: their options, and this process as one of the ranks.

The first rank reads prompts and prints; the others print nothing. MLX is not imported before there are ranks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from mlx_kv.bundled import model_path
from mlx_kv.cli.model import DraftOptions, ModelOptions, find_config, read_config
from mlx_kv.cli.options import EXISTING_FILE, Command, option, options, read_numbers
from mlx_kv.cli.output import file_errors
from mlx_kv.ranks.environment import launched
from mlx_kv.ranks.link import STEP_SECONDS, LeaderEndedError, leave_signals_to_leader
from mlx_kv.settings import setting, settings_of

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlx_kv.communicator import Communicator
    from mlx_kv.generation.engine import Engine
    from mlx_kv.generation.statistics import CacheStatistics
    from mlx_kv.policy import CachePolicy
    from mlx_kv.ranks.group import RankGroup

# Parameters that may differ between ranks: paths on one machine, and what the first rank alone reads. Models are
# compared by content.
MAY_DIFFER = {
    *("adapter_path", "api_key", "log_level", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password"),
    *("model", "draft_model", "draft_head", "secret_file", "api_key_file", "prompt_memory_bytes", "link_address"),
    *("source", "prompt", "prompt_file", "prompts_file", "output_file", "host", "port"),
    *("json_schema", "grammar"),
}
# Parameters of features that several ranks do not support, and why.
WHOLE_MODELS = "is for whole models, and each rank has a part of one: leave it out"
UNSUPPORTED = {
    **dict.fromkeys(
        ("adapter_path", "trust_remote_code", "quantize_activations", "chat_template", "lazy_load"), WHOLE_MODELS
    ),
    "prompt_cache_file": "has all of each layer, and a rank only a part: leave it out",
    "prompt_store": "is for one machine: several ranks keep prompts in memory; leave it out",
    "unload_after": "is for one machine: several ranks keep their weights; leave it out",
}


@dataclass(frozen=True)
class Machine:
    """This process as one of the ranks that run a command.

    Attributes:
        group: all of them; None for a single process.
    """

    group: RankGroup | None
    _model: ModelOptions
    _layers: Sequence[int] | None

    @property
    def leads(self) -> bool:
        """Whether this is the rank that reads prompts and writes answers."""
        return self.group is None or self.group.leads

    def load(self) -> tuple[nn.Module, Any]:
        """The model of the command, of several ranks each its part, and its tokenizer."""
        if self.group is None:
            return self._model.load()
        from mlx_kv.ranks.group import files_fingerprint
        from mlx_kv.ranks.splitting import check_split, load_part

        config = find_config(self._model.name)
        self.group.compare(model=files_fingerprint([config]))
        self.group.split = check_split(read_config(config), self.group.size, self.group.split, self._layers)
        model, tokenizer = load_part(model_path(self._model.name), self.group, self._layers)
        self.group.compare(model=files_fingerprint(config.parent.iterdir()))
        return model, self._model.with_eos_tokens(tokenizer)

    def load_draft(
        self, drafts: DraftOptions, model: nn.Module, tokenizer: Any, lazy: bool = False
    ) -> nn.Module | None:
        """The draft model or the head of the model, on the leader; None on other ranks, and where drafts need none."""
        return drafts.load(model, str(tokenizer.name_or_path), lazy, self.group is None) if self.leads else None

    def engine(
        self, network: nn.Module, tokenizer: Any, policy: CachePolicy, drafts: DraftOptions, **settings: Any
    ) -> Engine:
        """The engine that leads on all ranks; on another one it does what that one does until it ends, and then ends.

        Args:
            settings: others of `EngineSettings`.

        Raises:
            LeaderEndedError: this rank has followed to the end.
        """
        from mlx_kv.generation.engine import EngineSettings, make_engine
        from mlx_kv.generation.prefill import Instructions
        from mlx_kv.ranks.engine import follow, lead

        engine_settings = EngineSettings(
            drafting=drafts.settings,
            draft_model=self.load_draft(drafts, network, tokenizer),
            instructions=Instructions.for_policy(policy, tokenizer, network),
            **settings,
        )

        def make(communicator: Communicator) -> Engine:
            return make_engine(network, set(tokenizer.eos_token_ids), policy, engine_settings, communicator)

        if self.group is None or self.group.leads:
            return lead(make, self.group)
        follow(make, self.group)
        raise LeaderEndedError("the leader has ended")

    def totals(self, statistics: CacheStatistics, peak: int) -> tuple[CacheStatistics, int]:
        """What the caches of all ranks hold, and the largest peak; each rank gives its own."""
        if self.group is None:
            return statistics, peak
        from mlx_kv.ranks.group import total_statistics

        return total_statistics(self.group, statistics), max(self.group.gathered(peak))


def check_supported(parameters: Mapping[str, Any]) -> None:
    """Raises click.UsageError for an option that several ranks do not support."""
    for name, why in UNSUPPORTED.items():
        if parameters.get(name) is not None and parameters[name] is not False:
            raise click.UsageError(f"--{name.replace('_', '-')} {why}")


@dataclass(frozen=True)
class SplitOptions:
    """How a model is split over ranks."""

    SECTION: ClassVar = "Several machines"

    split: str | None = setting(
        None,
        option="--split",
        summary="Split heads or layers over the ranks.",
        choices=("heads", "layers"),
        default_text="heads where they divide",
        help="Part of each rank: some heads of all layers, or some layers.",
    )
    layers_by_rank: tuple[int, ...] | None = setting(
        None,
        option="--layers",
        kind=lambda text: read_numbers(text, "a number of layers: give one for each rank, such as 20,12", 999_999),
        metavar="N,N",
        help="Layers of each rank, for machines of different sizes; the first rank has the last layers.",
    )


@dataclass(frozen=True)
class RankOptions(SplitOptions):
    """Options of commands that run on several ranks."""

    link_address: str | None = setting(
        None,
        option="--link-address",
        metavar="ADDRESS",
        default_text="that of the launcher",
        help="Address where the first rank listens for the others.",
    )
    secret_file: Path | None = setting(
        None,
        option="--secret-file",
        kind=EXISTING_FILE,
        metavar="FILE",
        help="File with a secret in one line, the same on all ranks; needed on several machines.",
    )
    step_timeout: float = setting(
        STEP_SECONDS,
        option="--step-timeout",
        above=0,
        metavar="SECONDS",
        help="Longest step of a rank, and at least 20 times its longest so far, before the ranks end.",
    )

    def __post_init__(self) -> None:
        if launched() is not None:
            return
        for name in ("split", "layers_by_rank", "link_address", "secret_file"):
            if getattr(self, name) is not None:
                used = settings_of(RankOptions)[name].options[0]
                raise click.UsageError(f"{used} is for several ranks: start them with mlx.launch -n 2 mlx-kv …")

    @contextlib.contextmanager
    def joined(self, model: ModelOptions) -> Iterator[Machine]:
        """This process and all ranks that were started with it; all end as one of them does."""
        group = None if launched() is None else self._join()
        if group is None:
            yield Machine(None, model, self.layers_by_rank)
            return
        with group, quiet(group):
            try:
                check_supported(click.get_current_context().params)
                yield Machine(group, model, self.layers_by_rank)
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
        drafts = any(context.params.get(name) is not None for name in ("draft", "draft_model", "draft_head"))
        split: Any = self.split
        return join_ranks(
            split,
            settings={"command": context.info_name, **settings, "word on drafting": drafts},
            address=self.link_address,
            secret=None if self.secret_file is None else read_secret(self.secret_file),
            step_seconds=self.step_timeout,
        )


def split_options(group: type = SplitOptions, parameter: str = "split") -> Callable[[Command], Command]:
    """--split, --layers and mlx-lm's --pipeline, and the other options of a group that has them."""

    def decorate(function: Command) -> Command:
        pipeline = option(
            "--pipeline",
            "split",
            flag_value="layers",
            section=SplitOptions.SECTION,
            help="mlx-lm's name of --split layers.",
        )
        return options(group, parameter)(pipeline(function))

    return decorate


def on_each_rank(function: Callable[..., int | None]) -> Command:
    """Adds the options of several machines to a command, which runs on each rank and receives `machine`.

    This is the innermost decorator of a command that has a `model`. With an exit code that it returns, the process ends
    once the ranks are closed.
    """

    @functools.wraps(function)
    def command(*, model: ModelOptions, ranks: RankOptions, **values: Any) -> None:
        with ranks.joined(model) as machine:
            code = function(machine=machine, model=model, **values)
        if code is not None:
            sys.exit(code)

    return split_options(RankOptions, "ranks")(command)


def read_secret(path: Path) -> bytes:
    """The content of a file, without white space around it.

    Raises:
        click.UsageError: it cannot be read, or is empty.
    """
    with file_errors(f"read {path}"):
        secret = path.read_bytes().strip()
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
