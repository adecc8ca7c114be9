"""What commands share: options, the prompt, the progress bar, sizes in words.

Decides how words on a command line become arguments of the library. Knows nothing about models or caches, and imports
neither MLX nor what needs it before a command runs.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_kv.cli.wording import SETTINGS
from mlx_kv.generation.speculation import DRAFT_TOKENS

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlx_kv.policy import CachePolicy

Command = Callable[..., None]
SOON_READ = 128  # tokens for which nobody waits


class FiniteRange(click.FloatRange):
    """A range of numbers; click's own lets nan through everywhere, and infinity where it is open."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = click.FLOAT.convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return super().convert(number, param, ctx)


def applied(options: tuple[Callable[[Command], Command], ...], function: Command) -> Command:
    """The function with these options, listed in this order by --help."""
    for option in reversed(options):
        function = option(function)
    return function


def model_option(**settings: Any) -> Callable[[Command], Command]:
    """--model, the same word in every command; a command for which it means something else says all of it."""
    usual = {
        "default": "reference",
        "show_default": True,
        "metavar": "PATH_OR_HUB_ID",
        "help": "A bundled model, a directory or a hub id.",
    }
    return click.option("--model", **(settings or usual))


def prefill_option(
    text: str = "Prompt tokens read at once.  [default: 2048; on a CPU 512 to 64, by the size of the model; at most "
    "max-write in models with windows]",
) -> Callable[[Command], Command]:
    """--prefill-step-size, for the commands that read prompts."""
    return click.option("--prefill-step-size", type=click.IntRange(1), metavar="N", help=text)


draft_option = click.option(
    "--draft-model", metavar="PATH_OR_HUB_ID", help="Speculate with this model; `reference`: the bundled draft."
)


def prompt_options(function: Command) -> Command:
    """The three places that a prompt comes from, for `read_prompt`."""
    options = (
        click.argument("source", required=False, metavar="[-]"),
        click.option("--prompt", metavar="TEXT"),
        click.option("--prompt-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE"),
    )
    return applied(options, function)


def decoding_options(function: Command) -> Command:
    """How tokens are chosen and how prompts are read, for the commands that generate."""
    options = (
        click.option("--temp", type=FiniteRange(0), default=0.0, show_default=True, metavar="T", help="0 is greedy."),
        click.option("--top-p", type=FiniteRange(0, 1, min_open=True), default=1.0, show_default=True, metavar="P"),
        click.option("--seed", type=click.IntRange(0, 2**64 - 1), metavar="N", help="Makes sampling repeatable."),
        prefill_option(),
        draft_option,
        click.option(
            "--num-draft-tokens", type=int, metavar="K", help=f"Drafted for each pass.  [default: {DRAFT_TOKENS}]"
        ),
    )
    return applied(options, function)


_NUMBER: dict[str, Any] = {"type": int, "metavar": "N", "show_default": True}
BUDGET_OPTIONS = (
    click.option(
        "--kv-budget",
        "--compact-kv-budget",
        **_NUMBER,
        help="Full-attention layers evict all but the N tokens that matter most, whenever they hold a margin more. "
        "Memory peaks at the budget, the margin and one prefill chunk.",
    ),
    click.option("--kv-score", metavar="NAME", help="What matters: key_diff, key_norm, recent, …  [default: key_diff]"),
    click.option("--kv-keep-recent", **_NUMBER, default=64, help="So many newest tokens are never evicted."),
    click.option("--kv-sinks", **_NUMBER, default=4, help="So many first tokens are never evicted."),
    click.option(
        "--kv-share",
        type=click.Choice(["layers", "layer", "head"]),
        default="layers",
        show_default=True,
        help="Keep the same tokens in all layers, in all heads of a layer, or each head its own.",
    ),
    click.option("--kv-margin", **_NUMBER, help="Tokens above the budget before it evicts.  [default: max(64, N/16)]"),
)


