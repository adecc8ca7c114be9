"""A conversation answers as one prompt of all that was said would be, whatever of it was read before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from engines import make_engine

import mlx_kv
from mlx_kv import CachePolicy, SamplingSettings
from mlx_kv.generation.conversation import Conversation
from mlx_kv.generation.encoding import ChatSettings
from mlx_kv.generation.sampling import TemperatureSampler, sampler_of_sequence
from mlx_kv.mlxlm.loading import load

ASKED = ("def add(a, b):", "import os\nprint(", "class First:\n    def")
TEMPLATE = (
    "{% for m in messages %}# {{ m['role'] }}\n{{ CONTENT }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant\n{% endif %}"
)
FULL = {"full": CachePolicy(), "8 bits": CachePolicy(bits=8)}
DRAFTS = {"plain": {}, "ngram": {"drafter": "ngram"}, "draft model": {"draft_model": True}}


def chatty(reference: Any, content: str = "m['content']") -> Any:
    """The tokenizer of the reference model, with a chat template."""
    _, tokenizer = load(mlx_kv.model_path("reference"))
    tokenizer._tokenizer.chat_template = TEMPLATE.replace("CONTENT", content)
    return tokenizer


@contextlib.contextmanager
def conversing(
    model: Any, tokenizer: Any, policy: CachePolicy, settings: ChatSettings | None = None, **options: Any
) -> Iterator[Conversation]:
    ends = set(tokenizer.eos_token_ids)
    engine = make_engine(model, ends, policy, max_batch_size=1, return_caches=True, **options)
    try:
        yield Conversation(engine, tokenizer, settings or ChatSettings())
    finally:
        engine.close()


def asked(conversation: Conversation, question: str, max_tokens: int = 12) -> list[int]:
    return [token.token for token in conversation.ask(question, max_tokens)]


def alone(model: Any, tokenizer: Any, prompt: list[int], policy: CachePolicy, max_tokens: int = 12) -> list[int]:
    """What follows a prompt that is read at once."""
    return [each.token for each in mlx_kv.stream_generate(model, tokenizer, prompt, policy, max_tokens)]


@pytest.mark.parametrize("draft_by", DRAFTS)
@pytest.mark.parametrize("policy", FULL)
@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
def test_each_answer_is_that_of_the_whole(
    policy: str, draft_by: str, chat: bool, reference: tuple[Any, Any], draft: Any
) -> None:
    model, tokenizer = reference[0], chatty(reference) if chat else reference[1]
    options = {name: draft if name == "draft_model" else value for name, value in DRAFTS[draft_by].items()}
    with conversing(model, tokenizer, FULL[policy], **options) as conversation:
        for number, question in enumerate(ASKED):
            before, prompt = conversation.tokens, conversation.prompt_of(question).tokens
            answer = asked(conversation, question)
            assert answer == alone(model, tokenizer, prompt, FULL[policy])
            turn = conversation.turns[-1]
            assert prompt[: len(before)] == before
            assert turn.tokens == prompt + answer
            assert turn.reused >= len(before) - 4  # the last pass of a draft model may be read again
            assert len(conversation.turns) == number + 1


def test_the_end_of_an_answer_is_there_once(reference: tuple[Any, Any]) -> None:
    """A model that ends its answer writes what the template puts there, too."""
    model, tokenizer = reference[0], chatty(reference)
    tokenizer._tokenizer.eos_token = "\t"
    (end,) = tokenizer.encode("\t", add_special_tokens=False)
    tokenizer.eos_token_ids.add(end)
    always = SamplingSettings(logit_bias={end: 1e4}).processors()
    with conversing(model, tokenizer, CachePolicy()) as conversation:
        answer = [token.token for token in conversation.ask("one", 12, processors=always)]
        assert answer == [end]
        prompt = conversation.prompt_of("two").tokens
        assert prompt[: len(conversation.tokens)] == conversation.tokens
        assert tokenizer.decode(prompt) == "# user\none\t\n# assistant\n\t\n# user\ntwo\t\n# assistant\n"


@pytest.mark.parametrize("policy", FULL)
def test_a_turn_that_was_taken_back_left_nothing(policy: str, reference: tuple[Any, Any]) -> None:
    model, tokenizer = reference
    with conversing(model, tokenizer, FULL[policy]) as one, conversing(model, tokenizer, FULL[policy]) as other:
        for conversation in (one, other):
            asked(conversation, ASKED[0])
        asked(one, ASKED[1])
        assert one.undo()
        assert (one.tokens, one.read) == (other.tokens, other.read[: len(one.read)])
        assert asked(one, ASKED[2]) == asked(other, ASKED[2])
        assert one.turns[-1].reused == len(other.turns[0].tokens)


@pytest.mark.parametrize(
    "policy", [CachePolicy(budget=32, keep_recent=8, margin=8), CachePolicy(max_kv_size=32)], ids=str
)
def test_caches_that_cannot_go_back_are_read_again(policy: CachePolicy, reference: tuple[Any, Any]) -> None:
    """And until then a conversation goes on in them."""
    model, tokenizer = reference
    with conversing(model, tokenizer, policy) as conversation:
        asked(conversation, ASKED[0], 30)
        asked(conversation, ASKED[1], 30)
        assert conversation.turns[-1].reused == len(conversation.turns[0].tokens)
        assert not conversation.undo()
        assert conversation.read == []
        prompt = conversation.prompt_of(ASKED[2]).tokens
        assert asked(conversation, ASKED[2]) == alone(model, tokenizer, prompt, policy)
        assert conversation.turns[-1].reused == 0


def test_a_template_that_changes_answers_costs_what_it_changes(reference: tuple[Any, Any]) -> None:
    model, tokenizer = reference[0], chatty(reference, "m['content'] | reverse")
    with conversing(model, tokenizer, CachePolicy()) as conversation:
        asked(conversation, ASKED[0])
        answer_begins = conversation.turns[0].prompt_tokens
        prompt = conversation.prompt_of(ASKED[1]).tokens
        assert asked(conversation, ASKED[1]) == alone(model, tokenizer, prompt, CachePolicy())
        assert answer_begins - 1 <= conversation.turns[1].reused < len(conversation.turns[0].tokens)


@pytest.mark.parametrize("draft_by", ["plain", "ngram"])
def test_an_answer_that_is_broken_off_stays_as_far_as_it_came(draft_by: str, reference: tuple[Any, Any]) -> None:
    model, tokenizer = reference
    with conversing(model, tokenizer, CachePolicy(), **DRAFTS[draft_by]) as conversation:
        answer = conversation.ask(ASKED[0], 50)
        said = [next(answer).token for _ in range(6)]
        answer.close()
        assert conversation.turns[-1].finish_reason == "interrupted"
        assert conversation.turns[-1].answer_tokens == 6
        prompt = conversation.prompt_of(ASKED[1]).tokens
        assert prompt[: len(conversation.tokens)][-6:] == said
        assert asked(conversation, ASKED[1]) == alone(model, tokenizer, prompt, CachePolicy())
        assert conversation.turns[-1].reused >= len(conversation.turns[0].tokens) - 1


@pytest.mark.parametrize(
    ("draft_by", "policy"),
    [("plain", CachePolicy()), ("ngram", CachePolicy()), ("plain", CachePolicy(budget=32, keep_recent=8, margin=8))],
)
def test_a_turn_that_is_ended_while_its_prompt_is_read_is_none(
    draft_by: str, policy: CachePolicy, reference: tuple[Any, Any]
) -> None:
    model, tokenizer = reference
    with conversing(model, tokenizer, policy, prefill_step_size=8, **DRAFTS[draft_by]) as conversation:
        for turns in range(2):
            steps = iter([False, False, True])  # between chunks of a prompt of many
            assert list(conversation.ask("x = 1\n" * 40, 12, ended=lambda steps=steps: next(steps))) == []
            assert (len(conversation.turns), conversation.engine.busy) == (turns, False)
            assert conversation.caches is None or conversation.read == conversation.tokens[: len(conversation.read)]
            prompt = conversation.prompt_of(ASKED[turns]).tokens
            assert prompt[: len(conversation.tokens)] == conversation.tokens
            answer = mlx_kv.stream_generate(model, tokenizer, prompt, policy, 12, prefill_step_size=8)
            assert asked(conversation, ASKED[turns]) == [each.token for each in answer]


def test_seeds_are_of_positions(reference: tuple[Any, Any]) -> None:
    """The same draws, whether the history was read before or with the question."""
    model, tokenizer = reference
    rules = TemperatureSampler(1.0)
    with conversing(model, tokenizer, CachePolicy()) as conversation:
        for question in ASKED[:2]:
            prompt = conversation.prompt_of(question).tokens
            tokens = conversation.ask(question, 12, lambda position: sampler_of_sequence(rules, 7, position))
            wanted = mlx_kv.stream_generate(model, tokenizer, prompt, max_tokens=12, sampler=rules, seed=7)
            assert [token.token for token in tokens] == [each.token for each in wanted]


def test_penalties_look_at_the_whole_conversation(reference: tuple[Any, Any]) -> None:
    """What was read before counts as what was read with the question."""
    model, tokenizer = reference
    processors = SamplingSettings(repetition_penalty=3.0, repetition_context_size=0).processors()
    with conversing(model, tokenizer, CachePolicy()) as conversation:
        for question in ASKED[:2]:
            prompt = conversation.prompt_of(question).tokens
            tokens = conversation.ask(question, 12, processors=processors)
            wanted = mlx_kv.stream_generate(model, tokenizer, prompt, max_tokens=12, logits_processors=processors)
            assert [token.token for token in tokens] == [each.token for each in wanted]
        assert conversation.turns[1].reused > 12


def test_a_system_prompt_comes_first_and_needs_a_template(reference: tuple[Any, Any]) -> None:
    model, tokenizer = reference[0], chatty(reference)
    settings = ChatSettings(system="be brief")
    with conversing(model, tokenizer, CachePolicy(), settings) as conversation:
        asked(conversation, "one")
        assert tokenizer.decode(conversation.tokens).startswith("# system\nbe brief")
        assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]
    with pytest.raises(ValueError, match="chat template"), conversing(*reference, CachePolicy(), settings):
        pass
