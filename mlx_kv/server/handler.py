"""Completion requests over HTTP: admission, from a body to its jobs, and from their output to a response.

Runs in the event loop. An invalid request is refused before anything is computed for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mlx_kv.cache.checks import token_ids
from mlx_kv.generation.encoding import ChatSettings, encode_prompt
from mlx_kv.generation.generate import StopStrings
from mlx_kv.generation.grammar import Grammar
from mlx_kv.generation.images import MAX_BYTES, ImagePrompt, encode_parts, reads_images
from mlx_kv.generation.sequence import FIRST_EXPECTED
from mlx_kv.generation.thinking import LeadIn, Marks, ThinkingLimit
from mlx_kv.server.json_http import (
    SHUTTING_DOWN,
    ApiError,
    JsonResponse,
    error_body,
    json_bytes,
    read_body,
    without_panic,
)
from mlx_kv.server.memory import MemoryLimit
from mlx_kv.server.output import (
    ChatOutputParser,
    Choice,
    ContentStops,
    Delta,
    Grammars,
    Job,
    OutputChunk,
    OutputWriter,
    TokenTexts,
    Usage,
    answer_state,
    marks_of,
)
from mlx_kv.server.remote_images import AT_ONCE, MAX_REMOTE
from mlx_kv.server.requests import (
    IMAGE_MARK,
    CompletionRequest,
    EmbeddingRequest,
    Limits,
    RequestRules,
    UnknownFields,
    collect_images,
)
from mlx_kv.server.served import ModelTable, Served
from mlx_kv.server.templates import ChatTemplate
from mlx_kv.server.worker import Worker

HEADER, REQUEST_ID = "X-MLX-KV-Prefix", "X-Request-Id"
CLIENT_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)  # is written into the log
KEEP_ALIVE = 15.0  # seconds without output after which a stream sends a sign of life, for proxies
COMPLETIONS = ("/v1/completions", "/completions")
CHATS = ("/v1/chat/completions", "/chat/completions")
RESPONSES, MESSAGES = ("/v1/responses", "/responses"), ("/v1/messages",)
OLLAMA_CHATS, OLLAMA_PROMPTS = ("/api/chat",), ("/api/generate",)
ENDPOINTS = dict.fromkeys(COMPLETIONS, "completions") | dict.fromkeys(CHATS, "chat")
ENDPOINTS |= dict.fromkeys(RESPONSES, "responses") | dict.fromkeys(MESSAGES, "messages")
ENDPOINTS |= dict.fromkeys(OLLAMA_CHATS, "ollama chat") | dict.fromkeys(OLLAMA_PROMPTS, "ollama generate")
# Of max_tokens, for thinking; None is no limit.
EFFORT_SHARES: dict[str | None, float | None] = {
    **{"minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": 0.95},
    "max": None,
}
HANG_UP = 0.5  # seconds between two looks at whether a client has hung up
MATCH_SECONDS = 1.0  # for which a stream waits until its header can report the reused tokens
STALLED = 60.0  # seconds after which a client that stops reading counts as hung up
T = TypeVar("T")
log = logging.getLogger("mlx_kv.server")

# --- admission --------------------------------------------------------------------------------------------------------


class OutputCollector:
    """Output of the jobs of one request until it is taken; waiting chunks of a job are joined."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._chunks: dict[Job, OutputChunk] = {}
        self._error: ApiError | None = None
        self._ready, self._silent = asyncio.Event(), False
        self._looked_up, self._unmatched = asyncio.Event(), len(jobs)
        self._tick()

    def _tick(self) -> None:
        """Checks regularly whether nothing came: a timer for each chunk would cost more than the chunk."""
        if self._silent:
            self._ready.set()
        self._silent = True
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE / 2, self._tick)

    def put(self, chunk: OutputChunk) -> None:
        """Adds a chunk; an error ends the request."""
        if chunk.error is not None:
            self.fail(ApiError(chunk.status, chunk.error))
            return
        before = self._chunks.get(chunk.job)
        self._chunks[chunk.job] = chunk if before is None else before.merge(chunk)
        self._ready.set()
        self._looked_up.set()

    def fail(self, error: ApiError) -> None:
        """Raises an error in `get`, after the chunks so far."""
        self._error = error
        self._ready.set()
        self._looked_up.set()

    async def get(self) -> list[OutputChunk]:
        """Waits for new chunks; an empty list after a long silence.

        Raises:
            ApiError: no more chunks will come.
        """
        await self._ready.wait()
        self._ready.clear()
        chunks, self._chunks, self._silent = list(self._chunks.values()), {}, False
        if self._error is not None:
            if not chunks:
                raise self._error
            self._ready.set()
        return chunks

    async def wait_for_match(self) -> bool:
        """Waits until all prompts have been looked up in the prefix cache, or output or an error has come.

        Returns:
            Whether that happened in time.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._looked_up.wait(), MATCH_SECONDS)
        return self._looked_up.is_set()

    def count_match(self) -> None:
        """Called for each job when its prompt has been looked up."""
        self._unmatched -= 1
        if self._unmatched <= 0:
            self._looked_up.set()

    def close(self) -> None:
        """Ends the timer."""
        self._timer.cancel()


class AdmissionController:
    """Admits requests, and passes the worker's output to the responses.

    Args:
        max_requests: at a time, those waiting for a row included; each choice counts.
        max_choices: of one request; None are as many.

    Attributes:
        admitted: number of admitted requests without a complete response.
        closing: why no more requests are admitted; None while they are.
    """

    def __init__(self, worker: Worker, max_requests: int, max_choices: int | None = None) -> None:
        self.worker, self.metrics, self._max_requests = worker, worker.metrics, max_requests
        self._max_choices = max_requests if max_choices is None else min(max_choices, max_requests)
        self._collectors: dict[Job, OutputCollector] = {}
        self._futures: set[asyncio.Future[Any]] = set()
        self.admitted = 0
        self.closing: str | None = None

    def begin(self) -> None:
        """From now on, output is delivered in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.worker.deliver = partial(self._call, self._deliver)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function in the event loop, from another thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def _deliver(self, chunks: list[OutputChunk]) -> None:
        for chunk in chunks:
            if (collector := self._collectors.get(chunk.job)) is not None:  # else its client has hung up
                collector.put(chunk)

    def admit(self, choices: int = 1) -> None:
        """Admits a request with so many choices; `leave` must follow.

        Raises:
            ApiError: 429 if there are too many, 503 if the server ends, 400 if it could never be admitted.
        """
        if self.closing is not None:
            raise ApiError(503, self.closing)
        if choices > self._max_choices:
            limit = f"and this server accepts at most {self._max_choices:,}: send fewer"
            raise ApiError(400, f"one request asks for {choices:,} answers, {limit}")
        if self.admitted + choices > self._max_requests:
            message = f"{self.admitted} requests are being answered or wait: try again later"
            raise ApiError(429, message, None, "queue_full", {"Retry-After": "1"})
        self.admitted += choices

    def leave(self, choices: int = 1) -> None:
        """The counterpart of `admit`."""
        self.admitted -= choices

    def submit(self, jobs: Sequence[Job]) -> OutputCollector:
        """Submits the jobs of a request to the worker; returns the collector of their output."""
        collector = OutputCollector(jobs)
        if self.closing is not None:  # since it was admitted
            collector.fail(ApiError(503, self.closing))
        for job in jobs:
            self._collectors[job], job.on_match = collector, partial(self._call, collector.count_match)
            self.worker.submit(job)
        return collector

    async def wait(self, http: Request, result: Future[T]) -> T:
        """The result of the worker; cancels it if the client hangs up. Raises ApiError if the server ends."""
        future = asyncio.wrap_future(result)
        self._futures.add(future)
        try:
            while not future.done():
                await asyncio.wait({future}, timeout=HANG_UP)
                if not future.done() and await http.is_disconnected():
                    future.cancel()
            if future.cancelled():
                raise ApiError(503 if self.closing else 499, self.closing or "the client has hung up")
            return future.result()
        finally:
            self._futures.discard(future)
            future.cancel()

    @property
    def jobs(self) -> list[Job]:
        """Jobs of admitted requests, from when their prompt is encoded."""
        return list(self._collectors)

    def done(self, job: Job, ended: bool) -> None:
        """Releases a job; one that has not ended is cancelled."""
        self._collectors.pop(job).close()
        if not ended:
            self.worker.cancel(job)

    def give_up(self, reason: str = SHUTTING_DOWN) -> None:
        """Ends all responses with an error, and admits no more requests.

        Each has a collector, also those with a job that the worker has not seen. So nothing depends on what its thread
        did last.
        """
        self.closing = self.closing or reason
        for collector in set(self._collectors.values()):
            collector.fail(ApiError(503, self.closing))
        for future in self._futures:
            future.cancel()

    def count(self, path: str, status: int) -> None:
        """Counts a response in the metrics."""
        self.metrics.requests.labels(ENDPOINTS.get(path, "other"), str(status)).inc()


