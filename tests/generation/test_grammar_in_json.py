"""Grammars of texts within strings of JSON: what follows them is what follows the grammar itself, as JSON writes it."""

from __future__ import annotations

import contextlib
import json
import random
import re
from typing import Any

import llguidance
import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_kv.generation import grammar as constraints
from mlx_kv.generation.grammar import CallMarks, Function, GrammarCompiler, LeadIn
from mlx_kv.generation.grammar_in_json import COMMON, grammar_in_json

BYTES = llguidance.LLTokenizer("byte")
ALPHABET = '\U0001f600가abeAZ01_ ."\\/\n\r\f\t\x01é-+#]'
PATTERNS = (
    *COMMON.values(),
    "(.+)",
    "(.*)",
    r"[^\n]{2,3}",
    r"[\\\"/]+",
    r"\S+( \S+)*",
    r"a??b+?|\x41{1,}|",
    r"(?:[-_]|[a\]])+\.",
    '"[^"]*"',
    r"[\s\S]{0,4}",
    r"(?P<one>é)|\w\W\d?",
    "[\U0001f600-\U0001f64f]?\U0001f600|[가-힣]",
    "[a\n]/",
)
# As Codex sends it, in words of our own.
PATCH = """
start: begin hunk+ end   // a patch
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Delete File: " name LF | "*** Update File: " name LF change?
name: /(.+)/
change: (("@@" | "@@ " /(.+)/) LF | ("+" | "-" | " ") /(.*)/ LF)+
%import common.LF
"""
SUM = r"""
start: sum
sum: term (("+" | "-") term)*
term: NUMBER | "(" sum ")" | SYMBOL | "a".."c" | "AND"i
SYMBOL: /"[^"\/]*"/
NUMBER.2: DIGITS ("." DIGITS)?
DIGITS: /[0-9]+/
%import common (WS_INLINE, LF)
%ignore WS_INLINE
%ignore LF
%ignore /#[^\n]*\n/
"""


def follows(lark: str, text: str) -> bool:
    """Whether a text follows a grammar of the library, to its end."""
    matcher = llguidance.LLMatcher(BYTES, llguidance.LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


@pytest.mark.parametrize("pattern", PATTERNS)
@given(st.data())
def test_patterns(pattern: str, data: st.DataObject) -> None:
    """Against Python's own regular expressions, where all of a text is meant."""
    matching = st.from_regex(re.compile(pattern), fullmatch=True, alphabet=ALPHABET)
    text = data.draw(st.text(ALPHABET, max_size=6) | matching)
    lark = grammar_in_json("start: /" + re.sub(r"(?<!\\)/", r"\/", pattern) + "/")
    assert follows(lark, in_json(text)) == bool(re.fullmatch(pattern, text))


@given(st.text("aéB\n", max_size=4))
def test_flags(text: str) -> None:
    assert follows(grammar_in_json('start: /a.É/is | "b\\n"i'), in_json(text)) == bool(
        re.fullmatch("(?is:a.É|b\n)", text)
    )


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (
            PATCH,
            [
                '*** Begin Patch\n*** Update File: a "b".py\n@@ f(\\n)\n-\tx\n+é\n \n*** End Patch',
                "*** Begin Patch\n*** Delete File: a\n*** Delete File: b\n*** End Patch\n",
            ],
            [
                "*** Begin Patch\n*** End Patch",
                "*** Begin Patch\n*** Delete File: \n*** End Patch",
                "*** Begin Patch\n*** Update File: a\n*x\n*** End Patch",
                "*** Begin Patch\\n*** Delete File: a\n*** End Patch",
            ],
        ),
        ("start: /a|b/ /c/\n%ignore / |\\t/", ["ac", "bc", " a c\t", "b  c"], ["a", "a b", "c"]),
        (SUM, ["1", ' 1.5+ ("a\\b" -b)', '# a "sum"\n\n c # of c\n+and', "(1)-a"], ["1 +", "1 1", '"a/b"', "d", ""]),
    ],
)
def test_grammars(grammar: str, good: list[str], bad: list[str]) -> None:
    inside = grammar_in_json(grammar)
    assert [text for text in (*good, *bad) if follows(inside, in_json(text))] == good