def policy_options(function: Command) -> Command:
    """The options that make a CachePolicy, for every command that makes caches or plans them."""
    number = _NUMBER
    options = (
        click.option("--kv-bits", **number, help="Quantise keys and values to 2, 3, 4, 5, 6 or 8 bits."),
        click.option("--kv-group-size", **number, default=64, help="Elements that share a scale: 32, 64 or 128."),
        click.option("--quantized-kv-start", **number, default=0, help="Quantise once this many tokens are held."),
        click.option(
            "--kv-growth",
            type=click.Choice(["geometric", "step"]),
            default="geometric",
            show_default=True,
            help="Grow to twice the slots, or by 256 as mlx-lm does.",
        ),
        click.option(
            "--max-kv-size", **number, help="Full-attention layers keep the first 4 and the newest of N tokens."
        ),
        click.option(
            "--max-write", **number, default=512, help="The longest write that windows and budgets of layers plan for."
        ),
        *BUDGET_OPTIONS,
    )
    return applied(options, function)


def make_policy(**options: Any) -> CachePolicy:
    """The policy that `policy_options` say.

    Raises:
        ValueError: settings that don't exist or don't go together.
    """
    from mlx_kv.cache.growth import FixedStep, Geometric
    from mlx_kv.policy import CachePolicy

    options["kv_growth"] = Geometric() if options["kv_growth"] == "geometric" else FixedStep()
    if options["kv_score"] is None:
        options["kv_score"] = CachePolicy.score
    return CachePolicy(**{SETTINGS.get(name, name): value for name, value in options.items()})


def read_stdin() -> str:
    if sys.stdin is None:
        raise click.UsageError("stdin is closed: give --prompt or --prompt-file")
    return sys.stdin.buffer.read().decode("utf-8")


def read_prompt(prompt: str | None, prompt_file: Path | None, source: str | None) -> str:
    """The one prompt of three possible places.

    Raises:
        click.UsageError: none or more than one was given, or it is empty or no text.
    """
    if source not in (None, "-"):
        raise click.UsageError(
            f"unexpected argument {source!r}: a prompt comes from --prompt, --prompt-file or - for stdin"
        )
    given = [place for place in (prompt, prompt_file, source) if place is not None]
    if len(given) != 1:
        raise click.UsageError(
            f"{'no prompt' if not given else 'more than one prompt'}: give --prompt, --prompt-file or -"
        )
    try:
        if prompt_file is not None:
            text = prompt_file.read_text(encoding="utf-8")
        else:
            text = prompt if prompt is not None else read_stdin()
        text.encode("utf-8")
    except UnicodeError as error:
        raise click.UsageError(
            f"the prompt is not UTF-8 text ({getattr(error, 'reason', error)}): give a text file"
        ) from error
    except OSError as error:
        raise click.UsageError(f"cannot read {prompt_file}: {error.strerror}") from error
    if not text.strip():
        raise click.UsageError("the prompt is empty: give at least one word")
    return text


def note_context(model: nn.Module, prompt_tokens: int, max_tokens: int = 0) -> None:
    """Says on stderr where a prompt and its answer go past the positions that a model was made for."""
    from mlx_kv.mlxlm.loading import context_length

    length = context_length(model)
    if length is not None and prompt_tokens + max_tokens > length:
        asked = f"{prompt_tokens} + {max_tokens} tokens" if max_tokens else f"{prompt_tokens} tokens"
        click.echo(f"mlx-kv: note: {asked}, but this model was made for {length}", err=True)


@contextlib.contextmanager
def prefill_bar(prompt_tokens: int, step: int) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar for a prompt of several chunks or of a long one, on a terminal only; mlx-lm's callback."""
    if not sys.stderr.isatty() or prompt_tokens <= min(step, SOON_READ):
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=prompt_tokens, desc="prompt", unit="tok", leave=False, file=sys.stderr) as bar:

        def advance(done: int, total: int) -> None:
            bar.update(done - bar.n)
            if done == total:
                bar.close()

        yield advance


def tokens_line(name: str, tokens: int, per_second: float | None) -> str:
    """A line of statistics; no rate where it was not measured."""
    rate = "" if per_second is None else f"  {per_second:10,.1f} tokens/s"
    return f"{name:<11} {tokens:7,} token{' ' if tokens == 1 and rate else '' if tokens == 1 else 's'}{rate}"


def human_bytes(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"
