"""`mlx-kv plan`: the memory that the keys and values of a model will take, as a table, JSON or a figure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_kv.cli.model import find_config, read_config, short_name
from mlx_kv.cli.options import Parsed, command, json_option, message_of, option, plot_option, read_bytes, read_numbers
from mlx_kv.cli.output import aligned, check_plot, human_bytes, save_figure
from mlx_kv.cli.policy import PolicyOptions, policy_options
from mlx_kv.cli.ranks import SplitOptions, split_options
from mlx_kv.settings import MOST_TOKENS

if TYPE_CHECKING:
    from mlx_kv.planning import Layer, Planner, RankMemory, StrategyMemory
    from mlx_kv.policy import CachePolicy

EXAMPLES = """
\b
Examples:
  mlx-kv plan --model mlx-community/Qwen3-0.6B-4bit
  mlx-kv plan --model models/gemma/config.json --context 8192,65536 --max-write 256
  mlx-kv plan --model models/gemma --kv-bits 8 --max-kv-size 16384 --batch-size 4
  mlx-kv plan --model reference --batch-size 16 --shared-prefix 4000
  mlx-kv plan --model models/gemma --plot memory.png
  mlx-kv plan --model mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit --kv-bits 8 --memory-limit 20GB
  mlx-kv plan --model reference --json
  mlx-kv plan --model mlx-community/Llama-3.3-70B-Instruct-4bit --ranks 2
