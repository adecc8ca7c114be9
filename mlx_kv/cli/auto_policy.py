"""Parts of a policy that are measured on the model: `--kv-bits auto`, the centres of its keys, its calibration."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from mlx_kv.bundled import bundled_models
from mlx_kv.cli.options import EXISTING_FILE, Command, given_options
from mlx_kv.cli.output import prefill_bar, say
from mlx_kv.cli.policy import AUTO, CENTRED, POLICY, PolicyOptions, as_options, policy_options
from mlx_kv.ranks.environment import launched
from mlx_kv.settings import setting

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlx_kv.calibration.storage import CodecLoss, Tried
    from mlx_kv.policy import CachePolicy

ANY_BITS = 8  # instead of those to be chosen, while all else is checked
COARSE_BITS, SMALL_MODEL = 4, 10**9  # bits of which a warning is given, for models of fewer weights
CHOSEN = ("codec", "rotate", "group_size")  # settings that --kv-bits auto chooses as well


@dataclass(frozen=True)
class AutoPolicyOptions(PolicyOptions):
    """Options of a policy, for commands that load a model to generate with.

    Attributes:
        max_loss: that --kv-bits auto may add, in nats a token; None is `MAX_LOSS`.
        loss_text: a file with the text on which it is measured; None is a text of this package.
    """

    max_loss: float | None = setting(
        None,
        option="--max-loss",
        metavar="NATS",
        minimum=0,
        default_text="0.01",
        help=f"Largest loss per token that --kv-bits {AUTO} may add to that of a text, its standard error included; 0 "
        "quantises nothing. Measured once for a model, and stored.",
    )
    loss_text: Path | None = setting(
        None,
        option="--loss-text",
        kind=EXISTING_FILE,
        metavar="FILE",
        default_text="Python's own reference and library",
        help="Text whose first 2,048 tokens the loss is measured on.",
    )

    @property
    def measures(self) -> str | None:
        """What is measured: `AUTO`, `CENTRED`, or None."""
        keys = self.codec[0] if isinstance(self.codec, tuple) else self.codec
        return AUTO if cast(Any, self.bits) == AUTO else CENTRED if keys == CENTRED else None

    @cached_property
    def before_loading(self) -> CachePolicy:
        """The policy as far as it is known without a model, with stand-ins for what is measured.

        Raises:
            click.UsageError, ValueError: settings that don't exist or cannot be combined; a text that cannot be read.
        """
        measures, bits, codec = self.measures, self.bits, self.codec
        if measures is None and self.loss_text is not None:
            raise click.UsageError(f"--loss-text is for --kv-bits {AUTO}, or --kv-codec {CENTRED}: leave it out")
        if measures != AUTO and self.max_loss is not None:
            raise click.UsageError(f"--max-loss is for --kv-bits {AUTO}: give that, too, or leave out --max-loss")
        if measures is None:
            if isinstance(codec, tuple) and codec[1] == CENTRED:
                raise click.UsageError(f"--kv-codec {codec[0]},{CENTRED}: keys are centred, values are not")
            return self._fixed.checked()
        if launched() is not None:
            what = f"--kv-bits {AUTO}" if measures == AUTO else f"--kv-codec {CENTRED}"
            raise click.UsageError(f"{what} measures a whole model, and each rank has a part of one: leave it out")
        if measures == AUTO:
            for name, option in given_options(AutoPolicyOptions).items():
                if name in CHOSEN:
                    raise click.UsageError(f"--kv-bits {AUTO} chooses the value of {option}, too: leave out {option}")
        elif (bits[0] if isinstance(bits, tuple) else bits) is None:
            raise click.UsageError(f"--kv-codec {CENTRED} needs --kv-bits: give a number, such as 4")
        _ = self._text  # read before a model is loaded
        return self._fixed.checked()

    @cached_property
    def measured(self) -> dict[str, Any]:
        """What identifies the measurement where settings are compared; empty where nothing is measured."""
        if self.measures is None:
            return {}
        digest = None if self._text is None else hashlib.blake2b(self._text.encode(), digest_size=16).hexdigest()
        return {"measured": self.measures, "loss_text": digest} | ({"max_loss": self._bound} if self._auto else {})

    def for_model(self, model: nn.Module, tokenizer: Any, name: str) -> CachePolicy:
        """The policy for a model; measurements are reported.

        Args:
            name: of the model, as the user gave it.

        Raises:
            ValueError: a text too short to measure on, or a calibration that cannot be used.
        """
        policy = self.before_loading
        if policy.budget is not None:
            policy = self._fixed.policy(self.calibration_for(model, name))
        if self.measures is None:
            if name not in bundled_models() and _too_coarse(policy, model):
                say(
                    "keys of 4 bits or fewer often change the answers of models below a billion weights: give "
                    f"--kv-bits {AUTO} instead, or --kv-residual 64, too"
                )
            return policy
        import mlx.core as mx

        from mlx_kv.calibration.storage import TOKENS, tokens_of, usual_text
        from mlx_kv.mlxlm.loading import context_length

        parts = usual_text() if self._text is None else [self._text]
        tokens = tokens_of(tokenizer, parts, min(TOKENS, context_length(model) or TOKENS))
        policy = (self._chosen if self._auto else _centred)(policy, model, tokens)
        mx.clear_cache()
        mx.reset_peak_memory()  # memory is reported of what follows
        return policy

    @property
    def _auto(self) -> bool:
        return self.measures == AUTO

    @property
    def _fixed(self) -> PolicyOptions:
        """These options with stand-ins for what is measured."""
        if self._auto:
            return replace(self, bits=ANY_BITS)
        if self.measures == CENTRED:
            plain = isinstance(self.bits, tuple) and self.bits[1] is None
            values = self.codec[1] if isinstance(self.codec, tuple) else CENTRED
            return replace(self, codec=("rotated", ("plain" if plain else "rotated") if values == CENTRED else values))
        return self

    @property
    def _bound(self) -> float:
        """Nats a token that bits may add."""
        from mlx_kv.calibration.storage import MAX_LOSS

        return MAX_LOSS if self.max_loss is None else self.max_loss

    @cached_property
    def _text(self) -> str | None:
        """The text of --loss-text.

        Raises:
            click.UsageError: it cannot be read, or is not UTF-8.
        """
        if self.loss_text is None:
            return None
        fix = "give another file with --loss-text"
        try:
            return self.loss_text.read_text(encoding="utf-8")
        except UnicodeError as error:
            raise click.UsageError(f"{self.loss_text} is not UTF-8 text: {fix}") from error
        except OSError as error:
            raise click.UsageError(f"cannot read {self.loss_text}: {error.strerror}; {fix}") from error

    def _chosen(self, policy: CachePolicy, model: nn.Module, tokens: list[int]) -> CachePolicy:
        from mlx_kv.calibration.storage import CANDIDATES, PLAIN, bytes_per_token, choose_bits
        from mlx_kv.files.measurement_cache import MeasurementCache
        from mlx_kv.files.serialization import model_fingerprint

        tried: list[Tried] = []
        chosen = choose_bits(
            model,
            tokens,
            self._bound,
            candidates=[replace(each, residual_length=policy.residual_length) for each in CANDIDATES],
            measure=_Measuring(model, tokens),
            remembered=MeasurementCache(),
            fingerprint=model_fingerprint(model),
            tell=tried.append,
        )
        report_chosen(chosen, tried, self._bound, len(tokens), bytes_per_token(model, PLAIN))
        if chosen.stores_plain:
            return policy.plain()
        return replace(policy, bits=chosen.bits, group_size=chosen.group_size, codec=chosen.codec)


def _too_coarse(policy: CachePolicy, model: nn.Module) -> bool:
    """Whether keys, which lose more than values, have so few bits that a small model often answers differently."""
    from mlx_kv.mlxlm.loading import number_of_weights

    keys = policy.bits[0] if isinstance(policy.bits, tuple) else policy.bits
    few = keys is not None and keys <= COARSE_BITS
    return few and policy.residual_length == 0 and number_of_weights(model) < SMALL_MODEL


def _centred(policy: CachePolicy, model: nn.Module, tokens: list[int]) -> CachePolicy:
    from mlx_kv.calibration.storage import centred

    say(f"--kv-codec {CENTRED}: measuring the means of keys on {len(tokens):,} tokens of a text")
    keys, values = policy.codecs
    with prefill_bar(len(tokens), 1, "keys") as advance:
        return replace(policy, bits=None, codec=(centred(model, tokens, keys, advance), values))


class _Measuring:
    """The loss that a policy adds to a text, with a bar for each time that the text is read."""

    def __init__(self, model: nn.Module, tokens: list[int]) -> None:
        self._model, self._tokens = model, tokens
        self._text: CodecLoss | None = None
        self._advance: Callable[[int, int], None] | None = None

    def __call__(self, policy: CachePolicy) -> tuple[float, float]:
        if self._text is None:
            from mlx_kv.calibration.storage import CodecLoss

            count = f"{len(self._tokens):,} tokens"
            say(f"--kv-bits {AUTO}: measuring what each number of bits costs on {count} of a text, once for this model")
            self._text = CodecLoss(self._model, self._tokens, progress=self._progress)
            with prefill_bar(len(self._tokens), 1, "loss of plain caches") as self._advance:
                _ = self._text.plain
        with prefill_bar(len(self._tokens), 1, f"loss of {as_options(policy)}") as self._advance:
            added = self._text.added(policy)
        return added.nats, added.error

    def _progress(self, done: int, total: int) -> None:
        if self._advance is not None:
            self._advance(done, total)


def auto_policy_options(function: Command) -> Command:
    """The options of a policy, for commands that generate: they receive `policy`, an `AutoPolicyOptions`."""
    return policy_options(AutoPolicyOptions, "policy", *POLICY, "max_loss", "loss_text")(function)


def report_chosen(chosen: CachePolicy, tried: list[Tried], max_loss: float, tokens: int, plain: int) -> None:
    """Reports on stderr the bits that were chosen, what they cost, and whether that was measured now.

    Args:
        tokens: of the text.
        plain: bytes of a token that is not quantised.
    """
    measured = [each for each in tried if each.measured]
    since = "measured now" if measured else "as measured before"
    if any(not each.remembered for each in measured):
        since += ", and cannot be stored"
    on = f"on {tokens:,} tokens ({since})"
    if chosen.stores_plain:
        least = f", {min(each.upper_bound for each in tried):.4f} at the least" if tried else ""
        say(f"--kv-bits {AUTO}: no bits are within {max_loss:g} nats a token{least}, {on}: nothing is quantised")
        return
    cost = tried[-1]
    bytes_ = f"{cost.bytes_per_token:,} bytes a token instead of {plain:,}"
    say(f"--kv-bits {AUTO} is {as_options(chosen)}: {cost.nats:+.4f} ± {cost.error:.4f} nats a token {on}, {bytes_}")
