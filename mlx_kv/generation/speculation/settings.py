"""What a user says of drafts, but for the model that may draft: one frozen value, checked before anything is loaded.

Decides how many tokens are drafted where nobody says. Knows nothing about models or rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mlx_kv.cache.checks import whole_number
from mlx_kv.generation.speculation import DRAFT_TOKENS, LOOKUP_MAX, LOOKUP_MIN, LOOKUP_TOKENS
from mlx_kv.generation.speculation.drafters import DRAFTERS, Drafter, Factory
from mlx_kv.generation.speculation.drafters.lookup import LookupDrafter

DraftLength = Literal["chosen", "fixed"]


@dataclass(frozen=True)
class DraftSettings:
    """Who drafts, and how much.

    Attributes:
        drafter: as for `find_drafter`.
        num_draft_tokens: for each pass of the model, at the most; None is 3, and 10 of a drafter that looks into text.
        prompt_lookup_min, prompt_lookup_max: tokens that must be alike for a drafter that looks into text, and that
            `ngram` looks for at the most.
        draft_length: "chosen" drafts as many of them as have paid so far, or none (`pacing`); "fixed" all, always.

    Raises:
        ValueError: a number below 1, a minimum above the maximum, or a name that no drafter, or no way to choose, has.
    """

    drafter: str | Factory | Drafter | None = None
    num_draft_tokens: int | None = None
    prompt_lookup_min: int = LOOKUP_MIN
    prompt_lookup_max: int = LOOKUP_MAX
    draft_length: DraftLength = "chosen"

    def __post_init__(self) -> None:
        if isinstance(self.drafter, str):
            DRAFTERS.find(self.drafter)
        whole_number("num_draft_tokens", self.draft_tokens, least=1)
        whole_number("prompt_lookup_min", self.prompt_lookup_min, least=1)
        whole_number("prompt_lookup_max", self.prompt_lookup_max, least=1)
        if not isinstance(self.draft_length, str) or self.draft_length not in get_args(DraftLength):
            raise ValueError(
                f"draft_length is {self.draft_length!r}: give 'chosen' (as many tokens as pay) or 'fixed' (all, always)"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min is {self.prompt_lookup_min}, more than prompt_lookup_max={self.prompt_lookup_max}: "
                "give a smaller one"
            )

    @property
    def draft_tokens(self) -> int:
        """How many are drafted for each pass, at the most."""
        if self.num_draft_tokens is not None:
            return self.num_draft_tokens
        factory = DRAFTERS.find(self.drafter) if isinstance(self.drafter, str) else self.drafter
        return LOOKUP_TOKENS if isinstance(factory, type) and issubclass(factory, LookupDrafter) else DRAFT_TOKENS
