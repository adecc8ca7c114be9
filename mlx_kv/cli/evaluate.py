"""`mlx-kv eval`: how well a model still answers when its cache keeps only part of a context.

Decides what its options mean, and which text is read unless told otherwise. Knows nothing about how measurements are
made, nor how they line up (`evaluate_tables`).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_kv.bundled import model_path
from mlx_kv.cli.calibrations import calibration_for
from mlx_kv.cli.codec_options import codec_options, codec_settings, in_words
from mlx_kv.cli.config import short_name
from mlx_kv.cli.evaluate_tables import by_budget, by_layer, by_part, draw
from mlx_kv.cli.options import model_option
from mlx_kv.cli.output import check_plot
from mlx_kv.cli.progress import Progress

if TYPE_CHECKING:
    from mlx_kv.evaluation.results import Measurement, Result, Settings

EXAMPLES = """
\b
Examples:
  mlx-kv eval
  mlx-kv eval --budgets 128,256 --scores key_diff,random --tasks passkey,recall --json
  mlx-kv eval --tasks copy --share head --kv-bits 8,4 --seeds 5
  mlx-kv eval --tasks perplexity --text notes.py --plot quality.png
  mlx-kv eval --model mlx-community/Qwen3-0.6B-4bit --rows 8 --seeds 1
  mlx-kv eval --model build/smollm2 --tasks needle,chat --question both --context 1024 --rows 2 --keep-recent 64
"""
# The bundled reference model has read none of these: tools/reference_corpus.py held them out, by a hash of their paths.
HELD_OUT = ("concurrent.futures.process", "multiprocessing.connection")
BUNDLED = "recall model, and reference model for perplexity"
SEEN = {"unseen": (False,), "seen": (True,), "both": (False, True)}
ABOUT = """\
A context is compressed before its questions are seen; mean ± standard deviation of the seeds. full cache: nothing is
evicted. Nats per token: those of the full cache, and what others add to them, seed by seed. random and key_norm_high
(key_norm with its sign reversed) are controls."""


def split(value: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in value.split(",")))


def read_budgets(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Numbers of tokens, separated by commas."""
    words = split(value)
    for word in words:
        if not (word.isascii() and word.isdecimal() and len(word) <= 9 and int(word) >= 1):
            raise click.BadParameter(f"{word!r} is no budget: give tokens from 1 up, such as 64,128,256")
    return tuple(sorted({int(word) for word in words}))


