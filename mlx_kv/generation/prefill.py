"""Prefill: chunk sizes, room for prompts and answers, passes over rows of unequal length, and two-pass prefill.

B rows, V the vocabulary.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from mlx_kv.cache.buffers import on_cpu
from mlx_kv.cache.growth import SLOT_MULTIPLE, Growth, round_up
from mlx_kv.cache.plan import round_read
from mlx_kv.cache.segmented import SegmentedCache
from mlx_kv.communicator import Communicator
from mlx_kv.generation.encoding import QUERY, apply_template
from mlx_kv.generation.sequence import SequenceProgress, TokenSequence
from mlx_kv.mlxlm.loading import context_length, layer_weights
from mlx_kv.mlxlm.recurrent import RecurrentState
from mlx_kv.mlxlm.traverse import attention_caches, compact, is_ours, leaves, mapped
from mlx_kv.policy import CachePolicy
from mlx_kv.settings import whole_number

PREFILL_STEP = 2048
CHUNKS_AT_ONCE = 4  # in one pass, however long prompts are: other rows wait meanwhile
FREED_SHARE = 16  # of a GPU's memory: what MLX may keep of a chunk's for the next one
# On a CPU, where nothing else happens while a chunk is read: no Ctrl-C is heard and no other row served, so it is to
# take a second at the most. Small chunks are faster there, too; below the least of these, weights are read too often.
CPU_STEPS = (512, 256, 128, 64)
CPU_WORK = 16e9  # weights of the layers times tokens, of a chunk


def reserve_for(caches: Iterable[Any], prompt_tokens: int, answer_tokens: int) -> None:
    """Announces a prompt and its answer to our caches, on top of what they hold."""
    for cache in attention_caches(caches):
        cache.reserve(cache.size() + prompt_tokens + answer_tokens)


def next_room(growth: Growth, prompt_tokens: int, answer_tokens: int, max_tokens: int) -> int:
    """Tokens of an answer that get room where it needs so many: as caches grow, but never more than it may have."""
    slots = prompt_tokens + answer_tokens
    return min(max_tokens, growth.capacity(slots, round_up(slots) - SLOT_MULTIPLE) - prompt_tokens)


def chunk_for(model: Any) -> int:
    """Tokens that a model is given at once: mlx-lm's 2,048 on a GPU; on a CPU fewer, the more weights a model has.

    It follows from model and device alone: where a budget evicts, chunks decide what is kept. All experts of a mixture
    count, as the tokens of a chunk meet most of them.
    """
    if not on_cpu():
        return PREFILL_STEP
    weights = layer_weights(model) if isinstance(model, nn.Module) else 0
    return next((step for step in CPU_STEPS if step * weights <= CPU_WORK), CPU_STEPS[-1])


def prefill_step(model: Any, caches: Iterable[Any], requested: int | None) -> int:
    """Prompt tokens to read at once: what was asked for, else `chunk_for` the model, less where rings plan for less."""
    if requested is not None:
        return whole_number("prefill_step_size", requested, minimum=1)
    planned = [cache.max_write for cache in attention_caches(caches) if cache.max_write is not None]
    return min([chunk_for(model), *planned])


@lru_cache(1)
def max_freed() -> int:
    """Bytes that MLX may keep of a chunk's memory for the next one; a server's memory limit may allow it fewer.

    A GPU waits a tenth of a chunk's time for memory that was given back.
    """
    return 0 if on_cpu() else (gpu_memory() or 0) // FREED_SHARE


def gpu_memory() -> int | None:
    """Bytes that a GPU has, or recommends to use; None if that is unknown."""
    info: dict[str, Any] = mx.device_info()
    names = ("max_recommended_working_set_size", "total_memory", "memory_size")
    return next((int(info[name]) for name in names if info.get(name)), None)


def announce(caches: Iterable[Any], lengths: Sequence[int]) -> None:
    """Prepares all layers for the next pass.

    Args:
        lengths: tokens that it reads of each row, without padding.
    """
    for cache in leaves(caches):
        if isinstance(cache, RecurrentState):
            cache.announce(lengths)
        elif isinstance(cache, SegmentedCache):
            cache.before_write()


def read_chunk(
    model: Callable[..., Any],
    caches: Sequence[Any],
    rows: Sequence[Sequence[int]] | mx.array,
    pad: bool = False,
    wait: bool = True,
) -> None:
    """Puts tokens into caches, for nothing but their keys and values.

    Args:
        model: or anything else that reads tokens (B, n) into caches.
        rows: tokens (B, n), or lists of any lengths, some of which may be empty.
        pad: lists get padding to one of few lengths, for a GPU, which prepares itself for each new shape of attention.
        wait: whether they are computed when this returns; else they are on their way.
    """
    if isinstance(rows, mx.array):
        announce(caches, [rows.shape[1]] * rows.shape[0])
        model(rows, cache=caches)
    else:
        longest = max(map(len, rows))
        if pad:  # up to what rings plan for
            planned = (cache.max_write for cache in attention_caches(caches))
            longest = max(longest, min([round_read(longest), *(most for most in planned if most is not None)]))
        read_ragged(model, caches, rows, longest)
    states = [cache.state for cache in caches]  # the logits are never computed
    if not wait:
        mx.async_eval(states)  # type: ignore[no-untyped-call]
        return
    mx.eval(states)
    if mx.get_cache_memory() > max_freed():
        mx.clear_cache()


def read_ragged(
    model: Callable[..., Any], caches: Sequence[Any], rows: Sequence[Sequence[int]], longest: int = 0
) -> mx.array:
    """One pass over rows of any lengths, padded on the right to the longest, or to more: logits (B, longest, V)."""
    lengths = [len(row) for row in rows]
    announce(caches, lengths)
    longest = max(longest, *lengths)
    ragged = min(lengths) < longest
    if ragged:
        for cache in caches:
            cache.prepare(lengths=lengths, right_padding=[longest - length for length in lengths])
    try:
        logits: mx.array = model(mx.array([[*row, *[0] * (longest - len(row))] for row in rows]), cache=caches)
    finally:
        if ragged:
            for cache in caches:
                cache.finalize()
    return logits


# --- two passes -------------------------------------------------------------------------------------------------------
#
# For scores such as kvzip, a prompt is read, and read again after a request to repeat it. The second pass leaves only
# the attention that tokens received. Full-attention caches with a budget do not evict until it ends, and its tokens
# are trimmed from them; all other caches are copied for it.
#
# Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction". The instructions and chunk
# sizes are kvpress's, so that both keep the same tokens.

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with"
CHUNK = 2048  # tokens repeated at once
OVERLAP = 8  # tokens before a later chunk, which show where it begins
MIN_CHUNK = 256  # where the model has hardly any positions left


@dataclass(frozen=True)
class Instructions:
    """Token ids that precede a repetition.

    Attributes:
        first, later: request the beginning of a text, and a later part of it.
        answer: what separates a question from its answer.
        positions: maximum positions of the model, if known.
    """

    first: tuple[int, ...] = ()
    later: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()
    positions: int | None = None

    @classmethod
    def of(cls, tokenizer: Any, model: nn.Module) -> Instructions:
        """Those of a tokenizer, with its chat template. Without a tokenizer they are empty."""
        if tokenizer is None:
            return cls(positions=context_length(model))

        def ids(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        answer = "\n"
        if getattr(tokenizer, "chat_template", None) is not None:
            messages = [{"role": "user", "content": QUERY}]
            whole: str = apply_template(tokenizer, messages, False)
            answer = whole.partition(QUERY)[2]
        return cls(ids(FIRST), ids(LATER), ids(answer), context_length(model))

    @classmethod
    def for_policy(cls, policy: CachePolicy | None, tokenizer: Any, model: nn.Module) -> Instructions:
        """Those of a tokenizer if the policy needs a second pass, else empty ones."""
        return cls.of(tokenizer, model) if policy is not None and policy.reads_twice else NO_INSTRUCTIONS

    def before(self, text: Sequence[int], start: int) -> list[int]:
        """The tokens that request the part of a text that begins at `start`."""
        request = [*self.later, *text[max(0, start - OVERLAP) : start]] if start else list(self.first)
        return [*request, *self.answer]

    def chunk_after(self, tokens: int) -> int:
        """Tokens that can be repeated at once after so many: fewer where the model has no positions left for more."""
        request = max(len(self.first), len(self.later) + OVERLAP) + len(self.answer)
        return CHUNK if self.positions is None else max(MIN_CHUNK, min(CHUNK, self.positions - tokens - request))


NO_INSTRUCTIONS = Instructions()


def needs_second_pass(caches: Iterable[Any]) -> bool:
    """Whether any layer's score depends on the attention that tokens receive when they are read again."""
    return any(_needs_it(cache) for cache in attention_caches(caches))


