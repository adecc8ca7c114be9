"""What an engine is asked, by one process and by the leader of several: cases, and a program that runs them on a rank.

A case takes a function that makes an engine with some settings; what it returns is of JSON's terms.
"""

from __future__ import annotations

import mlx_kv  # noqa: F401  it loads a tuned BLAS before MLX

# isort: split
import gc
import json
import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from draft_heads import random_head
from engines import make_engine
from generating import BUDGET, PENALTIES, PLAIN, PROMPT, RING, TEMPERATURE, form, joined, model_of, nearly

from mlx_kv import CachePolicy, ScoredTokens, register_score
from mlx_kv.cache.eviction.scores import SCORES
from mlx_kv.communicator import LOCAL, Communicator
from mlx_kv.generation.engine import Engine
from mlx_kv.generation.sampling import SeededSampler
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.mlxlm.traverse import attention_caches
from mlx_kv.ranks.engine import follow, lead

Make = Callable[..., Engine]
Case = Callable[[Make], Any]


def drained(engine: Engine, told: dict[str, list[int]]) -> dict[str, list[int]]:
    while engine.busy:
        note(engine, told)
    return told


def note(engine: Engine, told: dict[str, list[int]]) -> None:
    """A step."""
    for token in engine.step():
        told.setdefault(str(token.index), []).append(token.token)


# --- rows that come and go --------------------------------------------------------------------------------------------


def coming_and_going(policy: CachePolicy = PLAIN, **settings: Any) -> Case:
    """Requests at random moments, some with samplers of their own, some cancelled; more than there are rows."""

    def case(make: Make) -> dict[str, list[int]]:
        engine, chance = make(policy, max_batch_size=3, prefill_step_size=8, **settings), random.Random(5)
        told: dict[str, list[int]] = {}
        for index in range(9):
            prompt = (PROMPT * 2)[index : index + chance.choice((2, 5, 11, 30))]
            sampler = SeededSampler(TEMPERATURE, index, len(prompt)) if index % 3 == 1 else None
            engine.submit(TokenSequence(index, prompt, chance.randint(3, 14), sampler=sampler))
            for _ in range(chance.randint(0, 3)):
                note(engine, told)
            if index in (3, 6, 8):
                engine.cancel(index - chance.randint(0, 1))
        engine.cancel(99)
        drained(engine, told)
        engine.close()
        return told

    return case


def processed(**settings: Any) -> Case:
    """Rows with penalties, a form and log-probabilities, beside one that has none of them."""

    def case(make: Make) -> dict[str, list[Any]]:
        engine = make(PLAIN, max_batch_size=4, prefill_step_size=8, **settings)
        told: dict[str, list[Any]] = {}
        for index, length in enumerate((5, 12, 30, 9)):
            made = () if index == 3 else PENALTIES if index else (*PENALTIES, form().processor(length))
            sampler = SeededSampler(TEMPERATURE, index, length) if index == 2 else None
            top = 2 if index < 2 else None
            engine.submit(TokenSequence(index, PROMPT[:length], 16, sampler=sampler, processors=made, top_logprobs=top))
        while engine.busy:
            for token in engine.step():
                score = None if token.score is None else [round(token.score.logprob, 1), token.score.top[0][0]]
                told.setdefault(str(token.index), []).append([token.token, score])
        engine.close()
        return told

    return case


def made_anew(make: Make) -> list[Any]:
    """An engine with rows and caches gives way to another one."""
    engine = make(PLAIN)
    engine.submit(TokenSequence(0, PROMPT, 20))
    engine.step()
    caches = engine.make_caches()
    engine = make(CachePolicy(bits=8, group_size=32), max_batch_size=2)
    told = dict[str, list[int]]()
    engine.submit(TokenSequence(0, PROMPT, 5))
    refused = []
    for sequence in (TokenSequence(1, [], 5), TokenSequence(1, PROMPT, 5, caches=caches)):
        try:
            engine.submit(sequence)
        except ValueError as error:
            refused.append(bool(str(error)))
    return [drained(engine, told), refused]


def failing(tokens: ScoredTokens) -> mx.array:
    raise ValueError("this score cannot be used")


def failed(make: Make) -> list[Any]:
    """A step that fails on all ranks, in the middle of a prompt, and an engine that is made after it."""
    register_score("failing", failing)  # by name, which other ranks know, too
    engine, told = make(CachePolicy(score="failing", **BUDGET), prefill_step_size=8), dict[str, list[int]]()
    engine.submit(TokenSequence(0, PROMPT[:5], 9))
    engine.submit(TokenSequence(1, PROMPT, 9))
    try:
        drained(engine, told)
    except ValueError as error:
        said = str(error)
    finally:
        SCORES.registered.pop("failing")
    del engine
    engine = make(PLAIN, prefill_step_size=8)
    engine.submit(TokenSequence(0, PROMPT, 5))
    return [said, drained(engine, {})]