# --- requests ---------------------------------------------------------------------------------------------------------


class ParsedRequest(NamedTuple):
    """A request, the writer of its answer, given the model's name, and how long the model is kept after it.

    Attributes:
        keep_alive: as of `Served.keep_alive`.
    """

    request: CompletionRequest
    writer: Callable[[str], OutputWriter]
    keep_alive: float | None = None


class ModelReader:
    """What requests to one model become: prompts in its tokens, and jobs.

    Attributes:
        rules: for its requests.
    """

    def __init__(self, served: Served, worker: Worker, limits: Limits, unknown: UnknownFields) -> None:
        self.served, self._worker, self._limits = served, worker, limits
        models = served.models
        self._tokenizer = tokenizer = models.tokenizer
        has_template = bool(tokenizer.has_chat_template)
        self.rules = RequestRules(models.sampling, unknown, limits.client_headers, has_template)
        self._template = ChatTemplate(tokenizer, served.template or limits.template)
        self._texts, self.grammars = TokenTexts(tokenizer), Grammars(tokenizer, unknown)

    @property
    def reads_images(self) -> bool:
        """Whether its model reads images, here."""
        return reads_images(self.served.models.model) and self._worker.group is None

    def encode(self, request: CompletionRequest) -> list[ImagePrompt]:
        """The tokens of each prompt; a chat is one prompt. Raises ApiError for what the model does not take."""
        if request.chat:
            return [self._encode_chat(request)]
        try:
            tokens = [
                encode_prompt(self._tokenizer, each)
                if isinstance(each, str)
                else token_ids(each, self.served.vocabulary)
                for each in request.prompts
            ]
            return [ImagePrompt(each) for each in tokens]
        except ValueError as error:
            raise ApiError(400, str(error), "prompt") from None

    def limit(self) -> MemoryLimit:
        """The limit for its rows. Raises ApiError, 503, if its weights do not fit beside those that stay."""
        limit = self._worker.limit_of(self.served)
        if (limit.for_rows or 0) < 0:
            raise ApiError(503, self._worker.shortage(self.served), "model", "model_too_large", {"Retry-After": "60"})
        return limit

    def encode_texts(self, request: EmbeddingRequest) -> list[list[int]]:
        """Token ids of texts to be embedded, with the model's instruction for their kind and its end token.

        Raises ApiError for texts that it does not take.
        """
        try:
            prompts, kind = self.served.card.prompts, request.kind
        except ValueError as error:
            raise ApiError(400, f"{self.served.names.name} has no embeddings: {error}", "model") from None
        if kind is not None and kind not in prompts:
            kinds = ", ".join(map(repr, prompts)) or "none"
            raise ApiError(400, f"input_type is {kind!r}: this model has instructions for {kinds}", "input_type")
        before, most = "" if kind is None else prompts[kind], self.served.context
        texts = []
        for number, each in enumerate(request.inputs):
            try:
                if isinstance(each, str):
                    tokens = encode_prompt(self._tokenizer, before + each)
                else:
                    tokens = token_ids(each, self.served.vocabulary)
            except ValueError as error:
                raise ApiError(400, str(error), "input") from None
            if not tokens:
                raise ApiError(400, f"input {number} is empty: send at least one token", "input")
            if most is not None and len(tokens) > most:
                if not request.truncate:
                    message = f"input {number} has {len(tokens):,} tokens, and this model takes at most {most:,}"
                    raise ApiError(400, f"{message}: shorten it", "input", "context_length_exceeded")
                last = self._tokens_at_end(before + each, tokens) if isinstance(each, str) else 0
                tokens = [*tokens[: most - last], *tokens[len(tokens) - last :]]
            texts.append(tokens)
        return texts

    def _tokens_at_end(self, text: str, tokens: list[int]) -> int:
        """How many tokens the tokenizer adds behind a text, whose tokens are given with these."""
        plain = self._tokenizer.encode(text, add_special_tokens=False)
        added = len(tokens) - len(plain)
        return next((n for n in range(added + 1) if tokens[added - n : len(tokens) - n] == plain), 0)

    def choices(
        self, request: CompletionRequest, prompts: Sequence[ImagePrompt], grammar: Grammar | None, since: float
    ) -> list[Choice]:
        """The answers to a request, each with its job. Raises ApiError for prompts that do not fit."""
        choices: list[Choice] = []
        for place, (tokens, images) in enumerate((prompt.tokens, prompt.images) for prompt in prompts):
            max_tokens = self._max_tokens(request, tokens)
            for number in range(request.n):
                job = Job(
                    tokens,
                    max_tokens,
                    request.sampling_of(number),
                    request.top_logprobs,
                    self._stop_strings(request, tokens),
                    request.cache.keep,
                    since=since,
                    served=self.served,
                    images=images,
                )
                if grammar is not None:
                    job.grammar = grammar.processor(len(tokens), self._lead_in(request, tokens))
                job.thinking = self._thinking(request, tokens, max_tokens)
                choices.append(self._choice(request, len(choices), place, job))
        return choices

    def _encode_chat(self, request: CompletionRequest) -> ImagePrompt:
        """The tokens of a chat. Raises ApiError for one that the template refuses, and for tools where they are."""
        tokenizer, unknown = self._tokenizer, self.rules.unknown
        if request.tools and not tokenizer.has_tool_calling and not request.forces_call:
            if unknown.strict:
                raise ApiError(400, "this model cannot call tools: leave them out", "tools", "unsupported_parameter")
            unknown.log_once(
                "tools", "requests have tools, but this model writes no calls that mlx-lm can parse: it may not call"
            )
        elif request.tools and not self._template.tools:
            unknown.log_once("tools", "requests have tools, and the chat template leaves them out: it may not call")
        settings = {**request.hints, **request.template}
        if request.template and not tokenizer.has_chat_template:
            problem = "this model has no chat template, so it takes no chat_template_kwargs"
            raise ApiError(400, f"{problem}: leave them out", "chat_template_kwargs")
        try:
            settings["tools"] = request.tools or None
            if request.images:
                text = self._template.whole_text(request.messages, request.continues, **settings)
                parts = IMAGE_MARK.split(text)  # texts, and between them the digests of images
                sources = [request.images.get(digest) for digest in parts[1::2]]
                return encode_parts(self.served.models.model, self._tokenizer, parts[::2], sources)
            return ImagePrompt(self._template.encode(request.messages, request.continues, request.roles, **settings))
        except Exception as error:  # chat templates are programs, and raise any error
            raise ApiError(400, str(error)[:500], "messages") from error

    def _max_tokens(self, request: CompletionRequest, tokens: list[int]) -> int:
        """The maximum number of tokens of an answer. Raises ApiError for a prompt that does not fit."""
        param, context = "messages" if request.chat else "prompt", self.served.context
        if not tokens:
            raise ApiError(400, "the prompt is empty: send at least one token", param)
        limits = [limit for limit in (self._limits.prompt_tokens, context and context - 1) if limit is not None]
        if limits and len(tokens) > min(limits):
            raise ApiError(400, f"{_too_long(tokens, min(limits))}: shorten it", param, "context_length_exceeded")
        max_tokens = self._limits.max_tokens if request.max_tokens is None else request.max_tokens
        max_tokens = min(max_tokens, self._limits.answer_tokens or max_tokens)
        max_tokens = max_tokens if context is None else min(max_tokens, context - len(tokens))
        expected = min(max_tokens, FIRST_EXPECTED)
        if refusal := self.limit().refusal(self.served.plan, len(tokens), expected):
            longest = self.limit().longest(self.served.plan, len(tokens), expected)
            raise ApiError(400, f"{_too_long(tokens, longest)}: {refusal}", param, "memory_limit_exceeded")
        vocabulary = self.served.vocabulary
        if request.sampling.logit_bias and (largest := max(request.sampling.biases)) >= vocabulary:
            raise ApiError(400, f"logit_bias has the token {largest}: send ids below {vocabulary:,}", "logit_bias")
        return max_tokens

    def _lead_in(self, request: CompletionRequest, tokens: list[int]) -> LeadIn | None:
        """What may stand before the grammar of an answer: in a chat, reasoning, or a call in its place."""
        if not request.chat:
            return None
        auto = request.constraint is not None and request.constraint.kind == "auto_calls"
        return LeadIn.after(self._tokenizer, tokens, request.may_call, request.beginning, auto)

    def _thinking(self, request: CompletionRequest, tokens: list[int], max_tokens: int) -> ThinkingLimit | None:
        """The limit of a chat's thinking, if there is one."""
        limit = self._limits.thinking_budget if request.thinking_budget is None else request.thinking_budget
        if request.thinking_budget is None and request.effort in EFFORT_SHARES:
            share = EFFORT_SHARES[request.effort]
            limit = None if share is None else int(share * max_tokens)
        if not request.chat:
            return None
        closing = self._limits.thinking_closing
        settings = ChatSettings(beginning=request.beginning, thinking_budget=limit, thinking_closing=closing)
        return ThinkingLimit.after(self._tokenizer, tokens, settings)

    def _stop_strings(self, request: CompletionRequest, tokens: list[int]) -> StopStrings:
        if not request.chat or not request.stop_strings:
            return StopStrings(request.stop_strings)
        if self._is_bare_call(request):
            return StopStrings()  # there is no content
        state = answer_state(self._tokenizer, tokens, request.beginning)
        return ContentStops(request.stop_strings, state)

    def _is_bare_call(self, request: CompletionRequest) -> bool:
        """Whether the answer is a call without marks."""
        return request.forces_call and marks_of(self._tokenizer) is None

    def _choice(self, request: CompletionRequest, index: int, place: int, job: Job) -> Choice:
        """One of the answers to the prompt at a place."""
        tokenizer = self._tokenizer
        texts = None if request.top_logprobs is None else self._texts
        if request.chat:
            parser = ChatOutputParser(
                tokenizer,
                job.tokens,
                request.tools,
                request.stream,
                request.one_call,
                self._is_bare_call(request),
                request.beginning,
            )
            marks = Marks.after(tokenizer, job.tokens, request.beginning)
            return Choice(index, place, job, parser, texts=texts, marks=marks)
        prompt = request.prompts[place]
        echo = prompt if isinstance(prompt, str) else tokenizer.decode(job.tokens)
        return Choice(index, place, job, echo=echo if request.echo else "", texts=texts)


