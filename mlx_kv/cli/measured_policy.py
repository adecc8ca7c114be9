"""Parts of a policy that depend on the model: its calibration, `--kv-bits auto`, and the centres of its keys.

Imports neither MLX nor what needs it before a command runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_kv.cli.calibrations import calibration_for, checked_policy
from mlx_kv.cli.codec_options import AUTO, CENTRED, in_words
from mlx_kv.cli.notices import say
from mlx_kv.cli.options import Command, FiniteRange, applied, make_policy, policy_options
from mlx_kv.cli.prompt import prefill_bar
from mlx_kv.ranks.environment import launched

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlx_kv.evaluation.choosing import Tried
    from mlx_kv.evaluation.codec_loss import CodecLoss
    from mlx_kv.policy import CachePolicy

ANY_BITS = 8  # in the place of those to be chosen, while all else is checked


@dataclass(frozen=True)
class AskedPolicy:
    """What options say of caches, as far as it can be said before there is a model.

    Attributes:
        policy: all of it, with others in the place of what is measured.
        options: that it was made of.
        measures: `AUTO`, `CENTRED`, or None where nothing is.
        max_loss: that bits may add, in nats a token; None is as usual.
        text: on which it is measured; None is the usual one.
    """

    policy: CachePolicy
    options: dict[str, Any]
    measures: str | None = None
    max_loss: float | None = None
    text: str | None = None

    @property
    def bound(self) -> float:
        """Nats a token that bits may add."""
        from mlx_kv.evaluation.choosing import MAX_LOSS

        return MAX_LOSS if self.max_loss is None else self.max_loss

    @property
    def measured(self) -> dict[str, Any]:
        """What stands for it where settings are compared; nothing where nothing is measured."""
        if self.measures is None:
            return {}
        told = None if self.text is None else hashlib.blake2b(self.text.encode(), digest_size=16).hexdigest()
        bound = {"max_loss": self.bound} if self.measures == AUTO else {}
        return {"measured": self.measures, "loss_text": told} | bound

    def for_model(self, model: nn.Module, tokenizer: Any, name: str) -> CachePolicy:
        """The policy for this model; what was measured or found is reported.

        Args:
            name: of the model, as the user gave it.

        Raises:
            ValueError: a text that is too short to measure, or a calibration that cannot be used.
        """
        if self.policy.budget is not None:
            calibrated = make_policy(calibration_for(model, name, self.options), **self.options)
            return replace(self, policy=calibrated)._measured_for(model, tokenizer)
        return self._measured_for(model, tokenizer)

    def _measured_for(self, model: nn.Module, tokenizer: Any) -> CachePolicy:
        if self.measures is None:
            return self.policy
        import mlx.core as mx

        from mlx_kv.evaluation.choosing import TOKENS, tokens_of, usual_text
        from mlx_kv.mlxlm.loading import context_length

        parts = usual_text() if self.text is None else [self.text]
        tokens = tokens_of(tokenizer, parts, min(TOKENS, context_length(model) or TOKENS))
        policy = self._centred(model, tokens) if self.measures == CENTRED else self._chosen(model, tokens)
        mx.clear_cache()
        mx.reset_peak_memory()  # what is said of memory is said of what comes now
        return policy

    def _centred(self, model: nn.Module, tokens: list[int]) -> CachePolicy:
        from mlx_kv.evaluation.centres import centred

        say(f"--kv-codec {CENTRED}: measuring where keys lie on {len(tokens):,} tokens of a text")
        keys, values = self.policy.codecs
        with prefill_bar(len(tokens), 1, "keys") as advance:
            return replace(self.policy, bits=None, codec=(centred(model, tokens, keys, advance), values))

    def _chosen(self, model: nn.Module, tokens: list[int]) -> CachePolicy:
        from mlx_kv.evaluation.choosing import CANDIDATES, choose_bits
        from mlx_kv.evaluation.codec_loss import PLAIN, bytes_per_token
        from mlx_kv.files.fingerprint import model_fingerprint
        from mlx_kv.files.measurement_cache import MeasurementCache

        tried: list[Tried] = []
        chosen = choose_bits(
            model,
            tokens,
            self.bound,
            candidates=[replace(each, residual_length=self.policy.residual_length) for each in CANDIDATES],
            measure=_Measuring(model, tokens),
            remembered=MeasurementCache(),
            fingerprint=model_fingerprint(model),
            tell=tried.append,
        )
        say_chosen(chosen, tried, self.bound, len(tokens), bytes_per_token(model, PLAIN))
        if chosen.stores_plain:
            return self.policy.plain()
        return replace(self.policy, bits=chosen.bits, group_size=chosen.group_size, codec=chosen.codec)


class _Measuring:
    """What a policy adds to the loss of a text, with a bar for each time that the text is read."""

    def __init__(self, model: nn.Module, tokens: list[int]) -> None:
        self._model, self._tokens = model, tokens
        self._text: CodecLoss | None = None
        self._advance: Callable[[int, int], None] | None = None

    def __call__(self, policy: CachePolicy) -> tuple[float, float]:
        if self._text is None:
            from mlx_kv.evaluation.codec_loss import CodecLoss

            count = f"{len(self._tokens):,} tokens"
            say(f"--kv-bits {AUTO}: measuring what bits cost on {count} of a text, once for this model")
            self._text = CodecLoss(self._model, self._tokens, progress=self._tell)
            with prefill_bar(len(self._tokens), 1, "loss of plain caches") as self._advance:
                _ = self._text.plain
        with prefill_bar(len(self._tokens), 1, f"loss of {as_options(policy)}") as self._advance:
            added = self._text.added(policy)
        return added.nats, added.error

    def _tell(self, done: int, total: int) -> None:
        if self._advance is not None:
            self._advance(done, total)


LOSS_OPTIONS = (
    click.option(
        "--max-loss",
        type=FiniteRange(0),
        metavar="NATS",
        help=f"--kv-bits {AUTO} takes the fewest bits that add no more than this to the loss of a text, a token, its "
        "standard error included; 0 keeps all plain. Measured once for a model, and remembered.  [default: 0.01]",
    ),
    click.option(
        "--loss-text",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="The text: its first 2,048 tokens.  [default: of Python's own reference and library]",
    ),
)


def measured_policy_options(function: Command) -> Command:
    """`policy_options` for the commands that load a model to generate with; `asked_policy` reads them."""
    return policy_options(applied(LOSS_OPTIONS, function))


def asked_policy(max_loss: float | None, loss_text: Path | None, **options: Any) -> AskedPolicy:
    """What `measured_policy_options` say.

    Raises:
        click.UsageError, ValueError: settings that don't exist or don't go together; a text that cannot be read.
    """
    codec, bits = options["kv_codec"], options["kv_bits"]
    keys, values = codec if isinstance(codec, tuple) else (codec, codec)
    measures = AUTO if bits == AUTO else CENTRED if keys == CENTRED else None
    if measures is None and loss_text is not None:
        raise click.UsageError(f"--loss-text is for --kv-bits {AUTO}, or --kv-codec {CENTRED}: leave it out")
    if measures != AUTO and max_loss is not None:
        raise click.UsageError(f"--max-loss is for --kv-bits {AUTO}: give that, too, or leave out --max-loss")
    if measures is None:
        if values == CENTRED:
            raise click.UsageError(f"--kv-codec {codec[0]},{CENTRED}: keys are centred, values are not")
        return AskedPolicy(checked_policy(**options), options)
    if launched() is not None:
        what = f"--kv-bits {AUTO}" if measures == AUTO else f"--kv-codec {CENTRED}"
        raise click.UsageError(f"{what} measures a whole model, and each rank has a part of one: leave it out")
    if measures == AUTO:
        ctx = click.get_current_context()
        for name in ("kv_codec", "kv_rotate", "kv_group_size"):
            if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
                option = f"--{name.replace('_', '-')}"
                raise click.UsageError(f"--kv-bits {AUTO} chooses what {option} says, too: leave out {option}")
        options = {**options, "kv_bits": ANY_BITS}
    else:
        if (bits[0] if isinstance(bits, tuple) else bits) is None:
            raise click.UsageError(f"--kv-codec {CENTRED} needs --kv-bits: say how many, such as 4")
        others = "plain" if isinstance(bits, tuple) and bits[1] is None else "rotated"
        options = {**options, "kv_codec": ("rotated", others if values == CENTRED else values)}
    text = None if loss_text is None else read_loss_text(loss_text)
    return AskedPolicy(checked_policy(**options), options, measures, max_loss, text)


def read_loss_text(file: Path) -> str:
    """A text to measure on.

    Raises:
        click.UsageError: it cannot be read, or is no text.
    """
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeError as error:
        raise click.UsageError(f"{file} is not UTF-8 text: give another file with --loss-text") from error
    except OSError as error:
        raise click.UsageError(f"cannot read {file}: {error.strerror}; give another file with --loss-text") from error


def as_options(policy: CachePolicy) -> str:
    """The options that say how tensors are stored, as a user would write them."""
    group = "" if policy.group_size == type(policy)().group_size else f" --kv-group-size {policy.group_size}"
    rotated = " --kv-rotate" if policy.codec == "rotated" else ""
    residual = f" --kv-residual {policy.residual_length}" if policy.residual_length else ""
    return f"--kv-bits {in_words(policy.bits)}{group}{rotated}{residual}"


def say_chosen(chosen: CachePolicy, tried: list[Tried], max_loss: float, tokens: int, plain: int) -> None:
    """On stderr, what was chosen, what it costs, and since when that is known.

    Args:
        tokens: of the text.
        plain: bytes of a token that is stored as it is.
    """
    measured = [each for each in tried if each.measured]
    since = "measured now" if measured else "as measured before"
    if any(not each.remembered for each in measured):
        since += ", and cannot be remembered"
    on = f"on {tokens:,} tokens ({since})"
    if chosen.stores_plain:
        least = f", {min(each.upper_bound for each in tried):.4f} at the least" if tried else ""
        say(f"--kv-bits {AUTO}: no bits are within {max_loss:g} nats a token{least}, {on}: all stays plain")
        return
    cost = tried[-1]
    bytes_ = f"{cost.bytes_per_token:,} bytes a token instead of {plain:,}"
    say(f"--kv-bits {AUTO} is {as_options(chosen)}: {cost.nats:+.4f} ± {cost.error:.4f} nats a token {on}, {bytes_}")
