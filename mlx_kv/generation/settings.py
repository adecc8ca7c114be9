"""How the tokens of a sequence are chosen: the settings of clients and command lines, and what they make.

MLX is imported when samplers and processors are made.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from mlx_kv.settings import SettingError, check_settings, setting, shown

if TYPE_CHECKING:
    import mlx.core as mx

    from mlx_kv.generation.sampling import SeededSampler, TemperatureSampler


# Changes the logits (1, V) of the next token of a sequence, given all its tokens so far (n,), as in mlx-lm. The result
# depends on these alone; the tokens are not written to.
LogitsProcessor: TypeAlias = "Callable[[mx.array, mx.array], mx.array]"

MIN_PENALTY = 0.01  # logits divided by less may overflow their dtype, and there are no probabilities then
OF_MODELS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # as transformers names them
MAX_SERVED = 1 << 24  # of tokens that a request counts


def check_processors(processors: Sequence[LogitsProcessor] | None) -> tuple[LogitsProcessor, ...]:
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
    """Sampling settings of one sequence; greedy by default.

    Attributes:
        temperature: from 0 up; 0 is greedy.
        top_p, top_k, min_p: filters, as of `TemperatureSampler`; a top_p of 0 is greedy, 0 of the others is no filter.
        xtc_probability, xtc_threshold: the same.
        repetition_penalty: logits of the last tokens are divided by it, or multiplied where they are below 0; from
            0.01 up. 1 and 0 change nothing.
        presence_penalty: subtracted from the logits of the last tokens, once.
        frequency_penalty: subtracted from the logits of the last tokens, for each time that a token is among them.
        repetition_context_size, presence_context_size, frequency_context_size: number of last tokens that count,
            prompt included; 0 is all.
        logit_bias: numbers added to the logits of tokens: pairs of id and number, or a mapping.
        seed: makes sampling repeatable; None is no seed.

    Raises:
        ValueError: a number out of bounds.
    """

    temperature: float = setting(
        0.0,
        option=("--temp", "--temperature"),
        summary="Temperature; 0 is greedy.",
        metavar="T",
        minimum=0,
        served=(0, 2),
    )
    top_p: float = setting(
        1.0,
        option="--top-p",
        summary="Sample from tokens of total probability P.",
        metavar="P",
        minimum=0,
        maximum=1,
        served=(0, 1),
        help="Sample from the likeliest tokens that have probability P together.",
    )
    top_k: int = setting(
        0,
        option="--top-k",
        metavar="K",
        minimum=0,
        served=(-1, MAX_SERVED),
        help="Sample from the K likeliest tokens; 0 is all.",
    )
    min_p: float = setting(
        0.0,
        option="--min-p",
        metavar="P",
        minimum=0,
        maximum=1,
        served=(0, 1),
        help="Sample from tokens at least P times as likely as the likeliest.",
    )
    xtc_probability: float = setting(
        0.0,
        option="--xtc-probability",
        metavar="P",
        minimum=0,
        maximum=1,
        served=(0, 1),
        help="Probability of excluding all tokens above the XTC threshold but the least likely of them.",
    )
    xtc_threshold: float = setting(
        0.1,
        option="--xtc-threshold",
        metavar="P",
        minimum=0,
        maximum=0.5,
        served=(0, 0.5),
        help="Probability above which XTC may exclude a token.",
    )
    repetition_penalty: float = setting(
        1.0,
        option="--repetition-penalty",
        metavar="N",
        minimum=0,
        served=(0, 100),
        help="Penalty for tokens among the last 20: above 1, they become less likely.",
    )
    repetition_context_size: int = setting(
        20, minimum=0, served=(0, MAX_SERVED), help="Last tokens that the repetition penalty counts; 0 is all."
    )
    presence_penalty: float = setting(
        0.0,
        option="--presence-penalty",
        metavar="N",
        served=(-100, 100),
        help="Number subtracted from the logits of tokens among the last 20.",
    )
    presence_context_size: int = setting(
        20, minimum=0, served=(0, MAX_SERVED), help="Last tokens that the presence penalty counts; 0 is all."
    )
    frequency_penalty: float = setting(
        0.0,
        option="--frequency-penalty",
        metavar="N",
        served=(-100, 100),
        help="Number subtracted from the logits of a token for each time that it is among the last 20.",
    )
    frequency_context_size: int = setting(
        20, minimum=0, served=(0, MAX_SERVED), help="Last tokens that the frequency penalty counts; 0 is all."
    )
    logit_bias: Iterable[tuple[int, float]] | Mapping[int, float] = setting(
        (), help="Numbers added to the logits of tokens, by token id."
    )
    seed: int | None = setting(
        None,
        option="--seed",
        summary="Seed that makes sampling repeatable.",
        metavar="N",
        served=(-(2**63), 2**64 - 1),
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if 0 < self.repetition_penalty < MIN_PENALTY:
            raise SettingError(
                "{repetition_penalty:is}: give 0, or {} up", MIN_PENALTY, repetition_penalty=self.repetition_penalty
            )
        bias = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        try:
            pairs = tuple((operator.index(token), float(value)) for token, value in bias)
        except (TypeError, ValueError, OverflowError):
            raise SettingError(
                "{logit_bias:is}: give numbers by token id, such as {{5: -1.0}}", logit_bias=self.logit_bias
            ) from None
        for token, value in pairs:
            if not 0 <= token < 2**31 or not math.isfinite(value):
                raise SettingError(
                    "{logit_bias} has {} for token {}: give a finite number for an id from 0 up", value, token
                )
        object.__setattr__(self, "logit_bias", pairs)

    def sampler(self, position: int, tokenizer: Any = None) -> TemperatureSampler | SeededSampler | None:
        """The sampler of one sequence; None is greedy.

        Args:
            position: of the next token in its sequence, which is the number of tokens before it.
            tokenizer: mlx-lm's; line breaks and end-of-text tokens are never excluded by XTC.
        """
        from mlx_kv.generation.sampling import SeededSampler

        if self.temperature == 0 or self.top_p == 0:
            return None
        special: tuple[int, ...] = ()
        if self.xtc_probability and tokenizer is not None:
            special = _never_excluded(tokenizer)
        xtc = self.xtc_probability, self.xtc_threshold, special
        rules = _shared_rules(self.temperature, self.top_p, self.min_p, self.top_k, *xtc)
        return rules if self.seed is None else SeededSampler(rules, self.seed, position)

    def processors(self) -> tuple[LogitsProcessor, ...]:
        """The changes to logits before sampling: mlx-lm's processors, in its order.

        They raise a ValueError for a bias of a token that the logits do not have.
        """
        from mlx_lm.sample_utils import make_logits_processors

        processors = make_logits_processors(  # type: ignore[no-untyped-call,unused-ignore]
            self.biases or None,
            None if self.repetition_penalty in (0, 1) else self.repetition_penalty,
            self.repetition_context_size,
            self.presence_penalty,
            self.presence_context_size,
            self.frequency_penalty,
            self.frequency_context_size,
        )
        return (*((_within(max(self.biases)),) if self.biases else ()), *processors)

    @property
    def changed(self) -> dict[str, Any]:
        """The settings that are not at their default, by name."""
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        return {name: value for name, (value, usual) in values.items() if value != usual}

    @property
    def biases(self) -> dict[int, float]:
        """`logit_bias`, by id."""
        return dict(self.logit_bias)

    @classmethod
    def of_model(cls, generation_config: Mapping[str, Any]) -> SamplingSettings:
        """The settings of a model's generation_config.json; values that are not numbers or out of bounds are ignored.

        Without `do_sample` sampling is greedy, whatever its other values: transformers reads it so.
        """
        settings = cls()
        if generation_config.get("do_sample") is not True:
            return _with(settings, "repetition_penalty", generation_config.get("repetition_penalty"))
        settings = replace(settings, temperature=1.0)
        for name in OF_MODELS:
            settings = _with(settings, name, generation_config.get(name))
        return settings


def _within(token: int) -> LogitsProcessor:
    """A processor that changes nothing, but refuses logits without this token: MLX would write beyond them."""

    def look(tokens: mx.array, logits: mx.array) -> mx.array:
        if token >= logits.shape[-1]:
            last = logits.shape[-1] - 1
            raise ValueError(f"logit_bias names token {token}, which the model does not have: give ids up to {last}")
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
    """Tokens that mlx_lm.server excludes from XTC. Cached: in a server, another thread uses the tokenizer, too."""
    return (*tokenizer.encode("\n"), *tokenizer.eos_token_ids)


@lru_cache(maxsize=64)
def _shared_rules(*arguments: Any) -> TemperatureSampler:
    """Rows with equal settings share a sampler, and are then sampled in one call."""
    from mlx_kv.generation.sampling import TemperatureSampler

    return TemperatureSampler(*arguments)
