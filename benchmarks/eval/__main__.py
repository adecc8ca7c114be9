"""`python -m benchmarks.eval`: measures how well a model still answers when its cache keeps only part of a context."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from mlx_kv.bundled import model_path
from mlx_kv.cli.model import short_name
from mlx_kv.cli.options import EXISTING_FILE, Parsed, command, option, read_numbers
from mlx_kv.cli.output import Progress, aligned, check_plot, save_figure
from mlx_kv.cli.policy import STORAGE, PolicyOptions, policy_options
from mlx_kv.settings import option_value

if TYPE_CHECKING:
    from .results import Measurement, Result, Settings

EXAMPLES = """
\b
Examples:
  python -m benchmarks.eval
  python -m benchmarks.eval --tasks copy --share head --kv-bits 8,4 --seeds 5
  python -m benchmarks.eval --budgets 128,256 --scores key_diff,random --tasks passkey,recall --json
  python -m benchmarks.eval --tasks perplexity --text notes.py --plot quality.png
  python -m benchmarks.eval --model mlx-community/Qwen3-0.6B-4bit --rows 8 --seeds 1
  python -m benchmarks.eval --model build/smollm2 --tasks needle,chat --question both --context 1024 --rows 2
"""
# The bundled reference model was not trained on these: tools/reference_corpus.py holds them out.
HELD_OUT = ("concurrent.futures.process", "multiprocessing.connection")
BUNDLED = "recall model, and reference model for perplexity"
SEEN = {"unseen": (False,), "seen": (True,), "both": (False, True)}
ABOUT = """\
A context is compressed before its questions are seen; mean ± standard deviation of the seeds. full cache: nothing is
evicted. Nats per token: those of the full cache, and what others add to them, seed by seed. random and key_norm_high
(key_norm with its sign reversed) are controls."""


def split(value: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in value.split(",")))


def read_budgets(text: str) -> tuple[int, ...]:
    """Numbers of tokens, separated by commas."""
    return tuple(sorted(set(read_numbers(text, "a budget: give tokens from 1 up, such as 64,128,256"))))


names_option = partial(option, metavar="NAME,NAME", show_default=True, type=Parsed(split))


def read_text(file: Path | None) -> str:
    """The text for perplexity.

    Raises:
        click.UsageError: it cannot be read, or is no UTF-8 text.
    """
    paths = [file] if file is not None else []
    if file is None:
        specs = [importlib.util.find_spec(name) for name in HELD_OUT]
        paths = [Path(spec.origin) for spec in specs if spec is not None and spec.has_location and spec.origin]
    try:
        texts = [path.read_text(encoding="utf-8") for path in paths]
    except UnicodeError as error:
        raise click.UsageError(f"{file or 'Python itself'} is not UTF-8 text: give another file with --text") from error
    except OSError as error:
        raise click.UsageError(f"cannot read {error.filename}: {error.strerror}; give a file with --text") from error
    if not texts:
        raise click.UsageError("this Python has no source files: give a file with --text")
    return "\n".join(texts)


Runs = dict[str, Iterator["Measurement"]]  # by task


def prepare(
    model: str | None, tasks: Sequence[str], settings: Settings, text: str, calibration: str | None
) -> tuple[Runs, list[int]]:
    """Loads the models and checks all tasks before the first is measured.

    Returns:
        The measurements of each task, made as they are iterated over, and for each measurement the tokens that are
        read for it.

    Raises:
        ValueError: as `evaluate`.
        click.UsageError: a score that needs a calibration, and none was found.
    """
    from mlx_kv.mlxlm.loading import load

    from .measure import evaluate, tokens_read

    loaded: dict[str, Any] = {}
    runs: Runs = {}
    work: list[int] = []
    for task in tasks:
        name = model or ("reference" if task == "perplexity" else "recall")
        if name not in loaded:
            loaded[name] = load(model_path(name))
        network, tokenizer = loaded[name]
        if any(settings.needs_calibration(score) for score in settings.scores):
            found = PolicyOptions(calibration_file=calibration).calibration_for(network, name, recommend=False)
            if found is None:
                raise click.UsageError(
                    f"fitted and calibrated need a calibration of {name}: run mlx-kv calibrate {name}, or give "
                    "--kv-calibration FILE"
                )
            settings = replace(settings, calibration=found)
        runs[task] = evaluate(network, tokenizer, task, settings, text)
        work += tokens_read(tokenizer, task, settings)
    return runs, work


@command("eval", epilog=EXAMPLES, short_help="Measure what a model recalls from a reduced cache.")
@option(
    "--model",
    metavar="PATH_OR_HUB_ID",
    summary="Bundled model, directory or hub id.",
    help="Bundled model, directory or hub id, for all tasks.  [default: reference for perplexity, recall for the "
    "others]",
)
@option(
    "--budgets",
    default="64,128,256",
    show_default=True,
    metavar="N,N",
    type=Parsed(read_budgets),
    summary="Tokens kept of each context.",
    help="Tokens that full-attention layers keep of each context.",
)
@names_option(
    "--scores",
    default="key_diff,key_norm,recent,random,key_norm_high",
    summary="Scores that choose the tokens.",
    help="Scores that choose the tokens; NAME@ALLOCATION compares allocations: key_diff@calibrated.",
)
@names_option(
    "--tasks",
    default="passkey,recall,copy,perplexity,correlation",
    summary="Tasks; --help-all lists them.",
    help="What is asked; correlation compares scores with attention. Of language models also needle, needles, "
    "many_needles, tracking, passages, code, editing, chat.",
)
@click.option("--seeds", type=int, default=3, show_default=True, metavar="N", help="Repetitions with other contexts.")
@option(
    "--rows",
    type=int,
    default=32,
    show_default=True,
    metavar="N",
    summary="Contexts of each seed.",
    help="Contexts of each seed; an eighth of them for perplexity and correlation.",
)
@click.option("--context", type=int, default=512, show_default=True, metavar="N", help="Tokens of a context.")
@option(
    "--keep-recent",
    type=int,
    default=16,
    show_default=True,
    metavar="N",
    help="So many newest tokens are never evicted; nothing that is asked for lies there.",
)
@option(
    "--share",
    type=click.Choice(["layers", "layer", "head", "adaptive"]),
    help="Keep the same tokens in all layers, in all heads of a layer, or each head its own; adaptive: heads of a "
    "layer compete.  [default: layers, or what --layers needs]",
)
@option(
    "--layers",
    type=click.Choice(["uniform", "calibrated"]),
    default="uniform",
    show_default=True,
    help="How a budget is allocated to layers and heads, for scores that name no other.",
)
@option(
    "--kv-calibration",
    "calibration",
    metavar="FILE",
    help="What mlx-kv calibrate measured, for fitted and calibrated.  [default: found for the model]",
)
@option(
    "--question",
    type=click.Choice(list(SEEN)),
    default="unseen",
    show_default=True,
    help="Whether questions of needle, chat and their like are seen before the context is compressed.",
)
@option(
    "--rolling",
    is_flag=True,
    help="Have caches of needle, chat and their like compact while the context is read, as they do in decoding.",
)
@policy_options(PolicyOptions, "storage", *STORAGE)
@option(
    "--text",
    "text_file",
    type=EXISTING_FILE,
    metavar="FILE",
    summary="Text to measure perplexity on.",
    help="Text to measure perplexity on.  [default: two modules of Python's library that the reference model has not "
    "read; another model may have]",
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Draw a figure: .png, .svg or .pdf."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, accuracies from 0 to 1.")
def evaluate_command(
    model: str | None,
    tasks: tuple[str, ...],
    storage: PolicyOptions,
    text_file: Path | None,
    plot: Path | None,
    as_json: bool,
    question: str,
    calibration: str | None,
    **options: Any,
) -> None:
    """Measure what a model recalls from a cache with a budget: keys, copied strings, or the next word of a text.

    The context is compressed before the questions are seen. Scores are compared with the full cache and with each
    other, by accuracy, by nats per token, and by how they rank tokens against the attention that those receive.
    """
    if plot is not None:
        check_plot(plot)

    from .measure import TASKS
    from .results import Settings, summary

    # Bad settings are refused before anything is loaded.
    settings = Settings(**storage.stored(), seen=SEEN[question], **options)
    for task in tasks:
        if task not in TASKS:
            raise click.UsageError(f"there is no task {task!r}: choose of {', '.join(TASKS)}")
    if text_file is not None and "perplexity" not in tasks:
        raise click.UsageError("--text is for the task perplexity: add it to --tasks")
    if plot is not None and set(tasks) == {"correlation"}:
        raise click.UsageError("--plot draws against budgets, which correlation has none of: add a task")
    text = read_text(text_file) if "perplexity" in tasks else ""

    runs, work = prepare(model, tasks, settings, text, calibration)
    name = short_name(model) if model else BUNDLED
    measured: list[Measurement] = []
    interrupted = False
    with Progress(work, "run") as progress:

        def show(text: str) -> None:
            if not as_json:
                tqdm.write(text)

        show(f"{name}: {describe_settings(settings)}")
        first = 0  # of the measurements of a task
        try:
            for run in runs.values():
                for measurement in run:
                    measured.append(measurement)
                    progress.step(measurement.task)
                show(tables(summary(measured[first:]), settings))
                first = len(measured)
        except KeyboardInterrupt:
            interrupted = True
            if measured[first:]:
                show(tables(summary(measured[first:]), settings))
            show(f"\nInterrupted: {progress.done} of {len(work)} runs were measured.")
    results = summary(measured)
    if as_json:
        answer = {
            "model": model,
            "settings": asdict(replace(settings, calibration=None)),
            "complete": not interrupted,
            "results": [asdict(result) for result in results],
        }
        click.echo(json.dumps(answer, allow_nan=False))
    else:
        click.echo(f"\n{ABOUT}")
    if interrupted:
        raise KeyboardInterrupt
    if plot is not None:
        draw(f"{name}, contexts of {settings.context:,} tokens", results, settings, plot)


# --- what it shows ----------------------------------------------------------------------------------------------------


def describe_settings(settings: Settings) -> str:
    rows = f"{settings.rows} rows, {settings.seeds} seed{'s' if settings.seeds > 1 else ''}"
    bits = "" if settings.bits is None else f", {option_value(settings.bits)} bits"
    bits += "" if settings.codec is None else f", codec={option_value(settings.codec)}"
    bits += f", a residual of {settings.residual_length}" if settings.residual_length else ""
    layers = "" if settings.layers == "uniform" else f", layers={settings.layers}"
    return f"contexts of {settings.context:,} tokens, {rows}, share={settings.share}{layers}{bits}"


def tables(results: Sequence[Result], settings: Settings) -> str:
    """The tables of one task, with an empty line before each."""
    tasks = by_task(result for result in results if result.unit != "rank correlation")
    lines = ["", *by_budget(tasks, settings.budgets, settings.seeds > 1)] if tasks else []
    lines += by_part(tasks, settings.budgets[len(settings.budgets) // 2])
    lines += by_layer(by_task(result for result in results if result.unit == "rank correlation"))
    return "\n".join(f"  {line}".rstrip() for line in lines)


def by_task(results: Iterable[Result]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.task, []).append(result)
    return groups


def value_cell(unit: str, mean: float, deviation: float | None = None) -> str:
    """A value and its deviation; accuracies in percent."""
    scale, digits = (100, 1) if unit == "accuracy" else (1, 3)
    spread = "" if deviation is None else f" ± {scale * deviation:.{digits}f}"
    return f"{scale * mean:.{digits}f}{spread}"


def cell(result: Result) -> str:
    """Accuracy, or nats per token: of the full cache, and what others add to them."""
    if result.unit == "accuracy" or result.score is None:
        return value_cell(result.unit, result.mean, result.deviation)
    sign = "+" if result.difference >= 0 else ""
    return sign + value_cell(result.unit, result.difference, result.difference_deviation)


def by_budget(tasks: Mapping[str, Sequence[Result]], budgets: Sequence[int], several_seeds: bool) -> list[str]:
    """A block per task: rows of scores, columns of budgets; "-" where nothing was measured."""
    # Tasks are printed one after another; this row, which is not printed, gives them all the same widths.
    widest = "+0.000" + " ± 0.000" * several_seeds
    lines = [["perplexity, one-shot, nats per token", *[widest] * len(budgets)]]
    for task, results in tasks.items():
        found = {(result.score, result.budget): cell(result) for result in results}
        title = f"{task}, {results[0].unit.replace('accuracy', 'accuracy in %')}"
        lines.append([title, *(f"{budget:,}" for budget in budgets)])
        for score in dict.fromkeys(score for score, _ in found):
            cells = [found.get((score, budget if score else None), "-") for budget in budgets]
            lines.append([f"  {score or 'full cache'}", *cells])
    return aligned(lines)[1:]


def by_part(tasks: Mapping[str, Sequence[Result]], budget: int) -> list[str]:
    """A block per task with parts, at one budget: rows of scores, columns of depths or quarters."""
    lines = []
    for task, results in tasks.items():
        rows = [result for result in results if result.parts and result.budget in (budget, None)]
        if rows:
            cells = [[f"{task} at {budget:,}, accuracy in %", *rows[0].parts]]
            cells += [
                [f"  {r.score or 'full cache'}", *(value_cell(r.unit, v) for v in r.parts.values())] for r in rows
            ]
            lines += ["", *aligned(cells)]
    return lines


def by_layer(tasks: Mapping[str, Sequence[Result]]) -> list[str]:
    """A block per kind of attention: rows of scores, columns of layers."""
    lines = []
    for task, results in tasks.items():
        cells = [[f"{task}, rank correlation", "all layers", *results[0].parts]]
        for result in results:
            parts = [value_cell(result.unit, value) for value in result.parts.values()]
            cells.append([f"  {result.score}", value_cell(result.unit, result.mean, result.deviation), *parts])
        lines += ["", *aligned(cells)]
    return lines


def draw(title: str, results: Sequence[Result], settings: Settings, file: Path) -> None:
    """Draws the tasks with budgets.

    Raises:
        click.UsageError, ValueError: the file cannot be written.
    """
    from .plots import Panel, quality_against_budget

    panels = []
    for task, rows in by_task(result for result in results if result.unit != "rank correlation").items():
        full = next(r for r in rows if r.score is None)
        share = full.unit == "accuracy"
        lines: dict[str, list[tuple[int, float, float]]] = {}
        for r in rows:
            if r.score is not None and r.budget is not None:
                mean, deviation = (r.mean, r.deviation) if share else (r.difference, r.difference_deviation)
                lines.setdefault(r.score, []).append((r.budget, mean, deviation or 0.0))
        name = task if share else f"{task} (full: {full.mean:.2f})"
        panels.append(Panel(name, "accuracy, %" if share else "added nats per token", full.mean * share, lines, share))
    save_figure(quality_against_budget(title, settings.context, panels), file)


def main() -> None:
    """Runs it as a command of mlx-kv does: bad input is one line on stderr and exit code 2."""
    from mlx_kv.cli import main as package

    package.command.add_command(evaluate_command)
    sys.argv[1:1] = ["eval"]
    package.main()


if __name__ == "__main__":
    main()
