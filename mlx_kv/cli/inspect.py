"""`mlx-kv inspect`: which tokens of a prompt a budget keeps.

Decides how that is shown: in rows, in the text itself, in JSON, as a figure. Knows nothing about how tokens are chosen.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_kv.bundled import model_path
from mlx_kv.cli.calibrations import calibration_for, checked_policy
from mlx_kv.cli.config import short_name
from mlx_kv.cli.inspect_scores import blocks, draw_scores, scores_json, scores_table, tenths
from mlx_kv.cli.notices import say
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
  mlx-kv inspect --prompt-file notes.py --kv-budget 256 --kv-share layer --attention
  mlx-kv inspect --prompt-file notes.py --kv-budget 256 --scores key_diff,recent,random --plot scores.png
  git show | mlx-kv inspect - --kv-budget 256 --kv-score key_norm --json -
"""
EVICTED = "·"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
LOOKING = 64  # last tokens whose attention is shown
SETTINGS = ("budget", "share", "sinks", "keep_recent")  # that JSON tells
TOLD = ("model", *SETTINGS)  # by which a file of this command is known
ABOUT_ATTENTION = f"attention: of what the last {LOOKING} tokens look at with all tokens, the share that is kept"


# --- rows -------------------------------------------------------------------------------------------------------------


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
        counts = tenths(same[:1], found.tokens)
        share = same[0].attention_kept
        told = [] if not seen else ["hidden" if share is None else f"{100 * share:.1f}%"]
        held = sorted({len(head.positions) for head in same[0].heads})
        kept = f"{held[0]:,}" if len(held) == 1 else f"{held[0]:,}-{held[-1]:,}"
        lines.append([name, kept, f"{found.tokens - round(same[0].kept):,}", *told, blocks(counts, found.tokens)])
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


def inspection_json(model: str, policy: CachePolicy, found: Mapping[str, Inspection], several: bool) -> str:
    told = {"model": model, **{name: getattr(policy, name) for name in SETTINGS}}
    if several:
        return scores_json(told, found)
    (one,) = found.values()
    return json.dumps({**told, "score": policy.score, **asdict(one)}, allow_nan=False)


def shared_out(policy: CachePolicy) -> str:
    """How a budget is shared out to heads and layers, in words."""
    layers = policy.layers if isinstance(policy.layers, str) else "a table"
    return f"share={policy.share}" + ("" if layers == "uniform" else f", layers={layers}")


def draw(name: str, policy: CachePolicy, found: Mapping[str, Inspection], several: bool, file: Path) -> None:
    one = next(iter(found.values()))
    title = f"{name}, {one.kept:,} of {one.tokens:,}"
    if several:
        draw_scores(f"{title}, {shared_out(policy)}", policy, found, file)
        return
    from mlx_kv.plots.kept import kept_positions

    layers = [[(head.positions, head.scores) for head in layer.heads] for layer in one.layers]
    shares = None if one.attention is None else [layer.attention_kept for layer in one.layers]
    title = f"{title} by {policy.score}, {shared_out(policy)}"
    save_figure(
        kept_positions(title, layers, one.tokens, policy.sinks, policy.keep_recent, one.attention, shares), file
    )


def draw_heads(name: str, policy: CachePolicy, found: Inspection, file: Path) -> None:
    from mlx_kv.plots.heads import tokens_by_head

    held = [[len(head.positions) for head in layer.heads] for layer in found.layers]
    title = f"{name}, {found.tokens:,} tokens, {shared_out(policy)}"
    save_figure(tokens_by_head(title, held, found.kept), file)


# --- the command ------------------------------------------------------------------------------------------------------


def read_scores(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Names, separated by commas; none where it is not given."""
    return () if value is None else tuple(dict.fromkeys(word.strip() for word in value.split(",")))


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
    "--plot-heads",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw how many tokens each head holds: .png, .svg or .pdf.",
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
@click.option(
    "--scores",
    callback=read_scores,
    metavar="NAME,NAME",
    help="Compare these scores: a row for each, in the table and in the figure.",
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
    plot_heads: Path | None,
    json_file: str | None,
    attention: bool,
    scores: tuple[str, ...],
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
    if scores and as_text:
        raise click.UsageError("--text shows what one score keeps: leave out --scores")
    to_json = None if json_file in (None, "-") else Path(str(json_file))
    if to_json is not None:
        check_json(to_json, TOLD, force)
    for figure in (plot, plot_heads):
        if figure is not None:
            check_plot(figure)
    if scores and plot_heads is not None:
        raise click.UsageError("--plot-heads shows what one score keeps: leave out --scores")
    text = read_prompt(prompt, prompt_file, source)
    for score in scores or [settings["kv_score"]]:  # refuses bad settings before anything is loaded
        checked_policy(**settings | {"kv_score": score})

    from mlx_kv.evaluation.inspection import inspect_policies
    from mlx_kv.generation.encoding import encode_text
    from mlx_kv.generation.prefill import prefill_step
    from mlx_kv.generation.rereading import Instructions
    from mlx_kv.mlxlm.convert import make_prompt_cache
    from mlx_kv.mlxlm.loading import load

    network, tokenizer = load(model_path(model))
    policy = make_policy(calibration_for(network, model, settings, recommend=False), **settings)
    policies = {score: replace(policy, score=score) for score in scores} or {str(policy.score): policy}
    tokens = encode_text(tokenizer, text, plain=ignore_chat_template)
    note_context(network, len(tokens))
    step = prefill_step(network, make_prompt_cache(network, policy), prefill_step_size)
    reading: Any = {"prefill_step_size": step, "attention_of": LOOKING if attention else 0}
    with prefill_bar(len(tokens) * (len(policies) + attention), step) as advance:
        asked = [Instructions.for_policy(one, tokenizer, network) for one in policies.values()]
        each = inspect_policies(network, tokens, list(policies.values()), progress=advance, asked=asked, **reading)
    found = dict(zip(policies, each, strict=True))
    evicted = each[0].share_evicted(layer)  # refuses a layer that does not exist before anything is written
    say_notes(policy, each[0])

    name = short_name(model)
    if plot is not None:
        draw(name, policy, found, bool(scores), plot)
    if plot_heads is not None:
        draw_heads(name, policy, each[0], plot_heads)
    if to_json is not None:
        check_json(to_json, TOLD, force)  # it may have come meanwhile
        save_json(inspection_json(model, policy, found, bool(scores)), to_json)
    if as_text:
        dim = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        marked_text = text_lines(tokenizer, tokens, evicted, dim)
        click.echo(marked_text, nl=not marked_text.endswith("\n"), color=dim)
    elif json_file == "-":
        click.echo(inspection_json(model, policy, found, bool(scores)))
    else:
        first, budget = each[0], f"budget {policy.budget:,}"
        by = [shared_out(policy)] if scores else [f"score {policy.score}", shared_out(policy)]
        times = [] if scores else [f"{first.compactions:,} compaction{'' if first.compactions == 1 else 's'}"]
        rows = scores_table(found) if scores else table(first)
        lines = [f"{name}: {', '.join([f'{first.tokens:,} tokens', budget, *by, *times])}", ""]
        lines += [f"  {line}" for line in rows]
        lines += ["", f"  {ABOUT_ATTENTION}"] if attention else []
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
        say(f"note: {what} a window or a state instead of a budget, not listed")
