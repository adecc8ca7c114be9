"""Sampling: distributions by temperature and filters, and random numbers by position.

A token is the likeliest after Gumbel noise was added to the log-probabilities, which draws from exactly their
distribution. Each position of a sequence has its own random numbers, so a token depends on seed, position and
distribution alone, not on other rows or earlier drafts. The filters are mlx-lm's, in mlx-lm's order. V is the
vocabulary.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from types import FunctionType
from typing import Any

import mlx.core as mx
from mlx_lm import sample_utils

from mlx_kv.cache.checks import check_type
from mlx_kv.settings import integer_fields, is_number, shown

Sampler = Callable[[mx.array], mx.array]
Filter = Callable[..., mx.array]

# In float32, log-probabilities of the two likeliest tokens that differ do so by more than 1e-8, and Gumbel noise lies
# between -5 and 17: beyond these temperatures nothing changes any more, but float32 has no such numbers.
MIN_TEMP, MAX_TEMP = 1e-20, 1e20
MIN_TOP_P = 1e-20  # below one over the vocabulary, only the likeliest token is left


def _uncompiled(compiled: Any) -> Filter:
    """The function that MLX compiled: mlx-lm's filters are compiled anew for each number that a client sends.

    That takes a tenth of a second and more, in which all rows wait, and every version stays in memory. MLX does not
    offer the original function.
    """
    if type(compiled) is FunctionType:  # isinstance is also true of compiled functions
        return compiled
    functions = (each for each in gc.get_referents(compiled) if type(each) is FunctionType)
    original: Filter = next(functions, compiled)
    return original


apply_min_p, apply_top_k = _uncompiled(sample_utils.apply_min_p), _uncompiled(sample_utils.apply_top_k)
apply_top_p, apply_xtc = _uncompiled(sample_utils.apply_top_p), _uncompiled(sample_utils.apply_xtc)


@dataclass(frozen=True)
class TemperatureSampler:
    """Samples at a temperature, from the tokens that filters leave.

    Called, it draws with MLX's own random numbers, as mlx-lm's `make_sampler` with the same arguments does.

    Args:
        temp: above 0. (No sampler at all is greedy.)
        top_p: in (0, 1]; the smallest set of tokens whose probabilities reach it. 1 is no filter.
        min_p: in [0, 1]; tokens at least so likely as the likeliest times this. 0 is no filter.
        top_k: from 0 up; so many of the likeliest. 0 is no filter.
        xtc_probability: in [0, 1]; how often, position by position, tokens that reach the threshold are left out, all
            but the least likely of them ("exclude top choices").
        xtc_threshold: in [0, 0.5]; a probability after top_p and min_p.
        xtc_special_tokens: never left out by it, such as those that end a text.

    Raises:
        ValueError: a number outside of these, or no finite one.
    """

    temp: float
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (is_number(self.temp) and self.temp > 0):
            temp = shown(self.temp)
            raise ValueError(f"temp is {temp}: give a finite number above 0, or no sampler for greedy decoding")
        if not (is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p is {shown(self.top_p)}: give a number above 0, up to 1")
        for name, highest in (("min_p", 1.0), ("xtc_probability", 1.0), ("xtc_threshold", 0.5)):
            value = getattr(self, name)
            if not (is_number(value) and 0 <= value <= highest):
                raise ValueError(f"{name} is {shown(value)}: give a number from 0 to {highest:g}")
        integer_fields(self, "top_k")
        if type(self.top_k) is not int or self.top_k < 0:
            raise ValueError(f"top_k is {shown(self.top_k)}: give a whole number from 1 up, or 0 for all tokens")

    def scaled(self, logprobs: mx.array, coins: mx.array | None = None) -> mx.array:
        """Float32 log-probabilities (..., V) of what is sampled, but for a constant: the likeliest has 0.

        Args:
            coins: uniform in [0, 1), (..., 1), which decide where top choices are excluded; None draws them.
        """
        logprobs = logprobs.astype(mx.float32)
        if self.top_p < 1:
            logprobs = apply_top_p(logprobs, max(self.top_p, MIN_TOP_P))
        if self.min_p > 0:
            logprobs = apply_min_p(logprobs, max(self.min_p, MIN_TOP_P))
        if self.xtc_probability > 0:
            coins = mx.random.uniform(shape=(*logprobs.shape[:-1], 1)) if coins is None else coins
            excluded = apply_xtc(logprobs, 1.0, self.xtc_threshold, list(self.xtc_special_tokens))  # in all rows
            logprobs = mx.where(coins > self.xtc_probability, logprobs, excluded)
        if 0 < self.top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, self.top_k)
        # What is divided is never above 0: it may become -inf, where a token has no chance, but never NaN.
        return (logprobs - logprobs.max(axis=-1, keepdims=True)) / min(max(self.temp, MIN_TEMP), MAX_TEMP)

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Token ids (...) for log-probabilities (..., V)."""
        return mx.random.categorical(self.scaled(logprobs))