def _needs_it(cache: Any) -> bool:
    return is_ours(cache) and cache.evictor is not None and cache.evictor.wants_second_pass


class TwoPassPrefill:
    """Reads texts into caches twice.

    Args:
        model: reads tokens (B, n) into caches.
        caches: of as many sequences as there are texts, all at the same offset; they may hold earlier tokens. At least
            one layer needs a second pass.
        texts: token ids, of equal length.
        step: tokens read at once.
        instructions: before the repetition.
        read: tokens of each text that the caches hold already; they were held (`hold`) before that.
        chunk: maximum tokens repeated at once.

    Attributes:
        read: tokens of each text that have been read for the first time.
        length: tokens of each text.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        caches: Sequence[Any],
        texts: Sequence[Sequence[int]],
        step: int,
        instructions: Instructions = NO_INSTRUCTIONS,
        *,
        read: int = 0,
        chunk: int = CHUNK,
    ) -> None:
        self._model, self._caches, self._step, self._instructions = model, caches, step, instructions
        self._texts, self.length, self.read = [list(text) for text in texts], len(texts[0]), read
        self._scored = [(each, each.evictor) for each in attention_caches(caches) if each.evictor and _needs_it(each)]
        (offset,) = {row.offset for cache, _ in self._scored for row in cache.view.rows}
        self._before = offset - read  # tokens before the texts
        self._chunk = min(chunk, instructions.chunk_after(self._before + self.length))
        self._repeated = 0
        self._pending: list[list[int]] = []  # by text, the rest of the chunk that is being repeated
        self._copies: list[Any] = []  # the caches that it is read into
        self._residuals: list[Any] = []  # of the scored caches, before the second pass
        hold(caches)
        for cache, _ in self._scored:
            cache.reserve(self._before + self.length + len(self._request(self._texts[0], 0)) + OVERLAP)

    @property
    def done(self) -> bool:
        """Whether all of it has been read twice."""
        return self._repeated >= self.length

    def step(self) -> None:
        """Reads some tokens, for the first or the second time.

        Raises:
            Whatever the model raises; the repetition is trimmed then, and the caches evict again.
        """
        try:
            if self.read < self.length:
                chunk = [text[self.read : self.read + self._step] for text in self._texts]
                read_chunk(self._model, self._caches, chunk)
                self.read += len(chunk[0])
            else:
                self._repeat()
        except BaseException:
            self.close()
            raise
        if self.done:
            self.close()

    def finish(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Reads all of it; `progress` gets the tokens of a text that were read, and its length, after each pass."""
        try:
            while not self.done:
                self.step()
                if progress is not None:
                    progress(self.read, self.length)
        finally:
            self.close()

    def close(self) -> None:
        """Ends it at any point: trims what was repeated, and lets the caches evict."""
        self._trim(observed=False)
        for cache, _ in self._scored:
            cache.release()

    def _request(self, text: list[int], start: int) -> list[int]:
        """A chunk of a text, after the instructions that request it."""
        return [*self._instructions.before(text, start), *text[start : start + self._chunk]]

    def _repeat(self) -> None:
        last = min(self._repeated + self._chunk, self.length)
        if not self._pending:
            self._pending = [self._request(text, self._repeated) for text in self._texts]
            self._copies = mapped(self._caches, lambda cache: cache if _needs_it(cache) else copy.deepcopy(cache))
            self._residuals = [cache.residual and cache.residual.copied() for cache, _ in self._scored]
            for _, evictor in self._scored:
                evictor.begin_second_pass(self._before + self._repeated, self._before + last)
        chunk = [text[: self._step] for text in self._pending]
        rest = [text[self._step :] for text in self._pending]
        read_chunk(self._model, self._copies, chunk)
        self._pending = rest if rest[0] else []
        if not self._pending:
            self._trim()
            self._repeated = last

    def _trim(self, observed: bool = True) -> None:
        end = self._before + self.read  # also where a pass failed half way
        for index, (cache, evictor) in enumerate(self._scored):
            if self._residuals:  # a repetition is longer than what its ring could take back
                cache.residual = self._residuals[index]
            beyond = [row.offset - end for row in cache.view.rows]
            if max(beyond) > 0:
                cache.trim_per_sequence([max(0, count) for count in beyond])
            evictor.end_second_pass(observed)
        self._pending, self._copies, self._residuals = [], [], []


