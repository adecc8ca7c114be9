"""Text from prompts: one prompt in one call or as a stream, with or without drafts, or many prompts in a batch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse

from mlx_kv.cache.checks import cache_list, check_type, whole_numbers
from mlx_kv.communicator import LOCAL, Communicator, Steps
from mlx_kv.generation.decoder import Decoder, make_decoder
from mlx_kv.generation.encoding import encode_messages, given_ids, has_chats, tokens_of_prompt, wrap_tokenizer
from mlx_kv.generation.engine import Engine, EngineSettings, make_engine
from mlx_kv.generation.images import ImagePrompt, encode_images, has_images, images_of
from mlx_kv.generation.prefill import NO_INSTRUCTIONS, Instructions, check_local, needs_second_pass, prefill_step
from mlx_kv.generation.sampling import Sampler, check_seed, derived_seed, sampler_of_sequence
from mlx_kv.generation.sequence import UNLIMITED, BatchToken, TokenSequence
from mlx_kv.generation.settings import LogitsProcessor, SamplingSettings, check_processors
from mlx_kv.generation.speculation import LOOKUP_MAX, LOOKUP_MIN, DraftLength, DraftSettings
from mlx_kv.generation.speculation.drafters import Drafter, Factory
from mlx_kv.generation.statistics import SpeculationStatistics
from mlx_kv.mlxlm.attention import attach_attention_hooks
from mlx_kv.mlxlm.convert import check_caches, check_windows
from mlx_kv.mlxlm.loading import context_length, vocabulary_of
from mlx_kv.mlxlm.probe import check_model
from mlx_kv.mlxlm.traverse import attention_caches, can_trim
from mlx_kv.mlxlm.vision import Image
from mlx_kv.policy import CachePolicy, given_policy
from mlx_kv.settings import as_int, shown, whole_number

# --- one prompt in one call -------------------------------------------------------------------------------------------


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]] | mx.array | ImagePrompt,
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
            are formatted by the tokenizer's chat template, with images where the model reads them (`encode_images`).
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
    tokenizer = wrap_tokenizer(tokenizer)
    check_type("sampling", sampling, SamplingSettings | None, "give SamplingSettings(...), or None for the likeliest")
    check_type("on_text", on_text, Callable | None, "give a function of a text, or None")
    check_policy_options(options)
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or not all(isinstance(text, str) for text in stops):
        raise TypeError(f"stop is {shown(stops)}: give a text, or a list of texts")
    if not all(stops):
        raise ValueError("a stop string is empty: leave it out")
    tokens: Any = prompt
    if isinstance(tokens, Sequence) and tokens and all(isinstance(message, Mapping) for message in tokens):
        if has_images(tokens):
            tokens = encode_images(model, tokenizer, tokens)
        elif not has_chats(tokenizer):
            raise ValueError("the prompt is a chat, and this tokenizer has no chat template: give a text, or token ids")
        else:
            tokens = encode_messages(tokenizer, [dict(message) for message in tokens])
    options = {"policy": policy, "max_tokens": max_tokens, **options}
    if sampling is not None:
        twice = [name for name in ("sampler", "seed", "logits_processors") if options.get(name) is not None]
        if twice:
            raise ValueError(f"got sampling and {twice[0]}, which sets the same: give one of them")
        sampler = replace(sampling, seed=None).sampler(0, tokenizer)
        options |= {"sampler": sampler, "seed": sampling.seed, "logits_processors": sampling.processors()}
    if draft_model is None and drafter is None:
        responses = stream_generate(model, tokenizer, tokens, **options)
    else:
        responses = speculative_generate(model, draft_model, tokenizer, tokens, drafter=drafter, **options)
    cut, pieces = StopStrings(stops), list[str]()
    for response in responses:
        piece = cut.feed(response.text) + (cut.finish() if response.finish_reason is not None else "")
        pieces.append(piece)
        if on_text is not None and piece:
            on_text(piece)
        if cut.stopped:
            break
    return "".join(pieces)


# --- streams ----------------------------------------------------------------------------------------------------------

FOR_THE_POLICY = {field.name: field.name for field in fields(CachePolicy)} | {
    "kv_bits": "bits",
    "kv_group_size": "group_size",
    "quantized_kv_start": "quantized_start",
}
# Of mlx-lm's stream_generate, which takes num_draft_tokens without a draft, too; and `before`.
OPTIONS = (
    *("input_embeddings", "logits_processors", "num_draft_tokens", "prefill_step_size", "prompt_progress_callback"),
    *("stream", "before"),
)


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array | ImagePrompt,
    policy: CachePolicy | None = None,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    prompt_cache: list[Any] | None = None,
    seed: int | None = None,
    group: Communicator | None = None,
    **options: Any,
) -> Iterator[GenerationResponse]:
    """Generates text token by token, with the caches of this package.

    Args:
        model, tokenizer: as from `mlx_lm.load`.
        prompt: a text, token ids, or what `encode_images` returns.
        policy: settings of the caches; None is `CachePolicy()`.
        max_tokens: maximum tokens to generate, -1 for no limit. The caches reserve memory for prompt and max_tokens.
        sampler: log-probabilities (B, vocab) to token ids (B,), such as mlx-lm's `make_sampler` gives; None is greedy.
        prompt_cache: caches to continue from, made by `make_prompt_cache`, and updated in place. Replaces `policy`.
        seed: makes a `TemperatureSampler` repeatable: each position of the sequence, counted from the first token that
            the caches have read, has random numbers of its own.
        group: ranks that each have a part of the model and make the same call. The prompt, limits and sampler of the
            leader apply, and all ranks stop when the leader stops iterating.
        options: those of mlx-lm's `generate_step`: prefill_step_size, logits_processors, prompt_progress_callback,
            input_embeddings and stream; and `before`, as in `speculative_generate`.

    Returns:
        An iterator of mlx-lm's `GenerationResponse`, one for each token.

    Raises:
        ValueError: an empty prompt, max_tokens of 0, a policy beside a prompt_cache, a seed for a sampler that is no
            `TemperatureSampler`, token ids that the model does not have, or what `make_prompt_cache` refuses.
        TypeError: an argument of another type, or an unknown option.
    """
    check_model("model", model)
    check_policy_options(options)
    if "draft_model" in options:
        raise ValueError("draft_model is for speculative_generate: call that")
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise TypeError(f"there is no option {unknown[0]}: leave it out, or give one of {', '.join(OPTIONS)}")
    embeddings = options.get("input_embeddings")
    check_type("input_embeddings", embeddings, mx.array | None, "give an mx.array (tokens, hidden size), or None")
    if prompt_cache is not None and policy is None:
        check_windows(model, check_caches("prompt_cache", model, prompt_cache))

    def limit() -> int:
        most = as_int(max_tokens)
        if type(most) is not int or most == 0 or most < -1:
            raise ValueError(f"max_tokens is {shown(max_tokens)}: give a number from 1 up, or -1 for no limit")
        return most

    return _stream(
        model,
        wrap_tokenizer(tokenizer),
        prompt,
        policy,
        limit,
        sampler=sampler,
        seed=seed,
        prompt_cache=prompt_cache,
        before=options.get("before", ()),
        prefill_step_size=options.get("prefill_step_size"),
        progress=options.get("prompt_progress_callback"),
        group=group,
        processors=options.get("logits_processors"),
        embeddings=embeddings,
        device_stream=options.get("stream"),
    )


def speculative_generate(
    model: nn.Module,
    draft_model: nn.Module | None,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array | ImagePrompt,
    max_tokens: int = 256,
    num_draft_tokens: int | None = None,
    policy: CachePolicy | None = None,
    sampler: Sampler | None = None,
    prefill_step_size: int | None = None,
    statistics: SpeculationStatistics | None = None,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    seed: int | None = None,
    drafter: str | Factory | Drafter | None = None,
    prompt_lookup_min: int = LOOKUP_MIN,
    prompt_lookup_max: int = LOOKUP_MAX,
    draft_length: DraftLength = "chosen",
    prompt_cache: list[Any] | None = None,
    before: Sequence[int] | ImagePrompt = (),
    group: Communicator | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
) -> Iterator[GenerationResponse]:
    """Generates the same text as `stream_generate`, with fewer passes of the model where drafted tokens are accepted.

    Args:
        model, draft_model: models with the same tokenizer; no draft model where the drafter needs none.
        tokenizer: as from `mlx_lm.load`; None with a prompt of token ids, for responses without text.
        prompt: a text, token ids, or what `encode_images` returns.
        max_tokens: tokens to generate, from 1 up.
        num_draft_tokens: K, tokens drafted for each pass of the model, from 1 up; None is 3, and 10 for `ngram`,
            `suffix` and `auto`.
        policy: settings of the model's caches; rings reserve slots to roll back K + 1 tokens.
        sampler: None is greedy, with the same tokens as without a draft. With a `TemperatureSampler` the draft model
            uses the same random keys; with any other sampler it proposes the likeliest tokens. All three are exact.
        prefill_step_size: prompt tokens read at once; by default what `stream_generate` would read.
        statistics: filled in as tokens come.
        prompt_progress_callback: called with the prompt tokens that the model has read, and their number.
        seed: as in `stream_generate`, which gives the same tokens.
        drafter: proposes tokens instead of the draft model: a name of `drafter_names()`, a factory as
            `register_drafter` takes it, or a `Drafter`, for this call only. `ngram`, `suffix` and `auto` need no
            model.
        prompt_lookup_min, prompt_lookup_max: minimum number of last tokens that must occur earlier in the text for
            `ngram` and `suffix` to propose what followed them, and the maximum that `ngram` searches for.
        draft_length: "chosen" drafts up to K tokens, as many as made generation faster so far, or none; "fixed" always
            drafts K.
        prompt_cache: caches to continue from, made by `make_prompt_cache`, and updated in place; they may hold more
            tokens than were returned if a token ends the sequence. Replaces `policy`; not with a draft model.
        before: the tokens in `prompt_cache`, or the prompt with images, if known, for processors and drafters that use
            them.
        group: as in `stream_generate`. Drafts are the leader's: the others need no draft model and no drafter.
        logits_processors: functions of mlx-lm's form, such as those of `make_logits_processors`: they take the tokens
            (n,) so far and the logits (1, V) of the next one, and return logits. They run at each drafted position.

    Returns:
        An iterator of mlx-lm's `GenerationResponse`, one for each token.

    Raises:
        ValueError: K or max_tokens below 1, an empty prompt, vocabularies that differ, caches that cannot roll back, a
            seed for a sampler that is no `TemperatureSampler`, neither a draft model nor a drafter, a policy beside a
            prompt_cache, token ids that the model does not have.
        TypeError: an argument of another type.
    """
    check_model("model", model)
    check_type("statistics", statistics, SpeculationStatistics | None, "give SpeculationStatistics(), or None")
    return _stream(
        model,
        None if tokenizer is None else wrap_tokenizer(tokenizer),
        prompt,
        policy,
        lambda: whole_number("max_tokens", max_tokens, minimum=1),
        sampler=sampler,
        seed=seed,
        prompt_cache=prompt_cache,
        before=before,
        prefill_step_size=prefill_step_size,
        progress=prompt_progress_callback,
        group=group,
        processors=logits_processors,
        statistics=statistics or SpeculationStatistics(),
        draft_model=draft_model,
        drafting=lambda: DraftSettings(drafter, num_draft_tokens, prompt_lookup_min, prompt_lookup_max, draft_length),
    )


def _stream(
    model: nn.Module,
    tokenizer: Any,
    prompt: Any,
    policy: CachePolicy | None,
    limit: Callable[[], int],
    *,
    sampler: Sampler | None,
    seed: int | None,
    prompt_cache: list[Any] | None,
    prefill_step_size: int | None,
    progress: Callable[[int, int], None] | None,
    group: Communicator | None,
    processors: Sequence[LogitsProcessor] | None,
    before: Sequence[int] | ImagePrompt,
    embeddings: mx.array | None = None,
    device_stream: Any = None,
    statistics: SpeculationStatistics | None = None,
    draft_model: nn.Module | None = None,
    drafting: Callable[[], DraftSettings] | None = None,
) -> Steps[GenerationResponse]:
    """What both functions have in common.

    Args:
        limit: checks and returns max_tokens, on the leader.
        drafting: the same of the drafts; None for none.
    """
    if policy is not None and prompt_cache is not None:
        raise ValueError("got a policy and a prompt_cache, which was made with its own: give one of them")
    check_type("group", group, Communicator | None, "give what mlx_kv.join_ranks() returns")
    check_type("prompt_progress_callback", progress, Callable | None, "give a function (read, total), or None")
    communicator, processors = group or LOCAL, check_processors(processors)
    policy, vocabulary = given_policy(policy), vocabulary_of(model)
    settings = None if drafting is None else communicator.on_leader(drafting) or DraftSettings()
    images_of(model, before)
    before = given_ids(before, vocabulary, "before")

    def arguments() -> tuple[list[int], int, int | None]:
        if prefill_step_size is not None:
            whole_number("prefill_step_size", prefill_step_size, minimum=1)
        return tokens_of_prompt(tokenizer, prompt, vocabulary), limit(), prefill_step_size

    tokens, max_tokens, step = communicator.broadcast(arguments)
    if embeddings is not None and (embeddings.ndim != 2 or embeddings.shape[0] != len(tokens)):
        raise ValueError(f"input_embeddings have shape {embeddings.shape}: give ({len(tokens)} tokens, hidden size)")
    decoder = make_decoder(model, policy, draft_model, settings, communicator)
    read = 0
    if prompt_cache is not None:
        prompt_cache = decoder.complete(cache_list("prompt_cache", prompt_cache))
        _check_cache(model, decoder, prompt_cache)
        offsets = [int(cache.offset) for cache in attention_caches(prompt_cache)]
        read = communicator.all_max(max(offsets, default=0))
        (step,) = communicator.all_min([prefill_step(model, prompt_cache, step)])
    if needs_second_pass(decoder.make_caches() if prompt_cache is None else prompt_cache):
        check_local(communicator)
        instructions = Instructions.of(tokenizer, model)
    else:
        instructions = NO_INSTRUCTIONS
    sampler = sampler_of_sequence(sampler, seed, read + len(tokens)) if communicator.leads else None
    sequence = TokenSequence(
        0, tokens, UNLIMITED if max_tokens == -1 else max_tokens, None, sampler, prompt_cache, before
    )
    sequence.processors = tuple(processors) if communicator.leads else ()
    sequence.images = _images_of(model, prompt, communicator)
    decoder.target.embeddings = embeddings
    ends = set() if tokenizer is None else set(tokenizer.eos_token_ids)
    engine = Engine(decoder, ends, EngineSettings(1, step, instructions=instructions), statistics)
    if device_stream is not None:
        engine.stream = device_stream
    responses = _responses(engine, sequence, tokenizer, communicator, progress)
    return communicator.sync_steps(responses, lambda response: response.token)


def _responses(
    engine: Engine,
    sequence: TokenSequence,
    tokenizer: Any,
    communicator: Communicator,
    report: Callable[[int, int], None] | None,
) -> Steps[GenerationResponse]:
    detokenizer = None if tokenizer is None else tokenizer.detokenizer
    sequence.detokenizer = detokenizer
    prompt_tokens, prompt_tps, count, started = len(sequence.tokens), 0.0, 0, time.perf_counter()

    def progress(read: int) -> None:
        communicator.progress()
        if report is not None:
            report(read, prompt_tokens)

    engine.submit(sequence)
    try:
        progress(0)
        last = 0
        while engine.busy:
            emitted = engine.step_scored()
            if count == 0:
                left = engine.progress[0].left if engine.busy else 0
                read = prompt_tokens - 1 if emitted else prompt_tokens - left - 1
                if read > last:
                    progress(read)
                last = read
            for _, item, finish, _ in emitted:
                if count == 0:
                    progress(prompt_tokens)
                    prompt_tps, started = prompt_tokens / (time.perf_counter() - started), time.perf_counter()
                count += 1
                token = sequence.emit(item.token, finish, item.from_draft)
                yield GenerationResponse(
                    text=token.text,
                    token=item.token,
                    logprobs=item.logprobs,
                    from_draft=item.from_draft,
                    prompt_tokens=prompt_tokens,
                    prompt_tps=prompt_tps,
                    generation_tokens=count,
                    generation_tps=count / (time.perf_counter() - started),
                    peak_memory=mx.get_peak_memory() / 1e9,
                    finish_reason=finish,
                )
    finally:
        engine.close()


def _images_of(model: nn.Module, prompt: Any, communicator: Communicator) -> tuple[Image, ...]:
    """As `images_of`.

    Raises:
        ValueError: several processes, which would all need them, or a model that reads none.
    """
    images = images_of(model, prompt)
    if images and communicator.distributed:
        raise ValueError("a prompt has images, which one process reads alone: run the model in one")
    return images


def _check_cache(model: nn.Module, decoder: Decoder, caches: list[Any]) -> None:
    """Raises ValueError for a prompt_cache that the model, or its drafts, cannot continue."""
    layers = len(decoder.make_caches())
    if len(caches) != layers:
        raise ValueError(
            f"the prompt_cache has {len(caches)} layers, the model and its drafter {layers}: use make_prompt_cache, "
            "and a drafter without a model"
        )
    own = caches[: decoder.target.layers]
    check_windows(model, own)
    attach_attention_hooks(model, own)
    if decoder.drafter is None:
        return
    if not can_trim(caches, 0):
        raise ValueError("the prompt_cache cannot take back tokens: generate without a draft")
    planned = [cache.max_write for cache in attention_caches(caches) if cache.max_write is not None]
    if planned and min(planned) <= decoder.draft_tokens:
        raise ValueError(
            f"the prompt_cache plans for writes of {min(planned)} tokens, and so can take back no draft of "
            f"{decoder.draft_tokens}: use num_draft_tokens={max(1, min(planned) - 1)}, or caches of a larger max_write"
        )


def check_policy_options(options: Mapping[str, Any]) -> None:
    """Raises ValueError for options that a `CachePolicy` has."""
    for name, value in options.items():
        if name in FOR_THE_POLICY:
            raise ValueError(f"{name} is for the policy: use policy=CachePolicy({FOR_THE_POLICY[name]}={shown(value)})")


# --- batches ----------------------------------------------------------------------------------------------------------


def batch_generate(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int] | ImagePrompt],
    policy: CachePolicy | None = None,
    max_tokens: int | Sequence[int] = 256,
    draft_model: nn.Module | None = None,
    num_draft_tokens: int | None = None,
    max_batch_size: int = 8,
    sampler: Sampler | None = None,
    prefill_step_size: int | None = None,
    statistics: SpeculationStatistics | None = None,
    seed: int | None = None,
    drafter: str | Factory | Drafter | None = None,
    prompt_lookup_min: int = LOOKUP_MIN,
    prompt_lookup_max: int = LOOKUP_MAX,
    draft_length: DraftLength = "chosen",
    group: Communicator | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
) -> Iterator[BatchToken]:
    """Generates for many prompts at once, with the same tokens for each prompt as alone.

    Args:
        model: any model of mlx-lm whose caches can be batched.
        tokenizer: as from `mlx_lm.load`; None with prompts of token ids, for tokens without text.
        prompts: texts or token ids; those beyond the batch size start when others end.
        policy: settings of the caches; None is `CachePolicy()`.
        max_tokens: tokens to generate, one number for all prompts, or one for each.
        draft_model, num_draft_tokens: for speculation; each row accepts its own number of drafted tokens.
        max_batch_size: maximum rows in the batch.
        sampler: log-probabilities (B, V) to tokens (B,); None is greedy. With a draft model as in
            `speculative_generate`.
        prefill_step_size: prompt tokens of each row read at once; by default what `stream_generate` would read.
        statistics: filled in as tokens come; only with a draft model or a drafter.
        seed: makes a `TemperatureSampler` repeatable. The answer depends on the seed, the prompt and its
            index, not on the other prompts.
        drafter, prompt_lookup_min, prompt_lookup_max, draft_length: as in `speculative_generate`.
        group: the ranks of which each has a part of the model, and calls this alike. The leader's prompts, limits,
            samplers and drafter count, and where it stops asking for tokens, all end.
        logits_processors: as in `speculative_generate`, for each prompt; they must not keep state.

    Returns:
        An iterator of `BatchToken`, in the order in which they come; tokens of one prompt are in order.

    Raises:
        ValueError: no prompt, one that is empty or longer than the model's context (it says which), a number below 1,
            vocabularies that differ, caches that cannot roll back for a draft model, a seed for another sampler, token
            ids that the model does not have.
        TypeError: an argument of another type.
    """
    check_model("model", model)
    policy, processors = given_policy(policy), check_processors(logits_processors)
    check_type("statistics", statistics, SpeculationStatistics | None, "give SpeculationStatistics(), or None")
    tokenizer = None if tokenizer is None else wrap_tokenizer(tokenizer)
    check_type("group", group, Communicator | None, "give what mlx_kv.join_ranks() returns")
    communicator = group or LOCAL
    sequences: list[TokenSequence] = []  # with the leader's samplers

    def arguments() -> tuple[int, int | None, list[tuple[list[int], int]]]:
        whole_number("max_batch_size", max_batch_size, minimum=1)
        sequences.extend(_sequences(model, tokenizer, prompts, max_tokens, sampler, seed))
        for sequence, prompt in zip(sequences, prompts, strict=True):
            sequence.processors, sequence.images = processors, _images_of(model, prompt, communicator)
        return max_batch_size, prefill_step_size, [(sequence.tokens, sequence.max_tokens) for sequence in sequences]

    max_batch_size, prefill_step_size, prompts_and_limits = communicator.broadcast(arguments)
    if not communicator.leads:
        sequences = [
            TokenSequence(index, tokens, limit, None if tokenizer is None else tokenizer.detokenizer)
            for index, (tokens, limit) in enumerate(prompts_and_limits)
        ]
    ends = set() if tokenizer is None else set(tokenizer.eos_token_ids)
    drafting = communicator.on_leader(
        lambda: DraftSettings(drafter, num_draft_tokens, prompt_lookup_min, prompt_lookup_max, draft_length)
    )
    instructions = Instructions.for_policy(policy, tokenizer, model)
    settings = EngineSettings(
        max_batch_size, prefill_step_size, drafting or DraftSettings(), draft_model, instructions=instructions
    )
    engine = make_engine(model, ends, policy, settings, communicator, statistics)
    return _tokens(engine, sequences, communicator)


def _tokens(engine: Engine, sequences: Sequence[TokenSequence], communicator: Communicator) -> Iterator[BatchToken]:
    def steps() -> Steps[list[BatchToken]]:
        while engine.busy:
            yield engine.step()

    try:
        for sequence in sequences:
            engine.submit(sequence)
        rounds = communicator.sync_steps(steps(), lambda tokens: [(token.index, token.token) for token in tokens])
        with contextlib.closing(rounds):
            for tokens in rounds:
                yield from tokens
    finally:
        engine.close()


def _sequences(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int] | ImagePrompt],
    max_tokens: int | Sequence[int],
    sampler: Sampler | None,
    seed: int | None,
) -> list[TokenSequence]:
    if isinstance(prompts, str) or (isinstance(prompts, Sequence) and not prompts):
        raise ValueError("prompts is one text or empty: give a list of prompts, at least one")
    check_type("prompts", prompts, Sequence, "give a list of prompts, each a text or token ids")
    check_seed(seed)
    limits, context, vocabulary = whole_numbers(max_tokens, len(prompts)), context_length(model), vocabulary_of(model)
    if len(limits) != len(prompts):
        raise ValueError(f"got {len(limits)} max_tokens for {len(prompts)} prompts: give one number, or one for each")
    sequences = []
    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        tokens = tokens_of_prompt(tokenizer, prompt, vocabulary, f"prompt {index}")
        if context is not None and len(tokens) >= context:
            raise ValueError(
                f"prompt {index} has {len(tokens):,} tokens, but this model was made for {context:,}: shorten it"
            )
        whole_number(f"max_tokens of prompt {index}", limit, minimum=1)
        detokenizer = None if tokenizer is None else tokenizer.detokenizer
        row_sampler = sampler_of_sequence(sampler, None if seed is None else derived_seed(seed, index), len(tokens))
        sequences.append(TokenSequence(index, tokens, limit, detokenizer, row_sampler))
    return sequences


# --- stop strings -----------------------------------------------------------------------------------------------------


class StopStrings:
    """Passes a text on, piece by piece, up to the first stop string.

    The stop string that ends first counts, of several that end there the longest: so it does not matter how the text
    falls into pieces. What could be the beginning of one waits until that is known.

    Args:
        strings: none of them empty.
    """

    def __init__(self, strings: Sequence[str] = ()) -> None:
        assert all(strings), "an empty stop string would stop everything"
        self._strings, self._pending = tuple(strings), ""
        self.stopped = False
        self.matched: str | None = None  # the one that stopped it

    def feed(self, text: str) -> str:
        """The text that can be passed on now; after a stop, none."""
        if self.stopped:
            return ""
        if not self._strings:
            return text
        text = self._pending + text
        matches = [(start + len(string), start) for string in self._strings if (start := text.find(string)) >= 0]
        if matches:
            end, start = min(matches)
            self.stopped, self._pending, self.matched = True, "", text[start:end]
            return text[:start]
        ends = [  # of the text, with which a stop string begins
            n for string in self._strings for n in range(1, len(string)) if text.endswith(string[:n])
        ]
        keep = max(ends, default=0)
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The rest, at the end of the text."""
        text, self._pending = self._pending, ""
        return text
