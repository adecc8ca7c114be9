"""What a conversation becomes before it meets a chat template.

Chat templates are programs with rules of their own: they refuse a second system message, drop roles or texts that they
do not know, or move what comes later to the beginning. What one can take is found by rendering small conversations
when the model is loaded; then each message becomes what it takes, and stays as it is where it can. The form of a
message depends on those before it alone: the prompt of a turn is the beginning of the next one's, if the template
renders it so.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any, NamedTuple

from mlx_lm.server import convert_chat

from mlx_kv.generation.encoding import apply_template, encode_messages
from mlx_kv.server.chat import Messages, parse_arguments, tool

SHORT_ID = re.compile("[A-Za-z0-9]{9}")  # which ids of calls all templates take
GAP = "\n\n"  # between the texts of messages that become one


class CallForm(NamedTuple):
    """How a message with calls is given to a template.

    Attributes:
        as_text: whether calls are part of the text, and results texts of the user.
        split: whether each call has a message of its own.
        text_first: whether the text has a message of its own, before them.
    """

    as_text: bool = False
    split: bool = False
    text_first: bool = False


AS_CALLS, AS_TEXT = CallForm(), CallForm(as_text=True)
FORMS = [CallForm(split=split, text_first=text_first) for text_first in (False, True) for split in (False, True)]


@dataclass(frozen=True)
class TemplateSupport:
    """What a chat template takes. The defaults are for one that takes anything.

    Attributes:
        parts: whether contents have to be lists of parts.
        system: whether a system message in front is rendered there.
        systems: whether two are.
        late_system: whether one that comes later is rendered where it stands.
        call: the form of a message that has calls alone.
        with_text: the form of one that has a text, too.
        json_arguments: whether arguments of calls have to be JSON texts, not objects.
        foreign_ids: whether ids of calls may have any form.
        users, assistants: whether two messages of a role may follow each other.
        user_after_result: whether a user's message may follow the result of a call.
    """

    parts: bool = False
    system: bool = True
    systems: bool = True
    late_system: bool = True
    call: CallForm = AS_CALLS
    with_text: CallForm = AS_CALLS
    json_arguments: bool = False
    foreign_ids: bool = True
    users: bool = True
    assistants: bool = True
    user_after_result: bool = True

    @classmethod
    def of(cls, render: Callable[[Messages], str]) -> TemplateSupport:
        """What a template takes.

        Args:
            render: makes the text of a conversation; may raise anything.
        """
        user, answer, last = _message("user", "wombat"), _message("assistant", "quokka"), _message("user", "numbat")
        system, systems = _message("system", "bilby"), [_message("system", "dingo"), _message("system", "quoll")]
        known: dict[str, Any] = {}

        def shown(*messages: dict[str, Any], **support: Any) -> str:
            """The text of messages, if what each says is in it once and in order; else an empty one."""
            texts = [text for message in messages for text in _texts(message)]
            try:
                rendered = render(fit(messages, cls(**(known | support))))
            except Exception:  # templates raise what they like
                return ""
            found = [text for text, _ in groupby(re.findall("|".join(texts), rendered))]
            return rendered if found == texts else ""

        def calls(text: str) -> dict[str, Any]:
            """How calls have to be given, beside a text."""
            message = _message("assistant", text, kiwi="tuatara", moa="takahe")
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": content}
                for call, content in zip(message["tool_calls"], ("pukeko", "weka"), strict=True)
            ]
            doubtful: dict[str, Any] = {}
            for form, foreign_ids, json_arguments in product(FORMS, (True, False), (False, True)):
                found = {"call": form, "with_text": form, "foreign_ids": foreign_ids, "json_arguments": json_arguments}
                if rendered := shown(user, message, *results, answer, last, **found):
                    if "{'" not in rendered:
                        return found
                    doubtful = doubtful or found  # arguments in Python's form, which is no JSON
            return doubtful or {"call": AS_TEXT, "with_text": AS_TEXT}

        known["parts"] = not shown(user) and bool(shown(user, parts=True))
        known |= calls("")
        known["with_text"] = AS_TEXT if known["call"] == AS_TEXT else calls("kakapo")["with_text"]
        call = _message("assistant", "", kiwi="tuatara")
        result = {"role": "tool", "tool_call_id": "call_for_kiwi", "content": "pukeko"}
        conversations = {
            "system": (system, user, answer, last),
            "systems": (*systems, user),
            "late_system": (user, answer, system, last),
            "users": (user, last),
            "assistants": (user, answer, _message("assistant", "quoll"), last),
            "user_after_result": (user, call, result, last),
        }
        return cls(**known | {name: bool(shown(*messages)) for name, messages in conversations.items()})


def _message(role: str, text: str, **values: str) -> dict[str, Any]:
    """A message with a call for each value, which is its argument."""
    calls = [
        {"id": f"call_for_{name}", "type": "function", "function": {"name": name, "arguments": f'{{"key": "{value}"}}'}}
        for name, value in values.items()
    ]
    return {"role": role, "content": text} | ({"tool_calls": calls} if calls else {})


def _texts(message: dict[str, Any]) -> list[str]:
    """What such a message says: its text, and the arguments of its calls."""
    arguments = [json.loads(call["function"]["arguments"])["key"] for call in message.get("tool_calls", ())]
    return [text for text in (message["content"], *arguments) if text]


def short_id(call_id: str) -> str:
    """An id of nine letters and digits: itself, or made from it."""
    return call_id if SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]


# --- conversations as a template takes them ---------------------------------------------------------------------------


class Fit:
    """A conversation as a template takes it, message by message.

    Args:
        support: what it takes.
    """

    def __init__(self, support: TemplateSupport) -> None:
        self._support = support
        self.messages: Messages = []
        self._as_text: set[str] = set()  # ids of calls in texts
        self._known: set[str] = set()  # ids of other calls
        self._open = ""  # a text that is a part of the user's next message

    def add(self, message: dict[str, Any]) -> None:
        """Adds the next message."""
        role = message["role"]
        if role == "system":
            self._add_system(message)
        elif role == "tool":
            self._add_result(message)
        elif role == "user":
            self._add_user(message)
        else:
            self._close()
            self._add_assistant(message)

    def finish(self) -> Messages:
        """All messages."""
        self._close()
        if self._support.parts:
            return [
                {**each, "content": [{"type": "text", "text": each["content"]}] if each["content"] else []}
                for each in self.messages
            ]
        return self.messages

    def _add_system(self, message: dict[str, Any]) -> None:
        in_front = all(each["role"] == "system" for each in self.messages)
        if in_front and not self._support.system:
            self._open = _joined(self._open, message["content"])
        elif in_front and self.messages and not self._support.systems:
            self._join(message)
        elif in_front or self._support.late_system:
            self._close()
            self.messages.append(message)
        else:
            self._open = _joined(self._open, f"<system>\n{message['content']}\n</system>")

    def _add_user(self, message: dict[str, Any]) -> None:
        content, self._open = _joined(self._open, message["content"]), ""
        before = self.messages[-1]["role"] if self.messages else ""
        if (before == "user" and not self._support.users) or (before == "tool" and not self._support.user_after_result):
            self._join({"content": content})
        else:
            self.messages.append({**message, "content": content})

    def _add_result(self, message: dict[str, Any]) -> None:
        call_id = str(message.get("tool_call_id") or "")
        if call_id in self._as_text or call_id not in self._known:
            self._add_user({"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"})
            return
        self._close()
        if not self._support.foreign_ids:
            message = {**message, "tool_call_id": short_id(call_id)}
        self.messages.append(message)

    def _add_assistant(self, message: dict[str, Any]) -> None:
        before = self.messages[-1] if self.messages else {}
        if before.get("role") == "assistant" and not before.get("tool_calls") and not self._support.assistants:
            message = {**before, **message, "content": _joined(before["content"], message["content"])}
            self.messages.pop()
        text, calls = message["content"], message.get("tool_calls") or []
        form = self._support.with_text if text else self._support.call
        bare = {name: each for name, each in message.items() if name != "tool_calls"}
        if not calls or form.as_text or any(parse_arguments(each["function"]["arguments"]) is None for each in calls):
            self._as_text |= {each["id"] for each in calls}
            written = [_call_text(each) for each in calls]
            self.messages.append({**bare, "content": "\n".join([each for each in (text, *written) if each])})
            return
        self._known |= {each["id"] for each in calls}
        groups = [[each] for each in calls] if form.split else [calls]
        if form.text_first and text:
            self.messages.append(bare)
            message = {"role": "assistant", "content": ""}
        for group in groups:
            self.messages.append({**message, "tool_calls": [self._call(each) for each in group]})
            message = {"role": "assistant", "content": ""}

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        """A call in the template's form."""
        name = call["id"] if self._support.foreign_ids else short_id(call["id"])
        arguments = call["function"]["arguments"]
        function = {
            **call["function"],
            "arguments": arguments if self._support.json_arguments else parse_arguments(arguments),
        }
        return {**call, "id": name, "function": function}

    def _join(self, message: dict[str, Any]) -> None:
        """Makes a message a part of the one before."""
        before = self.messages[-1]
        self.messages[-1] = {**before, "content": _joined(before["content"], message["content"])}

    def _close(self) -> None:
        """A text that no message of the user follows is one."""
        if self._open:
            self._add_user({"role": "user", "content": ""})


