"""The command `mlx-kv`.

Turns words on a command line into calls of the library and prints what came back: answers to stdout, everything else
to stderr. Decides nothing about caches. MLX is imported inside the commands, after a tuned BLAS had its chance.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_kv import __version__, blas
from mlx_kv.bundled import bundled_models, draft_path, model_path

if TYPE_CHECKING:
    from mlx_kv.policy import CachePolicy

GENERATE_EXAMPLES = """
\b
Examples:
  mlx-kv generate --prompt "def fibonacci(n):"
  mlx-kv generate --prompt-file notes.py --kv-bits 8 --max-tokens 400
  git show | mlx-kv generate - --temp 0.7 --top-p 0.9 --seed 1
  mlx-kv generate --prompt-file notes.py --draft-model reference
  mlx-kv generate --model mlx-community/Qwen3-0.6B-4bit --prompt "Hello" --json
"""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mlx-kv")
def command() -> None:
    """KV caches for language models on MLX: generate text with them, and see what they cost.

    \b
    Examples:
      mlx-kv generate --prompt "import os"
      mlx-kv info
    """


def policy_options(function: Callable[..., None]) -> Callable[..., None]:
    """The options that make a CachePolicy, for every command that generates."""
    number: dict[str, Any] = {"type": int, "metavar": "N", "show_default": True}
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
        click.option("--max-write", **number, default=512, help="The longest write that windows of layers plan for."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def make_policy(
    kv_bits: int | None,
    kv_group_size: int,
    quantized_kv_start: int,
    kv_growth: str,
    max_kv_size: int | None,
    max_write: int,
) -> CachePolicy:
    from mlx_kv.growth import FixedStep, Geometric
    from mlx_kv.policy import CachePolicy

    return CachePolicy(
        bits=kv_bits,
        group_size=kv_group_size,
        growth=Geometric() if kv_growth == "geometric" else FixedStep(),
        quantized_start=quantized_kv_start,
        max_kv_size=max_kv_size,
        max_write=max_write,
    )


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


@contextlib.contextmanager
def prefill_bar(prompt_tokens: int, step: int) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar for a prompt of several chunks, on a terminal only; the callback that mlx-lm's loop wants."""
    if not sys.stderr.isatty() or prompt_tokens <= step:
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=prompt_tokens, desc="prompt", unit="tok", leave=False, file=sys.stderr) as bar:

        def advance(done: int, total: int) -> None:
            bar.update(done - bar.n)
            if done == total:
                bar.close()

        yield advance


