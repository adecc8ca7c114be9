"""Options of the commands that generate: how tokens are chosen, and what drafts them.

Imports neither MLX nor what needs it before a command runs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import click

from mlx_kv.bundled import draft_path
from mlx_kv.cli.options import Command, FiniteFloat, FiniteRange, applied, number_option
from mlx_kv.cli.prompt import prefill_option
from mlx_kv.generation.speculation import DRAFT_TOKENS, LOOKUP_MAX, LOOKUP_MIN, LOOKUP_TOKENS

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlx_kv.generation.sampling import Sampler
    from mlx_kv.generation.settings import LogitsProcessor, SamplingSettings
    from mlx_kv.generation.speculation.settings import DraftSettings
    from mlx_kv.generation.statistics import SpeculationStatistics


PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}  # that change nothing


def asks_for_drafts(draft: str | None, draft_model: str | None) -> bool:
    """Whether --draft and --draft-model say that anything is to be drafted."""
    return draft is not None or draft_model is not None


@dataclass(frozen=True)
class Drafting:
    """What `draft_options` say; each attribute is an option."""

    draft: str | None
    draft_model: str | None
    num_draft_tokens: int | None
    prompt_lookup_min: int | None
    prompt_lookup_max: int | None
    draft_length: Literal["chosen", "fixed"]

    def __post_init__(self) -> None:
        if self.draft == "model" and self.draft_model is None:
            raise click.UsageError("--draft model drafts with a model: give --draft-model")
        if not self.asked and self.num_draft_tokens is not None:
            raise click.UsageError("--num-draft-tokens needs --draft or --draft-model")
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            if getattr(self, name) is not None and self.draft in (None, "model"):
                raise click.UsageError(f"--{name.replace('_', '-')} needs --draft ngram, suffix or auto")
        if self.draft in ("ngram", "suffix", "auto") and self.draft_model is not None:
            raise click.UsageError(f"--draft {self.draft} drafts without a model: leave out --draft-model, or --draft")

    @property
    def asked(self) -> bool:
        """Whether anything is to be drafted."""
        return asks_for_drafts(self.draft, self.draft_model)

    @property
    def settings(self) -> DraftSettings:
        """The same, in terms of the library.

        Raises:
            ValueError: numbers that cannot be, or a name that no drafter has.
        """
        from mlx_kv.generation.speculation.settings import DraftSettings

        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        return DraftSettings(
            self.draft,
            self.num_draft_tokens,
            LOOKUP_MIN if least is None else least,
            LOOKUP_MAX if most is None else most,
            self.draft_length,
        )

    def load_model(self) -> nn.Module | None:
        """The draft model, if there is to be one."""
        if self.draft_model is None:
            return None
        from mlx_kv.mlxlm.loading import load

        return load(draft_path(self.draft_model))[0]

    def let_go(self, model: nn.Module | None) -> None:
        """The weights of the draft model, if there is one, leave memory until they are next used."""
        if self.draft_model is None or model is None:
            return
        from mlx_kv.mlxlm.loading import load, release_weights

        path = draft_path(self.draft_model)
        release_weights(model, lambda: load(path, lazy=True)[0])


@dataclass(frozen=True)
class Decoding:
    """What `decoding_options` say; each attribute but `drafting` is an option."""

    temp: float
    top_p: float
    top_k: int
    min_p: float
    xtc_probability: float
    xtc_threshold: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    prefill_step_size: int | None
    drafting: Drafting

    @property
    def settings(self) -> SamplingSettings:
        """How tokens are chosen, in terms of the library; without the seed."""
        from mlx_kv.generation.settings import SamplingSettings

        return SamplingSettings(
            temperature=self.temp,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        )

    def sampler(self, tokenizer: Any) -> Sampler | None:
        """What draws tokens; None is greedy."""
        return self.settings.sampler(0, tokenizer)

    @property
    def processors(self) -> tuple[LogitsProcessor, ...]:
        """What is done to logits before."""
        return self.settings.processors()

    @property
    def changed(self) -> dict[str, Any]:
        """The options that an answer depends on, where they are not as they are by themselves."""
        penalties = {name: getattr(self, name) for name in PENALTIES}
        sampled = {name: getattr(self, name) for name in ("top_k", "min_p", "xtc_probability")}
        told = {name: value for name, value in penalties.items() if value != PENALTIES[name]}
        if self.temp > 0:
            told |= {"temp": self.temp, "top_p": self.top_p, "seed": self.seed}
            told |= {name: value for name, value in sampled.items() if value}
            told |= {"xtc_threshold": self.xtc_threshold} if self.xtc_probability else {}
        return told


def draft_options(function: Command) -> Command:
    """Who drafts, for the commands that speculate: they get a `Drafting`."""

    @functools.wraps(function)
    def command(**given: Any) -> None:
        drafting = Drafting(**{each.name: given.pop(each.name) for each in fields(Drafting)})
        function(drafting=drafting, **given)

    number: dict[str, Any] = {"type": int, "metavar": "N"}
    options = (
        click.option(
            "--draft",
            metavar="NAME",
            help="Speculate: ngram and suffix look into the text for what may come next, auto is suffix, measured "
            "best, model is --draft-model; packages bring others. The text stays the same.",
        ),
        click.option(
            "--draft-model", metavar="PATH_OR_HUB_ID", help="Speculate with this model; `reference`: the bundled draft."
        ),
        click.option(
            "--num-draft-tokens",
            type=int,
            metavar="K",
            help=f"Drafted for each pass, at the most.  [default: {DRAFT_TOKENS}; {LOOKUP_TOKENS} without a model]",
        ),
        click.option(
            "--draft-length",
            type=click.Choice(("chosen", "fixed")),
            default="chosen",
            show_default=True,
            help="chosen drafts as many of the K tokens as pay, or none; fixed always all of them.",
        ),
        click.option(
            "--prompt-lookup-min",
            **number,
            help=f"So many last tokens must have been there before.  [default: {LOOKUP_MIN}]",
        ),
        click.option("--prompt-lookup-max", **number, help=f"ngram looks for so many.  [default: {LOOKUP_MAX}]"),
    )
    return applied(options, command)


def decoding_options(function: Command) -> Command:
    """How tokens are chosen and how prompts are read, for the commands that generate: they get a `Decoding`."""

    @functools.wraps(function)
    def command(**given: Any) -> None:
        decoding = Decoding(**{each.name: given.pop(each.name) for each in fields(Decoding)})
        function(decoding=decoding, **given)

    share, positive = FiniteRange(0, 1, min_open=True), FiniteRange(0, min_open=True)
    excluded = "How often all likely tokens but the least of them are left out."
    options = (
        number_option("--temp", FiniteRange(0), 0.0, "0 is greedy.", "T"),
        number_option("--top-p", share, 1.0, "From the likeliest tokens that have P together.", "P"),
        number_option("--top-k", click.IntRange(0), 0, "From K tokens; 0 is all.", "K"),
        number_option(
            "--min-p", FiniteRange(0, 1), 0.0, "From tokens at least P times as likely as the likeliest.", "P"
        ),
        number_option("--xtc-probability", FiniteRange(0, 1), 0.0, excluded, "P"),
        number_option("--xtc-threshold", FiniteRange(0, 0.5), 0.1, "What is likely, for that.", "P"),
        number_option("--repetition-penalty", positive, 1.0, "Above 1, tokens among the last 20 become less likely."),
        number_option("--presence-penalty", FiniteFloat(), 0.0, "The same, by so much."),
        number_option("--frequency-penalty", FiniteFloat(), 0.0, "The same, by so much for each time."),
        click.option("--seed", type=click.IntRange(0, 2**64 - 1), metavar="N", help="Makes sampling repeatable."),
        prefill_option(),
        draft_options,
    )
    return applied(options, command)


def said_of_drafts(speculation: SpeculationStatistics) -> str:
    """Two lines of statistics."""
    share = f"{speculation.accepted:,} of {speculation.drafted:,} ({speculation.acceptance_rate:.0%})"
    gain = "" if speculation.gain is None else f", {speculation.gain:.2f} times as fast as without drafts"
    return (
        f"draft       {share} accepted in {speculation.rounds:,} passes of the model\n"
        f"            {speculation.tokens_per_pass:.2f} tokens a pass, {speculation.length} drafted at last{gain}"
    )
