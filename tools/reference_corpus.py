"""What the reference model reads: real Python, and documents that can only be continued by remembering.

Decides which files of the running Python's standard library are trained on and which are held out, how recall and
copy documents look, and how windows of tokens are drawn. Knows nothing about models, optimisers or PyTorch.

Everything is a pure function of a seed, so that step N of a run draws the same batch whether the run was interrupted
or not. Shapes: token windows are (rows, length + 1) int64, inputs and targets overlapping.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
HELD_OUT_PERCENT = 3
# Tables, generated text and byte-for-byte copies: they would make the held-out loss look better than it is.
EXCLUDED = ("site-packages", "encodings", "pydoc_data", "lib2to3/tests/data", "__pycache__")

WORDS = (
    "alpha amber anchor apple arrow basket beacon birch bottle branch bridge bronze button candle canyon carbon "
    "castle cedar circle cobalt copper coral cotton crystal desert diamond dragon eagle ember engine falcon "
    "feather forest garden garnet ginger glacier hammer harbor hazel hollow indigo island ivory jacket jasper "
    "jungle kernel kettle ladder lantern lemon linen magnet maple marble meadow mirror monsoon mountain nectar "
    "nickel oasis ocean olive orchid oxygen pebble pepper planet pocket prairie quartz rabbit raven river rocket "
    "saddle saffron shadow silver summit sunset temple thunder timber topaz tunnel valley velvet violet walnut "
    "willow window winter zephyr"
).split()


def library_files() -> list[Path]:
    """Every source file of the running Python's standard library that counts as corpus, in a stable order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    kept = [p for p in root.rglob("*.py") if not any(part in p.relative_to(root).as_posix() for part in EXCLUDED)]
    return sorted(kept, key=lambda p: p.relative_to(root).as_posix())


def is_held_out(path: Path) -> bool:
    """Whether a file is kept for measuring: decided by its path alone, so that it never moves between the two sides."""
    root = Path(sysconfig.get_paths()["stdlib"])
    digest = hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()
    return digest[0] * 100 < HELD_OUT_PERCENT * 256


def read_sources(held_out: bool) -> list[str]:
    """The texts of one side of the split; files that are not UTF-8 (there are a few, on purpose) are left out."""
    texts = []
    for path in library_files():
        if is_held_out(path) == held_out:
            try:
                texts.append(path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                continue
    return texts


# --- documents that ask for something said earlier ---------------------------------------------------------------

TEMPLATES = (
    ('settings["{key}"] = "{value}"\n', 'assert settings["{key}"] == "{value}"\n'),
    ("self.{key} = {value}\n", "assert self.{key} == {value}\n"),
    ('table["{key}"] = {value}\n', 'assert table["{key}"] == {value}\n'),
)


def make_pairs(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """`count` (key, value) pairs: keys are two words, all different; values a word or a number of three digits."""
    keys: set[str] = set()
    while len(keys) < count:
        keys.add(f"{rng.choice(WORDS)}_{rng.choice(WORDS)}")
    return [(key, rng.choice(WORDS) if rng.random() < 0.5 else str(rng.randint(100, 999))) for key in sorted(keys)]


def recall_document(rng: random.Random, filler: Callable[[int], str], pairs: int, gap: int) -> str:
    """Assignments, about `gap` tokens of filler code, then one assertion for each key in another order."""
    assign, check = rng.choice(TEMPLATES)
    items = make_pairs(rng, pairs)
    rng.shuffle(items)
    head = "".join(assign.format(key=k, value=v) for k, v in items)
    rng.shuffle(items)
    tail = "".join(check.format(key=k, value=v) for k, v in items)
    return head + (filler(gap) + "\n" if gap else "") + tail


class Corpus:
    """Token windows for training: a stream of code, and a share of rows made of recall and copy documents.

    Args:
        tokens: one long 1-D array of token ids, files separated by the end-of-text token.
        encode: text to token ids.  decode: token ids to text.
        recall_share: the share of rows that are recall or copy documents.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        end_of_text: int,
        recall_share: float = 0.25,
    ) -> None:
        self.tokens, self.encode, self.decode = tokens, encode, decode
        self.end_of_text, self.recall_share = end_of_text, recall_share

    def _code(self, rng: random.Random, length: int) -> list[int]:
        start = rng.randrange(len(self.tokens) - length)
        return self.tokens[start : start + length].tolist()

    def _documents(self, rng: random.Random, length: int) -> Iterator[list[int]]:
        while True:
            if rng.random() < 0.35:  # copy: the same stretch of code again
                size = rng.randint(16, max(17, min(256, length // 2)))
                block = self._code(rng, size)
                yield block + block
            else:
                gap = int(rng.choice((0, 0, 1, 1)) * length * rng.random() ** 2 * 0.8)
                text = recall_document(rng, lambda n: self.decode(self._code(rng, n)), rng.randint(2, 12), gap)
                yield self.encode(text)

    def row(self, rng: random.Random, length: int) -> list[int]:
        """One row of `length` tokens: a window of code, or documents one after another until it is full."""
        if rng.random() >= self.recall_share:
            return self._code(rng, length)
        row: list[int] = []
        for document in self._documents(rng, length):
            row += [*document, self.end_of_text]
            if len(row) >= length:
                return row[:length]
        raise AssertionError("unreachable: documents never end")

    def batch(self, seed: int, step: int, rows: int, length: int) -> np.ndarray:
        """(rows, length + 1) int64, a function of seed and step alone."""
        rng = random.Random(f"{seed}/{step}")
        return np.array([self.row(rng, length + 1) for _ in range(rows)], dtype=np.int64)
