"""Arguments that fit nowhere: each public name refuses them itself, in one line, with ValueError or TypeError."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import public_calls
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from public_calls import CALLS, IDS, MISFITS, REFUSED, TAKEN, Call, tried

import mlx_kv
from mlx_kv import CachePolicy, SamplingSettings, inspection
from mlx_kv.calibration import loss

Reference = tuple[Any, Any]
MODELS = {"PromptReader", "batch_generate", "generate", "speculative_generate", "stream_generate"}


@pytest.fixture(autouse=True)
def _somewhere_else(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Paths such as "x" are written to; what is registered here is forgotten."""
    from mlx_kv.cache.codecs import CODECS
    from mlx_kv.cache.eviction.scores import SCORES
    from mlx_kv.generation.speculation.drafters import DRAFTERS

    for known in (CODECS, SCORES, DRAFTERS):
        monkeypatch.setattr(known, "registered", dict(known.registered))
    before = Path.cwd()
    os.chdir(public_calls.folder())
    yield
    os.chdir(before)


def test_every_public_name_is_called_here() -> None:
    assert sorted(CALLS) == sorted(mlx_kv.__all__)


CALLED = [(name, call) for name, calls in CALLS.items() if isinstance(calls, list) for call in calls]
ARGUMENTS = [
    pytest.param(name, call, argument, id=f"{name}-{number}-{argument}")
    for number, (name, call) in enumerate(CALLED)
    for argument in [*call.arguments()]
    if argument not in IDS
]


@pytest.mark.parametrize(("name", "call"), CALLED)
def test_these_calls_work(name: str, call: Call) -> None:
    if name != "load_part":  # of which there are others than this process
        assert call.outcome() == TAKEN


@pytest.mark.parametrize(("name", "call", "argument"), ARGUMENTS)
def test_what_fits_nowhere_is_refused_in_one_line(name: str, call: Call, argument: str) -> None:
    outcomes = {repr(wrong)[:80]: tried(call, argument, wrong) for wrong in MISFITS}
    faults = {wrong: what for wrong, what in outcomes.items() if what not in (TAKEN, REFUSED)}
    assert not faults


def test_whole_numbers_of_every_type_are_taken() -> None:
    tried_numbers = 0
    for name, call in CALLED:
        for argument, number in call.arguments().items():
            if type(number) is int and name != "load_part":
                tried_numbers += 1
                assert tried(call, argument, np.int64(number)) == TAKEN, (name, argument)
                if 0 <= number < 256:
                    assert tried(call, argument, np.uint8(number)) == TAKEN, (name, argument)
    assert tried_numbers > 15


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.binary(max_size=5)
    | st.text(st.characters(exclude_categories=[]), max_size=5),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=3), parts, max_size=2)
    | st.tuples(parts, parts),
    max_leaves=5,
)  # fmt: skip


