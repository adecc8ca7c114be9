"""Rows that are kept to a grammar: which tokens may come, wherever a row is asked about, and in every engine."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import llguidance
import mlx.core as mx
import numpy as np
import pytest
from engines import make_engine
from llguidance.hf import from_tokenizer

from mlx_kv.generation import grammar as constraints
from mlx_kv.generation.grammar import (
    Constraint,
    Function,
    Grammar,
    GrammarCompiler,
    GrammarError,
    GrammarProcessor,
    LeadIn,
    Spelling,
)
from mlx_kv.generation.sampling import SeededSampler, TemperatureSampler
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.generation.settings import SamplingSettings
from mlx_kv.generation.speculation.drafters import Drafter
from mlx_kv.policy import CachePolicy

V = 4096
PROMPT = [5, 6, 7]
TEXTS = ("alpha", "alp", "beta", "be: a\n", "x")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ns": {"type": "array", "items": {"enum": [1, 22]}}},
    "required": ["name", "ns"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler(reference: Any) -> GrammarCompiler:
    return GrammarCompiler(reference[1])


def shown_to(processor: Any, answer: Sequence[int], vocabulary: int = V) -> set[int]:
    """The tokens that are allowed after an answer."""
    logits = processor(mx.array([*PROMPT, *answer]), mx.zeros((1, vocabulary)))
    assert logits.shape == (1, vocabulary)
    return {int(token) for token in np.nonzero(np.array(logits)[0] == 0)[0]}


def test_what_may_come_is_what_a_text_goes_on_with(compiler: GrammarCompiler, reference: Any) -> None:
    """Against the slow way: each token that makes the beginning of one of the texts, and the end where one is whole."""
    tokenizer = reference[1]
    pieces = {token: tokenizer.decode([token]) for token in range(1, V)}
    grammar = compiler.compile(constraints.choice(TEXTS))
    chance = random.Random(1)
    for _ in range(5):
        processor, answer, text = grammar.processor(len(PROMPT)), list[int](), ""
        while True:
            wanted = {t for t, piece in pieces.items() if piece and any(own.startswith(text + piece) for own in TEXTS)}
            wanted |= {0} if text in TEXTS else set()
            assert shown_to(processor, answer) == wanted
            token = chance.choice(sorted(wanted))
            if token == 0:
                break
            answer, text = [*answer, token], text + pieces[token]


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (constraints.regex("[0-9]{2}-[a-z]+"), ["12-abc", "00-x"], ["1-a", "12-", "12-A"]),
        (constraints.grammar('root ::= "yes" | "no" [0-9]+'), ["yes", "no12"], ["no", "maybe"]),
        (constraints.grammar('start: /[ab]+/ END?\nEND: "!"'), ["ab", "ba!"], ["!", "c"]),
        (
            constraints.json_object(),
            ["{}", '{"a": [1, {"b": null}]}', '{\n  "a": 1\n}'],
            ["[]", "7", ' {"a":1}', "{   }"],
        ),
        (constraints.json_schema(SCHEMA), ['{"name": "é", "ns": [1, 22]}'], ['{"name": "", "ns": [2]}', '{"ns": []}']),
        (constraints.json_schema(True), ["7", "[]", '"x"'], ["", "x"]),
    ],
)
def test_texts_that_follow_and_texts_that_do_not(
    compiler: GrammarCompiler, reference: Any, constraint: Constraint, good: list[str], bad: list[str]
) -> None:
    for text in (*good, *bad):
        tokens = [*reference[1].encode(text), 0]
        processor = compiler.compile(constraint).processor(0)
        allowed = processor.allowed(mx.array([], dtype=mx.int32), tokens)
        assert (allowed == len(tokens)) == (text in good), (text, allowed)


def test_it_does_not_matter_who_asks_for_which_place_in_which_order(compiler: GrammarCompiler, reference: Any) -> None:
    """Places after other answers, wrong ones and ends among them: each as for one that was asked nothing else."""
    chance = random.Random(2)
    grammar = compiler.compile(constraints.json_schema(SCHEMA))
    whole = [
        [*reference[1].encode(text), 0]
        for text in ('{"name": "abc", "ns": [1, 22, 1]}', '{"name": "x", "ns": []}', '{\n "name": "", "ns": [22]}')
    ]
    wrong = [[*own[:4], 17, *own[5:]] for own in whole] + [[*own, 0, 33] for own in whole]
    asked = grammar.processor(len(PROMPT))
    for _ in range(60):
        answer = chance.choice([*whole, *wrong])
        place = chance.randrange(len(answer) + 1)
        alone = grammar.processor(len(PROMPT))
        assert shown_to(asked, answer[:place]) == shown_to(alone, answer[:place])
        drafted = answer[place : place + chance.randrange(6)]
        allowed = asked.allowed(mx.array([*PROMPT, *answer[:place]]), drafted)
        assert allowed == alone.allowed(mx.array([*PROMPT, *answer[:place]]), drafted)


def test_drafts_stand_as_far_as_each_could_be_drawn(compiler: GrammarCompiler, reference: Any) -> None:
    grammar = compiler.compile(constraints.json_schema(SCHEMA))
    answer = [*reference[1].encode('{"name": "ab", "ns": [1]}'), 0]
    chance = random.Random(3)
    for _ in range(40):
        place = chance.randrange(len(answer))
        drafted = [token if chance.random() < 0.8 else chance.randrange(V) for token in answer[place:]]
        count, processor = 0, grammar.processor(len(PROMPT))
        while count < len(drafted) and drafted[count] in shown_to(processor, [*answer[:place], *drafted[:count]]):
            count += 1
            if 0 in drafted[:count]:
                break
        assert grammar.processor(len(PROMPT)).allowed(mx.array([*PROMPT, *answer[:place]]), drafted) == count


def test_logits_of_more_tokens_than_the_tokenizer_has(compiler: GrammarCompiler) -> None:
    processor = compiler.compile(constraints.choice(TEXTS)).processor(len(PROMPT))
    assert shown_to(processor, [], V + 100) == shown_to(processor, [])


# --- before a grammar -------------------------------------------------------------------------------------------------

START, END, CALL = (11, 12), (13,), (14, 15)


def of_a_thinker(prompt: list[int], calls: bool = False, beginning: str = "") -> LeadIn:
    def rfind(tokens: list[int], mark: tuple[int, ...]) -> int:
        places = [n for n in range(len(tokens)) if tuple(tokens[n : n + len(mark)]) == mark]
        return places[-1] if places else -1

    tokenizer = SimpleNamespace(
        has_thinking=True,
        think_start="<think>",
        think_end="</think>",
        think_start_tokens=START,
        think_end_tokens=END,
        rfind_think_start=lambda tokens: rfind(tokens, START),
        rfind_think_end=lambda tokens: rfind(tokens, END),
        has_tool_calling=True,
        tool_call_start_tokens=CALL,
        tool_call_end_tokens=(),
        decode=lambda tokens: "".join(" " if token == 9 else "x" for token in tokens),
    )
    return LeadIn.after(tokenizer, prompt, calls, beginning)


def test_the_grammar_begins_after_the_thinking(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(constraints.choice(TEXTS))
    first, everything = shown_to(grammar.processor(len(PROMPT)), []), set(range(V))
    thought = everything - {0}  # the answer does not end within it

    def after(lead_in: LeadIn, *answer: int) -> set[int]:
        return shown_to(grammar.processor(len(PROMPT), lead_in), answer)

    begun = of_a_thinker([1, *START, 9])
    assert after(begun) == after(begun, 40) == after(begun, 40, 12) == thought
    assert after(begun, *END) == after(begun, 40, 41, *END) == first
    free = of_a_thinker([1, 2])
    assert after(free) == first | {11}
    assert after(free, 11) == {12}  # no text begins with it
    assert after(free, 11, 12) == after(free, 11, 12, 50) == thought
    assert after(free, 11, 12, 50, *END) == first
    assert of_a_thinker([1, *START, 2], beginning="<think>x") == begun
    about_the_mark = of_a_thinker([1, *START, 2])  # in a message
    assert after(about_the_mark) == first | {11}
    told_not_to = of_a_thinker([1, *START, 9, *END, 9])
    assert after(told_not_to) == first
    earlier = of_a_thinker([1, *START, 9, *END, 30])
    assert after(earlier) == first | {11}
    may_call = of_a_thinker([1, 2], calls=True)
    assert after(may_call) == first | {11, 14}
    assert after(may_call, 14) == {15}
    assert after(may_call, *CALL) == after(may_call, *CALL, 70) == everything
    assert after(may_call, *START, 3, *END) == first | {14}


def test_drafts_that_think(compiler: GrammarCompiler, reference: Any) -> None:
    processor = compiler.compile(constraints.choice(TEXTS)).processor(len(PROMPT), of_a_thinker([1, *START]))
    (beta, *rest), x = reference[1].encode("beta"), reference[1].encode("x")

    def allowed(answer: list[int], *drafted: int) -> int:
        return processor.allowed(mx.array([*PROMPT, *answer]), list(drafted))

    assert allowed([], 40, 41, 42) == 3
    assert allowed([], 40, 0, 42) == allowed([], 40, 0, *END, beta) == 1
    assert allowed([40], 41, *END, beta, *rest, 0) == 4 + len(rest)
    assert allowed([40], 41, *END, beta, *x) == 3
    assert allowed([40, *END], *x, 0, 0) == 2
    assert allowed([40, *END, *x], beta) == 0


@pytest.mark.parametrize("drafter", [None, "suffix"])
def test_an_answer_does_not_end_within_its_thinking(
    drafter: str | None, compiler: GrammarCompiler, reference: Any
) -> None:
    """However much the model wants to: it thinks on, and what follows its thinking is the form."""
    prompt, grammar = [1, *START], compiler.compile(constraints.choice(TEXTS))
    wanted = SamplingSettings(logit_bias={0: 1e3, END[0]: 5e2}).processors()
    processors = (*wanted, grammar.processor(len(prompt), of_a_thinker(prompt)))
    engine = make_engine(reference[0], {0}, max_batch_size=1, drafter=drafter)
    engine.submit(TokenSequence(0, prompt, 20, processors=processors))
    tokens: list[int] = []
    while engine.busy:
        tokens += [token.token for token in engine.step()]
    engine.close()
    assert (tokens[0], tokens[-1]) == (END[0], 0)
    assert reference[1].decode(tokens[1:-1]) in TEXTS


# --- what cannot be ---------------------------------------------------------------------------------------------------


def test_the_same_is_compiled_once(compiler: GrammarCompiler) -> None:
    one = compiler.compile(constraints.regex("a+b"))
    assert compiler.compile(constraints.regex("a+b")) is one
    for n in range(40):
        compiler.compile(constraints.regex(f"a{{{n + 1}}}"))
    assert compiler.compile(constraints.regex("a+b")) is not one


@pytest.mark.parametrize("kind", ["choice", "choices", "regex", "const", "key", "call", "gbnf", "lark"])
def test_the_text_of_a_special_token_is_spelled(kind: str, compiler: GrammarCompiler, reference: Any) -> None:
    """The token itself would be no text, and what follows it no grammar's."""
    tokenizer = reference[1]._tokenizer
    ((token, name), *_) = ((token, one.content) for token, one in tokenizer.added_tokens_decoder.items() if one.special)
    schema = {"properties": {name: {"const": 1}}, "required": [name], "additionalProperties": False}
    constraint, text = {
        "choice": (constraints.choice([f"{name}abc"]), f"{name}abc"),
        "choices": (constraints.choice([f"x{name}b", f"x{name}c"]), f"x{name}b"),
        "regex": (constraints.regex(f"a {re.escape(name)}b"), f"a {name}b"),
        "const": (constraints.json_schema({"const": f"{name}x"}), f'"{name}x"'),
        "key": (constraints.json_schema({"type": "object", **schema}), f'{{"{name}":1}}'),
        "call": (constraints.calls([Function(name, {"const": 1})]), f'{{"name": "{name}", "arguments": 1}}'),
        "gbnf": (constraints.grammar(f'root ::= "{name}" "x"'), f"{name}x"),
        "lark": (constraints.grammar(f'start: "x" "{name}"'), f"x{name}"),
    }[kind]
    processor, answer = compiler.compile(constraint).processor(len(PROMPT)), list[int]()
    while (following := shown_to(processor, answer)) != {0}:
        assert token not in following
        fitting = [one for one in following if text.startswith(tokenizer.decode([*answer, one]))]
        answer.append(max(fitting, key=lambda one: len(tokenizer.decode([one]))))
    assert tokenizer.decode(answer) == text
    assert processor.error_in([*answer, 0], whole=True) is None
    assert processor.error_in([*answer[:-1], 0], whole=True) == "the model ended before it does"
    assert processor.error_in([*answer[:1], *answer]) == "the model left it"