"""
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
NOT_INCLUDED = """\
Not included: activations, logits, the copy that a growth makes. Slots are counted as they fill: caches
allocate them in multiples of 256, and where nothing was reserved up to half as many more, at most 8,192 (twice,
below 1,024); a server takes this slack only where there is room. Layers that share keys and
values are counted once. The type is what this device computes in, float32 on a CPU; plan for a GPU with
--dtype bfloat16."""
ABOUT_RANKS = """\
Weights are as stored; while they are loaded, one tensor of the whole model is there beside them. Every rank has the
embeddings and what makes logits. The rank that has the least room decides how much all of them can hold."""


def dense(contexts: Sequence[int]) -> list[int]:
    """The contexts, and enough others between the smallest and the largest to draw a line."""
    low, high = min(contexts), max(contexts)
    if low == high:
        low = max(1, high // 64)
    steps = 96
    between = (round(low * (high / low) ** (step / steps)) for step in range(steps + 1))
    return sorted({*between, *contexts})


def describe_layer(layer: Layer, count: int) -> str:
    """One line of the table of layers."""
    window = "" if layer.window is None else f", window {layer.window:,}"
    if layer.state_bytes:
        return f"{count} {layer.kind}: {layer.state_bytes:,} bytes each, at any context"
    if not layer.bytes_per_slot:
        return f"{count} {layer.kind}"
    heads = f"{layer.heads} head{'s' if layer.heads > 1 else ''} x {layer.key_dim} + {layer.value_dim}"
    owner = "" if layer.ours else ", in mlx-lm's own cache, never quantised"
    return f"{count} {layer.kind}{window}: {heads}, {layer.bytes_per_slot:,} bytes a token{owner}"


def unit_of(counts: Sequence[int]) -> tuple[str, int]:
    """The largest unit in which no count of bytes is below a tenth, and its bytes."""
    return next((unit for unit in UNITS if min(counts, default=0) >= unit[1] / 10), UNITS[-1])


def table(rows: Sequence[StrategyMemory], contexts: Sequence[int]) -> list[str]:
    """Rows of strategies, columns of contexts, one unit for all."""
    named = [(row.name, row.bytes_held) for row in rows]
    named += [(f"{row.name}, once read", row.bytes_after) for row in rows if row.bytes_after != row.bytes_held]
    unit, size = unit_of([count for _, held in named for count in held])
    lines = [[f"{unit} at tokens", *(f"{count:,}" for count in contexts)]]
    lines += [[name, *([f"{count / size:,.2f}" for count in held] or ["-"] * len(contexts))] for name, held in named]
    return aligned(lines)


def ranks_table(split: str, name: str, parts: Sequence[RankMemory], contexts: Sequence[int]) -> list[str]:
    """Rows of ranks, columns of weights and of contexts, one unit for all.

    Args:
        name: of the strategy of the caches.
    """
    unit, size = unit_of([*(part.weights for part in parts), *(n for part in parts for n in part.bytes_held if n)])
    lines = [[f"{unit} of each rank", "layers", "weights", *(f"{count:,}" for count in contexts)]]
    lines += [
        [f"rank {part.rank}", str(part.layers), *(f"{n / size:,.2f}" for n in (part.weights, *part.bytes_held))]
        for part in parts
    ]
    return [f"Over {len(parts)} ranks, {split} split, caches by {name!r}:", "", *(f"  {row}" for row in aligned(lines))]


def shared_lines(most: int, tokens: int, copies: StrategyMemory, contexts: Sequence[int]) -> list[str]:
    """What is counted of first tokens that all sequences share.

    Args:
        most: tokens of a sequence up to which it shares.
        copies: the strategy with whole copies of them in each sequence.
    """
    if not most:
        return [f"The {tokens:,} shared tokens are held by each sequence: this model or policy cannot hold them once."]
    unit, size = unit_of(copies.bytes_held)
    sizes = ", ".join(f"{count / size:,.2f}" for count in copies.bytes_held)
    of = ", ".join(f"{context:,}" for context in contexts)
    once = f"Up to {tokens:,} shared tokens are held once"
    if most < max(contexts):  # a budget: then tokens are evicted
        once += f", until a sequence has more than {most:,} tokens"
    return [f"{once}. With copies in each sequence: {sizes} {unit} at {of} tokens."]


def weights_line(weights: int, limit: int | None, per_token: int) -> str:
    """What weights take, and the tokens that a limit of bytes leaves room for beside them."""
    words = f"Weights take {human_bytes(weights)}"
    if limit is not None and limit <= weights:
        words += f", more than the limit of {human_bytes(limit)}"
    elif limit is not None:
        words += (
            f"; a limit of {human_bytes(limit)} leaves {human_bytes(limit - weights)} for requests and cached prompts"
        )
        words += f": {(limit - weights) // per_token:,} tokens" if per_token else ""
    return f"{words}."


def server_line(planner: Planner, policy: CachePolicy, batch_size: int) -> str:
    """What sequences take as they usually are and at worst, and how many tokens of cached prompts a GiB has."""
    from mlx_kv.generation.sequence import FIRST_EXPECTED
    from mlx_kv.mlxlm.loading import context_length
    from mlx_kv.planning import USUAL_PROMPT

    memory, context = planner.row(policy), context_length(planner.model)
    usual = batch_size * memory.read_once(USUAL_PROMPT + FIRST_EXPECTED)
    words = f"A server plans {human_bytes(usual)} for {batch_size} of {USUAL_PROMPT:,} tokens and a usual answer"
    if context is not None:
        worst = batch_size * memory.read_once(context)
        words += f", and at worst {human_bytes(worst)} for the whole context of {context:,}"
    if memory.per_token:
        words += f". A GiB of cached prompts has {2**30 // memory.per_token:,} tokens"
    return f"{words}."


def layer_json(layer: Layer, count: int) -> dict[str, Any]:
    """JSON of `count` equal caches; bytes are of one sequence, unquantised."""
    return {
        "kind": layer.kind,
        "caches": count,
        "window": layer.window,
        "heads": layer.heads,
        "key_dim": layer.key_dim,
        "value_dim": layer.value_dim,
        "bytes_per_token": layer.bytes_per_slot,
        "state_bytes": layer.state_bytes,
    }


def draw(
    title: str, contexts: Sequence[int], rows: Sequence[StrategyMemory], marked: Sequence[int], file: Path
) -> None:
    """Writes the figure.

    Raises:
        click.UsageError, ValueError: nothing is held that could be drawn, or the file cannot be written.
    """
    from mlx_kv.plots import memory_against_context

    series = {row.name: row.bytes_held for row in rows if any(row.bytes_held)}
    if not series:
        raise click.UsageError("nothing to draw: none of this model's caches is planned; leave out --plot")
    save_figure(memory_against_context(title, contexts, series, marked), file)


@command(epilog=EXAMPLES, short_help="Plan the memory for the keys and values of a model.")
@option(
    "--model",
    required=True,
    metavar="PATH_OR_NAME",
    section="Model",
    summary="Directory, bundled model or hub id.",
    help="Directory, config.json, bundled model or hub id (config only).",
)
@option(
    "--context",
    "contexts",
    default="4096,32768,131072",
    show_default=True,
    metavar="N,N",
    type=Parsed(lambda text: read_numbers(text, "a context: give tokens from 1 up, such as 4096,32768")),
    section="Sequences",
    summary="Tokens of each sequence.",
)
@policy_options(PolicyOptions, "options")
@option(
    "--batch-size",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="B",
    section="Sequences",
    summary="Number of sequences.",
)
@option(
    "--shared-prefix",
    type=click.IntRange(0, MOST_TOKENS),
    default=0,
    metavar="N",
    section="Sequences",
    summary="Tokens that all sequences begin with.",
    help="First tokens that all sequences have in common: held once, where the model and the policy allow it.",
)
@option(
    "--memory-limit",
    type=Parsed(read_bytes),
    metavar="BYTES",
    section="Sequences",
    summary="Say how many tokens fit beside the weights.",
    help="Say how many tokens fit beside the weights: 20GB, 512MB, or a number of bytes.",
)
@option(
    "--ranks",
    type=click.IntRange(2),
    metavar="R",
    section="Several machines",
    summary="Show the share of each of R ranks, too.",
)
@split_options()
@option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    section="Cache",
    help="Type of keys and values.  [default: what this device computes in: float32 on a CPU, else that of the config]",
)
@plot_option
@json_option
def plan(
    model: str,
    contexts: tuple[int, ...],
    batch_size: int,
    shared_prefix: int,
    memory_limit: int | None,
    ranks: int | None,
    split: SplitOptions,
    dtype: str | None,
    plot: Path | None,
    as_json: bool,
    options: PolicyOptions,
) -> None:
    """Plan the memory for the keys and values of a model. Reads its config.json, and no weights."""
    if ranks is None and split != SplitOptions():
        raise click.UsageError("--split and --layers are for several ranks: give their number with --ranks")
    if plot is not None:
        check_plot(plot)
    contexts = tuple(dict.fromkeys(contexts))
    policy = options.policy(options.calibration_of_file())
    config = read_config(find_config(model))

    from mlx_kv.mlxlm.convert import check_policy, make_prompt_cache
    from mlx_kv.mlxlm.loading import model_from_config, quantize_as_stored, weight_bytes
    from mlx_kv.planning import DTYPES, Planner, Ranks, device_dtype, of_ranks, strategies
    from mlx_kv.policy import CachePolicy

    dtype = dtype or device_dtype(config)
    planner = Planner(model_from_config(config, DTYPES[dtype]))
    caches = Counter(planner.layers(CachePolicy()))
    if policy.changed():
        check_policy(planner.model, policy)  # as in generate, except for weights, which are not read
        make_prompt_cache(planner.model, policy, strict=False)
    windows = any(layer.window is not None for layer in caches)
    compared = strategies(policy, windows)
    rows = planner.compare(compared, contexts, batch_size, shared_prefix)
    planned = compared[-1] if policy.changed() else compared[2 if windows else 0]
    planned_refused = any(row.refused for row in rows if row.name == planned.name)
    parts = None
    if ranks is not None:
        planned_ranks = Ranks(ranks, split.split, split.layers_by_rank)
        parts = of_ranks(config, DTYPES[dtype], planned_ranks, planned, contexts, batch_size)
    if plot is not None:
        title = f"{short_name(model)}, {dtype}, batch of {batch_size}"
        line = dense(contexts)
        draw(title, line, planner.compare(compared, line, batch_size, shared_prefix), contexts, plot)
    facts = {"model": model, "model_type": config["model_type"], "dtype": dtype, "batch_size": batch_size}
    facts |= {"shared_prefix": shared_prefix} if shared_prefix else {}
    stored = model_from_config(config, DTYPES[dtype])
    quantize_as_stored(stored, config)
    weights, per_token = weight_bytes(stored), 0 if planned_refused else planner.row(planned.policy).per_token
    if as_json:
        facts |= {"weights": weights, "bytes_per_token": per_token}
        if memory_limit is not None:
            room = max(memory_limit - weights, 0)
            facts |= {"memory_limit": memory_limit, "tokens_in_limit": room // per_token if per_token else None}
        answer = {
            "layers": [layer_json(*each) for each in caches.items()],
            "strategies": [asdict(row) | {"refused": row.refused and str(row.refused)} for row in rows],
        }
        of_each = {} if parts is None else {"ranks": {"split": parts[0], "parts": [asdict(part) for part in parts[1]]}}
        click.echo(json.dumps({**facts, "contexts": contexts, **answer, **of_each}))
        return
    lines = [f"{short_name(model)} ({config['model_type']}), keys and values in {dtype}, batch of {batch_size}", ""]
    lines += [f"  {describe_layer(*each)}" for each in caches.items()]
    lines += ["", *(f"  {line}" for line in table(rows, contexts)), ""]
    command = click.get_current_context().command
    lines += [f"{row.name}: {message_of(row.refused, command)}." for row in rows if row.refused]
    if policy.changed():
        changes = ", ".join(f"{name}={value!r}" for name, value in policy.settings().items())
        lines.append(f"this policy: CachePolicy({changes})")
    if shared_prefix:
        copies = planner.compare([planned], contexts, batch_size)[0]
        lines += shared_lines(planner.shares_up_to(planned.policy), shared_prefix, copies, contexts)
    if not planned_refused:
        lines.append(weights_line(weights, memory_limit, per_token))
        lines.append(server_line(planner, planned.policy, batch_size))
    lines.append(NOT_INCLUDED)
    if parts is not None:
        how, each = parts
        lines += ["", *ranks_table(how, planned.name, each, contexts), "", ABOUT_RANKS]
    click.echo("\n".join(lines))
