"""Token ids of prompts: of texts, and of chats by mlx-lm's tokenizer and its chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_kv.cache.checks import token_ids
from mlx_kv.cache.layout import PLACES
from mlx_kv.settings import shown

NO_CHAT = (
    "this model has no chat template, so no place for a system prompt, the beginning of an answer, or settings "
    "of a template: write them into the prompt"
)
# Arguments of apply_chat_template that are not for the template, or that are set here.
NOT_FOR_TEMPLATES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)
QUERY = "<query>"  # stands for a text that is still to come, in a chat template


class TemplateError(ValueError):
    """A chat template has raised something, and what."""


def check_template_settings(settings: Iterable[str]) -> None:
    """Raises ValueError for names that are no settings of a chat template."""
    if reserved := NOT_FOR_TEMPLATES.intersection(settings):
        raise ValueError(f"{min(reserved)} is not a setting of a chat template: leave it out")


@dataclass(frozen=True)
class ChatSettings:
    """What stands around what a user says in a chat.

    Attributes:
        system: the message before all others; None is what the template has.
        beginning: of the answer, which goes on from there.
        template: for the chat template, by the names that it has for them.
        thinking_budget: tokens of thinking before the answer; None is no limit, and a model that does not think needs
            none.
        thinking_closing: text that comes where the limit ends thinking, before the model's mark.

    Raises:
        ValueError: a name that is none of a template's.
    """

    system: str | None = None
    beginning: str | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    thinking_budget: int | None = None
    thinking_closing: str = ""

    def __post_init__(self) -> None:
        check_template_settings(self.template)

    def __bool__(self) -> bool:
        return self != ChatSettings()

    def messages(self, text: str) -> list[dict[str, Any]]:
        """A chat of one question, up to where its answer goes on."""
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        after = [] if self.beginning is None else [{"role": "assistant", "content": self.beginning}]
        return [*before, {"role": "user", "content": text}, *after]


DEFAULT_CHAT = ChatSettings()


def wrap_tokenizer(tokenizer: Any) -> Any:
    """A tokenizer as mlx-lm's loops take it: with a detokenizer, and the ids that end a text.

    Raises:
        TypeError: something else than a tokenizer.
    """
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    if isinstance(tokenizer, TokenizerWrapper):
        return tokenizer
    if not all(hasattr(tokenizer, name) for name in ("encode", "decode", "eos_token_id")):
        raise TypeError(f"tokenizer is {shown(tokenizer)}: give a tokenizer, as mlx_kv.load returns it")
    return TokenizerWrapper(tokenizer)


def encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a text, by mlx-lm's rule: special tokens are added unless the text begins with one.

    Raises:
        ValueError: a text with half of a surrogate pair.
    """
    bos = tokenizer.bos_token
    return _encode(tokenizer, prompt, bos is None or not prompt.startswith(bos))


def _encode(tokenizer: Any, text: str, special: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the prompt has {text[error.start]!r}, half of a surrogate pair, at character {error.start}: leave it out"
        ) from None
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special)
    return ids


def tokens_of_prompt(tokenizer: Any, prompt: Any, vocabulary: int, what: str = "the prompt") -> list[int]:
    """Token ids of a prompt: of a text, as `encode_prompt` says, of a prompt with images, or those that were given.

    Args:
        vocabulary: how many tokens the model has.
        what: it is, for messages.

    Raises:
        ValueError: there are none, or not all of them are token ids of the model.
    """
    if isinstance(prompt, str) and tokenizer is None:
        raise ValueError(f"{what} is a text, but there is no tokenizer: give one, or token ids")
    tokens = given_ids(encode_prompt(tokenizer, prompt) if isinstance(prompt, str) else prompt, vocabulary, what)
    if not tokens:
        raise ValueError(f"{what} is empty: give at least one token")
    return tokens


def given_ids(prompt: Any, vocabulary: int, what: str) -> list[int]:
    """Token ids that were given, by themselves or as a prompt with images.

    Raises:
        ValueError: not all of them are token ids of the model.
        TypeError: they are none.
    """
    if not hasattr(prompt, "images"):  # of an `ImagePrompt`
        return token_ids(prompt, vocabulary, what)
    token_ids([token for token in prompt.tokens if token < PLACES], vocabulary, what)
    return list(prompt.tokens)


