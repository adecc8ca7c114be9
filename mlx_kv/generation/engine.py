"""Rows that come and go: one engine for batches that are known beforehand, and for requests that arrive at any time.

Decides which sequences share a batch, when one ends, and what is told of each token. Without a draft model the loop is
mlx-lm's `BatchGenerator` over our caches; with one it is the `Decoder`'s rounds. Knows nothing about files, requests or
the command line, nor how rows are kept. Not thread-safe: all calls come from one thread.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, generation_stream
from mlx_lm.models import cache as stock

from mlx_kv.cache.checks import whole_number
from mlx_kv.generation.prefill import chunk_for, prefill_step, reserve_for
from mlx_kv.generation.sampling import Sampler
from mlx_kv.generation.speculation import DRAFT_TOKENS
from mlx_kv.generation.speculation.decoder import Decoder, Joining, SpeculationStatistics
from mlx_kv.mlxlm.convert import (
    attention_caches,
    check_alike,
    check_batches,
    leaves,
    make_prompt_cache,
    prompts_must_be_equal,
    rows_must_be_equal,
)
from mlx_kv.policy import CachePolicy

MOST_PROMPTS_AT_ONCE = 8  # read together; mlx-lm's number
# Tokens of prompts read together, and no more than two chunks. More would keep the device no busier, but all rows
# waiting: those that decode for their next token, and the first of the prompts for the last. mlx-lm reads up to 2,048
# tokens of one prompt in one pass, which is what is let through elsewhere.
MOST_TOKENS_AT_ONCE = {mx.DeviceType.cpu: 1024, mx.DeviceType.gpu: 2048}
CHUNKS_AT_ONCE = 4  # in one pass, however long prompts are: nobody else is served meanwhile


@dataclass(frozen=True)
class BatchToken:
    """One token of one sequence.

    Attributes:
        index: which prompt it continues.
        text: what can be said now: tokens that end within a character or a word wait for the next. Empty without a
            tokenizer, and for the token that ends a sequence.
        token: its id.
        finish_reason: "stop" or "length" with the last token of a sequence, else None.
        from_draft: whether the draft model had proposed it.
        caches: with the last token, if the engine was asked for them: the caches of the row, as `Engine.extract` gives
            them.
    """

    index: int
    text: str
    token: int
    finish_reason: str | None
    from_draft: bool = False
    caches: list[Any] | None = None


@dataclass
class TokenSequence:
    """One sequence to be continued.

    Attributes:
        index: by which its tokens are known; no two at once have the same.
        tokens: of the prompt, at least one; without those that `caches` have read.
        max_tokens: to generate, from 1 up.
        detokenizer: None for tokens without text.
        sampler: None is greedy. One that counts positions, as a `SeededSampler` does, is for this sequence alone.
        caches: of `Engine.make_caches`, which may have read what comes before `tokens`; None are new ones.
    """

    index: int
    tokens: list[int]
    max_tokens: int
    detokenizer: Any = None
    sampler: Sampler | None = None
    caches: list[Any] | None = None
    emitted: int = 0

    def emit(
        self, token: int, finish: str | None, from_draft: bool = False, caches: list[Any] | None = None
    ) -> BatchToken:
        self.emitted += 1
        text = ""
        if self.detokenizer is not None:
            if finish != "stop":
                self.detokenizer.add_token(token)
            if finish is not None:
                self.detokenizer.finalize()
            text = self.detokenizer.last_segment
        return BatchToken(self.index, text, token, finish, from_draft, caches)


class Engine(Protocol):
    """Continues any number of sequences, at most so many at once."""

    def submit(self, sequence: TokenSequence) -> None:
        """It joins as soon as there is room."""
        ...

    def cancel(self, index: int) -> None:
        """Lets a sequence go, wherever it stands; one that is not there is no error."""
        ...

    def step(self) -> list[BatchToken]:
        """Some work: tokens of rows that decode, in the order of rows, and prompts that are read.

        Nothing where nothing is to be done.
        """
        ...

    @property
    def busy(self) -> bool:
        """Whether any sequence is left."""
        ...

    @property
    def caches(self) -> list[Any]:
        """Those of the rows that decode now, one for each layer, for statistics; empty where there are none."""
        ...

    @property
    def step_size(self) -> int:
        """Tokens of a prompt that are read at once."""
        ...

    @property
    def rows(self) -> list[int]:
        """The index of each sequence that decodes now, in the order of the rows of `caches`."""
        ...

    def make_caches(self) -> list[Any]:
        """New caches for a sequence to bring: of all layers, and then of those of the draft model."""
        ...

    def read(self, tokens: mx.array, cache: list[Any]) -> Any:
        """Reads tokens (1, n) into such caches."""
        ...

    def extract(self, index: int) -> list[Any] | None:
        """Copies of the caches of a sequence that decodes, evaluated; None if it does not, or they cannot be had.

        Their offset says what they have read. That may be more than what was told: mlx-lm's loop is a step ahead, and
        a draft may have been right beyond the end.
        """
        ...

    def close(self) -> None:
        """Lets all sequences go."""
        ...


def make_engine(
    model: nn.Module,
    ends: set[int],
    policy: CachePolicy | None = None,
    max_batch_size: int = 8,
    prefill_step_size: int | None = None,
    draft_model: nn.Module | None = None,
    num_draft_tokens: int = DRAFT_TOKENS,
    statistics: SpeculationStatistics | None = None,
    return_caches: bool = False,
) -> Engine:
    """An engine for one model and policy.

    Args:
        ends: ids of tokens that end a sequence.
        return_caches: whether the last token of a sequence brings its caches.

    Raises:
        ValueError: what the model or the policy refuses.
    """
    for name, value in (("max_batch_size", max_batch_size), ("num_draft_tokens", num_draft_tokens)):
        whole_number(name, value, least=1)
    if prefill_step_size is not None:
        whole_number("prefill_step_size", prefill_step_size, least=1)
    check_batches(model)
    policy = policy or CachePolicy()
    if draft_model is None:
        return PlainEngine(model, ends, policy, max_batch_size, prefill_step_size, return_caches)
    if max_batch_size > 1 and (rows_must_be_equal(model) or rows_must_be_equal(draft_model)):
        max_batch_size = 1  # of a round, each row accepts a number of tokens of its own
    return SpeculativeEngine(
        Decoder(model, draft_model, policy, num_draft_tokens),
        ends,
        max_batch_size,
        prefill_step_size,
        statistics,
        return_caches,
    )


def check_sequence(sequence: TokenSequence) -> None:
    """Raises ValueError for what could not be continued, before it joins others."""
    if not sequence.tokens:
        raise ValueError(f"sequence {sequence.index} is empty: give at least one token")
    whole_number(f"max_tokens of sequence {sequence.index}", sequence.max_tokens, least=1)


def _tokens(sequence: TokenSequence) -> tuple[int, int]:
    """Tokens that were read of a sequence, and those that are not."""
    read = max((int(cache.offset) for cache in attention_caches(sequence.caches or [])), default=0)
    return read, len(sequence.tokens)


def evaluated(caches: list[Any]) -> list[Any]:
    """Caches of one row that were taken out of a batch, so that they no longer hold on to its buffers."""
    for cache in leaves(caches):
        if isinstance(cache, stock.ArraysCache):  # mlx-lm's have slices of the batch's, which stay that: copy them
            cache.cache = [x if x is None else mx.take(x, mx.array([0]), axis=0) for x in cache.cache]
    mx.eval([cache.state for cache in caches])
    return caches


class PlainEngine:
    """mlx-lm's continuous batching over our caches."""

    def __init__(
        self,
        model: nn.Module,
        ends: set[int],
        policy: CachePolicy,
        max_batch_size: int,
        prefill_step_size: int | None,
        return_caches: bool = False,
    ) -> None:
        self.model, self._return_caches = model, return_caches
        self._empty = make_prompt_cache(model, policy)  # refuses what no layer can honour
        self.step_size = prefill_step(model, self._empty, prefill_step_size)
        self._generator = BatchGenerator(
            model,
            stop_tokens=[[token] for token in sorted(ends)],
            completion_batch_size=max_batch_size,
            prefill_batch_size=min(MOST_PROMPTS_AT_ONCE, max_batch_size),
            prefill_step_size=self.step_size,
        )
        self._max_batch_size = max_batch_size
        self._equal_rows = max_batch_size > 1 and rows_must_be_equal(model)
        # Asked here, where an error is that of the model alone: in a step it would end all rows.
        self._equal_prompts = max_batch_size > 1 and prompts_must_be_equal(model)
        self._waiting: deque[TokenSequence] = deque()
        self._active: dict[int, TokenSequence] = {}  # by mlx-lm's number for it
        self._reading: dict[int, int] = {}  # by the same, those that have prompt tokens left to read, and how many
        chunk = chunk_for(model)
        self._most_tokens = min(MOST_TOKENS_AT_ONCE[mx.default_device().type], 2 * chunk)
        self._most_long = max(2, CHUNKS_AT_ONCE * chunk // self.step_size)

    def submit(self, sequence: TokenSequence) -> None:
        check_sequence(sequence)
        if sequence.caches is not None:
            check_alike(self._empty, sequence.caches)
        self._waiting.append(sequence)

    def cancel(self, index: int) -> None:
        self._waiting = deque([sequence for sequence in self._waiting if sequence.index != index])
        for uid in [uid for uid, sequence in self._active.items() if sequence.index == index]:
            self._generator.remove([uid])  # type: ignore[no-untyped-call]
            self._reading.pop(uid, None)
            del self._active[uid]

    def step(self) -> list[BatchToken]:
        began: list[TokenSequence] = []  # in this very step
        while self._waiting and len(self._active) < self._max_batch_size:
            if not self._may_join(self._waiting[0], began):
                break
            together = sum(self._reading.values()) + len(self._waiting[0].tokens)
            # A prompt that takes several passes does not keep others from joining in them. Each has rows as long as it.
            several = self._reading and max(self._reading.values()) > self.step_size
            if self._reading and (len(self._reading) >= self._most_long if several else together > self._most_tokens):
                break
            sequence = self._waiting.popleft()
            caches = sequence.caches or self.make_caches()
            reserve_for(caches, len(sequence.tokens), sequence.max_tokens)
            samplers: Any = [sequence.sampler]
            (uid,) = self._generator.insert([sequence.tokens], [sequence.max_tokens], [caches], samplers=samplers)
            self._active[uid], self._reading[uid] = sequence, len(sequence.tokens)
            began.append(sequence)
        for sequence in began:
            sequence.caches = None  # the batch has its own copy
        if not self._active:
            return []
        tokens = []
        prompts, responses = self._generator.next()  # type: ignore[no-untyped-call]
        for response in prompts:
            read, everything = response.progress
            self._reading[response.uid] = max(0, everything - read - 1)  # the last is read with the first step
            if everything == read:
                del self._reading[response.uid]
        for response in responses:
            finish = response.finish_reason
            held: Any = response.prompt_cache if self._return_caches else None
            if held is not None:
                evaluated(held)
            tokens.append(self._active[response.uid].emit(response.token, finish, caches=held))
            if finish is not None:
                del self._active[response.uid]
        return tokens

    def _may_join(self, sequence: TokenSequence, began: Sequence[TokenSequence]) -> bool:
        """Whether the model can take a sequence beside those that there are; `began` are those of this step."""
        alike = len(began) < MOST_PROMPTS_AT_ONCE and all(_tokens(other) == _tokens(sequence) for other in began)
        if self._equal_rows:  # all that decode together began in one step, and were read as one batch
            return alike and len(began) == len(self._active)
        if not self._reading or (alike and len(began) == len(self._reading)):
            return True
        return not self._equal_prompts

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._active)

    @property
    def caches(self) -> list[Any]:
        return list(self._generator._generation_batch.prompt_cache)

    @property
    def rows(self) -> list[int]:
        return [self._active[uid].index for uid in self._generator._generation_batch.uids]

    def make_caches(self) -> list[Any]:
        return copy.deepcopy(self._empty)  # making them may try out what the model's attention can read

    def read(self, tokens: mx.array, cache: list[Any]) -> Any:
        return self.model(tokens, cache=cache)

    def extract(self, index: int) -> list[Any] | None:
        batch = self._generator._generation_batch
        for row, uid in enumerate(batch.uids):
            if self._active[uid].index == index:
                return evaluated(batch.extract_cache(row))
        return None

    def close(self) -> None:
        self._generator.remove(list(self._active))  # type: ignore[no-untyped-call]
        self._active.clear()
        self._reading.clear()
        self._waiting.clear()
        self._generator.close()  # type: ignore[no-untyped-call]


