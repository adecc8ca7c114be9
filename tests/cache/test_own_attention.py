"""Attention of our own against float64 in NumPy: over arrays and packed planes, whatever the mask and the blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from rotations import matrix

from mlx_kv import KVCache
from mlx_kv.cache import attention
from mlx_kv.cache.attention import Dense, Operand, Packed, attend
from mlx_kv.cache.codecs import Affine, Centre, Centred, Codec, Microscaled, Packing

GROUP_SIZES = (32, 64, 128)
TOLERANCE = {mx.float32: 2e-5, mx.float16: 1e-2, mx.bfloat16: 6e-2}
MASKS = ("causal", "lines", "rows", "line of rows", "heads", "query heads", "addends", "addends of query heads")


@dataclass(frozen=True)
class Case:
    """One call of attention."""

    rows: int = 2
    query_heads: int = 4
    heads: int = 2
    new: int = 5
    slots: int = 40
    key_dim: int = 64
    value_dim: int = 64
    mask: str | None = "causal"
    sinks: bool = False
    keys: Codec | None = None  # plain
    values: Codec | None = None
    dtype: mx.Dtype = mx.float32


def normal(shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    """With a channel that is far larger than the others, as keys have."""
    x = mx.random.normal(shape, key=mx.random.key(seed))
    return (x * mx.where(mx.arange(shape[-1]) == 3, 2.0, 1.0)).astype(dtype)


def mask_of(case: Case, shown: np.ndarray | None = None) -> Any:
    """A mask of the case's form; every query sees its first slot. `shown`: slots that may be seen at all."""
    if case.mask in (None, "causal"):
        return case.mask
    batch, new = case.rows, 1 if case.mask == "line of rows" else case.new
    heads = {"heads": case.heads, "query heads": case.query_heads, "addends of query heads": case.query_heads}
    shape = (batch, heads.get(case.mask, 1), new, case.slots)
    if case.mask in ("lines", "addends"):
        shape = (case.new, case.slots)
    random = np.random.default_rng(len(case.mask))
    seen = random.random(shape) < 0.6
    seen[..., 0] = True
    seen &= True if shown is None else shown
    addends = np.where(seen, random.normal(size=shape), -np.inf)
    return mx.array(addends.astype(np.float32)).astype(case.dtype) if "addends" in case.mask else mx.array(seen)


def wide(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def stored(codec: Codec | None, x: mx.array) -> tuple[tuple[mx.array, ...], np.ndarray]:
    """The planes of a tensor (B, H, N, D) as a view of larger buffers, and what they stand for."""
    if codec is None:
        return (part_of_buffer(x),), wide(x)
    planes = codec.encode(x)
    bits, group_size, mode, rotate, centre = codec.packed
    floats = [plane.astype(mx.float32) if mode == "affine" else plane for plane in planes[1:]]
    told = mx.dequantize(planes[0], *floats, group_size=group_size, bits=bits, mode=mode, dtype=mx.float32)
    held = wide(told) @ matrix(x.shape[-1]) if rotate else wide(told)
    return tuple(map(part_of_buffer, planes)), held if centre is None else held + wide(centre.array(mx.float32))


def part_of_buffer(x: mx.array) -> mx.array:
    """The same numbers, as the first slots of a buffer that has more."""
    buffer = mx.pad(x, [(0, 0), (0, 0), (0, 7), (0, 0)])
    mx.eval(buffer)
    return buffer[:, :, : x.shape[2]]


def operand(codec: Codec | None, planes: tuple[mx.array, ...]) -> Operand:
    return Dense(planes[0]) if codec is None else Packed(planes, codec.packed)


def reference(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, mask: Any, sinks: np.ndarray | None
) -> np.ndarray:
    repeats, (new, slots) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    scores = q * scale @ np.repeat(k, repeats, axis=1).swapaxes(2, 3)
    if isinstance(mask, str):
        scores = np.where(np.arange(slots) <= np.arange(slots - new, slots)[:, None], scores, -np.inf)
    elif mask is not None:
        if mask.ndim == 4 and mask.shape[1] == k.shape[1]:
            mask = np.repeat(mask, repeats, axis=1)
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))], axis=3)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return weights[..., :slots] @ np.repeat(v, repeats, axis=1)


