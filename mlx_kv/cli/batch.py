"""`mlx-kv batch`: a file of prompts in, a file of answers out, and what is missing when it is started again.

Decides the order of a run, and what its options mean. Knows nothing about how lines are read and written
(`batch_input`, `batch_output`), nor how tokens are chosen or kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Literal

import click

from mlx_kv.bundled import model_path
from mlx_kv.cli.decoding import Decoding, decoding_options
from mlx_kv.cli.options import make_policy, model_option, policy_options

if TYPE_CHECKING:
    from mlx_kv.cli.batch_input import InputScan
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
"""
BATCHES_AHEAD = 2  # of prompts that wait for a place: a batch of short answers empties at once
JSONL = click.Path(exists=True, dir_okay=False, allow_dash=True)


@click.command(epilog=EXAMPLES)
@model_option()
@click.option(
    "--prompts",
    "prompts_file",
    type=JSONL,
    required=True,
    metavar="FILE",
    help="A JSON object on each line; - is stdin.",
)
@click.option(
    "--output",
    "output_file",
    type=click.Path(dir_okay=False, allow_dash=True),
    required=True,
    metavar="FILE",
    help="Gets a line for each that is finished; what it already has is not done again. - is stdout, where nothing is.",
)
@click.option("--overwrite", is_flag=True, help="Do lines again that were done with another prompt or other settings.")
@click.option(
    "--max-batch-size", type=click.IntRange(1), default=8, show_default=True, metavar="N", help="Prompts at once."
)
@click.option("--ignore-chat-template", is_flag=True, help="Continue texts as plain text.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1, 2**31 - 1),
    default=256,
    show_default=True,
    metavar="N",
    help="Of lines that don't say.",
)
@decoding_options
@policy_options
def batch(
    model: str,
    prompts_file: str,
    output_file: str,
    overwrite: bool,
    max_batch_size: int,
    ignore_chat_template: bool,
    max_tokens: int,
    decoding: Decoding,
    **settings: Any,
) -> None:
    """Continue many prompts at once, from a file into a file.

    A line of --prompts is {"prompt": a text or a list of token ids, "max_tokens": N, "id": a text or a number}; only
    the prompt must be there, and the id is else the line's number. Killed and started again, it does the lines that
    are missing. Bad lines are reported and passed over: the exit code is then 1.
    """
    if prompts_file != "-" and not os.path.isfile(prompts_file):
        raise click.UsageError(f"--prompts {prompts_file} is no regular file: give one that can be read twice, or -")
    both = "-" not in (prompts_file, output_file)
    if both and os.path.exists(output_file) and os.path.samefile(output_file, prompts_file):
        raise click.UsageError(f"--output {output_file} is the file of prompts: give another one")
    policy, drafts = make_policy(**settings), decoding.drafting.settings  # refuses bad ones before anything is loaded

    from mlx_kv.cli.batch_input import InputFile
    from mlx_kv.cli.batch_output import OutputFile, OutputStream
    from mlx_kv.cli.batch_run import Progress, PromptEncoder, run

    answer_settings: dict[str, Any] = {
        "model": model,
        "plain": ignore_chat_template,
        "policy": answer_policy(policy),
    }  # an answer's digest
    if decoding.temp > 0:
        answer_settings |= {"temp": decoding.temp, "top_p": decoding.top_p, "seed": decoding.seed}
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
            click.echo(f"mlx-kv: nothing to do: {held}", err=True)
            sys.exit(1 if progress.bad else 0)

        from mlx_kv.generation.engine import make_engine
        from mlx_kv.generation.speculation.statistics import SpeculationStatistics
        from mlx_kv.mlxlm.loading import load

        network, tokenizer = load(model_path(model))
        speculation = SpeculationStatistics() if decoding.drafting.asked else None
        engine = make_engine(
            network,
            set(tokenizer.eos_token_ids),
            policy,
            max_batch_size,
            decoding.prefill_step_size,
            decoding.drafting.load_model(),
            statistics=speculation,
            **vars(drafts),
        )
        if scan.changed:
            with written(where):
                answers.drop({name for _, name in scan.changed})
        sampler = decoding.sampler
        encoder = PromptEncoder(network, tokenizer, ignore_chat_template, sampler, decoding.seed)
        ahead = (1 + BATCHES_AHEAD) * max_batch_size
        progress.begin(len(scan.todo))
        try:
            for request, prompt_tokens, tokens in run(engine, prompts, scan.todo, encoder, ahead, progress):
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
            progress.end(encoder, speculation)
    sys.exit(1 if progress.bad else 0)


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
    """What of a policy an answer depends on; how memory grows is none of it."""
    return {name: getattr(policy, name) for name in policy.changed() if name != "growth"}


def say_changed(scan: InputScan, output: str) -> str:
    number, name = scan.changed[0]
    others = f" (and {len(scan.changed) - 1:,} more)" if len(scan.changed) > 1 else ""
    return (
        f"line {number}{others}: id {json.dumps(name)} is in {output} with another prompt or other settings: "
        "give another id or --output, or --overwrite to do it again"
    )
