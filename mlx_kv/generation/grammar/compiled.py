"""Compiled constraints: each is compiled once for a tokenizer, and cached.

Compiling takes milliseconds to seconds and releases the GIL. All calls of one compiler must come from one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from mlx_kv.generation.grammar.constraint import (
    CallMarks,
    Constraint,
    GrammarError,
    error_message,
    found_library,
    grammar_source,
)
from mlx_kv.generation.grammar.processor import GrammarProcessor, LeadIn

KEPT = 32  # grammars: clients send the same again and again
# The library's own measure of work: 50,000 of it are about a millisecond. Regular expressions that are more than this
# are still used, but the masks that follow from them are not made beforehand.
COMPILE_FUEL = 200_000
# And of one mask: a schema takes tens of them, a grammar that reads a text in very many ways ever more with its length.
MASK_ITEMS = 4_000


class Grammar:
    """A constraint that is compiled.

    Args:
        matcher: of the library, where nothing has been generated. It is copied for each row.
        ends: ids of tokens that end a sequence.

    Attributes:
        unenforced: what a lenient schema says that is passed over, in the library's words.
    """

    def __init__(self, matcher: Any, ends: Sequence[int]) -> None:
        self._matcher, self._ends = matcher, tuple(ends)
        self.unenforced = tuple(error_message(warning) for warning in matcher.get_grammar_warnings())

    def processor(self, prompt_tokens: int, lead_in: LeadIn | None = None) -> GrammarProcessor:
        """What keeps one row to it.

        Args:
            prompt_tokens: how many tokens come before the answer, those that were read before among them.
            lead_in: what may stand before the grammar, or in its place; None is nothing.
        """
        return GrammarProcessor(self._matcher, self._ends, prompt_tokens, lead_in or LeadIn())


class GrammarCompiler:
    """Makes grammars of constraints.

    Args:
        tokenizer: mlx-lm's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: Any = None
        self._kept: OrderedDict[tuple[Constraint, CallMarks | None], Grammar] = OrderedDict()

    def compile(self, constraint: Constraint, marks: CallMarks | None = None) -> Grammar:
        """The grammar of a constraint.

        Args:
            marks: of calls, as of `grammar_source`.

        Raises:
            GrammarError: the library, or the tokenizer, refuses it.
        """
        asked = constraint, marks
        if asked not in self._kept:
            self._kept[asked] = self._compiled(constraint, grammar_source(constraint, marks))
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(asked)
        return self._kept[asked]

    def _compiled(self, constraint: Constraint, source: str) -> Grammar:
        library, ends = found_library(), sorted(self._tokenizer.eos_token_ids)
        if self._vocabulary is None:
            self._vocabulary = self._made_vocabulary(ends)
        limits = library.LLParserLimits(
            initial_lexer_fuel=COMPILE_FUEL, step_max_items=MASK_ITEMS, verbose_errors=False
        )
        matcher = library.LLMatcher(self._vocabulary, source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask takes longest
        if matcher.is_error():
            raise GrammarError(error_message(matcher.get_error(), constraint))
        return Grammar(matcher, ends)

    def _made_vocabulary(self, ends: list[int]) -> Any:
        """The tokenizer as the library has it: a second's work, once."""
        inner = getattr(self._tokenizer, "_tokenizer", self._tokenizer)
        if not isinstance(inner, PreTrainedTokenizerFast):
            raise GrammarError(f"this model's tokenizer ({type(inner).__name__}) is not of the kind that can be masked")
        from llguidance.hf import from_tokenizer

        return from_tokenizer(inner, eos_token=ends)
