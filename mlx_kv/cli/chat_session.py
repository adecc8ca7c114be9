"""The loop of `mlx-kv chat`: lines that are typed, answers, commands, and conversations in files."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import click
import mlx.nn as nn

from mlx_kv.cli.cache import load_for
from mlx_kv.cli.model import draft_lines
from mlx_kv.cli.options import message_of
from mlx_kv.cli.output import file_errors, human_bytes, say, tokens_line
from mlx_kv.files.serialization import check_output, model_fingerprint, save_prompt_cache
from mlx_kv.generation.conversation import Conversation, Draws, Turn
from mlx_kv.generation.images import image_content
from mlx_kv.generation.settings import LogitsProcessor
from mlx_kv.generation.statistics import cache_statistics
from mlx_kv.mlxlm.batching import check_same_kinds
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.loading import vocabulary_of
from mlx_kv.policy import CachePolicy
from mlx_kv.settings import option_value

QUOTES = '"""'
OF_MLX_LM = {"q": "/exit", "r": "/reset", "h": "/help"}  # what mlx_lm.chat calls them

# --- lines that are typed ---------------------------------------------------------------------------------------------


def on_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def questions(commands: Sequence[str] = (), how_to_leave: Callable[[], str] = str) -> Iterator[str]:
    """Questions and commands from stdin, one at a time; three quotation marks begin and end one of several lines.

    Args:
        commands: with their slash.
        how_to_leave: the hint that a first Ctrl-C on an empty line prints, on a terminal.

    Raises:
        KeyboardInterrupt: a second Ctrl-C in a row on an empty line.
    """
    lines = _lines_of_terminal(commands, how_to_leave) if on_terminal() else _lines_of_stdin()
    for text in lines:
        if text.lstrip().startswith(QUOTES):
            text = text.lstrip().removeprefix(QUOTES).rstrip().removesuffix(QUOTES).strip("\n")
        if text.strip():
            yield text


def _is_open(text: str) -> bool:
    """Whether a question of several lines has begun, and not ended."""
    text = text.strip()
    return text.startswith(QUOTES) and (len(text) < 2 * len(QUOTES) or not text.endswith(QUOTES))


def _lines_of_stdin() -> Iterator[str]:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is not UTF-8 is refused, and the next one read
    lines = iter(sys.stdin or ())
    for text in lines:
        while _is_open(text) and (more := next(lines, None)) is not None:
            text += more
        yield text.rstrip("\n")


