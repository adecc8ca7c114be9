"""`mlx-kv chat`, with lines that come from a file, a terminal, and a hand on Ctrl-C."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from thinking_models import thinker
from transformers.utils import logging as transformers_logging

import mlx_kv
from mlx_kv.bundled import model_path
from mlx_kv.cli.chat_session import questions
from mlx_kv.cli.model import ModelOptions
from mlx_kv.files.serialization import load_prompt_file, save_prompt_cache
from mlx_kv.mlxlm.loading import load
from mlx_kv.settings import SettingError

Called = Any


@pytest.fixture
def chat(command: Callable[..., Called], monkeypatch: pytest.MonkeyPatch, reference: Any) -> Callable[..., Called]:
    """`mlx-kv chat` in this process, with these lines on stdin; `errors` are those of a locale's encoding."""
    monkeypatch.setattr("mlx_kv.mlxlm.loading.load", lambda path, **options: reference)

    def run(*lines: str, options: tuple[str, ...] = (), errors: str = "strict") -> Called:
        written = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(written), encoding="utf-8", errors=errors))
        return command("chat", "--max-tokens", "12", *options)

    return run


def test_answers_go_to_stdout_and_all_else_to_stderr(chat: Any, reference: Any) -> None:
    done = chat("import os", "", "q", "never asked")
    wanted = mlx_kv.generate(*reference, "import os\n", max_tokens=12)
    assert (done.code, done.out) == (0, wanted + "\n")
    (line,) = done.err.splitlines()
    assert line.startswith("mlx-kv: 12 tokens, ")
    assert line.endswith(" read, 0 known; --max-tokens ended it")


def test_undo_and_reset(chat: Any) -> None:
    first, both = chat("import os").out, chat("import os", "print(").out
    undone = chat("import os", "class A:", "/undo", "print(", "/undo", "/undo", "/undo", "r", "import os")
    assert undone.out.startswith(first)
    assert undone.out.endswith(both.removeprefix(first) + first)
    errors = [line for line in undone.err.splitlines() if "tokens" not in line]
    assert errors == [
        "mlx-kv: removed the last turn: 1 turn left",
        "mlx-kv: removed the last turn: 1 turn left",
        "mlx-kv: removed the last turn: 0 turns left",
        "mlx-kv: the conversation has no turns: there is nothing to remove",
        "mlx-kv: conversation cleared",
    ]


@pytest.mark.parametrize("options", [(), ("--kv-budget", "16", "--kv-keep-recent", "4", "--kv-margin", "4")], ids=str)
def test_a_conversation_goes_on_from_a_file(chat: Any, tmp_path: Path, options: tuple[str, ...]) -> None:
    path = tmp_path / "c.safetensors"
    first = chat("import os", "print(", f"/save {path}", "class A:", options=options)
    again = chat(f"/load {path}", "class A:", "/undo", "/stats", options=options)
    assert first.out.endswith(again.out)
    loaded, answered, *_ = again.err.splitlines()
    assert loaded == f"mlx-kv: {path}: 2 turns"
    assert " known" in answered
    assert ", 0 known" not in answered
    other = chat(f"/load {path}", "class A:", options=("--kv-bits", "8"))
    assert "its caches were made with other settings, so the conversation is read again" in other.err
    assert ", 0 known" in other.err


def test_what_a_file_must_be(chat: Any, command: Any, tmp_path: Path) -> None:
    prompt, text = tmp_path / "p.safetensors", tmp_path / "notes.txt"
    command("cache", "--prompt", "import os", "--output", prompt)
    text.write_text("mine")
    done = chat(
        "/save",
        f"/save {prompt}",
        "x",
        f"/save {text}",
        "/save ~nobody-of-this-name/x",
        f"/load {prompt}",
        f"/load {text}",
        "/load /no/file",
        "/undo",
        f"/save {prompt}",
        "/reset",
        f"/save {prompt}",
    )
    said = [line for line in done.err.splitlines() if "known" not in line]
    assert text.read_text() == "mine"
    wanted = (
        "needs the name",
        "the cache is empty: there is nothing to save",
        "is not a prompt cache: give another name, or remove it first",
        "give another name",
        "no conversation",
        "not a safetensors file",
        "cannot read",
        "removed the last turn: 0 turns left",
        "the cache is empty: there is nothing to save",
        "conversation cleared",
        "the cache is empty: there is nothing to save",
    )
    for line, words in zip(said, wanted, strict=True):
        assert words in line
        assert line.startswith("mlx-kv: ")


