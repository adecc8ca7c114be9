"""`mlx-kv batch`: a file of prompts in, a file of answers out; started again, it does the lines that are missing.

    {"prompt": "a text" or [token ids], "max_tokens": 256, "id": "a text" or a number}
    {"id": …, "line": …, "digest": …, "text": …, …}

The digest identifies the prompt and the settings of an answer. Lines are counted from 1; empty ones are skipped.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import hashlib
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

import click
import msgspec

from mlx_kv.cli.model import DraftOptions, ModelOptions, draft_lines, generation_options, unseeded_sampler
from mlx_kv.cli.options import LeadersFile, command, option, options
from mlx_kv.cli.output import file_errors, say
from mlx_kv.cli.policy import PolicyOptions
from mlx_kv.cli.ranks import Machine, on_each_rank
from mlx_kv.files.atomic_write import atomic_write, lock
from mlx_kv.generation.settings import SamplingSettings
from mlx_kv.settings import MOST_TOKENS

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlx_kv.generation.engine import Engine
    from mlx_kv.generation.sequence import BatchToken, TokenSequence

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
BEGINNING = b'{"id": '  # of every answer
FORM = 'give {"prompt": a text or token ids, "max_tokens": a whole number from 1 up, "id": a text or a whole number}'
Id = str | int
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
)
@option("--ignore-chat-template", is_flag=True, section="Files", help="Continue texts as plain text.")
@partial(generation_options, max_tokens_summary="Maximum tokens, unless the line sets it.")
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
    policy: PolicyOptions,
) -> int:
    """Continue many prompts at once, from a file into a file.

    Each line of --prompts is {"prompt": a text or a list of token ids, "max_tokens": N, "id": a text or a number}. Only
    the prompt is required; the default id is the line number. Run again after an interrupt, it continues with the
    missing lines. Invalid lines are reported and skipped: the exit code is then 1.
    """
    before_loading = policy.checked()  # bad settings are refused before anything is loaded

    def start() -> tuple[Engine, PromptEncoder]:
        """Loads the model and makes an engine; ranks but the first follow it to its end."""
        network, tokenizer = machine.load()
        sizes = {"max_batch_size": max_batch_size, "prefill_step_size": prefill_step_size}
        engine = machine.engine(network, tokenizer, policy.for_model(network, model.name), drafts, **sizes)
        return engine, PromptEncoder(network, tokenizer, ignore_chat_template, sampling)

    if not machine.leads:
        start()
        return 0
    growth_aside = {name: value for name, value in before_loading.settings().items() if name != "growth"}
    decided = {} if policy.measured is None else {"measured": policy.measured, "max_loss": policy.max_loss}
    settings = {"model": model.name, "plain": ignore_chat_template, "policy": growth_aside | decided}
    as_json = json.dumps(settings | answer_sampling(sampling), sort_keys=True)
    read = partial(read_request, max_tokens=max_tokens, settings=as_json)
    raw_lines = read_lines(prompts_file, output_file)
    with OutputFile(output_file) as answers:
        work = find_work(raw_lines, read, answers.done)
        if work.changed and not overwrite:
            number, name = work.changed[0]
            others = f" (and {len(work.changed) - 1:,} more)" if len(work.changed) > 1 else ""
            raise click.UsageError(
                f"line {number}{others}: id {json.dumps(name)} is in {answers.name} with another prompt or other "
                "settings: give another id or --output, or --overwrite to do it again"
            )
        for number, reason in work.bad:
            say(f"line {number}: {reason}")
        if not work.todo:
            say(f"nothing to do: {work.skipped:,} of {work.skipped + len(work.bad):,} lines are in {answers.name}")
            return 1 if work.bad else 0
        engine, encoder = start()
        answers.drop({name for _, name in work.changed})
        progress = Progress(work)
        requests = (read(number, raw) for number, raw in work.todo)
        try:
            for request, prompt_tokens, tokens in run(
                engine, requests, encoder, (1 + BATCHES_AHEAD) * max_batch_size, progress
            ):
                answers.append(
                    request,
                    {
                        "text": "".join(token.text for token in tokens),
                        "tokens": [token.token for token in tokens],
                        "finish_reason": tokens[-1].finish_reason,
                        "prompt_tokens": prompt_tokens,
                        "generation_tokens": len(tokens),
                    },
                )
                progress.finished()
        finally:
            progress.end(encoder)
            if engine.speculation is not None:
                click.echo(draft_lines(engine.speculation), err=True)
    return 1 if progress.bad else 0


# --- prompts ----------------------------------------------------------------------------------------------------------


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """The object of a line; its id is that of the line, where it has none."""

    prompt: str | list[Annotated[int, msgspec.Meta(ge=0)]]
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)] | msgspec.UnsetType = msgspec.UNSET
    id: Id | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True)
class Request:
    """The request of a line.

    Attributes:
        number: of the line.
        digest: of prompt, max_tokens and settings.
    """

    number: int
    id: Id
    prompt: str | list[int]
    max_tokens: int
    digest: str


def read_request(number: int, raw: bytes, max_tokens: int, settings: str) -> Request:
    """The request of a line.

    Args:
        number: of the line.
        max_tokens: of lines without this field.
        settings: all else that an answer depends on, as JSON.

    Raises:
        ValueError: the line is no request.
    """
    from mlx_kv.files.tensor_files import DuplicateKeyError, unique_keys

    try:
        line = msgspec.convert(json.loads(raw.decode("utf-8").rstrip(), object_pairs_hook=unique_keys), Line)
    except DuplicateKeyError as error:
        raise ValueError(f"key {json.dumps(error.key)} appears twice: give it once") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason}): give one JSON object") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg}, column {error.colno}): give one JSON object") from error
    except RecursionError as error:
        raise ValueError("not JSON of ours (nested too deeply): give one JSON object") from error
    except msgspec.ValidationError as error:
        raise ValueError(f"{error}: {FORM}") from error
    prompt, limit = line.prompt, max_tokens if line.max_tokens is msgspec.UNSET else line.max_tokens
    if not (prompt.strip() if isinstance(prompt, str) else prompt):
        raise ValueError("the prompt is empty: give at least one word or token")
    try:
        "".join(each for each in (prompt, line.id) if isinstance(each, str)).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"not text ({error.reason}): leave out lone surrogates") from error
    content = json.dumps([prompt, limit, settings]).encode()
    name = number if line.id is msgspec.UNSET else line.id
    return Request(number, name, prompt, limit, hashlib.sha256(content).hexdigest()[:16])


@dataclass
class Work:
    """The lines of a file of prompts, by what is to be done.

    Attributes:
        todo: number and content of the lines without an answer, in order.
        skipped: lines that have theirs.
        bad: numbers of lines that cannot be done, and why.
        changed: number and id of lines in `todo` whose id has an answer to another prompt, or by other settings.
    """

    todo: list[tuple[int, bytes]] = field(default_factory=list)
    skipped: int = 0
    bad: list[tuple[int, str]] = field(default_factory=list)
    changed: list[tuple[int, Id]] = field(default_factory=list)


def find_work(lines: Iterable[bytes], read: Callable[[int, bytes], Request], done: dict[Id, str]) -> Work:
    """What is to be done.

    Args:
        read: the request of a line, by its number and content.
        done: digests of the answers that there are, by id.
    """
    work = Work()
    numbers: dict[Id, int] = {}  # of lines, by their ids
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            request = read(number, raw)
            if request.id in numbers:
                same = f"id {json.dumps(request.id)} is that of line {numbers[request.id]}"
                raise ValueError(f"{same}: give each line its own")
        except ValueError as error:
            work.bad.append((number, str(error)))
            continue
        numbers[request.id] = number
        if done.get(request.id) == request.digest:
            work.skipped += 1
            continue
        work.todo.append((number, raw))
        if request.id in done:
            work.changed.append((number, request.id))
    return work


def read_lines(prompts_file: str, output_file: str) -> list[bytes]:
    """The lines of the file of prompts.

    Raises:
        click.UsageError: it cannot be read, or answers would be written into it.
    """
    if prompts_file == "-":
        lines = list(standard("stdin"))
    else:
        if output_file != "-" and os.path.exists(output_file) and os.path.samefile(output_file, prompts_file):
            raise click.UsageError(f"--output {output_file} is the file of prompts: give another one")
        with file_errors(f"read {prompts_file}"), open(prompts_file, "rb") as file:
            lines = list(file)
    return [lines[0].removeprefix(codecs.BOM_UTF8), *lines[1:]] if lines else []


def standard(name: Literal["stdin", "stdout"]) -> BinaryIO:
    """The bytes of a standard stream."""
    stream = getattr(sys, name)
    if stream is None:
        raise click.UsageError(f"{name} is closed: give a file instead of -")
    return stream.buffer  # type: ignore[no-any-return]


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


# --- answers ----------------------------------------------------------------------------------------------------------


class OutputFile:
    """The answers that a file has, and those that are added: whole lines, each on the disk before the next.

    The file is locked against other runs until it is closed. `-` is standard output, which has none.

    Attributes:
        name: of the file in messages.
        done: the digest of each answer, by id.

    Raises:
        ValueError: another run has the file, it is no regular file, or holds anything that is no answer; it is then
            left as it was.
        click.UsageError: it cannot be opened or read.
    """

    def __init__(self, path: str) -> None:
        self.name, self.done = "stdout" if path == "-" else path, dict[Id, str]()
        self._path = os.path.realpath(path)  # a link stays one when the file is replaced
        self._opened = contextlib.ExitStack()
        if path == "-":
            self._file: Any = standard("stdout")
            return
        with file_errors(f"open {path}"), contextlib.ExitStack() as failed:
            failed.callback(self._opened.close)
            self._open()
            whole = self._read()
            if whole < os.fstat(self._file.fileno()).st_size:
                self._file.truncate(whole)
            failed.pop_all()

    def _open(self) -> None:
        file = open(self._path, "a+b", buffering=0)  # noqa: SIM115, closed with the others
        self._file = self._opened.enter_context(file)
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            raise ValueError(f"{self.name} is not a regular file: give one that can be read again")
        if not lock(self._file.fileno(), wait=False):
            raise ValueError(f"another run writes {self.name}: wait for it, or give another file")

    def _lines(self) -> Iterator[bytes]:
        with open(self._file.fileno(), "rb", closefd=False) as file:
            file.seek(0)
            yield from file

    def _read(self) -> int:
        """Reads the answers; returns the bytes of their lines, without one that a run could not finish."""
        whole = 0
        for number, raw in enumerate(self._lines(), 1):
            try:
                entry = json.loads(raw)
            except (ValueError, RecursionError):
                if not raw.endswith(b"\n") and BEGINNING.startswith(raw[: len(BEGINNING)]):
                    break
                entry = None
            match entry:
                case {"id": str() | int() as name, "line": int(), "digest": str() as digest} if name not in self.done:
                    if not raw.endswith(b"\n"):
                        break
                    self.done[name] = digest
                case _:
                    what = "is no answer, or another one of its id,"
                    raise ValueError(f"line {number} of {self.name} {what} of this command: give another file")
            whole += len(raw)
        return whole

    def append(self, request: Request, answer: dict[str, Any]) -> None:
        """Adds an answer.

        Raises:
            click.UsageError: it could not be written whole.
        """
        entry = {"id": request.id, "line": request.number, "digest": request.digest, **answer}
        line = json.dumps(entry).encode() + b"\n"
        with self._writing():
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._file.flush()
            if self.name != "stdout":
                os.fsync(self._file.fileno())
        self.done[request.id] = request.digest

    def drop(self, ids: Collection[Id]) -> None:
        """Removes the answers of these ids: a new file without them replaces the old one, which stays locked."""
        if not ids:
            return
        with self._writing():
            with atomic_write(self._path) as new:
                new.writelines(raw for raw in self._lines() if json.loads(raw)["id"] not in ids)
            self._open()
        for each in ids:
            self.done.pop(each, None)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with file_errors(f"write {self.name}"):
            try:
                yield
            except BrokenPipeError:  # else Python says it once more, when it flushes at its end
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()


# --- the run ----------------------------------------------------------------------------------------------------------


class PromptEncoder:
    """Makes sequences of requests, and refuses what this model cannot continue.

    Attributes:
        past: numbers of lines that may go past the context of the model.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, plain: bool, sampling: SamplingSettings) -> None:
        from mlx_kv.mlxlm.loading import context_length, vocabulary_of

        self._tokenizer, self._plain, self._sampling = tokenizer, plain, sampling
        self._sampler, self._processors = unseeded_sampler(sampling, tokenizer), sampling.processors()
        self._vocabulary, self.context = vocabulary_of(model), context_length(model)
        self.past: list[int] = []

    def encode(self, request: Request) -> TokenSequence:
        """Raises ValueError for an empty prompt, one longer than the context, and tokens that the model has not."""
        from mlx_kv.generation.encoding import encode_text
        from mlx_kv.generation.sampling import derived_seed, sampler_of_sequence
        from mlx_kv.generation.sequence import TokenSequence

        tokens = request.prompt
        if isinstance(tokens, str):
            tokens = encode_text(self._tokenizer, tokens, self._plain)
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
        if self.context is not None and len(tokens) + request.max_tokens > self.context:
            self.past.append(request.number)
        # By its id, so that a line draws the same in any company, and one that is there twice does not.
        seed = self._sampling.seed
        seed = None if seed is None else derived_seed(seed, json.dumps(request.id))
        sampler = sampler_of_sequence(self._sampler, seed, len(tokens))
        return TokenSequence(
            request.number,
            tokens,
            request.max_tokens,
            self._tokenizer.detokenizer,
            sampler,
            processors=self._processors,
        )


