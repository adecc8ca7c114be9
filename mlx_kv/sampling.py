"""A sampler that knows its own distribution: what rejection sampling needs and an opaque sampler cannot give.

The filter is mlx-lm's; only the order of its steps is repeated here, so that tokens come out as from mlx-lm's
`make_sampler(temp, top_p)`. Knows nothing about models or caches.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.sample_utils import apply_top_p, categorical_sampling


@dataclass(frozen=True)
class TemperatureSampler:
    """Samples at a temperature, from the smallest set of tokens whose probabilities reach top_p.

    Args:
        temp: above 0. (No sampler at all is greedy.)
        top_p: in (0, 1]; 1 is no filter.

    Raises:
        ValueError: a temperature or top_p outside of these.
    """

    temp: float
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temp > 0:
            raise ValueError(f"temp is {self.temp}: give a number above 0, or no sampler for greedy decoding")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: give a number above 0, up to 1")

    def _filtered(self, logprobs: mx.array) -> mx.array:
        return apply_top_p(logprobs, self.top_p) if self.top_p < 1 else logprobs

    def distribution(self, logprobs: mx.array) -> mx.array:
        """Log-probabilities (..., vocab) of what is sampled, from those of the model."""
        scaled = self._filtered(logprobs) / self.temp
        return scaled - mx.logsumexp(scaled, axis=-1, keepdims=True)

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Token ids (...) for log-probabilities (..., vocab)."""
        drawn: mx.array = categorical_sampling(self._filtered(logprobs), self.temp)
        return drawn
