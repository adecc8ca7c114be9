"""Random conversations of all dialects meet chat templates of all kinds: none loses a message."""

from __future__ import annotations

import base64
import io
import json
import random
import re
import zlib
from typing import Any

import pytest
from chat_templates import TEMPLATES, with_template

from mlx_kv import load
from mlx_kv.bundled import model_path
from mlx_kv.server.chat import Messages
from mlx_kv.server.dialects.completions import chats
from mlx_kv.server.dialects.messages import messages as anthropic_messages
from mlx_kv.server.dialects.ollama import OllamaChatBody
from mlx_kv.server.dialects.responses import Conversations, ResponsesDialect
from mlx_kv.server.requests import RequestRules, UnknownFields
from mlx_kv.server.templates import CallForm, ChatTemplate, TemplateSupport, fit


def picture(width: int, height: int) -> str:
    """A PNG, as base64."""
    from PIL import Image

    written = io.BytesIO()
    Image.new("RGB", (width, height)).save(written, "PNG")
    return base64.b64encode(written.getvalue()).decode()


CONVERSATIONS = 500
PICTURE = picture(2, 3)
RULES = RequestRules()


class Conversation:
    """What is said in one, without a dialect: of each message a kind, a text, and calls or the call that it answers."""

    def __init__(self, seed: int) -> None:
        self.drawn, self.count = random.Random(seed), 0
        self.said: list[tuple[str, str, Any]] = []
        self.requests: list[int] = []  # messages that each request has
        for _ in range(self.drawn.choice([0, 1, 1, 2])):
            self.said.append((self.drawn.choice(["system", "developer"]), self.mark(), None))
        for _ in range(self.drawn.randint(1, 4)):
            self.turn()

    def mark(self) -> str:
        self.count += 1
        return f"mark{self.count:03d}x"

    def turn(self) -> None:
        drawn = self.drawn
        for _ in range(drawn.choice([1, 1, 1, 2])):
            self.said.append(("user", self.mark(), drawn.random() < 0.2))
        while True:
            if drawn.random() < 0.15:
                self.said.append(("system", self.mark(), None))
            self.requests.append(len(self.said))
            if drawn.random() < 0.1:  # what it said is not always one message
                self.said.append(("assistant", self.mark(), []))
            calls = [(f"call_{self.mark()}", self.mark()) for _ in range(drawn.choice([0, 1, 1, 2, 3]))]
            text = self.mark() if not calls or drawn.random() < 0.4 else ""
            self.said.append(("assistant", text, calls))
            if not calls:
                return
            for name, _ in calls:
                self.said.append(("tool", self.mark(), name))
            if drawn.random() < 0.3:
                self.said.append(("user", self.mark(), False))

    def marks(self, count: int) -> list[str]:
        """All texts of the first messages, in order."""
        return [
            text
            for kind, said, more in self.said[:count]
            for text in (said, *([value for _, value in more] if kind == "assistant" else []))
            if text
        ]


IMAGE_URL = f"data:image/png;base64,{PICTURE}"


def as_chat(said: list[tuple[str, str, Any]]) -> Messages:
    """OpenAI's chat completions."""
    found: Messages = []
    for kind, text, more in said:
        message: dict[str, Any] = {"role": kind, "content": text}
        if kind == "assistant":
            calls = [
                {"id": name, "type": "function", "function": {"name": "look", "arguments": json.dumps({"at": value})}}
                for name, value in more
            ]
            message |= {"content": text or None, "tool_calls": calls}
        elif kind == "tool":
            message["tool_call_id"] = more
        elif more:
            picture = {"type": "image_url", "image_url": {"url": IMAGE_URL}}
            message["content"] = [{"type": "text", "text": text}, picture]
        found.append(message)
    return chats({"messages": found}, RULES).request.messages


def as_messages(said: list[tuple[str, str, Any]]) -> Messages:
    """Anthropic's messages: results and what the user says are blocks of one message."""
    system, found = [], []
    for kind, text, more in said:
        blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
        if kind in ("system", "developer"):
            if not found:
                system += blocks
            else:
                found.append({"role": "system", "content": blocks})
            continue
        if kind == "assistant":
            blocks += [{"type": "tool_use", "id": name, "name": "look", "input": {"at": value}} for name, value in more]
        elif kind == "tool":
            blocks = [{"type": "tool_result", "tool_use_id": more, "content": blocks}]
        elif more:
            source = {"type": "base64", "media_type": "image/png", "data": PICTURE}
            blocks.append({"type": "image", "source": source})
        role = "assistant" if kind == "assistant" else "user"
        if found and found[-1]["role"] == role == "user":
            found[-1]["content"] += blocks
        else:
            found.append({"role": role, "content": blocks})
    return anthropic_messages({"max_tokens": 9, "system": system, "messages": found}, RULES).request.messages