def _joined(*texts: str) -> str:
    return GAP.join([text for text in texts if text])


def _call_text(call: dict[str, Any]) -> str:
    function = call["function"]
    arguments = parse_arguments(function["arguments"])
    written = {"name": function["name"], "arguments": function["arguments"] if arguments is None else arguments}
    return f"<tool_call>\n{json.dumps(written, ensure_ascii=False)}\n</tool_call>"


def fit(messages: Sequence[dict[str, Any]], support: TemplateSupport) -> Messages:
    """A conversation as a template takes it."""
    fitted = Fit(support)
    for message in messages:
        fitted.add(message)
    return fitted.finish()


# --- templates --------------------------------------------------------------------------------------------------------


class ChatTemplate:
    """The chat template of a model, or mlx_lm.server's form of chats for a model without one.

    Args:
        tokenizer: mlx-lm's.
        settings: of the template, where requests leave them out.

    Attributes:
        support: what it takes.
        tools: whether it writes tools into the prompt.
    """

    def __init__(self, tokenizer: Any, settings: Mapping[str, Any]) -> None:
        self._tokenizer, self._settings = tokenizer, settings
        self.support = TemplateSupport.of(self._render)
        self.tools = self._shows_tools()

    def _render(self, fitted: Messages, **template: Any) -> str:
        """The text of messages that are as it takes them."""
        if not self._tokenizer.has_chat_template:
            return str(convert_chat(fitted))
        return str(apply_template(self._tokenizer, fitted, False, **self._settings, **template))

    def _shows_tools(self) -> bool:
        with suppress(Exception):  # templates raise what they like
            conversation = fit([_message("user", "wombat")], self.support)
            return "quokka" in self._render(conversation, tools=[tool("quokka", "", {"type": "object"})])
        return False

    def text(self, messages: Messages) -> str:
        """The text of a conversation, up to the beginning of the answer."""
        return self._render(fit(messages, self.support))

    def encode(self, messages: Messages, continues: bool, roles: Mapping[str, str], **template: Any) -> list[int]:
        """Token ids of a conversation, up to the beginning of the answer.

        Args:
            continues: whether the answer continues the last message.
            roles: prefixes of messages by role, for a model without a template; empty is mlx-lm's.
            template: arguments for the template.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        fitted = self._fitted(messages)
        if self._tokenizer.has_chat_template:
            return encode_messages(self._tokenizer, fitted, continues, **{**self._settings, **template})
        beginning = f" {fitted.pop()['content']}" if continues else ""
        return [int(token) for token in self._tokenizer.encode(convert_chat(fitted, dict(roles) or None) + beginning)]

    def whole_text(self, messages: Messages, continues: bool, **template: Any) -> str:
        """As `encode`, the text of it.

        Raises:
            TemplateError: as `encode`.
            ValueError: there is no template.
        """
        if not self._tokenizer.has_chat_template:
            raise ValueError("this model has no chat template, so its chats have no images: leave them out")
        settings = {**self._settings, **template}
        return str(apply_template(self._tokenizer, self._fitted(messages), False, continues, **settings))

    def _fitted(self, messages: Messages) -> Messages:
        fitted = fit(copy.deepcopy(messages), self.support)
        for message in fitted:  # templates read either name; answers have the first, as mlx_lm.server's do
            reasoning = message.get("reasoning") or message.get("reasoning_content")
            if isinstance(reasoning, str):
                message["reasoning"] = message["reasoning_content"] = reasoning
        return fitted
