"""What was measured of one model: the tokens that heads need, weights of a score, loss by bits, and centres of keys.

The fitted score is that of KVzip, predicted from the keys and values of a cache by a ridge regression for each layer:
the largest attention that a token receives when its text is read once more (`kvzip`). The features of a token are the
keys before RoPE and the values of all heads of its layer, the logarithms of their norms, and of its position. Costs a
matrix product per token, once.
B rows, L layers of full attention, H KV heads, n tokens, Dk and Dv head dims of keys and values, F = H * (Dk + Dv + 2)
+ 1 features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypedDict

import mlx.core as mx

from mlx_kv.cache.checks import check_type
from mlx_kv.cache.codecs import Centre, CentredByLayer, Codec
from mlx_kv.cache.eviction.allocation import HeadBudgets, head_budgets
from mlx_kv.cache.eviction.scores import MEASURED, Score, ScoredTokens
from mlx_kv.settings import SettingError, is_number, shown

FITTED = "fitted"
SCORE_PREFIX = f"{FITTED}:"
LEGIBLE = 0.5  # share of right answers with all tokens kept, below which a model does not understand the questions
MAX_LOSS = 0.01  # nats a token: a perplexity one percent higher
ANEW = "run mlx-kv calibrate anew, without --budgets-only"
TINY_NORM = 1e-6
TINY_SHARE = 1e-5  # added to shares of attention before their logarithm is taken
BLOCK = 1024  # tokens at once: features are a second copy of keys and values in float32
MAX_LOG = 10.0  # of a predicted logarithm, which is below 0 wherever the fit holds


class BudgetAnswers(TypedDict):
    """Shares of right answers under a budget of so many tokens, without a calibration and with it."""

    budget: int
    before: float
    after: float


class Answers(TypedDict):
    """Questions about a context of so many tokens, the share answered right with all of them, and under budgets."""

    context: int
    questions: int
    full: float
    budgets: list[BudgetAnswers]


# --- the fitted score -------------------------------------------------------------------------------------------------


class Rotation(NamedTuple):
    """A RoPE: pairs of channels, rotated by an angle that grows with the position.

    Attributes:
        pairs: (P, 2) of int32, channels; others are left as they are.
        frequencies: (P,) of float32, radians per position.
        factor: that the rotated channels are multiplied by (YaRN, LongRoPE).
    """

    pairs: mx.array
    frequencies: mx.array
    factor: mx.array  # () of float32

    def undo(self, x: mx.array, positions: mx.array) -> mx.array:
        """x as it was before RoPE.

        Args:
            x: (B, H, n, D) of float32.
            positions: (B, 1 or H, n) of int32.
        """
        angles = positions[..., None].astype(mx.float32) * self.frequencies  # (B, 1 or H, n, P)
        cos, sin = mx.cos(angles) / self.factor, mx.sin(angles) / self.factor
        channels = x.shape[3]
        first, second = self.pairs[:, 0], self.pairs[:, 1]
        a, b = x[..., first], x[..., second]
        turned = mx.concatenate([a * cos + b * sin, b * cos - a * sin], axis=-1)
        order = mx.concatenate([first, second])
        if order.size == channels:
            return turned[..., mx.argsort(order)]
        rotated: Any = set(order.tolist())  # type: ignore[arg-type]
        rest = mx.array([channel for channel in range(channels) if channel not in rotated])
        return mx.concatenate([turned, x[..., rest]], axis=-1)[..., mx.argsort(mx.concatenate([order, rest]))]


class FittedLayer(NamedTuple):
    """The regression of one layer: the logarithm of the share is features @ weights + bias.

    Attributes:
        weights: (F, H) of float32.
        bias: (H,) of float32.
        key_rope, value_rope: what RoPE does to the keys and to the values of the cache; None where it does nothing.
            Latent attention (MLA) stores rotated channels as values.
    """

    weights: mx.array
    bias: mx.array
    key_rope: Rotation | None = None
    value_rope: Rotation | None = None

    @property
    def arrays(self) -> dict[str, mx.array]:
        """All numbers by name."""
        ropes = {"key_rope": self.key_rope, "value_rope": self.value_rope}
        angles = {f"{name}.{part}": x for name, rope in ropes.items() if rope for part, x in rope._asdict().items()}
        return {"weights": self.weights, "bias": self.bias} | angles

    @classmethod
    def of_arrays(cls, arrays: dict[str, mx.array]) -> FittedLayer:
        """The inverse of `arrays`; raises KeyError for one that is missing."""
        ropes = [
            Rotation(*[arrays[f"{name}.{part}"] for part in Rotation._fields]) if f"{name}.pairs" in arrays else None
            for name in ("key_rope", "value_rope")
        ]
        return cls(arrays["weights"], arrays["bias"], *ropes)

    def predicted(self, keys: mx.array, values: mx.array, positions: mx.array) -> mx.array:
        """(B, H, n) of float32, the logarithm of the share that each token is predicted to receive; as `features`."""
        return (features(self, keys, values, positions) @ self.weights + self.bias).swapaxes(1, 2)


def features(layer: FittedLayer, keys: mx.array, values: mx.array, positions: mx.array) -> mx.array:
    """(B, n, F) of float32: what a regression of this layer reads of tokens.

    Args:
        layer: its RoPE.
        keys: (B, H, n, Dk), as the cache holds them, decoded.
        values: (B, H, n, Dv).
        positions: (B, 1, n); all heads hold the same tokens.
    """
    parts, norms = [], []
    for x, rope in ((keys, layer.key_rope), (values, layer.value_rope)):
        x = x.astype(mx.float32)
        norms.append(mx.log(mx.linalg.norm(x, axis=-1) + TINY_NORM).swapaxes(1, 2))  # RoPE changes no norm
        x = x if rope is None else rope.undo(x, positions)
        parts.append(x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1))  # (B, n, H * D)
    place = mx.log1p(positions[:, 0].astype(mx.float32))[..., None]  # (B, n, 1)
    return mx.concatenate([*parts, *norms, mx.broadcast_to(place, (*parts[0].shape[:2], 1))], axis=-1)


def fitted_score(layers: Sequence[FittedLayer]) -> Callable[[ScoredTokens], mx.array]:
    """The score of a model with these layers: the predicted share of attention, comparable between heads and layers."""

    def fitted(tokens: ScoredTokens) -> mx.array:
        layer, n = layers[tokens.layer], tokens.keys.shape[2]
        blocks = []
        for first in range(0, n, BLOCK):
            which = slice(first, first + BLOCK)
            keys = tokens.keys[:, :, which] if tokens.key_part is None else tokens.key_part(which)
            values = tokens.values[:, :, which] if tokens.value_part is None else tokens.value_part(which)
            blocks.append(layer.predicted(keys, values, tokens.positions[..., which]))
            if n > BLOCK:
                mx.eval(blocks[-1])
        return mx.exp(mx.minimum(mx.concatenate(blocks, axis=2), MAX_LOG))

    return fitted


# --- a calibration ----------------------------------------------------------------------------------------------------


class BitsLoss(NamedTuple):
    """What it costs to store keys and values in fewer bits.

    Attributes:
        keys, values: bits.
        group_size, codec: as for `CachePolicy`.
        bytes_per_token: of all layers, scales included.
        nats: added loss per token, the mean over held-out texts, compared with plain caches.
        error: its standard error, as if tokens were independent.
    """

    keys: int
    values: int
    group_size: int
    codec: str | None
    bytes_per_token: int
    nats: float
    error: float


@dataclass(frozen=True, eq=False)
class Calibration:
    """Measurements of one model, as `mlx_kv.calibrate` makes them and a `.kvcal.safetensors` file stores them.

    Two calibrations are equal if they have the same `name`, a digest of all numbers.

    Attributes:
        fingerprint: of the model, without a tokenizer (`files.serialization.model_fingerprint`).
        heads: (L, H), tokens that each head is given, as a multiple of the mean over all heads.
        layers: of each layer, the weights of the fitted score; empty if only budgets were measured.
        details: versions, texts, tokens and the quality of the fit; anything that JSON can hold.
        losses: of bits, the fewest bytes first; empty where they were not measured.
        centres: of the keys of each of the model's caches, None where there are no keys; empty as `losses`.

    Raises:
        TypeError: an argument of another type.
        ValueError: budgets that are no table of finite numbers from 0 up, or weights for another number of layers.
    """

    fingerprint: str
    heads: HeadBudgets
    layers: tuple[FittedLayer, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    losses: tuple[BitsLoss, ...] = ()
    centres: tuple[Centre | None, ...] = ()

    def __post_init__(self) -> None:
        check_type("fingerprint", self.fingerprint, str, "give that of a model, 32 hex digits")
        check_type("details", self.details, Mapping, "give a dict of what JSON can hold")
        kinds: dict[str, Any] = {"layers": FittedLayer, "losses": BitsLoss, "centres": Centre | None}
        for name, kind in kinds.items():
            check_type(name, getattr(self, name), tuple, "give those of mlx_kv.calibrate or of a file")
            for element in getattr(self, name):
                check_type(f"an element of {name}", element, kind, "give those of mlx_kv.calibrate or of a file")
        object.__setattr__(self, "heads", head_budgets(self.heads))
        if self.layers and len(self.layers) != len(self.heads):
            raise ValueError(
                f"got budgets for {len(self.heads)} layers and weights for {len(self.layers)}: give as many of both"
            )
        if self.layers:
            MEASURED[self.score.name] = self.score  # loaded caches find their score by its name

    @cached_property
    def name(self) -> str:
        """12 hex digits of a digest of all numbers."""
        sealed = hashlib.blake2b(repr((self.fingerprint, self.heads)).encode(), digest_size=6)
        for layer in self.layers:
            for array in layer.arrays.values():
                sealed.update(memoryview(array))  # type: ignore[arg-type]
        if self.losses or self.centres:
            sealed.update(repr((self.losses, [centre and centre.numbers for centre in self.centres])).encode())
        return sealed.hexdigest()

    @cached_property
    def score(self) -> Score:
        """The fitted score, registered under "fitted:" and `name`.

        Raises:
            ValueError: only budgets were measured.
        """
        if not self.layers:
            raise SettingError(
                "this calibration has budgets of heads alone, and no weights for {score:='fitted'}: run mlx-kv "
                "calibrate without --budgets-only"
            )
        return Score(SCORE_PREFIX + self.name, fitted_score(self.layers), per_token=True)

    @property
    def loses_answers(self) -> bool:
        """Whether the model answered fewer of the questions about budgets right with it than without it."""
        answers: Answers | None = self.details.get("answers")
        if not answers or answers["full"] < LEGIBLE:
            return False
        return sum(row["after"] - row["before"] for row in answers["budgets"]) < 0

    def smallest_bits(self, max_loss: float = MAX_LOSS) -> BitsLoss | None:
        """The bits with the fewest bytes a token whose loss and standard error are within a bound; None: no bits are.

        Args:
            max_loss: in nats per token.

        Raises:
            ValueError: a negative bound, or losses that were not measured.
        """
        if not (is_number(max_loss) and max_loss >= 0):
            raise ValueError(f"max_loss is {shown(max_loss)}: give nats a token, 0 or more")
        if not self.losses:
            raise ValueError(f"this calibration has no losses of bits: {ANEW}")
        # A gain counts as no loss.
        return next((each for each in self.losses if max(each.nats, 0.0) + each.error <= max_loss), None)

    def centred(self, codec: Codec) -> CentredByLayer:
        """A codec of keys that subtracts their centres and stores the difference by `codec`.

        Raises:
            ValueError: centres that were not measured.
        """
        if not self.centres:
            raise ValueError(f"this calibration has no centres of keys: {ANEW}")
        return CentredByLayer(self.centres, codec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Calibration) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"Calibration({self.name})"
