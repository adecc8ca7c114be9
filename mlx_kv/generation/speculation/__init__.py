"""Speculative decoding: a drafter proposes, one pass of the model decides. Its settings, but for the draft model.

MLX is imported when a drafter is looked up by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from mlx_kv.settings import SettingError, check_settings, setting

if TYPE_CHECKING:
    from mlx_kv.generation.speculation.drafters import Drafter, Factory

DraftLength = Literal["chosen", "fixed"]
# Default number for each pass of the model: mlx-lm's with a draft model, and a larger one for drafters without a model.
DRAFT_TOKENS, LOOKUP_TOKENS = 3, 10
LOOKUP_MIN, LOOKUP_MAX = 2, 4  # tokens that must be alike before their continuation is proposed, and looked for at most


@dataclass(frozen=True)
class DraftSettings:
    """The drafter, and how many tokens it drafts.

    Attributes:
        drafter: as for `find_drafter`.
        num_draft_tokens: maximum for each pass of the model; None is 3, and 10 of a drafter that looks tokens up.
        prompt_lookup_min, prompt_lookup_max: fewest and most tokens that a drafter looks up in the text (the maximum:
            `ngram` only).
        draft_length: "chosen" drafts as many tokens as have paid so far, or none (`pacing`); "fixed" always all.

    Raises:
        ValueError: a number below 1, a minimum above the maximum, or an unknown drafter or draft_length.
    """

    drafter: str | Factory | Drafter | None = setting(
        None,
        option=("--draft", "--drafter"),
        summary="Speculate: auto, mtp, suffix, ngram, model.",
        metavar="NAME",
        help="Speculate with this drafter: ngram and suffix look the last tokens up in the text, mtp is a head of the "
        "model, model is --draft-model, auto a head where there is one, else suffix; packages add others. The text "
        "stays the same.",
    )
    num_draft_tokens: int | None = setting(
        None,
        option="--num-draft-tokens",
        metavar="K",
        minimum=1,
        unit="tokens",
        default_text=f"{DRAFT_TOKENS}; {LOOKUP_TOKENS} without a draft model",
        help="Maximum tokens drafted for each pass of the model.",
    )
    prompt_lookup_min: int = setting(
        LOOKUP_MIN,
        option="--prompt-lookup-min",
        metavar="N",
        minimum=1,
        unit="tokens",
        default_text=f"{LOOKUP_MIN}",
        help="Fewest last tokens that ngram and suffix look up in the text.",
    )
    prompt_lookup_max: int = setting(
        LOOKUP_MAX,
        option="--prompt-lookup-max",
        metavar="N",
        minimum=1,
        unit="tokens",
        default_text=f"{LOOKUP_MAX}",
        help="Most last tokens that ngram looks up.",
    )
    draft_length: DraftLength = setting(
        "chosen",
        option="--draft-length",
        choices=get_args(DraftLength),
        kind=str,
        help="Number of drafted tokens: as many of the K as pay, or none (chosen), or always K (fixed).",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if isinstance(self.drafter, str):
            from mlx_kv.generation.speculation.drafters import DRAFTERS

            DRAFTERS.find(self.drafter)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise SettingError(
                "{prompt_lookup_min:is}, more than {prompt_lookup_max:=}: give a smaller one",
                prompt_lookup_min=self.prompt_lookup_min,
                prompt_lookup_max=self.prompt_lookup_max,
            )

    @property
    def draft_tokens(self) -> int:
        """Maximum number of tokens drafted for each pass."""
        if self.num_draft_tokens is not None:
            return self.num_draft_tokens
        from mlx_kv.generation.speculation.drafters import DRAFTERS, LookupDrafter, make_best

        factory = DRAFTERS.find(self.drafter) if isinstance(self.drafter, str) else self.drafter
        looks_up = factory is make_best or (isinstance(factory, type) and issubclass(factory, LookupDrafter))
        return LOOKUP_TOKENS if looks_up else DRAFT_TOKENS
