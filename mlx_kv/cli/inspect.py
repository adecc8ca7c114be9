"""`mlx-kv inspect`: shows which tokens of a prompt a budget keeps: as a table, in the text, as JSON or as a figure."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_kv.cli.model import ModelOptions, PromptOptions, note_context, prefill_option, short_name
from mlx_kv.cli.options import Parsed, command, option, options, plot_option
from mlx_kv.cli.output import aligned, check_json, check_plot, prefill_bar, save_figure, save_json, say
from mlx_kv.cli.policy import PolicyOptions, policy_options

if TYPE_CHECKING:
    from mlx_kv.inspection import Inspection, KeptLayer
    from mlx_kv.policy import CachePolicy

EXAMPLES = """
\b
Examples:
  mlx-kv inspect --prompt-file notes.py --kv-budget 256
  mlx-kv inspect --prompt-file notes.py --kv-budget 256 --text
  mlx-kv inspect --prompt-file notes.py --kv-budget 256 --kv-share layer --text --layer 2
  mlx-kv inspect --prompt-file notes.py --kv-budget 256 --kv-share head --plot kept.png
  mlx-kv inspect --prompt-file notes.py --kv-budget 256 --kv-share layer --attention
  mlx-kv inspect --prompt-file notes.py --kv-budget 256 --scores key_diff,recent,random
  git show | mlx-kv inspect - --kv-budget 256 --kv-score key_norm --json -
