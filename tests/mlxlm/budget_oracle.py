"""Which tokens each head of each layer of a model keeps, worked out the slow way from the numbers of a score.

`Watched` drives the caches of a model, beside copies whose dead slots are poisoned, and compares what is kept and every
attention with lists of positions and with all keys and values that were ever stored.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from oracle import poison

import mlx_kv
from mlx_kv import CachePolicy
from mlx_kv.cache.eviction.allocation import DIGITS
from mlx_kv.cache.eviction.calibration import FittedLayer
from mlx_kv.cache.eviction.scores import ScoredTokens, register_score
from mlx_kv.mlxlm.attention import AttentionCall, attention_hooked, show_attention
from mlx_kv.mlxlm.traverse import attention_caches

Numbers = list[list[dict[int, float]]]  # of each layer and head, by position


def worth(layer: int, head: Any, position: Any, sin: Callable[[Any], Any]) -> Any:
    """A number that depends on the layer, the head and the position alone; some layers and heads are worth more."""
    return sin(position * 12.9898 + head * 78.233 + layer * 37.719) + 0.4 * ((head + 2 * layer) % 3) - 0.8 * (layer % 2)


def placed(tokens: ScoredTokens) -> mx.array:
    """Without the head, which such a score is not given: heads of other lengths are scored one at a time.

    Four tokens have the same number, in all heads: which of them go first, their places say.
    """
    numbers = worth(tokens.layer, 0, (tokens.positions // 4).astype(mx.float32), mx.sin)
    return mx.broadcast_to(numbers, tokens.keys.shape[:3]).astype(mx.float32)


def placed_once(tokens: ScoredTokens) -> mx.array:
    heads = mx.arange(tokens.keys.shape[1])[:, None]
    numbers = worth(tokens.layer, heads, tokens.positions.astype(mx.float32), mx.sin)
    return mx.broadcast_to(numbers, tokens.keys.shape[:3]).astype(mx.float32)


PLACED, PLACED_ONCE = "placed", "placed once"
register_score(PLACED, placed)
register_score(PLACED_ONCE, placed_once, per_token=True)


def slow_counts(table: Sequence[Sequence[float]], mean: int, most: int) -> list[list[int]]:
    """(L, H): heads fill at the speed of their shares until they have all; then the largest remainders are rounded."""
    shares = [Fraction(round(share * 10**DIGITS)) for row in table for share in row]
    level, free = [Fraction(0)] * len(shares), Fraction(len(shares) * mean)
    while free:
        filling = [i for i, share in enumerate(shares) if share and level[i] < most]
        speeds = shares if filling else [Fraction(1)] * len(shares)  # heads of no share get what is left
        filling = filling or [i for i, share in enumerate(shares) if not share]
        seconds = min(free / sum(speeds[i] for i in filling), *((most - level[i]) / speeds[i] for i in filling))
        for i in filling:
            level[i] += seconds * speeds[i]
            free -= seconds * speeds[i]
    counts = [math.floor(x) for x in level]
    for i in sorted(range(len(level)), key=lambda i: (counts[i] - level[i], i))[: len(level) * mean - sum(counts)]:
        counts[i] += 1
    width = len(table[0])
    return [counts[first : first + width] for first in range(0, len(counts), width)]


def slow_fitted(layer: FittedLayer, keys: np.ndarray, values: np.ndarray, position: int) -> np.ndarray:
    """(H,): what a regression makes of one token, from the keys (H, Dk) and values (H, Dv) of all heads."""
    turned, features = [], []
    for x, rope in ((keys, layer.key_rope), (values, layer.value_rope)):
        x = x.astype(np.float64)
        own = x.copy()
        for pair, frequency in zip(rope.pairs.tolist(), rope.frequencies.tolist(), strict=True) if rope else ():
            one, other = pair
            number = (x[:, one] + 1j * x[:, other]) * np.exp(-1j * position * frequency) / rope.factor.item()
            own[:, one], own[:, other] = number.real, number.imag
        turned.append(own.reshape(-1))
        features.append(np.log(np.linalg.norm(x, axis=1) + 1e-6))
    line = np.concatenate([*turned, *features, [np.log(1 + position)]])
    return np.exp(np.minimum(line @ np.array(layer.weights) + np.array(layer.bias), 10))


class Kept:
    """One sequence: what each head of each layer keeps of it, and all that was stored of it."""

    def __init__(self, layers: int, heads: int) -> None:
        self.kept: list[list[list[int]]] = [[[] for _ in range(heads)] for _ in range(layers)]
        self.stored: list[list[np.ndarray]] = [[] for _ in range(layers)]  # keys and values, (H, n, D)
        self.length, self.base, self.compactions = 0, 0, 0

    def trim(self, count: int) -> None:
        self.length -= count
        self.kept = [[[p for p in head if p < self.length] for head in layer] for layer in self.kept]
        self.stored = [[x[:, : self.length] for x in both] for both in self.stored]

    @property
    def held(self) -> int:
        """Of a head on average."""
        lengths = [len(head) for layer in self.kept for head in layer]
        assert sum(lengths) % len(lengths) == 0, "heads keep other than a whole number of tokens on average"
        return sum(lengths) // len(lengths)

    def compact(self, policy: CachePolicy, numbers: Numbers) -> None:
        """Drops the tokens of the lowest numbers; of the same number, the oldest."""
        budget, sinks, recent, share = policy.budget or 0, policy.sinks, policy.keep_recent, policy.share
        self.base, self.compactions = self.length - recent, self.compactions + 1
        table: Any = policy.layers
        heads = len(self.kept[0])
        if share == "layer":
            table = [[sum(row) / len(row)] for row in table]
        counts = slow_counts(table, budget - sinks - recent, self.length - sinks - recent)
        for layer, own in enumerate(counts):
            own = own * heads if len(own) == 1 else own
            if share == "adaptive":
                sure = max(0, int(0.2 * (sum(own) // heads + sinks + recent)) - sinks - recent)
                self._drop([(layer, head) for head in range(heads)], sum(own), sinks, numbers, sure)
                continue
            for head in range(heads):
                self._drop([(layer, head)], own[head], sinks, numbers, 0)

    def _drop(self, which: list[tuple[int, int]], count: int, sinks: int, numbers: Numbers, sure: int) -> None:
        """Leaves so many evictable tokens to these heads together, and to each the best `sure` in any case."""
        candidates, safe = [], 0
        for layer, head in which:
            free = [p for p in self.kept[layer][head] if sinks <= p < self.base]
            ranked = sorted((numbers[layer][head][p], p, head, layer) for p in free)
            candidates += ranked[: max(0, len(ranked) - sure)]
            safe += min(sure, len(ranked))
        candidates.sort()
        assert len(candidates) >= max(0, count - safe), "there are fewer tokens than are to be kept"
        for _, position, head, layer in candidates[: len(candidates) + safe - count]:
            self.kept[layer][head].remove(position)


class Watched:
    """The caches of a batch of sequences; every pass over them is checked."""

    def __init__(self, model: Any, policy: CachePolicy, caches: list[Any], heads: int, vocabulary: int) -> None:
        self.model, self.policy, self.vocabulary = model, policy, vocabulary
        self.caches, self.poisoned, self.random = caches, copy.deepcopy(caches), np.random.default_rng(0)
        layers = sum(cache.evictor is not None for cache in attention_caches(caches))
        self.sequences = [Kept(layers, heads)]
        self.checked, self.uneven, self.totals = 0, 0, 0

    @property
    def budgets(self) -> list[Any]:
        """The caches with a budget, by layer."""
        return [cache for cache in attention_caches(self.caches) if cache.evictor is not None]

    def numbers(self, index: int) -> Numbers:
        """What the score says of all tokens that one sequence holds."""
        found: Numbers = []
        for layer, cache in enumerate(self.budgets):
            kept = self.sequences[index].kept[layer]
            scores, positions = np.array(cache.evictor.live_scores(index)), np.array(cache.positions[index])
            lines = np.broadcast_to(positions[:, : scores.shape[1]], (len(kept), scores.shape[1]))
            scores = np.broadcast_to(scores, lines.shape)
            pairs = [dict(zip(map(int, own), map(float, x), strict=True)) for own, x in zip(lines, scores, strict=True)]
            found.append(pairs)
            if self.policy.score in (PLACED, PLACED_ONCE):
                self._check_placed(layer, kept, pairs)
            if self.policy.calibration is not None and self.policy.score == "fitted":
                fitted = self.policy.calibration.layers[layer]
                for position in sorted({p for own in kept for p in own}):
                    keys, values = (x[:, position] for x in self.sequences[index].stored[layer])
                    wanted = slow_fitted(fitted, keys, values, position)
                    for own, number in zip(pairs, wanted, strict=True):
                        assert abs(own.get(position, number) - number) <= 1e-3 * number, "another score"
        return found

    def _check_placed(self, layer: int, kept: list[list[int]], pairs: list[dict[int, float]]) -> None:
        once = self.policy.score == PLACED_ONCE
        formula = [
            [worth(layer, once * head, p if once else p // 4, math.sin) for p in own] for head, own in enumerate(kept)
        ]
        if self.policy.share == "layer":  # heads have the same tokens
            formula = [[sum(each) / len(each) for each in zip(*formula, strict=True)]] * len(kept)
        for own, line, wanted in zip(kept, pairs, formula, strict=True):
            np.testing.assert_allclose([line[p] for p in own], wanted, atol=1e-3)

    def read(self, tokens: int) -> None:
        """Random tokens, as many of each sequence."""
        numbers = self.random.integers(0, self.vocabulary, (len(self.sequences), tokens))
        due = [index for index, own in enumerate(self.sequences) if own.held > self.limit]
        self._expect(due)
        for cache in attention_caches(self.poisoned):
            poison(cache)
        with attention_hooked(self.model, list(attention_caches(self.caches)), self):
            got = self.model(mx.array(numbers), cache=self.caches)
        with attention_hooked(self.model, list(attention_caches(self.poisoned)), _HandsOn()):
            other = self.model(mx.array(numbers), cache=self.poisoned)
        assert mx.array_equal(got, other).item(), "a dead slot changed the output"
        for own in self.sequences:
            for layer in own.kept:
                for head in layer:
                    head += range(own.length, own.length + tokens)
            own.length += tokens
        self.check()

    @property
    def limit(self) -> int:
        return self.policy.layout().budget + self.policy.layout().slack  # type: ignore[union-attr]

    def _expect(self, due: list[int]) -> None:
        for index, numbers in [(index, self.numbers(index)) for index in due]:
            own = self.sequences[index]
            own.compact(self.policy, numbers)
            heads = [head for layer in own.kept for head in layer]
            assert sum(map(len, heads)) == len(heads) * (self.policy.budget or 0)
            self.totals += 1

    def compact(self) -> None:
        self._expect([i for i, own in enumerate(self.sequences) if own.held > (self.policy.budget or 0)])
        for caches in (self.caches, self.poisoned):
            mlx_kv.compact(caches)
        self.check()

    def check(self) -> None:
        """Each head holds what the slow way has left."""
        for layer, cache in enumerate(self.budgets):
            positions = np.array(cache.positions)
            for index, own in enumerate(self.sequences):
                for head, wanted in enumerate(own.kept[layer]):
                    line = positions[index, head if positions.shape[1] > 1 else 0]
                    held = sorted(int(p) for p in line if 0 <= p < own.length)
                    assert held == sorted(wanted), f"row {index} keeps other tokens in head {head} of layer {layer}"

    def attend(self, call: AttentionCall) -> mx.array:
        """Compares an attention with that over what each head kept of all that was ever stored."""
        out, cache = call.forward(), call.cache
        budgets = self.budgets
        if not any(cache is own for own in budgets):
            return out
        layer = next(i for i, own in enumerate(budgets) if own is cache)
        new, rows = call.queries.shape[2], cache.view.rows
        decoded = [np.array(buffer.decode(buffer.planes)) for buffer in cache.view.buffers]
        for index, (own, row) in enumerate(zip(self.sequences, rows, strict=True)):
            fresh = [x[index, :, row.end - new : row.end] for x in decoded]
            past = own.stored[layer]
            both = own.stored[layer] = (
                [np.concatenate([old, x], axis=1) for old, x in zip(past, fresh, strict=True)] if past else fresh
            )
            groups = call.queries.shape[1] // both[0].shape[0]
            for head in range(call.queries.shape[1]):
                keys, values = (x[head // groups].astype(np.float64) for x in both)
                for j in range(new):
                    seen = own.kept[layer][head // groups] + [*range(own.length, own.length + j + 1)]
                    logits = keys[seen] @ np.array(call.queries[index, head, j]).astype(np.float64) * call.scale
                    sinks = [] if call.sinks is None else [call.sinks[head].item()]
                    weights = np.exp(np.array([*logits, *sinks]) - logits.max())
                    wanted = (weights / weights.sum())[: len(seen)] @ values[seen]
                    np.testing.assert_allclose(np.array(out[index, head, j]), wanted, atol=1e-4)
        self.checked += 1
        self.uneven += len({len(head) for head in self.sequences[0].kept[layer]}) > 1
        return out

    # --- what happens to caches -----------------------------------------------------------------------------------

    def trim(self, count: int) -> None:
        for caches in (self.caches, self.poisoned):
            for cache in caches:
                assert cache.can_trim(count)
                cache.trim(count)
        for own in self.sequences:
            own.trim(count)
        self.check()

    def trim_too_far(self) -> None:
        """One token more than was read since the cut of the last compaction: refused, and nothing has changed."""
        for cache in self.budgets:
            most = [own.length - own.base if own.compactions else own.length for own in self.sequences]
            before = cache.view.rows
            assert list(cache.most_trims) == most
            try:
                cache.trim_per_sequence([most[0] + 1, *[0] * (len(most) - 1)])
            except ValueError:
                assert cache.view.rows == before
            else:
                raise AssertionError("more was taken back than is there")
        self.check()

    def _each(self, change: Callable[[list[Any]], list[Any]]) -> None:
        self.caches, self.poisoned = change(self.caches), change(self.poisoned)
        for caches in (self.caches, self.poisoned):
            show_attention(self.model, caches)
        self.check()

    def copy(self) -> None:
        self._each(copy.deepcopy)

    def through_file(self, folder: Path) -> None:
        def loaded(caches: list[Any]) -> list[Any]:
            mlx_kv.save_prompt_cache(folder / "kept.safetensors", caches, force=True)
            return mlx_kv.load_prompt_cache(folder / "kept.safetensors")

        self._each(loaded)

    def join(self, other: Watched) -> None:
        """Copies of another batch's sequences come after these; the other goes on, too."""
        for caches, more in ((self.caches, other.caches), (self.poisoned, other.poisoned)):
            for cache, own in zip(caches, copy.deepcopy(more), strict=True):
                cache.extend(own)
        self.sequences += copy.deepcopy(other.sequences)
        self.check()

    def filter(self, rows: list[int]) -> None:
        for caches in (self.caches, self.poisoned):
            for cache in caches:
                cache.filter(rows)
        self.sequences = [self.sequences[row] for row in rows]
        self.check()

    def extract(self, row: int) -> None:
        self.sequences = [self.sequences[row]]
        self._each(lambda caches: [cache.extract(row) for cache in caches])


class _HandsOn:
    def attend(self, call: AttentionCall) -> mx.array:
        return call.forward()
