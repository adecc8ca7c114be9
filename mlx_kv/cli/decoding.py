"""Options of the commands that generate: sampling, drafts, and the format of answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from mlx_kv.bundled import draft_path, model_path
from mlx_kv.cli.options import LEADERS_FILE, Command, given_options, options
from mlx_kv.generation.settings import SamplingSettings
from mlx_kv.generation.speculation import DraftSettings
from mlx_kv.settings import setting, settings_of

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlx_kv.generation.grammar import Constraint
    from mlx_kv.generation.sampling import Sampler
    from mlx_kv.generation.settings import LogitsProcessor
    from mlx_kv.generation.statistics import SpeculationStatistics

# --- sampling ---------------------------------------------------------------------------------------------------------

# Narrower than in Python: 0 is what other programs call "off".
SAMPLING_BOUNDS: dict[str, Any] = {
    "top_p": {"above": 0, "minimum": None},
    "repetition_penalty": {"above": 0, "minimum": None},
    "seed": {"minimum": 0, "maximum": 2**64 - 1},
}


def sampling_options(function: Command) -> Command:
    """The options of sampling, for a command that receives `sampling`, a `SamplingSettings`."""
    return options(SamplingSettings, "sampling", section="Sampling", **SAMPLING_BOUNDS)(function)


def _default_of(name: str) -> Any:
    """An option of the server for requests without a field of this setting, with the bounds of that field."""
    described = settings_of(SamplingSettings)[name]
    assert described.served is not None
    low, high = described.served
    default_text = f"the model's, else {described.default:g}"
    option = replace(described, minimum=max(low, 0), maximum=high, default_text=default_text)
    return field(default=None, metadata={"setting": option})


@dataclass(frozen=True)
class SamplingDefaults:
    """How a server samples where a request does not decide; None is as the model's generation_config.json."""

    SECTION: ClassVar = "Sampling"

    temperature: float | None = _default_of("temperature")
    top_p: float | None = _default_of("top_p")
    top_k: int | None = _default_of("top_k")
    min_p: float | None = _default_of("min_p")
    generation_config: str = setting(
        "auto",
        option="--generation-config",
        choices=("auto", "none"),
        help="Sampling defaults from the model's generation_config.json (auto), or none.",
    )

    def of(self, model: str) -> SamplingSettings:
        """The defaults for a model, as the option --model names it."""
        from mlx_kv.mlxlm.loading import generation_config

        config = generation_config(model_path(model)) if self.generation_config == "auto" else {}
        values = vars(self).items()
        options = {name: value for name, value in values if name != "generation_config" and value is not None}
        return replace(SamplingSettings.of_model(config), **options)


def unseeded_sampler(sampling: SamplingSettings, tokenizer: Any) -> Sampler | None:
    """The sampler of all sequences, each of which gets a seed of its own; None is greedy."""
    return replace(sampling, seed=None).sampler(0, tokenizer)


# --- drafts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftOptions(DraftSettings):
    """The settings of drafts, and the draft model."""

    SECTION: ClassVar = "Speculation"

    draft_model: str | None = setting(
        None,
        option="--draft-model",
        summary="Speculate with this model.",
        metavar="PATH_OR_HUB_ID",
        help="Speculate with this model; `reference` is the bundled draft model.",
    )

    def __post_init__(self) -> None:
        if self.drafter == "model" and self.draft_model is None:
            raise click.UsageError("--draft model drafts with a model: give --draft-model")
        if not self.enabled and self.num_draft_tokens is not None:
            raise click.UsageError("--num-draft-tokens needs --draft or --draft-model")
        given = given_options(DraftOptions)
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            if self.drafter in (None, "model") and name in given:
                raise click.UsageError(f"{given[name]} needs --draft ngram, suffix or auto")
        if self.drafter in ("ngram", "suffix", "auto") and self.draft_model is not None:
            raise click.UsageError(
                f"--draft {self.drafter} drafts without a model: leave out --draft-model, or --draft"
            )
        super().__post_init__()

    @property
    def enabled(self) -> bool:
        """Whether anything is drafted."""
        return drafts_enabled(self.drafter, self.draft_model)

    @property
    def settings(self) -> DraftSettings:
        """The settings of drafts alone."""
        return DraftSettings(**{each.name: getattr(self, each.name) for each in fields(DraftSettings)})

    def load_model(self) -> nn.Module | None:
        """The draft model, if there is one."""
        if self.draft_model is None:
            return None
        from mlx_kv.mlxlm.loading import load

        return load(draft_path(self.draft_model))[0]

    def release(self, model: nn.Module | None) -> None:
        """Frees the weights of the draft model, if there is one; they are loaded again when they are next used."""
        if self.draft_model is None or model is None:
            return
        from mlx_kv.mlxlm.loading import load, release_weights

        path = draft_path(self.draft_model)
        release_weights(model, lambda: load(path, lazy=True)[0])