def human_bytes(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"


@command.command(epilog=GENERATE_EXAMPLES)
@click.argument("source", required=False, metavar="[-]")
@click.option(
    "--model",
    default="reference",
    show_default=True,
    metavar="PATH_OR_HUB_ID",
    help="A bundled model, a directory or a hub id.",
)
@click.option("--prompt", metavar="TEXT")
@click.option("--prompt-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE")
@click.option("--ignore-chat-template", is_flag=True, help="Continue the prompt as plain text.")
@click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True, metavar="N")
@click.option("--temp", type=click.FloatRange(0), default=0.0, show_default=True, metavar="T", help="0 is greedy.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True, metavar="P")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), metavar="N", help="Makes sampling repeatable.")
@click.option(
    "--prefill-step-size",
    type=click.IntRange(1),
    metavar="N",
    help="Prompt tokens read at once.  [default: 2048, or max-write in models with windows]",
)
@click.option(
    "--draft-model", metavar="PATH_OR_HUB_ID", help="Speculate with this model; `reference`: the bundled draft."
)
@click.option("--num-draft-tokens", type=int, default=3, show_default=True, metavar="K", help="Drafted for each pass.")
@policy_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of streaming.")
def generate(
    source: str | None,
    model: str,
    prompt: str | None,
    prompt_file: Path | None,
    ignore_chat_template: bool,
    max_tokens: int,
    temp: float,
    top_p: float,
    seed: int | None,
    prefill_step_size: int | None,
    draft_model: str | None,
    num_draft_tokens: int,
    as_json: bool,
    **policy: Any,
) -> None:
    """Continue a prompt: text streams to stdout, statistics follow on stderr.

    The prompt is --prompt, the content of --prompt-file, or stdin for a lone -.
    """
    text = read_prompt(prompt, prompt_file, source)
    blas.preload()
    cache_policy = make_policy(**policy)  # refuses bad settings before anything is loaded

    import mlx.core as mx

    from mlx_kv.adapter import context_length, load, make_prompt_cache
    from mlx_kv.generation import PREFILL_STEP, cache_statistics, encode_prompt, stream_generate
    from mlx_kv.sampling import TemperatureSampler
    from mlx_kv.speculative import SpeculationStatistics, speculative_generate

    network, tokenizer = load(model_path(model))
    if tokenizer.chat_template is not None and not ignore_chat_template:
        tokens = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    else:
        tokens = encode_prompt(tokenizer, text)
    length = context_length(network)
    if length is not None and len(tokens) + max_tokens > length:
        click.echo(f"mlx-kv: note: {len(tokens)} + {max_tokens} tokens, but this model was made for {length}", err=True)
    if seed is not None:
        mx.random.seed(seed)
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "sampler": TemperatureSampler(temp, top_p) if temp > 0 else None,
        "prefill_step_size": prefill_step_size,
    }
    speculation = SpeculationStatistics()
    pieces, ids, response = [], [], None
    with prefill_bar(len(tokens), prefill_step_size or PREFILL_STEP) as advance:
        options["prompt_progress_callback"] = advance
        if draft_model is None:
            caches = make_prompt_cache(network, cache_policy)
            responses = stream_generate(network, tokenizer, tokens, prompt_cache=caches, **options)
        else:
            drafting, _ = load(draft_path(draft_model))
            options |= {"num_draft_tokens": num_draft_tokens, "policy": cache_policy, "statistics": speculation}
            responses = speculative_generate(network, drafting, tokenizer, tokens, **options)
            caches = speculation.caches
        for response in responses:
            pieces.append(response.text)
            ids.append(response.token)
            if not as_json:
                click.echo(response.text, nl=False)
    assert response is not None, "mlx-lm's loop ends with a response"
    held = cache_statistics(caches)
    if as_json:
        answer = {
            "text": "".join(pieces),
            "tokens": ids,
            "finish_reason": response.finish_reason,
            "prompt_tokens": response.prompt_tokens,
            "prompt_tokens_per_second": round(response.prompt_tps, 2),
            "generation_tokens": response.generation_tokens,
            "generation_tokens_per_second": round(response.generation_tps, 2),
            "kv_bytes_live": held.bytes_live,
            "kv_bytes_allocated": held.bytes_allocated,
            "kv_growths": held.growths,
            "peak_memory_bytes": round(response.peak_memory * 1e9),
        }
        if draft_model is not None:
            answer |= {"drafted": speculation.drafted, "accepted": speculation.accepted}
        click.echo(json.dumps(answer))
        return
    click.echo()
    lines = (
        "-" * 40,
        f"prompt      {response.prompt_tokens:7,} tokens  {response.prompt_tps:10,.1f} tokens/s",
        f"generation  {response.generation_tokens:7,} tokens  {response.generation_tps:10,.1f} tokens/s",
        f"KV cache    {human_bytes(held.bytes_live)} live, {human_bytes(held.bytes_allocated)} allocated",
        f"growths     {held.growths:7,}",
        f"peak memory {human_bytes(round(response.peak_memory * 1e9))}",
    )
    click.echo("\n".join(lines), err=True)
    if draft_model is not None:
        share = f"{speculation.accepted:,} of {speculation.drafted:,} ({speculation.acceptance_rate:.0%})"
        click.echo(f"draft       {share} accepted in {speculation.rounds:,} passes of the model", err=True)


@command.command()
def info() -> None:
    """Versions, device, BLAS and bundled models of this installation."""
    library = blas.preload()

    import importlib.metadata
    import platform

    import mlx.core as mx

    for package in ("mlx-kv", "mlx", "mlx-lm", "transformers"):
        click.echo(f"{package:<14}{importlib.metadata.version(package)}")
    click.echo(f"{'python':<14}{platform.python_version()} on {platform.system()} {platform.machine()}")
    click.echo(f"{'device':<14}{mx.default_device()}")
    click.echo(f"{'BLAS':<14}{library}")
    click.echo(f"{'':<14}{measure_matmul():,.0f} GFLOP/s in a float32 product of 1,024 x 1,024")
    for name in bundled_models():
        click.echo(f"{'model':<14}{name}: {model_path(name)}")


def measure_matmul() -> float:
    """GFLOP/s of a float32 matrix product, the best of five."""
    import mlx.core as mx

    size = 1024
    a, b = mx.random.normal((size, size)), mx.random.normal((size, size))
    mx.eval(a, b)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        mx.eval(a @ b)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best / 1e9


def main() -> None:
    """The entry point: bad input is one line on stderr and exit code 2, never a traceback."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        command.main(standalone_mode=False)
    except ImportError as error:
        if error.name not in ("mlx", "mlx.core") and "libmlx" not in str(error):
            raise
        click.echo('mlx-kv: error: MLX is not installed here: pip install "mlx-kv[cpu]" or "mlx-kv[cuda]"', err=True)
        sys.exit(2)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        click.echo(f"mlx-kv: error: cannot write: {error.strerror}", err=True)
        sys.exit(2)
    except (click.ClickException, ValueError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo(f"mlx-kv: error: {' '.join(message.split())}", err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("\nmlx-kv: interrupted", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