def check(case: Case) -> None:
    q = normal((case.rows, case.query_heads, case.new, case.key_dim), case.dtype, 1)
    k = normal((case.rows, case.heads, case.slots, case.key_dim), case.dtype, 2)
    v = normal((case.rows, case.heads, case.slots, case.value_dim), case.dtype, 3)
    mask, scale = mask_of(case), case.key_dim**-0.5
    sinks = normal((case.query_heads,), case.dtype, 4) if case.sinks else None
    (keys, told_keys), (values, told_values) = stored(case.keys, k), stored(case.values, v)
    got = attend(q, operand(case.keys, keys), operand(case.values, values), scale, mask, sinks)
    assert (got.shape, got.dtype) == ((*q.shape[:3], case.value_dim), case.dtype)
    told_mask = wide(mask) if isinstance(mask, mx.array) and mask.dtype != mx.bool_ else mask
    told_mask = np.array(told_mask) if isinstance(told_mask, mx.array) else told_mask
    wanted = reference(wide(q), told_keys, told_values, scale, told_mask, None if sinks is None else wide(sinks))
    tolerance = TOLERANCE[case.dtype]
    np.testing.assert_allclose(wide(got), wanted, atol=tolerance, rtol=tolerance)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two queries of all rows and heads at a time, and 256 slots."""
    monkeypatch.setattr(attention, "BLOCK_SCORES", dict.fromkeys(attention.BLOCK_SCORES, 1))
    monkeypatch.setattr(attention, "MIN_BLOCK_QUERIES", 2)
    monkeypatch.setattr(attention, "BLOCK_ELEMENTS", 1)


# --- arrays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("mask", [None, *MASKS])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_form_of_mask(mask: str | None, sinks: bool, dtype: mx.Dtype) -> None:
    for new in (1, 5):
        check(Case(mask=mask, sinks=sinks, dtype=dtype, new=new))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("mask", [None, *MASKS])
@pytest.mark.usefixtures("small_blocks")
def test_every_form_of_mask_in_blocks_of_queries(mask: str | None, sinks: bool) -> None:
    for new, keys in ((5, None), (4, Affine(4, 32)), (5, Affine(8, 64))):
        check(Case(mask=mask, sinks=sinks, new=new, keys=keys, values=keys))


@pytest.mark.parametrize(("query_heads", "heads"), [(1, 1), (4, 4), (4, 1), (6, 2), (8, 2)])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(32, 64), (64, 32), (96, 96), (128, 128), (576, 512)])
def test_grouped_heads_of_every_size(query_heads: int, heads: int, key_dim: int, value_dim: int) -> None:
    for mask in ("causal", "heads", "query heads"):
        check(Case(query_heads=query_heads, heads=heads, key_dim=key_dim, value_dim=value_dim, mask=mask))


def test_a_whole_prompt_of_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is read: as many queries as slots, and more of them than a block has."""
    case = Case(new=150, slots=150, keys=Affine(8, 64), values=Affine(4, 64))
    monkeypatch.setattr(attention, "BLOCK_SCORES", dict.fromkeys(attention.BLOCK_SCORES, 1))
    for each in (case, replace(case, keys=None, values=None)):
        check(each)


# --- packed planes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_every_way_to_pack(bits: int, group_size: int, rotate: bool) -> None:
    codec = Affine(bits, group_size, rotate)
    for new, dtype in ((1, mx.float32), (5, mx.float32), (1, mx.bfloat16), (5, mx.float16)):
        check(Case(keys=codec, values=codec, new=new, key_dim=128, value_dim=128, dtype=dtype, sinks=rotate))


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.usefixtures("small_blocks")
def test_every_way_to_pack_in_blocks_of_slots(bits: int, group_size: int, rotate: bool) -> None:
    codec = Affine(bits, group_size, rotate)
    for slots in (256, 270):
        check(Case(keys=codec, values=codec, key_dim=256, value_dim=128, slots=slots, mask="heads"))


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 576])
@pytest.mark.parametrize("rotate", [False, True])
def test_every_head_dim_that_is_packed(dim: int, rotate: bool) -> None:
    for group_size in GROUP_SIZES:
        if dim % group_size == 0:
            check(Case(keys=Affine(4, group_size, rotate), values=Affine(8, 32), key_dim=dim, value_dim=32))
            check(Case(keys=Affine(8, 32), values=Affine(2, group_size, rotate), key_dim=32, value_dim=dim))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "nvfp4"])
