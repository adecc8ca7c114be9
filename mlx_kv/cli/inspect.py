"""`mlx-kv inspect`: which tokens of a prompt a budget keeps.

Decides how that is shown: in rows, in the text itself, in JSON, as a figure. Knows nothing about how tokens are chosen.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_kv.bundled import model_path
from mlx_kv.cli.config import short_name
from mlx_kv.cli.options import make_policy, model_option, policy_options
from mlx_kv.cli.output import check_json, check_plot, save_figure, save_json
from mlx_kv.cli.prompt import note_context, prefill_bar, prefill_option, prompt_options, read_prompt
from mlx_kv.cli.tables import aligned

if TYPE_CHECKING:
    from mlx_kv.evaluation.inspection import Inspection, KeptLayer
    from mlx_kv.policy import CachePolicy

EXAMPLES = """
\b
Examples:
  mlx-kv inspect --prompt-file notes.py --kv-budget 256
  mlx-kv inspect --prompt-file notes.py --kv-budget 256 --text
  mlx-kv inspect --prompt-file notes.py --kv-budget 256 --kv-share layer --text --layer 2
  mlx-kv inspect --prompt-file notes.py --kv-budget 256 --kv-share head --plot kept.png
  mlx-kv inspect --prompt-file notes.py --kv-budget 256 --kv-share layer --attention --plot kept.png
  git show | mlx-kv inspect - --kv-budget 256 --kv-score key_norm --json -
