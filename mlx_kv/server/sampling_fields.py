"""Fields of a request that say how tokens are chosen, and what is told of each.

Decides their bounds, what stands for one that is left out, and in which of an API's words they come: OpenAI's, and
those that mlx_lm.server has besides. Knows nothing about models.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from mlx_kv.generation.sampling import derived_seed
from mlx_kv.generation.settings import LEAST_PENALTY, SamplingSettings
from mlx_kv.server.errors import ApiError
from mlx_kv.server.fields import boolean, integer, json_kind, number, typed

NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 0.5),
    "repetition_penalty": (0, 100),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
}
COUNTS = ("repetition_context_size", "presence_context_size", "frequency_context_size")
FIELDS = {*NUMBERS, *COUNTS, "top_k", "logit_bias", "seed", "logprobs", "top_logprobs", "n", "best_of"}
MOST_COUNTED = 1 << 24
MOST_BIASES = 1024
MOST_BIAS = 100.0
MOST_TOP_LOGPROBS = 20
MOST_ANSWERS = 128


@dataclass(frozen=True)
class Answers:
    """How many answers a prompt gets, and how the tokens of each are chosen and told.

    Attributes:
        n: answers to each prompt.
        top_logprobs: how many likeliest tokens are told with each token; None tells no log-probabilities at all.
    """

    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    n: int = 1
    top_logprobs: int | None = None

    def sampling_of(self, index: int) -> SamplingSettings:
        """Of one of the answers to a prompt: with a seed, each draws by one of its own, the first by that seed."""
        seed = self.sampling.seed
        return self.sampling if seed is None or index == 0 else replace(self.sampling, seed=derived_seed(seed, index))


def answers_of(fields: dict[str, Any], defaults: SamplingSettings, chat: bool) -> Answers:
    """What the fields of a request say.

    Args:
        defaults: where they don't.
        chat: in whose words log-probabilities are asked for.

    Raises:
        ApiError: 400, for what cannot be.
    """
    bounds = {name: each for name, each in NUMBERS.items() if name in fields}  # defaults may be beyond them
    told: dict[str, Any] = {name: number(fields, name, *each, 0) for name, each in bounds.items()}
    if 0 < told.get("repetition_penalty", 0) < LEAST_PENALTY:
        raise ApiError(400, f"repetition_penalty is neither 0 nor at least {LEAST_PENALTY}", "repetition_penalty")
    told |= {name: integer(fields, name, 0, MOST_COUNTED) for name in COUNTS}
    top_k, seed = integer(fields, "top_k", -1, MOST_COUNTED), integer(fields, "seed", -(2**63), 2**64 - 1)
    told["top_k"] = None if top_k is None else max(top_k, 0)  # -1 is how some clients say all
    told["seed"] = None if seed is None else seed % 2**64
    told["logit_bias"] = _biases(fields)
    n = integer(fields, "n", 1, MOST_ANSWERS) or 1
    if (integer(fields, "best_of", 1, MOST_ANSWERS) or n) != n:
        raise ApiError(400, "best_of can be no other number than n: all answers are sent", "best_of")
    sampling = replace(defaults, **{name: value for name, value in told.items() if value is not None})
    return Answers(sampling, n, _of_chat(fields) if chat else _of_completion(fields))


def check_biases(sampling: SamplingSettings, vocabulary: int) -> None:
    """Raises ApiError, 400, for a token that the model does not have."""
    for token in sampling.biases:
        if token >= vocabulary:
            raise ApiError(400, f"logit_bias names token {token}, which is not one of {vocabulary:,}", "logit_bias")


def _biases(fields: dict[str, Any]) -> tuple[tuple[int, float], ...] | None:
    given = typed(fields, "logit_bias", dict, {})
    if len(given) > MOST_BIASES:
        raise ApiError(400, f"logit_bias has {len(given):,} tokens: send at most {MOST_BIASES:,}", "logit_bias")
    pairs = []
    for name, value in given.items():
        if not (name.isascii() and name.isdecimal() and len(name) < 10):
            raise ApiError(400, f"logit_bias has the key {name[:80]!r}: send ids of tokens", "logit_bias")
        if type(value) not in (int, float) or not -MOST_BIAS <= value <= MOST_BIAS:
            raise ApiError(400, f"logit_bias[{name}] is no number from {-MOST_BIAS:g} to {MOST_BIAS:g}", "logit_bias")
        pairs.append((int(name), float(value)))
    return tuple(pairs) or None


def _of_chat(fields: dict[str, Any]) -> int | None:
    wanted, most = boolean(fields, "logprobs"), integer(fields, "top_logprobs", 0, MOST_TOP_LOGPROBS)
    if most and not wanted:
        raise ApiError(400, "top_logprobs is only for logprobs=true: send both, or none", "top_logprobs")
    return (most or 0) if wanted else None


def _of_completion(fields: dict[str, Any]) -> int | None:
    """Here `logprobs` is the number of likeliest tokens. As a boolean it is what it is in a chat."""
    wanted = fields.get("logprobs")
    if isinstance(wanted, bool) or (wanted is None and "top_logprobs" in fields):
        return _of_chat(fields)
    if wanted is not None and type(wanted) is not int:
        raise ApiError(400, f"logprobs is a JSON {json_kind(wanted)}: send a number or a boolean", "logprobs")
    most = integer(fields, "logprobs", 0, MOST_TOP_LOGPROBS)
    if most is not None and boolean(fields, "echo"):
        raise ApiError(400, "there are no log-probabilities of an echoed prompt: leave out echo or logprobs", "echo")
    return most
