"""Lines typed in a chat: editing, history, completion, and Ctrl-C while a line is typed or an answer runs."""

from __future__ import annotations

import contextlib
import glob
import io
import os
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import click

from mlx_kv.cli.output import say

QUOTES = '"""'
LEAVE = "press Ctrl-C again or Ctrl-D to leave"


class LineInterruptedError(Exception):
    """Ctrl-C was pressed at the prompt of a terminal.

    Attributes:
        half_typed: whether a question had been begun, which is dropped.
    """

    def __init__(self, half_typed: bool) -> None:
        super().__init__()
        self.half_typed = half_typed


def on_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def lines_typed(how_to_leave: Callable[[], str] = lambda: LEAVE, commands: Sequence[str] = ()) -> Iterator[str]:
    """Questions and commands from stdin, one at a time; three quotation marks begin and end one of several lines.

    On a terminal, Ctrl-C drops a half-typed question, and Tab completes commands and the names of files after them.

    Args:
        how_to_leave: the hint that a first Ctrl-C on an empty line prints.
        commands: with their slash.

    Raises:
        KeyboardInterrupt: a second Ctrl-C in a row on an empty line.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is not UTF-8 is refused, and the next one read
    if on_terminal():
        _complete(commands)
    lines = iter(_typed_on_terminal, None) if on_terminal() else iter(sys.stdin or ())
    hinted = False
    while True:
        try:
            text = _question(lines)
        except LineInterruptedError as interrupt:
            if hinted and not interrupt.half_typed:
                raise KeyboardInterrupt from None
            hinted = not interrupt.half_typed
            if hinted:
                say(how_to_leave())
            continue
        if text is None:
            return
        hinted = False
        if text.strip():
            yield text


def _question(lines: Iterator[str]) -> str | None:
    """One question or command; None where there are no more lines."""
    line = next(lines, None)
    if line is None:
        return None
    text = line.rstrip("\n")
    if not text.lstrip().startswith(QUOTES):
        return text
    text = text.lstrip()[len(QUOTES) :]
    try:
        while not text.rstrip().endswith(QUOTES) and (more := next(lines, None)) is not None:
            text += "\n" + more.rstrip("\n")
    except LineInterruptedError:
        raise LineInterruptedError(half_typed=True) from None
    return text.rstrip().removesuffix(QUOTES).strip("\n")


def _complete(commands: Sequence[str]) -> None:
    """Gives `input` line editing with history, and completion at Tab, where Python has readline."""
    try:
        import readline
    except ImportError:
        return

    def complete(word: str, number: int) -> str | None:
        line = readline.get_line_buffer().lstrip()
        matches = [f"{name} " for name in commands if name.startswith(word)] if line == word else []
        if line != word and line.startswith("/"):
            paths = sorted(glob.glob(glob.escape(os.path.expanduser(word)) + "*"))
            matches = [path + "/" if os.path.isdir(path) else path for path in paths]
        return matches[number] if number < len(matches) else None

    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    is_libedit = "libedit" in (readline.__doc__ or "")  # of macOS
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")


def _typed_on_terminal() -> str | None:
    try:
        with ctrl_c(_interrupt_line):
            return input("> ")
    except EOFError:
        click.echo()
        return None
    except LineInterruptedError:
        click.echo()  # the next prompt begins a line
        raise


@contextlib.contextmanager
def no_echo() -> Iterator[None]:
    """Typed characters are not printed meanwhile; the next prompt has them."""
    try:
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (AttributeError, OSError, ValueError, termios.error):  # no terminal
        yield
        return
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(terminal, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _interrupt_line(number: int, frame: FrameType | None) -> None:
    readline = sys.modules.get("readline")  # without it, only the terminal knows what stands on the line
    raise LineInterruptedError(half_typed=readline is not None and bool(readline.get_line_buffer()))


def check_utf8(text: str) -> None:
    """Raises click.UsageError: a line had bytes that are not UTF-8, which Python reads as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        begins = repr(text.encode("utf-8", "surrogateescape")[:40])[1:]
        raise click.UsageError(f"this line is not UTF-8 text: {begins}: write it in UTF-8") from None


@contextlib.contextmanager
def ctrl_c(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handles Ctrl-C in this way meanwhile; in the main thread only, as Python requires."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Tells whether Ctrl-C was pressed meanwhile. Once is asked for here; another is what it always is."""
    pressed: list[int] = []

    def press(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        if len(pressed) > 1:
            raise KeyboardInterrupt

    with ctrl_c(press):
        yield lambda: bool(pressed)


@contextlib.contextmanager
def stops(command: str) -> Iterator[None]:
    """Ctrl-C ends this command, and the chat goes on.

    Raises:
        click.ClickException: it was pressed.
    """
    try:
        with ctrl_c(signal.default_int_handler):
            yield
    except KeyboardInterrupt:
        raise click.ClickException(f"{command} was ended by Ctrl-C") from None
