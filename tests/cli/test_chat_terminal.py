"""A chat on a terminal: its first lines, editing and completion, typing during an answer, Ctrl-C, and leaving."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_kv.cli.typed_lines import lines_typed

Called = Any


class CtrlC(str):
    """Ctrl-C, after this was typed."""


@pytest.fixture
def typing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has lines typed on a terminal with readline, Ctrl-C among them."""

    def types(*lines: str) -> None:
        rest, typed = iter(lines), ""

        def one(prompt: str) -> str:
            nonlocal typed
            typed = next(rest, None)  # type: ignore[assignment]
            if typed is None:
                raise EOFError
            if isinstance(typed, CtrlC):
                signal.raise_signal(signal.SIGINT)
            return typed

        terminal = io.StringIO()
        terminal.isatty = lambda: True  # type: ignore[method-assign]
        monkeypatch.setattr("sys.stdin", terminal)
        monkeypatch.setattr("builtins.input", one)
        done = dict.fromkeys(("set_completer", "set_completer_delims", "parse_and_bind"), lambda argument: None)
        monkeypatch.setitem(sys.modules, "readline", SimpleNamespace(get_line_buffer=lambda: str(typed), **done))

    return types


def test_ctrl_c_clears_the_line_and_twice_leaves(typing: Any, capsys: pytest.CaptureFixture[str]) -> None:
    half, empty = CtrlC("half"), CtrlC()
    before = signal.getsignal(signal.SIGINT)
    typing(
        "a", half, half, "b", '"""c', half, "d", '"""e', empty, empty, "f", empty, half, empty, "", empty, empty, "g"
    )
    lines, hints = lines_typed(lambda: "a hint"), "mlx-kv: a hint\n"
    assert [next(lines) for _ in range(4)] == ["a", "b", "d", "f"]
    assert capsys.readouterr().err == hints
    with pytest.raises(KeyboardInterrupt):
        next(lines)
    assert capsys.readouterr().err == hints * 3
    assert signal.getsignal(signal.SIGINT) is before


def test_leaving_says_how_a_conversation_is_kept(
    typing: Any, command: Any, reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_kv.mlxlm.loading.load", lambda path, **options: reference)
    first = [
        "mlx-kv: loading reference",
        "mlx-kv: reference, context 4,096 tokens; cache: all tokens, not quantized",
        "mlx-kv: /help lists commands, Ctrl-C ends an answer, Ctrl-D the chat",
    ]
    hint, save = "mlx-kv: press Ctrl-C again or Ctrl-D to leave", f"/save {tmp_path / 'c'}"
    keeps, left = (
        "; /save FILE keeps the conversation",
        "mlx-kv: this conversation was not saved: next time, type /save ",
    )
    for lines, code, said in (
        ((CtrlC(), CtrlC()), 130, [hint, "mlx-kv: interrupted"]),
        (("x", CtrlC(), CtrlC()), 130, [hint + keeps, "mlx-kv: interrupted"]),
        (("x",), 0, [left + "FILE before you leave"]),
        (("x", "/exit"), 0, [left + "FILE before you leave"]),
        (("x", save), 0, []),
        (("x", save, "/undo", CtrlC()), 0, [hint]),
        (("x", save, "y", CtrlC(), "q"), 0, [hint + keeps, left + "FILE before you leave"]),
        ((f"/load {tmp_path / 'c'}", CtrlC()), 0, [hint]),
        (("x", "/reset"), 0, []),
    ):
        typing(*lines)
        done = command("chat", "--max-tokens", "2")
        others = (" read, ", "saved to", "turn", "cleared")
        errors = [line for line in done.err.splitlines() if line and not any(word in line for word in others)]
        assert (done.code, errors[:3], errors[3:]) == (code, first, said)


class Terminal:
    """`mlx-kv chat` on a terminal of its own."""

    def __init__(self, max_tokens: int, *options: str, **environment: str) -> None:
        self._ours, theirs = pty.openpty()
        self.seen = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlx_kv.cli", "chat", "--max-tokens", str(max_tokens), *options],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=os.environ | environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal
        )
        os.close(theirs)

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def press_ctrl_c(self) -> None:
        time.sleep(0.5)  # readline prints before it listens: Python loses a signal in between until the next key
        self.type(b"\x03")

    def wait_for(self, word: bytes) -> bytes:
        """What was printed up to there."""
        deadline = time.monotonic() + 60
        while word not in self.seen:
            ready, _, _ = select.select([self._ours], [], [], max(0, deadline - time.monotonic()))
            assert ready, (word, self.seen)
            self.seen += os.read(self._ours, 4096)
        before, _, self.seen = self.seen.partition(word)
        return before

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    with contextlib.ExitStack() as opened:
        yield lambda *arguments, **environment: opened.enter_context(
            contextlib.closing(Terminal(*arguments, **environment))
        )


