"""What our caches do in one model family, column by column, each against a reference that is slow and obvious.

A column is a function that takes a family and returns a verdict, or raises: a ValueError of ours is a refusal, and
anything else is no answer that a user should get. The truth is what mlx-lm says when it reads everything in one pass
into caches of its own; where a budget is at work, full histories with evicted tokens masked.
"""

from __future__ import annotations

import copy
import tempfile
import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from families import VOCAB, make_family
from metal_stand_ins import experts_of_sixteen_bits
from mlx.utils import tree_map_with_path
from mlx_lm.models import cache as stock
from oracle import Shadowed, SlowCache

import mlx_kv
from mlx_kv import (
    CachePolicy,
    KVCache,
    SpeculationStatistics,
    batch_generate,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from mlx_kv.adapter import attention_caches, leaves
from mlx_kv.engine import Continuation, make_engine

LENGTH = 48
CHUNKS = (21, 11, 1, 1, 1, 9, 1, 1, 1, 1)  # longer than a window, past it, decoding, and a prompt that goes on
TOLERANCE = 1e-4  # of the largest logit: float32 in other shapes of the same sums
# Models that round to bfloat16 between layers themselves.
ROUNDED = {"muse_spark": 0.02}
INDEXED = ("deepseek_v32", "glm_moe_dsa", "minimax_m3_vl")  # the second cache of a layer is an indexer's, never packed
KINDS = {
    stock.KVCache: "full",
    stock.RotatingKVCache: "sliding",
    stock.ChunkedKVCache: "chunked",
    stock.ArraysCache: "recurrent",
}
Kind = Literal["exact", "refused", "nothing to do", "as mlx-lm", "mlx-lm fails", "WRONG"]


@dataclass(frozen=True)
class Verdict:
    """What a column found.

    Attributes:
        kind: "exact"; "refused", with our message; "nothing to do" where no layer has what the column is about;
            "as mlx-lm" where we answer as mlx-lm's own caches do in the same chunks, but those depend on the chunks;
            "mlx-lm fails" where its own caches end in a traceback; "WRONG".
        reason: in words; of "exact" what is exact although mlx-lm's own caches are not.
    """

    kind: Kind
    reason: str = ""


class WrongError(AssertionError):
    """What was read is not what should have been."""


@dataclass
class Family:
    """One family and what mlx-lm itself says of it."""

    name: str

    @cached_property
    def model(self) -> nn.Module:
        return make_family(self.name)

    @property
    def tolerance(self) -> float:
        return ROUNDED.get(self.name, TOLERANCE)

    @cached_property
    def windowed(self) -> bool:
        return bool(kinds(self.model) & {stock.RotatingKVCache, stock.ChunkedKVCache})

    def policy(self, max_write: int = 6, max_rollback: int = 0, **settings: Any) -> CachePolicy:
        """A policy; with slots for short writes where there are windows, which longer ones exceed now and then."""
        for_rings = {"max_write": max_write, "max_rollback": max_rollback} if self.windowed else {}
        return CachePolicy(**for_rings, **settings)

    @cached_property
    def truth(self) -> mx.array:
        """Logits of every position of `tokens()`, read in one pass."""
        return read(self.model, stock.make_prompt_cache(self.model), tokens(), [LENGTH])

    @cached_property
    def own(self) -> mx.array:
        """The same from mlx-lm's own caches, read in chunks."""
        return read(self.model, stock.make_prompt_cache(self.model), tokens(), CHUNKS)

    def check(self, got: mx.array, wanted: mx.array, what: str = "logits") -> None:
        far = distance(got, wanted)
        if not far <= self.tolerance:
            raise WrongError(f"{what} are off by {100 * far:.2g}%")


def kinds(model: nn.Module) -> set[type]:
    """Of mlx-lm's own caches."""
    return {type(cache) for cache in leaves(stock.make_prompt_cache(model))}


def tokens(seed: int = 0, length: int = LENGTH) -> mx.array:
    return mx.random.randint(1, VOCAB, (1, length), key=mx.random.key(seed))


def distance(got: mx.array, wanted: mx.array) -> float:
    """The largest difference, as a share of the largest value."""
    far: Any = (mx.abs(got - wanted).max() / mx.abs(wanted).max()).item()
    return float(far)


def read(model: nn.Module, caches: list[Any], prompt: mx.array, chunks: Sequence[int]) -> mx.array:
    """Logits (B, n, VOCAB) of every position, the prompt (B, n) fed in chunks."""
    out, first = [], 0
    for chunk in chunks:
        out.append(model(prompt[:, first : first + chunk], cache=caches)[..., :VOCAB])
        mx.eval(out[-1], [cache.state for cache in caches])
        first += chunk
    return mx.concatenate(out, axis=1).astype(mx.float32)


# --- references -------------------------------------------------------------------------------------------------------


class History(SlowCache):
    """Everything that a layer ever saw, in the slot of its position; what is evicted or out of sight is masked."""

    def __init__(self, bits: int | None, window: int | None = None, sinks: int = 0, chunk: int | None = None) -> None:
        super().__init__(bits, window, sinks, chunk)
        self.gone: set[int] = set()

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        return self.keys, self.values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        mask = super().make_mask(N, return_array)
        if not self.gone and window_size is None:
            return mask
        seen = [
            [p not in self.gone and (window_size is None or q - p < window_size) for p in range(self.offset + N)]
            for q in range(self.offset, self.offset + N)
        ]
        return mx.array(seen) if mask is None else mask & mx.array(seen)


def windows_asked(model: nn.Module) -> set[int]:
    """The windows that a model asks masks for."""
    asked = set()

    class Listener(stock.RotatingKVCache):
        def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
            if window_size is not None:
                asked.add(window_size)
            return super().make_mask(N, window_size, return_array)

    caches = stock.make_prompt_cache(model)
    for cache in leaves(caches):
        if type(cache) is stock.RotatingKVCache:
            cache.__class__ = Listener
    read(model, caches, tokens(), [2])
    return asked


def histories(family: Family, bits: int | None = None, bound: tuple[int, int] | None = None) -> list[Any]:
    """mlx-lm's own list of caches, with histories in the place of attention caches.

    Args:
        bound: tokens and sinks that full attention keeps; None is all.
    """
    asked = windows_asked(family.model)

    def replaced(cache: Any, bits: int | None) -> Any:
        if type(cache) is stock.CacheList:
            inner = enumerate(cache.caches)
            plain = family.name in INDEXED
            return stock.CacheList(*(replaced(c, None if plain and i == 1 else bits) for i, c in inner))
        if type(cache) is stock.RotatingKVCache:
            return History(bits, max({cache.max_size} | {window for window in asked if window == cache.max_size + 1}))
        if type(cache) is stock.ChunkedKVCache:
            return History(bits, chunk=cache.chunk_size)
        if type(cache) is stock.KVCache:
            return History(bits) if bound is None else History(bits, *bound)
        return cache

    return [replaced(cache, bits) for cache in stock.make_prompt_cache(family.model)]


def run_shadowed(
    family: Family, policy: CachePolicy, rows: int, chunks: Sequence[int], bits: int | None = None
) -> None:
    """Reads with a slow cache in the shadow of each of ours: what every query sees must be the same, bit for bit."""
    caches = make_prompt_cache(family.model, policy)
    slow = list(leaves(histories(family, bits)))
    shadows: list[Shadowed] = []

    def shadowed(cache: Any) -> Any:
        if isinstance(cache, stock.CacheList):
            return stock.CacheList(*map(shadowed, cache.caches))
        other = slow.pop(0)
        if not isinstance(cache, KVCache):
            return cache
        shadows.append(Shadowed(cache, other))
        return shadows[-1]

    prompt = mx.concatenate([tokens(seed, sum(chunks)) for seed in range(rows)])
    read(family.model, [shadowed(cache) for cache in caches], prompt, chunks)
    used = [shadow for shadow in shadows if shadow.checked]
    assert used, "no layer wrote anything"
    assert all(shadow.checked == len(chunks) for shadow in used)
    if bits is not None and not any(cache._codec.bits for cache in attention_caches(caches) if not cache.empty()):
        raise WrongError("nothing was quantised")


EXACT = Verdict("exact")
AS_MLX_LM = Verdict("as mlx-lm", "its answers depend on the chunks in which a prompt is read")


# --- columns ----------------------------------------------------------------------------------------------------------


def alone(family: Family) -> Verdict:
    """One prompt in chunks, and decoding."""
    for policy in (CachePolicy(), family.policy()):
        got = read(family.model, make_prompt_cache(family.model, policy), tokens(), CHUNKS)
        if distance(got, family.truth) > family.tolerance:
            family.check(got, family.own)
            return AS_MLX_LM
    return Verdict("exact", _shortcomings(family))


def _shortcomings(family: Family) -> str:
    """What mlx-lm itself gets wrong of the same."""
    if distance(family.own, family.truth) > family.tolerance:
        return "mlx-lm's own caches are wrong once a window is full"
    try:
        bare = family.model(tokens())[..., :VOCAB].astype(mx.float32)
    except Exception:
        return ""  # some models cannot be read without caches
    return "mlx-lm's model is wrong without caches" if distance(bare, family.truth) > family.tolerance else ""


def sixteen_bits(family: Family) -> Verdict:
    """Models in half precision."""
    if not attention_caches(make_prompt_cache(family.model)):
        names = ", ".join(sorted(kind.__name__ for kind in kinds(family.model)))
        return Verdict("nothing to do", f"its caches are mlx-lm's own {names}, which stay as they are")
    half = Family(family.name)
    with experts_of_sixteen_bits():
        for dtype in (mx.bfloat16, mx.float16):
            half.model.set_dtype(dtype)
            run_shadowed(half, half.policy(), 1, (18, 1, 1))
    return EXACT


def quantised(family: Family) -> Verdict:
    """Keys and values of 8 and of 4 bits."""
    for bits in (8, 4):
        run_shadowed(family, family.policy(bits=bits, group_size=32), 2, (18, 7, 1, 1), bits)
        _check_packed(family, family.policy(bits=bits, group_size=32))
    return EXACT


def _check_packed(family: Family, policy: CachePolicy) -> None:
    """Attention on packed planes says what it says on the same planes unpacked.

    One step of decoding, so that no rounding of a later key can hang on the last bit of an earlier one; but in later
    layers the key of the new token itself may be rounded otherwise.
    """
    packed = make_prompt_cache(family.model, policy)
    read(family.model, packed, tokens(), [21, 11])
    unpacked = copy.deepcopy(packed)
    for cache in attention_caches(unpacked):
        cache._packed_decode = False
    got, wanted = (read(family.model, caches, tokens(9), [1]) for caches in (packed, unpacked))
    far = distance(got, wanted)
    if far > 0.05:
        raise WrongError(f"attention on packed planes is off by {100 * far:.2g}%")


def bounded(family: Family) -> Verdict:
    """A budget, and max_kv_size: full attention over what was kept, at its true positions."""
    make_prompt_cache(family.model, CachePolicy(max_kv_size=20))  # refused for what users would ask, if it is
    _check_bounded(family, CachePolicy(max_kv_size=20, max_write=6), (20, 4))
    budget = {"budget": 20, "keep_recent": 8, "sinks": 2, "margin": 5}
    _check_bounded(family, CachePolicy(**budget, max_write=6), None)
    return EXACT


def _check_bounded(family: Family, policy: CachePolicy, bound: tuple[int, int] | None) -> None:
    caches, slow = make_prompt_cache(family.model, policy), histories(family, bound=bound)
    evicted, first = 0, 0
    for chunk in CHUNKS:
        part = tokens()[:, first : first + chunk]
        first += chunk
        got = read(family.model, caches, part, [chunk])
        for ours, history in zip(leaves(caches), leaves(slow), strict=True):
            if isinstance(history, History) and ours.evictor is not None and not ours.empty():
                history.gone = set(range(first)) - set(ours.positions.flatten().tolist())
                evicted = max(evicted, len(history.gone))
        family.check(got, read(family.model, slow, part, [chunk]), f"under {_told(policy)}, logits")
    assert bound is not None or evicted > 0


def _told(policy: CachePolicy) -> str:
    return "a budget" if policy.budget is not None else "max_kv_size"


def ragged(family: Family) -> Verdict:
    """Prompts of different lengths in one batch: each gets what it gets alone."""
    prompts = [tokens(seed, length)[0].tolist() for seed, length in enumerate((5, 30, 19, 19))]
    try:
        got = _batch(family, prompts, rows=3)
    except ValueError as error:
        if not is_refusal(error):
            raise
        refused = Verdict("refused", str(error))
        _check_rows(family, prompts, _batch(family, prompts, rows=1), "one after the other, ")
        return refused
    return _check_rows(family, prompts, got, "")


def _batch(family: Family, prompts: list[list[int]], rows: int) -> list[list[mx.array]]:
    """For each prompt, the log-probabilities (VOCAB,) of each token that the engine generates."""
    engine = make_engine(family.model, set(), family.policy(8), rows, prefill_step_size=8)
    heard: list[list[mx.array]] = [[] for _ in prompts]

    def listener(index: int) -> Callable[[mx.array], mx.array]:
        def sampler(logprobs: mx.array) -> mx.array:  # (1, V)
            heard[index].append(logprobs[0, :VOCAB])
            return mx.argmax(logprobs[:, :VOCAB], axis=-1)

        return sampler

    for index, prompt in enumerate(prompts):
        engine.submit(Continuation(index, prompt, 4, sampler=listener(index)))
    told: list[list[int]] = [[] for _ in prompts]
    while engine.busy:
        for token in engine.step():
            told[token.index].append(token.token)
    engine.close()
    assert [len(one) for one in told] == [4] * len(prompts)
    return [one[:4] for one in heard]


def _check_rows(family: Family, prompts: list[list[int]], got: list[list[mx.array]], how: str) -> Verdict:
    as_stock = False
    for index, (prompt, rows) in enumerate(zip(prompts, got, strict=True)):
        said = [int(mx.argmax(row).item()) for row in rows]
        text = mx.array([prompt + said[:-1]])
        mine = mx.stack(rows)
        chunks = [8] * ((len(prompt) - 1) // 8) + [(len(prompt) - 1) % 8] + [1] * 4
        wanted = []
        for split in ([text.shape[1]], [n for n in chunks if n]):
            everything = []
            caches, first = stock.make_prompt_cache(family.model), 0
            for n in split:
                everything.append(family.model(text[:, first : first + n], cache=caches))
                first += n
            logits = mx.concatenate(everything, axis=1).astype(mx.float32)[0, -4:]
            wanted.append((logits - mx.logsumexp(logits, axis=-1, keepdims=True))[:, :VOCAB])
        off = [distance(mine, one) for one in wanted]
        if min(off) > family.tolerance:
            raise WrongError(f"{how}row {index} of {[len(p) for p in prompts]} tokens is off by {100 * min(off):.2g}%")
        as_stock = as_stock or off[0] > family.tolerance
    return AS_MLX_LM if as_stock else EXACT


def drafted(family: Family) -> Verdict:
    """A draft model that is right now and then: each row takes back its own number of tokens."""
    draft = make_family(family.name)

    def shaken(path: str, weight: mx.array) -> mx.array:
        if not mx.issubdtype(weight.dtype, mx.floating):
            return weight
        key = mx.random.key(zlib.crc32(path.encode()))
        return weight + 0.03 * weight.std() * mx.random.normal(weight.shape, weight.dtype, key=key)

    draft.update(tree_map_with_path(shaken, draft.parameters()))
    try:
        _check_drafted(family, draft, rows=3)
    except ValueError as error:
        if not is_refusal(error):
            raise
        _check_drafted(family, draft, rows=1)
        return Verdict("exact", f"alone; in a batch: {error}")
    except WrongError:
        if alone(family) == AS_MLX_LM:
            return AS_MLX_LM
        raise
    return EXACT


def _check_drafted(family: Family, draft: nn.Module, rows: int) -> None:
    prompts = [tokens(seed, length)[0].tolist() for seed, length in enumerate((5, 30, 19))]
    counts, said = SpeculationStatistics(), [[] for _ in prompts]
    for token in batch_generate(
        family.model, None, prompts, family.policy(2), 8, draft, 3, rows, prefill_step_size=8, statistics=counts
    ):
        said[token.index].append(token.token)
    for prompt, answer in zip(prompts, said, strict=True):
        text = mx.array([prompt + answer[:-1]])
        logits = family.model(text, cache=stock.make_prompt_cache(family.model))[0, len(prompt) - 1 :]
        short = logits.max(-1) - mx.take_along_axis(logits, mx.array(answer)[:, None], 1)[:, 0]
        if not short.max().item() <= family.tolerance * logits.max().item():
            raise WrongError(f"a prompt of {len(prompt)} tokens is not continued with the likeliest tokens")
    assert counts.accepted > 0


def trimmed(family: Family) -> Verdict:
    """Reads 7 tokens too many, takes them back, and reads others; refused, it goes on as if nobody had asked."""
    caches = make_prompt_cache(family.model, family.policy(4, 8))
    read(family.model, caches, tokens(), [21, 11])
    kept = copy.deepcopy(caches)
    read(family.model, caches, tokens(5), [4, 1, 2])
    disturbed = copy.deepcopy(caches)
    more = tokens(6, 6)
    try:
        trim_prompt_cache(caches, 7)
    except ValueError as error:
        if not is_refusal(error):
            raise
        got, wanted = (read(family.model, one, more, [4, 1, 1]) for one in (caches, disturbed))
        family.check(got, wanted, "after a trim that was refused, logits")
        return Verdict("refused", str(error))
    got, wanted = (read(family.model, one, more, [4, 1, 1]) for one in (caches, kept))
    family.check(got, wanted, "after a trim, logits")
    return EXACT


def filed(family: Family) -> Verdict:
    """Saved, loaded, and gone on with: the same bit for bit; also in mlx-lm's own format, where that can hold it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompt.safetensors"
        caches = make_prompt_cache(family.model, family.policy())
        read(family.model, caches, tokens(), [21, 11])
        save_prompt_cache(path, caches)
        loaded = load_prompt_cache(path)
        more = tokens(6, 6)
        wanted, got = (read(family.model, one, more, [4, 1, 1]) for one in (copy.deepcopy(caches), loaded))
        if not mx.array_equal(got, wanted).item():
            raise WrongError(f"a loaded file goes on otherwise: logits are off by {100 * distance(got, wanted):.2g}%")
        try:
            save_prompt_cache(path, caches, format="mlx-lm")
        except ValueError as error:
            return Verdict("exact", f"mlx-lm's format: {error}")
        family.check(
            read(family.model, load_prompt_cache(path), more, [4, 1, 1]), wanted, "from mlx-lm's format, logits"
        )
        theirs = read(family.model, stock.load_prompt_cache(str(path)), more, [4, 1, 1])
        own = stock.make_prompt_cache(family.model)
        read(family.model, own, tokens(), [21, 11])
        if distance(read(family.model, own, more, [4, 1, 1]), wanted) <= family.tolerance:
            family.check(theirs, wanted, "loaded by mlx-lm from its format, logits")
    return EXACT


COLUMNS: dict[str, Callable[[Family], Verdict]] = {
    "alone": alone,
    "16-bit": sixteen_bits,
    "8 and 4 bits": quantised,
    "budget": bounded,
    "ragged batch": ragged,
    "draft model": drafted,
    "trim": trimmed,
    "files": filed,
}


def is_refusal(error: BaseException) -> bool:
    """Whether it was ours who said no, and not something deep inside mlx-lm that broke."""
    deepest = traceback.extract_tb(error.__traceback__)[-1].filename
    return isinstance(error, ValueError) and Path(deepest).is_relative_to(Path(mlx_kv.__path__[0]))


def in_short(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(where.filename).name}: {str(error).splitlines()[0] if str(error) else ''}"


def _said_of_failure(family: Family) -> str | None:
    """What we say of a model that mlx-lm's own caches cannot serve."""
    try:
        make_prompt_cache(family.model)
    except ValueError as error:
        return str(error) if is_refusal(error) else None
    return None


def judge(family: Family, column: str) -> Verdict:
    """The verdict of one column; never an exception."""
    try:
        _ = family.truth, family.own
    except Exception as error:
        return Verdict("mlx-lm fails", _said_of_failure(family) or f"with its own caches: {in_short(error)}")
    try:
        return COLUMNS[column](family)
    except WrongError as error:
        return Verdict("WRONG", str(error))
    except Exception as error:
        return Verdict("refused", str(error)) if is_refusal(error) else Verdict("WRONG", in_short(error))


def walk(name: str, columns: Sequence[str] = tuple(COLUMNS)) -> dict[str, Verdict]:
    """All verdicts of one family."""
    family = Family(name)
    return {column: judge(family, column) for column in columns}


def layers(family: Family) -> str:
    """What the layers' own caches are for, in words."""
    own = leaves(stock.make_prompt_cache(family.model))
    found = [KINDS.get(type(cache), type(cache).__name__) for cache in own]
    return " + ".join(dict.fromkeys(found))
