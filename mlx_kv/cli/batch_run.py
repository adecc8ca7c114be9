"""A run of `mlx-kv batch`: from lines without answers to their answers, with progress on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from mlx_kv.cli.decoding import draft_lines, unseeded_sampler
from mlx_kv.cli.output import say
from mlx_kv.generation.settings import SamplingSettings

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlx_kv.cli.batch_files import BatchRequest, InputFile, RequestLine
    from mlx_kv.generation.engine import Engine
    from mlx_kv.generation.sequence import BatchToken, TokenSequence
    from mlx_kv.generation.statistics import SpeculationStatistics


class PromptEncoder:
    """Makes of a request what an engine takes, and refuses what this model cannot continue.

    Attributes:
        past: numbers of lines that may go past the context of the model.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, plain: bool, sampling: SamplingSettings) -> None:
        from mlx_kv.mlxlm.loading import context_length, vocabulary_of

        self._tokenizer, self._sampler, self._seed = tokenizer, unseeded_sampler(sampling, tokenizer), sampling.seed
        self._processors = sampling.processors()
        self._plain = plain
        self._vocabulary = vocabulary_of(model)
        self.context = context_length(model)
        self.past: list[int] = []

    def encode(self, request: BatchRequest) -> TokenSequence:
        """Raises ValueError for an empty prompt, one longer than the context, and tokens that the model has not."""
        from mlx_kv.generation.sampling import derived_seed, sampler_of_sequence
        from mlx_kv.generation.sequence import TokenSequence

        tokens = self._tokens(request.prompt)
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
        seed = None if self._seed is None else derived_seed(self._seed, json.dumps(request.id))
        sampler = sampler_of_sequence(self._sampler, seed, len(tokens))
        detokenizer = self._tokenizer.detokenizer
        return TokenSequence(
            request.number, tokens, request.max_tokens, detokenizer, sampler, processors=self._processors
        )

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        from mlx_kv.generation.encoding import encode_text

        return encode_text(self._tokenizer, prompt, self._plain) if isinstance(prompt, str) else prompt


class Progress:
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

    def end(self, encoder: PromptEncoder, speculation: SpeculationStatistics | None) -> None:
        rate = self._rate()
        self._bar.close()
        if encoder.past:
            what = f"{len(encoder.past):,} line{'' if len(encoder.past) == 1 else 's'} (first {encoder.past[0]})"
            click.echo(
                f"mlx-kv: note: {what} may go past the {encoder.context:,} tokens that this model was made for",
                err=True,
            )
        click.echo(f"lines       {self.done:,} done, {self.skipped:,} skipped, {self.bad:,} bad", err=True)
        click.echo(f"generation  {self.tokens:7,} tokens  {rate:10,.1f} tokens/s", err=True)
        if speculation is not None:
            click.echo(draft_lines(speculation), err=True)

    def _rate(self) -> float:
        return self.tokens / max(time.perf_counter() - self._begun, 1e-9)


def run(
    engine: Engine,
    prompts: InputFile,
    lines: Sequence[RequestLine],
    encoder: PromptEncoder,
    ahead: int,
    progress: Progress,
) -> Iterator[tuple[BatchRequest, int, list[BatchToken]]]:
    """Each request when its last token has come, with the tokens of its prompt and its own; bad lines are reported.

    Args:
        ahead: prompts that the engine has at once: those of the batch, and those that wait.
    """
    waiting = iter(lines)
    running: dict[int, tuple[BatchRequest, int, list[BatchToken]]] = {}
    try:
        while True:
            while len(running) < ahead and (line := next(waiting, None)) is not None:
                try:
                    request = prompts.read(line)
                    sequence = encoder.encode(request)
                    engine.submit(sequence)
                except ValueError as error:
                    progress.bad_line(line.number, str(error))
                    continue
                running[line.number] = request, len(sequence.tokens), []
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
