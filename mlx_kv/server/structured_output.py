"""Grammars of structured output: compiles the constraints of requests in a thread."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mlx_lm.tool_parsers import json_tools

from mlx_kv.generation.grammar import (
    CallMarks,
    Constraint,
    Grammar,
    GrammarCompiler,
    GrammarError,
    GrammarProcessor,
    LeadIn,
)
from mlx_kv.server.json_http import ApiError, without_panic
from mlx_kv.server.requests import UnknownFields

COMPILE_SECONDS = 10.0


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

    def processor(self, grammar: Grammar, prompt: list[int], chat: bool, may_call: bool) -> GrammarProcessor:
        """The logits processor that makes one answer follow a grammar.

        Args:
            prompt: the tokens before the answer.
            chat: whether reasoning may precede the answer.
            may_call: whether the answer may be a tool call instead.
        """
        return grammar.processor(len(prompt), LeadIn.after(self._tokenizer, prompt, may_call) if chat else None)


def marks_of(tokenizer: Any) -> CallMarks | None:
    """The tokens around a call, for models that write calls as JSON; None for other models."""
    if not tokenizer.has_tool_calling or tokenizer.tool_parser is not json_tools.parse_tool_call:
        return None
    return CallMarks(tuple(tokenizer.tool_call_start_tokens), tuple(tokenizer.tool_call_end_tokens or ()))
