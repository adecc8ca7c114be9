"""How somebody wants tokens chosen, in the words that clients and command lines have for it.

Decides what each number means where it is left out, which ones a model's own generation_config.json brings, and what
mlx-lm's samplers and logits processors are made of. Knows nothing about requests, options or models.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors

from mlx_kv.cache.checks import is_number, shown
from mlx_kv.generation.sampling import SeededSampler, TemperatureSampler, check_seed

# What is made of the logits (1, V) of the next token of one sequence, by all its tokens so far (n,): mlx-lm's own form.
# The answer follows from what is shown alone; the array that is shown is not written to.
LogitsProcessor: TypeAlias = Callable[[mx.array, mx.array], mx.array]

BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0, math.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 0.5),
    "repetition_penalty": (0, math.inf),
    "presence_penalty": (-math.inf, math.inf),
    "frequency_penalty": (-math.inf, math.inf),
}
LEAST_PENALTY = 0.01  # logits divided by less may be beyond what their dtype can hold: there are no probabilities then
COUNTS = ("top_k", "repetition_context_size", "presence_context_size", "frequency_context_size")
OF_MODELS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # as transformers names them


def given_processors(processors: Sequence[LogitsProcessor] | None) -> tuple[LogitsProcessor, ...]:
    """The logits processors of an argument; None is none.

    Raises:
        TypeError: something else than a list of functions.
    """
    if processors is None:
        return ()
    if not isinstance(processors, Sequence) or not all(map(callable, processors)):
        wrong = shown(processors)
        raise TypeError(f"logits_processors is {wrong}: give a list of functions (tokens, logits) -> logits")
    return tuple(processors)


@dataclass(frozen=True)
class SamplingSettings:
    """How the tokens of one sequence are chosen; by default the likeliest each time.

    Attributes:
        temperature: from 0 up; 0 is greedy.
        top_p, top_k, min_p: filters, as of `TemperatureSampler`; a top_p of 0 is greedy, 0 of others is no filter.
        xtc_probability, xtc_threshold: the same.
        repetition_penalty: what logits of tokens among the last ones are divided by, or multiplied where they are
            below 0, from 0.01 up; 1 and 0 change nothing.
        presence_penalty: what is subtracted from them, once.
        frequency_penalty: the same, for each time that the token is there.
        repetition_context_size, presence_context_size, frequency_context_size: how many last tokens count, those of the
            prompt among them; 0 is all.
        logit_bias: what is added to the logits of tokens, by id. A mapping will do, too.
        seed: makes what is drawn repeatable; None is no seed.

    Raises:
        ValueError: a number that cannot be.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    logit_bias: Iterable[tuple[int, float]] | Mapping[int, float] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, (least, most) in BOUNDS.items():
            value = getattr(self, name)
            if not (is_number(value) and least <= value <= most):
                to = "up" if most == math.inf else f"to {most:g}"
                wanted = "a finite number" if least == -math.inf else f"a number from {least:g} {to}"
                raise ValueError(f"{name} is {shown(value)}: give {wanted}")
        if 0 < self.repetition_penalty < LEAST_PENALTY:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}: give 0, or {LEAST_PENALTY} up")
        for name in COUNTS:
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                raise ValueError(f"{name} is {shown(getattr(self, name))}: give a whole number from 0 up")
        bias = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        try:
            pairs = tuple((operator.index(token), float(value)) for token, value in bias)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(
                f"logit_bias is {shown(self.logit_bias)}: give numbers by token id, such as {{5: -1.0}}"
            ) from None
        check_seed(self.seed)
        for token, value in pairs:
            if not 0 <= token < 2**31 or not math.isfinite(value):
                raise ValueError(f"logit_bias has {value} for token {token}: give a finite number for an id from 0 up")
        object.__setattr__(self, "logit_bias", pairs)

    def sampler(self, position: int, tokenizer: Any = None) -> TemperatureSampler | SeededSampler | None:
        """What draws the tokens of one sequence; None is greedy.

        Args:
            position: of the next token in its sequence, which is the number of tokens before it.
            tokenizer: mlx-lm's: line breaks and the ends of a text are no top choices that xtc excludes.
        """
        if self.temperature == 0 or self.top_p == 0:
            return None
        special: tuple[int, ...] = ()
        if self.xtc_probability and tokenizer is not None:
            special = _never_excluded(tokenizer)
        xtc = self.xtc_probability, self.xtc_threshold, special
        rules = _shared_rules(self.temperature, self.top_p, self.min_p, self.top_k, *xtc)
        return rules if self.seed is None else SeededSampler(rules, self.seed, position)

    def processors(self) -> tuple[LogitsProcessor, ...]:
        """What is done to logits before anything is drawn: mlx-lm's processors, in its order.

        They raise a ValueError for a bias of a token that the logits do not have.
        """
        made = make_logits_processors(  # type: ignore[no-untyped-call,unused-ignore]
            self.biases or None,
            None if self.repetition_penalty in (0, 1) else self.repetition_penalty,
            self.repetition_context_size,
            self.presence_penalty,
            self.presence_context_size,
            self.frequency_penalty,
            self.frequency_context_size,
        )
        return (*((_within(max(self.biases)),) if self.biases else ()), *made)

    @property
    def changed(self) -> dict[str, Any]:
        """What is not as it is by default, by name."""
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        return {name: value for name, (value, usual) in values.items() if value != usual}

    @property
    def biases(self) -> dict[int, float]:
        """`logit_bias`, by id."""
        return dict(self.logit_bias)

    @classmethod
    def of_model(cls, generation_config: Mapping[str, Any]) -> SamplingSettings:
        """What a model's generation_config.json asks for; what is no number, or out of bounds, is as if left out.

        Without `do_sample`, it asks for the likeliest tokens, whatever else it says: that is how transformers reads it.
        """
        settings = cls()
        if generation_config.get("do_sample") is not True:
            return _with(settings, "repetition_penalty", generation_config.get("repetition_penalty"))
        settings = replace(settings, temperature=1.0)
        for name in OF_MODELS:
            settings = _with(settings, name, generation_config.get(name))
        return settings


def _within(token: int) -> LogitsProcessor:
    """Changes nothing, and refuses logits that do not have this token: MLX would write beyond them."""

    def look(tokens: mx.array, logits: mx.array) -> mx.array:
        if token >= logits.shape[-1]:
            most = logits.shape[-1] - 1
            raise ValueError(f"logit_bias names token {token}, which the model does not have: give ids up to {most}")
        return logits

    return look


def _with(settings: SamplingSettings, name: str, value: Any) -> SamplingSettings:
    """The settings with another value of one, if it can be."""
    if type(value) not in (int, float):
        return settings
    try:
        return replace(settings, **{name: value})
    except ValueError:
        return settings


@lru_cache(maxsize=4)
def _never_excluded(tokenizer: Any) -> tuple[int, ...]:
    """What mlx_lm.server spares from xtc. Asked once: in a server, another thread has the tokenizer, too."""
    return (*tokenizer.encode("\n"), *tokenizer.eos_token_ids)


@lru_cache(maxsize=64)
def _shared_rules(*arguments: Any) -> TemperatureSampler:
    """Rows that sample alike share a sampler, and are then sampled in one call."""
    return TemperatureSampler(*arguments)
