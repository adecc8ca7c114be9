"""What our caches do in one model family, column by column.

A column is a function that takes a family and returns a verdict, or raises: a ValueError of ours is a refusal, and
anything else is no answer that a user should get.
"""

from __future__ import annotations

import copy
import tempfile
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from engines import make_engine
from families import make_family
from family_model import CHUNKS, Family, Verdict, WrongError, distance, kinds, read, tokens
from family_parts import VOCAB
from family_references import History, histories, run_shadowed
from metal_stand_ins import experts_of_sixteen_bits
from mlx.utils import tree_map_with_path
from mlx_lm.models import cache as stock

import mlx_kv
from mlx_kv import (
    CachePolicy,
    SpeculationStatistics,
    batch_generate,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.mlxlm.attention import attention_seen
from mlx_kv.mlxlm.traverse import attention_caches, leaves

EXACT = Verdict("exact")
AS_MLX_LM = Verdict("as mlx-lm", "mlx-lm's model sees later tokens of the same chunk: its answers depend on the chunks")


# --- columns ----------------------------------------------------------------------------------------------------------


def alone(family: Family) -> Verdict:
    """One prompt in chunks, and decoding."""
    for policy in (CachePolicy(), family.policy()):
        got = read(family.model, make_prompt_cache(family.model, policy), tokens(), CHUNKS)
        family.check(got, family.own if family.looks_ahead else family.truth)
    if family.looks_ahead:
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
    return (
        "compared with mlx-lm's caches: without caches, mlx-lm's model has wrong logits"
        if distance(bare, family.truth) > family.tolerance
        else ""
    )


def sixteen_bits(family: Family) -> Verdict:
    """Models in half precision."""
    if not attention_caches(make_prompt_cache(family.model)):
        names = ", ".join(sorted(kind.__name__ for kind in kinds(family.model)))
        return Verdict("nothing to do", f"its caches are mlx-lm's own {names}, which stay as they are")
    half = Family(family.name)
    half.model = make_family(family.name)  # one of its own, which changes
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
    _check_newest(family, family.policy(bits=4, group_size=32, residual_length=64))
    return EXACT


def _check_newest(family: Family, policy: CachePolicy) -> None:
    """Where all tokens are the newest ones, seen as they came, 4 bits are as good as none."""
    try:
        caches = make_prompt_cache(family.model, policy)
    except ValueError as error:
        if "residual_length" not in str(error):
            raise
        return
    got = read(family.model, caches, tokens(), CHUNKS)
    family.check(got, family.own if family.looks_ahead else family.truth, "of newest tokens, logits")


def _check_packed(family: Family, policy: CachePolicy) -> None:
    """Attention on packed planes says what it says on the same planes unpacked.

    One step of decoding, so that no rounding of a later key can hang on the last bit of an earlier one; but in later
    layers the key of the new token itself may be rounded otherwise.
    """
    packed = make_prompt_cache(family.model, policy)
    read(family.model, packed, tokens(), [21, 11])
    unpacked = copy.deepcopy(packed)
    for cache in attention_caches(unpacked):
        cache.packed_decode = False
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
        engine.submit(TokenSequence(index, prompt, 4, sampler=listener(index)))
    told: list[list[int]] = [[] for _ in prompts]
    while engine.busy:
        for token in engine.step():
            told[token.index].append(token.token)
    engine.close()
    assert [len(one) for one in told] == [4] * len(prompts)
    return [one[:4] for one in heard]


def _check_rows(family: Family, prompts: list[list[int]], got: list[list[mx.array]], how: str) -> Verdict:
    for index, (prompt, heard) in enumerate(zip(prompts, got, strict=True)):
        logprobs = mx.stack(heard)
        said: Any = mx.argmax(logprobs, axis=-1).tolist()
        text, before = mx.array([prompt + said[:-1]]), len(prompt) - 1
        # As the engine reads, if that is what the answer depends on.
        chunks = [8] * (before // 8) + [before % 8] * (before % 8 > 0) + [1] * len(said)
        split = chunks if family.looks_ahead else [text.shape[1]]
        logits = read(family.model, stock.make_prompt_cache(family.model), text, split, None)[0, before:]
        wanted = (logits - mx.logsumexp(logits, axis=-1, keepdims=True))[:, :VOCAB]
        family.check(logprobs, wanted, f"{how}row {index} of {[len(p) for p in prompts]} tokens: log-probabilities")
    return AS_MLX_LM if family.looks_ahead else EXACT


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
    return AS_MLX_LM if family.looks_ahead else EXACT


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
        if not family.looks_ahead and not short.max().item() <= family.tolerance * logits.max().item():
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
        trim_prompt_cache(caches, 7, strict=True)
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
    """Saved, loaded, and gone on with: the same bit for bit."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompt.safetensors"
        if attention_caches(make_prompt_cache(family.model)):
            _check_loaded(family, path, family.policy(bits=8, group_size=32))
        _check_loaded(family, path, family.policy())
    return EXACT


def _go_on(family: Family, caches: list[Any]) -> mx.array:
    return read(family.model, caches, tokens(6, 6), [4, 1, 1])


def _check_loaded(family: Family, path: Path, policy: CachePolicy) -> None:
    caches = make_prompt_cache(family.model, policy)
    read(family.model, caches, tokens(), [21, 11])
    save_prompt_cache(path, caches)
    wanted, got = _go_on(family, copy.deepcopy(caches)), _go_on(family, load_prompt_cache(path))
    if not mx.array_equal(got, wanted).item():
        raise WrongError(f"a loaded file goes on otherwise: logits are off by {100 * distance(got, wanted):.2g}%")


def visible(family: Family) -> Verdict:
    """Whether a hook of a cache gets the attention over it."""
    sights = [sight for sight in attention_seen(family.model) if sight is not None]
    if not sights:
        return Verdict("nothing to do", "no layer has attention")
    if len(set(sights)) == 1:
        return Verdict(sights[0])
    return Verdict(
        "hidden" if "hidden" in sights else "derived", f"by cache, in the order of layers: {', '.join(sights)}"
    )


COLUMNS: dict[str, Callable[[Family], Verdict]] = {
    "alone": alone,
    "16-bit": sixteen_bits,
    "8 and 4 bits": quantised,
    "budget": bounded,
    "ragged batch": ragged,
    "draft model": drafted,
    "trim": trimmed,
    "files": filed,
    "attention": visible,
}


def is_refusal(error: BaseException) -> bool:
    """Whether it was ours who said no, and not something deep inside mlx-lm that broke."""
    deepest = traceback.extract_tb(error.__traceback__)[-1].filename
    return isinstance(error, ValueError) and Path(deepest).is_relative_to(Path(mlx_kv.__path__[0]))