@given(wrong=ANYTHING)
@settings(max_examples=max(3, settings.default.max_examples // 3) if settings.default else 3)
@pytest.mark.slow
def test_so_is_anything_else(wrong: Any) -> None:
    for name, call in CALLED:
        for argument in call.arguments().keys() - IDS:
            assert tried(call, argument, wrong) in (TAKEN, REFUSED), (name, argument)


@pytest.mark.slow
def test_token_ids_that_no_model_has_are_refused_by_all() -> None:
    """In a process of their own: an id that is not refused may read memory out of bounds, and end it."""
    script = [sys.executable, public_calls.__file__]
    ended = subprocess.run(script, capture_output=True, text=True, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    calls = lines[0::2]
    assert ended.returncode == 0, f"it ended in {calls[-1]}: {ended.stderr[-500:]}"
    faults = [
        (call, outcome)
        for call, outcome in zip(calls, lines[1::2], strict=True)
        if outcome not in ((REFUSED,) if call[2] and call[0] in MODELS else (TAKEN, REFUSED))
    ]
    assert len(calls) > 500
    assert not faults


# --- the words ----------------------------------------------------------------------------------------------------

REFUSALS = {
    "an id beyond": (
        {"prompt": [5, 4096, 7]},
        ValueError,
        "the prompt has the token 4096, but the vocabulary has 4,096",
    ),
    "below 0": ({"prompt": [-1]}, ValueError, "the prompt has the token -1, but"),
    "no number": ({"prompt": [5.9]}, ValueError, r"the prompt is \[5.9\]: give token ids, whole numbers from 0 up"),
    "an array": ({"prompt": np.array([5.0])}, ValueError, "give token ids, whole numbers from 0 up"),
    "two axes": ({"prompt": mx.array([[5, 6]])}, ValueError, r"the prompt has shape \(1, 2\): give one sequence"),
    "half a pair": ({"prompt": "a\ud800"}, ValueError, r"the prompt has '\\ud800', half of a surrogate pair, at char"),
    "settings": (
        {"policy": {"bits": 8}},
        TypeError,
        r"policy is {'bits': 8}: give a CachePolicy, such as CachePolicy\(",
    ),
    "a name": ({"draft_model": "reference"}, TypeError, "draft_model is 'reference': give a model, as mlx_kv.load"),
    "bits": ({"bits": 8}, ValueError, r"bits is for the policy: use policy=CachePolicy\(bits=8\)"),
    "bits to drafts": (
        {"bits": 8, "drafter": "ngram"},
        ValueError,
        r"bits is for the policy: use policy=CachePolicy\(",
    ),
    "surprise": (
        {"surprise": 1},
        TypeError,
        "there is no option surprise: leave it out, or give one of input_embeddings,",
    ),
    "no layers": ({"prompt_cache": []}, ValueError, "prompt_cache has 0 layers, the model 4: use make_prompt_cache"),
    "no caches": ({"prompt_cache": [None]}, TypeError, r"prompt_cache is \[None\]: give a list of caches"),
    "no model": ({"model": "reference"}, TypeError, "model is 'reference': give a model, as mlx_kv.load returns it"),
    "no tokenizer": ({"tokenizer": None}, TypeError, "tokenizer is None: give a tokenizer, as mlx_kv.load returns it"),
    "no sampler": ({"sampler": 0.5}, TypeError, "sampler is 0.5: give a function of log-probabilities, or None"),
}


@pytest.mark.parametrize(("arguments", "kind", "words"), REFUSALS.values(), ids=REFUSALS)
def test_what_is_said(reference: Reference, arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    usual = {"model": reference[0], "tokenizer": reference[1], "prompt": "x", "max_tokens": 1}
    with pytest.raises(kind, match=words):
        mlx_kv.generate(**{**usual, **arguments})


@pytest.mark.parametrize("ids", [mx.array([5, 6]), np.array([5, 6]), (5, 6), iter([5, 6]), [np.int64(5), mx.array(6)]])
def test_ids_of_all_kinds_are_taken(reference: Reference, ids: Any) -> None:
    same = mlx_kv.generate(*reference, [5, 6], max_tokens=3)
    assert mlx_kv.generate(*reference, ids, max_tokens=3) == same


def test_the_last_id_is_taken(reference: Reference) -> None:
    list(mlx_kv.batch_generate(*reference, [[4095, 0]], max_tokens=1))


def test_a_text_of_another_models_tokenizer_is_refused(reference: Reference) -> None:
    from tiny_models import VOCAB, make_model

    with pytest.raises(ValueError, match=f"but the vocabulary has {VOCAB}: give ids from 0 to {VOCAB - 1}$"):
        mlx_kv.generate(make_model("llama"), reference[1], "import numpy as np", max_tokens=1)


EVALUATION = {
    "losses": loss.losses,
    "measure_centres": loss.measure_centres,
    "inspect_prompt": lambda model, ids: inspection.inspect_prompt(model, ids, CachePolicy(budget=80)),
    "attention_of_last": inspection.attention_of_last,
}


@pytest.mark.parametrize(
    "wrong", [[*range(99), 4096], [*range(99), -1], [*range(99), 5.9]], ids=["far", "below", "half"]
)
@pytest.mark.parametrize("function", EVALUATION.values(), ids=EVALUATION)
def test_so_they_are_where_a_model_is_measured(reference: Reference, function: Any, wrong: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"the token 4096|the token -1|give token ids"):
        function(reference[0], wrong)


def test_numbers_beyond_floats_are_no_settings() -> None:
    with pytest.raises(ValueError, match=r"^presence_penalty is 1000\S+…: give a finite number$"):
        SamplingSettings(presence_penalty=10**400)