class SpeculativeEngine:
    """Rounds of a decoder: a pass of the draft for each drafted token, and one of the model, for all rows."""

    def __init__(
        self,
        decoder: Decoder,
        ends: set[int],
        max_batch_size: int,
        prefill_step_size: int | None,
        statistics: SpeculationStatistics | None = None,
        return_caches: bool = False,
    ) -> None:
        self._decoder, self._ends, self._return_caches = decoder, ends, return_caches
        # Only statistics that somebody asked for keep the caches of the last batch.
        self._statistics, self._watched = statistics or SpeculationStatistics(), statistics is not None
        self._max_batch_size = max_batch_size
        self._waiting: deque[TokenSequence] = deque()
        self._active: list[TokenSequence] = []
        self._joining: Joining | None = None
        self._reading: list[TokenSequence] = []  # the rows that join
        self.step_size = decoder.step if prefill_step_size is None else prefill_step_size
        self._most_tokens = CHUNKS_AT_ONCE * decoder.step

    def submit(self, sequence: TokenSequence) -> None:
        check_sequence(sequence)
        if sequence.caches is not None:
            check_alike(self._decoder.make_caches(), sequence.caches)
        self._waiting.append(sequence)

    def cancel(self, index: int) -> None:
        self._waiting = deque([sequence for sequence in self._waiting if sequence.index != index])
        staying = [row for row, sequence in enumerate(self._reading) if sequence.index != index]
        self._reading, before = [self._reading[row] for row in staying], len(self._reading)
        if not staying:
            self._joining = None
        elif self._joining is not None and len(staying) < before:
            self._joining.keep(staying)  # what is left is read no longer than the longest of them takes
        self._keep([row for row, sequence in enumerate(self._active) if sequence.index != index])

    def _keep(self, rows: Sequence[int]) -> None:
        self._decoder.keep(rows)
        self._active = [self._active[row] for row in rows]

    def step(self) -> list[BatchToken]:
        with mx.stream(generation_stream):
            self._join()
            if not self._active:
                return []
            left = max(sequence.max_tokens - sequence.emitted for sequence in self._active)
            emitted = self._decoder.round(left, self._statistics)
        tokens, staying = [], []
        for row, (sequence, items) in enumerate(zip(self._active, emitted, strict=True)):
            finish = None
            for item in items:
                last = sequence.emitted + 1 == sequence.max_tokens
                finish = "stop" if item.token in self._ends else "length" if last else None
                held = self._decoder.extract(row) if finish is not None and self._return_caches else None
                tokens.append(sequence.emit(item.token, finish, item.from_draft, held and evaluated(held)))
                if finish is not None:
                    break
            if finish is None:
                staying.append(row)
        self._keep(staying)
        return tokens

    def _join(self) -> None:
        """Reads a chunk of the prompts whose turn it is; when all of them are read, they are rows."""
        if self._joining is None:
            self._begin()
        if self._joining is None or not self._decoder.read_on(self._joining):
            return
        self._active += self._reading
        self._joining, self._reading = None, []
        if self._watched:
            self._statistics.caches[:] = self._decoder.caches[0]

    def _begin(self) -> None:
        room = min(self._max_batch_size - len(self._active), MOST_PROMPTS_AT_ONCE, len(self._waiting))
        joining: list[TokenSequence] = []
        while len(joining) < room:
            longest = max(len(sequence.tokens) for sequence in (*joining, self._waiting[0]))
            if joining and (len(joining) + 1) * min(longest, self.step_size) > self._most_tokens:
                break
            joining.append(self._waiting.popleft())
        if joining:
            self._joining = self._decoder.begin(
                [sequence.tokens for sequence in joining],
                [sequence.max_tokens for sequence in joining],
                [sequence.sampler for sequence in joining],
                self.step_size,
                [sequence.caches for sequence in joining],
            )
            for sequence in joining:
                sequence.caches = None  # the batch has them now
            self._reading = joining

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._reading or self._active)

    @property
    def caches(self) -> list[Any]:
        return list(self._decoder.caches[0])

    @property
    def rows(self) -> list[int]:
        return [sequence.index for sequence in self._active]

    def make_caches(self) -> list[Any]:
        return self._decoder.make_caches()

    def read(self, tokens: mx.array, cache: list[Any]) -> Any:
        return self._decoder.read(tokens, cache)

    def extract(self, index: int) -> list[Any] | None:
        for row, sequence in enumerate(self._active):
            if sequence.index == index:
                held = self._decoder.extract(row)
                return held and evaluated(held)
        return None

    def close(self) -> None:
        self._decoder.keep([])
        self._joining, self._reading = None, []
        self._active.clear()
        self._waiting.clear()