def as_items(said: list[tuple[str, str, Any]]) -> Messages:
    """OpenAI's responses."""
    found: list[dict[str, Any]] = []
    for kind, text, more in said:
        if kind == "tool":
            found.append({"type": "function_call_output", "call_id": more, "output": text})
            continue
        parts: list[dict[str, Any]] = [{"type": "input_text", "text": text}] if text else []
        if kind == "user" and more:
            parts.append({"type": "input_image", "image_url": IMAGE_URL})
        if parts:
            found.append({"type": "message", "role": kind, "content": parts})
        for name, value in more if kind == "assistant" else ():
            arguments = json.dumps({"at": value})
            found.append({"type": "function_call", "call_id": name, "name": "look", "arguments": arguments})
    return ResponsesDialect(Conversations())({"input": found}, RULES).request.messages  # type: ignore[union-attr]


def as_ollama(said: list[tuple[str, str, Any]]) -> Messages:
    """Ollama's chats, whose results may leave out which call they answer."""
    found = []
    for kind, text, more in said:
        message: dict[str, Any] = {"role": "system" if kind == "developer" else kind, "content": text}
        if kind == "assistant":
            message["tool_calls"] = [{"function": {"name": "look", "arguments": {"at": value}}} for _, value in more]
        elif kind == "user" and more:
            message["images"] = [PICTURE]
        found.append(message)
    body = OllamaChatBody.parse({"messages": found}, UnknownFields())
    return body.openai_body(UnknownFields(), True).completion_request(RULES).messages


DIALECTS = {"chat": as_chat, "messages": as_messages, "responses": as_items, "ollama": as_ollama}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load(model_path("reference"))[1]


def check(template: ChatTemplate, dialect: str, seed: int) -> None:
    """What is said is in the prompt once and in order, and a request's text is the beginning of the next one's."""
    conversation, before = Conversation(seed), ""
    for count in conversation.requests:
        text = template.text(DIALECTS[dialect](conversation.said[:count]))
        found = re.findall("mark[0-9]+x", re.sub("call_mark[0-9]+x", "", text))
        assert found == conversation.marks(count), (seed, count, text)
        pictures = sum(1 for kind, _, more in conversation.said[:count] if kind == "user" and more)
        assert text.count("[image, 2 by 3 pixels, not shown: this model reads text]") == pictures
        assert text.startswith(before), (seed, count)
        before = text


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_message_is_lost_and_each_turn_begins_as_the_one_before(name: str, dialect: str, tokenizer: Any) -> None:
    """500 conversations in all."""
    template = ChatTemplate(with_template(tokenizer, TEMPLATES[name]), {})
    place = [*TEMPLATES].index(name) * len(DIALECTS) + [*DIALECTS].index(dialect)
    for seed in range(place, CONVERSATIONS, len(TEMPLATES) * len(DIALECTS)):
        check(template, dialect, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_same_conversations_in_all(name: str, dialect: str, tokenizer: Any) -> None:
    template = ChatTemplate(with_template(tokenizer, TEMPLATES[name]), {})
    for seed in range(1000, 1030):
        check(template, dialect, seed)


# --- what clients send, and what a template gets ----------------------------------------------------------------------

USER: dict[str, Any] = {"role": "user", "content": "look"}


def called(arguments: Any, name: str = "1") -> dict[str, Any]:
    """A call in a message of the assistant."""
    function = {"name": "look", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": name, "type": "function", "function": function}]}


def chat(*messages: dict[str, Any]) -> Messages:
    """What OpenAI's messages become."""
    return chats({"messages": [USER, *messages]}, RULES).request.messages[1:]


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        ({"role": "developer", "content": "Be brief."}, {"role": "system", "content": "Be brief."}),
        ({"role": "assistant", "content": "a", "tool_calls": []}, {"role": "assistant", "content": "a"}),
        ({"role": "assistant", "content": "a", "audio": None}, {"role": "assistant", "content": "a"}),
        (called(None), called("{}")),
        (called(""), called("{}")),
        (called({"at": "é"}), called('{"at": "é"}')),
        (called('{"at":"x"}'), called('{"at": "x"}')),
        (called('"{\\"at\\": \\"x\\"}"'), called('{"at": "x"}')),
        (called([1]), called("[1]")),
        (called("cut of"), called("cut of")),
        (
            {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}},
            called("{}", "call_1_0"),
        ),
    ],
)
def test_messages_have_one_form(sent: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert chat(sent) == [wanted]


def test_results_find_their_calls() -> None:
    """By id, or else by the function's name, or by their order."""
    calls = [called("{}", name)["tool_calls"][0] for name in ("a", "b")]
    sent = {"role": "assistant", "content": None, "tool_calls": calls}
    results = [{"role": "function", "name": "look", "content": "x"}, {"role": "tool", "content": "y"}]
    found = chat(sent, *results)[1:]
    assert [(each["role"], each["tool_call_id"], each["content"]) for each in found] == [
        ("tool", "a", "x"),
        ("tool", "b", "y"),
    ]


def test_a_call_whose_arguments_are_no_object_is_a_text() -> None:
    result = {"role": "tool", "tool_call_id": "1", "content": "no"}
    assert fit(chat(called([1]), result), TemplateSupport()) == [
        {"role": "assistant", "content": '<tool_call>\n{"name": "look", "arguments": "[1]"}\n</tool_call>'},
        {"role": "user", "content": "<tool_response>\nno\n</tool_response>"},
    ]


def test_ids_are_mapped_where_a_template_wants_nine_letters() -> None:
    support = TemplateSupport(foreign_ids=False)
    result = {"role": "tool", "tool_call_id": "call_x", "content": "no"}
    first, second = fit(chat(called("{}", "call_x"), result), support), fit(chat(called("{}", "abcdefgh9")), support)
    assert re.fullmatch("[A-Za-z0-9]{9}", first[1]["tool_call_id"])
    assert first[0]["tool_calls"][0]["id"] == first[1]["tool_call_id"]
    assert second[0]["tool_calls"][0]["id"] == "abcdefgh9"
    assert fit(chat(called("{}", "call_x"), result), support) == first


def test_templates_are_known_by_what_they_render(tokenizer: Any) -> None:
    text = {"call": CallForm(as_text=True), "with_text": CallForm(as_text=True)}
    alternate = {"late_system": False, "users": False, "assistants": False, "user_after_result": False}
    wanted = {
        "chatml": TemplateSupport(**text),
        "llama 3": TemplateSupport(call=CallForm(split=True), with_text=CallForm(split=True, text_first=True)),
        "mistral v3": TemplateSupport(
            system=False, systems=False, with_text=CallForm(as_text=True), foreign_ids=False, **alternate
        ),
        "qwen 2.5": TemplateSupport(),
        "qwen 3": TemplateSupport(),
        "qwen 3.5": TemplateSupport(systems=False, late_system=False),
        "gemma 3": TemplateSupport(systems=False, **text, **alternate),
        "deepseek v3": TemplateSupport(late_system=False, json_arguments=True),
        "vision": TemplateSupport(parts=True, **text),
        "as given": TemplateSupport(json_arguments=True),
    }
    for name, template in TEMPLATES.items():
        assert ChatTemplate(with_template(tokenizer, template), {}).support == wanted[name], name


def test_reasoning_reaches_templates_that_keep_it(tokenizer: Any) -> None:
    template = ChatTemplate(with_template(tokenizer, TEMPLATES["qwen 3"]), {})
    thought = {**called("{}"), "reasoning": "hm"}
    result = {"role": "tool", "tool_call_id": "1", "content": "no"}
    messages = [USER, *chat(thought, result)]
    assert "<think>hm</think>" in tokenizer.decode(template.encode(messages, False, {}))
    assert "<think>" not in tokenizer.decode(template.encode([*messages, USER], False, {}))


PLACEHOLDER = "[image, 2 by 3 pixels, not shown: this model reads text]"
IMAGE_BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}


