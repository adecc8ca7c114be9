"""Texts as token ids: those that a model is calibrated on, and questions about facts in prose, for its report.

Calibration reads code and documentation that come with Python and NumPy, and the passages, facts and chats of this
package. They share no text with the questions, whose prose is the reference that comes with Python, nor with
`benchmarks/eval`.

Facts are never among the last `keep_recent` tokens of a context, nor among the first ones, which are those of the chat
and of the instruction. The wording was chosen so that SmolLM2-135M-Instruct gives nine of ten answers right with all of
a context in its cache.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mlx_kv.generation.encoding import apply_template, encode_prompt

Tokens = list[int]

MARKS = ("<first>", "<second>", "<third>")  # in place of the messages, to find what a chat template puts between them


# --- chats ------------------------------------------------------------------------------------------------------------


class Talk:
    """Encodes the turns of a chat; without a chat template, as questions and answers in a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        bos = getattr(tokenizer, "bos_token_id", None)
        self._start = [] if bos is None else [bos]
        self._before, self._answer, self._again = "", "\nAnswer:", "\n\nQuestion: "
        if getattr(tokenizer, "chat_template", None) is not None:
            self._start = []
            roles = ("user", "assistant", "user")
            messages = [{"role": role, "content": mark} for role, mark in zip(roles, MARKS, strict=True)]
            text: str = apply_template(tokenizer, messages, False)
            self._before, _, text = text.partition(MARKS[0])
            self._answer, _, text = text.partition(MARKS[1])
            self._again, _, _ = text.partition(MARKS[2])

    def encode(self, text: str) -> Tokens:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Tokens) -> str:
        text: str = self._tokenizer.decode(tokens)
        return text

    def encodes_english(self) -> bool:
        """Whether a sentence is the same after it was encoded and decoded, but for white space."""
        sample = "The number 1234 is here, print(x)."
        return "".join(self.decode(self.encode(sample)).split()) == "".join(sample.split())

    def beginning(self, instruction: str) -> Tokens:
        """The beginning of a user's message."""
        return self._start + self.encode(self._before + instruction)

    def exchange(self, message: str, answer: str) -> Tokens:
        """The rest of a user's message, the assistant's answer, and the beginning of the next message."""
        return self.encode(message + self._answer) + self.encode(answer + self._again)

    def question(self, text: str, first: bool) -> Tokens:
        """A question at the end of the first message, or as a message of its own; up to where the answer begins."""
        return self.encode(("\n\n" if first else self._again) + text + self._answer)


def take(units: Iterable[Tokens], length: int) -> list[Tokens]:
    """The first units of `length` tokens in all, the last one cut.

    Raises:
        ValueError: there are fewer tokens.
    """
    chunks: list[Tokens] = []
    left = length
    for unit in units:
        if left <= 0:
            break
        chunks.append(unit[:left])
        left -= len(chunks[-1])
    if left > 0:
        raise ValueError(f"{length:,} tokens of text are needed, but {left:,} are missing: give a longer text")
    return chunks


def scatter(
    rng: np.random.Generator, filler: Iterator[Tokens], pieces: Sequence[Tokens], length: int, keep_recent: int
) -> Tokens:
    """`length` tokens: pieces, in their order, between units of filler but not in the last `keep_recent` tokens.

    Raises:
        ValueError: the pieces do not fit.
    """
    size = sum(map(len, pieces))
    if length - keep_recent - size < 0:
        raise ValueError(f"{size:,} tokens to be found do not fit into {length - keep_recent:,}: give a longer context")
    units = take(filler, length - size)
    starts = np.cumsum([0, *map(len, units)])[:-1]
    places = int((starts <= length - keep_recent - size).sum())
    before = np.sort(rng.integers(places, size=len(pieces))).tolist()
    text: Tokens = []
    for index, unit in enumerate(units):
        for place, piece in zip(before, pieces, strict=True):
            if place == index:
                text += piece
        text += unit
    return text


# --- prose ------------------------------------------------------------------------------------------------------------

MODULES = (
    *("textwrap", "shlex", "heapq", "bisect", "calendar", "glob", "posixpath", "genericpath", "random"),
    *("statistics", "copy", "fnmatch", "difflib", "inspect", "locale", "pprint", "shutil", "tempfile", "timeit"),
    *("mimetypes", "netrc", "quopri", "base64", "colorsys", "ast", "dis", "gettext", "getopt", "keyword", "linecache"),
)
SENTENCE_WORDS = 8  # minimum words of a paragraph of prose