def hold(caches: Iterable[Any]) -> None:
    """Stops caches that need a second pass from evicting until it ends."""
    for cache in attention_caches(caches):
        if _needs_it(cache):
            cache.hold()


def prefill_all(
    model: Callable[..., Any],
    caches: Sequence[Any],
    tokens: Sequence[int],
    step: int,
    instructions: Instructions = NO_INSTRUCTIONS,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Reads all tokens of a prompt into caches: in two passes if they need them, else in chunks, the last token alone.

    Compactions happen at the same positions as in generation. After each chunk, `progress` receives the number of
    tokens read and the total.
    """
    if needs_second_pass(caches):
        TwoPassPrefill(model, caches, [tokens], step, instructions).finish(progress)
        return
    start, total = 0, len(tokens)
    while start < total:
        end = max(start + 1, min(start + step, total - 1))
        read_chunk(model, caches, [tokens[start:end]])
        start = end
        if progress is not None:
            progress(start, total)


class TwoPassQueue:
    """Sequences of an engine whose prompts are read in two passes before they join a batch.

    One prompt is read after the other, a chunk in each step of the engine, so that rows continue to decode meanwhile.

    Args:
        read: reads tokens (1, n) into the caches of a sequence.
        make_caches: for sequences without caches.
        step: tokens read at once.
        instructions: before the second pass.
    """

    def __init__(
        self, read: Callable[..., Any], make_caches: Callable[[], list[Any]], step: int, instructions: Instructions
    ) -> None:
        self._read, self._make_caches, self._step, self._instructions = read, make_caches, step, instructions
        self._needed = needs_second_pass(make_caches())
        self._queue: deque[TokenSequence] = deque()
        self._current: TwoPassPrefill | None = None  # of the first of them

    def accepts(self, sequence: TokenSequence) -> bool:
        """Whether a sequence belongs here first. Its last token is left to be read in the batch."""
        needed = self._needed if sequence.caches is None else needs_second_pass(sequence.caches)
        return needed and len(sequence.tokens) > 1

    def append(self, sequence: TokenSequence) -> None:
        self._queue.append(sequence)

    def step(self) -> TokenSequence | None:
        """Reads a chunk of the first sequence, and returns it after its second pass."""
        if not self._queue:
            return None
        sequence = self._queue[0]
        with mx.stream(generation_stream):
            if self._current is None:
                caches = sequence.caches = sequence.caches or self._make_caches()
                reserve_for(caches, len(sequence.tokens), sequence.room - sequence.resumed)
                texts = [sequence.tokens[:-1]]
                self._current = TwoPassPrefill(self._read, caches, texts, self._step, self._instructions)
                sequence.start()
            self._current.step()
            if not self._current.done:
                return None
            self._current = None
            sequence.before = (*sequence.before, *sequence.tokens[:-1])
            if sequence.keep is not None and sequence.caches is not None:
                compact(sequence.caches)
                sequence.keep(list(sequence.before), sequence.caches)
        sequence.tokens = sequence.tokens[-1:]
        return self._queue.popleft()

    @property
    def reading(self) -> list[tuple[list[int], list[Any]]]:
        """The index of the sequence whose prompt is being read, and its caches."""
        if self._current is None:
            return []
        return [([self._queue[0].index], self._queue[0].caches or [])]

    @property
    def progress(self) -> dict[int, SequenceProgress]:
        """Of this sequence, by its index."""
        if self._current is None:
            return {}
        return {self._queue[0].index: SequenceProgress(len(self._queue[0].tokens) - self._current.read)}

    def cancel(self, index: int) -> None:
        """Removes a sequence, if it is here."""
        if self._queue and self._queue[0].index == index:
            self._stop()
        self._queue = deque(sequence for sequence in self._queue if sequence.index != index)

    def clear(self) -> None:
        self._queue.clear()
        self._stop()

    def _stop(self) -> None:
        if self._current is not None:
            self._current.close()  # the caller may continue with these caches
        self._current = None

    def __iter__(self) -> Iterator[TokenSequence]:
        return iter(self._queue)

    def __len__(self) -> int:
        return len(self._queue)


def check_local(communicator: Communicator) -> None:
    """Raises ValueError for several processes: prompts are read twice by one alone."""
    if communicator.distributed:
        raise ValueError(
            "a score such as kvzip has prompts read twice, which one process does alone: choose another score for "
            "several, such as key_diff"
        )
