"""Engines: continuous batching. Sequences join a batch when there is room, and leave it when they are done.

One engine serves prompts that are known in advance and requests that arrive at any time, with or without drafts.
Engines are not thread-safe: all calls come from one thread.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal
from weakref import WeakSet

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from mlx_kv.cache.buffers import on_cpu
from mlx_kv.cache.growth import DEFAULT, Growth
from mlx_kv.cache.layout import NO_LIMIT
from mlx_kv.cache.plan import round_read
from mlx_kv.cache.row_classes import agree_on_saving, min_saving
from mlx_kv.cache.rows import grow_early
from mlx_kv.communicator import LOCAL, Communicator
from mlx_kv.generation.admission import (
    MAX_PROMPTS_AT_ONCE,
    MIN_CHUNK,
    MIN_SHARED,
    PassSize,
    PrefillPace,
    Source,
    continue_from,
    prompt_text,
    share,
    tokens_of,
)
from mlx_kv.generation.decoder import Decoder, make_decoder
from mlx_kv.generation.prefill import (
    CHUNKS_AT_ONCE,
    NO_INSTRUCTIONS,
    Instructions,
    TwoPassQueue,
    next_room,
)
from mlx_kv.generation.sequence import (
    ROOM_AHEAD,
    AnswerLengths,
    BatchToken,
    Emitted,
    SequenceProgress,
    TokenSequence,
    token_scores,
)
from mlx_kv.generation.speculation import DraftSettings
from mlx_kv.generation.statistics import SpeculationStatistics
from mlx_kv.mlxlm.attention import attach_attention_hooks
from mlx_kv.mlxlm.batching import (
    RowsByClass,
    check_same_kinds,
    equal_lengths,
    evaluate_caches,
)
from mlx_kv.mlxlm.convert import OneRow
from mlx_kv.mlxlm.loading import weight_bytes
from mlx_kv.mlxlm.probe import check_not_forked
from mlx_kv.mlxlm.traverse import attention_caches, leaves, places_of, trim_all
from mlx_kv.policy import CachePolicy, given_policy
from mlx_kv.settings import whole_number

log = logging.getLogger("mlx_kv.generation")

MAX_CONTINUING = 64  # waiting sequences that get copies of what one has read
MAX_SEARCHED = 16  # waiting sequences that are looked at for one that can be admitted
CLEAR_EVERY = 512  # steps between two calls of mx.clear_cache
WAIT_EVERY, MIN_TIMED = 32, 3  # steps in one of which a chunk is waited for although rows decode; chunks, at first


@dataclass(frozen=True)
class EngineSettings:
    """Settings of an engine.

    Attributes:
        max_batch_size: maximum rows that decode or whose prompts are read.
        prefill_step_size: prompt tokens of each row read at once; None is what `prefill_step` returns.
        drafting: how tokens are drafted; without a drafter and a draft model, nothing is drafted.
        draft_model: for a drafter that needs one.
        return_caches: whether the last token of a sequence carries its caches.
        instructions: for policies that read prompts in two passes.
        max_wait: maximum seconds between two tokens of a row while prompts are read, as far as the smallest chunk
            allows; None reads whole chunks. Ignored with drafts, several processes, budgets or a quantized_start, which
            need whole chunks.

    Raises:
        ValueError: a number below 1.
    """

    max_batch_size: int = 8
    prefill_step_size: int | None = None
    drafting: DraftSettings = field(default_factory=DraftSettings)
    draft_model: nn.Module | None = None
    return_caches: bool = False
    instructions: Instructions = NO_INSTRUCTIONS
    max_wait: float | None = None

    def __post_init__(self) -> None:
        whole_number("max_batch_size", self.max_batch_size, minimum=1)
        if self.prefill_step_size is not None:
            whole_number("prefill_step_size", self.prefill_step_size, minimum=1)


class Engine:
    """Continues any number of sequences, up to a maximum at once, with a `Decoder`."""

    def __init__(
        self,
        decoder: Decoder,
        ends: set[int],
        settings: EngineSettings,
        statistics: SpeculationStatistics | None = None,
        equal_lengths: tuple[bool, bool] = (False, False),
        growth: Growth = DEFAULT,
    ) -> None:
        """
        Args:
            decoder: of this engine alone; it drafts as `settings` say.
            ends, statistics: as in `make_engine`.
            equal_lengths: as of the model.
            growth: of the policy.
        """
        max_batch_size = settings.max_batch_size
        self._decoder, self._ends, self._return_caches = decoder, ends, settings.return_caches
        # The caches of the last batch are kept only in statistics that the caller passed.
        self._statistics, self._watched = (
            statistics or SpeculationStatistics(),
            statistics is not None and decoder.drafter is not None,
        )
        if decoder.drafter is not None:
            self._statistics.drafter = decoder.drafter.name or type(decoder.drafter).__name__
        self.max_batch_size, (self._equal_rows, self._equal_prompts) = max_batch_size, equal_lengths
        self._classes = RowsByClass(decoder.target.model, max_batch_size)
        self._waiting: deque[TokenSequence] = deque()
        self.answers, self._growth = AnswerLengths(), growth
        self._batched = max_batch_size > 1 or settings.return_caches
        self._admission, self._empty = decoder.admission(self._batched, self._classes.of), decoder.make_caches()
        self._active: list[TokenSequence] = []
        self.stream = generation_stream
        self.step_size = settings.prefill_step_size or decoder.step_size
        chunk = decoder.chunk
        distributed = decoder._communicator.distributed
        self.pass_size = PassSize(chunk, distributed)
        # Where a GPU gets few shapes: prompts of several rows, in one process. Models and caches of a single row may
        # not know padding, and other processes may pad in another way.
        self._pads = max_batch_size > 1 and not any((*equal_lengths, distributed, on_cpu()))
        self._max_long = max(2, CHUNKS_AT_ONCE * chunk // self.step_size)
        self._two_pass = TwoPassQueue(decoder.read, decoder.make_caches, self.step_size, settings.instructions)
        self._beginnings = decoder.beginnings(self.step_size)
        if max_batch_size == 1 or self._equal_rows:
            self._beginnings = self._beginnings._replace(shared=False)
        self._pace = None if settings.max_wait is None else PrefillPace(settings.max_wait, self.step_size)
        self._steps = 0
        self._growing = False  # whether some layers have grown, and others are to follow
        self._wired = False  # whether the wired limit is set for this engine

    def submit(self, sequence: TokenSequence) -> None:
        """Adds a sequence, which joins the batch as soon as there is room.

        Raises:
            ValueError: it cannot be continued.
        """
        if not sequence.tokens:
            raise ValueError(f"sequence {sequence.index} is empty: give at least one token")
        whole_number(f"max_tokens of sequence {sequence.index}", sequence.max_tokens, minimum=1)
        if sequence.caches is not None:
            sequence.caches = self._decoder.complete(sequence.caches)
        if sequence.caches is not None and self._batched:
            check_same_kinds(self._empty, sequence.caches)
        sequence.room = sequence.room or self.answers.expect(sequence.max_tokens)
        if self._beginnings.shared:
            sequence.text = prompt_text(sequence, tokens_of(sequence.caches or []))
        (self._two_pass if self._two_pass.accepts(sequence) else self._waiting).append(sequence)
        target = self._decoder.target
        attach_attention_hooks(target.model, (sequence.caches or [])[: target.layers])

    def cancel(self, index: int) -> None:
        """Removes a sequence at any stage; an unknown index is ignored."""
        self._waiting = deque(sequence for sequence in self._waiting if sequence.index != index)
        self._two_pass.cancel(index)
        self._pass_on(index)
        reading = self._admission.rows
        self._admission.keep([row for row, pending in enumerate(reading) if pending.sequence.index != index])
        self._keep([row for row, sequence in enumerate(self._active) if sequence.index != index])

    def _pass_on(self, index: int) -> None:
        """A waiting sequence continues from what was read of a prompt that is about to be removed."""
        if cancelled := [row.sequence for row in self._admission.rows if row.sequence.index == index]:
            common = self._beginnings.common
            other = max(self._waiting, key=lambda other: common(other, cancelled[0]), default=None)
            if other is not None and common(other, cancelled[0]) >= MIN_SHARED:
                self._continue_from(other, self._source(other))

    def _keep(self, rows: Sequence[int]) -> None:
        if len(rows) < len(self._active):
            self._decoder.keep(rows)
            self._active = [self._active[row] for row in rows]

    # --- steps ----------------------------------------------------------------------------------------------------

    def step(self) -> list[BatchToken]:
        """Reads a chunk of prompts, and decodes; returns the new tokens in the order of rows, possibly none."""
        emitted = self.step_scored()
        drawn = [(item.logprobs, item.token, sequence.top_logprobs) for sequence, item, _, _ in emitted]
        return [
            sequence.emit(item.token, finish, item.from_draft, caches, score)
            for (sequence, item, finish, caches), score in zip(emitted, token_scores(drawn), strict=True)
        ]

    def step_scored(self) -> list[tuple[TokenSequence, Emitted, str | None, list[Any] | None]]:
        """The same, with the log-probabilities of each token instead of its text."""
        check_not_forked()
        if (sequence := self._two_pass.step()) is not None:
            self._waiting.append(sequence)
        self._steps += 1
        if self._steps % CLEAR_EVERY == 0:
            mx.clear_cache()
        if not self._wired:
            wired_memory.begin(self, self._decoder.target.model)
            self._wired = True
        with mx.stream(self.stream):
            self._read_prompts()
            if not self._active:
                return []
            self._make_room()
            left = max(sequence.max_tokens - sequence.emitted for sequence in self._active)
            return self._finish_rows(self._decoder.round(left, self._statistics))

    def _make_room(self) -> None:
        """Announces more tokens of the answers that outgrow what was expected of them, and lets some layers grow."""
        for sequence in self._active:
            needed = sequence.emitted + ROOM_AHEAD
            if sequence.room < min(needed, sequence.max_tokens):
                prompt = sequence.prompt_tokens + self._decoder.draft_tokens
                room = next_room(self._growth, prompt, needed, sequence.max_tokens)
                Engine.make_room(self, sequence.index, room)  # on this rank: the others do the same
        if self._growing or self._steps % (ROOM_AHEAD // 4) == 0:
            layers = attention_caches(self.caches)
            growing = (cache for cache in layers if grow_early(cache, ROOM_AHEAD))
            self._growing = bool(list(islice(growing, 1 + 2 * len(layers) // ROOM_AHEAD)))

    def take_turns(self, engines: int) -> None:
        """Announces that so many engines make steps in turn: each reads as much of prompts as leaves time for all."""
        if self._pace is not None:
            self._pace.engines = engines

    def make_room(self, index: int, tokens: int) -> None:
        """Announces that the answer of a sequence that decodes will have so many tokens."""
        drafter = self._decoder.drafter
        caches = [*self._decoder.target.caches, *(() if drafter is None else drafter.caches)]
        for row, sequence in enumerate(self._active):
            if sequence.index == index:
                sequence.room, slots = tokens, sequence.prompt_tokens + tokens + self._decoder.draft_tokens
                for cache in leaves(caches):
                    if places := places_of(cache):
                        part, number = places[row]
                        part.reserve(slots, number)

    def _finish_rows(
        self, emitted: list[list[Emitted]]
    ) -> list[tuple[TokenSequence, Emitted, str | None, list[Any] | None]]:
        """The tokens of a round up to the end of each row; rows that have ended leave the batch."""
        tokens, staying = [], []
        for row, (sequence, items) in enumerate(zip(self._active, emitted, strict=True)):
            sequence.drafted, finish = self._decoder.drafted[row], None
            for number, item in enumerate(items, sequence.emitted + 1):
                last = number == sequence.max_tokens
                finish = "stop" if item.token in self._ends else "length" if last else None
                caches = self._extracted(row) if finish is not None and self._return_caches else None
                tokens.append((sequence, item, finish, caches))
                if finish is not None:
                    self.answers.count(sequence.max_tokens, number)
                    break
            if finish is None:
                staying.append(row)
        self._keep(staying)
        return tokens

    def _read_prompts(self) -> None:
        """Admits sequences, and reads a chunk of each prompt; those that are read become rows."""
        self._admit()
        if not self._admission.rows:
            return
        self._join()
        step = self.step_size
        if self._pace is not None and (self._active or self._pace.engines > 1):
            step = self._pace.chunk(len(self._admission.rows))
        queue = list(islice(self._waiting, MAX_CONTINUING))
        limits = [min(self._chunk(row.left, step), self._beginnings.stop(row, queue)) for row in self._admission.rows]
        if (wait := self._waits()) and not on_cpu():
            mx.synchronize(self.stream)  # or the time of what is on its way would count
        started = time.perf_counter()
        tokens = self._admission.read(limits, self._pads, wait)
        if tokens and wait:
            self._decoder.idle = True
            seconds = time.perf_counter() - started
            self.pass_size.record(tokens, seconds)
            if self._pace is not None:
                self._pace.record(tokens, seconds)
        self._copy_to_waiting()
        self._admission.keep_prefixes(wait)
        self._join()

    def _waits(self) -> bool:
        """Whether a chunk is waited for. A GPU reads while the next pass is described, but its speed must be known."""
        if on_cpu() or not self._active or self._decoder.drafter is not None or self._steps % WAIT_EVERY == 0:
            return True
        return self._pace is not None and self._pace.passes < MIN_TIMED

    def _chunk(self, left: int, step: int) -> int:
        """Tokens of a prompt to be read next: equal chunks are padded least beside those of other prompts."""
        if len(self._admission.rows) == 1 or self._beginnings.by_chunk < NO_LIMIT or left <= 0:
            return step
        chunk = math.ceil(left / math.ceil(left / step))
        return min(step, round_read(chunk)) if self._pads else chunk

    def _join(self) -> None:
        sequences, caches, drafter_caches = self._admission.take_finished()
        self._decoder.join(sequences, caches, drafter_caches)
        self._active += sequences
        if sequences and self._watched:
            self._statistics.caches[:] = self._decoder.target.caches

    def _admit(self) -> None:
        """Moves waiting sequences to those that are read, as many as may be read together."""
        admitted: list[TokenSequence] = []
        reading = [row.left for row in self._admission.rows]
        while self._waiting and len(self._active) + len(reading) < self.max_batch_size:
            long = sum(left > MIN_CHUNK for left in reading)
            if long >= MAX_PROMPTS_AT_ONCE or (candidate := self._next(admitted)) is None:
                break
            position, source = candidate
            first = self._waiting[position]
            left = len(first.tokens) if source is None else len(first.before) + len(first.tokens) - source.tokens
            if not self._fits(first, admitted, len(reading)):
                break
            # A prompt that takes several passes does not keep others from joining in them. Each has rows as long as it.
            several = reading and max(reading) > self.step_size
            too_many = len(reading) >= self._max_long if several else sum(reading) + left > self.pass_size.tokens
            if reading and too_many:
                break
            del self._waiting[position]
            self._continue_from(first, source)
            admitted.append(first)
            reading.append(len(first.tokens))
        if self._pads:  # each number of rows is a shape of its own: 1, 2, 4 or 8
            while len(admitted) > 1 and len(reading).bit_count() > 1:
                reading.pop()
                self._waiting.appendleft(admitted.pop())
                if (caches := self._waiting[0].caches) is not None:
                    evaluate_caches(caches)  # or they keep the buffers of the row that they are copies of
        for sequence in admitted:
            sequence.start()
        self._admission.add([self._decoder.pending(sequence) for sequence in admitted])

    def _next(self, admitted: Sequence[TokenSequence]) -> tuple[int, Source | None] | None:
        """The first waiting sequence that can be admitted: its place in the queue, and the row it continues from.

        Others wait until a row that is being read has read the beginning that they share.
        """
        if not self._beginnings.shared:
            return 0, None
        reading = [
            *((row.sequence, row.total) for row in self._admission.rows),
            *((other, len(other.before)) for other in admitted),
        ]
        for position, sequence in enumerate(islice(self._waiting, MAX_SEARCHED)):
            source = self._source(sequence)
            known = len(sequence.before) if source is None else source.tokens
            coming = [
                common
                for other, read in reading
                if (common := self._beginnings.common(sequence, other)) > read or self._beginnings.trimmable
            ]
            if max(coming, default=0) < known + MIN_SHARED:
                return position, source
        return None

    def _copy_to_waiting(self) -> None:
        """Gives waiting sequences copies of the rows that have read just the tokens that they share."""
        for number, row in enumerate(self._admission.rows):
            if continuing := self._beginnings.continuing(row, islice(self._waiting, MAX_CONTINUING)):
                share(Source(self._admission.caches, number, row.total))
                caches = evaluate_caches(self._admission.extract(number))
                for sequence in continuing:  # copies, which take no memory until they are written to
                    continue_from(sequence, row.total, copy.deepcopy(caches))

    def _source(self, sequence: TokenSequence) -> Source | None:
        """The row that has read the longest beginning of a prompt, if that is more than its own caches hold."""
        target, trimmable, common_of = self._decoder.target, self._beginnings.trimmable, self._beginnings.common
        active = self._active if trimmable else []
        sources = [Source(target.caches, row, common_of(sequence, other)) for row, other in enumerate(active)]
        for row, pending in enumerate(self._admission.rows):
            common = common_of(sequence, pending.sequence)
            if pending.total <= common or trimmable:
                sources.append(Source(self._admission.caches, row, min(pending.total, common)))
        best = max(sources, key=lambda source: source.tokens, default=None)
        return None if best is None or best.tokens < len(sequence.before) + MIN_SHARED else best

    def _continue_from(self, sequence: TokenSequence, source: Source | None) -> None:
        """Gives a sequence copies of the caches of a row that has read the first tokens of its prompt."""
        if source is None:
            return
        share(source)
        batch = self._decoder if source.caches is self._decoder.target.caches else self._admission
        continue_from(sequence, source.tokens, batch.extract(source.row))

    def _fits(self, sequence: TokenSequence, admitted: Sequence[TokenSequence], reading: int) -> bool:
        """Whether the model supports a sequence beside the others; `admitted` are those of this step."""
        alike = all(_lengths(other) == _lengths(sequence) for other in admitted)
        if self._equal_rows:  # all rows that decode together were admitted in one step, and read as one batch
            return alike and not self._active and len(admitted) == reading
        return not self._equal_prompts or not reading or (alike and len(admitted) == reading)

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any sequence is left."""
        return bool(self._waiting or self._two_pass or self._admission.rows or self._active)

    @property
    def caches(self) -> list[Any]:
        """The caches of the rows that decode, one for each layer, for statistics; empty without rows."""
        return list(self._decoder.target.caches)

    @property
    def reading(self) -> list[tuple[list[int], list[Any]]]:
        """Batches of rows whose prompts are being read, for statistics: indices of sequences, and their caches."""
        batch = [row.sequence.index for row in self._admission.rows], list(self._admission.caches)
        return [batch, *self._two_pass.reading]

    @property
    def rows(self) -> list[int]:
        """The indices of the sequences that decode, in the order of the rows of `caches`."""
        return [sequence.index for sequence in self._active]

    @property
    def pending(self) -> list[int]:
        """The indices of the other sequences: those whose prompts are being read, then those that wait."""
        reading = [row.sequence.index for row in self._admission.rows]
        return [*reading, *(sequence.index for sequence in self._queued())]

    @property
    def progress(self) -> dict[int, SequenceProgress]:
        """The progress of each sequence, by its index."""
        progress = {row.index: SequenceProgress(len(row.tokens)) for row in self._queued()}
        progress |= self._two_pass.progress
        progress |= {row.sequence.index: SequenceProgress(max(0, row.left)) for row in self._admission.rows}
        return progress | {row.index: SequenceProgress(0, row.drafted, row.accepted) for row in self._active}

    def _queued(self) -> Iterator[TokenSequence]:
        yield from self._waiting
        yield from self._two_pass

    @property
    def speculation(self) -> SpeculationStatistics | None:
        """Statistics of its drafts, updated by each step; None without a drafter."""
        return None if self._decoder.drafter is None else self._statistics

    @property
    def stalls(self) -> tuple[int, int]:
        """Passes without drafts: those before which the device had nothing to do, and all."""
        return self._decoder.stalls, self._decoder.launched

    def make_caches(self) -> list[Any]:
        """New caches for a `TokenSequence`: of all layers, then those of the drafter."""
        return self._decoder.make_caches()

    def trim(self, caches: list[Any], n: int) -> bool:
        """Trims the last n tokens of caches that it returned, on all ranks; returns False if it cannot."""
        return trim_all(caches, n)

    def extract(self, index: int) -> list[Any] | None:
        """Evaluated copies of the caches of a sequence that decodes, or whose prompt is being read.

        They may hold more tokens than were returned (see their offset): a pass may be on its way, and a draft may have
        been right beyond the end. None for others, for prompts that are read twice, or if they cannot be trimmed.
        """
        if index in (rows := self.rows):
            return self._extracted(rows.index(index))
        reading = [row for row, pending in enumerate(self._admission.rows) if pending.sequence.index == index]
        with mx.stream(generation_stream):
            return evaluate_caches(self._admission.extract(reading[0])) if reading else None

    def _extracted(self, row: int) -> list[Any] | None:
        with mx.stream(generation_stream):  # what was accepted may have to be read first
            caches = self._decoder.extract(row)
        return caches and evaluate_caches(caches)

    def close(self) -> None:
        """Removes all sequences."""
        self._decoder.keep([])
        self._admission.keep([])
        self._active.clear()
        self._waiting.clear()
        self._two_pass.clear()
        self._classes.close()
        if self._wired:
            wired_memory.end(self, generation_stream)
            self._wired = False


