"""The texts that a model is calibrated on, as token ids.

By default: code and documentation that come with Python and NumPy, and passages, facts and chats of our own. None of
them is a text that `mlx-kv eval` asks about.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from mlx_kv.calibration.statements import INSTRUCTIONS, THANKS, TURNS, fact
from mlx_kv.evaluation.chat_cases import Talk
from mlx_kv.evaluation.questions import MODULES, paragraphs
from mlx_kv.evaluation.tasks import Tokens
from mlx_kv.generation.encoding import encode_prompt

COUNT = 26  # texts of `LENGTHS` tokens
LENGTHS = (600, 1100)
SINGLE = 1000  # tokens of the one text that budgets alone are measured on
LEAST = 64  # tokens of a text from which anything can be measured
KINDS = ("prose", "code", "facts", "chat", "docs")
LEAST_FILE_BYTES, LEAST_DOCUMENTATION = 6000, 6000  # of files that texts are taken from
LEAST_DOCSTRING = 150
LEFT_OUT = {"pydoc_data", "test", "tests", "idlelib", "lib2to3", "site-packages", "encodings", "turtledemo"}
MOST_FILES = 60  # of a user's
MOST_FILE_BYTES = 2**20  # that are read of each
PASSAGES = Path(__file__).parent / "passages.txt"
BETWEEN_PASSAGES = "\n===\n"


def default_texts(tokenizer: Any, positions: int | None = None, count: int = COUNT) -> list[Tokens]:
    """Texts of 600 to 1,100 tokens; the same ones for the same tokenizer and Python.

    Longer ones cost more and change nothing: with five texts of 3,000 tokens more, SmolLM2-135M answers as much of
    contexts of 2,048 and 4,096 tokens.

    Args:
        positions: that the model was made for: no text takes more than half of them, as it is read twice.
        count: texts.

    Raises:
        ValueError: the tokenizer cannot encode them.
    """
    writer = _Writer(tokenizer)
    most = LENGTHS[1] if positions is None else max(LEAST, positions // 2 - LEAST)
    return [writer.text(KINDS[i % len(KINDS)], min(writer.random.randint(*LENGTHS), most)) for i in range(count)]


def single_text(tokenizer: Any, positions: int | None = None) -> list[Tokens]:
    """The text that budgets alone are measured on, in a list: documentation with facts in it.

    Raises:
        ValueError: as `default_texts`.
    """
    most = SINGLE if positions is None else max(LEAST, positions // 2 - LEAST)
    return [_Writer(tokenizer).text("facts", min(SINGLE, most))]


def texts_in(folder: Path, tokenizer: Any, positions: int | None = None) -> tuple[list[Tokens], list[str]]:
    """Texts of a user's files, and what was left out.

    One text of each file, of at most 1,000 tokens; where there are few files, several of each. Hidden files are not
    looked at.

    Args:
        positions: as for `default_texts`.

    Returns:
        The texts, and a line for each file that is no UTF-8 text or too short.

    Raises:
        ValueError: no file has enough.
    """
    length = SINGLE if positions is None else min(SINGLE, max(LEAST, positions // 2 - LEAST))
    files, left_out = [], []
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        try:
            tokens = encode_prompt(tokenizer, path.read_bytes()[:MOST_FILE_BYTES].decode("utf-8", "strict"))
        except (OSError, ValueError):
            left_out.append(f"{path} is no UTF-8 text that can be read")
            continue
        if len(tokens) < LEAST:
            left_out.append(f"{path} has {len(tokens)} tokens, of at least {LEAST}")
            continue
        files.append(tokens)
    found: list[Tokens] = []
    while files and (len(found) < COUNT):
        for index, tokens in enumerate(files[: MOST_FILES - len(found)]):
            found.append(tokens[:length])
            files[index] = tokens[length:]
        files = [tokens for tokens in files if len(tokens) >= LEAST]
    if not found:
        raise ValueError(f"{folder} has no file with {LEAST} tokens of UTF-8 text: give a directory of text files")
    return found, left_out


class _Writer:
    """Makes texts, each of files of its own, so that files are held out and not parts of them."""

    def __init__(self, tokenizer: Any, seed: int = 5) -> None:
        self.random = random.Random(seed)
        self._talk = Talk(tokenizer)
        sample = "The number 1234 is here, print(x)."
        if "".join(self._talk.decode(self._talk.encode(sample)).split()) != "".join(sample.split()):
            raise ValueError(
                "this tokenizer cannot encode English text, so the default texts say nothing about its model: give "
                "texts of your own"
            )
        library = Path(sysconfig.get_paths()["stdlib"])
        files = [
            path
            for path in library.rglob("*.py")
            if path.stem not in MODULES and not LEFT_OUT & {*path.relative_to(library).parts}
        ]
        self._code = self._shuffled(path for path in files if path.stat().st_size > LEAST_FILE_BYTES)
        self._documented = self._shuffled([*files, *_numpy_files()])
        self._passages = self._shuffled_texts(PASSAGES.read_text(encoding="utf-8").strip().split(BETWEEN_PASSAGES))

    def _shuffled(self, paths: Any) -> Iterator[Path]:
        found = sorted(paths)
        self.random.shuffle(found)
        return iter(found)

    def _shuffled_texts(self, texts: list[str]) -> Iterator[str]:
        self.random.shuffle(texts)
        return iter(texts)

    def text(self, kind: str, n: int) -> Tokens:
        """n tokens of a kind, fewer where a file has no more."""
        if kind == "chat":
            return self._chat(n)
        instruction = self.random.choice(INSTRUCTIONS)
        begun = self._talk.begun(instruction) if self.random.random() < 0.7 else []
        return [*begun, *getattr(self, f"_{kind}_tokens")(n)][:n]

    def _code_tokens(self, n: int) -> Tokens:
        ids: Tokens = []
        while len(ids) < n:
            ids += self._talk.encode(self._excerpt(_read(next(self._code)), n))
        return ids

    def _docs_tokens(self, n: int) -> Tokens:
        ids: Tokens = []
        while len(ids) < n:
            ids += self._talk.encode(self._excerpt(self._documentation(), n))
        return ids

    def _prose_tokens(self, n: int) -> Tokens:
        lines: list[str] = []
        while len(self._talk.encode("\n".join(lines))) < n:
            lines += (next(self._passages, None) or "\n".join(self._paragraphs())).splitlines()
        return self._with_facts(lines, self.random.randint(0, 3))

    def _facts_tokens(self, n: int) -> Tokens:
        lines: list[str] = []
        while len(self._talk.encode("\n".join(lines))) < n:
            lines += self._paragraphs()
        return self._with_facts(lines, self.random.randint(3, 9) * max(1, n // LENGTHS[1]))

    def _with_facts(self, lines: list[str], count: int) -> Tokens:
        for _ in range(count):
            lines.insert(self.random.randrange(max(1, min(len(lines), 40))), fact(self.random))
        return self._talk.encode("\n".join(lines))

    def _chat(self, n: int) -> Tokens:
        ids = [*self._talk.begun("Hello, I would like to talk."), *self._talk.exchange("", "Of course, go on.")]
        lines: list[str] = []
        while len(ids) < n:
            lines = lines or (next(self._passages, None) or "\n".join(self._paragraphs())).splitlines()
            if self.random.random() < 0.3:
                ids += self._talk.exchange(fact(self.random), self.random.choice(THANKS))
            else:
                ids += self._talk.exchange(self.random.choice(TURNS), " ".join(lines.pop(0).split()[:60]))
        return ids[:n]

    def _excerpt(self, text: str, n: int) -> str:
        """About n tokens or more, from the beginning of a line on."""
        first = self.random.randrange(max(1, len(text) - 8 * n))
        return text[text.find("\n", first) + 1 if first else 0 :][: 8 * n]

    def _documentation(self) -> str:
        return next(text for text in map(_docstrings, self._documented) if len(text) > LEAST_DOCUMENTATION)

    def _paragraphs(self) -> list[str]:
        return next(found for found in (paragraphs(self._documentation()) for _ in range(1000)) if len(found) > 5)


def _numpy_files() -> list[Path]:
    """NumPy is a dependency, and its docstrings are long."""
    import numpy as np

    folder = Path(np.__file__).parent
    return [path for path in folder.rglob("*.py") if not LEFT_OUT & {*path.relative_to(folder).parts}]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


@cache
def _docstrings(path: Path) -> str:
    """The long docstrings of a module; "" if it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(_read(path))
    except (SyntaxError, ValueError, RecursionError):
        return ""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)]
    found = [ast.get_docstring(node) for node in nodes]
    return "\n\n".join(text for text in found if text and len(text) > LEAST_DOCSTRING)
