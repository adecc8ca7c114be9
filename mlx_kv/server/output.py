"""Jobs and their output: the grammars that it follows, and its parts as it comes: content, reasoning, calls, tokens.

mlx-lm's state machine and tool parsers parse chats. A call that cannot be parsed stays text.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, cached_property
from itertools import count
from typing import Any, Protocol

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.server import ToolCallFormatter
from mlx_lm.tool_parsers import json_tools
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mlx_kv.files.tensor_files import read_json
from mlx_kv.generation.encoding import begins_reasoning
from mlx_kv.generation.generate import StopStrings
from mlx_kv.generation.grammar import CallMarks, Constraint, Grammar, GrammarCompiler, GrammarError, GrammarProcessor
from mlx_kv.generation.sequence import BatchToken, TokenScore
from mlx_kv.generation.settings import SamplingSettings
from mlx_kv.generation.thinking import Marks, ThinkingLimit
from mlx_kv.prefixes.index import packed
from mlx_kv.server import chat
from mlx_kv.server.json_http import EVENT_STREAM, ApiError, json_bytes, without_panic
from mlx_kv.server.requests import UnknownFields

ONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"
MIN_LOGPROB = -9999.0  # OpenAI's number for probability 0; JSON has no infinity
COMPILE_SECONDS = 10.0  # for one grammar

# --- jobs, passed between the event loop and the worker ---------------------------------------------------------------

_numbers = count(1)


@dataclass(eq=False)
class Job:
    """A prompt to be continued, for one choice of a request.

    Fields from `has_row` on are written by the worker.

    Attributes:
        tokens: of the prompt.
        sampling: without a seed, the thread's random numbers are used.
        top_logprobs: number of likeliest tokens reported with each token; None reports no log-probabilities.
        keep: whether prompt and answer are added to the prefix cache.
        grammar: constrains the answer; None is unconstrained.
        on_match: called in the worker's thread when `cached` is set.
        has_row: whether it has a row: in prefill, or decoding.
        started: whether its prompt has begun to be read, in this row or one that it lost.
        room: tokens of the answer that are planned for while it has a row.
        cached: prompt tokens found in the prefix cache.
        read: prompt tokens read so far, cached ones included.
        drafted, accepted: draft tokens of the last pass, and accepted ones so far.
        evicted: tokens no longer in its caches, those evicted before they were cached included.
        answer: tokens so far.
        resumed: tokens of the answer that are read with the prompt, since the row was lost and starts again.
        caches: what its row begins with, and how many tokens that has read: of a lost row that cannot be read again as
            it was, or a cached prefix without room for a copy.
        checkpoint: tokens of the prompt that were read, and the caches of then that later ones can't be trimmed to,
            None for others; where there was no room for them as a cached prefix.
        thinking: a limit of its thinking.
        served: the model that answers; None is the server's first.
        images: of the prompt.
    """

    tokens: list[int]
    max_tokens: int
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    top_logprobs: int | None = None
    stop_strings: StopStrings = field(default_factory=StopStrings)
    keep: bool = True
    grammar: GrammarProcessor | None = None
    number: int = field(default_factory=lambda: next(_numbers))
    since: float = field(default_factory=time.monotonic)
    on_match: Callable[[], None] = lambda: None
    has_row: bool = False
    started: bool = False
    room: int = 0
    cached: int = 0
    read: int = 0
    drafted: int = 0
    accepted: int = 0
    evicted: int = 0
    answer: list[int] = field(default_factory=list)
    resumed: int = 0
    caches: tuple[list[Any], int] | None = None
    checkpoint: tuple[int, list[Any]] | None = None
    thinking: ThinkingLimit | None = None
    served: Any = None
    images: tuple[Any, ...] = ()

    @property
    def to_read(self) -> list[int]:
        """Tokens that a row reads before it decodes: the prompt, and the resumed part of the answer."""
        return [*self.tokens, *self.answer[: self.resumed]] if self.resumed else self.tokens

    @cached_property
    def prompt(self) -> bytes:
        """`to_read`, packed: waiting jobs are compared with others at every step."""
        return packed(self.to_read)

    def resume(self) -> None:
        """Called when the row is lost: the next one reads all tokens so far, and continues from there."""
        self.resumed = len(self.answer)
        self.__dict__.pop("prompt", None)

    @property
    def all_tokens(self) -> list[int]:
        """All tokens so far: prompt and answer."""
        return [*self.tokens, *self.answer]


@dataclass(frozen=True)
class OutputChunk:
    """New output of one job.

    Attributes:
        text: may be empty.
        tokens: number of tokens since the last chunk.
        scores: (token id, score) of the tokens that have a text, if the job has `top_logprobs`.
        finish_reason: in the last chunk: "stop" or "length", or "error".
        error: message for the client.
        status: HTTP status of the error.
    """

    job: Job
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    status: int = 500
    scores: tuple[tuple[int, TokenScore], ...] = ()

    def merge(self, following: OutputChunk) -> OutputChunk:
        """This chunk and the following one as one."""
        text, tokens = self.text + following.text, self.tokens + following.tokens
        scores = self.scores + following.scores
        return OutputChunk(self.job, text, tokens, following.finish_reason, scores=scores)


def output_of(
    tokens: Iterable[BatchToken], active: Mapping[int, Job]
) -> tuple[list[OutputChunk], list[tuple[Job, BatchToken]]]:
    """The output of each job that has tokens in a step, and the jobs that end in it, with their last tokens.

    A token that ends a job by a stop string has no finish_reason: the engine would continue.

    Args:
        active: jobs of the engine, by number. Others have ended before.
    """
    chunks: dict[int, OutputChunk] = {}
    finished: dict[int, tuple[Job, BatchToken]] = {}
    for token in tokens:
        job = active.get(token.index)
        if job is None or token.index in finished:
            continue  # ended by a stop string earlier in this step
        job.answer.append(token.token)
        text, finish = job.stop_strings.feed(token.text), token.finish_reason
        if job.stop_strings.stopped:
            finish = "stop"
        elif finish is not None:
            text += job.stop_strings.finish()
        ends = token.finish_reason == "stop"  # with a token that has no text
        scores = () if token.score is None or ends else ((token.token, token.score),)
        chunk = OutputChunk(job, text, 1, finish, scores=scores)
        chunks[job.number] = chunks[job.number].merge(chunk) if job.number in chunks else chunk
        whole = finish == "stop" and not job.stop_strings.stopped
        if finish is not None and job.grammar is not None and (why := job.grammar.error_in(job.answer, whole)):
            error = f"the grammar could not be followed any longer: {why}"
            chunks[job.number] = OutputChunk(job, finish_reason="error", error=error, status=400)
        if finish is not None:
            finished[job.number] = job, token
    return list(chunks.values()), list(finished.values())


# --- tokens -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenText:
    """A token with its text, its bytes and its log-probability.

    The bytes of a token that is a part of a character are exact; its text has U+FFFD there.

    Attributes:
        top: the likeliest tokens at its place.
    """

    token: int
    text: str
    data: bytes
    logprob: float
    top: tuple[TokenText, ...] = ()


class TokenTexts:
    """Texts of the tokens of a tokenizer, cached.

    Tokenizers write tokens that are parts of characters as characters that represent a byte each (GPT-2's table), or
    as <0xE4>; and a space before a word as a character that decoding a single token drops.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes = {char: value for value, char in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
        self._text = cache(self._look_up)

    def of(self, scores: Sequence[tuple[int, TokenScore]]) -> list[TokenText]:
        """Tokens with their scores."""
        return [
            self._one(token, score.logprob, tuple(self._one(other, value) for other, value in score.top))
            for token, score in scores
        ]

    def _one(self, token: int, logprob: float, top: tuple[TokenText, ...] = ()) -> TokenText:
        text, data = self._text(token)
        finite = logprob if logprob >= MIN_LOGPROB else MIN_LOGPROB  # also for NaN
        return TokenText(token, text, data, finite, top)

    def _look_up(self, token: int) -> tuple[str, bytes]:
        written = self._tokenizer.convert_ids_to_tokens(token)
        written = written if isinstance(written, str) else ""  # models may have more tokens than their tokenizer
        text: str = self._tokenizer.decode([token])
        if byte := ONE_BYTE.fullmatch(written):
            return text, bytes([int(byte[1], 16)])
        if written.startswith(SPACE) and not text.startswith(" "):
            text = " " + text
        if "\ufffd" in text and all(char in self._bytes for char in written):
            return text, bytes(self._bytes[char] for char in written)
        return text, text.encode("utf-8", "replace")


# --- text of chats ----------------------------------------------------------------------------------------------------


@dataclass
class Delta:
    """A part of an answer.

    Attributes:
        logprobs: of its tokens, if requested. Text may come later than its tokens.
        content_logprobs: those of them that belong to content.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenText] = field(default_factory=list)
    content_logprobs: list[TokenText] = field(default_factory=list)

    def add(self, other: Delta) -> None:
        self.logprobs += other.logprobs
        self.content_logprobs += other.content_logprobs
        self.content += other.content
        self.reasoning += other.reasoning
        self.tool_calls += other.tool_calls

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that are not empty, by name."""
        named = {"content": self.content, "reasoning": self.reasoning, "tool_calls": self.tool_calls}
        return {name: value for name, value in named.items() if value}


def answer_state(tokenizer: Any, prompt: Sequence[int], beginning: str = "") -> Any:
    """The state in which mlx-lm's machine begins to read the answer to a chat.

    Args:
        prompt: token ids, which may end within reasoning.
        beginning: of the answer, at the end of the prompt.
    """
    initial = "reasoning" if begins_reasoning(tokenizer, prompt, beginning) else "normal"
    machine = make_text_state_machine(tokenizer)  # type: ignore[no-untyped-call]
    return machine.make_state(tokenizer.response_initial_state or initial)


class ContentStops(StopStrings):
    """Stop strings of a chat: they end its content, and are text within reasoning and calls.

    Args:
        state: of the beginning of the answer, as of `answer_state`.
    """

    def __init__(self, strings: Sequence[str], state: Any) -> None:
        super().__init__(strings)
        self._state, self._held = state, ""  # what may be the beginning of a mark

    @property
    def _in_content(self) -> bool:
        return self._state[0] not in ("reasoning", "tool")

    def feed(self, text: str) -> str:
        passed = ""
        for character in text:
            if self._state[0] is None or self.stopped:
                passed += super().feed(character)
                continue
            in_content, held = self._in_content, self._held + character
            self._state, segments = TextStateMachine.split(self._state, character)  # type: ignore[no-untyped-call]
            settled, self._held = held[: len(held) - len(self._state[-1])], self._state[-1]
            before, mark = settled[: len(segments[0][1])], settled[len(segments[0][1]) :]
            passed += super().feed(before) if in_content else before
            if mark and not self.stopped:  # no stop string reaches over a mark
                passed += super().finish() + mark
        return passed

    def finish(self) -> str:
        held, self._held = self._held, ""
        return (super().feed(held) if self._in_content else held) + super().finish()


class ChatOutputParser:
    """Splits the text of a chat's answer, as it comes.

    Args:
        tokenizer: mlx-lm's, with the marks of reasoning and tool calls.
        prompt: token ids, which may end within reasoning.
        one_call: whether calls after the first are dropped.
        bare_call: whether the answer after its reasoning is one call, as JSON.
        beginning: of the answer, at the end of the prompt.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: list[int],
        tools: Sequence[Any],
        stream: bool,
        one_call: bool = False,
        bare_call: bool = False,
        beginning: str = "",
    ) -> None:
        tool_parser = json_tools.parse_tool_call if bare_call else tokenizer.tool_parser
        self._format = ToolCallFormatter(_strict_parser(tool_parser), tools, stream)  # type: ignore[no-untyped-call]
        self._state = answer_state(tokenizer, prompt, beginning)
        self._previous, self._call, self.has_call = self._state[0], "", False
        self._one_call, self._bare_call = one_call, bare_call

    @property
    def in_reasoning(self) -> bool:
        """Whether the last text was reasoning."""
        return bool(self._previous == "reasoning")

    @property
    def in_content(self) -> bool:
        """Whether the last text was content, or may become content."""
        return self._previous not in ("reasoning", "tool") and not self._bare_call

    def feed(self, text: str) -> Delta:
        self._state, segments = TextStateMachine.split(self._state, text)  # type: ignore[no-untyped-call]
        return self._split(segments)

    def finish(self) -> Delta:
        """The text that was held back, at the end of the answer."""
        self._state, rest, state = TextStateMachine.flush(self._state)  # type: ignore[no-untyped-call]
        delta = self._split([(state, rest)])
        if (self._previous == "tool" or self._bare_call) and self._call:
            delta.add(self._tool_call())
        return delta

    def _split(self, segments: list[tuple[str | None, str]]) -> Delta:
        delta = Delta()
        for state, text in segments:
            if self._previous == "tool" and state != "tool":
                delta.add(self._tool_call())
            if state == "tool" or (self._bare_call and state != "reasoning"):
                self._call += text
            elif state == "reasoning":
                delta.reasoning += text
            else:
                delta.content += text
            self._previous = state
        return delta

    def _tool_call(self) -> Delta:
        """The call that has ended; its text, where it cannot be parsed."""
        text, self._call = self._call, ""
        calls: list[dict[str, Any]] = self._format([text])
        if not calls:
            return Delta(text)
        sent = calls if not self._one_call else calls[: 0 if self.has_call else 1]
        self.has_call = True
        return Delta(tool_calls=sent)


def _strict_parser(parser: Callable[..., Any]) -> Callable[..., Any]:
    """A tool parser that raises ValueError for any text that is not a call, as mlx-lm's formatter expects."""

    def parse(text: str, tools: Any) -> list[dict[str, Any]]:
        try:
            parsed = parser(text, tools)
            calls = [dict(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
            named = [
                {"id": uuid.uuid4().hex[:9], **call, "name": str(call["name"]), "arguments": call.get("arguments", {})}
                for call in calls  # nine letters and digits: of other ids some chat templates would refuse the call
            ]
            return list(read_json(json_bytes(named)))  # NaN and the like are not JSON, so they are not a call
        except Exception as error:  # of any kind: the text is a model's
            raise ValueError(f"no tool call: {type(error).__name__}") from error

    return parse


# --- blocks of content ------------------------------------------------------------------------------------------------


class Event(Enum):
    """A change of a block."""

    BEGINS = "begins"
    GROWS = "grows"
    ENDS = "ends"


@dataclass
class Block:
    """A part of an answer that may still grow.

    Attributes:
        index: among the blocks.
        kind: what it becomes: `Text`, `Reasoning` or `Call`.
        text: so far; of a call, its arguments as JSON.
        name, call_id: of a call.
    """

    index: int
    kind: type[chat.Text] | type[chat.Reasoning] | type[chat.Call]
    text: str = ""
    name: str = ""
    call_id: str = ""

    @property
    def part(self) -> chat.Part:
        """The block as it is now."""
        return chat.Call(self.call_id, self.name, self.text) if self.kind is chat.Call else self.kind(self.text)  # type: ignore[call-arg]


Change = tuple[Event, Block, str]  # with the new text of a block that grows


class Blocks:
    """The blocks of one answer, as it comes. White space between two blocks is dropped."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._space = ""  # white space that may be between two blocks

    def add(self, delta: Delta) -> Iterator[Change]:
        """The changes that a part of the answer makes."""
        if delta.reasoning:
            yield from self._grow(chat.Reasoning, delta.reasoning)
        if delta.content:
            yield from self._grow(chat.Text, delta.content)
        for call in delta.tool_calls:
            function = call["function"]
            yield from self._begin(Block(len(self.all), chat.Call, name=function["name"], call_id=call["id"]))
            yield from self._more(function["arguments"])
            yield from self._end()

    def finish(self) -> Iterator[Change]:
        """The changes at the end of the answer."""
        if not self.all and self._space:
            space = self._space
            yield from self._begin(Block(0, chat.Text))
            yield from self._more(space)
        yield from self._end()

    def _grow(self, kind: type[chat.Text] | type[chat.Reasoning], text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind is not kind:
            text = self._space + text
            if not text.strip():
                self._space = text
                return
            yield from self._begin(Block(len(self.all), kind))
        yield from self._more(text)

    def _begin(self, block: Block) -> Iterator[Change]:
        yield from self._end()
        self._space, self._open = "", block
        self.all.append(block)
        yield Event.BEGINS, block, ""

    def _more(self, text: str) -> Iterator[Change]:
        assert self._open is not None, "a block grows that is not open"
        self._open.text += text
        yield Event.GROWS, self._open, text

    def _end(self) -> Iterator[Change]:
        block, self._open = self._open, None
        if block is not None:
            yield Event.ENDS, block, ""


# --- choices ----------------------------------------------------------------------------------------------------------


@dataclass
class Choice:
    """One of the answers to a request.

    Attributes:
        index: among the answers; those to the first prompt come first.
        prompt: index of the prompt that it continues.
        parser: of a chat; None leaves the text as it is.
        echo: text before the first token.
        texts: for log-probabilities; None where they are not requested.
        answer: all of it so far, for an answer that is sent as a whole.
        finish_reason: empty until it has ended.
        first_token, last_token: when its first and its newest tokens came, in seconds of the monotonic clock.
        marks: of the model's thinking, by which its tokens are counted.
    """

    index: int
    prompt: int
    job: Job
    parser: ChatOutputParser | None = None
    echo: str = ""
    texts: TokenTexts | None = None
    answer: Delta = field(default_factory=Delta)
    generated: int = 0
    reasoning_tokens: int = 0
    finish_reason: str = ""
    first_token: float | None = None
    last_token: float | None = None
    marks: Marks | None = None
    _pending: list[TokenText] = field(default_factory=list)  # with text to come, unless they are marks

    def take(self, chunk: OutputChunk) -> Delta:
        """The part of the answer that a chunk of the worker's output adds."""
        if chunk.tokens and self.first_token is None:
            self.first_token = time.monotonic()
        self.generated += chunk.tokens
        was_content = self.parser is None or self.parser.in_content
        if self.parser is None:
            delta = Delta(self.echo + chunk.text)
            self.echo = ""
        else:
            delta = self.parser.feed(chunk.text)
            self.reasoning_tokens += chunk.tokens if self.parser.in_reasoning else 0
        if self.texts is not None:
            delta.logprobs = self.texts.of(chunk.scores)
            is_content, pending = self.parser is None or self.parser.in_content, self._pending + delta.logprobs
            if was_content and is_content and not (delta.reasoning or delta.tool_calls):
                delta.content_logprobs, self._pending = (pending, []) if delta.content else ([], pending)
            else:
                delta.content_logprobs, self._pending = _tokens_of(delta.content, pending, is_content), []
        self.finish_reason = chunk.finish_reason or ""
        if self.finish_reason and self.marks is not None:  # chunks may have thinking and content
            counted = self.marks.count(self.job.answer)
            self.reasoning_tokens = counted if self.marks.spans(self.job.answer) else self.reasoning_tokens
        if self.finish_reason and self.parser is not None:
            delta.add(self.parser.finish())
            delta.content_logprobs += self._pending
            if self.parser.has_call and self.finish_reason == "stop":
                self.finish_reason = "tool_calls"
        return delta


def _tokens_of(text: str, tokens: list[TokenText], last: bool) -> list[TokenText]:
    """The last tokens that make up a text, or the first; marks before or after it are not part of it."""
    part: list[TokenText] = []
    for token in reversed(tokens) if last else tokens:
        if sum(len(each.text) for each in part) >= len(text):
            break
        part.append(token)
    return part[::-1] if last else part


@dataclass(frozen=True)
class Usage:
    """Token counts of a request: each prompt once, all answers, and cached prefixes of the prompts."""

    prompt_tokens: int
    generated: int
    cached: int
    reasoning: int

    @classmethod
    def of(cls, choices: Sequence[Choice]) -> Usage:
        first = {choice.prompt: choice.job for choice in reversed(choices)}
        return cls(
            sum(len(job.tokens) for job in first.values()),
            sum(choice.generated for choice in choices),
            sum(job.cached for job in first.values()),
            sum(choice.reasoning_tokens for choice in choices),
        )


class OutputWriter(Protocol):
    """The objects of a response in the form of one API.

    Attributes:
        stream_type: media type of a stream.
        waiting: what a stream sends when nothing came for some seconds.
        last: what a stream ends with, after an error too.
    """

    stream_type: bytes = EVENT_STREAM
    waiting: bytes = b": still there\n\n"
    last: bytes = b""

    @abstractmethod
    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """All choices, which have ended, in one object."""

    def begin(self, choices: Sequence[Choice]) -> bytes:
        """The beginning of a stream; nothing by default."""
        return b""

    @abstractmethod
    def part(self, choice: Choice, delta: Delta) -> bytes:
        """A part of a choice; its end if it has a `finish_reason`."""

    @abstractmethod
    def end(self, choices: Sequence[Choice]) -> bytes:
        """The end of a stream, after all choices."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """The end of a stream that failed."""


# --- grammars ---------------------------------------------------------------------------------------------------------


class Grammars:
    """Compiles the constraints of all requests to a server, in a thread.

    Args:
        tokenizer: mlx-lm's.
        unknown: for schemas that are not fully enforced.
    """

    def __init__(self, tokenizer: Any, unknown: UnknownFields) -> None:
        self._unknown = unknown
        self._tokenizer, self._compiler = tokenizer, GrammarCompiler(tokenizer)
        self._thread = ThreadPoolExecutor(1, "mlx-kv grammar")  # so that no prompt waits for a slow grammar

    async def compile(self, constraint: Constraint | None, param: str) -> Grammar | None:
        """The grammar of a constraint; None for none.

        Args:
            param: the field that has the constraint.

        Raises:
            ApiError: 400 for one that is refused or takes too long, 429 where others take too long.
        """
        if constraint is None:
            return None
        marks = marks_of(self._tokenizer)
        if constraint.kind == "auto_calls" and marks is None:
            self._unknown.no_effect("format", "the texts of tools follow grammars where a model writes calls as JSON")
            return None
        compiling = self._thread.submit(
            without_panic, "the grammar compiler", lambda: self._compiler.compile(constraint, marks)
        )
        try:
            grammar = await asyncio.wait_for(asyncio.wrap_future(compiling), COMPILE_SECONDS)
        except TimeoutError:
            if compiling.cancelled():  # before its turn came
                message = "grammars of other requests are being compiled: try again later"
                raise ApiError(429, message, param, headers={"Retry-After": "5"}) from None
            message = f"it took more than {COMPILE_SECONDS:g} seconds to compile: send a smaller one"
            raise ApiError(400, f"{param} cannot be followed: {message}", param) from None
        except GrammarError as error:
            raise ApiError(400, f"{param} cannot be followed: {error}", param) from None
        for unenforced in grammar.unenforced:
            if self._unknown.strict:
                raise ApiError(400, f"{param} cannot be followed: {unenforced}", param)
            self._unknown.log_once(unenforced, f"schemas that are not strict are not fully enforced: {unenforced}")
        return grammar

    def close(self) -> None:
        """Ends the thread after the grammar that it compiles."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def marks_of(tokenizer: Any) -> CallMarks | None:
    """The tokens around a call, for models that write calls as JSON; None for other models."""
    if not tokenizer.has_tool_calling or tokenizer.tool_parser is not json_tools.parse_tool_call:
        return None
    return CallMarks(tuple(tokenizer.tool_call_start_tokens), tuple(tokenizer.tool_call_end_tokens or ()))