"""
TENTHS = 10
BLOCKS, NO_BLOCK = "▁▂▃▄▅▆▇█", "·"
EVICTED = "·"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
LOOKING = 64  # last tokens of the prompt whose attention is measured
SETTINGS = ("budget", "share", "sinks", "keep_recent")  # of the policy, in JSON
JSON_KEYS = ("model", *SETTINGS)  # an existing file with these keys may be replaced
ABOUT_ATTENTION = f"attention: of what the last {LOOKING} tokens look at with all tokens, the share that is kept"


# --- the table --------------------------------------------------------------------------------------------------------


def tenths(layers: Sequence[KeptLayer], tokens: int) -> list[float]:
    """The number of kept tokens in each tenth of the text, averaged over layers and heads."""
    heads = [head for layer in layers for head in layer.heads]
    counts = Counter(position * TENTHS // tokens for head in heads for position in head.positions)
    return [counts[tenth] / len(heads) for tenth in range(TENTHS)]


def blocks(counts: Sequence[float], tokens: int) -> str:
    """One block per tenth: full where all tokens were kept, a dot where none was."""
    sizes = Counter(position * TENTHS // tokens for position in range(tokens))
    levels = [-(-count * len(BLOCKS) // sizes[tenth]) if sizes[tenth] else 0 for tenth, count in enumerate(counts)]
    return "".join(BLOCKS[min(int(level), len(BLOCKS)) - 1] if level else NO_BLOCK for level in levels)


def attention_cell(share: float | None) -> str:
    return "hidden" if share is None else f"{100 * share:.1f}%"


def layers_table(inspection: Inspection) -> list[str]:
    """One row per layer; neighbouring layers that kept the same tokens share a row."""
    with_attention = inspection.attention is not None
    header = ["layer", "kept", "evicted", *(["attention"] if with_attention else [])]
    lines, counts = [], []

    def row_key(layer: KeptLayer) -> object:
        return layer.index if with_attention else [head.positions for head in layer.heads]

    for _, group in groupby(inspection.layers, key=row_key):
        same = list(group)
        name = str(same[0].index) if len(same) == 1 else f"{same[0].index}-{same[-1].index}"
        lengths = sorted({len(head.positions) for head in same[0].heads})
        kept = f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,}-{lengths[-1]:,}"
        attention = [attention_cell(same[0].attention_kept)] if with_attention else []
        lines.append([name, kept, f"{inspection.tokens - round(same[0].kept):,}", *attention])
        counts.append(tenths(same[:1], inspection.tokens))
    width = max(len(f"{count:,.0f}") for row in counts for count in row)
    return table_with_tenths(header, lines, counts, inspection.tokens, width)


def scores_table(inspections: Mapping[str, Inspection], tokens: int) -> list[str]:
    """One row per score."""
    header, lines = ["score"], [[score] for score in inspections]
    if any(one.attention_kept is not None for one in inspections.values()):
        header.append("attention")
        lines = [[score, attention_cell(one.attention_kept)] for score, one in inspections.items()]
    return table_with_tenths(header, lines, [tenths(one.layers, tokens) for one in inspections.values()], tokens, 4)


def table_with_tenths(
    header: list[str], lines: Sequence[list[str]], counts: Sequence[Sequence[float]], tokens: int, width: int
) -> list[str]:
    """Lines of a table, each with the kept tokens of each tenth of the text, as blocks and as numbers.

    Args:
        counts: for each line, of each tenth.
        width: of a number.
    """
    rows = [[*header, "tenths", "tokens kept of each tenth of the text"]]
    for line, row in zip(lines, counts, strict=True):
        rows.append([*line, blocks(row, tokens), " ".join(f"{count:{width},.0f}" for count in row)])
    left = (len(header), len(header) + 1)
    return [line.rstrip() for line in aligned(rows, left=(0, *left) if header[0] == "score" else left)]


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


def inspection_json(model: str, policy: CachePolicy, inspections: Mapping[str, Inspection], several: bool) -> str:
    answer = {"model": model, **{name: getattr(policy, name) for name in SETTINGS}}
    if several:
        answer |= {"scores": {score: asdict(one) for score, one in inspections.items()}}
    else:
        (one,) = inspections.values()
        answer |= {"score": policy.score, **asdict(one)}
    return json.dumps(answer, allow_nan=False)


def allocation_in_words(policy: CachePolicy) -> str:
    """How a budget is allocated to heads and layers."""
    layers = policy.layers if isinstance(policy.layers, str) else "a table"
    return f"share={policy.share}" + ("" if layers == "uniform" else f", layers={layers}")


def draw(name: str, policy: CachePolicy, inspection: Inspection, file: Path) -> None:
    """Draws the kept tokens, one row per layer or head."""
    from mlx_kv.plots import kept_positions

    layers = [[(head.positions, head.scores) for head in layer.heads] for layer in inspection.layers]
    shares = None if inspection.attention is None else [layer.attention_kept for layer in inspection.layers]
    title = f"{name}, {inspection.kept:,} of {inspection.tokens:,} by {policy.score}, {allocation_in_words(policy)}"
    protected = policy.sinks, policy.keep_recent
    save_figure(kept_positions(title, layers, inspection.tokens, *protected, inspection.attention, shares), file)


# --- the command ------------------------------------------------------------------------------------------------------


@command("inspect", epilog=EXAMPLES, short_help="Show which tokens of a prompt a budget keeps.")
@options(ModelOptions, "model", "name")
@options(PromptOptions, "prompt")
@option("--ignore-chat-template", is_flag=True, section="Prompt", help="Read the prompt as plain text.")
@prefill_option("Prompt tokens per pass of the model.  [default: as generate, at most max-write]")
@policy_options(PolicyOptions, "settings")
@plot_option
@option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, allow_dash=True),
    metavar="FILE",
    section="Output",
    summary="Write one JSON object; - is stdout.",
    help="Write positions and scores as one JSON object; - is stdout, instead of the table.",
)
@option(
    "--attention",
    is_flag=True,
    section="Output",
    summary="Show the share of attention that is kept.",
    help=f"Read the prompt once more with all of its tokens kept, and show how much of what its last {LOOKING} tokens "
    "look at is left.",
)
@option(
    "--scores",
    type=Parsed(lambda text: tuple(dict.fromkeys(word.strip() for word in text.split(",")))),
    metavar="NAME,NAME",
    section="Output",
    summary="Compare these scores.",
    help="Compare these scores: a row for each, instead of one for each layer.",
)
@option("--force", is_flag=True, section="Output", help="Replace a file that --json did not write, too.")
@option(
    "--text",
    "as_text",
    is_flag=True,
    section="Output",
    summary="Print the prompt, evicted tokens dimmed.",
    help="Print the prompt instead of the table, evicted tokens dimmed; where stdout is no terminal or NO_COLOR is "
    "set, as dots.",
)
@option(
    "--layer",
    type=int,
    metavar="N",
    section="Output",
    summary="The layer for --text.",
    help="The layer for --text.  [default: what most layers and heads evicted]",
)
def inspect_command(
    model: ModelOptions,
    prompt: PromptOptions,
    ignore_chat_template: bool,
    prefill_step_size: int | None,
    plot: Path | None,
    json_file: str | None,
    attention: bool,
    scores: tuple[str, ...] | None,
    force: bool,
    as_text: bool,
    layer: int | None,
    settings: PolicyOptions,
) -> None:
    """Show which tokens of a prompt a budget keeps: a table, the text itself, JSON, or a figure.

    Reads the prompt as `generate` does, then evicts down to --kv-budget, which must be given. Layers are counted among
    those with a budget, those of full attention.
    """
    if settings.budget is None:
        raise click.UsageError("inspect needs --kv-budget: give the number of tokens to keep")
    if layer is not None and not as_text:
        raise click.UsageError("--layer needs --text")
    if json_file == "-" and as_text:
        raise click.UsageError("--json - and --text both write to stdout: give --json a file")
    if scores and as_text:
        raise click.UsageError("--text shows what one score keeps: leave out --scores")
    to_json = None if json_file in (None, "-") else Path(str(json_file))
    if to_json is not None:
        check_json(to_json, JSON_KEYS, force)
    if plot is not None:
        check_plot(plot)
        if scores:
            raise click.UsageError(
                "--plot draws what one score keeps: leave out --scores, or give --json FILE and draw it in a checkout: "
                "python -m benchmarks.eval.plots FILE scores.png"
            )
    text = prompt.read()
    for score in scores or [settings.score]:  # bad settings are refused before anything is loaded
        replace(settings, score=score).checked()

    from mlx_kv.cache.eviction.calibration import FITTED
    from mlx_kv.generation.encoding import encode_text
    from mlx_kv.generation.prefill import Instructions, prefill_step
    from mlx_kv.inspection import inspect_policies
    from mlx_kv.mlxlm.convert import make_prompt_cache

    network, tokenizer = model.load()
    if settings.score is None and scores and FITTED in scores:  # then a calibration is asked for
        settings = replace(settings, score=FITTED)
    policy = settings.policy(settings.calibration_for(network, model.name, recommend=False))
    policies = {score: replace(policy, score=score) for score in scores or ()} or {str(policy.score): policy}
    tokens = encode_text(tokenizer, text, plain=ignore_chat_template)
    note_context(network, len(tokens))
    step = prefill_step(network, make_prompt_cache(network, policy), prefill_step_size)
    reading: Any = {"prefill_step_size": step, "attention_of": LOOKING if attention else 0}
    with prefill_bar(len(tokens) * (len(policies) + attention), step) as advance:
        instructions = [Instructions.for_policy(one, tokenizer, network) for one in policies.values()]
        each = inspect_policies(
            network, tokens, list(policies.values()), progress=advance, instructions=instructions, **reading
        )
    inspections = dict(zip(policies, each, strict=True))
    evicted = each[0].share_evicted(layer)  # refuses a layer that does not exist before anything is written
    if not each[0].evicted:
        say(f"note: nothing is evicted: {len(tokens):,} tokens are within the budget of {policy.budget:,}")
    if others := each[0].without_budget:
        what = "1 layer has" if others == 1 else f"{others:,} layers have"
        say(f"note: {what} a window or a state instead of a budget, not listed")

    name = short_name(model.name)
    if plot is not None:
        draw(name, policy, each[0], plot)
    if to_json is not None:
        check_json(to_json, JSON_KEYS, force)  # it may have come meanwhile
        save_json(inspection_json(model.name, policy, inspections, bool(scores)), to_json)
    if as_text:
        dim = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        marked_text = text_lines(tokenizer, tokens, evicted, dim)
        click.echo(marked_text, nl=not marked_text.endswith("\n"), color=dim)
    elif json_file == "-":
        click.echo(inspection_json(model.name, policy, inspections, bool(scores)))
    else:
        first, budget = each[0], f"budget {policy.budget:,}"
        by = [allocation_in_words(policy)] if scores else [f"score {policy.score}", allocation_in_words(policy)]
        times = [] if scores else [f"{first.compactions:,} compaction{'' if first.compactions == 1 else 's'}"]
        rows = scores_table(inspections, len(tokens)) if scores else layers_table(first)
        lines = [f"{name}: {', '.join([f'{first.tokens:,} tokens', budget, *by, *times])}", ""]
        lines += [f"  {line}" for line in rows]
        lines += ["", f"  {ABOUT_ATTENTION}"] if attention else []
        click.echo("\n".join(lines))