class SeededSampler:
    """The draws of one sequence: at each position with a random key of its own.

    Called, it draws the token at `position`, and goes on to the next: one call for each token, as mlx-lm's loops do.

    Args:
        rules: the distribution.
        seed: from 0 up; None takes one from MLX's random numbers.
        position: of the next token in its sequence, which is the number of tokens before it.
    """

    def __init__(self, rules: TemperatureSampler, seed: int | None, position: int) -> None:
        if seed is None:
            drawn: Any = mx.random.randint(0, 2**31 - 1, (2,)).tolist()
            seed = derived_seed(*drawn)
        self.rules, self.seed, self.position = rules, seed, position

    def key(self, ahead: int = 0) -> mx.array:
        """The random key (2,) of the position that lies so far ahead of the next token's."""
        return mx.random.key(derived_seed(self.seed, self.position + ahead))

    def coins(self, places: range) -> mx.array | None:
        """For `TemperatureSampler.scaled`, (n, 1), at positions counted like those of `key`; None if it needs none."""
        if not self.rules.xtc_probability:
            return None
        names = [f"xtc {self.position + ahead}" for ahead in places]
        keys = [mx.random.key(derived_seed(self.seed, name)) for name in names]
        return mx.stack([mx.random.uniform(shape=(1,), key=key) for key in keys])

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Token ids (1,) for log-probabilities (1, V)."""
        scaled = self.rules.scaled(logprobs, self.coins(range(1)))
        token = mx.argmax(scaled + gumbel_noise([self.key()], logprobs.shape[-1]), axis=-1)
        self.position += 1
        return token


def draw(samplers: Sequence[Sampler | None], logprobs: mx.array) -> mx.array:
    """Tokens (B,) for log-probabilities (B, V) of rows with these samplers; a sampler that all share is called once."""
    if all(sampler is samplers[0] for sampler in samplers):
        return _drawn(samplers[0], logprobs)
    each = [_drawn(sampler, logprobs[row : row + 1]) for row, sampler in enumerate(samplers)]
    return mx.concatenate([tokens.reshape(1).astype(mx.uint32) for tokens in each])


def _drawn(sampler: Sampler | None, logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1) if sampler is None else sampler(logprobs)


def gumbel_noise(keys: list[mx.array], vocabulary: int) -> mx.array:
    """Standard Gumbel noise (n, V) of n keys, float32: each row as if it were alone."""
    noise: mx.array = mx.vmap(lambda key: mx.random.gumbel((vocabulary,), key=key))(mx.stack(keys))
    return noise


def derived_seed(seed: int, name: int | str) -> int:
    """Another seed, below 2**64, for each name of something that is drawn with this one."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def check_seed(seed: object) -> None:
    """Raises TypeError for a seed that is neither a whole number nor None."""
    check_type("seed", seed, Integral | None, "give a whole number, or None for no seed")


def sampler_of_sequence(sampler: Sampler | None, seed: int | None, position: int) -> Sampler | None:
    """What draws the tokens of one sequence, from `position` on; without a seed, what was given.

    Raises:
        ValueError: a seed, with a sampler that does not accept one.
        TypeError: a sampler that cannot be called, or a seed that is no whole number.
    """
    check_type("sampler", sampler, Callable | None, "give a function of log-probabilities, or None for the likeliest")
    check_seed(seed)
    if seed is None or sampler is None:
        return sampler
    if not isinstance(sampler, TemperatureSampler):
        raise ValueError("a seed is given, but this sampler draws by itself: give a TemperatureSampler, or no seed")
    return SeededSampler(sampler, seed, position)