def paragraphs(text: str) -> list[str]:
    """The paragraphs of prose, each in one line, without headings, tables and code, which are indented or short."""
    prose_lines = []
    for block in text.split("\n\n"):
        lines = block.strip("\n").splitlines()
        if lines and not any(line[:1].isspace() or line[:3] in ("***", "===", "---", "| -", "```") for line in lines):
            line = " ".join(" ".join(lines).split())
            if len(line.split()) >= SENTENCE_WORDS and not line.startswith(("|", "#", "-", "*")):
                prose_lines.append(line)
    return prose_lines


@cache
def python_prose() -> tuple[str, ...]:
    """Paragraphs of the reference that comes with this Python.

    Raises:
        ValueError: this Python comes without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError("this Python comes without its reference: give a text") from error
    return tuple(line for name in sorted(topics) for line in paragraphs(topics[name]))


# --- facts in prose ---------------------------------------------------------------------------------------------------

CITIES = (
    "Paris London Berlin Madrid Rome Vienna Prague Dublin Lisbon Athens Oslo Stockholm Helsinki Warsaw Budapest Moscow "
    "Tokyo Seoul Beijing Delhi Cairo Nairobi Sydney Toronto Chicago Boston Dallas Denver Seattle Havana Lima Quebec"
).split()
WORDS = (
    "apple river stone cloud table chair bread horse mountain garden window candle bridge forest island winter summer "
    "silver copper orange purple yellow guitar pencil basket rabbit tiger dragon castle rocket planet coffee"
).split()
PEOPLE = "Anna Peter Maria David Laura Thomas Sarah Daniel Emma Lucas Julia Simon Helen Martin Alice Robert".split()
# A statement, the question for it, and words to fill in. A context has at most one fact of a kind: a small model
# confuses several of them, even with all of the context in its cache.
FACTS = (
    ("lives in", "Where does {} live?", CITIES),
    ("has lost the", "What has {} lost?", WORDS),
    ("plays the", "What does {} play?", "piano guitar violin trumpet".split()),
    ("has the number", "Which number does {} have?", tuple(map(str, range(1000, 10000, 37)))),
    ("has painted a", "What has {} painted?", "dog cat horse snake bird spider wolf lion".split()),
    ("likes the colour", "Which colour does {} like?", "red blue green yellow orange white black".split()),
)


REMEMBER = "Read the text below. Somewhere in it stands something about people. Remember it.\n\n"


def prose(rng: np.random.Generator, talk: Talk, lines: Sequence[str]) -> Iterator[Tokens]:
    """Paragraphs in their order, from a random one, repeated without end."""
    first = int(rng.integers(len(lines)))
    for index in count(first):
        yield talk.encode(lines[index % len(lines)] + "\n")


class FactQuestions(NamedTuple):
    """A context with facts about people, and questions about them.

    Attributes:
        tokens: of the questions and their replies: a question, its reply, the next question, ...
        answers: the answer that each of these tokens belongs to, counted from 1; 0 is none.
    """

    context: Tokens
    tokens: Tokens
    answers: Tokens


def facts_about(rng: np.random.Generator, count: int) -> list[tuple[str, str, str, str]]:
    """`count` facts of different kinds about different people: name, statement, word, question."""
    names = rng.permutation(PEOPLE)[:count].tolist()
    kinds = [FACTS[i] for i in rng.permutation(count).tolist()]
    return [
        (name, verb, str(rng.choice(words)), question)
        for name, (verb, question, words) in zip(names, kinds, strict=True)
    ]


def fact_questions(rng: np.random.Generator, talk: Talk, length: int, keep_recent: int) -> FactQuestions:
    """A context of so many tokens with a fact of each kind, and a question for each."""
    facts = facts_about(rng, len(FACTS))
    questions = [facts[i] for i in rng.permutation(len(facts)).tolist()]
    beginning = talk.beginning(REMEMBER)
    pieces = [talk.encode(f"{name} {verb} {word}.\n") for name, verb, word, _ in facts]
    filler = prose(rng, talk, python_prose())
    context = beginning + scatter(rng, filler, pieces, length - len(beginning), keep_recent)
    tokens: Tokens = []
    answers: Tokens = []
    for number, (name, verb, word, question) in enumerate(questions, start=1):
        lead = talk.question(question.format(name), first=number == 1) + talk.encode(f"{name} {verb}")
        answer = talk.encode(f" {word}")
        tokens += lead + answer
        answers += [0] * len(lead) + [number] * len(answer)
    return FactQuestions(context, tokens, answers)


# --- texts of a calibration -------------------------------------------------------------------------------------------

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

SENTENCES: tuple[Callable[[random.Random], str], ...] = (
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
    texts: list[Tokens] = []
    while files and (len(texts) < COUNT):
        for index, tokens in enumerate(files[: MAX_FILES - len(texts)]):
            texts.append(tokens[:length])
            files[index] = tokens[length:]
        files = [tokens for tokens in files if len(tokens) >= MIN_TOKENS]
    if not texts:
        raise ValueError(f"{folder} has no file with {MIN_TOKENS} tokens of UTF-8 text: give a directory of text files")
    return texts, left_out


Item = TypeVar("Item")


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
        numpy = Path(np.__file__).parent  # a dependency, with long docstrings
        numpy_files = [path for path in numpy.rglob("*.py") if not LEFT_OUT & {*path.relative_to(numpy).parts}]
        self._code = self._shuffled(sorted(path for path in files if path.stat().st_size > MIN_FILE_BYTES))
        self._documented = self._shuffled(sorted([*files, *numpy_files]))
        self._passages = self._shuffled(PASSAGES.read_text(encoding="utf-8").strip().split(BETWEEN_PASSAGES))

    def _shuffled(self, items: list[Item]) -> Iterator[Item]:
        self.random.shuffle(items)
        return iter(items)

    def text(self, kind: str, n: int) -> Tokens:
        """At most n tokens of a kind."""
        if kind == "chat":
            return self._chat(n)
        instruction = self.random.choice(INSTRUCTIONS)
        ids = self._talk.beginning(instruction) if self.random.random() < 0.7 else []
        if kind == "prose":
            ids += self._with_facts(self._passage, n, 0, 3)
        elif kind == "facts":
            ids += self._with_facts(self._paragraphs, n, 3, 9)
        else:
            excerpts: Tokens = []
            while len(excerpts) < n:
                text = read_source(next(self._code)) if kind == "code" else self._documentation()
                excerpts += self._talk.encode(self._excerpt(text, n))
            ids += excerpts
        return ids[:n]

    def _passage(self) -> list[str]:
        """The lines of a passage of this package, or paragraphs of documentation once there are no more."""
        return (next(self._passages, None) or "\n".join(self._paragraphs())).splitlines()

    def _with_facts(self, more: Callable[[], list[str]], n: int, low: int, high: int) -> Tokens:
        """At least n tokens of lines, with `low` to `high` facts between them, more in longer texts."""
        lines: list[str] = []
        while len(self._talk.encode("\n".join(lines))) < n:
            lines += more()
        for _ in range(self.random.randint(low, high) * max(1, n // LENGTHS[1])):
            lines.insert(self.random.randrange(max(1, min(len(lines), 40))), self._fact())
        return self._talk.encode("\n".join(lines))

    def _fact(self) -> str:
        """A sentence that cannot be derived from the rest of a text."""
        return self.random.choice(SENTENCES)(self.random)

    def _chat(self, n: int) -> Tokens:
        ids = [*self._talk.beginning("Hello, I would like to talk."), *self._talk.exchange("", "Of course, go on.")]
        lines: list[str] = []
        while len(ids) < n:
            lines = lines or self._passage()
            if self.random.random() < 0.3:
                ids += self._talk.exchange(self._fact(), self.random.choice(THANKS))
            else:
                ids += self._talk.exchange(self.random.choice(TURNS), " ".join(lines.pop(0).split()[:60]))
        return ids[:n]

    def _excerpt(self, text: str, n: int) -> str:
        """About n tokens or more, from the beginning of a line."""
        first = self.random.randrange(max(1, len(text) - 8 * n))
        return text[text.find("\n", first) + 1 if first else 0 :][: 8 * n]

    def _documentation(self) -> str:
        return next(text for text in map(docstrings, self._documented) if len(text) > MIN_DOCUMENTATION)

    def _paragraphs(self) -> list[str]:
        return next(lines for lines in (paragraphs(self._documentation()) for _ in range(1000)) if len(lines) > 5)


def read_source(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


@cache
def docstrings(path: Path) -> str:
    """The long docstrings of a module; "" if it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(read_source(path))
    except (SyntaxError, ValueError, RecursionError):
        return ""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)]
    docstrings = [ast.get_docstring(node) for node in nodes]
    return "\n\n".join(text for text in docstrings if text and len(text) > MIN_DOCSTRING)