def test_formats_of_floats(name: str) -> None:
    codec = Microscaled(name)
    for new, dtype in ((1, mx.float32), (5, mx.float32), (5, mx.bfloat16), (5, mx.float16)):
        check(Case(keys=codec, values=codec, new=new, key_dim=96, value_dim=64, dtype=dtype, sinks=True))


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (Affine(8, 64), Affine(4, 32)),
        (Affine(8, 32, rotate=True), Affine(4, 64)),
        (Affine(3, 64), Affine(2, 32, rotate=True)),
        (Microscaled("mxfp8"), Affine(4, 64, rotate=True)),
        (None, Affine(4, 64)),
        (Affine(6, 32), None),
    ],
    ids=str,
)
def test_keys_and_values_stored_apart(keys: Codec | None, values: Codec | None) -> None:
    for mask in ("causal", "rows", "addends"):
        check(Case(keys=keys, values=values, mask=mask))


# --- dead slots -------------------------------------------------------------------------------------------------------


def poisoned(x: mx.array, shown: np.ndarray) -> mx.array:
    """Large finite numbers where a slot is hidden from all. In e8m0, the scales of mx formats, 255 is no number."""
    large = {mx.uint32: 0xDEADBEEF, mx.uint8: 0xA7}.get(x.dtype, 1e4)  # 2^40 in e8m0
    return mx.where(mx.array(shown)[None, None, :, None], x, mx.array(large, x.dtype))


def differs_by_poison(case: Case) -> bool:
    """Whether outputs change where slots that nobody sees are filled with large finite numbers."""
    q = normal((case.rows, case.query_heads, case.new, case.key_dim), case.dtype, 1)
    shown = np.arange(case.slots) % 3 != 1
    outputs = []
    for fill in (lambda x, shown: x, poisoned):
        made = []
        for codec, dim, seed in ((case.keys, case.key_dim, 2), (case.values, case.value_dim, 3)):
            planes, _ = stored(codec, normal((case.rows, case.heads, case.slots, dim), case.dtype, seed))
            made.append(operand(codec, tuple(fill(plane, shown) for plane in planes)))
        outputs.append(attend(q, *made, case.key_dim**-0.5, mask_of(case, shown)))
        assert mx.isfinite(outputs[-1]).all().item()
    return not mx.array_equal(*outputs).item()


FAR = mx.broadcast_to(mx.linspace(-1.2, 1, 64), (2, 1, 64)) * mx.array([1.0, -2.0])[:, None, None]
CENTRED = Centred(Centre.of(FAR[None]), Affine(4, 64, rotate=True))
CODECS = [
    CENTRED,
    None,
    Affine(8, 32),
    Affine(4, 64, rotate=True),
    Affine(3, 32),
    Microscaled("mxfp8"),
    Microscaled("nvfp4"),
]


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask != "causal"])
def test_hidden_slots_are_dead(mask: str, codec: Codec | None) -> None:
    for new, dtype in ((1, mx.float32), (5, mx.float32), (5, mx.bfloat16)):
        assert not differs_by_poison(Case(mask=mask, keys=codec, values=codec, new=new, dtype=dtype))


@pytest.mark.parametrize("codec", CODECS[:3], ids=str)
@pytest.mark.usefixtures("small_blocks")
def test_hidden_slots_are_dead_in_blocks(codec: Codec | None) -> None:
    assert not differs_by_poison(Case(mask="rows", keys=codec, values=codec, slots=270))


# --- the checks above must be able to fail ----------------------------------------------------------------------------


def sees_one_more(scores: mx.array, mask: str, first: int, last: int) -> mx.array:
    new, slots = scores.shape[3:]
    return scores if new == 1 else mx.where(mx.tri(new, slots, slots - new + 1).astype(mx.bool_), scores, -1e9)


