"""Budgets of heads by a table, or by one ranking of all layers, in whole models: against a slow, obvious reference."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from budget_oracle import PLACED, PLACED_ONCE, Watched, placed_once
from calibrations import random_calibration

import mlx_kv
from mlx_kv import CachePolicy
from mlx_kv.cache.eviction import compaction, evictor
from mlx_kv.cache.eviction.calibration import Calibration, FittedLayer, Rotation
from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.cache.eviction.scores import Score, ScoredTokens
from mlx_kv.cache.eviction.slot_tokens import SlotTokens
from mlx_kv.cache.layout import Budget
from mlx_kv.files.serialization import model_fingerprint
from mlx_kv.generation.prefill import Instructions, prefill_all
from tests.tiny_models import VOCAB, make_model

LAYERS, HEADS = 3, 3
SIZES: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": HEADS, "num_hidden_layers": LAYERS}
TABLE = ((4.0, 0.5, 0.0), (1.0, 1.0, 1.0), (0.2, 0.0, 0.6))
SHAPE: dict[str, Any] = {"budget": 16, "keep_recent": 4, "sinks": 2, "margin": 5}
ALLOCATED: dict[str, dict[str, Any]] = {
    "head x table": {"share": "head", "layers": TABLE},
    "adaptive x table": {"share": "adaptive", "layers": TABLE},
    "layer x table": {"share": "layer", "layers": TABLE},
    "head x column": {"share": "head", "layers": ((2.5,), (0.5,), (0.0,))},
    "adaptive x column": {"share": "adaptive", "layers": ((2.5,), (0.5,), (0.0,))},
}


EVEN = ("layer x table", "head x column")  # all heads of a layer have as many tokens


def llama() -> Any:
    return make_model("llama", **SIZES)


def policy(allocated: str, score: Any = PLACED, **more: Any) -> CachePolicy:
    return CachePolicy(**SHAPE, **ALLOCATED[allocated], score=score, **more)


def watched(model: Any, allocated: str, score: Any = PLACED, heads: int = HEADS, **more: Any) -> Watched:
    settings = policy(allocated, score, **more)
    return Watched(model, settings, mlx_kv.make_prompt_cache(model, settings), heads, VOCAB)


def life(own: Watched, folder: Path, seed: int, steps: int = 14) -> None:
    """A prompt, and what happens to its caches after that: chunks, tokens, trims, files, copies, other rows."""
    draw = random.Random(seed)
    own.read(draw.randint(10, 40))
    own.read(1)
    other = Watched(own.model, own.policy, mlx_kv.make_prompt_cache(own.model, own.policy), HEADS, VOCAB)
    other.read(draw.choice([3, 30]))
    other.read(draw.randint(1, 9))

    def trim() -> None:
        most = min(min(cache.most_trims) for cache in own.budgets)
        own.trim(draw.randint(0, min(9, most)))

    acts = [
        lambda: own.read(draw.randint(2, 12)),
        trim,
        own.trim_too_far,
        own.copy,
        own.compact,
        lambda: own.through_file(folder),
        lambda: own.join(other) if len(own.sequences) < 3 else own.read(2),
        lambda: own.filter(draw.sample(range(len(own.sequences)), draw.randint(1, len(own.sequences)))),
        lambda: own.extract(draw.randrange(len(own.sequences))),
    ]
    for act in draw.sample(acts, len(acts)) + draw.choices(acts, k=max(0, steps - len(acts))):
        act()
        for _ in range(draw.choice([1, 3, 7])):
            own.read(1)


@pytest.mark.parametrize("score", [PLACED, PLACED_ONCE, "key_diff"])
@pytest.mark.parametrize("allocated", ALLOCATED)
@pytest.mark.slow
def test_each_head_keeps_what_a_slow_reference_keeps(allocated: str, score: str, tmp_path: Path) -> None:
    own = watched(llama(), allocated, score)
    life(own, tmp_path, seed=list(ALLOCATED).index(allocated))
    assert own.totals > 3
    assert own.checked > 60
    if allocated in EVEN:
        assert not own.uneven
    elif allocated == "head x table" or score != PLACED:  # then heads have the same numbers
        assert own.uneven


@pytest.mark.parametrize(
    "stored", [{"bits": 8, "group_size": 32}, {"bits": 4, "group_size": 32, "codec": "rotated"}], ids=str
)
@pytest.mark.parametrize("allocated", ["head x table", "adaptive x table"])
@pytest.mark.slow
def test_quantised_heads(allocated: str, stored: dict[str, Any], tmp_path: Path) -> None:
    own = watched(llama(), allocated, "key_norm", **stored)
    life(own, tmp_path, seed=11)
    assert own.totals > 3
    assert own.uneven


@pytest.mark.parametrize("allocated", ["layer x table", "head x table", "adaptive x table"])
@pytest.mark.slow
def test_a_short_layer_beside_a_row_that_evicted_nothing_is_loaded(allocated: str, tmp_path: Path) -> None:
    """Of the second row nothing is recorded, and its recent block would begin behind all that is of the first."""
    own, other = (watched(llama(), allocated, PLACED_ONCE) for _ in range(2))
    for new in (40, 1):
        own.read(new)
    shortest = min(row.extra_slots for cache in own.budgets for row in cache.view.rows)
    assert shortest < 0 or allocated == "adaptive x table"
    other.read(3)
    own.join(other)
    own.through_file(tmp_path)
    for _ in range(24):
        own.read(1)
    assert own.totals > 3
    own.through_file(tmp_path)
    own.filter([1])
    own.read(3)


def worthless_heads(tokens: ScoredTokens) -> mx.array:
    """All tokens of the first head are worth less than any of another."""
    return placed_once(tokens) - 9.0 * (mx.arange(tokens.keys.shape[1]) == 0)[:, None]


@pytest.mark.slow
def test_heads_worth_nothing_keep_their_safeguard_of_a_layer() -> None:
    """A fifth of the mean of their layer."""
    model, score = llama(), Score("worthless heads", worthless_heads, per_token=True)
    settings = CachePolicy(budget=40, keep_recent=2, sinks=1, margin=9, share="adaptive", layers=TABLE, score=score)
    own = Watched(model, settings, mlx_kv.make_prompt_cache(model, settings), HEADS, VOCAB)
    for new in (160, 1, 1, 30, *[1] * 25):
        own.read(new)
        if own.totals == 1:
            assert len(own.sequences[0].kept[1][0]) >= 8
    assert own.totals > 2
    assert min(len(head) for layer in own.sequences[0].kept for head in layer) < 16


def calibrated(model: Any) -> Calibration:
    return random_calibration(HEADS, 32, LAYERS, fingerprint=model_fingerprint(model))


@pytest.mark.parametrize("allocated", [None, "adaptive x table"])
@pytest.mark.slow
def test_the_fitted_score(allocated: str | None, tmp_path: Path) -> None:
    model = llama()
    measured = calibrated(model)
    chosen = {"layers": measured.heads, "share": "head"} if allocated is None else ALLOCATED[allocated]
    settings = CachePolicy(**SHAPE, **chosen, calibration=measured, score="fitted")
    own = Watched(model, settings, mlx_kv.make_prompt_cache(model, settings), HEADS, VOCAB)
    life(own, tmp_path, seed=5)
    assert own.totals > 3
    by_name = mlx_kv.make_prompt_cache(model, CachePolicy(**SHAPE, calibration=measured))  # all of it is the default
    assert {cache.evictor.layer_allocation for cache in by_name} == {measured.heads}
    assert {cache.evictor.score.name for cache in by_name} == {measured.score.name}


@pytest.mark.parametrize("allocated", ["head x table", "adaptive x table"])
def test_a_prompt_that_is_read_twice(allocated: str, tmp_path: Path) -> None:
    model = llama()
    settings = policy(allocated, "kvzip")
    caches = mlx_kv.make_prompt_cache(model, settings)
    prefill_all(model, caches, [1 + n * 7 % (VOCAB - 1) for n in range(40)], 16, Instructions.of(None, model))
    own = Watched(model, settings, caches, HEADS, VOCAB)
    (sequence,) = own.sequences
    sequence.length = 40
    sequence.kept = [[[*range(40)] for _ in range(HEADS)] for _ in range(LAYERS)]
    sequence.stored = [[np.array(b.decode(b.planes))[0, :, :40] for b in cache.view.buffers] for cache in own.budgets]
    own.check()
    numbers = own.numbers(0)
    assert len({round(x, 6) for layer in numbers for head in layer for x in head.values()}) > 40, "it was heard"
    for new in (1, 1, 4, 1, 1, 1, 1):
        own.read(new)
    own.through_file(tmp_path)
    for _ in range(8):
        own.read(1)
    assert own.totals > 2


@pytest.mark.parametrize(("family", "layers", "heads"), [("gemma3_text", 2, 2), ("gpt_oss", 2, 2), ("qwen3", 3, 2)])
def test_windows_and_sinks_beside_budgets(family: str, layers: int, heads: int) -> None:
    """The rows of a table are of the layers of full attention alone."""
    model, table = make_model(family), ((3.0, 0.0), (0.5, 0.5), (1.0, 1.0))[:layers]
    for chosen in ({"share": "head", "layers": table}, {"share": "adaptive", "layers": table}):
        settings = CachePolicy(**SHAPE, **chosen, score=PLACED_ONCE)
        own = Watched(model, settings, mlx_kv.make_prompt_cache(model, settings), heads, VOCAB)
        for new in (30, 1, 9, *[1] * 8):
            own.read(new)
        assert own.totals > 2
        assert own.uneven
        with pytest.raises(ValueError, match=f"has {layers + 1} rows, and this model has {layers} layers"):
            mlx_kv.make_prompt_cache(model, CachePolicy(**SHAPE, share="head", layers=((1.0, 2.0),) * (layers + 1)))


def test_what_does_not_fit_is_refused() -> None:
    latent = make_model("deepseek_v3")
    for chosen in (ALLOCATED["head x table"], ALLOCATED["adaptive x table"], ALLOCATED["layer x table"]):
        with pytest.raises(ValueError, match="use layers='uniform'"):
            mlx_kv.make_prompt_cache(latent, CachePolicy(**SHAPE, **chosen))
    for allocated in ("head x table", "adaptive x table"):
        with pytest.raises(ValueError, match="or than 'head' with a table of budgets"):
            policy(allocated, bits=4, residual_length=2)
    assert policy("layer x table", bits=4, residual_length=2)
    with pytest.raises(ValueError, match="keeps the same tokens in all of them"):
        CachePolicy(**SHAPE, share="layers", layers=TABLE)
    for removed in ("pyramid", "global"):
        with pytest.raises(ValueError, match=f"layers is '{removed}', which was removed in 0.4"):
            CachePolicy(**SHAPE, layers=removed)
    for columns in (2, 4):  # of another model: refused before anything has changed
        model = llama()
        caches = mlx_kv.make_prompt_cache(
            model, CachePolicy(**SHAPE, share="head", layers=((1.0,) * columns,) * LAYERS)
        )
        model(mx.zeros((1, 30), mx.int32), cache=caches)
        with pytest.raises(ValueError, match=f"has {columns} numbers in a row, and a layer has {HEADS} KV heads"):
            model(mx.zeros((1, 1), mx.int32), cache=caches)
        assert {cache.offset for cache in caches} == {30}


# --- the tests above must be able to fail: bugs planted one at a time ------------------------------------------------

counts, make_alive, compacted = evictor.token_counts, SlotTokens.alive, Budget.compacted
own_counts, ties = Evictor.counts, compaction.in_order
undo, predicted = Rotation.undo, FittedLayer.predicted


def one_less(table: Any, mean: int, most: int) -> Any:
    first, *rest = counts(table, mean, most)
    return (first[0] - 1, *first[1:]), *rest


def of_the_next_layer(self: Evictor, most: int, heads: int) -> Any:
    own, self.layer = self.layer, (self.layer + 1) % LAYERS
    try:
        return own_counts(self, most, heads)
    finally:
        self.layer = own


def of_the_budget(table: Any, mean: int, most: int) -> Any:
    return counts(table, mean, mean + 1)


def one_more_alive(self: SlotTokens, *where: Any) -> mx.array:
    kept = self if self.dead is None else self._replace(dead=mx.maximum(self.dead - 1, 0))
    return make_alive(kept, *where)


def never_shorter(self: Budget, row: Any, longer: int = 0) -> Any:
    return compacted(self, row, max(0, longer))


def the_youngest_first(scores: mx.array, places: mx.array) -> mx.array:
    return ties(scores, mx.max(places) - places)


def rope_stays(self: Rotation, x: mx.array, positions: mx.array) -> mx.array:
    return x


def one_position_on(self: Rotation, x: mx.array, positions: mx.array) -> mx.array:
    return undo(self, x, positions + 1)


def heads_apart(self: FittedLayer, keys: mx.array, values: mx.array, positions: mx.array) -> mx.array:
    return predicted(self, keys, values[:, ::-1], positions)


PLANTED: dict[str, tuple[Any, str, Any, str]] = {
    "a count of one less": (evictor, "token_counts", one_less, "head x table"),
    "one less of a layer": (evictor, "token_counts", one_less, "adaptive x table"),
    "one less of equal heads": (evictor, "token_counts", one_less, "layer x table"),
    "counts of the next layer": (Evictor, "counts", of_the_next_layer, "head x table"),
    "shares of another number of tokens": (evictor, "token_counts", of_the_budget, "head x table"),
    "one dead slot is alive": (SlotTokens, "alive", one_more_alive, "head x table"),
    "one dead slot of a ranking": (SlotTokens, "alive", one_more_alive, "adaptive x table"),
    "no layer is shorter": (Budget, "compacted", never_shorter, "layer x table"),
    "no layer is shorter in a ranking": (Budget, "compacted", never_shorter, "adaptive x table"),
    "of equal tokens the youngest go": (compaction, "in_order", the_youngest_first, "adaptive x table"),
}


@pytest.mark.parametrize("broken", [rope_stays, one_position_on])
def test_a_rope_that_is_not_undone_is_caught(broken: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Rotation, "undo", broken)
    with pytest.raises(AssertionError, match="another score"):
        test_the_fitted_score("adaptive x table", tmp_path)


def test_values_of_other_heads_are_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(FittedLayer, "predicted", heads_apart)
    with pytest.raises(AssertionError, match="another score"):
        test_the_fitted_score("adaptive x table", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    where, name, broken, allocated = PLANTED[bug]
    score = PLACED if broken is the_youngest_first else PLACED_ONCE  # heads have the same numbers
    life(watched(llama(), allocated, score), tmp_path, seed=1)
    monkeypatch.setattr(where, name, broken)
    with pytest.raises((AssertionError, ValueError)):
        life(watched(llama(), allocated, score), tmp_path, seed=1)
