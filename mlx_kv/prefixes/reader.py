"""Reads a prompt chunk by chunk, starting from a cached prefix, and keeps new prefixes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import mlx.nn as nn

from mlx_kv.cache.checks import cache_list, check_type
from mlx_kv.cache.codecs import are_plain, in_words
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import NO_LIMIT, planned
from mlx_kv.files.serialization import model_fingerprint
from mlx_kv.generation.admission import MAX_CHECKPOINTS
from mlx_kv.generation.encoding import given_ids
from mlx_kv.generation.images import ImagePrompt, images_of
from mlx_kv.generation.prefill import (
    NO_INSTRUCTIONS,
    Instructions,
    TwoPassPrefill,
    needs_second_pass,
    prefill_step,
    read_chunk,
)
from mlx_kv.mlxlm.attention import attach_attention_hooks
from mlx_kv.mlxlm.convert import check_caches
from mlx_kv.mlxlm.loading import vocabulary_of
from mlx_kv.mlxlm.traverse import attention_caches, compact, is_ours, kind_of, leaves
from mlx_kv.prefixes.memory import PromptMemory
from mlx_kv.prefixes.store import PromptStore
from mlx_kv.settings import MOST_TOKENS, shown


class PromptReader:
    """Reads a prompt chunk by chunk, starting from a cached prefix, and keeps new prefixes.

    Args:
        model: a model, or any function that reads tokens (1, n) into caches.
        caches: new caches of the model, used if the store has no prefix.
        tokens: of the prompt, at least one, or what `encode_images` returns. The last one is not read: generation reads
            it for the first logits.
        store: a `PromptMemory` or `PromptStore`; None reads the whole prompt. A store without a fingerprint takes that
            of its first reader.
        step: tokens per chunk; None is the prefill step of the model.
        instructions: for the second pass of caches with a two-pass policy. These caches are kept at the end only.

    Attributes:
        caches: have read `read` tokens.
        reused: number of tokens from the store.

    Raises:
        ValueError: the store belongs to another model or policy; it has no fingerprint, and the model is not an
            mlx.nn.Module to compute one from; or a token id is outside of the vocabulary.
        TypeError: an argument has another type.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        caches: list[Any],
        tokens: Sequence[int] | ImagePrompt,
        store: PromptMemory | PromptStore | None = None,
        step: int | None = None,
        instructions: Instructions = NO_INSTRUCTIONS,
    ) -> None:
        check_type("model", model, Callable, "give a model, or what reads tokens (1, n) into caches")
        check_type("instructions", instructions, Instructions, "give Instructions.of(tokenizer, model)")
        if isinstance(model, nn.Module):
            caches, vocabulary = check_caches("caches", model, caches), vocabulary_of(model)
            self._images = images_of(model, tokens)  # held as long as they may be read
        else:
            caches, vocabulary = cache_list("caches", caches), MOST_TOKENS + 1
        self.model, self.tokens, self.store = model, given_ids(tokens, vocabulary, "tokens"), store
        prefix = None
        if store is not None:
            if not hasattr(store, "bind"):
                raise TypeError(f"store is {shown(store)}: give a PromptMemory, a PromptStore, or None")
            store.bind(lambda: _fingerprint(model, caches))
            prefix = store.find(self.tokens)
        if prefix is not None and (stored := cache_format(prefix[0])) != (expected := cache_format(caches)):
            pairs = zip_longest(stored.split("; "), expected.split("; "), fillvalue="no such layer")
            difference = next(f"{one}, not {other}" for one, other in pairs if one != other)
            raise ValueError(
                f"the store has this prompt in caches of another policy ({difference}): "
                "give it a fingerprint that includes the policy, or none"
            )
        if prefix is not None and _scores(prefix[0]) != _scores(caches):  # all lambdas have the same name
            raise ValueError(
                "the store has this prompt in caches of another score of the same name: "
                "give each a name of its own (mlx_kv.register_score), or a store of its own"
            )
        self.caches, self.reused = (caches, 0) if prefix is None else prefix
        if prefix is not None and isinstance(model, nn.Module):
            attach_attention_hooks(model, self.caches)
        self.read = self._kept = self.reused
        self.step_size = prefill_step(model, self.caches, step)
        self._checkpoints = needs_checkpoints(self.caches)
        self._two_pass: TwoPassPrefill | None = None
        if needs_second_pass(self.caches) and not self.done:
            rest = self.tokens[self.read : -1]
            self._two_pass = TwoPassPrefill(model, self.caches, [rest], self.step_size, instructions)

    @property
    def done(self) -> bool:
        return self.read >= len(self.tokens) - 1 and (self._two_pass is None or self._two_pass.done)

    def step(self) -> int:
        """Reads the next chunk, and returns its number of tokens.

        Caches that can't always be trimmed back to every prefix are also kept on the way, others at the end only.
        """
        start = self.read
        if (two_pass := self._two_pass) is not None:
            read_before = two_pass.read
            two_pass.step()
            self.read += two_pass.read - read_before
            if self.done:
                compact(self.caches)
        elif chunk := self.tokens[start : min(start + self.step_size, len(self.tokens) - 1)]:
            read_chunk(self.model, self.caches, [chunk])
            self.read += len(chunk)
        else:
            return 0
        # Also while every prefix can still be restored: after the next chunk this may no longer be so.
        is_far = self._checkpoints and (self.read - self._kept) * MAX_CHECKPOINTS >= len(self.tokens)
        if self.store is not None and (self.done or (is_far and two_pass is None)):
            self.store.keep(self.tokens[: self.read], self.caches)
            self._kept = self.read
        return self.read - start

    def close(self) -> None:
        """Stops reading: caches that evict at the end of a prompt no longer wait for the rest."""
        if self._two_pass is not None:
            self._two_pass.close()

    def finish(self) -> list[Any]:
        """Reads the rest of the prompt, and returns the caches."""
        while not self.done:
            self.step()
        return self.caches