def going_on(policy: CachePolicy = PLAIN, **settings: Any) -> Case:
    """What was read goes on: from prefixes, from rows that decode or were cancelled, and from those that have ended."""

    def case(make: Make) -> list[Any]:
        engine = make(policy, max_batch_size=3, prefill_step_size=8, return_caches=True, **settings)
        told, counts = dict[str, list[int]](), list[Any]()
        caches: dict[int, tuple[list[int], list[Any]]] = {}  # with the tokens that they have read
        prefixes: list[tuple[list[int], list[Any]]] = []
        engine.submit(TokenSequence(0, PROMPT, 9, keep=lambda *prefix: prefixes.append(prefix)))
        engine.submit(TokenSequence(1, PROMPT[:20], 40))
        engine.submit(TokenSequence(2, PROMPT[3:9], 40))
        while len(told.get("1", ())) < 6:
            note(engine, told)
        for index, prompt in ((1, PROMPT[:20]), (2, PROMPT[3:9])):
            extracted = engine.extract(index)
            engine.cancel(index)
            counts.append(extracted is None or offset(extracted))
            if extracted is not None:
                caches[index] = ([*prompt, *told[str(index)]], extracted)
        counts.append(engine.extract(7) is None)
        while engine.busy:
            for token in engine.step():
                told.setdefault(str(token.index), []).append(token.token)
                if token.caches is not None:
                    caches[token.index] = ([*PROMPT, *told[str(token.index)]], token.caches)
        caches |= dict(enumerate(prefixes, 10))
        del prefixes[:]
        while caches:
            index, (text, one) = caches.popitem()
            left = min(len(text), offset(one))
            came = engine.trim(one, offset(one) - left) and engine.trim(one, 3)  # which rings and budgets may not have
            left -= 3 if came else 0
            counts.append([index, came, left])
            if came or left == offset(one):
                engine.submit(TokenSequence(20 + index, PROMPT[5:9], 6, caches=one, before=text[:left]))
        drained(engine, told)
        engine.close()
        return [told, counts]

    return case


def offset(caches: list[Any]) -> int:
    return max(int(cache.offset) for cache in attention_caches(caches))


BUDGETED, BY_LAYER = CachePolicy(**BUDGET), CachePolicy(share="layer", **BUDGET)
SUFFIX: dict[str, Any] = {"drafter": "suffix", "num_draft_tokens": 3, "draft_length": "fixed"}
DRAFT: dict[str, Any] = {"draft": True, "num_draft_tokens": 3, "draft_length": "fixed"}
CASES: dict[str, Case] = {
    "rows": coming_and_going(),
    "rows, budget": coming_and_going(BUDGETED),
    "rows, suffix": coming_and_going(**SUFFIX),
    "rows, draft": coming_and_going(**DRAFT),
    "rows, budget, draft": coming_and_going(BUDGETED, **DRAFT),
    "rows, head": coming_and_going(head=True, num_draft_tokens=3, draft_length="fixed"),
    "going on, head": going_on(head=True, num_draft_tokens=3, draft_length="fixed"),
    "rows, processed": processed(),
    "rows, processed, suffix": processed(**SUFFIX),
    "made anew": made_anew,
    "failed, budget": failed,
    "going on, plain": going_on(),
    "going on, ring": going_on(RING),
    "going on, budget": going_on(BUDGETED),
    "going on, suffix": going_on(**SUFFIX),
    "going on, budget, draft": going_on(BUDGETED, **DRAFT),
    "rows, budget of a layer, draft": coming_and_going(BY_LAYER, **DRAFT),
    "going on, budget of a layer, draft": going_on(BY_LAYER, **DRAFT),
}


def maker(family: str, model: Any, communicator: Communicator = LOCAL) -> Make:
    """Makes engines of a model; a draft model is the leader's alone."""

    def make(policy: CachePolicy, draft: bool = False, head: bool = False, **settings: Any) -> Engine:
        drafts = None
        if communicator.leads:
            drafts = nearly(family) if draft else random_head(model) if head else None
        return make_engine(model, set(), policy, draft_model=drafts, communicator=communicator, **settings)

    return make


def alone(family: str, name: str) -> Any:
    return json.loads(json.dumps(CASES[name](maker(family, model_of(family)))))


def changes(policy: CachePolicy) -> dict[str, Any]:
    return {name: getattr(policy, name) for name in policy.changed()}


# --- on a rank --------------------------------------------------------------------------------------------------------


def ranked(family: str, split: str, *names: str) -> None:
    """The leader runs cases and writes down what came of each; the others follow, and write down what they hold."""
    with joined(family, split) as (model, group):
        asked: list[tuple[CachePolicy, dict[str, Any]]] = []

        def engine_of_last(communicator: Communicator) -> Engine:
            """Like the leader's: of the same settings, which the command would have."""
            how = communicator.broadcast(lambda: [changes(asked[-1][0]), {**asked[-1][1], "drafter": None}])
            if communicator.leads:
                return maker(family, model, communicator)(asked[-1][0], **asked[-1][1])
            return maker(family, model, communicator)(CachePolicy(**how[0]), **how[1])

        if not group.leads:
            register_score("failing", failing)
            follow(engine_of_last, group)
            return

        def make(policy: CachePolicy, **settings: Any) -> Engine:
            asked.append((policy, settings))
            return lead(engine_of_last, group)

        for name in names:
            print(json.dumps([name, CASES[name](make)]), flush=True)
            gc.collect()
        print(json.dumps(["frames", group.leader.frames]))


def astray(family: str, split: str) -> None:
    """A rank that lets go of no row when it is told to: its next step is not the leader's."""
    with joined(family, split) as (model, group):

        def make(communicator: Communicator) -> Engine:
            return make_engine(model, set(), PLAIN, communicator=communicator)

        if not group.leads:
            Engine.cancel = lambda engine, index: None  # type: ignore[method-assign]
            follow(make, group)
        engine = lead(make, group)
        for index in (0, 1):
            engine.submit(TokenSequence(index, PROMPT[:5], 20))
        engine.step()
        engine.step()
        print("cancelled", flush=True)
        engine.cancel(1)
        drained(engine, {})
