"""How a request wants its keys and values kept: the field `cache`, and what of it the operator allows.

Decides which policy a request gets. Knows nothing about models: what one cannot bear is found when the policy is tried
out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from mlx_kv.cache.codecs import Bits, one_or_two
from mlx_kv.policy import CachePolicy
from mlx_kv.server.errors import ApiError
from mlx_kv.server.fields import boolean, integer, json_kind, typed

SETTINGS = ("budget", "bits", "score")  # for which the operator says what is allowed; keep is allowed to all
MOST_BUDGET = 1 << 24
LEAST_BITS, MOST_BITS = 2, 8


@dataclass(frozen=True)
class CacheRequest:
    """What a request says; None is as the server has it.

    Attributes:
        keep: whether what is read of it is kept for others.
    """

    budget: int | None = None
    score: str | None = None
    bits: Bits | None = None
    keep: bool = True


AS_SERVED = CacheRequest()


def cache_field(fields: dict[str, Any]) -> CacheRequest:
    """The field `cache` of a request.

    Raises:
        ApiError: 400, for one that is none.
    """
    if "cache" not in fields:
        return AS_SERVED
    given = fields["cache"]
    if not isinstance(given, dict):
        raise ApiError(400, f"cache is a JSON {json_kind(given)}: send an object", "cache")
    said = {f"cache.{name}": value for name, value in given.items() if value is not None}
    for name in sorted(said.keys() - {f"cache.{name}" for name in (*SETTINGS, "keep")}):
        raise ApiError(400, f"unknown field {name[:80]!r}: leave it out", name[:80], "unknown_parameter")
    return CacheRequest(
        integer(said, "cache.budget", 1, MOST_BUDGET),
        typed(said, "cache.score", str, None),
        _bits(said, "cache.bits"),
        boolean(said, "cache.keep") if "cache.keep" in said else True,
    )


def _bits(said: dict[str, Any], name: str) -> Bits | None:
    """A number, or [of keys, of values], of which one may be null: that tensor stays as it is."""
    given = said.get(name)
    if not isinstance(given, list):
        return integer(said, name, LEAST_BITS, MOST_BITS)
    if len(given) != 2 or given == [None, None]:
        raise ApiError(400, f"{name} is a list: send one number, or two, of keys and of values", name)
    for each in given:
        integer({name: each}, name, LEAST_BITS, MOST_BITS)
    bits: Bits = one_or_two(given)
    return bits


def _bits_of_word(word: str) -> Bits:
    """8, or 8/4 of keys and of values; one of two may be none."""
    pair = [None if each == "none" else int(each) for each in word.split("/")]
    bits: Bits = one_or_two(pair) if len(pair) > 1 else int(word)
    CachePolicy(bits=bits)
    return bits


def in_words(setting: Any) -> str:
    """A setting as the operator writes it."""
    if isinstance(setting, tuple):
        return "/".join(map(in_words, setting))
    if callable(getattr(setting, "encode", None)) and not isinstance(setting, str):  # a codec that was made
        return f"{setting.name} {setting.packed.bits}" if setting.packed is not None else str(setting.name)
    return "none" if setting is None else str(setting)


@dataclass(frozen=True)
class AllowedCache:
    """What requests may ask for.

    Attributes:
        budget: the fewest and the most tokens; None is no budget by request.
        bits, scores: one of these.
    """

    budget: tuple[int, int] | None = None
    bits: tuple[Bits, ...] = ()
    scores: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: Iterable[str]) -> AllowedCache:
        """From words such as `budget=256-4096`, `bits=8,4,8/4` and `score=key_diff,snap_kv`.

        Raises:
            ValueError: words that say nothing.
        """
        allowed = cls()
        for option in options:
            name, _, values = option.partition("=")
            words = [word.strip() for word in values.split(",") if word.strip()]
            try:
                if name == "budget":
                    least, most = map(int, values.split("-"))
                    allowed = replace(allowed, budget=(least, most))
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
        """Whether a request can get another policy than the server's."""
        return self != AllowedCache()

    def policy(self, own: CachePolicy, asked: CacheRequest) -> CachePolicy:
        """The policy that a request gets, where `own` is the server's.

        Raises:
            ApiError: 400, for what is not allowed, or does not go together.
        """
        changes = {name: value for name in SETTINGS if (value := getattr(asked, name)) is not None}
        for name, value in changes.items():
            if value != getattr(own, name):
                self._check(name, value)
        try:
            return CachePolicy(**own.settings() | changes)
        except ValueError as error:
            raise ApiError(400, f"cache: {error}", "cache") from error

    def _check(self, name: str, value: Any) -> None:
        if name == "budget":
            least, most = self.budget or (1, 0)
            fine, told = least <= value <= most, f"{least} to {most}" if self.budget else ""
        else:
            values = self.bits if name == "bits" else self.scores
            fine, told = value in values, ", ".join(map(in_words, values))
        if not fine:
            what = f"this server allows {told}" if told else "this server allows no other than its own: leave it out"
            raise ApiError(400, f"cache.{name} is {in_words(value)[:80]}: {what}", f"cache.{name}", "cache_not_allowed")
