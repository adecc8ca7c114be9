"""The texts that a model is calibrated on, as token ids.

By default: code and documentation that come with Python and NumPy, and the passages, facts and chats of this package.
They share no text with the questions of a calibration's report, nor with `benchmarks/eval`.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from mlx_kv.calibration.questions import MODULES, Talk, Tokens, paragraphs
from mlx_kv.generation.encoding import encode_prompt

COUNT = 26  # texts of `LENGTHS` tokens
LENGTHS = (600, 1100)
SINGLE = 1000  # tokens of the one text that budgets alone are measured on
MIN_TOKENS = 64  # of a text
KINDS = ("prose", "code", "facts", "chat", "docs")
MIN_FILE_BYTES, MIN_DOCUMENTATION = 6000, 6000  # of files that texts are taken from
MIN_DOCSTRING = 150
LEFT_OUT = {"pydoc_data", "test", "tests", "idlelib", "lib2to3", "site-packages", "encodings", "turtledemo"}
MAX_FILES = 60  # of a user's directory
MAX_FILE_BYTES = 2**20  # read of each file
PASSAGES = Path(__file__).parent / "passages.txt"
BETWEEN_PASSAGES = "\n===\n"

# Facts and turns of chats, in several languages, that are put between other texts.
NAMES = "Ivan Nora Oscar Paula Rita Stefan Tina Victor Wanda Yara Bruno Clara Felix Greta Hugo Ines".split()
THINGS = "ladder kettle violet hammer lantern carpet mirror ribbon turtle walnut barrel anchor compass blanket".split()
TOWNS = "Porto Turin Lyon Hamburg Krakow Seville Geneva Bergen Tampere Osaka Manila Jakarta Austin Perth".split()
CODES = "KX-41 BR-77 TL-09 QZ-58 MV-63 HD-26 WN-14 PF-90 CJ-35 SG-82".split()

Fact = Callable[[random.Random], str]

FACTS: tuple[Fact, ...] = (
    lambda r: f"{r.choice(NAMES)} moved to {r.choice(TOWNS)} in {r.randint(1900, 2020)}.",
    lambda r: f"The {r.choice(THINGS)} of {r.choice(NAMES)} is in {r.choice(TOWNS)}.",
    lambda r: f"{r.choice(NAMES)} bought a {r.choice(THINGS)} for {r.randint(2, 900)} dollars.",
    lambda r: f"The parcel {r.choice(CODES)} weighs {r.randint(2, 80)} kilograms and belongs to {r.choice(NAMES)}.",
    lambda r: f"The train to {r.choice(TOWNS)} leaves from platform {r.randint(1, 24)} at {r.randint(5, 22)}:40.",
    lambda r: f"{r.choice(NAMES)} is {r.randint(19, 80)} years old and repairs every {r.choice(THINGS)}.",
    lambda r: f"{r.choice(NAMES)} wohnt seit {r.randint(1960, 2020)} in {r.choice(TOWNS)}.",
    lambda r: f"{r.choice(NAMES)} a payé {r.randint(3, 400)} euros pour le colis {r.choice(CODES)}.",
    lambda r: f"{r.choice(NAMES)} trabaja en {r.choice(TOWNS)} y tiene {r.randint(2, 9)} hermanos.",
    lambda r: f"{r.choice(NAMES)}的房间号是{r.randint(101, 999)}，明天去{r.choice(TOWNS)}。",  # noqa: RUF001
)
TURNS = (
    *("Tell me more.", "And then?", "What else is there?", "Please go on.", "Interesting. What happened next?"),
    *("Erzähl bitte weiter.", "Et ensuite ?", "¿Y qué más?", "请继续。", "Could you explain that in more detail?"),
)
THANKS = (
    *("Thank you, I have noted it.", "Noted.", "Danke, das habe ich notiert.", "Merci, c'est noté."),
    "好的，记住了。",  # noqa: RUF001
)
INSTRUCTIONS = (
    *("Read the following text.\n\n", "Here is a document. I will have questions about it later.\n\n"),
    *("Bitte lies den folgenden Text.\n\n", "Voici un texte à lire.\n\n"),
)


def default_texts(tokenizer: Any, positions: int | None = None, count: int = COUNT) -> list[Tokens]:
    """Texts of 600 to 1,100 tokens; the same ones for the same tokenizer and Python.

    Longer ones cost more and change nothing: with five texts of 3,000 tokens more, SmolLM2-135M answers as much of
    contexts of 2,048 and 4,096 tokens.

    Args:
        positions: of the model; a text takes at most half of them, since it is read twice.
        count: number of texts.

    Raises:
        ValueError: the tokenizer cannot encode them.
    """
    writer = _Writer(tokenizer)
    max_tokens = LENGTHS[1] if positions is None else max(MIN_TOKENS, positions // 2 - MIN_TOKENS)
    return [writer.text(KINDS[i % len(KINDS)], min(writer.random.randint(*LENGTHS), max_tokens)) for i in range(count)]


def single_text(tokenizer: Any, positions: int | None = None) -> list[Tokens]:
    """The text that budgets alone are measured on, in a list: documentation with facts in it.

    Raises:
        ValueError: as `default_texts`.
    """
    max_tokens = SINGLE if positions is None else max(MIN_TOKENS, positions // 2 - MIN_TOKENS)
    return [_Writer(tokenizer).text("facts", min(SINGLE, max_tokens))]


def texts_in(folder: Path, tokenizer: Any, positions: int | None = None) -> tuple[list[Tokens], list[str]]:
    """Texts of the files in a directory, and the files that were left out.

    One text per file, of at most 1,000 tokens, or several where there are few files. Hidden files are skipped.

    Args:
        positions: as for `default_texts`.

    Returns:
        The texts, and a line for each file that is not UTF-8 text or is too short.

    Raises:
        ValueError: no file has enough.
    """
    length = SINGLE if positions is None else min(SINGLE, max(MIN_TOKENS, positions // 2 - MIN_TOKENS))
    files, left_out = [], []
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        try:
            tokens = encode_prompt(tokenizer, path.read_bytes()[:MAX_FILE_BYTES].decode("utf-8", "strict"))
        except (OSError, ValueError):
            left_out.append(f"{path} is no UTF-8 text that can be read")
            continue
        if len(tokens) < MIN_TOKENS:
            left_out.append(f"{path} has {len(tokens)} tokens, of at least {MIN_TOKENS}")
            continue
        files.append(tokens)
    found: list[Tokens] = []
    while files and (len(found) < COUNT):
        for index, tokens in enumerate(files[: MAX_FILES - len(found)]):
            found.append(tokens[:length])
            files[index] = tokens[length:]
        files = [tokens for tokens in files if len(tokens) >= MIN_TOKENS]
    if not found:
        raise ValueError(f"{folder} has no file with {MIN_TOKENS} tokens of UTF-8 text: give a directory of text files")
    return found, left_out


class _Writer:
    """Makes texts of distinct files, so that whole files are held out."""

    def __init__(self, tokenizer: Any, seed: int = 5) -> None:
        self.random = random.Random(seed)
        self._talk = Talk(tokenizer)
        if not self._talk.encodes_english():
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
        self._code = self._shuffled(path for path in files if path.stat().st_size > MIN_FILE_BYTES)
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
        """At most n tokens of a kind."""
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
        """About n tokens or more, from the beginning of a line."""
        first = self.random.randrange(max(1, len(text) - 8 * n))
        return text[text.find("\n", first) + 1 if first else 0 :][: 8 * n]

    def _documentation(self) -> str:
        return next(text for text in map(_docstrings, self._documented) if len(text) > MIN_DOCUMENTATION)

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
    return "\n\n".join(text for text in found if text and len(text) > MIN_DOCSTRING)


def fact(r: random.Random) -> str:
    """A sentence that cannot be derived from the rest of a text."""
    return r.choice(FACTS)(r)