def test_a_special_token_that_a_grammar_names_is_that_token(compiler: GrammarCompiler, reference: Any) -> None:
    processor = compiler.compile(constraints.grammar('start: "a" <[0]> "b"')).processor(len(PROMPT))
    assert shown_to(processor, reference[1].encode("a")) == {0}


def test_a_tokenizer_that_cannot_be_masked() -> None:
    with pytest.raises(GrammarError, match="not of the kind"):
        GrammarCompiler(SimpleNamespace(eos_token_ids={0}, _tokenizer=object())).compile(constraints.regex("a"))


def growing(reference: Any) -> Grammar:
    """Of numbers, or of letters x, of which it can take few."""
    vocabulary = from_tokenizer(reference[1]._tokenizer, eos_token=[0])
    source = llguidance.LLMatcher.grammar_from_lark('start: a | /[0-9]{8}/\na: "x" | a a')
    limits = llguidance.LLParserLimits(step_max_items=100, verbose_errors=False)
    return Grammar(
        llguidance.LLMatcher(vocabulary, source, log_level=0, limits=limits), [0], Spelling(reference[1]._tokenizer)
    )


def test_a_grammar_that_grows_too_large_ends_its_row(reference: Any) -> None:
    processor = growing(reference).processor(0)
    tokens = reference[1].encode("x" * 40)
    places = [shown_to_all(processor, tokens[:place]) for place in range(len(tokens))]
    first = next(place for place, allowed in enumerate(places) if allowed == {0})
    assert first > 0
    assert all(allowed == {0} for allowed in places[first:])
    assert "Too many items" in (processor.error_in([*tokens[:first], 0]) or "")
    assert processor.error_in([*tokens[: first - 1], 0]) is None


