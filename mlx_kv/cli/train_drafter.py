"""`mlx-kv train-drafter`: trains a head that drafts for a model; reports how many of its tokens would be accepted."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from mlx_kv.bundled import FOLDER as BUNDLED
from mlx_kv.bundled import model_path
from mlx_kv.cli.model import ModelOptions, short_name
from mlx_kv.cli.options import command, json_option, option, options
from mlx_kv.cli.output import Progress, aligned, file_errors, human_bytes, say

EXAMPLES = """
\b
Examples:
  mlx-kv train-drafter models/smollm2
  mlx-kv train-drafter models/smollm2 --tokens 200000 --texts notes/
  mlx-kv generate --model models/smollm2 --prompt "What is rain?" --draft mtp
"""
STEP = 1000  # tokens of a step of the progress bar


@command("train-drafter", epilog=EXAMPLES, short_help="Train a head that drafts, for --draft mtp.")
@click.argument("name", metavar="MODEL")
@options(ModelOptions, "loading", "trust_remote_code")
@option(
    "--tokens",
    type=click.IntRange(min=1),
    default=1_000_000,
    show_default=True,
    metavar="N",
    section="Training",
    summary="Tokens to train on.",
    help="Tokens to train on. The model reads each, and writes about half of them.",
)
@option(
    "--vocabulary",
    type=click.IntRange(min=1),
    default=8192,
    show_default=True,
    metavar="N",
    section="Training",
    summary="Tokens that it guesses, the frequent ones.",
)
@option(
    "--texts",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    section="Training",
    summary="Directory of text files to read besides.",
    help="Directory of text files to read besides.  [default: texts of Python's and of this package]",
)
@option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    section="Output",
    summary="File for the head.",
    help="File for the head.  [default: MODEL.kvdraft.safetensors beside the directory of the model]",
)
@option("--force", is_flag=True, section="Output", help="Replace a file that is no head, too.")
@json_option
def train_drafter_command(
    name: str,
    loading: ModelOptions,
    tokens: int,
    vocabulary: int,
    folder: Path | None,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Train a head that drafts for a model: one layer, which guesses what the model says next from its states.

    With --draft mtp or auto the other commands draft with it. It learns from the model's own answers and from texts;
    the model itself does not change. An interrupted run continues when the same command is given again.
    """
    started = time.perf_counter()
    directory = Path(model_path(name))
    if output is None and (not directory.is_dir() or directory.parent == BUNDLED):
        raise click.UsageError(f"{name} is no directory of yours, beside which a head could be: give --output")

    import mlx.core as mx

    from mlx_kv.calibration.drafter import train_drafter
    from mlx_kv.calibration.texts import texts_in
    from mlx_kv.files.atomic_write import check_replaceable
    from mlx_kv.mlxlm.head_files import head_file, is_draft_head, save_draft_head

    output = output or head_file(directory)
    with file_errors(f"write {output}"):
        check_replaceable(output, is_draft_head, "draft head", force, "--force")
    network, tokenizer = replace(loading, name=name).load()
    texts = None
    if folder is not None:
        texts, skipped = texts_in(folder, tokenizer)
        for line in skipped[:5]:
            say(f"note: left out: {line}")
    partial = output.with_name(output.name.removesuffix(".safetensors") + ".partial")  # until it is complete
    done = 0
    with Progress([1.0] * -(-tokens // STEP), "k token") as bar, file_errors(f"write {output}"):

        def progress(read: int, total: int) -> None:
            nonlocal done
            done = read
            while bar.done < read // STEP:
                bar.step(f"training for {short_name(name)}")

        try:
            head = train_drafter(
                network, tokenizer, texts, tokens=tokens, vocabulary=vocabulary, progress=progress, resume=partial
            )
        except KeyboardInterrupt:
            if partial.is_dir():
                say(f"{done:,} of {tokens:,} tokens are done, in {partial}: run the command again to continue")
            raise
        save_draft_head(output, head, network, force=force)
    seconds, peak = time.perf_counter() - started, mx.get_peak_memory()
    if as_json:
        summary = {"model": name, "file": str(output), "seconds": round(seconds, 2), "peak_bytes": peak, **head.details}
        click.echo(json.dumps(summary))
        return
    rows: list[list[str]] = [["tokens trained on", "first", "second", "third"]]
    curve: Any = head.details["acceptance"]
    rows += [[f"{count:,}", *(f"{100 * rate:.0f}%" for rate in rates)] for count, rates in curve]
    lines = ["accepted    of held-out answers, of those before which all are right"]
    lines += [f"            {line}" for line in aligned(rows)]
    lines.append(f"time        {seconds / 60:.1f} min, {human_bytes(peak)} at the peak")
    lines.append(f"file        {human_bytes(output.stat().st_size)}: {output}")
    click.echo("\n".join(lines), err=True)