class LoadRequest(NamedTuple):
    """A request for which nothing is generated: its model is loaded, or with a `keep_alive` of 0 unloaded."""

    response: Response
    keep_alive: float | None = None


# From the JSON of a body. Raises ApiError.
Dialect = Callable[[Any, RequestRules], ParsedRequest | LoadRequest]


class RequestHandler:
    """Makes the responses to completion requests.

    Args:
        table: of the models.
    """

    def __init__(self, worker: Worker, admission: AdmissionController, limits: Limits, table: ModelTable) -> None:
        self._worker, self._admission, self._limits, self._table = worker, admission, limits, table
        unknown = UnknownFields(limits.strict)
        self._readers = {served: ModelReader(served, worker, limits, unknown) for served in worker.served}
        # Tokenizers are fast, but a long prompt in the event loop would delay the tokens of other requests.
        self._tokenizing = ThreadPoolExecutor(1, "mlx-kv tokenizer")
        self._fetching = ThreadPoolExecutor(AT_ONCE, "mlx-kv images")  # slow sites delay images alone

    async def answer(self, http: Request, dialect: Dialect) -> Response:
        """The response to a request, whole or streamed."""
        since = time.monotonic()
        body = await self._json(http)
        reader = self._reader(body)
        with self._collect_images(reader) as images:
            parsed = dialect(body, reader.rules)
        if isinstance(parsed, LoadRequest):
            await self.load(reader.served, parsed.keep_alive)
            return parsed.response
        request, writer, keep_alive = parsed
        request = replace(request, images=images)
        self._admission.admit(request.answers)
        try:
            prompts = await self._tokens(reader, request)
            grammar = await reader.grammars.compile(request.constraint, request.constraint_field)
            choices = reader.choices(request, prompts, grammar, since)
            self._worker.keep_alive(reader.served, keep_alive)
            name = reader.served.names.name
            return CompletionResponse(self._admission, choices, writer(name), request.stream)
        except BaseException:
            self._admission.leave(request.answers)
            raise

    async def count(self, http: Request, parse: Callable[[Any, RequestRules], CompletionRequest]) -> int:
        """The number of tokens of a request's prompt."""
        body = await self._json(http)
        reader = self._reader(body)
        with self._collect_images(reader) as images:
            request = replace(parse(body, reader.rules), images=images)
        self._admission.admit()  # since the tokenizer is shared
        try:
            return sum(len(prompt.tokens) for prompt in await self._tokens(reader, request))
        finally:
            self._admission.leave()

    async def embed(self, http: Request, parse: Callable[[Any, RequestRules], EmbeddingRequest]) -> Response:
        """The response to a request for embeddings."""
        body = await self._json(http)
        reader = self._reader(body)
        request = parse(body, reader.rules)
        served, name = reader.served, reader.served.names.name
        if self._worker.group is not None:
            raise ApiError(400, "several machines have parts of the model, and no embeddings: use one", "model")
        reader.limit()
        self._admission.admit()
        try:
            encoding = self._tokenizing.submit(without_panic, "the tokenizer", lambda: reader.encode_texts(request))
            texts = await asyncio.wrap_future(encoding)
            self._worker.keep_alive(served, request.keep_alive)
            vectors = await self._admission.wait(http, self._worker.embed(served, texts, request.pooling))
        finally:
            self._admission.leave()
        if (size := request.dimensions) is not None:
            if size > len(vectors[0]):
                message = f"dimensions is {size:,}: {name} has {len(vectors[0]):,}"
                raise ApiError(400, f"{message}; send at most so many", "dimensions")
            vectors = [vector[:size] / max(float(np.linalg.norm(vector[:size])), 1e-12) for vector in vectors]
        self._admission.count(http.url.path, 200)
        # Millions of digits would keep the event loop busy for seconds.
        rendered = self._tokenizing.submit(lambda: json_bytes(request.answer(name, vectors, sum(map(len, texts)))))
        return Response(await asyncio.wrap_future(rendered), media_type="application/json")

    async def load(self, served: Served, keep_alive: float | None = None) -> None:
        """Loads a model, or with a `keep_alive` of 0 unloads it. Raises ApiError, 503, if that is not possible now."""
        change = self._worker.unload if keep_alive == 0 else self._worker.load
        if (problem := await asyncio.wrap_future(self._worker.call(partial(change, served)))) is not None:
            raise ApiError(503, problem, "model", "model_not_changed", {"Retry-After": "5"})
        self._worker.keep_alive(served, keep_alive)

    def close(self) -> None:
        """Ends the threads of tokenizers, images and grammars after their current task."""
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
        self._fetching.shutdown(wait=False, cancel_futures=True)
        for reader in self._readers.values():
            reader.grammars.close()

    def _reader(self, body: Any) -> ModelReader:
        """Of the model that a body names. Raises ApiError, 404."""
        return self._readers[self._table.find(body.get("model") if isinstance(body, dict) else None)]

    def _collect_images(self, reader: ModelReader) -> contextlib.AbstractContextManager[dict[str, str]]:
        return collect_images(reader.reads_images, self._limits.fetch_image is not None)

    async def _json(self, http: Request) -> Any:
        return await read_body(http, self._limits.body_bytes, self._limits.body_seconds)

    async def _tokens(self, reader: ModelReader, request: CompletionRequest) -> list[ImagePrompt]:
        if (fetch := self._limits.fetch_image) is not None:
            request = replace(request, images=await self._fetch(request.images, fetch))
        encoding = self._tokenizing.submit(without_panic, "the tokenizer", lambda: reader.encode(request))
        return await asyncio.wrap_future(encoding)

    async def _fetch(
        self, images: Mapping[str, str | bytes], fetch: Callable[[str, int], bytes]
    ) -> dict[str, str | bytes]:
        """Images with their contents in place of URLs. Raises ApiError, 400."""
        fetched, left = dict(images), MAX_BYTES
        remote = {digest: url for digest, url in images.items() if isinstance(url, str) and not url.startswith("data:")}
        if len(remote) > MAX_REMOTE:
            message = f"{len(remote)} images have URLs, of at most {MAX_REMOTE}: send contents"
            raise ApiError(400, message, "messages")
        try:
            for digest, url in remote.items():
                fetched[digest] = content = await asyncio.wrap_future(self._fetching.submit(fetch, url, left))
                left -= len(content)
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from None
        return fetched


