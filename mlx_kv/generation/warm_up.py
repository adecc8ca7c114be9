"""Warm-up: a GPU prepares itself for each new shape of attention, so prompts of all padded lengths are read once."""

from __future__ import annotations

import time
from collections.abc import Callable

from mlx_kv.cache.plan import round_read
from mlx_kv.generation.admission import MAX_PROMPTS_AT_ONCE
from mlx_kv.generation.engine import Engine
from mlx_kv.generation.sequence import TokenSequence

MAX_SECONDS = 20.0  # what is not warm by then gets so with requests
ANSWER = 3  # tokens: passes that decode, beside one another


def padded_shapes(max_rows: int, max_tokens: int) -> list[tuple[int, int]]:
    """Numbers of prompts that are read together, and the lengths that they are padded to: first few, then more."""
    lengths, counts = [round_read(1)], [1]
    while (following := round_read(lengths[-1] + 1)) <= max_tokens:
        lengths.append(following)
    while 2 * counts[-1] <= min(max_rows, MAX_PROMPTS_AT_ONCE):
        counts.append(2 * counts[-1])
    return [(rows, tokens) for rows in counts for tokens in lengths]


def warm_up(
    engine: Engine,
    spare: Engine,
    vocabulary: int,
    fits: Callable[[int, int], bool],
    progress: Callable[[int, int], None],
) -> None:
    """Reads prompts of each shape, and decodes a few tokens; the engine then knows how large passes pay.

    Args:
        engine: that is to be warm.
        spare: another one of the same model and policy, without drafts. It is closed.
        vocabulary: number of token ids.
        fits: whether so many rows of so many tokens may be held.
        progress: called at first, and after each shape, with how many are done, and how many there are.
    """
    shapes = padded_shapes(spare.max_batch_size, spare.step_size)
    started = time.perf_counter()
    progress(0, len(shapes))
    try:
        for done, (rows, tokens) in enumerate(shapes, 1):
            if time.perf_counter() - started < MAX_SECONDS and fits(rows, tokens + ANSWER):
                for row in range(rows):  # the last token is not in the pass; others differ in length, as usual
                    prompt = [(7 * place + row) % vocabulary for place in range(max(2, tokens + 1 - row))]
                    spare.submit(TokenSequence(row, prompt, ANSWER, private=True))
                while spare.busy:
                    spare.step()
            progress(done, len(shapes))
        engine.pass_size = spare.pass_size
    finally:
        spare.close()
