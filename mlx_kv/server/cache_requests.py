"""The request field `cache`: how a request's keys and values are stored, and which settings the operator allows.

Settings that a model does not support are found when the policy is tried out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field, PlainValidator, model_validator

from mlx_kv.cache.codecs import Bits, one_or_two
from mlx_kv.policy import CachePolicy
from mlx_kv.server.errors import ApiError
from mlx_kv.server.fields import Body, FieldError

SETTINGS = ("budget", "bits", "score")  # which the operator has to allow; keep is always allowed
MAX_BUDGET = 1 << 24
MIN_BITS, MAX_BITS = 2, 8


def _bits(value: Any) -> Bits | None:
    """A number, or [of keys, of values], of which one may be null: that tensor is stored as it is."""
    pair = isinstance(value, list) and len(value) == 2 and value != [None, None]
    if not (all(each is None or _is_width(each) for each in value) if pair else _is_width(value)):
        number = f"a whole number from {MIN_BITS} to {MAX_BITS}"
        raise FieldError(f"is neither {number} nor a list of two, of keys and of values: send one of them")
    bits: Bits = one_or_two(value)
    return bits


def _is_width(value: Any) -> bool:
    return type(value) is int and MIN_BITS <= value <= MAX_BITS


class CacheRequest(Body):
    """Settings of a request; None is the server's.

    Attributes:
        keep: whether its keys and values are cached for other requests.
    """

    budget: int | None = Field(default=None, ge=1, le=MAX_BUDGET)
    score: str | None = None
    bits: Annotated[Bits | None, PlainValidator(_bits)] = None
    keep: bool = True

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, value: Any) -> Any:
        if isinstance(value, dict):
            unknown = {name for name in value.keys() - cls.model_fields.keys() if value[name] is not None}
            if unknown:
                raise FieldError("is unknown: leave it out", f".{min(unknown)[:80]}", "unknown_parameter")
        return value


AS_SERVED = CacheRequest()


def _bits_of_word(word: str) -> Bits:
    """Parses 8, or 8/4 of keys and of values; one of two may be none."""
    pair = [None if each == "none" else int(each) for each in word.split("/")]
    bits: Bits = one_or_two(pair) if len(pair) > 1 else int(word)
    CachePolicy(bits=bits)
    return bits


def in_words(setting: Any) -> str:
    """A setting as the operator writes it."""
    if isinstance(setting, tuple):
        return "/".join(map(in_words, setting))
    if callable(getattr(setting, "encode", None)) and not isinstance(setting, str):  # a codec object
        return f"{setting.name} {setting.packed.bits}" if setting.packed is not None else str(setting.name)
    return "none" if setting is None else str(setting)


@dataclass(frozen=True)
class AllowedCache:
    """Settings that requests may choose.

    Attributes:
        budget: minimum and maximum of tokens; None allows no budget.
        bits, scores: the choices.
    """

    budget: tuple[int, int] | None = None
    bits: tuple[Bits, ...] = ()
    scores: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: Iterable[str]) -> AllowedCache:
        """Parses options such as `budget=256-4096`, `bits=8,4,8/4` and `score=key_diff,snap_kv`.

        Raises:
            ValueError: an option that is none of these.
        """
        allowed = cls()
        for option in options:
            name, _, values = option.partition("=")
            words = [word.strip() for word in values.split(",") if word.strip()]
            try:
                if name == "budget":
                    lowest, highest = map(int, values.split("-"))
                    allowed = replace(allowed, budget=(lowest, highest))
                elif name == "bits" and words:
                    allowed = replace(allowed, bits=tuple(map(_bits_of_word, words)))
                elif name == "score" and words:
                    for score in words:
                        CachePolicy(budget=1024, score=score)
                    allowed = replace(allowed, scores=tuple(words))
                else:
                    raise ValueError("give budget=LEAST-MOST, bits=8,8/4 or score=NAME,NAME")
            except ValueError as error:
                reason = "give budget=LEAST-MOST" if name == "budget" else str(error)
                raise ValueError(f"--allow-cache {option}: {reason}") from error
        return allowed

    @property
    def any(self) -> bool:
        """Whether a request can choose another policy than the server's."""
        return self != AllowedCache()

    def policy(self, served: CachePolicy, request: CacheRequest) -> CachePolicy:
        """The policy of a request.

        Args:
            served: the server's, for settings that the request leaves out.

        Raises:
            ApiError: 400, for a setting that is not allowed, or settings that exclude each other.
        """
        changes = {name: value for name in SETTINGS if (value := getattr(request, name)) is not None}
        for name, value in changes.items():
            if value != getattr(served, name):
                self._check(name, value)
        try:
            return CachePolicy(**served.settings() | changes)
        except ValueError as error:
            raise ApiError(400, f"cache: {error}", "cache") from error

    def _check(self, name: str, value: Any) -> None:
        if name == "budget":
            lowest, highest = self.budget or (1, 0)
            is_allowed, allowed = lowest <= value <= highest, f"{lowest} to {highest}" if self.budget else ""
        else:
            choices = self.bits if name == "bits" else self.scores
            is_allowed, allowed = value in choices, ", ".join(map(in_words, choices))
        if not is_allowed:
            fix = f"this server allows {allowed}" if allowed else "this server allows its own only: leave it out"
            raise ApiError(400, f"cache.{name} is {in_words(value)[:80]}: {fix}", f"cache.{name}", "cache_not_allowed")