@pytest.mark.parametrize(
    "damage",
    [
        lambda said: "no JSON",
        lambda said: [said],
        lambda said: {"turns": said["turns"]},
        lambda said: said | {"tokens": [10**7] * len(said["tokens"])},
        lambda said: said | {"tokens": [-1] * len(said["tokens"])},
        lambda said: said | {"tokens": ["x"] * len(said["tokens"])},
        lambda said: said | {"system": 7},
        lambda said: said | {"turns": [said["turns"][0] | {"answer": None}]},
        lambda said: said | {"turns": [said["turns"][0] | {"reused": "many"}]},
        lambda said: said | {"turns": [said["turns"][0] | {"mood": "good"}]},
        lambda said: said | {"turns": ["import os"]},
    ],
)
def test_a_damaged_conversation_is_one_line_and_the_chat_goes_on(chat: Any, tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "c.safetensors"
    chat("import os", f"/save {path}")
    file = load_prompt_file(path)
    said = damage(json.loads(file.metadata["chat"]))
    words = file.metadata | {"chat": said if isinstance(said, str) else json.dumps(said)}
    save_prompt_cache(path, file.caches, words, tokens=file.tokens, fingerprint=file.fingerprint)
    done = chat("x", f"/load {path}", "import os")
    assert (done.code, [line for line in done.err.splitlines() if "known" not in line]) == (
        0,
        [f"mlx-kv: {path} holds a conversation that is damaged: give another file"],
    )
    assert done.out == chat("x", "import os").out


def test_a_file_of_tokens_that_the_model_does_not_have(chat: Any, tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    chat("import os", f"/save {path}")
    file = load_prompt_file(path)
    tokens = [10**7, *(file.tokens or [])[1:]]
    save_prompt_cache(path, file.caches, file.metadata, tokens=tokens, fingerprint=file.fingerprint)
    done = chat(f"/load {path}", "import os")
    assert "has read tokens that the model does not have: make it again" in done.err
    assert done.out == chat("import os").out


def test_help_stats_and_what_is_no_command(chat: Any) -> None:
    done = chat("/help", "/stats", "import os", "/stats", "/nonsense", "/usr/bin is a path")
    assert "/undo   takes" in done.err
    assert "held              0 tokens" in done.err
    assert "known             0 tokens" in done.err
    assert "mlx-kv: unknown command /nonsense: /help lists the commands" in done.err
    assert len(done.out.splitlines()) >= 2  # the path was a question


def test_drafts_change_nothing(chat: Any) -> None:
    lines = ("import os", "import sys", "import os")
    plain, drafted = chat(*lines), chat(*lines, "/stats", options=("--draft", "ngram"))
    assert drafted.out == plain.out
    assert "draft " in drafted.err


def test_ctrl_c_before_an_answer_begins_ends_that_turn_alone(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, presses = chat("import os", "print(").out, iter([False, True, False])  # of each turn

    def interrupts() -> Any:
        pressed = next(presses)
        return contextlib.nullcontext(lambda: pressed)

    monkeypatch.setattr("mlx_kv.cli.chat_session.interrupts", interrupts)
    done = chat("import os", "never mind", "/save /no/file", "print(")
    assert (done.code, done.out) == (0, alone)
    errors = [line for line in done.err.splitlines() if "known" not in line]
    assert errors == [
        "mlx-kv: interrupted before the answer began: the next question reads the conversation again",
        "mlx-kv: the cache is empty: ask a question first, which reads it again",
    ]


@pytest.fixture
def templated(monkeypatch: pytest.MonkeyPatch, chat: Any, reference: Any) -> Any:
    """The same, with a chat template that refuses some messages."""
    _, tokenizer = load(mlx_kv.model_path("reference"))
    refuses = "{% if m['content'] == 'no' %}{{ raise_exception('not this') }}{% endif %}"
    tokenizer._tokenizer.chat_template = f"{{% for m in messages %}}{refuses}{{{{ m['content'] }}}}\n{{% endfor %}}"
    monkeypatch.setattr("mlx_kv.mlxlm.loading.load", lambda path, **options: (reference[0], tokenizer))
    return chat


def test_a_template_that_refuses_ends_that_turn_alone(templated: Any, command: Any) -> None:
    done = templated("no", "/undo", "import os", "no", "print(")
    assert done.out == templated("import os", "print(").out
    refused = "mlx-kv: the chat template refuses these messages: TemplateError: not this"
    assert [line for line in done.err.splitlines() if "known" not in line] == [
        refused,
        "mlx-kv: the conversation has no turns: there is nothing to remove",
        refused,
    ]
    called = command("generate", "--prompt", "no")
    assert (called.code, called.out, called.err) == (2, "", refused.replace("kv: ", "kv: error: ") + "\n")


@pytest.mark.parametrize("name", ["tokenize", "add_generation_prompt", "continue_final_message", "conversation"])
def test_what_is_no_setting_of_a_template(name: str, command: Any) -> None:
    config = json.dumps({name: True})
    for words in (
        ("chat", "--chat-template-config", config),
        ("generate", "--prompt", "x", "--chat-template-config", config),
        ("serve", "--chat-template-args", config),
    ):
        called = command(*words)
        assert (called.code, called.out, called.err.count("\n")) == (2, "", 1)
        assert f"{name} is not a setting of a chat template: leave it out" in called.err


def test_a_question_of_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'one\n"""two\nthree"""\n"""four"""\n"""\nfive\n\n"""\n  \n"""six\n'
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert list(questions()) == ["one", "two\nthree", "four", "five", "six"]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # as locales have it: en_US.UTF-8, and C
def test_a_line_that_is_not_utf_8_is_refused_and_the_chat_goes_on(chat: Any, errors: str) -> None:
    done = chat("import os", "abc\udcff\udcfe", '"""x', 'y\udce9"""', "/save \udce9", "print(", errors=errors)
    assert (done.code, done.out) == (0, chat("import os", "print(").out)
    assert [line for line in done.err.splitlines() if "known" not in line] == [
        r"mlx-kv: this line is not UTF-8 text: 'abc\xff\xfe': write it in UTF-8",
        r"mlx-kv: this line is not UTF-8 text: 'x\ny\xe9': write it in UTF-8",
        r"mlx-kv: this line is not UTF-8 text: '/save \xe9': write it in UTF-8",
    ]


@pytest.mark.parametrize("option", ["--system-prompt", "--prefill-response", "--chat-template-config"])
def test_an_option_that_is_not_utf_8_is_one_line(option: str, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_kv.mlxlm.loading.load", lambda path, **options: pytest.fail("a model is loaded"))
    for words in (("chat",), ("generate", "--prompt", "x")):
        if option == "--prefill-response" and words == ("chat",):
            continue  # it has none
        called = command(*words, option, '{"a": "\udcff"}')
        refused = f"mlx-kv: error: Invalid value for '{option}': it is not UTF-8 text: write it in UTF-8\n"
        assert (called.code, called.out, called.err) == (2, "", refused)


def test_names_of_files_may_be_quoted(chat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = chat(
        "import os",
        '/save "a b.safetensors"',
        "/save c d.safetensors",
        r"/save e\ f.safetensors",
        "/load 'a b.safetensors'",
        "/load c d.safetensors",
        "/save don't.safetensors",
        '/save "a" b',
        '/load "',
        '/save ""',
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.safetensors" for name in ("a b", "c d", "e f")]
    quoted = 'put the name in double quotation marks, as in /save "my chat"'
    assert [line for line in done.err.splitlines() if "known" not in line] == [
        "mlx-kv: saved to a b.safetensors: 1 turn",
        "mlx-kv: saved to c d.safetensors: 1 turn",
        "mlx-kv: saved to e f.safetensors: 1 turn",
        "mlx-kv: a b.safetensors: 1 turn",
        "mlx-kv: c d.safetensors: 1 turn",
        f"mlx-kv: /save don't.safetensors: no closing quotation: {quoted}",
        f'mlx-kv: /save "a" b: these are 2 names: {quoted}',
        f'mlx-kv: /load ": no closing quotation: {quoted.replace("save", "load")}',
        "mlx-kv: /save needs the name of a file",
    ]


def test_advice_is_of_the_command_line_and_not_of_python(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*arguments: Any) -> Any:
        raise SettingError("it cannot be trimmed: use {max_write:=9}")

    monkeypatch.setattr("mlx_kv.generation.conversation.Conversation.ask", refuses)
    assert chat("x").err == "mlx-kv: it cannot be trimmed: use --max-write 9\n"


def test_a_question_beyond_the_context_is_refused_before_it_is_read(
    chat: Any, reference: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mlx_kv.mlxlm.loading.context_length", lambda model: 40)
    monkeypatch.setattr(reference[1]._tokenizer, "model_max_length", 40)  # beyond it transformers warns, once
    monkeypatch.setattr(reference[1]._tokenizer, "deprecation_warnings", {})
    transformers_logging.set_verbosity_warning()
    transformers_logging.add_handler(caplog.handler)
    long, half = "x = 1; " * 20, "x = 1; " * 6
    done = chat(long, "import os", long, half, "print(", "/undo", "/undo", half)
    kept = chat("import os", "print(")
    assert (done.code, done.out) == (0, kept.out + chat(half).out)
    refused = [line for line in done.err.splitlines() if "made for" in line and "note: " not in line]
    assert len(refused) == 3
    assert re.fullmatch(
        r"mlx-kv: this prompt has \d+ tokens, but this model was made for 40: ask a shorter question", refused[0]
    )
    for line in refused[1:]:
        assert re.fullmatch(
            r"mlx-kv: 15 tokens so far and \d+ with this question, but this model was made for 40: "
            "ask a shorter question, or /undo or /reset first",
            line,
        )
    transformers_logging.remove_handler(caplog.handler)
    assert caplog.records == []


def test_ctrl_c_ends_a_command_and_not_the_chat(chat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("mlx_kv.cli.chat_session.save_prompt_cache", interrupted)
    monkeypatch.setattr("mlx_kv.cli.chat_session.load_for", interrupted)
    done = chat("import os", f"/save {tmp_path / 'c'}", f"/load {tmp_path / 'c'}", "print(")
    assert (done.code, done.out) == (0, chat("import os", "print(").out)
    assert [line for line in done.err.splitlines() if "known" not in line] == [
        "mlx-kv: /save was ended by Ctrl-C",
        "mlx-kv: /load was ended by Ctrl-C",
    ]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_system_prompt_needs_a_template(chat: Any) -> None:
    done = chat("x", options=("--system-prompt", "be brief"))
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "chat template" in done.err


@pytest.mark.parametrize("program", ["generate", "chat"])
def test_thinking_has_a_limit(
    program: str, chat: Any, command: Any, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that never ends it: the mark comes after so many tokens, and the closing text before it."""
    network, _ = reference
    thinks = thinker(load(model_path("reference"))[1])
    monkeypatch.setattr(ModelOptions, "load", lambda self: (network, thinks))
    options = ("--thinking-budget", "4", "--thinking-closing", " Enough.", "--max-tokens", "24")
    if program == "chat":
        said = chat("import os", options=options).out
    else:
        said = command("generate", "--prompt", "import os", *options).out
    before, mark, _ = said.partition(" Enough.</think>")
    assert mark
    assert 0 < len(thinks.encode(before.strip("\n"))) <= 5
