"""A chat on a terminal: its first lines, editing and completion, typing during an answer, Ctrl-C, and leaving."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from mlx_kv.cli.chat_session import questions

Called = Any


CTRL_C = "\x03"


class Terminals(io.StringIO):
    """Says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def typing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Has keys typed on a terminal; Ctrl-D follows."""
    with contextlib.ExitStack() as opened:

        def types(*typed: str) -> None:
            keys = opened.enter_context(create_pipe_input())
            opened.enter_context(create_app_session(input=keys))
            keys.send_text("".join(typed) + "\x04")

        monkeypatch.setattr("sys.stdin", Terminals())
        monkeypatch.setattr("prompt_toolkit.output.create_output", lambda **options: DummyOutput())
        yield types


def test_ctrl_c_clears_the_line_and_twice_leaves(typing: Any, capsys: pytest.CaptureFixture[str]) -> None:
    half = "half" + CTRL_C
    before = signal.getsignal(signal.SIGINT)
    typing(
        *(
            "a\r",
            half,
            half,
            "b\r",
            '"""c\rd',
            CTRL_C,
            "d\r",
            '"""e\r',
            CTRL_C,
            CTRL_C,
            "f\r",
            CTRL_C,
            half,
            CTRL_C,
            "\r",
        ),
        *(CTRL_C, CTRL_C),
    )
    lines, hints = questions([], lambda: "a hint"), "mlx-kv: a hint\n"
    assert [next(lines) for _ in range(4)] == ["a", "b", "d", "f"]
    assert capsys.readouterr().err == hints
    with pytest.raises(KeyboardInterrupt):
        next(lines)
    assert capsys.readouterr().err == hints * 3
    assert signal.getsignal(signal.SIGINT) is before


def test_questions_of_several_lines(typing: Any) -> None:
    typing('"""two\r\rthree"""\r', "four\r", "\x1b[200~x\ny\x1b[201~\r", '"""five"""\r', '"""\rsix\r"""\r')
    assert list(questions()) == ["two\n\nthree", "four", "x\ny", "five", "six"]


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
    for keys, code, said in (
        (CTRL_C * 2, 130, [hint, "mlx-kv: interrupted"]),
        ("x\r" + CTRL_C * 2, 130, [hint + keeps, "mlx-kv: interrupted"]),
        ("x\r", 0, [left + "FILE before you leave"]),
        ("x\r/exit\r", 0, [left + "FILE before you leave"]),
        (f"x\r{save}\r", 0, []),
        (f"x\r{save}\r/undo\r{CTRL_C}", 0, [hint]),
        (f"x\r{save}\ry\r{CTRL_C}q\r", 0, [hint + keeps, left + "FILE before you leave"]),
        (f"/load {tmp_path / 'c'}\r{CTRL_C}", 0, [hint]),
        ("x\r/reset\r", 0, []),
    ):
        typing(keys)
        done = command("chat", "--max-tokens", "2")
        others = (" read, ", "saved to", "turn", "cleared")
        errors = [line for line in done.err.splitlines() if line and not any(word in line for word in others)]
        assert (done.code, errors[:3], errors[3:]) == (code, first, said)


def plain(printed: bytes) -> bytes:
    """What was printed, without colours and moves of the cursor; those to the right are spaces."""
    moved = re.sub(rb"\x1b\[(\d+)C", lambda move: b" " * int(move[1]), printed)
    return re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]|\x08", b"", moved)


class Terminal:
    """`mlx-kv chat` on a terminal of its own."""

    def __init__(self, max_tokens: int, *options: str, **environment: str) -> None:
        self._ours, theirs = pty.openpty()
        self.seen = self._sequence = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlx_kv.cli", "chat", "--max-tokens", str(max_tokens), *options],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            # Nothing answers where the cursor is.
            env=os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"} | environment,
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
            read = self._sequence + os.read(self._ours, 4096)
            end = re.search(rb"(\x1b(\[[0-9;?]*)?)?$", read)  # a sequence that is not whole
            assert end is not None
            self._sequence = end[0]
            self.seen += plain(read[: end.start()])
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
    chat.wait_for(b"\nimport unittest")
    chat.press_ctrl_c()
    chat.wait_for(b"ended by Ctrl-C")
    chat.wait_for(b"> ")
    chat.type(b"\x04")  # Ctrl-D
    chat.wait_for(b"this conversation was not saved")
    assert chat.process.wait(30) == 0


@pytest.mark.slow
def test_first_lines_editing_and_completion(terminal: Any, tmp_path: Path) -> None:
    chat = terminal(4, "--kv-bits", "8", "--kv-budget", "256")
    before = chat.wait_for(b"> ").decode()
    assert [line for line in before.splitlines() if line] == [
        "mlx-kv: loading reference",
        "mlx-kv: reference, context 4,096 tokens; cache: bits 8, budget 256",
        "mlx-kv: /help lists commands, Ctrl-C ends an answer, Ctrl-D the chat",
    ]
    chat.type(b"import is\x7fo\x02\x7fo\x05s\n")  # backspace, and Ctrl-B and Ctrl-E within the line
    chat.wait_for(b" read, 0 known")
    chat.wait_for(b"> ")
    chat.type(b"\x1b[A")  # the line before
    chat.wait_for(b"import oos")
    chat.type(b"\x15/st\t")  # Ctrl-U clears the line
    chat.wait_for(b"ats")
    chat.type(b"\n")
    chat.wait_for(b"turns             1")
    chat.wait_for(b"> ")
    chat.type(b"/sa\t")
    chat.wait_for(b"ve")
    chat.type(f"{tmp_path}/talk\n".encode())
    chat.wait_for(b"saved to")
    chat.wait_for(b"> ")
    chat.type(f"/load {tmp_path}/ta\t".encode())
    chat.wait_for(b"lk")
    chat.type(b"\n")
    assert b"no file" not in chat.wait_for(b"talk: 1 turn")


@pytest.mark.slow
def test_typing_during_an_answer(terminal: Any) -> None:
    """It is not mixed into the answer; the next prompt has it."""
    chat = terminal(800)
    chat.wait_for(b"> ")
    chat.type(b"import os\n")
    chat.wait_for(b"\nimport unittest")
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
