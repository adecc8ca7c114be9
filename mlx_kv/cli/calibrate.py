"""`mlx-kv calibrate`: measures a model once, for better budgets and for bits that it bears; reports what they cost."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlx_kv.bundled import model_path
from mlx_kv.cli.model import ModelOptions, short_name
from mlx_kv.cli.options import command, json_option, option, options
from mlx_kv.cli.output import Progress, aligned, file_errors, human_bytes, say

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlx_kv.cache.eviction.calibration import BitsLoss, Calibration

EXAMPLES = """
\b
Examples:
  mlx-kv calibrate mlx-community/Qwen3-0.6B-4bit
  mlx-kv calibrate models/smollm2 --budgets-only
  mlx-kv calibrate models/smollm2 --texts notes/ --output smollm2.kvcal.safetensors
  mlx-kv generate --model models/smollm2 --prompt-file notes.txt --kv-budget 512
"""
MAX_SKIPPED = 5  # files that are listed
TOP_HEADS = 5


def head_lines(calibration: Calibration) -> list[str]:
    """Lines on how the budgets of heads differ."""
    heads = [(x, i, j) for i, row in enumerate(calibration.heads) for j, x in enumerate(row)]
    heads.sort(key=lambda head: (-head[0], head[1:]))
    total, half, summed = sum(x for x, _, _ in heads), 0, 0.0
    while summed < total / 2:
        summed += heads[half][0]
        half += 1
    top = ", ".join(f"{x:.1f} x (layer {i}, head {j})" for x, i, j in heads[:TOP_HEADS])
    return [
        f"heads       {half} of {len(heads)} in {len(calibration.heads)} layers are given half of the tokens",
        f"largest     {top}, of the mean",
    ]


def bits_lines(calibration: Calibration) -> list[str]:
    """Lines on what --kv-bits auto would choose, and the loss of the bits that take the fewest and the most bytes."""

    def in_words(loss: BitsLoss) -> str:
        rotated = " --kv-rotate" if loss.codec else ""
        return (
            f"--kv-bits {loss.keys},{loss.values} --kv-group-size {loss.group_size}{rotated}: {loss.nats:+.4f} ± "
            f"{loss.error:.4f} nats a token, {loss.bytes_per_token:,} bytes a token"
        )

    smallest = calibration.smallest_bits()
    chosen = "none are within 0.01 nats a token" if smallest is None else in_words(smallest)
    ends = (calibration.losses[0], calibration.losses[-1])
    return [f"bits        auto: {chosen}", *(f"            {in_words(loss)}" for loss in ends if loss != smallest)]


def answers_lines(calibration: Calibration) -> list[str]:
    """A table of the answers that are right under budgets, before and after the calibration."""
    from mlx_kv.cache.eviction.calibration import LEGIBLE

    answers = calibration.details["answers"]
    count, context = answers["questions"], answers["context"]
    full = f"{100 * answers['full']:.0f}%"
    rows = [["tokens kept", "before", "after"], [f"{context:,} (all)", full, full]]
    rows += [
        [f"{row['budget']:,}", *(f"{100 * row[name]:.0f}%" for name in ("before", "after"))]
        for row in answers["budgets"]
    ]
    lines = [f"answers     right of {count} about facts in {context:,} tokens of other prose"]
    lines += [f"            {line}" for line in aligned(rows)]
    if answers["full"] < LEGIBLE:
        lines.append("            this model rarely answers with all tokens kept: its answers say little about budgets")
    if calibration.loses_answers:
        lines.append("            worse: --kv-budget does not use this calibration unless --kv-calibration names it")
    return lines


@command("calibrate", epilog=EXAMPLES, short_help="Measure a model once, for better --kv-budget results.")
@click.argument("name", metavar="[MODEL]", required=False)
@option(
    "--model",
    metavar="PATH_OR_HUB_ID",
    section="Model",
    summary="Model, instead of the argument.",
)
@options(ModelOptions, "loading", "adapter_path", "trust_remote_code")
@option(
    "--texts",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    section="Texts",
    summary="Directory of text files to measure on.",
    help="Directory of text files to measure on.  [default: texts of Python's and of this package]",
)
@option(
    "--budgets-only",
    is_flag=True,
    section="Texts",
    summary="Measure budgets alone: one text.",
    help="Measure the budgets of heads on one text: no fitted score, no bits, and no answers in the report.",
)
@option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    section="Output",
    summary="File for the calibration.",
    help="File for the calibration.  [default: MODEL.kvcal.safetensors beside the model, else in the cache folder]",
)
@option("--force", is_flag=True, section="Output", help="Replace a file that is no calibration, too.")
@json_option
def calibrate_command(
    name: str | None,
    model: str | None,
    loading: ModelOptions,
    folder: Path | None,
    budgets_only: bool,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Measure how many tokens each head of a model needs, for --kv-budget, and what bits cost, for --kv-bits auto.

    Reads some texts twice, and reports how many questions are answered right under budgets. An interrupted run
    continues when the same command is given again. The other commands find the file by themselves.
    """
    if (name is None) == (model is None):
        raise click.UsageError("give one model: mlx-kv calibrate MODEL" if name is None else "got two models: give one")
    chosen: str = name or model or ""
    started = time.perf_counter()
    if output is not None:
        check_output(output, force)

    import mlx.core as mx

    from mlx_kv.calibration import calibrate, check_texts
    from mlx_kv.calibration.loss import CANDIDATES, CASES, CONTEXT, TOKENS, measure_answers
    from mlx_kv.calibration.texts import default_texts, single_text, texts_in
    from mlx_kv.files.calibration_file import default_path, save_calibration
    from mlx_kv.files.serialization import model_fingerprint
    from mlx_kv.mlxlm.loading import context_length

    network, tokenizer = replace(loading, name=chosen).load()
    if output is None:
        with file_errors("make the cache folder; give --output FILE"):
            place = chosen if loading.adapter_path else model_path(chosen)
            output = default_path(place, model_fingerprint(network), beside_model=loading.adapter_path is None)
        check_output(output, force)
    if budgets_only and not force:
        check_weights_kept(output, network)
    positions = context_length(network)
    if folder is not None:
        texts, skipped = texts_in(folder, tokenizer, positions)
        for line in skipped[:MAX_SKIPPED]:
            say(f"note: left out: {line}")
        if len(skipped) > MAX_SKIPPED:
            say(f"note: left out: {len(skipped) - MAX_SKIPPED} more files")
        texts = texts[:1] if budgets_only else texts
    else:
        texts = (single_text if budgets_only else default_texts)(tokenizer, positions)
    check_texts(texts, budgets_only)
    partial = output.with_name(output.name.removesuffix(".safetensors") + ".partial")  # until it is complete
    weights = [2.0 * len(text) for text in texts]
    if not budgets_only:
        weights += [float(TOKENS)] * len(CANDIDATES) + [2.0 * CONTEXT] * CASES
    with Progress(weights, "step") as progress, file_errors(f"write {output}"):
        try:
            calibration = calibrate(
                network,
                tokenizer,
                texts,
                budgets_only=budgets_only,
                progress=lambda done, total: progress.step(f"calibrating {short_name(chosen)}"),
                resume=partial,
            )
            if not budgets_only:
                answers = measure_answers(network, tokenizer, calibration, lambda: progress.step("asking questions"))
                calibration = replace(calibration, details={**calibration.details, "answers": answers})
        except KeyboardInterrupt:
            if progress.done:
                done = min(progress.done, len(texts))
                say(f"{done} of {len(texts)} texts are measured, in {partial}: run the command again to continue")
            raise
        save_calibration(output, calibration, force=force)
    seconds, peak = time.perf_counter() - started, mx.get_peak_memory()
    if not as_json:
        print_summary(output, calibration, seconds, peak)
        return
    summary = {
        "model": chosen,
        "file": str(output),
        "name": calibration.name,
        "fingerprint": calibration.fingerprint,
        "seconds": round(seconds, 2),
        "peak_bytes": peak,
        "heads": calibration.heads,
        "losses": [loss._asdict() for loss in calibration.losses],
        "details": dict(calibration.details),
    }
    click.echo(json.dumps(summary, allow_nan=False))


