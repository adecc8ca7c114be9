"""`mlx-kv batch`: a file of prompts in, a file of answers out; started again, it does the lines that are missing."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Literal

import click

from mlx_kv.cli.auto_policy import AutoPolicyOptions, auto_policy_options
from mlx_kv.cli.decoding import DraftOptions, draft_options, sampling_options
from mlx_kv.cli.help import command, option
from mlx_kv.cli.model import ModelOptions
from mlx_kv.cli.options import LeadersFile, options
from mlx_kv.cli.output import say
from mlx_kv.cli.prompt import prefill_option
from mlx_kv.cli.ranks import Machine, on_each_rank
from mlx_kv.generation.settings import SamplingSettings

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlx_kv.cli.batch_files import InputScan
    from mlx_kv.generation.engine import Engine
    from mlx_kv.generation.statistics import SpeculationStatistics
    from mlx_kv.policy import CachePolicy

EXAMPLES = """
\b
Examples:
  mlx-kv batch --prompts prompts.jsonl --output answers.jsonl
  mlx-kv batch --prompts prompts.jsonl --output answers.jsonl --max-batch-size 16 --kv-bits 8
  mlx-kv batch --prompts prompts.jsonl --output answers.jsonl --draft suffix
  mlx-kv batch --prompts prompts.jsonl --output answers.jsonl --draft-model reference
  mlx-kv batch --prompts prompts.jsonl --output answers.jsonl --max-tokens 64 --overwrite
  generate-prompts | mlx-kv batch --prompts - --output - | sort-answers
  mlx.launch -n 2 mlx-kv batch --prompts prompts.jsonl --output answers.jsonl