def first_lines_of_masks(scores: mx.array, mask: Any, first: int, last: int) -> mx.array:
    return genuine_masked(scores, mask, 0, last - first)


def heads_in_another_order(scores: mx.array, mask: Any, first: int, last: int) -> mx.array:
    return genuine_masked(scores, mask[:, ::-1], first, last)


def without_sinks(scores: mx.array, sinks: Any) -> Any:
    return genuine_weights(scores, None)


def other_order_of_pieces(words: mx.array, bits: int) -> list[mx.array]:
    return genuine_pieces(words, bits)[::-1]


def all_of_every_group(queries: mx.array, groups: int) -> mx.array:
    return mx.concatenate([queries] * groups, axis=2)


def centres_in_another_order(self: attention.Packed, dtype: mx.Dtype) -> mx.array:
    return genuine_centre(self, dtype)[::-1]


def the_first_group_of_each(x: mx.array) -> mx.array:
    return genuine_own_groups(mx.broadcast_to(x[:, :, :1], x.shape))


genuine_masked, genuine_weights, genuine_pieces, genuine_own_groups, genuine_centre = (
    attention._masked,
    attention._weights,
    attention._pieces,
    attention._group_channels,
    attention.Packed._centre_of,
)
FOUR_BITS = Case(keys=Affine(4, 32), values=Affine(4, 32))
ALL_CENTRED = Case(keys=CENTRED, values=CENTRED)
ROTATED = Case(keys=Affine(8, 32, rotate=True), values=Affine(8, 32, rotate=True))
PLANTED = {
    "causal masks are off by one": (attention, "_masked", sees_one_more, Case()),
    "masks are not of the block": (attention, "_masked", first_lines_of_masks, Case(mask="rows")),
    "masks of heads are mixed up": (attention, "_masked", heads_in_another_order, Case(mask="query heads")),
    "masks of KV heads are mixed up": (attention, "_masked", heads_in_another_order, Case(mask="heads")),
    "sinks take no part": (attention, "_weights", without_sinks, Case(sinks=True)),
    "channels change places": (attention, "_pieces", other_order_of_pieces, FOUR_BITS),
    "groups take each other's queries": (attention, "_apart", all_of_every_group, FOUR_BITS),
    "groups take each other's scales": (attention, "_group_channels", the_first_group_of_each, FOUR_BITS),
    "nothing is rotated": (attention, "rotated", lambda x: x, ROTATED),
    "nothing is centred": (attention.Packed, "_centre_of", lambda self, dtype: mx.array(0.0), ALL_CENTRED),
    "centres of heads are mixed up": (attention.Packed, "_centre_of", centres_in_another_order, ALL_CENTRED),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
@pytest.mark.usefixtures("small_blocks")
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken, case = PLANTED[bug]
    check(case)
    monkeypatch.setattr(where, name, broken)
    with pytest.raises(AssertionError):
        check(case)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_mask_that_only_lessens_what_it_hides_is_caught(codec: Codec | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def lessens(scores: mx.array, mask: mx.array, first: int, last: int) -> mx.array:
        return scores + mx.where(mask, 0.0, -9.0)[:, :, None].astype(scores.dtype)

    monkeypatch.setattr(attention, "_masked", lessens)
    assert differs_by_poison(Case(mask="rows", keys=codec, values=codec))


def test_under_cuda_packed_planes_have_no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `quantized_matmul` has no kernel for slices of a larger buffer, for our attention and for mlx-lm's."""
    cache, x = KVCache(bits=8, group_size=64), mx.ones((1, 2, 5, 64))
    cache.update_and_fetch(x, x)
    for cuda in (False, True):
        monkeypatch.setattr(mx.cuda, "is_available", lambda cuda=cuda: cuda)
        fetched = cache.update_and_fetch(x[:, :, :1], x[:, :, :1])
        parts = Packed(fetched[0], Packing(8, 64))._part(0, 3)
        assert [np.array(plane, copy=False).flags.c_contiguous for plane in (*fetched[0], *fetched[1], *parts)] == [
            cuda
        ] * 9