@pytest.mark.parametrize(
    "grammar",
    [
        *("start: /(?=a)b/", r"start: /\ba/", "start: /^a$/", "start: /a/x", "%import common.SQL", "start: %json {}"),
        *(r"start: /[\p{L}]/", "start: /[z-a]/", "start: /a"),
    ],
)
def test_what_cannot_be_followed_is_said(grammar: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be followed|is not known|has no end"):
        grammar_in_json(grammar)


@given(st.text('ab"/\\[]()|*{1,}?^-$#:%.\n NX', max_size=40), st.booleans())
def test_any_grammar_is_spelled_or_refused(text: str, quoted: bool) -> None:
    """And nothing else is raised, whatever it is."""
    with contextlib.suppress(ValueError):
        assert "ignored: " in grammar_in_json(f"start: /{text}/" if quoted else text)


FUNCTIONS = [
    Function("look", {"type": "object"}),
    Function("patch", {"type": "object", "properties": {"input": {"type": "string"}}}, text='start: /[a-c]\\n"/ "!"'),
]


def one_of_the_allowed(processor: Any, answer: list[int], chance: random.Random, vocabulary: int) -> int:
    logits = processor(mx.array([1, *answer]), mx.zeros((1, vocabulary)))
    allowed = [token for token, each in enumerate(logits[0].tolist()) if each == 0]
    return chance.choice(allowed)


def test_a_call_that_a_model_begins_itself_is_held_from_its_mark_on(reference: Any) -> None:
    """What comes before it is free, and so are drafts; behind it, any choice of tokens ends in calls that follow."""
    tokenizer, chance = reference[1], random.Random(1)
    begin, end = tokenizer.encode("|"), tokenizer.encode("]")
    marks = CallMarks(tuple(begin), tuple(end), " ")
    compiler = GrammarCompiler(tokenizer)
    grammar = compiler.compile(constraints.calls(FUNCTIONS[1:], auto=True), marks)
    vocabulary = 4096
    free = tokenizer.encode("Some words, and more")
    seen = set()
    for _ in range(6):
        processor = grammar.processor(1, LeadIn(call=marks.start, anything=True))
        assert bool((processor(mx.array([1, *free]), mx.zeros((1, vocabulary))) == 0).all())
        assert processor.error_in([*free, 0], whole=True) is None
        answer = [*free, *begin]
        while answer[-1] != 0:
            answer.append(one_of_the_allowed(processor, answer, chance, vocabulary))
            if len(answer) > 300:
                break
        assert processor.error_in(answer, whole=answer[-1] == 0) is None
        calls = [part.split("]")[0] for part in tokenizer.decode(answer[:-1]).split("|")[1:]]
        for call in calls[: len(calls) - (answer[-1] != 0)]:
            assert re.fullmatch('[abc]\n"!', json.loads(call)["arguments"]["input"])
        seen.add(len(calls))
        drafted = processor.allowed(mx.array([1]), answer)
        assert drafted == len(answer)
        wrong = [*answer[: len(free) + 3], 17, 17]
        assert processor.allowed(mx.array([1]), wrong) < len(wrong)
    assert len(seen) > 1  # one call, and several


def test_a_call_behind_thinking_is_held_too(reference: Any) -> None:
    """A mark within the thinking begins none."""
    tokenizer = reference[1]
    begin, end, think, thought = (tuple(tokenizer.encode(mark)) for mark in "|]<>")
    grammar = GrammarCompiler(tokenizer).compile(
        constraints.calls(FUNCTIONS[1:], auto=True), CallMarks(begin, end, " ")
    )
    lead_in = LeadIn(think, thought, call=begin, anything=True)
    words = tuple(tokenizer.encode("hm"))
    for before, held in (((), True), ((*think, *begin, *thought, *words), True), ((*think, *words), False)):
        answer = [*before, *begin]
        assert lead_in.grammar_from(answer) == (len(before) if held else None)
        logits = grammar.processor(1, lead_in)(mx.array([1, *answer]), mx.zeros((1, 4096)))
        assert bool((logits[0, list(words)] == 0).all()) != held


def test_a_grammar_that_cannot_be_used_is_left_out_and_said(reference: Any) -> None:
    broken = [Function("patch", FUNCTIONS[1].parameters, text=text) for text in ("start: nothing", "start: /(?=a)/")]
    for function in broken:
        grammar = GrammarCompiler(reference[1]).compile(constraints.calls([function]))
        assert "the grammar of 'patch' cannot be used" in grammar.unenforced[0]


def test_each_token_of_a_patch_may_come(reference: Any) -> None:
    """In a long text too, whose characters are lexemes."""
    tokenizer = reference[1]
    function = Function("patch", FUNCTIONS[1].parameters, text=PATCH)
    processor = GrammarCompiler(tokenizer).compile(constraints.calls([function])).processor(0)
    patch = '*** Begin Patch\n*** Update File: a "b".py\n@@ f\n' + '+\tx = "é\\n" + y\n' * 20 + "*** End Patch"
    call = json.dumps({"name": "patch", "arguments": {"input": patch}}, ensure_ascii=False)
    answer = [*tokenizer.encode(call), 0]
    for place, token in enumerate(answer):
        logits = processor(mx.array(answer[:place], dtype=mx.int32), mx.zeros((1, 4096)))
        assert logits[0, token].item() == 0
    assert processor.error_in(answer, whole=True) is None
