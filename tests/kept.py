"""The slow, obvious reference of eviction: which tokens a budget leaves, from the whole history, in NumPy.

Formulas are written from the papers, in float64, without looking at how the library computes them. Which of two tokens
goes is only left open where their scores are as good as equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

TIE = 1e-5  # of the spread of scores: float32 against float64


def key_norm(keys: np.ndarray, values: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return -np.sqrt((keys.astype(np.float64) ** 2).sum(-1))


def key_norm_high(keys: np.ndarray, values: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return np.sqrt((keys.astype(np.float64) ** 2).sum(-1))


def key_diff(keys: np.ndarray, values: np.ndarray, positions: np.ndarray) -> np.ndarray:
    keys = keys.astype(np.float64)
    unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    anchor = unit.mean(axis=1, keepdims=True)
    return -(unit * anchor / np.linalg.norm(anchor, axis=-1, keepdims=True)).sum(-1)


def recent(keys: np.ndarray, values: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return np.broadcast_to(positions.astype(np.float64), keys.shape[:2])


def random(keys: np.ndarray, values: np.ndarray, positions: np.ndarray) -> np.ndarray:
    out = np.zeros(keys.shape[:2])
    for head in range(keys.shape[0]):
        for i, position in enumerate(positions.tolist()):
            x = position * 2654435761 % 2**32
            x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
            x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
            out[head, i] = ((x ^ (x >> 16)) >> 8) / 2**24
    return out


Formula = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
FORMULAS: dict[str, Formula] = {f.__name__: f for f in (key_norm, key_norm_high, key_diff, recent, random)}
OF_ALL_TOKENS = ("key_diff",)  # rescored at each compaction; the others once, in the order of the text


class Kept:
    """Which positions each row and head has evicted, and whether a cache may have chosen so."""

    def __init__(self, spec: Any) -> None:
        self.spec, self.heads = spec, 2
        self.gone: list[list[set[int]]] = [[set() for _ in range(self.heads)] for _ in range(spec.rows)]
        self.known: list[list[dict[int, float]]] = [[{} for _ in range(self.heads)] for _ in range(spec.rows)]
        # By row and head: what was live at the last compaction, and its scores, until a cache says what it chose.
        self.asked: dict[int, list[dict[int, float]]] = {}
        self.alive: dict[int, list[list[int]]] = {}
        self.base = [0] * spec.rows  # the first position that a trim can take back

    def live(self, row: int, head: int, length: int) -> list[int]:
        return [p for p in range(length) if p not in self.gone[row][head]]

    def compact(self, keys: list[np.ndarray], values: list[np.ndarray]) -> None:
        """Called before a write: notes which rows must shrink to the budget, and what each token is worth."""
        spec = self.spec
        self.asked, self.alive = {}, {}
        for row in range(spec.rows):
            length = keys[row].shape[1]
            alive = [self.live(row, head, length) for head in range(self.heads)]
            if sum(map(len, alive)) <= self.heads * (spec.budget + spec.margin):
                continue
            scores = [self._scores(row, h, alive[h], keys[row], values[row]) for h in range(self.heads)]
            if spec.share in ("layers", "layer"):
                scores = [np.mean(scores, axis=0)] * self.heads
            self.alive[row] = alive
            self.base[row] = length - spec.keep_recent
            self.asked[row] = [dict(zip(alive[h], scores[h].tolist(), strict=True)) for h in range(self.heads)]

    def _scores(self, row: int, head: int, alive: list[int], keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        formula = FORMULAS[self.spec.score]

        def ask(positions: list[int]) -> np.ndarray:
            # All heads are asked, since a formula may count them; each sees its own positions.
            spread = np.array(positions)
            return formula(keys[:, positions], values[:, positions], spread)[head]

        if self.spec.score in OF_ALL_TOKENS:
            return ask(alive)
        known, recent = self.known[row][head], self.spec.keep_recent
        fresh = [p for p in alive[: len(alive) - recent] if p not in known]
        if fresh:
            known |= dict(zip(fresh, ask(fresh).tolist(), strict=True))
        return np.array([known.get(p, 0.0) for p in alive])

    def check(self, positions: np.ndarray, lengths: list[int]) -> None:
        """What a cache says that it holds: exactly the budget was left, protected tokens in it, and no worse choice."""
        spec = self.spec
        for row in range(spec.rows):
            free_of_all, lost_of_all, left_of_all = [], [], 0
            for head in range(self.heads):
                told = positions[row, head if positions.shape[1] > 1 else 0]
                held = {int(p) for p in told if p >= 0}
                if row not in self.asked:
                    assert held == set(self.live(row, head, lengths[row]))
                    continue
                alive, scores = self.alive[row][head], self.asked[row][head]
                left = [p for p in alive if p in held]
                lost = [p for p in alive if p not in held]
                assert held == set(left) | set(range(alive[-1] + 1, lengths[row]))
                left_of_all += len(left)
                assert spec.share == "adaptive" or len(left) == spec.budget, "not the exact budget"
                protected = {*range(spec.sinks), *alive[len(alive) - spec.keep_recent :]}
                assert protected <= held, "a protected token was evicted"
                free = [scores[p] for p in left if p not in protected]
                spread = max(scores.values()) - min(scores.values())
                worst = max([scores[p] for p in lost], default=-np.inf)
                assert not free or worst <= min(free) + TIE * spread, (
                    "a better token was evicted than one that was kept"
                )
                safe = max(0, spec.budget // 5 - len(protected))
                assert len(free) >= safe, "a head was left less than its safeguard"
                free_of_all += sorted(free)[: len(free) - safe]
                lost_of_all += [scores[p] for p in lost]
            if row in self.asked and spec.share == "adaptive":
                assert left_of_all == self.heads * spec.budget, "not the exact budget of all heads"
                spread = np.ptp(free_of_all + lost_of_all)
                assert not free_of_all or max(lost_of_all) <= min(free_of_all) + TIE * spread, (
                    "a token that matters more than one of another head was evicted"
                )
        for row in self.asked:
            for head in range(self.heads):
                told = positions[row, head if positions.shape[1] > 1 else 0].tolist()
                self.gone[row][head] |= {p for p in self.alive[row][head] if p not in told}
        self.asked = {}

    def max_trim(self, row: int, length: int) -> int:
        return length - self.base[row] if any(self.gone[row]) else length

    def trim(self, row: int, length: int) -> None:
        for head in range(self.heads):
            self.known[row][head] = {p: s for p, s in self.known[row][head].items() if p < length}
