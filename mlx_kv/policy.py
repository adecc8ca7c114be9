"""How a model's attention layers keep their keys and values: one frozen description.

All settings are checked when a policy is made. What a model supports of them is checked where its caches are made, in
`mlxlm.convert`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from mlx_kv.cache.checks import check_storage
from mlx_kv.cache.codecs import (
    Affine,
    Codecs,
    Packing,
    are_plain,
    find_codecs,
    of_cache,
    one_or_two,
    packing_of,
)
from mlx_kv.cache.eviction.allocation import (
    Allocation,
    HeadBudgets,
    checked_allocation,
    head_budgets,
    uneven_heads,
)
from mlx_kv.cache.eviction.allocation import LayerAllocation as LayerAllocation
from mlx_kv.cache.eviction.calibration import FITTED, Calibration
from mlx_kv.cache.eviction.evictor import Evictor, LayerGroup
from mlx_kv.cache.eviction.scores import Score, find_score
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import KEEP_RECENT, Append, Budget, Chunks, Layout, Ring, default_keep_recent
from mlx_kv.cache.residual import Residual
from mlx_kv.cache.state import CacheParts
from mlx_kv.policy_settings import SINKS as SINKS
from mlx_kv.policy_settings import PolicySettings
from mlx_kv.settings import SettingError, check_settings, shown

FOR_BUDGETS = ("keep_recent", "score", "share", "margin", "layers", "allocation", "calibration")
BOUNDS = ("max_kv_size", "budget", "sinks", *FOR_BUDGETS)
ALIASES = {"allocation": "layers", "residual": "residual_length"}  # for calls; stored under the second name
CALIBRATED = "calibrated"
OF_LAYERS = ("score", "share", "layers", "calibration")  # which depend on the layers of one model


@dataclass(frozen=True)
class CachePolicy(PolicySettings):
    """Settings for the caches of a model. The defaults store all tokens, unquantised, as the model does.

    Args:
        bits: quantise keys and values to 2, 3, 4, 5, 6 or 8 bits, or a pair for keys and values, such as (8, 4);
            None keeps them as they are.
        group_size: elements that share a scale when quantised: 32, 64 or 128.
        growth: how capacity grows, `Tapered()`, `Geometric()`, `FixedStep(256)` or a rule of your own.
        reserve: tokens to allocate at once, so that the caches do not grow until then.
        quantized_start: quantise only from a write on that begins at this offset or later, of any row.
        max_kv_size: full-attention layers keep the first 4 (`sinks`) and the newest tokens, so many in all, as mlx-lm's
            option of this name; layers with a window of their own keep that. (A model that asks for a window between
            max_kv_size - sinks and max_kv_size sees only the newest max_kv_size - sinks tokens of it.)
        max_write: the longest write that rings and budgets reserve memory for; it is freed while writes are shorter, as
            in decoding. Longer writes work: attention then reads a copy.
        max_rollback: tokens that rings can take back at any time, besides the last write if it is not longer than
            max_write. Recurrent layers keep as many earlier states as that needs.
        budget: full-attention layers keep this many tokens, those with the highest scores. Instead of max_kv_size.
        codec: how tensors are stored, as in `KVCache`: instead of bits, or "rotated" beside them.
        residual_length: the newest tokens that attention sees unquantised, held beside the quantised ones (KIVI, Liu et
            al. 2024; transformers). At most keep_recent of a budget.
        keep_recent, sinks, score, share, margin: as in `CompressedKVCache`. `sinks` also counts for max_kv_size. A
            score of None is "key_diff", a share "layers"; with a calibration "fitted" (if it has weights) and what
            `layers` needs.
        layers: how the budget is allocated to layers and heads; the total never changes. "uniform": every layer and
            head has this budget. "calibrated": each head has the share that `calibration` measured. A table of shares:
            a row for each layer of full attention, with a number for each KV head or one for all of them. With
            share="head" each head has its own budget, with "adaptive" the heads of a layer compete for the layer's,
            with "layer" they keep the same tokens.
        allocation: another name for `layers`, for calls; it is stored as `layers`.
        residual: another name for `residual_length`, for calls; it is stored as that.
        calibration: measurements of the model, for score="fitted" and layers="calibrated", and then their default.

    Raises:
        ValueError: an unknown value, quantized_start or residual_length without quantisation, a setting for budgets
            without a budget, a budget beside max_kv_size, or a residual_length above keep_recent, or beside
            share="adaptive" or a larger max_rollback.
    """

    def __post_init__(self) -> None:
        for name in ("bits", "codec"):  # normalised, since policies are compared
            object.__setattr__(self, name, one_or_two(getattr(self, name)))
        check_settings(self)
        if self.calibration is not None and not isinstance(self.calibration, Calibration):
            raise TypeError(f"calibration is {shown(self.calibration)}: give what mlx_kv.load_calibration returns")
        for alias, name in ALIASES.items():
            if getattr(self, alias) is not None:
                object.__setattr__(self, name, getattr(self, alias))
                object.__setattr__(self, alias, None)
        if self.layers is None:
            object.__setattr__(self, "layers", self._default_layers(self.share))
        for name, default in self._budget_defaults().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if not isinstance(self.layers, str):
            object.__setattr__(self, "layers", head_budgets(self.layers))
        if self.budget is None:
            if unused := [name for name in self.changed() if name in FOR_BUDGETS]:
                raise SettingError(
                    f"{names(unused)} is for a budget, but {{budget:is}}: give the number of tokens to keep"
                )
        elif self.max_kv_size is not None:
            raise SettingError(
                "got a {budget} and {max_kv_size}, which both bound full-attention layers: give one of them"
            )
        for name, wanted in (("score", FITTED), ("layers", CALIBRATED)):
            value = getattr(self, name)
            if isinstance(value, str) and value == wanted and self.calibration is None:
                raise SettingError(
                    f"{{{name}:is}}, which is measured for each model: run mlx-kv calibrate MODEL, and give "
                    "{calibration:=mlx_kv.load_calibration(FILE)}",
                    **{name: value},
                )
        Affine(8, self.group_size)  # its group size is checked even where nothing is quantised
        layout = self.layout()
        if isinstance(layout, Budget):
            checked_allocation(self.share, self.allocated)
            assert self._score  # a name that does not exist, or weights that were not measured
        check_storage(self.codecs, self.growth, self.reserve, self.quantized_start, self.residual_length)
        if self.residual_length:
            uneven = uneven_heads(self.share, self.allocated)
            keep_recent = None if self.budget is None else self.keep_recent
            Residual(self.residual_length).check_beside(self.max_rollback, keep_recent, uneven)

    def layout(self, window: int | None = None, sinks: int = 0, chunk_size: int | None = None) -> Layout:
        """Which slots one layer has: with a window of its own (`sinks` included), in chunks, or of full attention."""
        max_write = max(self.max_write, self.max_rollback)
        if chunk_size is not None:
            return Chunks(chunk_size, max_write, self.max_rollback)
        if window is None and self.max_kv_size is not None:
            window, sinks = self.max_kv_size, min(self.sinks, self.max_kv_size - 1)
        if window is None and self.budget is not None:
            return Budget(self.budget, self.keep_recent, self.sinks, self.margin, self.max_write)
        return Append() if window is None else Ring(window, max_write, sinks, self.max_rollback)

    def make_cache(
        self,
        layout: Layout | None = None,
        packed_decode: bool = True,
        layer_group: LayerGroup | None = None,
        layer: int = 0,
    ) -> KVCache:
        """The cache of one layer.

        Args:
            layout: as `layout()` makes it; None is full attention.
            packed_decode: whether attention may get packed planes.
            layer_group, layer: with a budget, the sequence that this is a layer of, and which.
        """
        layout = self.layout() if layout is None else layout
        evictor = None
        if isinstance(layout, Budget):
            evictor = Evictor(layout, self._score, self.share, layer_group, layer, self.allocated)
        return KVCache.of_parts(
            CacheParts(
                self.codecs,
                layout,
                evictor,
                Residual(self.residual_length) if self.residual_length else None,
                self.growth,
                self.reserve,
                self.quantized_start,
                packed_decode,
            )
        )

    def of_cache(self, number: int) -> CachePolicy:
        """This policy with the codecs of one of a model's caches; ValueError for codecs of another model."""
        own = of_cache(self.codecs, number)
        return self if own == self.codecs else replace(self, bits=None, codec=own)

    def beside_model(self, max_rollback: int) -> CachePolicy:
        """This policy for a layer that is not one of the model's, such as a head that drafts.

        Without what is measured of, or said for, each layer of the model.
        """
        own = {name: value for name, value in self.settings().items() if name not in OF_LAYERS}
        if (codecs := of_cache(self.codecs, 0)) != self.codecs:
            own |= {"bits": None, "codec": codecs}
        return CachePolicy(**own | {"reserve": 0, "max_rollback": max(self.max_rollback, max_rollback)})

    def unbounded(self) -> CachePolicy:
        """This policy without a budget or max_kv_size."""
        return CachePolicy(**{name: value for name, value in self.settings().items() if name not in BOUNDS})

    def plain(self) -> CachePolicy:
        """This policy, but tensors are stored as they are."""
        return replace(self, bits=None, codec=None, quantized_start=0, residual_length=0)

    @property
    def allocated(self) -> Allocation:
        """`layers`, with the table of the calibration in the place of "calibrated"."""
        return self.table or cast(Allocation, self.layers)

    @property
    def table(self) -> HeadBudgets | None:
        """The share of each head, (L, H) or (L, 1), if shares are fixed by a table."""
        if self.calibration is not None and self.layers == CALIBRATED:
            return self.calibration.heads
        return None if isinstance(self.layers, str) else self.layers

    @property
    def stores_plain(self) -> bool:
        """Whether tensors are stored as they are."""
        return are_plain(self.codecs)

    @property
    def packing(self) -> Packing | None:
        """How mlx-lm's attention can read what is stored; None where it cannot."""
        return packing_of(self.codecs)

    @property
    def codecs(self) -> Codecs:
        """How keys and how values are stored."""
        return find_codecs(self.bits, self.group_size, self.codec)

    @property
    def reads_twice(self) -> bool:
        """Whether the score is of what tokens receive when a prompt is read once more."""
        wants = None if self.budget is None else self._score.wants
        return wants is not None and wants.reread

    @property
    def score_name(self) -> str:
        """The name of the score; "fitted" for that of any calibration."""
        return self._score.name.partition(":")[0]

    @property
    def _score(self) -> Score:
        own = self.calibration if isinstance(self.score, str) and self.score == FITTED else None
        return find_score(self.score) if own is None else own.score

    def changed(self) -> list[str]:
        """The names of the settings that are not at their default."""
        defaults = self._budget_defaults()
        share = None if isinstance(self.share, str) and self.share == defaults["share"] else self.share
        defaults["layers"] = self._default_layers(share)
        values = [(each.name, getattr(self, each.name), defaults.get(each.name, each.default)) for each in fields(self)]
        # Of another type is changed, too, before it is compared: arrays compare element by element.
        return [name for name, value, default in values if type(value) is not type(default) or value != default]

    def settings(self) -> dict[str, Any]:
        """The settings that are not at their default; `CachePolicy(**settings | changes)` derives defaults anew."""
        return {name: getattr(self, name) for name in self.changed()}

    def _budget_defaults(self) -> dict[str, Any]:
        """Defaults of the settings of budgets but `layers`, which depend on other settings."""
        measured = self.calibration
        share = "layers" if isinstance(self.layers, str) and self.layers != CALIBRATED else "head"
        if share == "head" and self.residual_length:  # of heads that hold the same tokens
            share = "layer"
        score = FITTED if measured is not None and measured.layers else "key_diff"
        keep_recent = KEEP_RECENT
        if self.budget is not None:
            keep_recent = default_keep_recent(self.budget, self.residual_length)
        return {"keep_recent": keep_recent, "score": score, "share": share}

    def _default_layers(self, share: str | None) -> str:
        """What `layers` is if it is not given, beside a share; None is one that is not given either."""
        return CALIBRATED if self.calibration is not None and share != "layers" else "uniform"


def given_policy(policy: CachePolicy | None) -> CachePolicy:
    """The policy of an argument: None is `CachePolicy()`; TypeError for anything else, such as a dict of settings."""
    if policy is None:
        return CachePolicy()
    if not isinstance(policy, CachePolicy):
        raise TypeError(f"policy is {shown(policy)}: give a CachePolicy, such as CachePolicy(bits=8)")
    return policy


def names(settings: Sequence[str]) -> str:
    """Names of settings, for the template of a `SettingError`."""
    return ", ".join(f"{{{name}}}" for name in settings)
