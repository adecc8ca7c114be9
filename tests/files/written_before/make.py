"""Files and a store as another revision wrote them, with what that revision read of them and how it went on.

Decides which caches there are and how they go on after loading (`go_on`): the test that loads what lies here calls the
same function. Uses public names only, so that older and newer code can run it. What a revision wrote is committed once
and never made again:

    cd <a checkout of that revision>
    PYTHONPATH=.:tests python <this file> <the folder of this file> [names of cases]

makes the folder <revision>/: a file for each case, `store/`, `expected.json` (numbers, and digests of what every update
returned) and `expected.npz` (what the first update returned). There are two: 150a35e is the last revision with one
folder for all modules, 372245b is of the time before each row had counts of its own and a store a marker.
"""

from __future__ import annotations

import mlx_kv  # before MLX: it loads a tuned BLAS

# isort: split
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as stock
from tiny_models import VOCAB, make_model

from mlx_kv import (
    BatchKVCache,
    BatchRotatingKVCache,
    CachePolicy,
    ChunkedKVCache,
    CompressedKVCache,
    FixedStep,
    Geometric,
    KVCache,
    PromptStore,
    RingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

WRITES, LATER = (4, 4, 1, 4, 4, 4, 1), (1, 3, 1, 4, 2, 1)  # tokens of each update, before and after the file
BUDGET: dict[str, Any] = {"budget": 12, "keep_recent": 4, "sinks": 2, "margin": 2, "max_write": 4}
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
METADATA = {"made": "with an older revision", "ünï": "çødé"}
TOKENS = list(range(1, 101))  # of an entry of the store


def tensors(seed: int, rows: int, new: int, heads: int, dim: int, dtype: str) -> tuple[mx.array, mx.array]:
    """Keys and values (rows, heads, new, dim), the same everywhere."""
    drawn = np.random.default_rng(seed).standard_normal((2, rows, heads, new, dim)).astype(np.float16)
    keys, values = (mx.array(each).astype(DTYPES[dtype]) for each in drawn)
    return keys, values


def update(caches: Sequence[Any], seed: int, rows: int, new: int, shape: Sequence[Any]) -> list[Any]:
    return [
        cache.update_and_fetch(*tensors(100 * seed + layer, rows, new, *shape)) for layer, cache in enumerate(caches)
    ]


def as_numpy(array: mx.array) -> np.ndarray:
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def flat(tree: Any, name: str) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(tree, (list, tuple)):
        for index, item in enumerate(tree):
            yield from flat(item, f"{name}.{index}")
    else:
        yield name, as_numpy(tree)


def numbers(caches: Sequence[Any]) -> list[dict[str, Any]]:
    """What a cache says of itself."""
    found = []
    for cache in caches:
        offset = cache.offset.tolist() if isinstance(cache.offset, mx.array) else cache.offset
        told = {name: getattr(cache, name) for name in ("capacity", "nbytes", "nbytes_live", "growths")}
        evictor = cache.evictor
        positions = None if evictor is None else cache.positions.tolist()
        found.append({"offset": offset, "size": cache.size(), "positions": positions, **told})
    return found


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    sealed = hashlib.blake2b(digest_size=16)
    for name, array in arrays.items():
        sealed.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return sealed.hexdigest()


def go_on(caches: Sequence[Any], rows: int, shape: Sequence[Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Updates with a trim in between: numbers, a digest of what each returned, and the arrays that the first did."""
    told: dict[str, Any] = {"loaded": numbers(caches), "digests": []}
    first: dict[str, np.ndarray] = {}
    for turn, new in enumerate(LATER):
        fetched = dict(flat(update(caches, 50 + turn, rows, new, shape), "fetched"))
        first = first or fetched
        told["digests"].append(digest(fetched))
        if turn == 1:
            trimmed = all(cache.can_trim(1) for cache in caches)
            told["trimmed"] = trimmed and [cache.trim(1) for cache in caches]
    return {**told, "at the end": numbers(caches)}, first


class Case:
    """Caches that are filled and saved."""

    def __init__(
        self,
        make: Callable[[], Any],
        rows: int = 1,
        shape: tuple[int, int, str] = (1, 32, "float16"),
        writes: Sequence[int] = WRITES,
        before: Callable[[Any], None] = lambda cache: None,
        after: Callable[[Any], None] = lambda cache: None,
        **options: Any,
    ) -> None:
        self.make, self.rows, self.shape, self.writes = make, rows, shape, writes
        self.before, self.after, self.options = before, after, options

    def caches(self) -> list[Any]:
        made = self.make()
        caches = made if isinstance(made, list) else [made]
        for cache in caches:
            self.before(cache)
        for turn, new in enumerate(self.writes):
            update(caches, turn, self.rows, new, self.shape)
        for cache in caches:
            self.after(cache)
        return caches


def shared_budget(**changes: Any) -> list[Any]:
    """Two layers that keep the same tokens."""
    model = make_model("llama", num_hidden_layers=2, num_key_value_heads=1)
    return make_prompt_cache(model, CachePolicy(**BUDGET, **changes))


CASES: dict[str, Case] = {
    "plain": Case(KVCache),
    "plain-float32": Case(KVCache, shape=(2, 32, "float32"), writes=(5, 1)),
    "plain-bfloat16": Case(KVCache, shape=(2, 32, "bfloat16"), writes=(5, 1)),
    "nothing-read": Case(KVCache, writes=()),
    "8-bits-of-32": Case(lambda: KVCache(8, 32)),
    "8-bits-of-64": Case(lambda: KVCache(8, 64), shape=(1, 64, "float16")),
    "8-bits-of-128": Case(lambda: KVCache(8, 128), shape=(1, 128, "bfloat16"), writes=(5, 1)),
    "4-bits-of-32": Case(lambda: KVCache(4, 32)),
    "4-bits-of-64": Case(lambda: KVCache(4, 64), shape=(1, 64, "float32"), writes=(5, 4, 1)),
    "3-bits-unpacked": Case(lambda: KVCache(3, 32, packed_decode=False)),
    "late-pending": Case(lambda: KVCache(8, 32, quantized_start=24)),
    "late-done": Case(lambda: KVCache(4, 32, quantized_start=16)),
    "reserve": Case(lambda: KVCache(reserve=1000, growth=Geometric(3.0, 512, 4096)), writes=(4, 1)),
    "announced": Case(lambda: KVCache(growth=FixedStep(512)), writes=(4, 1), before=lambda cache: cache.reserve(700)),
    "trimmed": Case(KVCache, after=lambda cache: cache.trim(7)),
    "ring": Case(lambda: RingKVCache(12, 4)),
    "ring-sinks": Case(lambda: RingKVCache(12, 4, sinks=3)),
    "ring-not-full": Case(lambda: RingKVCache(64, 8, 4)),
    "ring-8-bits": Case(lambda: RingKVCache(12, 4, bits=8, group_size=32)),
    "chunks": Case(lambda: ChunkedKVCache(8, 4)),
    "chunks-trimmed-front": Case(lambda: ChunkedKVCache(8, 4), after=lambda cache: cache.maybe_trim_front()),
    "budget-layer": Case(lambda: CompressedKVCache(**BUDGET, share="layer"), shape=(2, 32, "float16")),
    "budget-head": Case(lambda: CompressedKVCache(**BUDGET, share="head"), shape=(2, 32, "float16")),
    "budget-layers": Case(shared_budget),
    "budget-recent": Case(lambda: CompressedKVCache(**BUDGET, score="recent")),
    "budget-8-bits": Case(lambda: CompressedKVCache(**BUDGET, score="key_norm", bits=8, group_size=32)),
    "rows": Case(
        lambda: BatchKVCache([0, 3, 1]), 3, writes=(4, 4), after=lambda cache: cache.trim_per_sequence([0, 2, 1])
    ),
    "rows-padded-right": Case(
        lambda: BatchKVCache([0, 0]), 2, writes=(4,), before=lambda cache: cache.prepare(lengths=[6, 3])
    ),
    "rows-of-a-ring": Case(lambda: BatchRotatingKVCache(8, [0, 2]), 2, writes=(4, 4, 1, 4)),
    "rows-of-a-budget": Case(
        lambda: KVCache.merge([CompressedKVCache(**BUDGET), CompressedKVCache(**BUDGET)]),
        2,
        before=lambda cache: cache.prepare(left_padding=[0, 5]),
    ),
    "mlx-lm-plain": Case(KVCache, format="mlx-lm"),
    "mlx-lm-4-bits": Case(lambda: KVCache(4, 32), format="mlx-lm"),
    "mlx-lm-ring": Case(lambda: RingKVCache(12, 4, sinks=3), format="mlx-lm"),
    "mlx-lm-by-itself": Case(
        lambda: [stock.KVCache(), stock.RotatingKVCache(12, keep=2)], shape=(1, 8, "float16"), by_mlx_lm=True
    ),
}
MODELS = ("falcon_h1", "lfm2")  # recurrent state beside attention
STORE: dict[str, Callable[[], KVCache]] = {  # by fingerprint
    "plain": KVCache,
    "ring": lambda: RingKVCache(24, 8, sinks=4),
    "8 bits": lambda: KVCache(8, 32),
}


def hybrid(family: str) -> Any:
    return make_model(family, num_hidden_layers=2)


def read_by(model: Any, caches: list[Any], tokens: Sequence[int]) -> np.ndarray:
    """The logits (n, V) of some more tokens."""
    return np.array(model(mx.array([list(tokens)]), cache=caches)[0])


def save(case: Case, path: Path) -> None:
    caches, options = case.caches(), dict(case.options)
    if options.pop("by_mlx_lm", False):
        stock.save_prompt_cache(str(path), caches, METADATA)
        return
    own = {} if options else {"tokens": TOKENS[:9], "fingerprint": "0123456789abcdef"}
    save_prompt_cache(path, caches, METADATA, **options, **own)


def main(folder: str, *chosen: str) -> None:
    source = Path(mlx_kv.__file__).parent
    revision = subprocess.check_output(["git", "rev-parse", "--short=7", "HEAD"], cwd=source, text=True).strip()
    place = Path(folder) / revision
    (place / "store").mkdir(parents=True)
    told: dict[str, Any] = {"revision": revision, "mlx": mx.__version__, "cases": {}, "models": {}, "store": {}}
    arrays: dict[str, np.ndarray] = {}

    for name in chosen or CASES:
        save(CASES[name], place / f"{name}.safetensors")
        caches = load_prompt_cache(place / f"{name}.safetensors")
        told["cases"][name], first = go_on(caches, CASES[name].rows, CASES[name].shape)
        arrays |= {f"{name}/{key}": array for key, array in first.items()}

    for family in () if chosen else MODELS:
        model = hybrid(family)
        caches = make_prompt_cache(model)
        read_by(model, caches, [index * 7 % VOCAB for index in range(12)])
        save_prompt_cache(place / f"{family}.safetensors", caches)
        loaded = load_prompt_cache(place / f"{family}.safetensors")
        told["models"][family] = digest(dict(states(loaded)))
        arrays[f"{family}/logits"] = read_by(model, loaded, [3, 1, 4])

    for fingerprint, make in STORE.items():
        store = PromptStore(place / "store", fingerprint=fingerprint)
        cache = make()
        for turn in range(0, 100, 4):
            cache.update_and_fetch(*tensors(turn, 1, 4, 1, 32, "float16"))
        assert store.keep(TOKENS, [cache])
        caches, count = store.find([*TOKENS, 0])
        told["store"][fingerprint] = {"count": count, **go_on(caches, 1, (1, 32, "float16"))[0]}

    (place / "expected.json").write_text(json.dumps(told, separators=(",", ":")) + "\n")
    np.savez_compressed(place / "expected.npz", **arrays)


def states(caches: Sequence[Any]) -> Iterator[tuple[str, np.ndarray]]:
    """What recurrent layers hold; attention is seen in the logits."""
    for index, cache in enumerate(caches):
        for number, part in enumerate(getattr(cache, "caches", [cache])):
            if isinstance(part, stock.ArraysCache):
                yield from flat([array for array in part.state if array is not None], f"state.{index}.{number}")


if __name__ == "__main__":
    main(*sys.argv[1:])
