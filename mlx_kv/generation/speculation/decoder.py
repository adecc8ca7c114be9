"""Drafts and verifies: a small model proposes tokens of several sequences, the model decides, the caches take back.

Decides which drafted tokens are accepted, row by row, and what each row trims. The result is the model's own, token for
token: what a sequence gets at a position follows from the model's distribution there and that position's random key, so
the draft only guesses it, drawing from its own distribution with the same key. That is exact for any draft, and nobody
can tell how many tokens were drafted, or for whom else. Every trim is checked first; rings are made with the slack that
it needs. Knows nothing about text, ends of sequences or when rows come and go, nor how a cache trims.
B rows, V the vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.generation.prefill import chunk_end, prefill_step, read_chunk, read_ragged, reserve_for
from mlx_kv.generation.sampling import Sampler, SeededSampler, TemperatureSampler, gumbel_noise
from mlx_kv.mlxlm.convert import can_trim, check_policy, leaves, make_prompt_cache, trim_prompt_cache
from mlx_kv.policy import CachePolicy


@dataclass
class SpeculationStatistics:
    """What one run did, filled in as it goes: verify rounds, tokens drafted, drafted tokens that were accepted.

    A round is one pass of the model for all rows; the tokens are of all rows together.

    `caches` are those of the model, for `cache_statistics`.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    caches: list[Any] = field(default_factory=list)

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True)
class Emitted:
    """One token of the result, the model's log-probabilities (vocab,) at its place, and whether the draft had it."""

    token: int
    logprobs: mx.array
    from_draft: bool