"""
BATCHES_AHEAD = 2  # of prompts that wait for a place: a batch of short answers empties at once
JSONL = LeadersFile(exists=True, dir_okay=False, allow_dash=True)


@command(epilog=EXAMPLES, short_help="Continue many prompts, from a file into a file.")
@options(ModelOptions, "model", "name")
@option(
    "--prompts",
    "prompts_file",
    type=JSONL,
    required=True,
    metavar="FILE",
    section="Files",
    summary="JSON object per line; - is stdin.",
    help="File with a JSON object per line; - is stdin.",
)
@option(
    "--output",
    "output_file",
    type=LeadersFile(dir_okay=False, allow_dash=True),
    required=True,
    metavar="FILE",
    section="Files",
    summary="File for the answers; - is stdout.",
    help="File for the answers, a line each; answers that it has are not made again. - is stdout.",
)
@option(
    "--overwrite",
    is_flag=True,
    section="Files",
    summary="Replace answers of other settings.",
    help="Replace answers to another prompt or of other settings.",
)
@option(
    "--max-batch-size",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    metavar="N",
    section="Sampling",
    summary="Maximum prompts in a batch.",
    help="Maximum prompts in a batch.",
)
@option("--ignore-chat-template", is_flag=True, section="Files", help="Continue texts as plain text.")
@option(
    "--max-tokens",
    type=click.IntRange(1, 2**31 - 1),
    default=256,
    show_default=True,
    metavar="N",
    section="Sampling",
    summary="Maximum tokens of an answer.",
    help="Maximum tokens of an answer, for lines that don't set it.",
)
@sampling_options
@prefill_option()
@draft_options
@auto_policy_options
@on_each_rank
def batch(
    machine: Machine,
    model: ModelOptions,
    prompts_file: str,
    output_file: str,
    overwrite: bool,
    max_batch_size: int,
    ignore_chat_template: bool,
    max_tokens: int,
    sampling: SamplingSettings,
    prefill_step_size: int | None,
    drafts: DraftOptions,
    policy: AutoPolicyOptions,
) -> int:
    """Continue many prompts at once, from a file into a file.

    Each line of --prompts is {"prompt": a text or a list of token ids, "max_tokens": N, "id": a text or a number}. Only
    the prompt is required; the default id is the line number. Run again after an interrupt, it continues with the
    missing lines. Invalid lines are reported and skipped: the exit code is then 1.
    """
    before_loading = policy.before_loading  # bad settings are refused before anything is loaded

    def start() -> Started:
        """Loads the model and makes an engine; ranks but the first follow it to its end."""
        from mlx_kv.generation.engine import make_engine
        from mlx_kv.generation.statistics import SpeculationStatistics
        from mlx_kv.generation.two_pass_prefill import Instructions

        network, tokenizer = machine.load()
        cache_policy = policy.for_model(network, tokenizer, model.name)
        speculation = SpeculationStatistics() if drafts.enabled else None
        engine = machine.lead_or_follow(
            partial(
                make_engine,
                network,
                set(tokenizer.eos_token_ids),
                cache_policy,
                max_batch_size,
                prefill_step_size,
                drafts.load_model() if machine.leads else None,
                statistics=speculation,
                instructions=Instructions.for_policy(cache_policy, tokenizer, network),
                **vars(drafts.settings),
            )
        )
        return Started(engine, network, tokenizer, speculation)

    answer_settings: dict[str, Any] = {
        "model": model.name,
        "plain": ignore_chat_template,
        "policy": answer_policy(before_loading) | policy.measured,
    }  # for the digest of an answer
    answer_settings |= answer_sampling(sampling)
    if not machine.leads:
        start()
        return 0
    check_files(prompts_file, output_file)
    return run_file(
        start,
        answer_settings,
        prompts_file,
        output_file,
        overwrite,
        (1 + BATCHES_AHEAD) * max_batch_size,
        ignore_chat_template,
        max_tokens,
        sampling,
    )


@dataclass(frozen=True)
class Started:
    """What a run needs once there is something to do."""

    engine: Engine
    model: nn.Module
    tokenizer: Any
    speculation: SpeculationStatistics | None


def check_files(prompts_file: str, output_file: str) -> None:
    """Refuses files that a run cannot read twice, or would write over."""
    if prompts_file != "-" and not os.path.isfile(prompts_file):
        raise click.UsageError(f"--prompts {prompts_file} is not a regular file: give one that can be read twice, or -")
    both = "-" not in (prompts_file, output_file)
    if both and os.path.exists(output_file) and os.path.samefile(output_file, prompts_file):
        raise click.UsageError(f"--output {output_file} is the file of prompts: give another one")


def run_file(
    start: Callable[[], Started],
    answer_settings: dict[str, Any],
    prompts_file: str,
    output_file: str,
    overwrite: bool,
    ahead: int,
    ignore_chat_template: bool,
    max_tokens: int,
    sampling: SamplingSettings,
) -> int:
    """From one file into the other; the exit code. The engine is started when there is something to do."""
    from mlx_kv.cli.batch_files import InputFile, OutputFile, OutputStream
    from mlx_kv.cli.batch_run import Progress, PromptEncoder, run

    progress = Progress()
    answers: OutputFile | OutputStream
    try:
        answers = OutputStream(standard("stdout")) if output_file == "-" else OutputFile(output_file)
    except OSError as error:
        raise click.UsageError(f"cannot open {error.filename or output_file}: {error.strerror}") from error
    where = "stdout" if output_file == "-" else output_file
    with answers, spooled_stdin() if prompts_file == "-" else open(prompts_file, "rb") as file:
        prompts = InputFile(file, max_tokens, answer_settings)
        scan = prompts.scan(answers.done)
        if scan.changed and not overwrite:
            raise click.UsageError(say_changed(scan, where))
        for number, reason in scan.bad:
            progress.bad_line(number, reason)
        progress.skipped = scan.skipped
        if not scan.todo:
            held = f"{scan.skipped:,} of {scan.skipped + progress.bad:,} lines are in {where}"
            say(f"nothing to do: {held}")
            return 1 if progress.bad else 0
        at = start()
        if scan.changed:
            with written(where):
                answers.drop({name for _, name in scan.changed})
        encoder = PromptEncoder(at.model, at.tokenizer, ignore_chat_template, sampling)
        progress.begin(len(scan.todo))
        try:
            for request, prompt_tokens, tokens in run(at.engine, prompts, scan.todo, encoder, ahead, progress):
                answer = {
                    "text": "".join(token.text for token in tokens),
                    "tokens": [token.token for token in tokens],
                    "finish_reason": tokens[-1].finish_reason,
                    "prompt_tokens": prompt_tokens,
                    "generation_tokens": len(tokens),
                }
                with written(where):
                    answers.append(request, answer)
                progress.finished()
        finally:
            progress.end(encoder, at.speculation)
    return 1 if progress.bad else 0


def standard(name: Literal["stdin", "stdout"]) -> BinaryIO:
    """The bytes of a standard stream."""
    stream = getattr(sys, name)
    if stream is None:
        raise click.UsageError(f"{name} is closed: give a file instead of -")
    return stream.buffer  # type: ignore[no-any-return]


def spooled_stdin() -> IO[bytes]:
    """All of standard input, in a file that can be read twice and has no name."""
    file = tempfile.TemporaryFile()  # noqa: SIM115, closed by who asks for it
    with written("a copy of stdin"):
        shutil.copyfileobj(standard("stdin"), file)
    return file


@contextlib.contextmanager
def written(where: str) -> Iterator[None]:
    """What the system says about a file of answers becomes one line."""
    try:
        yield
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # else Python says it once more, when it flushes at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.UsageError(f"cannot write {where}: {error.strerror}") from error


def answer_policy(policy: CachePolicy) -> dict[str, Any]:
    """The settings of a policy that an answer depends on: all but the growth of memory."""
    return {name: value for name, value in policy.settings().items() if name != "growth"}


def answer_sampling(sampling: SamplingSettings) -> dict[str, Any]:
    """The sampling settings that an answer depends on, by option; those at their default are left out."""
    changed = sampling.changed
    names = ["repetition_penalty", "presence_penalty", "frequency_penalty"]
    if sampling.temperature > 0:
        names += ["top_k", "min_p", "xtc_probability"]
        drawn = {"temp": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
        drawn |= {"xtc_threshold": sampling.xtc_threshold} if sampling.xtc_probability else {}
    else:
        drawn = {}
    return drawn | {name: changed[name] for name in names if name in changed}


def say_changed(scan: InputScan, output: str) -> str:
    number, name = scan.changed[0]
    others = f" (and {len(scan.changed) - 1:,} more)" if len(scan.changed) > 1 else ""
    return (
        f"line {number}{others}: id {json.dumps(name)} is in {output} with another prompt or other settings: "
        "give another id or --output, or --overwrite to do it again"
    )