def _fingerprint(model: object, caches: Sequence[Any]) -> str:
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"the prompt is read by a {type(model).__name__}, which has no fingerprint: give the store one"
        )
    return f"{model_fingerprint(model)} {hashlib.blake2b(cache_format(caches).encode(), digest_size=16).hexdigest()}"


def _scores(caches: Sequence[Any]) -> list[object]:
    return [None if cache.evictor is None else cache.evictor.score.function for cache in attention_caches(caches)]


# --- what caches can replace each other -------------------------------------------------------------------------------


def needs_checkpoints(caches: Sequence[Any]) -> bool:
    """Whether caches will reach a state that can't be trimmed back to every prefix."""
    return not all(
        is_ours(cache) and cache.layout.enough_slots == NO_LIMIT and not cache.view.residual_length
        for cache in leaves(caches)
    )


def cache_format(caches: Sequence[Any]) -> str:
    """How caches store keys and values, in words. Caches with the same words can replace each other."""
    return "; ".join(_format(cache) if is_ours(cache) else kind_of(cache).__name__ for cache in leaves(caches))


def draft_mark(caches: Sequence[Any], plain: Sequence[Any]) -> list[str]:
    """What distinguishes caches with room for drafted tokens from plain ones, if anything: rings are larger."""
    words = cache_format(caches)
    return [] if words == cache_format(plain) else [hashlib.blake2b(words.encode(), digest_size=8).hexdigest()]


def _format(cache: KVCache) -> str:
    words, view = [" ".join(map(str, planned(cache.layout).parameters))], cache.view
    if not are_plain(view.codecs):
        words.append(f"{in_words(view.codecs)} from {view.quantized_start}")
        if view.residual_length:
            words.append(f"but the newest {view.residual_length}")
    if cache.evictor is not None:
        words.append(f"by {cache.evictor.score.name} for each {cache.evictor.scope}")
        layers = cache.evictor.layer_allocation
        if not isinstance(layers, str):
            words.append(f"by table {hashlib.blake2b(repr(layers).encode(), digest_size=8).hexdigest()}")
    return ", ".join(words)
