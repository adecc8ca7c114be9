"""The simulation of selective reading against one that decodes token by token and gathers what it has selected."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.eval import partial_reads
from benchmarks.eval.partial_reads import (
    BLOCKS,
    DIVISORS,
    NEWEST,
    SELECTIONS,
    SINKS,
    MassObserver,
    PartialReads,
    Plan,
    Reading,
)
from mlx_kv import make_prompt_cache
from mlx_kv.mlxlm.attention import AttentionCall, attention_hooked
from tests.tiny_models import VOCAB, make_model

CONTEXT, FOLLOWING = 200, 70  # blocks of the following tokens become selectable, too


def softmax(x: np.ndarray) -> np.ndarray:
    exps = np.exp(x - x.max())
    return exps / exps.sum()  # type: ignore[no-any-return]


class Gathered:
    """Attention of one query over the tokens that it has selected, head by head."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.most_read = 0.0

    def attend(self, call: AttentionCall) -> mx.array:
        if call.queries.shape[2] > 1:
            return call.forward()
        queries, keys, values = (np.array(x[0], np.float64) for x in (call.queries[:, :, 0], call.keys, call.values))
        group, tokens, block = len(queries) // len(keys), keys.shape[1], self.reading.block
        outputs = []
        for head, (head_keys, head_values) in enumerate(zip(keys, values, strict=True)):
            of_head = queries[head * group : (head + 1) * group] * call.scale
            firsts = [f for f in range(SINKS, tokens, block) if f + block <= tokens - NEWEST]
            after = firsts[-1] + block if firsts else SINKS
            read = [*range(SINKS), *range(after, tokens)]
            count = max(1, (tokens // self.reading.divisor - len(read)) // block)
            totals = np.zeros(len(firsts))
            for query in of_head:
                logits = []
                for f in firsts:
                    part = head_keys[f : f + block]
                    if self.reading.select == "bound":
                        logits.append(np.maximum(query * part.min(axis=0), query * part.max(axis=0)).sum())
                    elif self.reading.select == "mean":
                        logits.append(query @ part.mean(axis=0))
                    elif self.reading.select == "moments":
                        logits.append(np.mean(part @ query) + (query**2 * part.var(axis=0)).sum() / 2)
                    else:
                        logits.append(np.log(np.exp(part @ query).sum()))
                everything = 0.0 if self.reading.select != "oracle" else np.exp(head_keys @ query).sum()
                totals += np.exp(logits) / everything if everything else softmax(np.array(logits))
            for best in np.argsort(-totals)[:count]:
                read += range(firsts[best], firsts[best] + block)
            self.most_read = max(self.most_read, len(read) / tokens)
            outputs += [softmax(head_keys[read] @ query) @ head_values[read] for query in of_head]
        return mx.array(np.array(outputs, np.float32)[None, :, None])


@pytest.mark.parametrize("select", ["bound", "mean", "moments", "oracle"])
@pytest.mark.slow
def test_one_call_equals_decoding_from_the_selected_blocks(select: str) -> None:
    reading = Reading(select, block=16, divisor=4)
    model, tokens = make_model("llama", num_key_value_heads=2), mx.random.randint(0, VOCAB, (1, CONTEXT + FOLLOWING))
    caches, slow_caches = make_prompt_cache(model), make_prompt_cache(model)
    for filled in (caches, slow_caches):
        mx.eval(model(tokens[:, :CONTEXT], cache=filled))
    hook, slow = PartialReads(caches, reading, np.ones(FOLLOWING, bool)), Gathered(reading)
    with attention_hooked(model, caches, hook):
        at_once = np.array(model(tokens[:, CONTEXT:], cache=caches)[0])
    with attention_hooked(model, slow_caches, slow):
        one_by_one = [model(tokens[:, t : t + 1], cache=slow_caches)[0, 0] for t in range(CONTEXT, CONTEXT + FOLLOWING)]
    np.testing.assert_allclose(at_once, np.array(mx.stack(one_by_one)), atol=1e-4)
    assert hook.tokens[0] / hook.tokens[1] <= slow.most_read < 0.4
    everything = np.array(model(tokens, cache=make_prompt_cache(model))[0, CONTEXT:])
    assert np.abs(at_once - everything).max() > 1e-3


@pytest.mark.parametrize(("whole", "first"), [(3, FOLLOWING), (0, 20)])
def test_tokens_that_do_not_select_and_first_layers_read_everything(whole: int, first: int) -> None:
    model, tokens = make_model("llama"), mx.random.randint(0, VOCAB, (1, CONTEXT + FOLLOWING))
    everything = np.array(model(tokens, cache=make_prompt_cache(model))[0, CONTEXT:])
    caches = make_prompt_cache(model)
    mx.eval(model(tokens[:, :CONTEXT], cache=caches))
    selecting = np.arange(FOLLOWING) >= 20
    with attention_hooked(model, caches, PartialReads(caches, Reading("random", whole=whole), selecting)):
        found = np.array(model(tokens[:, CONTEXT:], cache=caches)[0])
    same = np.abs(found - everything).max(axis=-1) < 1e-4
    np.testing.assert_array_equal(same, np.arange(FOLLOWING) < first)


def test_the_oracle_finds_the_most_attention_and_more_blocks_find_more() -> None:
    model, tokens = make_model("llama"), mx.random.randint(0, VOCAB, (1, 700))
    caches, observer = make_prompt_cache(model), MassObserver()
    mx.eval(model(tokens[:, :-8], cache=caches))
    with attention_hooked(model, caches, observer):
        mx.eval(model(tokens[:, -8:], cache=caches))
    mass = {place: np.array(layers) for place, layers in observer.mass.items()}
    assert len(mass) == len(SELECTIONS) * len(BLOCKS) * len(DIVISORS)
    for (select, block, divisor), layers in mass.items():
        assert len(layers) == 3
        assert ((layers > 0) & (layers <= mass["oracle", block, divisor] + 1e-6)).all()
        assert (layers >= mass[select, block, 16] - 1e-6).all()
    assert (mass["oracle", 16, 4] > mass["random", 16, 4]).all()


def test_a_plan_reads_at_most_its_share() -> None:
    positions = np.arange(1023, 4000)
    for block in (16, 32):
        read = Plan.of(positions, block, 4).tokens_read(block)
        assert ((read <= (positions + 1) / 4) & (read > (positions + 1) / 4 - block)).all()


def test_cases_that_were_cut_off_are_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "cases.jsonl"
    file.write_text('{"place": {"task": "text", "context": 1024, "seed": 0, "row": 0}, "lines": []}\n{"place": {"ta')
    assert [case.place.context for case in partial_reads.cases_of(file)] == [1024]
