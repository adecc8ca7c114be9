"""`mlx-kv batch`: a file of prompts in, a file of answers out, and what is missing when it is started again.

Decides the order of a run, which prompts a model refuses, how many wait for a place in the batch, and what is said of
it all. Knows nothing about how lines are read and written (`jobs`), nor how tokens are chosen or kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Literal

import click

from mlx_kv.bundled import draft_path, model_path
from mlx_kv.cli.options import decoding_options, make_policy, model_option, policy_options
from mlx_kv.generation.speculation import DRAFT_TOKENS

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlx_kv.cli.batch_files import Job, Place, Prompts, Survey
    from mlx_kv.generation.engine import Engine
    from mlx_kv.generation.sampling import Sampler
    from mlx_kv.generation.sequence import BatchToken, TokenSequence
    from mlx_kv.generation.speculation.statistics import SpeculationStatistics
    from mlx_kv.policy import CachePolicy

EXAMPLES = """
\b
Examples:
  mlx-kv batch --prompts prompts.jsonl --output answers.jsonl
  mlx-kv batch --prompts prompts.jsonl --output answers.jsonl --max-batch-size 16 --kv-bits 8
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
    temp: float,
    top_p: float,
    seed: int | None,
    prefill_step_size: int | None,
    draft_model: str | None,
    num_draft_tokens: int | None,
    **settings: Any,
) -> None:
    """Continue many prompts at once, from a file into a file.

    A line of --prompts is {"prompt": a text or a list of token ids, "max_tokens": N, "id": a text or a number}; only
    the prompt must be there, and the id is else the line's number. Killed and started again, it does the lines that
    are missing. Bad lines are reported and passed over: the exit code is then 1.
    """
    if num_draft_tokens is not None and draft_model is None:
        raise click.UsageError("--num-draft-tokens needs --draft-model")
    if prompts_file != "-" and not os.path.isfile(prompts_file):
        raise click.UsageError(f"--prompts {prompts_file} is no regular file: give one that can be read twice, or -")
    both = "-" not in (prompts_file, output_file)
    if both and os.path.exists(output_file) and os.path.samefile(output_file, prompts_file):
        raise click.UsageError(f"--output {output_file} is the file of prompts: give another one")
    policy = make_policy(**settings)  # refuses bad settings before anything is loaded

    from mlx_kv.cli.batch_files import Answers, PrintedAnswers, Prompts

    tell: dict[str, Any] = {
        "model": model,
        "plain": ignore_chat_template,
        "policy": in_json(policy),
    }  # an answer's digest
    if temp > 0:
        tell |= {"temp": temp, "top_p": top_p, "seed": seed}
    report = Report()
    answers: Answers | PrintedAnswers
    try:
        answers = PrintedAnswers(standard("stdout")) if output_file == "-" else Answers(output_file)
    except OSError as error:
        raise click.UsageError(f"cannot open {error.filename or output_file}: {error.strerror}") from error
    where = "stdout" if output_file == "-" else output_file
    with answers, spooled_stdin() if prompts_file == "-" else open(prompts_file, "rb") as file:
        prompts = Prompts(file, max_tokens, tell)
        survey = prompts.survey(answers.done)
        if survey.changed and not overwrite:
            raise click.UsageError(say_changed(survey, where))
        for number, reason in survey.bad:
            report.bad_line(number, reason)
        report.skipped = survey.skipped
        if not survey.todo:
            held = f"{survey.skipped:,} of {survey.skipped + report.bad:,} lines are in {where}"
            click.echo(f"mlx-kv: nothing to do: {held}", err=True)
            sys.exit(1 if report.bad else 0)

        from mlx_kv.generation.engine import make_engine
        from mlx_kv.generation.sampling import TemperatureSampler
        from mlx_kv.generation.speculation.statistics import SpeculationStatistics
        from mlx_kv.mlxlm.convert import load

        network, tokenizer = load(model_path(model))
        drafting = None if draft_model is None else load(draft_path(draft_model))[0]
        speculation = None if drafting is None else SpeculationStatistics()
        engine = make_engine(
            network,
            set(tokenizer.eos_token_ids),
            policy,
            max_batch_size,
            prefill_step_size,
            drafting,
            DRAFT_TOKENS if num_draft_tokens is None else num_draft_tokens,
            speculation,
        )
        if survey.changed:
            with written(where):
                answers.drop({name for _, name in survey.changed})
        sampler = TemperatureSampler(temp, top_p) if temp > 0 else None
        reader = Reader(network, tokenizer, ignore_chat_template, sampler, seed)
        ahead = (1 + BATCHES_AHEAD) * max_batch_size
        report.begin(len(survey.todo))
        try:
            for job, prompt_tokens, tokens in finished(engine, prompts, survey.todo, reader, ahead, report):
                answer = {
                    "text": "".join(token.text for token in tokens),
                    "tokens": [token.token for token in tokens],
                    "finish_reason": tokens[-1].finish_reason,
                    "prompt_tokens": prompt_tokens,
                    "generation_tokens": len(tokens),
                }
                with written(where):
                    answers.append(job, answer)
                report.finished()
        finally:
            report.end(reader, speculation)
    sys.exit(1 if report.bad else 0)


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


def in_json(policy: CachePolicy) -> dict[str, Any]:
    """What of a policy an answer depends on; how memory grows is none of it."""
    return {name: getattr(policy, name) for name in policy.changed() if name != "growth"}


