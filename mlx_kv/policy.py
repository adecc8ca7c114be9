"""How a model's attention layers keep their keys and values: one frozen description for all of them.

Decides nothing itself: it holds the settings, checks them when it is made, and makes the cache of one layer. Knows
nothing about models; `mlxlm.convert.make_prompt_cache` applies a policy to one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, cast

from mlx_kv.cache.checks import SettingError, shown, whole_number
from mlx_kv.cache.codecs import (
    Affine,
    Bits,
    Choice,
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
    Granularity,
    HeadBudgets,
    LayerBudgets,
    head_budgets,
    layer_budget,
)
from mlx_kv.cache.eviction.calibration import FITTED, Calibration
from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.cache.eviction.layer_group import LayerGroup
from mlx_kv.cache.eviction.scores import Function, Score, find_score
from mlx_kv.cache.growth import DEFAULT, Growth
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import KEEP_RECENT, Append, Budget, Chunks, Layout, Ring, default_keep_recent
from mlx_kv.cache.residual import Residual

SINKS = 4  # first tokens that are never dropped: mlx-lm's number, after StreamingLLM (Xiao et al. 2023)
FOR_BUDGETS = ("keep_recent", "score", "share", "margin", "layers", "allocation", "calibration")
CALIBRATED = "calibrated"
LayerAllocation = LayerBudgets | Literal["calibrated"] | HeadBudgets


@dataclass(frozen=True)
class CachePolicy:
    """Settings for the caches of a model. Every default is "as the model wants it".

    Args:
        bits: quantise keys and values to 2, 3, 4, 5, 6 or 8 bits, or keys and values each to its own, such as (8, 4);
            None keeps them as they are.
        group_size: elements that share a scale when quantised: 32, 64 or 128.
        growth: how capacity grows, `Tapered()`, `Geometric()`, `FixedStep(256)` or a rule of your own.
        reserve: tokens to make room for at once, so that nothing grows within them.
        quantized_start: quantise only from a write on that begins at this offset or later, of any row.
        max_kv_size: full-attention layers keep the first 4 (`sinks`) and the newest tokens, so many in all, as mlx-lm's
            option of this name; layers with a window of their own keep that. (A model that asks for a window between
            max_kv_size - sinks and max_kv_size sees only the newest max_kv_size - sinks tokens of it.)
        max_write: the longest write that rings plan for. Longer ones lose nothing, but attention reads a copy then.
            With a budget, the longest write that memory is planned for. While writes are shorter, as in decoding,
            rings and budgets give the room for it back.
        max_rollback: tokens that rings must be able to take back at any time; the last write they always
            can, if it is not longer than max_write. Recurrent
            state holds what it was before its last passes, as far as that goes back: while tokens are read one by one
            it can take back any number up to this, and holds so many states beside that of now.
        budget: full-attention layers keep so many tokens, those that matter most. Instead of max_kv_size.
        codec: how tensors are stored, as in `KVCache`: instead of bits, or "rotated" beside them.
        residual_length: so many of the newest tokens are seen as they came, whatever stores them; they are held beside
            what is stored. KIVI (Liu et al. 2024) and transformers call it that. At most keep_recent of a budget.
        keep_recent, sinks, score, share, margin: as in `CompressedKVCache`. `sinks` also counts for max_kv_size. A
            score of None is "key_diff", a share "layers"; with a calibration "fitted" (if it has weights) and what
            `layers` needs.
        layers: how the budget is allocated to layers and heads, all together always the same number of tokens:
            "uniform", every layer and head has this budget; "pyramid", lower layers have more and upper ones fewer (see
            `of_layer`); "calibrated", each head has the share that `calibration` measured; a table of shares, a row for
            each layer of full attention and in it a number for each KV head, or one for all of them; "global", one
            ranking of the tokens of all heads of all layers, for scores that are comparable between layers ("fitted",
            "kvzip"). With share="head" each head has its own budget, with "adaptive" the heads of a layer compete for
            the layer's, with "layer" they keep the same tokens; "global" needs "adaptive".
        allocation: another name for `layers`, for calls; it is stored as `layers`.
        calibration: measurements of the model, for score="fitted" and layers="calibrated", and then their default.

    Raises:
        ValueError: a value that does not exist, quantized_start or residual_length where nothing is quantised, a
            setting for budgets without a budget, a budget beside max_kv_size, or a residual_length that is more than
            keep_recent, or beside share="adaptive" or a max_rollback that it cannot give back.
    """

    bits: Bits | None = None
    group_size: int = 64
    growth: Growth = DEFAULT
    reserve: int = 0
    quantized_start: int = 0
    max_kv_size: int | None = None
    max_write: int = 512
    max_rollback: int = 0
    budget: int | None = None
    keep_recent: int = None  # type: ignore[assignment]  # None is decided when it is made, as the next
    sinks: int = SINKS
    score: str | Function | Score = None  # type: ignore[assignment]
    share: Granularity = None  # type: ignore[assignment]
    margin: int | None = None
    codec: Choice | None = None
    layers: LayerAllocation = None  # type: ignore[assignment]
    residual_length: int = 0
    calibration: Calibration | None = None
    allocation: LayerAllocation | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("bits", "codec"):  # said twice is said once, and a list is a tuple: policies are compared
            object.__setattr__(self, name, one_or_two(getattr(self, name)))
        whole_number("max_rollback", self.max_rollback)
        whole_number("max_write", self.max_write, least=1)
        whole_number("residual_length", self.residual_length)
        if self.max_kv_size is not None:
            whole_number("max_kv_size", self.max_kv_size, least=1)
        if self.calibration is not None and not isinstance(self.calibration, Calibration):
            raise TypeError(f"calibration is {shown(self.calibration)}: give what mlx_kv.load_calibration returns")
        if self.allocation is not None:
            object.__setattr__(self, "layers", self.allocation)
            object.__setattr__(self, "allocation", None)
        for name, default in self._budget_defaults().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if not isinstance(self.layers, str):
            object.__setattr__(self, "layers", head_budgets(self.layers))
        if self.budget is None:
            whole_number("sinks", self.sinks)
            if unused := [name for name in self.changed() if name in FOR_BUDGETS]:
                raise SettingError(
                    f"{', '.join(unused)} is for a budget, but budget is None: say how many tokens to keep", unused
                )
        elif self.max_kv_size is not None:
            raise ValueError("got a budget and max_kv_size, which both bound full-attention layers: give one of them")
        if self.residual_length:  # of windows, too, which only a model has
            Residual(self.residual_length).check_beside(self.max_rollback)
        for name, wanted in (("score", FITTED), ("layers", CALIBRATED)):
            value = getattr(self, name)
            if isinstance(value, str) and value == wanted and self.calibration is None:
                raise SettingError(
                    f"{name} is {wanted!r}, which is measured for each model: run mlx-kv calibrate MODEL, and give "
                    "calibration=mlx_kv.load_calibration(FILE)",
                    [name],
                )
        Affine(8, self.group_size)  # checks it also where it is not looked at: nobody means 48
        self.make_cache()  # the parts check the rest

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
        """The cache of one layer, of full attention unless told otherwise.

        Args:
            layout: as `layout()` makes it.
            layer_group, layer: with a budget, the sequence that this is a layer of, and which.
        """
        layout = self.layout() if layout is None else layout
        evictor = None
        if isinstance(layout, Budget):
            score = self.calibration.score if self.calibration and self.score == FITTED else self.score
            evictor = Evictor(layout, score, self.share, layer_group, layer, self.allocated)
        return KVCache(
            bits=self.bits,
            group_size=self.group_size,
            growth=self.growth,
            reserve=self.reserve,
            quantized_start=self.quantized_start,
            packed_decode=packed_decode,
            layout=layout,
            evictor=evictor,
            codec=self.codec,
            residual_length=self.residual_length,
        )

    def of_layer(self, layer: int, layers: int) -> CachePolicy:
        """This policy with the budget that one of so many layers of full attention has.

        Raises:
            ValueError: a budget that sinks and recent tokens would fill in an upper layer.
        """
        if self.budget is None or self.layers != "pyramid":
            return self
        whole = self.layout()
        assert isinstance(whole, Budget)
        budget = layer_budget(self.budget, layer, layers, whole.sinks + whole.keep_recent + 1)
        return replace(self, budget=budget, margin=whole.slack)

    def of_cache(self, number: int) -> CachePolicy:
        """This policy with the codecs of one of a model's caches, where they are not the same in all.

        Raises:
            ValueError: codecs of another model.
        """
        own = of_cache(self.codecs, number)
        return self if own == self.codecs else replace(self, bits=None, codec=own)

    def unbounded(self) -> CachePolicy:
        """This policy, but full attention keeps all of its tokens."""
        default = CachePolicy()
        same: dict[str, Any] = {name: getattr(default, name) for name in FOR_BUDGETS}
        return replace(self, max_kv_size=None, budget=None, **same)

    def plain(self) -> CachePolicy:
        """This policy, but tensors are stored as they are."""
        return replace(self, bits=None, codec=None, quantized_start=0, residual_length=0)

    @property
    def allocated(self) -> Allocation:
        """`layers`, with the table of the calibration in the place of "calibrated"."""
        return self.table or cast(LayerBudgets, self.layers)

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
        wants = find_score(self.score).wants if self.budget is not None and self.score != FITTED else None
        return wants is not None and wants.reread

    def changed(self) -> list[str]:
        """The names of the settings that are not at their default."""
        defaults = self._budget_defaults()
        values = [(each.name, getattr(self, each.name), defaults.get(each.name, each.default)) for each in fields(self)]
        # Of another type is changed, too, before it is compared: arrays compare element by element.
        return [name for name, value, default in values if type(value) is not type(default) or value != default]

    def settings(self) -> dict[str, Any]:
        """The settings that are not at their default, by name: `CachePolicy(**settings)` is equal to this policy.

        With other settings beside them, defaults that depend on those are found anew, which `replace` would not do.
        """
        return {name: getattr(self, name) for name in self.changed()}

    def _budget_defaults(self) -> dict[str, Any]:
        """The settings of budgets where nothing is said: they depend on the others."""
        measured = self.calibration
        layers = self.layers if self.layers is not None else "uniform"
        if self.layers is None and measured is not None and self.share != "layers":
            layers = CALIBRATED
        shares = {"uniform": "layers", "pyramid": "layer", "global": "adaptive"}
        share = shares.get(layers, "head") if isinstance(layers, str) else "head"
        if share == "head" and self.residual_length:  # of heads that hold the same tokens
            share = "layer"
        score = FITTED if measured is not None and measured.layers else "key_diff"
        keep_recent = KEEP_RECENT
        if self.budget is not None:
            keep_recent = default_keep_recent(whole_number("budget", self.budget, least=1), self.residual_length)
        return {"keep_recent": keep_recent, "score": score, "share": share, "layers": layers}


def given_policy(policy: CachePolicy | None) -> CachePolicy:
    """The policy of an argument: None is `CachePolicy()`.

    Raises:
        TypeError: something else, such as a dict of settings.
    """
    if policy is None:
        return CachePolicy()
    if not isinstance(policy, CachePolicy):
        raise TypeError(f"policy is {shown(policy)}: give a CachePolicy, such as CachePolicy(bits=8)")
    return policy
