"""A tokenizer for tests: a token a character, and if wanted, chats."""

from __future__ import annotations

from typing import Any

KNOWN = "\n" + "".join(chr(number) for number in range(32, 127) if chr(number) not in "^~")  # 94: tiny models know 96


class Characters:
    """Tokens from 2 up; characters that are not known are question marks.

    Args:
        chat_template: whether there is one is all that matters.
    """

    bos_token_id = 1

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [2 + KNOWN.index(letter if letter in KNOWN else "?") for letter in text]

    def decode(self, tokens: Any) -> str:
        return "".join(KNOWN[token - 2] for token in tokens if token >= 2)

    def apply_chat_template(
        self, messages: Any, tokenize: bool, add_generation_prompt: bool, continue_final_message: bool
    ) -> str:
        said = "".join(f"[{each['role']}]{each['content']}[end]" for each in messages)
        return f"[be kind]{said}[assistant]"