def check_output(output: Path, force: bool) -> None:
    """Checks that the calibration can be written to a file.

    Raises:
        click.UsageError, ValueError: it cannot.
    """
    from mlx_kv.files.atomic_write import check_replaceable
    from mlx_kv.files.calibration_file import is_calibration

    with file_errors(f"write {output}"):
        check_replaceable(output, is_calibration, "calibration", force, "--force")


def check_weights_kept(output: Path, model: nn.Module) -> None:
    """Checks that budgets alone do not replace a calibration with a fitted score and losses of bits.

    Raises:
        click.UsageError: they would.
    """
    from mlx_kv.files.calibration_file import load_calibration

    try:
        fitted = bool(load_calibration(output, model).layers)
    except (OSError, ValueError):
        return
    if fitted:
        raise click.UsageError(
            f"{output} has a fitted score, which --budgets-only would remove: give another --output, or --force"
        )


def print_summary(output: Path, calibration: Calibration, seconds: float, peak: int) -> None:
    """Prints on stderr what was measured, its cost, and the file."""
    details = calibration.details
    took = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"
    lines = [f"texts       {details['texts']}, {details['tokens']:,} tokens, in {took}"]
    lines += head_lines(calibration)
    if "quality" in details:
        fit = details["quality"]
        lines.append(
            f"fit         R2 {fit['r2']:.2f}, rank correlation {fit['spearman']:.2f}, {100 * fit['top_quarter']:.0f}% "
            f"of the top quarter found, on {details['held_out']} held-out texts"
        )
    if calibration.losses:
        lines += bits_lines(calibration)
    if details.get("answers") is not None:
        lines += answers_lines(calibration)
    lines.append(f"memory      {human_bytes(peak)} at the peak")
    lines.append(f"file        {output.stat().st_size / 1000:,.1f} kB: {output}")
    click.echo("\n".join(lines), err=True)
