"""Rows of made-up words that can only be continued by looking back: key-value recall, a passkey, copies.

Decides the 256 words of the recall model, how its filler runs on, and what a row of each task looks like. Knows nothing
about models, training or which rows are drawn when; pure functions of a `numpy.random.Generator`.

    <end> f017 f101 set k05 v33 f020 .. set k61 v02 f007 .. get k61 v02 get k05 v33      recall, queries at the end
    <end> f017 .. copy f090 f003 f111 f054 again f090 f003 f111 f054 f031 ..             copies

Every function returns two (rows, length) arrays: int64 token ids, and where the answers stand: the value after
`get KEY`, the words after `again`. A model is right about an answer when the token before it predicts it. Keys of a row
are distinct; keys, values and what is copied are drawn anew for every row, so that there is nothing to know by heart.
"""

from __future__ import annotations

import numpy as np

KEYS, VALUES, SUCCESSORS = 64, 64, 4
VOCAB_SIZE = 256
END, SET, GET, COPY, AGAIN = range(5)
FIRST_KEY = 5
FIRST_VALUE = FIRST_KEY + KEYS
FIRST_FILLER = FIRST_VALUE + VALUES
FILLERS = VOCAB_SIZE - FIRST_FILLER
WORDS = (
    *("<end>", "set", "get", "copy", "again"),
    *(f"k{i:02}" for i in range(KEYS)),
    *(f"v{i:02}" for i in range(VALUES)),
    *(f"f{i:03}" for i in range(FILLERS)),
)
FILLER_POOL = (FIRST_FILLER, VOCAB_SIZE)
PAIR_POOL = (FIRST_KEY, FIRST_FILLER)

# (FILLERS, SUCCESSORS): what may follow a filler word. Columns are permutations, so that all are equally frequent.
FOLLOWS = np.stack([np.random.default_rng(64 + i).permutation(FILLERS) for i in range(SUCCESSORS)], 1)

Rows = tuple[np.ndarray, np.ndarray]


def filler(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """(rows, length) token ids: random walks on `FOLLOWS`, so log(4) nats a word for whoever knows the table."""
    chosen = rng.integers(SUCCESSORS, size=(length, rows))
    walk = np.empty((length, rows), dtype=np.int64)
    here = rng.integers(FILLERS, size=rows)
    for position in range(length):  # all rows at once; a walk has no shorter form
        walk[position] = here
        here = FOLLOWS[here, chosen[position]]
    return FIRST_FILLER + walk.T


def _in_filler(rng: np.random.Generator, blocks: np.ndarray, answers: np.ndarray, length: int) -> Rows:
    """Strews (rows, blocks, size) blocks, in their order, over rows of filler."""
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
    tokens[is_filler] = filler(rng, rows, free).ravel()
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