def _lengths(sequence: TokenSequence) -> tuple[int, int]:
    """Tokens of a sequence in its caches, and those to be read."""
    cached = tokens_of(sequence.caches or [])
    return len(sequence.before) or cached, len(sequence.tokens)


def make_engine(
    model: nn.Module,
    ends: set[int],
    policy: CachePolicy | None = None,
    settings: EngineSettings = EngineSettings(),
    communicator: Communicator = LOCAL,
    statistics: SpeculationStatistics | None = None,
) -> Engine:
    """An engine for one model and policy.

    Args:
        ends: ids of tokens that end a sequence.
        communicator: with the other processes of the model, which all make an engine now. The leader decides whether it
            drafts, by which drafter, and whether caches are returned.
        statistics: of drafts, updated by each step; they hold the caches of the rows that decode.

    Raises:
        ValueError: what the model or the policy refuses.
    """
    saving = min_saving()  # measured before there is work
    if communicator.distributed:
        agree_on_saving(communicator.all_min([saving])[0])
    policy, draft_model = given_policy(policy), settings.draft_model
    drafts, return_caches = communicator.broadcast(
        lambda: (draft_model is not None or settings.drafting.drafter is not None, settings.return_caches)
    )
    decoder = make_decoder(model, policy, draft_model, settings.drafting if drafts else None, communicator)
    max_batch_size, max_wait = settings.max_batch_size, settings.max_wait
    alone = {type(cache).__name__ for cache in leaves(decoder.make_caches()) if isinstance(cache, OneRow)}
    if alone and max_batch_size > 1:
        log.warning("%s cannot share a batch: prompts run one after the other", ", ".join(alone))
        max_batch_size = 1
    equal = equal_lengths(model, communicator) if max_batch_size > 1 else (False, False)
    if decoder.drafter is not None and (any(equal) or decoder.drafter.equal_rows):
        max_batch_size, equal = 1, (False, False)  # in a round, rows accept different numbers of tokens
    caches = attention_caches(decoder.make_caches())
    by_chunk = policy.quantized_start or any(cache.evictor is not None for cache in caches)
    if drafts or communicator.distributed or by_chunk:
        max_wait = None
    settings = replace(settings, max_batch_size=max_batch_size, return_caches=return_caches, max_wait=max_wait)
    return Engine(decoder, ends, settings, statistics, equal, policy.growth)