def read_names(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    return split(value)


def read_text(file: Path | None) -> str:
    """The text that is predicted.

    Raises:
        click.UsageError: it is not there, or no text.
    """
    places = [file] if file is not None else []
    if file is None:
        specs = [importlib.util.find_spec(name) for name in HELD_OUT]
        places = [Path(spec.origin) for spec in specs if spec is not None and spec.has_location and spec.origin]
    try:
        texts = [place.read_text(encoding="utf-8") for place in places]
    except UnicodeError as error:
        raise click.UsageError(f"{file or 'Python itself'} is not UTF-8 text: give another file with --text") from error
    except OSError as error:
        raise click.UsageError(f"cannot read {error.filename}: {error.strerror}; give a file with --text") from error
    if not texts:
        raise click.UsageError("this Python comes without its source: give a file with --text")
    return "\n".join(texts)


class Runs:
    """What is to be measured, and what was: all tasks, each on the model that it is for.

    Attributes:
        work: tokens that are read for each measurement.
        found: measurements, by task.
        unfinished: the task that is being measured, if any.

    Raises:
        ValueError: as `evaluate`; all tasks are checked before the first begins.
    """

    def __init__(
        self, model: str | None, tasks: Sequence[str], settings: Settings, text: str, calibration: str | None
    ) -> None:
        from mlx_kv.evaluation.evaluate import evaluate, tokens_read
        from mlx_kv.mlxlm.loading import load

        loaded: dict[str, Any] = {}
        self.work: list[int] = []
        self.found: dict[str, list[Measurement]] = {}
        self.unfinished: str | None = None
        self._runs = {}
        for task in tasks:
            name = model or ("reference" if task == "perplexity" else "recall")
            if name not in loaded:
                loaded[name] = load(model_path(name))
            network, tokenizer = loaded[name]
            if any(settings.needs_calibration(score) for score in settings.scores):
                found = calibration_for(network, name, {"kv_calibration": calibration}, recommend=False)
                if found is None:
                    raise click.UsageError(
                        f"fitted and calibrated need a calibration of {name}: run mlx-kv calibrate {name}, or give "
                        "--kv-calibration FILE"
                    )
                settings = replace(settings, calibration=found)
            self._runs[task] = evaluate(network, tokenizer, task, settings, text)
            self.work += tokens_read(tokenizer, task, settings)

    def measure(self, progress: Progress) -> Iterator[str]:
        """The name of each task when all of it is measured."""
        for task, run in self._runs.items():
            self.unfinished, found = task, self.found.setdefault(task, [])
            for each in run:
                found.append(each)
                progress.step(each.task)
            self.unfinished = None
            yield task

    def results(self, task: str | None = None) -> list[Result]:
        """Of one task, or of all, as far as it was measured."""
        from mlx_kv.evaluation.results import summary

        found = self.found.values() if task is None else [self.found[task]]
        return summary(list(chain.from_iterable(found)))


@click.command("eval", epilog=EXAMPLES)
@model_option(
    metavar="PATH_OR_HUB_ID",
    help="A bundled model, a directory or a hub id, for all tasks.  [default: reference for perplexity, recall for the "
    "others]",
)
@click.option(
    "--budgets",
    default="64,128,256",
    show_default=True,
    metavar="N,N",
    callback=read_budgets,
    help="Tokens that full-attention layers keep of each context.",
)
@click.option(
    "--scores",
    default="key_diff,key_norm,recent,random,key_norm_high",
    show_default=True,
    metavar="NAME,NAME",
    callback=read_names,
    help="What decides which tokens matter; NAME@ALLOCATION compares allocations: key_diff@calibrated, fitted@global.",
)
@click.option(
    "--tasks",
    default="passkey,recall,copy,perplexity,correlation",
    show_default=True,
    metavar="NAME,NAME",
    callback=read_names,
    help="What is asked; correlation compares scores with attention. Of language models also needle, needles, "
    "many_needles, tracking, passages, code, editing, chat.",
)
@click.option("--seeds", type=int, default=3, show_default=True, metavar="N", help="Repetitions with other contexts.")
@click.option(
    "--rows",
    type=int,
    default=32,
    show_default=True,
    metavar="N",
    help="Contexts of each seed; an eighth of them for perplexity and correlation.",
)
@click.option("--context", type=int, default=512, show_default=True, metavar="N", help="Tokens of a context.")
@click.option(
    "--keep-recent",
    type=int,
    default=16,
    show_default=True,
    metavar="N",
    help="So many newest tokens are never evicted; nothing that is asked for lies there.",
)
@click.option(
    "--share",
    type=click.Choice(["layers", "layer", "head", "adaptive"]),
    help="Keep the same tokens in all layers, in all heads of a layer, or each head its own; adaptive: heads of a "
    "layer compete.  [default: layers, or what --layers needs]",
)
@click.option(
    "--layers",
    type=click.Choice(["uniform", "pyramid", "calibrated", "global"]),
    default="uniform",
    show_default=True,
    help="How a budget is allocated to layers and heads, for scores that name no other.",
)
@click.option(
    "--kv-calibration",
    "calibration",
    metavar="FILE",
    help="What mlx-kv calibrate measured, for fitted and calibrated.  [default: found for the model]",
)
@click.option(
    "--question",
    type=click.Choice(list(SEEN)),
    default="unseen",
    show_default=True,
    help="Whether questions of needle, chat and their like are seen before the context is compressed.",
)
@click.option(
    "--rolling",
    is_flag=True,
    help="Have caches of needle, chat and their like compact while the context is read, as they do in decoding.",
)
@codec_options
@click.option(
    "--text",
    "text_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="What perplexity is measured on.  [default: two modules of Python's library that the reference model has not "
    "read; another model may have]",
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Draw it: .png, .svg or .pdf."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, accuracies from 0 to 1.")
def evaluate_command(
    model: str | None,
    tasks: tuple[str, ...],
    kv_bits: Any,
    kv_codec: Any,
    kv_rotate: bool,
    kv_residual: int,
    text_file: Path | None,
    plot: Path | None,
    as_json: bool,
    question: str,
    calibration: str | None,
    **options: Any,
) -> None:
    """Measure what a model still finds in a cache of a budget: one key, many, a string, the next word of a text.

    The context is compressed before the questions are seen. Scores are compared with the full cache and with each
    other, by accuracy, by nats per token, and by how they rank tokens against the attention that those receive.
    """
    if plot is not None:
        check_plot(plot)

    from mlx_kv.evaluation.evaluate import TASKS
    from mlx_kv.evaluation.results import Settings

    stored = codec_settings(kv_bits, kv_codec, kv_rotate, kv_residual)
    settings = Settings(**stored, seen=SEEN[question], **options)  # refuses bad settings before anything is loaded
    for task in tasks:
        if task not in TASKS:
            raise click.UsageError(f"there is no task {task!r}: choose of {', '.join(TASKS)}")
    if text_file is not None and "perplexity" not in tasks:
        raise click.UsageError("--text is for the task perplexity: add it to --tasks")
    if plot is not None and set(tasks) == {"correlation"}:
        raise click.UsageError("--plot draws against budgets, which correlation has none of: add a task")
    text = read_text(text_file) if "perplexity" in tasks else ""
    runs, name = Runs(model, tasks, settings, text, calibration), short_name(model) if model else BUNDLED
    interrupted = False
    with Progress(runs.work, "run") as progress:

        def show(text: str) -> None:
            if not as_json:
                progress.say(text)

        show(f"{name}: {settings_in_words(settings)}")
        try:
            for task in runs.measure(progress):
                show(tables(runs.results(task), settings))
        except KeyboardInterrupt:  # what was measured is not lost
            interrupted = True
            if runs.unfinished is not None and runs.found[runs.unfinished]:
                show(tables(runs.results(runs.unfinished), settings))
            show(f"\nInterrupted: {progress.done} of {len(runs.work)} runs were measured.")
    if as_json:
        results = [asdict(result) for result in runs.results()]
        answer = {
            "model": model,
            "settings": asdict(replace(settings, calibration=None)),
            "complete": not interrupted,
            "results": results,
        }
        click.echo(json.dumps(answer, allow_nan=False))
    else:
        click.echo(f"\n{ABOUT}")
    if interrupted:
        raise KeyboardInterrupt
    if plot is not None:
        with_budgets = [result for result in runs.results() if result.unit != "rank correlation"]
        draw(f"{name}, contexts of {settings.context:,} tokens", with_budgets, settings, plot)


def tables(results: Sequence[Result], settings: Settings) -> str:
    """Of one task, an empty line before each."""
    with_budgets = [result for result in results if result.unit != "rank correlation"]
    of_attention = [result for result in results if result.unit == "rank correlation"]
    lines = ["", *by_budget(with_budgets, settings.budgets, settings.seeds > 1)] if with_budgets else []
    lines += by_part(with_budgets, settings.budgets[len(settings.budgets) // 2])
    lines += by_layer(of_attention)
    return "\n".join(f"  {line}".rstrip() for line in lines)


def settings_in_words(settings: Settings) -> str:
    rows = f"{settings.rows} rows, {settings.seeds} seed{'s' if settings.seeds > 1 else ''}"
    bits = "" if settings.bits is None else f", {in_words(settings.bits)} bits"
    bits += "" if settings.codec is None else f", codec={in_words(settings.codec)}"
    bits += f", the newest {settings.residual_length} as they came" if settings.residual_length else ""
    layers = "" if settings.layers == "uniform" else f", layers={settings.layers}"
    return f"contexts of {settings.context:,} tokens, {rows}, share={settings.share}{layers}{bits}"
