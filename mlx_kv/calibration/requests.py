"""What a head that drafts is trained on: texts to read, and requests whose answers the model writes itself.

Each is drawn with a number, so that a training that was interrupted goes on with the same ones. Texts are code and
documentation that come with Python and NumPy, and the passages of this package; requests are chats about them and about
everyday topics, and beginnings of such texts.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from mlx_kv.calibration.texts import (
    BETWEEN_PASSAGES,
    LEFT_OUT,
    MIN_TOKENS,
    MODULES,
    PASSAGES,
    Tokens,
    docstrings,
    paragraphs,
    read_source,
)
from mlx_kv.generation.encoding import apply_template

MIN_FILE_BYTES = 3000
CHARACTERS = 8  # of a token, at the most that is usual
TOPICS = (
    "the moon;photosynthesis;a healthy breakfast;the French Revolution;machine learning;good sleep;black holes;bees;"
    "a sailing boat;the stock market;volcanoes;the human heart;chess;recycling;electric cars;the Roman Empire;a lost "
    "key;public libraries;vaccines;the ocean;coffee;time zones;solar panels;friendship;a small village;the piano;"
    "databases;unit tests;a binary search;climate change;bread;the immune system;inflation;dreams;train travel;an old "
    "lighthouse;gardening;the internet;encryption;a job interview;meditation;rainbows;dinosaurs;the English language;"
    "sorting algorithms;a birthday party;money;running;earthquakes;the water cycle;a good teacher;mountains;email;"
    "recursion;cats;the city of Paris;winter;robots;books;a balanced diet;space travel;music;the brain;honesty;"
    "glaciers;painting;a river;open source software;the number zero;football;history;teamwork;clouds;magnets;tea"
).split(";")
QUESTIONS = (
    *("What is {}?", "Explain {} to a beginner.", "Write a short paragraph about {}.", "What should I know about {}?"),
    *("How would you describe {}?", "Give me three examples that have to do with {}.", "Write a poem about {}."),
    *("List five facts about {}.", "Compare {} and {}.", "Write an email to a friend about {}.", "Why does {} matter?"),
    *("How can I learn more about {}?", "Tell me a story about {} and {}.", "Give me some tips about {}."),
    "What do {} and {} have in common?",
)
ABOUT_TEXTS = (
    *("Summarise this text in two sentences:\n\n{}", "Write this text more simply:\n\n{}"),
    *("Which names, numbers and places does this text mention?\n\n{}", "Translate this text into French:\n\n{}"),
    *("What is the main idea of this text?\n\n{}", "Ask three questions about this text:\n\n{}"),
)
ABOUT_CODE = (
    *("Write a Python function `{}`. {}", "Write Python code: {1} Call the function {0}."),
    *("Show how `{}` could be written in Python. {}", "Write unit tests for a Python function `{}`. {}"),
)


class TrainingTexts:
    """Draws texts and requests.

    Args:
        tokenizer: of the model; without a chat template, requests are beginnings of texts.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._chats = getattr(tokenizer, "chat_template", None) is not None
        self._files: list[Path] = []
        for folder in (Path(sysconfig.get_paths()["stdlib"]), Path(np.__file__).parent):
            for path in sorted(folder.rglob("*.py")):
                excluded = path.stem in MODULES or LEFT_OUT & {*path.relative_to(folder).parts}
                if not excluded and path.stat().st_size > MIN_FILE_BYTES:
                    self._files.append(path)
        self._passages = PASSAGES.read_text(encoding="utf-8").strip().split(BETWEEN_PASSAGES)

    def text(self, number: int, length: int) -> Tokens:
        """A text to read, of `MIN_TOKENS` to `length` tokens."""
        drawn = random.Random(f"text {number}")
        while True:
            kind, characters = drawn.choice(("code", "docs", "prose")), CHARACTERS * length
            if kind == "code":
                text = self._code(drawn, characters)
            elif kind == "docs":
                text = docstrings(drawn.choice(self._files))[:characters]
            else:
                text = "\n".join(self._prose(drawn) for _ in range(6))[:characters]
            if len(tokens := self._encode(text)) >= MIN_TOKENS:
                return tokens[:length]

    def request(self, number: int) -> Tokens:
        """A prompt."""
        drawn = random.Random(f"request {number}")
        kind = drawn.random() if self._chats else 0.0
        if kind < 0.12:
            return self._encode(self._code(drawn, 600))[: drawn.randint(30, 150)] or self.request(number + 1)
        if kind < 0.2:
            return self._encode(" ".join(self._prose(drawn).split()[:60]))
        if kind < 0.55:
            message = drawn.choice(QUESTIONS).format(*drawn.sample(TOPICS, 2))
        elif kind < 0.75:
            message = drawn.choice(ABOUT_TEXTS).format(" ".join(self._prose(drawn).split()[:120]))
        else:
            message = drawn.choice(ABOUT_CODE).format(*self._function(drawn))
        return self._encode(apply_template(self._tokenizer, [{"role": "user", "content": message}], False))

    def _encode(self, text: str) -> Tokens:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _code(self, drawn: random.Random, characters: int) -> str:
        text = read_source(drawn.choice(self._files))
        first = drawn.randrange(max(1, len(text) - characters))
        return text[text.find("\n", first) + 1 if first else 0 :][:characters]

    def _prose(self, drawn: random.Random) -> str:
        """A paragraph."""
        if drawn.random() < 0.3:
            return drawn.choice(drawn.choice(self._passages).splitlines())
        while not (lines := paragraphs(docstrings(drawn.choice(self._files)))):
            pass
        return drawn.choice(lines)

    def _function(self, drawn: random.Random) -> tuple[str, str]:
        """The name of a function and the beginning of its docstring."""
        while True:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    tree = ast.parse(read_source(drawn.choice(self._files)))
                except (SyntaxError, ValueError, RecursionError):
                    continue
            described = [
                (node.name, " ".join(text.partition("\n\n")[0].split()))
                for node in ast.walk(tree)
                if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node))
            ]
            if described:
                return drawn.choice(described)