def test_what_a_grammar_could_not_do_behind_a_draft_is_forgotten(reference: Any) -> None:
    processor, fresh = growing(reference).processor(0), growing(reference).processor(0)
    letters, digits = reference[1].encode("x" * 40), reference[1].encode("12345678")
    assert processor.allowed(mx.array([], dtype=mx.int32), letters) == len(letters)
    places = [shown_to_all(processor, letters[:place]) for place in range(len(letters))]
    assert {0} in places
    for place in range(len(digits) + 1):
        assert shown_to_all(processor, digits[:place]) == shown_to_all(fresh, digits[:place])
    assert processor.error_in([*digits, 0]) is None
    assert [shown_to_all(processor, letters[:place]) for place in range(len(letters))] == places


class Always(Drafter):
    """Proposes the same tokens, whatever was said."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.rows = tokens, 0

    def join(self, prompts: Sequence[Sequence[int]], caches: Any) -> None:
        self.rows += len(prompts)

    def keep(self, rows: Sequence[int]) -> None:
        self.rows = len(rows)

    def propose(self, most: int, choice: Any) -> list[list[int]]:
        return [self.tokens[:most]] * self.rows

    def accepted(self, tokens: Sequence[Sequence[int]]) -> None: ...


def test_drafts_that_a_grammar_cannot_take_change_no_token(reference: Any) -> None:
    letters = reference[1].encode("x" * 40)
    prefer = SamplingSettings(logit_bias=dict.fromkeys(reference[1].encode("12"), 1e3)).processors()
    prompt, found = reference[1].encode("n = "), []
    for options in ({}, {"drafter": Always(letters), "num_draft_tokens": 6, "draft_length": "fixed"}):
        processor = growing(reference).processor(len(prompt))
        engine = make_engine(reference[0], {0}, max_batch_size=1, **options)
        engine.submit(TokenSequence(0, prompt, 20, processors=(*prefer, processor)))
        tokens: list[int] = []
        while engine.busy:
            tokens += [token.token for token in engine.step()]
        engine.close()
        found.append(tokens)
        assert processor.error_in(tokens) is None
    assert found[0] == found[1]
    assert len(reference[1].decode(found[0][:-1])) == 8


def test_a_rule_named_start_is_no_lark(compiler: GrammarCompiler, reference: Any) -> None:
    for text in ('root ::= "a" start # start\nstart ::= "bstart" | [start]', 'start::="bstart"\nroot ::= "a" start'):
        grammar = compiler.compile(constraints.grammar(text))
        tokens = [*reference[1].encode("abstart"), 0]
        assert grammar.processor(0).allowed(mx.array([], dtype=mx.int32), tokens) == len(tokens)
    assert compiler.compile(constraints.grammar('start : "b"')).processor(0)


def shown_to_all(processor: GrammarProcessor, tokens: list[int]) -> set[int]:
    logits = processor(mx.array(tokens, dtype=mx.int32), mx.zeros((1, V)))
    return {int(token) for token in np.nonzero(np.array(logits)[0] == 0)[0]}


# --- in engines -------------------------------------------------------------------------------------------------------

ROWS: list[tuple[str, Constraint | None, int | None]] = [
    ("def first(x):\n    return ", constraints.json_schema(SCHEMA), None),
    ("import ", None, None),
    ("class Second:\n    name = ", constraints.json_schema(SCHEMA), 5),
    ("x = ", constraints.regex("[0-9]{3}(, [a-z]{2,4}){3}"), 6),
    (
        "# a list of names\nnames = ",
        constraints.json_schema({"type": "array", "items": {"enum": TEXTS}, "minItems": 3}),
        7,
    ),
    ("return", None, 8),
]


def answers(reference: Any, compiler: GrammarCompiler, rows: list[int], **options: Any) -> dict[int, list[int]]:
    """The tokens of these rows of `ROWS`, in one engine."""
    model, tokenizer = reference
    engine = make_engine(model, {0}, max_batch_size=len(rows), **options)
    for row in rows:
        prompt, constraint, seed = ROWS[row]
        tokens = [int(token) for token in tokenizer.encode(prompt)]
        sampler = None if seed is None else SeededSampler(TemperatureSampler(1.0), seed, len(tokens))
        made = () if constraint is None else (compiler.compile(constraint).processor(len(tokens)),)
        engine.submit(TokenSequence(row, tokens, 40, sampler=sampler, processors=made))
    found: dict[int, list[int]] = {row: [] for row in rows}
    while engine.busy:
        for token in engine.step():
            found[token.index].append(token.token)
    engine.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["plain", "draft model", "suffix", "8 bits"])
def test_rows_with_and_without_grammars_get_together_what_each_gets_alone(
    engine: str, reference: Any, draft: Any, compiler: GrammarCompiler
) -> None:
    more: dict[str, dict[str, Any]] = {"draft model": {"draft_model": draft}, "suffix": {"drafter": "suffix"}}
    options = more.get(engine, {}) | ({"policy": CachePolicy(bits=8)} if engine == "8 bits" else {})
    alone_in = {} if engine != "8 bits" else options  # without drafts
    together = answers(reference, compiler, list(range(len(ROWS))), **options)
    for row, (_, constraint, _) in enumerate(ROWS):
        alone = answers(reference, compiler, [row], **alone_in)[row]
        assert together[row] == alone
        if constraint is not None:
            assert compiler.compile(constraint).processor(0).allowed(mx.array([], dtype=mx.int32), alone) == len(alone)
    assert sum(0 in own for own in together.values()) >= 2
