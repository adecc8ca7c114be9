"""Grammars of requests: what keeps each answer to the form that was asked for.

Decides how long one may take to be compiled, that this holds up nobody else, and how a model that knows calls of
functions is made to write one. Knows nothing about the fields of requests, nor about rows.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mlx_lm.tool_parsers import json_tools

from mlx_kv.generation.grammar.compiled import Grammar, GrammarCompiler
from mlx_kv.generation.grammar.constraint import CallMarks, GrammarError
from mlx_kv.generation.grammar.lead_in import LeadIn
from mlx_kv.generation.grammar.processor import GrammarProcessor
from mlx_kv.server.errors import ApiError, without_panic
from mlx_kv.server.fields import UnknownFields
from mlx_kv.server.requests import CompletionRequest

COMPILE_SECONDS = 10.0


class Grammars:
    """Those of all requests to one server.

    Args:
        tokenizer: mlx-lm's.
        unknown: what becomes of schemas that are not enforced to the letter.
    """

    def __init__(self, tokenizer: Any, unknown: UnknownFields) -> None:
        self._unknown = unknown
        self._tokenizer, self._compiler = tokenizer, GrammarCompiler(tokenizer)
        self._thread = ThreadPoolExecutor(1, "mlx-kv grammar")  # so that no prompt waits for a slow grammar

    async def of(self, request: CompletionRequest) -> Grammar | None:
        """The grammar of a request's answers; None where it asks for none.

        Raises:
            ApiError: 400 for one that is refused or takes too long, 429 where others take too long.
        """
        constraint = request.constraint
        if constraint is None:
            return None
        marks = marks_of(self._tokenizer)
        compiling = self._thread.submit(
            without_panic, "the grammar compiler", lambda: self._compiler.compile(constraint, marks)
        )
        param = request.constraint_field
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

    def processor(
        self, grammar: Grammar | None, request: CompletionRequest, prompt: list[int]
    ) -> GrammarProcessor | None:
        """What keeps one answer of a request to its grammar.

        Args:
            prompt: the tokens before the answer.
        """
        if grammar is None:
            return None
        calls = bool(request.tools) and not request.forces_call
        return grammar.processor(len(prompt), LeadIn.after(self._tokenizer, prompt, calls) if request.chat else None)


def marks_of(tokenizer: Any) -> CallMarks | None:
    """What stands around a call that a model writes as JSON; None where it writes none, or in another form."""
    if not tokenizer.has_tool_calling or tokenizer.tool_parser is not json_tools.parse_tool_call:
        return None
    return CallMarks(tuple(tokenizer.tool_call_start_tokens), tuple(tokenizer.tool_call_end_tokens or ()))
