"""A conversation: its turns, and the tokens that its caches have read.

The next turn reuses all of the caches if the chat template continues the text so far, else the common prefix, and
nothing if the caches cannot be trimmed to it. The model has always read the tokens of the whole conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import mlx.nn as nn

from mlx_kv.communicator import Steps
from mlx_kv.generation.encoding import (
    DEFAULT_CHAT,
    ChatSettings,
    apply_template,
    encode_messages,
    encode_prompt,
    has_chats,
)
from mlx_kv.generation.engine import Engine
from mlx_kv.generation.images import ImagePrompt, encode_images, has_images
from mlx_kv.generation.sampling import Sampler
from mlx_kv.generation.sequence import BatchToken, TokenSequence, common_prefix
from mlx_kv.generation.settings import LogitsProcessor
from mlx_kv.generation.thinking import ThinkingLimit
from mlx_kv.mlxlm.traverse import attention_caches

Message = dict[str, Any]
Draws = Callable[[int], Sampler | None]  # what draws the tokens of a sequence, from a position on


@dataclass
class Turn:
    """A question and its answer.

    Attributes:
        tokens: of the conversation up to here, as far as they were generated or read.
        prompt_tokens, reused, answer_tokens: of the prompt, those of it that had been read before, and of the answer.
        finish_reason: "stop", "length", or "interrupted".
        images: contents of their files, which come before the question.
    """

    question: str
    answer: str
    tokens: list[int]
    prompt_tokens: int
    reused: int
    answer_tokens: int
    finish_reason: str
    images: tuple[bytes, ...] = ()


def _message(question: str, images: Sequence[bytes]) -> Message:
    parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": question}]
    return {"role": "user", "content": parts if images else question}


@dataclass
class Read:
    """Caches, and the tokens that they have read."""

    caches: list[Any] | None = None
    tokens: list[int] = field(default_factory=list)


class Conversation:
    """Turns of a user and a model.

    Args:
        engine: for this conversation alone; made with `return_caches`.
        settings: of the chat; the beginning of an answer is none of them.
        model: the engine's, for images; None reads none.

    Attributes:
        turns: so far.

    Raises:
        ValueError: settings of a chat, and a model that has no chat template.
    """

    def __init__(
        self, engine: Engine, tokenizer: Any, settings: ChatSettings = DEFAULT_CHAT, model: nn.Module | None = None
    ) -> None:
        self.engine, self.settings, self._tokenizer, self._model = engine, settings, tokenizer, model
        self._chats = has_chats(tokenizer)
        if settings and not self._chats:
            raise ValueError("a system prompt and settings of a chat template need one, and this model has none")
        self.turns: list[Turn] = []
        self._read = Read()
        self._numbers = count()

    # --- what was said --------------------------------------------------------------------------------------------

    @property
    def messages(self) -> list[Message]:
        """The conversation, in the form that chat templates take."""
        messages = [] if self.settings.system is None else [{"role": "system", "content": self.settings.system}]
        for turn in self.turns:
            messages += [_message(turn.question, turn.images), {"role": "assistant", "content": turn.answer}]
        return messages

    @property
    def tokens(self) -> list[int]:
        """Of the conversation so far."""
        return self.turns[-1].tokens if self.turns else []

    @property
    def caches(self) -> list[Any] | None:
        """What was read is kept in these; None where nothing is."""
        return self._read.caches

    @property
    def read(self) -> list[int]:
        """The tokens that the caches have read."""
        return list(self._read.tokens)

    def go_on_from(
        self,
        turns: Sequence[Turn],
        system: str | None,
        caches: list[Any] | None = None,
        read: Sequence[int] = (),
    ) -> None:
        """Takes the place of all that was said.

        Args:
            system: the message before all others.
            caches: which have read these tokens; None reads them again with the next turn.
        """
        self.turns, self.settings = list(turns), replace(self.settings, system=system)
        self._read = Read(caches, list(read)) if caches is not None else Read()

    def undo(self) -> bool:
        """Takes the last turn back, and says whether the caches could; where not, the next turn reads all again.

        Raises:
            ValueError: there is none.
        """
        if not self.turns:
            raise ValueError("the conversation has no turns: there is nothing to remove")
        self.turns.pop()
        return self._go_back(self.tokens)

    def check_image(self, image: bytes) -> None:
        """Raises ValueError for an image that the next question cannot have, or a model that reads none."""
        self._encode_images([_message("?", [image])])

    def prompt_of(self, question: str, images: Sequence[bytes] = ()) -> ImagePrompt:
        """The conversation with another question, up to where its answer begins.

        Args:
            images: as of `Turn`.
        """
        messages = [*self.messages, _message(question, images)]
        if has_images(messages):
            return self._encode_images(messages)
        if self._chats:
            known = self._continued(messages)
            return ImagePrompt(known or encode_messages(self._tokenizer, messages, **self.settings.template))
        line = f"{question}\n"  # of one text
        if not self.turns:
            return ImagePrompt(encode_prompt(self._tokenizer, line))
        return ImagePrompt([*self.tokens, *self._tokenizer.encode(f"\n{line}", add_special_tokens=False)])

    def _encode_images(self, messages: list[Message]) -> ImagePrompt:
        if self._model is None:
            raise ValueError("this conversation has no images: leave them out")
        return encode_images(self._model, self._tokenizer, messages, **self.settings.template)

    def _continued(self, messages: list[Message]) -> list[int] | None:
        """The tokens that were said, and then those of what the template puts after them; None where it changes them.

        What a model writes it may write in other tokens than a tokenizer would: these stay as they are.
        """
        if not self.tokens:
            return None
        template, last = self.settings.template, self.turns[-1]
        before: str = apply_template(self._tokenizer, messages[:-2], False, **template)
        whole: str = apply_template(self._tokenizer, messages, False, **template)
        text = before + last.answer
        if not whole.startswith(text):
            return None
        known, rest = last.tokens, self._tokenizer.encode(whole[len(text) :], add_special_tokens=False)
        if known[-1] in self._tokenizer.eos_token_ids:
            if not rest or rest[0] != known[-1]:  # the template ends an answer in another way
                return None
            rest = rest[1:]
        return [*known, *rest] if rest else None

    # --- an answer ------------------------------------------------------------------------------------------------

    def ask(
        self,
        question: str,
        max_tokens: int,
        draws: Draws = lambda position: None,
        processors: Sequence[LogitsProcessor] = (),
        ended: Callable[[], bool] = lambda: False,
        images: Sequence[bytes] = (),
    ) -> Steps[BatchToken]:
        """The tokens of an answer as they come; where the caller stops asking for them, the answer ends.

        A turn that ends before its first token is none: then all is as before, but may have to be read again.

        Args:
            draws: what draws the tokens of a sequence, from a position on.
            processors: of logits, as in `TokenSequence`: they are shown the whole conversation.
            ended: whether the answer ends; called after each step of the engine, those that read the prompt among them.
            images: as of `Turn`.

        Raises:
            ValueError: what cannot be continued; nothing has changed then.
        """
        encoded = self.prompt_of(question, images)
        prompt = encoded.tokens
        if not prompt:
            raise ValueError("the prompt is empty: give a question")
        self._go_back(prompt[:-1])
        reused = len(self._read.tokens)
        number, caches = next(self._numbers), self._read.caches
        detokenizer = self._tokenizer.detokenizer
        sequence = TokenSequence(
            number, prompt[reused:], max_tokens, detokenizer, draws(len(prompt)), caches, prompt[:reused]
        )
        limit = ThinkingLimit.after(self._tokenizer, prompt, self.settings)
        sequence.processors = (*processors, *(() if limit is None else (limit,)))
        sequence.images = encoded.images
        self.engine.submit(sequence)
        self._read = Read()  # the engine has them now
        received: list[BatchToken] = []
        finish = "interrupted"
        try:
            while finish == "interrupted" and not ended():
                for token in self.engine.step():
                    received.append(token)
                    finish = token.finish_reason or finish
                    yield token
        finally:
            caches = received[-1].caches if finish != "interrupted" else self.engine.extract(number)
            self.engine.cancel(number)
            known = [*prompt, *(token.token for token in received)]
            answer = "".join(token.text for token in received)
            if received:
                counts = len(prompt), reused, len(received)
                self.turns.append(Turn(question, answer, known, *counts, finish, tuple(images)))
            else:
                known = prompt[: common_prefix(prompt, self.tokens)]
            self._keep(caches, known)

    def _keep(self, caches: list[Any] | None, known: list[int]) -> None:
        """Keeps caches that have read these tokens, or more, where a draft was right beyond the end."""
        read = max((int(cache.offset) for cache in attention_caches(caches or [])), default=0)
        if caches is not None and read and self.engine.trim(caches, max(0, read - len(known))):
            self._read = Read(caches, known[:read])

    def _go_back(self, tokens: Sequence[int]) -> bool:
        """Keeps of what was read what these tokens begin with; says whether the caches could."""
        same = common_prefix(self._read.tokens, list(tokens))
        caches, beyond = self._read.caches, len(self._read.tokens) - same
        if caches is not None and same and self.engine.trim(caches, beyond):
            self._read = Read(caches, self._read.tokens[:same])
            return True
        self._read = Read()
        return caches is None or not same