def test_what_is_not_text_is_described() -> None:
    """In messages and results of all dialects: a conversation that has an image goes on."""
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]
    assert chat({"role": "user", "content": parts})[0]["content"] == "see[image, not shown: this model reads text]"
    found = {
        "search": {"type": "search_result", "title": "T", "source": "S", "content": [{"type": "text", "text": "x"}]},
        "pages": {"type": "document", "source": {"type": "base64", "data": "aGk="}},
        "text": {"type": "document", "source": {"type": "text", "data": "plain"}},
        "tool": {"type": "tool_reference", "tool_name": "x"},
        "server": {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}},
        "new": {"type": "dream_block"},
    }
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "see"}, IMAGE_BLOCK]}
    body = {
        "max_tokens": 1,
        "messages": [
            {"role": "user", "content": list(found.values())},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
    }
    first, _, last = anthropic_messages(body, RULES).request.messages
    assert first["content"].split("\n") == [
        "T",
        "S",
        "x",
        "[file, not shown: this model reads text]",
        "plain",
        "[tool reference, not shown: this model reads text]",
        "[server tool use, not shown: this model reads text]",
        "[dream block, not shown: this model reads text]",
    ]
    assert last["content"] == f"see\n{PLACEHOLDER}"
    items = [
        {"type": "function_call", "call_id": "1", "name": "view_image", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "1",
            "output": [{"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}"}],
        },
    ]
    responses = ResponsesDialect(Conversations())({"input": items}, RULES)
    assert responses.request.messages[1]["content"] == PLACEHOLDER  # type: ignore[union-attr]
    assert as_ollama([("user", "see", True)])[0]["content"] == f"see\n{PLACEHOLDER}"


@pytest.mark.parametrize("data", ["", "!", "aGk=", PICTURE[:24], None, 7, "huge"])
def test_no_image_is_a_failure_of_the_server(data: Any) -> None:
    if data == "huge":  # which Pillow takes for an attack
        header = bytearray(base64.b64decode(PICTURE))
        header[16:24] = (200_000).to_bytes(4, "big") * 2
        header[29:33] = zlib.crc32(header[12:29]).to_bytes(4, "big")
        data = base64.b64encode(header).decode()
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image", "source": {"data": data}}]}]}
    (message,) = anthropic_messages(body, RULES).request.messages
    assert message["content"] == "[image, not shown: this model reads text]"


def test_it_is_said_once_what_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        chat({"role": "user", "content": [{"type": "hologram"}]})
    said = [record.message for record in caplog.records if "hologram" in record.message]
    assert said == ["requests have parts of the kind 'hologram', which are left out: this model reads text"]
