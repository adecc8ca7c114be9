"""`generate`: the text that follows a prompt, in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.cache.checks import check_type
from mlx_kv.generation.encoding import encode_messages, has_chats, wrapped
from mlx_kv.generation.settings import SamplingSettings
from mlx_kv.generation.speculation.drafters import Drafter, Factory
from mlx_kv.generation.stop_strings import StopStrings
from mlx_kv.generation.stream import check_policy_options, speculative_generate, stream_generate
from mlx_kv.policy import CachePolicy
from mlx_kv.settings import shown


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]] | mx.array,
    policy: CachePolicy | None = None,
    max_tokens: int = 256,
    sampling: SamplingSettings | None = None,
    *,
    stop: str | Sequence[str] = (),
    on_text: Callable[[str], None] | None = None,
    draft_model: nn.Module | None = None,
    drafter: str | Factory | Drafter | None = None,
    **options: Any,
) -> str:
    """Generates the continuation of a prompt, and returns it as one string.

    Args:
        model, tokenizer: as from `load`.
        prompt: a text, which is continued unchanged; token ids; or chat messages (`{"role": …, "content": …}`), which
            are formatted by the tokenizer's chat template.
        policy: settings of the caches; None is `CachePolicy()`.
        max_tokens: maximum tokens to generate, from 1 up.
        sampling: sampling settings; None is greedy, unless `options` has a sampler.
        stop: strings that end the answer and are not returned; the first match counts.
        on_text: called with each piece of the answer as it is generated; all pieces together are the result.
        draft_model, drafter: speculate, as `speculative_generate` does; the text stays the same.
        options: those of `stream_generate`, or where it speculates, of `speculative_generate`: `sampler`, `seed`,
            `logits_processors`, `prompt_cache`, `prefill_step_size`, …

    Raises:
        ValueError: an argument that those functions refuse; messages without a chat template; an empty stop string;
            sampling and an option that sets the same.
        TypeError: an argument of another type, or an unknown option.
    """
    tokenizer = wrapped(tokenizer)
    check_type("sampling", sampling, SamplingSettings | None, "give SamplingSettings(...), or None for the likeliest")
    check_type("on_text", on_text, Callable | None, "give a function of a text, or None")
    check_policy_options(options)
    stops = _stops(stop)
    given: Any = _tokens_of_messages(tokenizer, prompt) if _are_messages(prompt) else prompt
    common = {"policy": policy, "max_tokens": max_tokens, **options, **_sampled(tokenizer, sampling, options)}
    if draft_model is None and drafter is None:
        responses = stream_generate(model, tokenizer, given, **common)
    else:
        responses = speculative_generate(model, draft_model, tokenizer, given, drafter=drafter, **common)
    cut, pieces = StopStrings(stops), list[str]()
    for response in responses:
        piece = cut.feed(response.text) + (cut.finish() if response.finish_reason is not None else "")
        pieces.append(piece)
        if on_text is not None and piece:
            on_text(piece)
        if cut.stopped:
            break
    return "".join(pieces)


def _stops(stop: Any) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or not all(isinstance(each, str) for each in stops):
        raise TypeError(f"stop is {shown(stop)}: give a text, or a list of texts")
    if not all(stops):
        raise ValueError("a stop string is empty: leave it out")
    return list(stops)


def _sampled(tokenizer: Any, sampling: SamplingSettings | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in terms of the loops."""
    if sampling is None:
        return {}
    twice = [name for name in ("sampler", "seed", "logits_processors") if options.get(name) is not None]
    if twice:
        raise ValueError(f"got sampling and {twice[0]}, which sets the same: give one of them")
    rules = replace(sampling, seed=None).sampler(0, tokenizer)
    return {"sampler": rules, "seed": sampling.seed, "logits_processors": sampling.processors()}


def _are_messages(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(each, Mapping) for each in prompt)


def _tokens_of_messages(tokenizer: Any, messages: Any) -> list[int]:
    if not has_chats(tokenizer):
        raise ValueError("the prompt is a chat, and this tokenizer has no chat template: give a text, or token ids")
    return encode_messages(tokenizer, [dict(message) for message in messages])