class Progress:
    """Counts lines and tokens from now on, and prints them on stderr; with a progress bar on a terminal."""

    def __init__(self, work: Work) -> None:
        from tqdm import tqdm

        total, hidden = len(work.todo) + work.skipped, not sys.stderr.isatty()
        self._bar = tqdm(total=total, initial=work.skipped, unit="line", leave=False, file=sys.stderr, disable=hidden)
        self._skipped, self._started = work.skipped, time.perf_counter()
        self.done, self.bad, self.tokens = 0, len(work.bad), 0

    def bad_line(self, number: int, reason: str) -> None:
        self.bad += 1
        self._bar.clear()
        say(f"line {number}: {reason}")

    def step(self, tokens: int) -> None:
        """So many more tokens."""
        self.tokens += tokens
        self._bar.set_postfix_str(f"{self._rate():,.1f} tokens/s", refresh=False)
        self._bar.update(0)

    def finished(self) -> None:
        """One more line."""
        self.done += 1
        self._bar.update()

    def end(self, encoder: PromptEncoder) -> None:
        rate = self._rate()
        self._bar.close()
        if encoder.past:
            what = f"{len(encoder.past):,} line{'' if len(encoder.past) == 1 else 's'} (first {encoder.past[0]})"
            say(f"note: {what} may go past the {encoder.context:,} tokens that this model was made for")
        click.echo(f"lines       {self.done:,} done, {self._skipped:,} skipped, {self.bad:,} bad", err=True)
        click.echo(f"generation  {self.tokens:7,} tokens  {rate:10,.1f} tokens/s", err=True)

    def _rate(self) -> float:
        return self.tokens / max(time.perf_counter() - self._started, 1e-9)


def run(
    engine: Engine, requests: Iterator[Request], encoder: PromptEncoder, ahead: int, progress: Progress
) -> Iterator[tuple[Request, int, list[BatchToken]]]:
    """Each request when its last token has come, with the tokens of its prompt and its own; bad ones are reported.

    Args:
        ahead: prompts that the engine has at once: those of the batch, and those that wait.
    """
    running: dict[int, tuple[Request, int, list[BatchToken]]] = {}
    try:
        while True:
            while len(running) < ahead and (request := next(requests, None)) is not None:
                try:
                    sequence = encoder.encode(request)
                    engine.submit(sequence)
                except ValueError as error:
                    progress.bad_line(request.number, str(error))
                    continue
                running[request.number] = request, len(sequence.tokens), []
            if not running:
                return
            tokens = engine.step()
            progress.step(len(tokens))
            for token in tokens:
                running[token.index][2].append(token)
                if token.finish_reason is not None:
                    yield running.pop(token.index)
    finally:
        engine.close()