# --- MLX's wired limit ------------------------------------------------------------------------------------------------
#
# How much memory macOS must not page out while an engine generates. Wired weights are not paged out, which matters to
# models that are large for their machine. A wired limit has also been part of every reproduced kernel panic of
# ml-explore/mlx#3186, so small models run without one.

WiredLimit = int | Literal["auto", "none"]
LARGE = 0.5  # weights above this share of the recommended limit are wired by "auto"


class WiredMemory:
    """The wired limit of this process. It is set while any engine generates, and restored after the last one.

    Attributes:
        limit: bytes; "none" leaves MLX's limit as it is; "auto" sets the recommended limit for large models only.
    """

    def __init__(self) -> None:
        self.limit: WiredLimit = "auto"
        self._engines: WeakSet[Any] = WeakSet()
        self._before: int | None = None  # the limit to be restored
        self._lock = threading.Lock()

    def choose(self, limit: WiredLimit) -> None:
        """Sets the limit of engines that begin from now on.

        Raises:
            ValueError: a number of bytes that this device does not support.
        """
        if isinstance(limit, int):
            highest = recommended_limit()
            if highest is None:
                raise ValueError("--wired-limit is for GPUs of Macs: leave it out here, or give none or auto")
            if limit > highest:
                raise ValueError(
                    f"--wired-limit {limit:,}: this device wires {highest:,} bytes at most; give less, or raise "
                    "the system's limit with sysctl iogpu.wired_limit_mb"
                )
        self.limit = limit

    def begin(self, engine: object, model: nn.Module) -> None:
        """Called before the first step of an engine of a model."""
        with self._lock:
            self._engines.add(engine)
            if self._before is None and (limit := self._bytes(model)):
                self._before = mx.set_wired_limit(limit)

    def end(self, engine: object, stream: Any) -> None:
        """Called when an engine is closed.

        Args:
            stream: of the engine: the limit must not change while it evaluates.
        """
        with self._lock:
            self._engines.discard(engine)
            if self._before is not None and not self._engines:
                mx.synchronize(stream)
                mx.set_wired_limit(self._before)
                self._before = None

    def _bytes(self, model: nn.Module) -> int:
        """The limit for an engine of a model; 0 sets none."""
        if self.limit == "none":
            return 0
        if self.limit != "auto":
            return self.limit
        recommended = recommended_limit() or 0
        return recommended if weight_bytes(model) > LARGE * recommended else 0


def recommended_limit() -> int | None:
    """The largest wired limit of the default device, in bytes; None where memory can't be wired."""
    info: dict[str, Any] = mx.device_info()
    return info.get("max_recommended_working_set_size")


wired_memory = WiredMemory()