def _lines_of_terminal(commands: Sequence[str], how_to_leave: Callable[[], str]) -> Iterator[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import get_app
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.output import create_output

    class Commands(Completer):
        """Completes commands, and the names of files after them."""

        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
            word, space, rest = document.text_before_cursor.lstrip().partition(" ")
            if space and word in commands:
                return PathCompleter(expanduser=True).get_completions(Document(rest), complete_event)
            names = () if space or not word else (name for name in commands if name.startswith(word))
            return [Completion(f"{name} ", -len(word), display=name) for name in names]

    session = PromptSession[str](
        multiline=Condition(lambda: _is_open(get_app().current_buffer.text)),
        completer=Commands(),
        complete_while_typing=False,
        enable_suspend=True,
        output=create_output(always_prefer_tty=True),
    )
    hinted = False
    while True:
        try:
            text = session.prompt("> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            half_typed = bool(session.default_buffer.text)
            if hinted and not half_typed:
                raise
            hinted = not half_typed
            if hinted:
                say(how_to_leave())
            continue
        hinted = False
        yield text


def check_utf8(text: str) -> None:
    """Raises click.UsageError: a line had bytes that are not UTF-8, which are lone surrogates in the text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        begins = repr(text.encode("utf-8", "surrogateescape")[:40])[1:]
        raise click.UsageError(f"this line is not UTF-8 text: {begins}: write it in UTF-8") from None


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


# --- conversations in files -------------------------------------------------------------------------------------------


class ChatFiles:
    """Conversations in files: prompt caches, with what was said in their words.

    Attributes:
        whole: whether this process has all of the model; else nothing can be saved.
    """

    def __init__(self, name: str, model: nn.Module, tokenizer: Any, policy: CachePolicy, whole: bool) -> None:
        self._name, self._model, self._tokenizer, self.whole = name, model, tokenizer, whole
        self._layers = len(make_prompt_cache(model, policy)) if whole else 0

    def save(self, path: Path, conversation: Conversation) -> None:
        """Raises click.UsageError, ValueError: it cannot be kept, or not there; an older file is then as it was."""
        self._check()
        if _has_images(conversation):
            raise click.UsageError("this conversation has images, which no file keeps: /undo the turns with them first")
        if conversation.caches is None:
            then = "ask a question first, which reads it again" if conversation.turns else "there is nothing to save"
            raise click.UsageError(f"the cache is empty: {then}")
        known = conversation.tokens
        said = {
            "system": conversation.settings.system,
            "tokens": known,
            # All but the last have the beginning of these, where the chat template leaves it as it was.
            "turns": [
                {name: value for name, value in asdict(turn).items() if name != "images"}
                | {"tokens": len(turn.tokens) if known[: len(turn.tokens)] == turn.tokens else 0}
                for turn in conversation.turns
            ],
        }
        words = {"model": self._name, "chat": json.dumps(said)}
        fingerprint = model_fingerprint(self._model, self._tokenizer)
        layers = conversation.caches[: self._layers]  # without those of a draft model
        with file_errors(f"write {path}"):
            check_output(path, fix="")  # with advice that can be followed in a chat
            save_prompt_cache(path, layers, words, tokens=conversation.read, fingerprint=fingerprint)

    def load(self, path: Path, conversation: Conversation) -> bool:
        """Goes on from a file; says whether its caches serve, or all is read again.

        Raises:
            click.UsageError, ValueError: it holds no conversation with this model.
        """
        self._check()
        file = load_for(path, self._model, self._tokenizer, self._name)
        if "chat" not in file.metadata or file.tokens is None:
            raise click.UsageError(f"{path} holds a prompt and no conversation: go on from it with mlx-kv generate")
        try:
            turns, system = _what_was_said(file.metadata["chat"], vocabulary_of(self._model))
        except (ValueError, TypeError, LookupError, RecursionError):
            raise click.UsageError(f"{path} holds a conversation that is damaged: give another file") from None
        try:
            check_same_kinds(conversation.engine.make_caches(), file.caches)
        except ValueError:  # another policy, or no draft model
            conversation.go_on_from(turns, system)
            return False
        conversation.go_on_from(turns, system, file.caches, file.tokens)
        return True

    def _check(self) -> None:
        if not self.whole:
            raise click.UsageError("each of several ranks has a part of the conversation: it cannot be kept in a file")


def _what_was_said(text: str, vocabulary: int) -> tuple[list[Turn], str | None]:
    """The turns of a file, and the message before them; raises what comes of a text that `save` has not written."""
    said = json.loads(text)
    known, turns = said["tokens"], []
    for turn in said["turns"]:
        turns.append(Turn(**turn | {"tokens": known[: turn["tokens"]], "images": ()}))
        counts = turn["tokens"], turn["prompt_tokens"], turn["reused"], turn["answer_tokens"]
        words = turn["question"], turn["answer"], turn["finish_reason"]
        if not all(type(count) is int and count >= 0 for count in counts) or {type(word) for word in words} != {str}:
            raise ValueError("a turn is none")
    if type(known) is not list or not all(type(token) is int and 0 <= token < vocabulary for token in known):
        raise ValueError("tokens are none of the model's")
    if not isinstance(said["system"], str | None):
        raise ValueError("the message before all others is not text")
    return turns, said["system"]


def _has_images(conversation: Conversation) -> bool:
    return any(turn.images for turn in conversation.turns)


# --- the loop ---------------------------------------------------------------------------------------------------------


class ChatSession:
    """The loop of a conversation.

    Args:
        draws: what draws the tokens of an answer, from a position on.
        processors: of their logits.
        context: positions that the model was made for.
    """

    def __init__(
        self,
        conversation: Conversation,
        files: ChatFiles,
        max_tokens: int,
        draws: Draws,
        processors: Sequence[LogitsProcessor],
        context: int | None,
    ) -> None:
        self._conversation, self._files = conversation, files
        self._max_tokens, self._draws, self._processors, self._context = max_tokens, draws, processors, context
        self._seconds = (0.0, 0.0)  # of the last turn, where it was asked here: until its first token, and after
        self._saved: list[Turn] = []  # those that a file has
        self._images: list[bytes] = []  # of the next question
        self._commands: dict[str, tuple[Callable[[str], None], str]] = {
            "/help": (self._help, "what can be typed"),
            "/image": (self._image, "FILE: adds an image to the next question"),
            "/undo": (self._undo, "takes the last question and its answer back"),
            "/reset": (self._reset, "forgets all that was said"),
            "/save": (self._save, "FILE: keeps the conversation"),
            "/load": (self._load, "FILE: goes on from one that was kept"),
            "/stats": (self._stats, "what is held"),
            "/exit": (self._help, "ends, as Ctrl-D does"),
        }

    def greet(self, name: str, policy: CachePolicy) -> None:
        """Prints the model, its context, the cache policy and the most important commands, in two lines."""
        changed = {each: value for each, value in policy.settings().items() if each != "growth"}
        plain = (str, int, float, tuple)  # other objects, such as a calibration, by the name of their setting
        settings = [
            f"{each} {option_value(value)}" if isinstance(value, plain) else each for each, value in changed.items()
        ]
        context = "" if self._context is None else f", context {self._context:,} tokens"
        say(f"{name}{context}; cache: {', '.join(settings) or 'all tokens, not quantized'}")
        say("/help lists commands, Ctrl-C ends an answer, Ctrl-D the chat")

    def run(self) -> None:
        """Until there are no more lines, or one ends it."""

        def how_to_leave() -> str:
            return "press Ctrl-C again or Ctrl-D to leave" + "; /save FILE keeps the conversation" * self._unsaved

        for line in questions(list(self._commands), how_to_leave):
            text = OF_MLX_LM.get(line.strip(), line)
            word, _, rest = text.strip().partition(" ")
            if word == "/exit":
                break
            try:
                check_utf8(text)
                if word in self._commands:
                    self._commands[word][0](rest.strip())
                elif word.startswith("/") and word[1:].isalpha():
                    say(f"unknown command {word}: /help lists the commands")
                else:
                    self._answer(text)
            except click.ClickException as error:
                say(" ".join(error.format_message().split()))
            except ValueError as error:
                say(" ".join(message_of(error, click.get_current_context().command).split()))
        if on_terminal() and self._unsaved:
            say("this conversation was not saved: next time, type /save FILE before you leave")

    def _answer(self, question: str) -> None:
        started, first = time.perf_counter(), None
        with no_echo(), interrupts() as interrupted:
            self._check_length(question)
            tokens = self._conversation.ask(
                question, self._max_tokens, self._draws, self._processors, interrupted, self._images
            )
            with contextlib.closing(tokens):
                for token in tokens:
                    first = first or time.perf_counter()
                    click.echo(token.text, nl=False)
                    sys.stdout.flush()
        if first is None:
            say("interrupted before the answer began: the next question reads the conversation again")
            return
        click.echo()
        self._images.clear()
        self._seconds = first - started, time.perf_counter() - first
        turn = self._conversation.turns[-1]
        new = turn.prompt_tokens - turn.reused
        rate = f", {(turn.answer_tokens - 1) / self._seconds[1]:,.1f} tokens/s" if turn.answer_tokens > 1 else ""
        ends = {"stop": "", "length": "; --max-tokens ended it", "interrupted": "; ended by Ctrl-C"}
        say(f"{turn.answer_tokens:,} tokens{rate}; {new:,} read, {turn.reused:,} known{ends[turn.finish_reason]}")
        if self._context is not None and len(turn.tokens) > self._context:
            say(f"note: {len(turn.tokens):,} tokens, but this model was made for {self._context:,}: /reset")

    def _check_length(self, question: str) -> None:
        """Raises click.UsageError: the conversation with this question would be longer than the model's context."""
        if self._context is None:
            return
        known, tokens = len(self._conversation.tokens), len(self._conversation.prompt_of(question, self._images).tokens)
        if tokens <= self._context:
            return
        has, shorten = f"but this model was made for {self._context:,}", "ask a shorter question"
        if not known:
            raise click.UsageError(f"this prompt has {tokens:,} tokens, {has}: {shorten}")
        raise click.UsageError(
            f"{known:,} tokens so far and {tokens:,} with this question, {has}: {shorten}, or /undo or /reset first"
        )

    # --- commands -------------------------------------------------------------------------------------------------

    def _help(self, rest: str) -> None:
        for name, (_, what) in self._commands.items():
            click.echo(f"{name:<8}{what}", err=True)
        click.echo(f"{QUOTES:<8}begins and ends a question of several lines", err=True)
        click.echo(f"{'Ctrl-C':<8}ends an answer, or clears the line; twice on an empty line, the chat", err=True)

    def _image(self, rest: str) -> None:
        path = self._path("/image", rest)
        if not self._files.whole:
            raise click.UsageError("images are read by one machine alone: run the chat in one")
        content = image_content(path)
        self._conversation.check_image(content)
        self._images.append(content)
        say(f"{path} comes with the next question; /undo takes it back")

    def _undo(self, rest: str) -> None:
        if self._images:
            self._images.pop()
            say(f"removed the last image: {len(self._images)} left for the next question")
            return
        kept = self._conversation.undo()
        self._seconds = (0.0, 0.0)
        how = "" if kept else "; these caches cannot go back, and all is read again"
        say(f"removed the last turn: {self._turns} left{how}")

    def _reset(self, rest: str) -> None:
        self._conversation.go_on_from([], self._conversation.settings.system)
        self._images.clear()
        say("conversation cleared")

    def _save(self, rest: str) -> None:
        path = self._path("/save", rest)
        with stops("/save"):
            self._files.save(path, self._conversation)
        self._saved = list(self._conversation.turns)
        say(f"saved to {path}: {self._turns}")

    def _load(self, rest: str) -> None:
        path = self._path("/load", rest)
        with stops("/load"):
            served = self._files.load(path, self._conversation)
        self._images.clear()
        self._seconds, self._saved = (0.0, 0.0), list(self._conversation.turns)
        say(
            f"{path}: {self._turns}"
            + ("" if served else "; its caches were made with other settings, so the conversation is read again")
        )

    def _stats(self, rest: str) -> None:
        conversation = self._conversation
        if conversation.turns:
            turn = conversation.turns[-1]
            new = turn.prompt_tokens - turn.reused
            lines = [
                tokens_line("known", turn.reused, None),
                tokens_line("prompt", new, new / self._seconds[0] if self._seconds[0] else None),
                tokens_line("generation", turn.answer_tokens, None),
            ]
            click.echo("\n".join(lines), err=True)
        click.echo(f"turns       {len(conversation.turns):7,}", err=True)
        click.echo(tokens_line("held", len(conversation.read), None), err=True)
        statistics = cache_statistics(conversation.caches or [])
        live, allocated = human_bytes(statistics.bytes_live), human_bytes(statistics.bytes_allocated)
        click.echo(f"KV cache    {live} live, {allocated} allocated", err=True)
        if statistics.tokens_evicted:
            tokens, compactions = statistics.tokens_evicted, statistics.compactions
            click.echo(f"evicted     {tokens:,} tokens in {compactions:,} compactions", err=True)
        speculation = conversation.engine.speculation
        if speculation is not None and speculation.rounds:
            click.echo(draft_lines(speculation), err=True)

    def _path(self, command: str, rest: str) -> Path:
        """The file that a command names: quoted as in a shell, or as it stands, spaces included."""
        name, quoted = rest, f'put the name in double quotation marks, as in {command} "my chat"'
        if set(rest) & {'"', "'", "\\"}:
            try:
                words = shlex.split(rest)
            except ValueError as error:
                raise click.UsageError(f"{command} {rest}: {str(error).lower()}: {quoted}") from None
            if len(words) > 1:
                raise click.UsageError(f"{command} {rest}: these are {len(words)} names: {quoted}")
            name = words[0]
        if not name:
            raise click.UsageError(f"{command} needs the name of a file")
        try:
            return Path(name).expanduser()
        except RuntimeError as error:  # there is no such user
            raise click.UsageError(f"{name}: {error}: give another name") from None

    @property
    def _unsaved(self) -> bool:
        """Whether there are turns that no file has, and that one could have."""
        turns = self._conversation.turns
        return self._files.whole and not _has_images(self._conversation) and turns != self._saved[: len(turns)]

    @property
    def _turns(self) -> str:
        count = len(self._conversation.turns)
        return f"{count} turn{'' if count == 1 else 's'}"
