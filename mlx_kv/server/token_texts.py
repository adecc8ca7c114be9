"""The text and the bytes of single tokens, for those who look at each.

Decides what is said of a token that is a part of a character: its bytes are right, its text has a stand-in. Knows
nothing about answers or their objects. Tokenizers write such tokens in two ways: as characters that stand for bytes
each (GPT-2's table), or as <0xE4>; and a space before a word as one that a lone token loses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from mlx_kv.generation.logprobs import TokenScore

ONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"
LEAST_LOGPROB = -9999.0  # OpenAI's number for what cannot be; JSON has no infinity


@dataclass(frozen=True)
class TokenText:
    """One token as it is told.

    Attributes:
        top: the likeliest tokens at its place.
    """

    token: int
    text: str
    data: bytes
    logprob: float
    top: tuple[TokenText, ...] = ()


class TokenTexts:
    """Of one tokenizer; what was looked up is kept."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes = {char: value for value, char in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
        self._known: dict[int, tuple[str, bytes]] = {}

    def of(self, scores: Sequence[tuple[int, TokenScore]]) -> list[TokenText]:
        """Tokens with what is told of them."""
        return [
            self._one(token, score.logprob, tuple(self._one(other, value) for other, value in score.top))
            for token, score in scores
        ]

    def _one(self, token: int, logprob: float, top: tuple[TokenText, ...] = ()) -> TokenText:
        if token not in self._known:
            self._known[token] = self._looked_up(token)
        text, data = self._known[token]
        told = logprob if logprob >= LEAST_LOGPROB else LEAST_LOGPROB  # what is no number is told as what cannot be
        return TokenText(token, text, data, told, top)

    def _looked_up(self, token: int) -> tuple[str, bytes]:
        written = self._tokenizer.convert_ids_to_tokens(token)
        written = written if isinstance(written, str) else ""  # models have more tokens than tokenizers name
        text: str = self._tokenizer.decode([token])
        if byte := ONE_BYTE.fullmatch(written):
            return text, bytes([int(byte[1], 16)])
        if written.startswith(SPACE) and not text.startswith(" "):
            text = " " + text
        if "\ufffd" in text and all(char in self._bytes for char in written):
            return text, bytes(self._bytes[char] for char in written)
        return text, text.encode("utf-8", "replace")
