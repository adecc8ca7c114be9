"""Drafters that look up text: what followed the same tokens before is proposed again, without a pass of any model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from mlx_kv.generation.speculation.acceptance import Choice
from mlx_kv.generation.speculation.drafters.protocol import Drafter, DrafterContext


class Text:
    """What a row has said so far, prompt and answer. Abstract: a drafter says how it finds what may come next.

    Attributes:
        private: whether it is for its own row alone.
    """

    private = False

    @abstractmethod
    def extend(self, tokens: Sequence[int]) -> None:
        """It goes on with these."""

    @abstractmethod
    def continuation(self, most: int) -> list[int]:
        """What may come next, up to `most` tokens."""

    def ended(self) -> None:
        """Its row was let go; not said of one that is private."""


class LookupDrafter(Drafter):
    """A text for each row. Abstract: a drafter says what a new text is.

    Raises:
        ValueError: a draft model.
    """

    name: ClassVar[str]
    proposals_cost = False

    def __init__(self, context: DrafterContext) -> None:
        if context.draft_model is not None:
            raise ValueError(f"the drafter {self.name} drafts without a model: leave out draft_model, or the drafter")
        self.context = context
        self._texts: list[Text] = []

    @abstractmethod
    def new_text(self, prompt: Sequence[int]) -> Text:
        """The text of a row that begins with a prompt."""

    def join(self, prompts: Sequence[Sequence[int]], caches: list[Any]) -> None:
        self._texts += [self.new_text(prompt) for prompt in prompts]

    def keep(self, rows: Sequence[int]) -> None:
        for row in set(range(len(self._texts))).difference(rows):
            if not self._texts[row].private:
                self._texts[row].ended()
        self._texts = [self._texts[row] for row in rows]

    def keep_private(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._texts[row].private = True

    def propose(self, most: int, choice: Choice) -> list[list[int]]:
        return [text.continuation(most) for text in self._texts]

    def accepted(self, tokens: Sequence[Sequence[int]]) -> None:
        for text, got in zip(self._texts, tokens, strict=True):
            text.extend(got)


def continued(text: Sequence[int], start: int, count: int) -> list[int]:
    """`count` tokens of a text from one of its places on; past its end, those that were just said come again."""
    said = list(text[start : start + count])
    while 0 < len(said) < count:
        said += said[: count - len(said)]
    return said