def drafts_enabled(drafter: object, draft_model: object) -> bool:
    """Whether --draft or --draft-model is given."""
    return drafter is not None or draft_model is not None


def draft_options(function: Command) -> Command:
    """The options of drafts, for a command that receives `drafts`, a `DraftOptions`."""
    order = ("drafter", "draft_model", "num_draft_tokens", "draft_length", "prompt_lookup_min", "prompt_lookup_max")
    return options(DraftOptions, "drafts", *order)(function)


def draft_lines(speculation: SpeculationStatistics) -> str:
    """Two lines of statistics."""
    share = f"{speculation.accepted:,} of {speculation.drafted:,} ({speculation.acceptance_rate:.0%})"
    gain = "" if speculation.gain is None else f", {speculation.gain:.2f} times as fast as without drafts"
    return (
        f"draft       {share} accepted in {speculation.rounds:,} passes of the model\n"
        f"            {speculation.tokens_per_pass:.2f} tokens a pass, {speculation.length} drafted at last{gain}"
    )


# --- formats ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FormatOptions:
    """The format of an answer: a JSON schema, a regular expression, a grammar, or none of them."""

    SECTION: ClassVar = "Sampling"

    json_schema: Path | None = setting(
        None,
        option="--json-schema",
        summary="JSON schema that the answer follows.",
        kind=LEADERS_FILE,
        metavar="FILE",
        help="JSON schema that the answer follows.",
    )
    regex: str | None = setting(
        None,
        option="--regex",
        summary="Pattern that the whole answer matches.",
        metavar="PATTERN",
        help="Regular expression that the whole answer matches.",
    )
    grammar: Path | None = setting(
        None,
        option="--grammar",
        kind=LEADERS_FILE,
        metavar="FILE",
        help="Grammar that the answer follows: llama.cpp's or Lark's.",
    )

    def __post_init__(self) -> None:
        formats = [name for name in ("json_schema", "grammar", "regex") if getattr(self, name) is not None]
        if len(formats) > 1:
            one, other, *_ = (f"--{name.replace('_', '-')}" for name in formats)
            raise click.UsageError(f"{one} and {other} both describe the answer: give one")

    @property
    def constraint(self) -> Constraint | None:
        """The constraint of the library; None for any answer.

        Raises:
            click.BadParameter: a file that is no JSON.
        """
        from mlx_kv.generation import grammar as constraints

        if self.regex is not None:
            return constraints.regex(self.regex)
        if self.grammar is not None:
            return constraints.grammar(self.grammar.read_text())
        if self.json_schema is None:
            return None
        try:
            return constraints.json_schema(json.loads(self.json_schema.read_text()))
        except (ValueError, RecursionError) as error:
            raise click.BadParameter(f"{self.json_schema} is not JSON: {error}", param_hint="--json-schema") from None

    def processors(self, tokenizer: Any, prompt: Sequence[int], before: int, chat: bool) -> tuple[LogitsProcessor, ...]:
        """The logits processors that keep the answer to the format.

        Args:
            prompt: token ids that are read now.
            before: number of tokens before them that the processors receive as well.
            chat: whether the model may think before it answers.

        Raises:
            ValueError: the format cannot be compiled, and why.
        """
        constraint = self.constraint
        if constraint is None:
            return ()
        from mlx_kv.generation.grammar import GrammarCompiler, LeadIn

        lead_in = LeadIn.after(tokenizer, prompt) if chat else None
        return (GrammarCompiler(tokenizer).compile(constraint).processor(before + len(prompt), lead_in),)
