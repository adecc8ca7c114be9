"""What the recall model reads at which step: short rows full of answers first, long ones with few answers later.

Decides lengths, the share of each task and how much an answer weighs against filler, all as functions of seed and step;
which measurements count as held out. Knows nothing about models, optimisers or PyTorch.
"""

from __future__ import annotations

import math

import numpy as np

from mlx_kv.evaluation.recall_tasks import FILLER_POOL, PAIR_POOL, Rows, copy_rows, recall_rows

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