@dataclass
class Joining:
    """Rows whose prompts are being read, by both models.

    Attributes:
        caches: of the model and of the draft.
        step: tokens of each prompt read at once.
        read: of the longest prompt.
    """

    prompts: list[list[int]]
    samplers: list[Sampler | None]
    caches: list[list[Any]]
    step: int
    read: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt. The last of each is left to be read, for the logits that come next."""
        return max(map(len, self.prompts))

    def keep(self, rows: Sequence[int]) -> None:
        """Lets all other rows go; at least one stays."""
        for caches in self.caches:
            for cache in caches:
                cache.filter(list(rows))
        self.prompts = [self.prompts[row] for row in rows]
        self.samplers = [self.samplers[row] for row in rows]


class Decoder:
    """The two models, the caches of all rows, and what each model has yet to read of each row.

    Raises:
        ValueError: models with different vocabularies, or with caches that cannot take back tokens.
    """

    def __init__(self, model: nn.Module, draft_model: nn.Module, policy: CachePolicy, draft_tokens: int) -> None:
        self._vocabulary = check_pair(model, draft_model)
        check_policy(model, policy)
        # A round writes draft_tokens + 1 tokens and takes back all but one of them at the most.
        policy = replace(policy, max_rollback=max(policy.max_rollback, draft_tokens + 1))
        self.models = (model, draft_model)
        self.caches: tuple[list[Any], list[Any]] = ([], [])
        self.pending: tuple[list[list[int]], list[list[int]]] = ([], [])  # by row: of the model, of the draft
        self.draft_tokens = draft_tokens
        self.samplers: list[Sampler | None] = []  # by row; None is greedy
        # Making caches may try out what a model's attention can read: it is done once, rows get copies.
        policies = (policy, CachePolicy(max_rollback=draft_tokens + 1))
        pairs = zip(self.models, policies, strict=True)
        self._empty = [make_prompt_cache(net, rules, strict=False) for net, rules in pairs]
        probe = self.make_caches()
        self.step = min(prefill_step(net, own, None) for net, own in zip(self.models, self._empty, strict=True))
        if not can_trim(probe, 0):
            kinds = ", ".join(sorted({type(c).__name__ for c in leaves(probe) if not can_trim([c], 0)}))
            raise ValueError(f"{kinds} cannot take back tokens: generate without a draft model")

    def _fresh(self, which: int) -> list[Any]:
        return copy.deepcopy(self._empty[which])

    def make_caches(self) -> list[Any]:
        """New caches of both models, one after the other, for a row to bring."""
        return [*self._fresh(0), *self._fresh(1)]

    def read(self, tokens: mx.array, cache: list[Any]) -> list[mx.array]:
        """Both models read tokens (1, n) into such caches."""
        each = zip(self.models, self._split(cache), strict=True)
        return [model(tokens, cache=own) for model, own in each]

    def _split(self, caches: list[Any]) -> tuple[list[Any], list[Any]]:
        layers = len(self._empty[0])
        return caches[:layers], caches[layers:]

    def add(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        samplers: Sequence[Sampler | None],
        step: int | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        caches: Sequence[list[Any] | None] | None = None,
    ) -> None:
        """New rows, after those that there are: both models read all but the last token of each prompt.

        Args:
            prompts: token ids, at least one each.
            max_tokens: room is made for so many more in each row.
            samplers: of each row: None is greedy. The draft guesses with the random keys of a `SeededSampler`, which a
                `TemperatureSampler` becomes; of any other sampler, the likeliest token.
            step: prompt tokens of each read at once; None is what either model would read.
            progress: called with the tokens that the model has read of the longest prompt, and their number.
            caches: of each row, from `make_caches`, which both models have filled with what comes before its prompt;
                None are new ones. They are the row's from now on.
        """
        joining = self.begin(prompts, [max_tokens] * len(prompts), samplers, step, caches)
        while not self.read_on(joining):
            progress(joining.read, joining.longest)
        progress(joining.longest, joining.longest)

    def begin(
        self,
        prompts: Sequence[list[int]],
        max_tokens: Sequence[int],
        samplers: Sequence[Sampler | None],
        step: int | None = None,
        caches: Sequence[list[Any] | None] | None = None,
    ) -> Joining:
        """New rows, as `add` makes them, each with its own max_tokens; nothing is read yet: `read_on` does that."""
        new: list[list[Any]] = []
        for which in range(len(self.models)):
            brought = caches or [None] * len(prompts)
            each = [self._fresh(which) if pair is None else self._split(pair)[which] for pair in brought]
            for one, prompt, most in zip(each, prompts, max_tokens, strict=True):
                reserve_for(one, len(prompt), most + self.draft_tokens)
            new.append(each[0] if len(each) == 1 else [same[0].merge(list(same)) for same in zip(*each, strict=True)])
        return Joining(list(prompts), list(samplers), new, self.step if step is None else step)

    def read_on(self, joining: Joining) -> bool:
        """Both models read a chunk; True when the rows have joined, after those that there are."""
        first = joining.read
        joining.read = chunk_end(first, joining.longest, joining.step)
        if joining.read > first:
            pieces = [prompt[:-1][first : joining.read] for prompt in joining.prompts]
            for model, own in zip(self.models, joining.caches, strict=True):
                read_chunk(model, own, pieces)
        if joining.read < joining.longest - 1:
            return False
        for everyone, joined, pending in zip(self.caches, joining.caches, self.pending, strict=True):
            for own, other in zip(everyone, joined, strict=False):
                own.extend(other)
            everyone[:] = everyone or joined
            pending.extend([prompt[-1]] for prompt in joining.prompts)
        self.samplers.extend(
            SeededSampler(sampler, None, 0) if isinstance(sampler, TemperatureSampler) else sampler
            for sampler in joining.samplers
        )
        return True

    def extract(self, row: int) -> list[Any] | None:
        """Copies of a row's caches, as of `make_caches`: both models have read the same tokens of it.

        None where they cannot be trimmed to that.
        """
        behind = [len(pending[row]) for pending in self.pending]
        copies = []
        for caches, own in zip(self.caches, behind, strict=True):
            each = [cache.extract(row) for cache in caches]
            if not can_trim(each, max(behind) - own):
                return None
            trim_prompt_cache(each, max(behind) - own)
            copies += each
        return copies

    def keep(self, rows: Sequence[int]) -> None:
        """Lets all other rows go."""
        for caches, pending in zip(self.caches, self.pending, strict=True):
            if not rows:
                caches.clear()
            elif list(rows) != list(range(len(pending))):
                for cache in caches:
                    cache.filter(list(rows))
            pending[:] = [pending[row] for row in rows]
        self.samplers = [self.samplers[row] for row in rows]

    def round(self, most: int, statistics: SpeculationStatistics) -> list[list[Emitted]]:
        """Drafts, verifies, and takes back: 1 to `most` tokens of each row."""
        count = min(self.draft_tokens, most - 1)
        noise = self._noise(count + 1)
        drafted = self._draft(count, noise)
        feed = [pending + tokens for pending, tokens in zip(self.pending[0], drafted, strict=True)]
        logprobs = normalized(self.models[0](mx.array(feed), cache=self.caches[0])[:, -(count + 1) :])
        decided = self._accept(drafted, logprobs, noise)
        trim_prompt_cache(self.caches[0], [count - accepted for accepted, _ in decided])
        trim_prompt_cache(self.caches[1], [max(count - accepted - 1, 0) for accepted, _ in decided])
        emitted = []
        for row, (accepted, last) in enumerate(decided):
            self.pending[0][row] = [last]
            # The draft has read all drafted tokens but the last one: if that was accepted, it is still to be read.
            behind = drafted[row][-1:] if count else self.pending[1][row]
            self.pending[1][row] = [*(behind if accepted == count else []), last]
            tokens = [*drafted[row][:accepted], last]
            emitted.append([Emitted(token, logprobs[row, i], i < accepted) for i, token in enumerate(tokens)])
            if isinstance(sampler := self.samplers[row], SeededSampler):
                sampler.position += len(tokens)
        statistics.rounds += 1
        statistics.drafted += count * len(decided)
        statistics.accepted += sum(accepted for accepted, _ in decided)
        return emitted

    def _noise(self, count: int) -> mx.array | None:
        """What is added to log-probabilities (B, count, V) of each row's next tokens before the likeliest is taken.

        Zeros where that is the model's, or another sampler's, own choice; None where it is in every row.
        """
        if not any(isinstance(sampler, SeededSampler) for sampler in self.samplers):
            return None
        none = mx.zeros((count, self._vocabulary))
        return mx.stack(
            [
                gumbel_noise([sampler.key(ahead) for ahead in range(count)], self._vocabulary)
                if isinstance(sampler, SeededSampler)
                else none
                for sampler in self.samplers
            ]
        )

    def _chosen(self, logprobs: mx.array, noise: mx.array | None) -> mx.array:
        """Tokens (B, ...) for log-probabilities and noise (B, ..., V)."""
        if noise is None:
            return mx.argmax(logprobs, axis=-1)
        rules = [sampler.rules if isinstance(sampler, SeededSampler) else None for sampler in self.samplers]

        def scaled(rule: TemperatureSampler | None, rows: mx.array) -> mx.array:
            return rows if rule is None else rule.scaled(rows)

        if all(rule == rules[0] for rule in rules):
            return mx.argmax(scaled(rules[0], logprobs) + noise, axis=-1)
        each = [scaled(rule, logprobs[row : row + 1]) for row, rule in enumerate(rules)]
        return mx.argmax(mx.concatenate(each) + noise, axis=-1)

    def _draft(self, count: int, noise: mx.array | None) -> list[list[int]]:
        """`count` tokens of the draft model for each row, drawn with the noise (B, count + 1, V) of their positions."""
        rows = len(self.pending[1])
        if count == 0:
            return [[] for _ in range(rows)]
        lengths = [len(tokens) for tokens in self.pending[1]]
        logits = read_ragged(self.models[1], self.caches[1], self.pending[1])
        here = mx.take_along_axis(logits, (mx.array(lengths) - 1)[:, None, None], axis=1)[:, 0]  # (B, V)
        tokens: list[mx.array] = []
        for index in range(count):
            if index:
                here = self.models[1](tokens[-1][:, None], cache=self.caches[1])[:, -1]
            tokens.append(self._chosen(normalized(here), None if noise is None else noise[:, index]))
            mx.async_eval(tokens[-1])  # type: ignore[no-untyped-call]
        by_row: Any = mx.stack(tokens, axis=1).tolist()
        return list(by_row)

    def _accept(self, drafted: list[list[int]], logprobs: mx.array, noise: mx.array | None) -> list[tuple[int, int]]:
        """For each row, how many drafted tokens are right, and the token after them. Arrays are (B, count + 1, V)."""
        chosen: Any = self._chosen(logprobs, noise).tolist()
        decided = []
        for row, (guessed, sampler) in enumerate(zip(drafted, self.samplers, strict=True)):
            own = chosen[row]
            if not (sampler is None or isinstance(sampler, SeededSampler)):
                own = sampler(logprobs[row]).tolist()
            right = 0
            while right < len(guessed) and guessed[right] == own[right]:
                right += 1
            decided.append((right, own[right]))
        return decided


def normalized(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def check_pair(model: nn.Module, draft_model: nn.Module) -> int:
    """Both models must speak of the same tokens: how many. Their graphs are built for one token, and not evaluated."""
    sizes = [net(mx.array([[0]])).shape[-1] for net in (model, draft_model)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the draft model has a vocabulary of {sizes[1]:,} tokens, the model one of {sizes[0]:,}: "
            "choose a draft model with the same tokenizer"
        )
    return int(sizes[0])