@pytest.mark.slow
def test_ctrl_c_ends_an_answer_and_ctrl_d_all(terminal: Any) -> None:
    chat = terminal(100_000)
    chat.wait_for(b"> ")
    chat.type(b"import os\n")
    chat.wait_for(b"import os\r\n")
    chat.wait_for(b"\n")
    chat.press_ctrl_c()
    chat.wait_for(b"ended by Ctrl-C")
    chat.wait_for(b"> ")
    chat.type(b"\x04")  # Ctrl-D
    chat.wait_for(b"this conversation was not saved")
    assert chat.process.wait(30) == 0


@pytest.mark.slow
def test_first_lines_editing_and_completion(terminal: Any, tmp_path: Path) -> None:
    chat = terminal(4, "--kv-bits", "8", "--kv-budget", "256")
    before = chat.wait_for(b"> ").replace(b"\r\n", b"\n").decode()
    assert before == (
        "mlx-kv: loading reference\n"
        "mlx-kv: reference, context 4,096 tokens; cache: bits 8, budget 256\n"
        "mlx-kv: /help lists commands, Ctrl-C ends an answer, Ctrl-D the chat\n"
    )
    chat.type(b"import is\x7fo\x02\x7fo\x05s\n")  # backspace, and Ctrl-B and Ctrl-E within the line
    chat.wait_for(b" read, 0 known")
    chat.wait_for(b"> ")
    chat.type(b"\x1b[A")  # the line before
    chat.wait_for(b"import oos")
    chat.type(b"\x15/st\t\n")  # Ctrl-U clears the line
    chat.wait_for(b"/stats ")
    chat.wait_for(b"turns             1")
    chat.wait_for(b"> ")
    chat.type(f"/sa\t{tmp_path}/talk\n".encode())
    chat.wait_for(b"saved to")
    chat.wait_for(b"> ")
    chat.type(f"/lo\t{tmp_path}/ta\t\n".encode())
    assert b"no file" not in chat.wait_for(b"talk: 1 turn")


@pytest.mark.slow
def test_typing_during_an_answer(terminal: Any) -> None:
    """It is not mixed into the answer; the next prompt has it."""
    chat = terminal(800)
    chat.wait_for(b"> ")
    chat.type(b"import os\n")
    chat.wait_for(b"import os\r\n")
    chat.wait_for(b"\n")
    chat.type(b"/sqzx")
    assert b"/sqzx" not in chat.wait_for(b"800 tokens, ")
    chat.wait_for(b"> ")
    chat.wait_for(b"/sqzx")
    chat.type(b"\n")
    chat.wait_for(b"unknown command /sqzx")


@pytest.mark.slow
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_half_typed_lines_and_lines_that_are_not_utf_8_on_a_terminal(terminal: Any, locale: str) -> None:
    chat = terminal(4, LC_ALL=locale)
    chat.wait_for(b"> ")
    chat.type(b"import os\n")
    chat.wait_for(b"0 known")
    chat.wait_for(b"> ")
    for _ in range(2):  # a half-typed line, on which Ctrl-C never leaves
        chat.type(b"half")
        chat.wait_for(b"half")
        chat.press_ctrl_c()
        assert b"to leave" not in chat.wait_for(b"> ")
    chat.type(b"abc\xff\n")
    chat.wait_for(rb"this line is not UTF-8 text: 'abc\xff': write it in UTF-8")
    chat.wait_for(b"> ")
    chat.press_ctrl_c()
    chat.wait_for(b"press Ctrl-C again or Ctrl-D to leave; /save FILE keeps the conversation")
    chat.wait_for(b"> ")
    chat.type(b"/stats\n")
    chat.wait_for(b"turns             1")
    chat.wait_for(b"> ")
    for after in (b"> ", b"interrupted"):
        chat.press_ctrl_c()
        chat.wait_for(after)
    assert chat.process.wait(30) == 130