def apply_template(
    tokenizer: Any, messages: list[dict[str, Any]], tokenize: bool, continues: bool = False, /, **template: Any
) -> Any:
    """What a chat template makes of a chat, up to where its answer begins, or with `continues` goes on from the last.

    Args:
        tokenize: as token ids, not as a text.
        template: for the chat template.

    Raises:
        TemplateError: templates are programs of others, and raise what they like.
    """
    where = {"add_generation_prompt": not continues, "continue_final_message": continues}
    try:
        return tokenizer.apply_chat_template(messages, tokenize=tokenize, **where, **template)
    except Exception as error:
        what = " ".join(f"the chat template refuses these messages: {type(error).__name__}: {error}".split())
        raise TemplateError(what[:500]) from error


def encode_messages(
    tokenizer: Any, messages: list[dict[str, Any]], continues: bool = False, /, **template: Any
) -> list[int]:
    """Token ids of a chat, as `apply_template` makes them."""
    return [int(token) for token in apply_template(tokenizer, messages, True, continues, **template)]


def begins_reasoning(tokenizer: Any, prompt: Sequence[int], beginning: str = "") -> bool | None:
    """Whether the answer to a chat begins within reasoning; None if the template has ended it, so that there is none.

    Marks of reasoning may stand in any message. Those count that end the prompt, since the template wrote them there,
    and those in the beginning of an answer that is continued.

    Args:
        prompt: token ids.
        beginning: of the answer, at the end of the prompt.
    """
    if not tokenizer.has_thinking:
        return False
    if beginning.rfind(tokenizer.think_start) > beginning.rfind(tokenizer.think_end):
        return True
    end = len(prompt)
    while end > 0 and not tokenizer.decode([prompt[end - 1]]).strip():  # white space behind a mark
        end -= 1
    for mark, begins in ((tokenizer.think_start_tokens, True), (tokenizer.think_end_tokens, None)):
        if tuple(prompt[max(0, end - len(mark)) : end]) == tuple(mark):
            return begins
    return False


def has_chats(tokenizer: Any) -> bool:
    """Whether there is a chat template: the tokenizer's, one that mlx-lm has for it, or one that was set later."""
    return bool(tokenizer.has_chat_template) or tokenizer.chat_template is not None


def speaks_chat(tokenizer: Any, plain: bool) -> bool:
    """Whether a text becomes a message of a chat: where the model knows chats, unless it is wanted plain."""
    return has_chats(tokenizer) and not plain


def encode_text(tokenizer: Any, text: str, plain: bool = False, settings: ChatSettings = DEFAULT_CHAT) -> list[int]:
    """Token ids of a text: what a user says in a chat, or with `plain` and where there are no chats, itself.

    Raises:
        ValueError: there are settings of a chat, and no chat.
    """
    if speaks_chat(tokenizer, plain):
        return encode_messages(tokenizer, settings.messages(text), settings.beginning is not None, **settings.template)
    if settings:
        raise ValueError(NO_CHAT)
    return encode_prompt(tokenizer, text)


def encode_beginning(tokenizer: Any, text: str, chat: bool) -> list[int]:
    """Tokens of a prompt that another will follow; of a chat, a message that is not ended yet."""
    if not chat:
        return encode_prompt(tokenizer, text)
    return encode_messages(tokenizer, [{"role": "user", "content": text}], True)


def encode_ending(tokenizer: Any, text: str, chat: bool, settings: ChatSettings = DEFAULT_CHAT) -> list[int]:
    """Tokens of a prompt that follows a cached one; of a chat, the rest of the message, and the answer's beginning.

    Raises:
        ValueError: a system prompt, which would have to come before what is cached; settings of a chat, and no chat.
    """
    if settings and not chat:
        raise ValueError(NO_CHAT)
    if settings.system is not None:
        raise ValueError("a system prompt comes before what is cached: cache it with the rest, or leave it out")
    if chat:
        goes_on = settings.beginning is not None
        whole: str = apply_template(tokenizer, settings.messages(QUERY), False, goes_on, **settings.template)
        text = text + whole.partition(QUERY)[2]
    return _encode(tokenizer, text, False)