"""
TENTHS = 10
BLOCKS = "▁▂▃▄▅▆▇█"
NONE, EVICTED = "·", "·"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
LOOKING = 64  # last tokens whose attention is shown
SETTINGS = ("budget", "score", "share", "sinks", "keep_recent")  # that JSON tells


# --- rows -------------------------------------------------------------------------------------------------------------


def tenths(layer: KeptLayer, tokens: int) -> list[float]:
    """Tokens that a layer kept of each tenth of the text, the mean of its heads."""
    counts = [0.0] * TENTHS
    for head in layer.heads:
        for position in head.positions:
            counts[position * TENTHS // tokens] += 1 / len(layer.heads)
    return counts


def blocks(counts: Sequence[float], tokens: int) -> str:
    """A block for each tenth, full where all of its tokens were kept, a dot where none was."""
    sizes = [0] * TENTHS
    for position in range(tokens):
        sizes[position * TENTHS // tokens] += 1
    levels = [-(-count * len(BLOCKS) // size) if size else 0 for count, size in zip(counts, sizes, strict=True)]
    return "".join(BLOCKS[min(int(level), len(BLOCKS)) - 1] if level else NONE for level in levels)


def table(found: Inspection) -> list[str]:
    """A row for each layer; neighbours that kept the same tokens share one."""
    seen = any(layer.attention is not None for layer in found.layers)
    lines = [["layer", "kept", "evicted", *(["attention"] if seen else []), "tenths", "tokens kept of each tenth"]]
    lines[0][-1] += " of the text"
    numbers = []

    def same_tokens(layer: KeptLayer) -> object:  # neighbours of which one row is all that there is to say
        return layer.index if seen else [head.positions for head in layer.heads]

    for _, group in groupby(found.layers, key=same_tokens):
        same = list(group)
        name = str(same[0].index) if len(same) == 1 else f"{same[0].index}-{same[-1].index}"
        counts = tenths(same[0], found.tokens)
        share = same[0].attention_kept
        told = [] if not seen else ["hidden" if share is None else f"{100 * share:.1f}%"]
        lines.append([name, f"{found.kept:,}", f"{found.evicted:,}", *told, blocks(counts, found.tokens)])
        numbers.append([f"{count:,.0f}" for count in counts])
    width = max(len(number) for row in numbers for number in row)
    for line, row in zip(lines[1:], numbers, strict=True):
        line.append(" ".join(number.rjust(width) for number in row))
    return [line.rstrip() for line in aligned(lines, left=(4, 5) if seen else (3, 4))]


# --- the text ---------------------------------------------------------------------------------------------------------


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> Iterator[tuple[int, int, str]]:
    """The text of a prompt in the smallest pieces that are text: tokens [first, last) and their characters.

    A character may be spread over several tokens, none of which can be decoded alone. Each piece is decoded behind the
    one before it, since some tokenizers drop the space at the beginning of a text.
    """
    before, first = 0, 0
    for last in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[before:last])
        if text.endswith("\ufffd") and last < len(tokens):
            continue  # half a character
        yield first, last, text[len(tokenizer.decode(tokens[before:first])) :]
        before, first = first, last


def mark_evicted(text: str, dim: bool) -> str:
    """An evicted text: dimmed, or a dot for every character but white space, which stays for the shape of the text."""
    if dim:
        lines = text.splitlines(keepends=True)  # pagers forget at the end of a line
        return "".join(f"{DIM}{line}{PLAIN}" if line.strip() else line for line in lines)
    return "".join(letter if letter.isspace() else EVICTED for letter in text)


def text_lines(tokenizer: Any, tokens: Sequence[int], evicted: Sequence[float], dim: bool) -> str:
    """The text, its evicted tokens marked: those that most layers and heads evicted.

    Args:
        evicted: for each token, the share of layers and heads that evicted it.
    """
    runs = groupby(
        token_texts(tokenizer, tokens), key=lambda run: sum(evicted[run[0] : run[1]]) / (run[1] - run[0]) > 0.5
    )
    texts = ((gone, "".join(text for _, _, text in run)) for gone, run in runs)
    return "".join(mark_evicted(text, dim) if gone else text for gone, text in texts)


# --- files ------------------------------------------------------------------------------------------------------------


def inspection_json(model: str, policy: CachePolicy, found: Inspection) -> str:
    return json.dumps(
        {"model": model, **{name: getattr(policy, name) for name in SETTINGS}, **asdict(found)}, allow_nan=False
    )


def draw(title: str, policy: CachePolicy, found: Inspection, file: Path) -> None:
    from mlx_kv.plots.kept import kept_positions

    layers = [[(head.positions, head.scores) for head in layer.heads] for layer in found.layers]
    received = [layer.attention for layer in found.layers if layer.attention is not None]
    of_all = [sum(each) / len(received) for each in zip(*received, strict=True)] if received else None
    kept = [layer.attention_kept for layer in found.layers] if received else None
    figure = kept_positions(title, layers, found.tokens, policy.sinks, policy.keep_recent, of_all, kept)
    save_figure(figure, file)


# --- the command ------------------------------------------------------------------------------------------------------


@click.command("inspect", epilog=EXAMPLES)
@model_option()
@prompt_options
@click.option("--ignore-chat-template", is_flag=True, help="Read the prompt as plain text.")
@prefill_option("Prompt tokens read at once.  [default: as generate, at most max-write]")
@policy_options
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Draw it: .png, .svg or .pdf."
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="Write positions and scores as one JSON object; - is stdout, instead of the table.",
)
@click.option(
    "--attention",
    is_flag=True,
    help=f"Read the prompt once more with all of its tokens kept, and show how much of what its last {LOOKING} tokens "
    "look at is left.",
)
@click.option("--force", is_flag=True, help="Replace a file that --json did not write, too.")
@click.option(
    "--text",
    "as_text",
    is_flag=True,
    help="Print the prompt instead of the table, evicted tokens dimmed; where stdout is no terminal or NO_COLOR is "
    "set, as dots.",
)
@click.option(
    "--layer", type=int, metavar="N", help="The layer for --text.  [default: what most layers and heads evicted]"
)
def inspect_command(
    source: str | None,
    model: str,
    prompt: str | None,
    prompt_file: Path | None,
    ignore_chat_template: bool,
    prefill_step_size: int | None,
    plot: Path | None,
    json_file: str | None,
    attention: bool,
    force: bool,
    as_text: bool,
    layer: int | None,
    **settings: Any,
) -> None:
    """Show which tokens of a prompt a budget keeps: a table, the text itself, JSON, or a figure.

    Reads the prompt as `generate` does, then evicts down to --kv-budget, which must be given. Layers are counted among
    those with a budget, those of full attention.
    """
    if settings["kv_budget"] is None:
        raise click.UsageError("inspect needs --kv-budget: say how many tokens to keep")
    if layer is not None and not as_text:
        raise click.UsageError("--layer needs --text")
    if json_file == "-" and as_text:
        raise click.UsageError("--json - and --text both write to stdout: give --json a file")
    to_json = None if json_file in (None, "-") else Path(str(json_file))
    if to_json is not None:
        check_json(to_json, ("model", *SETTINGS, "layers"), force)
    if plot is not None:
        check_plot(plot)
    text = read_prompt(prompt, prompt_file, source)
    policy = make_policy(**settings)  # refuses bad settings before anything is loaded

    from mlx_kv.evaluation.inspection import inspect_prompt
    from mlx_kv.generation.encoding import encode_text
    from mlx_kv.generation.prefill import prefill_step
    from mlx_kv.mlxlm.convert import make_prompt_cache
    from mlx_kv.mlxlm.loading import load

    network, tokenizer = load(model_path(model))
    tokens = encode_text(tokenizer, text, plain=ignore_chat_template)
    note_context(network, len(tokens))
    step = prefill_step(network, make_prompt_cache(network, policy), prefill_step_size)
    looking = LOOKING if attention else 0
    with prefill_bar(len(tokens) * (2 if attention else 1), step) as advance:
        found = inspect_prompt(network, tokens, policy, prefill_step_size=step, progress=advance, attention_of=looking)
    evicted = found.share_evicted(layer)  # refuses a layer that does not exist before anything is written
    say_notes(policy, found)

    if plot is not None:
        title = f"{short_name(model)}, {found.kept:,} of {found.tokens:,} by {policy.score}, share={policy.share}"
        draw(title, policy, found, plot)
    if to_json is not None:
        check_json(to_json, ("model", *SETTINGS, "layers"), force)  # it may have come meanwhile
        save_json(inspection_json(model, policy, found), to_json)
    if as_text:
        dim = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        marked_text = text_lines(tokenizer, tokens, evicted, dim)
        click.echo(marked_text, nl=not marked_text.endswith("\n"), color=dim)
    elif json_file == "-":
        click.echo(inspection_json(model, policy, found))
    else:
        facts = f"{found.tokens:,} tokens, budget {policy.budget:,}, score {policy.score}, share={policy.share}"
        times = f"{found.compactions:,} compaction{'' if found.compactions == 1 else 's'}"
        lines = [f"{short_name(model)}: {facts}, {times}", "", *(f"  {line}" for line in table(found))]
        if attention:
            lines += [
                "",
                f"  attention: of what the last {LOOKING} tokens look at with all tokens, the share that is kept",
            ]
        click.echo("\n".join(lines))


def say_notes(policy: CachePolicy, found: Inspection) -> None:
    """What the answer does not show, on stderr."""
    if not found.evicted:
        click.echo(
            f"mlx-kv: note: nothing is evicted: {found.tokens:,} tokens are within the budget of {policy.budget:,}",
            err=True,
        )
    if found.without_budget:
        what = "1 layer has" if found.without_budget == 1 else f"{found.without_budget:,} layers have"
        click.echo(f"mlx-kv: note: {what} a window or a state instead of a budget, not listed", err=True)