def say_changed(survey: Survey, output: str) -> str:
    number, name = survey.changed[0]
    others = f" (and {len(survey.changed) - 1:,} more)" if len(survey.changed) > 1 else ""
    return (
        f"line {number}{others}: id {json.dumps(name)} is in {output} with another prompt or other settings: "
        "give another id or --output, or --overwrite to do it again"
    )


class Reader:
    """Makes of a job what an engine takes, and refuses what this model cannot continue.

    Attributes:
        past: numbers of lines that may go past the context of the model.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, plain: bool, sampler: Sampler | None, seed: int | None
    ) -> None:
        import mlx.core as mx

        from mlx_kv.mlxlm.convert import context_length

        self._tokenizer, self._sampler, self._seed = tokenizer, sampler, seed
        self._plain = plain
        self._vocabulary = model(mx.array([[0]])).shape[-1]  # the graph alone tells
        self.context = context_length(model)
        self.past: list[int] = []

    def start(self, job: Job) -> TokenSequence:
        """Raises ValueError for an empty prompt, one longer than the context, and tokens that the model has not."""
        from mlx_kv.generation.sampling import derived_seed, sampler_of_sequence
        from mlx_kv.generation.sequence import TokenSequence

        tokens = self._tokens(job.prompt)
        if not tokens:
            raise ValueError("the prompt is empty: give at least one token")
        if max(tokens) >= self._vocabulary:
            raise ValueError(
                f"the prompt has the token {max(tokens)}, but the vocabulary has {self._vocabulary:,}: "
                f"give ids from 0 to {self._vocabulary - 1}"
            )
        if self.context is not None and len(tokens) >= self.context:
            raise ValueError(
                f"the prompt has {len(tokens):,} tokens, but this model was made for {self.context:,}: shorten it"
            )
        if self.context is not None and len(tokens) + job.max_tokens > self.context:
            self.past.append(job.number)
        # By its id, so that a line draws the same in any company, and one that is there twice does not.
        seed = None if self._seed is None else derived_seed(self._seed, json.dumps(job.id))
        sampler = sampler_of_sequence(self._sampler, seed, len(tokens))
        return TokenSequence(job.number, tokens, job.max_tokens, self._tokenizer.detokenizer, sampler)

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        from mlx_kv.generation.encoding import encode_text

        return encode_text(self._tokenizer, prompt, self._plain) if isinstance(prompt, str) else prompt


class Report:
    """Counts lines and tokens, and says them on stderr; with a progress bar on a terminal."""

    def __init__(self) -> None:
        self.done = self.skipped = self.bad = self.tokens = 0
        self._bar: Any = None
        self._begun = 0.0

    def begin(self, lines: int) -> None:
        from tqdm import tqdm

        hidden = not sys.stderr.isatty()
        total = lines + self.skipped
        self._bar = tqdm(total=total, initial=self.skipped, unit="line", leave=False, file=sys.stderr, disable=hidden)
        self._begun = time.perf_counter()

    def bad_line(self, number: int, reason: str) -> None:
        self.bad += 1
        if self._bar is not None:
            self._bar.clear()
            self._bar.update()
        click.echo(f"mlx-kv: line {number}: {reason}", err=True)

    def step(self, tokens: int) -> None:
        """So many more tokens."""
        self.tokens += tokens
        self._bar.set_postfix_str(f"{self._rate():,.1f} tokens/s", refresh=False)
        self._bar.update(0)

    def finished(self) -> None:
        """One more line."""
        self.done += 1
        self._bar.update()

    def end(self, reader: Reader, speculation: SpeculationStatistics | None) -> None:
        rate = self._rate()
        self._bar.close()
        if reader.past:
            what = f"{len(reader.past):,} line{'' if len(reader.past) == 1 else 's'} (first {reader.past[0]})"
            click.echo(
                f"mlx-kv: note: {what} may go past the {reader.context:,} tokens that this model was made for", err=True
            )
        click.echo(f"lines       {self.done:,} done, {self.skipped:,} skipped, {self.bad:,} bad", err=True)
        click.echo(f"generation  {self.tokens:7,} tokens  {rate:10,.1f} tokens/s", err=True)
        if speculation is not None:
            share = f"{speculation.accepted:,} of {speculation.drafted:,} ({speculation.acceptance_rate:.0%})"
            click.echo(f"draft       {share} accepted in {speculation.rounds:,} passes of the model", err=True)

    def _rate(self) -> float:
        return self.tokens / max(time.perf_counter() - self._begun, 1e-9)


def finished(
    engine: Engine, prompts: Prompts, places: Sequence[Place], reader: Reader, ahead: int, report: Report
) -> Iterator[tuple[Job, int, list[BatchToken]]]:
    """Each job when its last token has come, with the tokens of its prompt and its own; bad lines are reported.

    Args:
        ahead: prompts that the engine has at once: those of the batch, and those that wait.
    """
    waiting = iter(places)
    running: dict[int, tuple[Job, int, list[BatchToken]]] = {}
    try:
        while True:
            while len(running) < ahead and (place := next(waiting, None)) is not None:
                try:
                    job = prompts.read(place)
                    sequence = reader.start(job)
                    engine.submit(sequence)
                except ValueError as error:
                    report.bad_line(place.number, str(error))
                    continue
                running[place.number] = job, len(sequence.tokens), []
            if not running:
                return
            tokens = engine.step()
            report.step(len(tokens))
            for token in tokens:
                running[token.index][2].append(token)
                if token.finish_reason is not None:
                    yield running.pop(token.index)
    finally:
        engine.close()
