"""What the recall model reads at each step of its training: short rows full of answers first, then long ones with few.

    <end> f017 f101 set k05 v33 f020 .. set k61 v02 f007 .. get k61 v02 get k05 v33      recall, queries at the end
    <end> f017 .. copy f090 f003 f111 f054 again f090 f003 f111 f054 f031 ..             copies

`recall_rows` and `copy_rows` return two (rows, length) arrays: int64 token ids, and where the answers are: the value
after `get KEY`, the words after `again`. A model is right about an answer when the token before it predicts it. Keys of
a row are distinct; keys, values and copied words are drawn anew for each row.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # the checkout

# isort: split
from benchmarks.eval.tasks import (
    AGAIN,
    COPY,
    END,
    FILLER_POOL,
    FIRST_FILLER,
    FIRST_KEY,
    FIRST_VALUE,
    GET,
    KEYS,
    SET,
    VALUES,
    filler_rows,
)

Rows = tuple[np.ndarray, np.ndarray]
PAIR_POOL = (FIRST_KEY, FIRST_FILLER)

# (from step, lengths drawn from there on). Short rows are full of answers, and on them recall sets in within 400 steps;
# it then stretches with the lengths. Steps, not shares of a run: a run made longer has read the same until then.
PHASES = (
    (0, (64,)),
    (600, (64, 96, 128)),
    (1000, (64, 96, 128, 192, 256)),
    (1600, (64, 128, 192, 256, 384, 512)),
    (2800, (64, 128, 192, 256, 384, 512, 512, 768, 1024)),
)
GROUPS = 8
COPY_SHARE, PASSKEY_SHARE = 0.3, 0.1
FILLER_WEIGHT = 0.1
MOST_PAIRS = 32

# (task, length, pairs or words copied): measured on rows that no training step can draw.
HELD_OUT = (
    ("recall", 256, 4),
    ("recall", 256, 8),
    ("recall", 512, 8),
    ("recall", 512, 16),
    ("recall", 512, 32),
    ("recall", 1024, 16),
    ("passkey", 256, 1),
    ("passkey", 512, 1),
    ("passkey", 1024, 1),
    ("copy", 256, 64),
    ("copy", 512, 128),
)


def _in_filler(rng: np.random.Generator, blocks: np.ndarray, answers: np.ndarray, length: int) -> Rows:
    """Places (rows, blocks, size) blocks, in their order, at random positions of rows of filler."""
    rows, count, size = blocks.shape
    free = length - count * size
    if free < 0:
        raise ValueError(f"{count} blocks of {size} words do not fit into {length}: ask for fewer, or a longer row")
    starts = np.sort(rng.integers(free + 1, size=(rows, count)), 1) + size * np.arange(count)
    cells = (starts[:, :, None] + np.arange(size)).reshape(rows, -1)  # (rows, count * size)
    tokens, is_answer = np.zeros((rows, length), np.int64), np.zeros((rows, length), bool)
    np.put_along_axis(tokens, cells, blocks.reshape(rows, -1), 1)
    np.put_along_axis(is_answer, cells, answers.reshape(rows, -1), 1)
    is_filler = np.ones((rows, length), bool)
    np.put_along_axis(is_filler, cells, False, 1)
    tokens[is_filler] = filler_rows(rng, rows, free).ravel()
    return tokens, is_answer


def recall_rows(rng: np.random.Generator, rows: int, length: int, pairs: int, asked_inside: int = 0) -> Rows:
    """`pairs` times `set KEY VALUE` anywhere in filler; `get KEY VALUE` for all of them, in another order, at the end.

    Args:
        pairs: 1 is the passkey task.
        asked_inside: so many further queries stand between the assignments, each after its own.
    """
    keys = FIRST_KEY + rng.permuted(np.tile(np.arange(KEYS), (rows, 1)), axis=1)[:, :pairs]
    values = FIRST_VALUE + rng.integers(VALUES, size=(rows, pairs))
    is_set = np.ones((rows, pairs + asked_inside), bool)
    is_set[:, pairs:] = False
    is_set[:, 1:] = rng.permuted(is_set[:, 1:], axis=1)  # the first is always an assignment
    assigned = is_set.cumsum(1)
    which = np.where(is_set, assigned - 1, (rng.random(is_set.shape) * assigned).astype(np.int64))
    last = rng.permuted(np.tile(np.arange(pairs), (rows, 1)), axis=1)

    def triples(marker: np.ndarray | int, index: np.ndarray) -> np.ndarray:  # (rows, n) -> (rows, n, 3)
        k, v = np.take_along_axis(keys, index, 1), np.take_along_axis(values, index, 1)
        return np.stack([np.broadcast_to(marker, index.shape), k, v], 2)

    third = np.arange(3) == 2
    tail = triples(GET, last).reshape(rows, -1)
    inside = triples(np.where(is_set, SET, GET), which)
    tokens, answers = _in_filler(rng, inside, ~is_set[:, :, None] & third, length - 1 - tail.shape[1])
    head = np.full((rows, 1), END)
    tail_answers = np.tile(third, (rows, pairs))
    return np.hstack([head, tokens, tail]), np.hstack([head != END, answers, tail_answers])


def copy_rows(
    rng: np.random.Generator,
    rows: int,
    length: int,
    size: int,
    copies: int = 1,
    pool: tuple[int, int] = FILLER_POOL,
) -> Rows:
    """`copies` times `copy X1 .. Xsize again X1 .. Xsize` anywhere in filler; X are of the ids low <= X < high."""
    low, high = pool
    text = rng.integers(low, high, size=(rows, copies, size))
    marker = np.ones((rows, copies, 1), np.int64)
    blocks = np.concatenate([COPY * marker, text, AGAIN * marker, text], 2)
    answers = np.broadcast_to(np.arange(2 * size + 2) >= size + 2, blocks.shape)
    tokens, is_answer = _in_filler(rng, blocks, answers, length - 1)
    head = np.full((rows, 1), END)
    return np.hstack([head, tokens]), np.hstack([head != END, is_answer])


def held_out_rows(task: str, length: int, size: int, rows: int) -> Rows:
    """Fresh rows of one measurement. The seed has three numbers and that of a training step two: they never meet."""
    rng = np.random.default_rng((1, length, size))
    return copy_rows(rng, rows, length, size) if task == "copy" else recall_rows(rng, rows, length, size)


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return int(math.exp(rng.uniform(math.log(low), math.log(high + 1))))


def _group(rng: np.random.Generator, rows: int, length: int) -> Rows:
    """Rows of one task, of one size."""
    kind = rng.random()
    if kind < COPY_SHARE:
        size = _log_uniform(rng, 4, (length - 3) // 2)
        copies = int(rng.integers(1, (length - 1) // (2 * size + 2) + 1))
        return copy_rows(rng, rows, length, size, copies, FILLER_POOL if rng.random() < 0.6 else PAIR_POOL)
    if kind < COPY_SHARE + PASSKEY_SHARE:
        return recall_rows(rng, rows, length, 1)
    pairs = _log_uniform(rng, 2, min(MOST_PAIRS, (length - 1) // 6))
    room = (length - 1) // 3 - 2 * pairs
    return recall_rows(rng, rows, length, pairs, int(rng.integers(room + 1)) if rng.random() < 0.7 else 0)


def batch(seed: int, step: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """One step's rows, together about `tokens`: (rows, length + 1) int64, and (rows, length) float32 loss weights.

    The weights are those of predicting tokens 1 to the end: answers weigh 1 together, the rest FILLER_WEIGHT. Among the
    answers a row counts by the root of their number: a copy has hundreds, a passkey one.
    """
    rng = np.random.default_rng((seed, step))
    lengths = [lengths for start, lengths in PHASES if start <= step][-1]
    length = int(rng.choice(lengths))
    sizes = [len(part) for part in np.array_split(np.arange(tokens // length), GROUPS)]
    groups = [_group(rng, rows, length + 1) for rows in sizes]
    ids, answers = (np.concatenate(parts) for parts in zip(*groups, strict=True))
    is_answer = answers[:, 1:]
    weights = is_answer / np.sqrt(is_answer.sum(1, keepdims=True))
    weights = weights / weights.sum() + FILLER_WEIGHT * ~is_answer / (~is_answer).sum()
    return ids, weights.astype(np.float32)