# --- responses --------------------------------------------------------------------------------------------------------


class CompletionResponse(Response):
    """The response to one admitted request.

    Args:
        choices: its answers, with jobs that are submitted when the response begins.
        stream: whether they are sent as they come.
    """

    def __init__(
        self, admission: AdmissionController, choices: Sequence[Choice], writer: OutputWriter, stream: bool
    ) -> None:
        super().__init__()
        self._admission, self._choices, self._writer = admission, choices, writer
        self._by_job = {choice.job: choice for choice in choices}
        self._streams, self._since = stream, choices[0].job.since

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        admission, status = self._admission, 499
        sent = Headers(scope=scope).get(REQUEST_ID, "")
        self._id = sent if CLIENT_ID.fullmatch(sent) else uuid.uuid4().hex
        self._collector = admission.submit([choice.job for choice in self._choices])

        async def wait_for_disconnect() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(STALLED):
                await send(message)

        disconnect = asyncio.create_task(wait_for_disconnect())
        work = asyncio.create_task((self._stream if self._streams else self._whole)(scope, receive, send_in_time))
        try:
            await asyncio.wait({disconnect, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                status = work.result()
        except TimeoutError:  # the client has stopped reading
            status = 499
        finally:
            disconnect.cancel()
            work.cancel()
            admission.leave(len(self._choices))
            for choice in self._choices:
                admission.done(choice.job, ended=choice.finish_reason != "")
            admission.count(scope["path"], status)
            endpoint = ENDPOINTS.get(scope["path"], "other")
            seconds, usage = time.monotonic() - self._since, Usage.of(self._choices)
            admission.metrics.duration.labels(endpoint).observe(seconds)
            log.info(
                "request %s: %s %d, %d of %d prompt tokens cached, %d tokens, %.2f s",
                *(self._id, scope["path"], status, usage.cached, usage.prompt_tokens, usage.generated, seconds),
            )

    async def _deltas(self) -> AsyncIterator[tuple[Choice, Delta] | None]:
        """The parts of the answers as they come; None after some seconds without any.

        Raises:
            ApiError: the job failed, or the server ends.
        """
        while not all(choice.finish_reason for choice in self._choices):
            chunks = await self._collector.get()
            if not chunks:
                yield None
            for chunk in chunks:
                choice = self._by_job[chunk.job]
                if chunk.tokens:
                    self._observe(choice, chunk.tokens, time.monotonic())
                yield choice, choice.take(chunk)

    def _observe(self, choice: Choice, tokens: int, now: float) -> None:
        metrics, before = self._admission.metrics, choice.last_token
        if before is None:
            metrics.first_token.observe(now - self._since)
        else:
            for _ in range(tokens):
                metrics.between_tokens.observe((now - before) / tokens)
        choice.last_token = now

    @property
    def _prefix(self) -> str:
        """Reused and all tokens of the prompts of the request, each prompt once."""
        usage = Usage.of(self._choices)
        return f"{usage.cached}/{usage.prompt_tokens}"

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> int:
        try:
            async for part in self._deltas():
                if part is not None:
                    choice, delta = part
                    choice.answer.add(delta)
            answer = JsonResponse(
                self._writer.whole(self._choices), headers={HEADER: self._prefix, REQUEST_ID: self._id}
            )
        except Exception as raised:
            error = _as_api_error(raised)
            await JsonResponse(error_body(error, scope["path"]), error.status)(scope, receive, send)
            return error.status
        await answer(scope, receive, send)
        return 200

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> int:
        headers = [(b"content-type", self._writer.stream_type), (b"cache-control", b"no-store")]
        headers.append((REQUEST_ID.lower().encode(), self._id.encode()))
        if await self._collector.wait_for_match():
            headers.append((HEADER.lower().encode(), self._prefix.encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def write(data: bytes, more: bool = True) -> None:
            if data or not more:
                await send({"type": "http.response.body", "body": data, "more_body": more})

        status, writer = 200, self._writer
        try:
            await write(writer.begin(self._choices))
            async for part in self._deltas():
                await write(writer.waiting if part is None else writer.part(*part))
            await write(writer.end(self._choices))
        except TimeoutError:
            raise
        except Exception as raised:
            error = _as_api_error(raised)
            status = error.status
            await write(writer.failed(error))
        await write(writer.last, more=False)
        return status


def _as_api_error(raised: Exception) -> ApiError:
    """The error for the client: every response ends properly."""
    if isinstance(raised, ApiError):
        return raised
    log.error("an answer could not be given", exc_info=raised)
    return ApiError(500, "the server failed while it answered: see its log")


def _too_long(tokens: Sequence[int], most: int) -> str:
    """The words by which Claude Code, and agents that know Anthropic's errors, begin to compact a conversation."""
    return f"prompt is too long: {len(tokens)} tokens > {most} maximum"
