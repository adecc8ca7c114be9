"""Prompts that are read twice, for scores that want it: whole, and then once more as "repeat the previous context".

Decides in which words a model is asked to repeat, in which chunks, and what is undone afterwards: the second reading
leaves nothing behind but what tokens received. Full attention with a budget is held back from evicting meanwhile, and
its tokens of the second reading are trimmed; all other caches are copied for it. Knows nothing about scores.

Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction"; words and chunks are those of
kvpress, so that both keep the same tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.generation.encoding import QUERY, applied_template
from mlx_kv.generation.prefill import prefill, read_chunk
from mlx_kv.mlxlm.loading import context_length
from mlx_kv.mlxlm.traverse import attention_caches, is_ours, mapped
from mlx_kv.policy import CachePolicy

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with"
CHUNK = 2048  # tokens that are repeated at once
BEFORE = 8  # tokens before a later chunk, which say where it begins
LEAST_CHUNK = 256  # where the model has hardly any positions left


@dataclass(frozen=True)
class Instructions:
    """Token ids of what comes before a repetition.

    Attributes:
        first, later: asks for the beginning of a text, and for a later part of it.
        answer: what stands between a question and its answer.
        positions: that the model was made for, where that is known.
    """

    first: tuple[int, ...] = ()
    later: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()
    positions: int | None = None

    @classmethod
    def of(cls, tokenizer: Any, model: nn.Module) -> Instructions:
        """Those of a tokenizer, with the marks of its chats. Without one there are none: a text is just read again."""
        if tokenizer is None:
            return cls(positions=context_length(model))

        def ids(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        answer = "\n"
        if getattr(tokenizer, "chat_template", None) is not None:
            messages = [{"role": "user", "content": QUERY}]
            whole: str = applied_template(tokenizer, messages, False)
            answer = whole.partition(QUERY)[2]
        return cls(ids(FIRST), ids(LATER), ids(answer), context_length(model))

    @classmethod
    def for_policy(cls, policy: CachePolicy | None, tokenizer: Any, model: nn.Module) -> Instructions:
        """Those that caches of a policy want, if they want any."""
        return cls.of(tokenizer, model) if policy is not None and policy.reads_twice else NOTHING_ASKED

    def before(self, text: Sequence[int], start: int) -> list[int]:
        """What asks for the part of a text that begins there."""
        asked = [*self.later, *text[max(0, start - BEFORE) : start]] if start else list(self.first)
        return [*asked, *self.answer]

    def chunk_after(self, tokens: int) -> int:
        """Tokens that can be repeated at once after so many: fewer where the model has no positions left for more."""
        asked = max(len(self.first), len(self.later) + BEFORE) + len(self.answer)
        return CHUNK if self.positions is None else max(LEAST_CHUNK, min(CHUNK, self.positions - tokens - asked))


NOTHING_ASKED = Instructions()


def wants_rereading(caches: Iterable[Any]) -> bool:
    """Whether any layer's score is of what tokens receive when they are read again."""
    return any(_wants(cache) for cache in attention_caches(caches))


def _wants(cache: Any) -> bool:
    return is_ours(cache) and cache.evictor is not None and cache.evictor.wants_second_pass


class Rereading:
    """Texts on their way into caches, to be read twice.

    Args:
        model: reads tokens (B, n) into caches.
        caches: of as many sequences as there are texts, that stand alike; they may have read what comes before. Some
            want it.
        texts: token ids, of one length.
        step: tokens read at once.
        instructions: before the repetition.
        read: tokens of each text that the caches have read already; they were held before that.
        chunk: tokens that are repeated at once, or fewer.

    Attributes:
        read: tokens of each text that were read for the first time.
        length: of each text.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        caches: Sequence[Any],
        texts: Sequence[Sequence[int]],
        step: int,
        instructions: Instructions = NOTHING_ASKED,
        *,
        read: int = 0,
        chunk: int = CHUNK,
    ) -> None:
        self._model, self._caches, self._step, self._instructions = model, caches, step, instructions
        self._texts, self.length, self.read = [list(text) for text in texts], len(texts[0]), read
        self._wanting = [(own, own.evictor) for own in attention_caches(caches) if own.evictor and _wants(own)]
        (stands,) = {row.offset for cache, _ in self._wanting for row in cache.view.rows}
        self._before = stands - read  # tokens that come before the texts
        self._chunk = min(chunk, instructions.chunk_after(self._before + self.length))
        self._repeated = 0
        self._pending: list[list[int]] = []  # of the repetition of one chunk, by text
        self._copies: list[Any] = []  # the caches that it goes to
        self._residuals: list[Any] = []  # of those that want it, as they were before
        hold(caches)
        for cache, _ in self._wanting:
            cache.reserve(self._before + self.length + len(self._asked(self._texts[0], 0)) + BEFORE)

    @property
    def done(self) -> bool:
        """Whether all of it has been read twice."""
        return self._repeated >= self.length

    def step(self) -> None:
        """Reads some tokens, for the first or for the second time.

        Raises:
            Whatever the model does: nothing is left of the repetition then, and the caches evict as ever.
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
        """Reads all of it; `progress` is told after each pass the tokens of a text that were read, and all."""
        try:
            while not self.done:
                self.step()
                if progress is not None:
                    progress(self.read, self.length)
        finally:
            self.close()

    def close(self) -> None:
        """Ends it, wherever it is: takes back what was repeated, and lets caches evict."""
        self._take_back(heard=False)
        for cache, _ in self._wanting:
            cache.release()

    def _asked(self, text: list[int], start: int) -> list[int]:
        """A chunk of a text, and before it what asks for it."""
        return [*self._instructions.before(text, start), *text[start : start + self._chunk]]

    def _repeat(self) -> None:
        last = min(self._repeated + self._chunk, self.length)
        if not self._pending:
            self._pending = [self._asked(text, self._repeated) for text in self._texts]
            self._copies = mapped(self._caches, lambda cache: cache if _wants(cache) else copy.deepcopy(cache))
            self._residuals = [cache.residual for cache, _ in self._wanting]
            for _, evictor in self._wanting:
                evictor.begin_second_pass(self._before + self._repeated, self._before + last)
        chunk = [text[: self._step] for text in self._pending]
        rest = [text[self._step :] for text in self._pending]
        read_chunk(self._model, self._copies, chunk)
        self._pending = rest if rest[0] else []
        if not self._pending:
            self._take_back()
            self._repeated = last

    def _take_back(self, heard: bool = True) -> None:
        stands = self._before + self.read  # also where a pass failed half way
        for index, (cache, evictor) in enumerate(self._wanting):
            if self._residuals:  # a repetition is longer than what its ring could take back
                cache.residual = self._residuals[index]
            beyond = [row.offset - stands for row in cache.view.rows]
            if max(beyond) > 0:
                cache.trim_per_sequence([max(0, count) for count in beyond])
            evictor.end_second_pass(heard)
        self._pending, self._copies, self._residuals = [], [], []


def hold(caches: Iterable[Any]) -> None:
    """Has caches that want a text to be read twice evict nothing until that has been done."""
    for cache in attention_caches(caches):
        if _wants(cache):
            cache.hold()


def read_all(
    model: Callable[..., Any],
    caches: Sequence[Any],
    tokens: Sequence[int],
    step: int,
    instructions: Instructions = NOTHING_ASKED,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Puts all tokens of a prompt into caches: twice where they want that, else as `prefill` does."""
    if wants_rereading(caches):
        Rereading(model, caches, [tokens], step, instructions).finish(progress)
    else:
        prefill(model, caches, mx.array(list(tokens))[None], step, progress)
