"""Prompts with images beside what else there is: heads that draft, readers, files, tokens before, positions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner
from mlx_lm.models import cache as stock

pytest.importorskip("mlx_vlm", reason='pip install ".[vision]"')

import vision_models as tiny
from draft_heads import bigram_head, calm, random_head
from PIL import Image as Pillow
from vision_models import Parts, known, prompt, some_parts

from mlx_kv import (
    CachePolicy,
    ImagePrompt,
    PromptMemory,
    PromptReader,
    PromptStore,
    SpeculationStatistics,
    batch_generate,
    calibrate,
    encode_images,
    generate,
    load_draft_head,
    make_prompt_cache,
    save_draft_head,
    save_prompt_cache,
    speculative_generate,
    stream_generate,
)
from mlx_kv.bundled import model_path
from mlx_kv.cache.layout import PLACES
from mlx_kv.cli.main import command
from mlx_kv.files.serialization import load_prompt_file, model_fingerprint
from mlx_kv.mlxlm.head_files import HeadShape
from mlx_kv.mlxlm.loading import load
from mlx_kv.mlxlm.probe import cache_ropes
from mlx_kv.mlxlm.vision import Image

FAMILIES = pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3", "muse_spark"])


def told(model: Any, prompts: Sequence[ImagePrompt], lengths: Sequence[int], **options: Any) -> list[list[int]]:
    said: list[list[int]] = [[] for _ in prompts]
    for token in batch_generate(model, None, prompts, max_tokens=lengths, max_batch_size=3, **options):
        said[token.index].append(token.token)
    return said


@FAMILIES
@pytest.mark.parametrize("drafter", [None, "auto"])
def test_a_head_leaves_the_text_as_it_is(family: str, drafter: str | None) -> None:
    """More prompts than rows, some of which begin alike."""
    chance = random.Random(family)
    model: Any = calm(tiny.make_model(family))
    begins = known(model, some_parts(family, chance, 2))
    asked: list[Parts] = [[*begins, [9, 11, chance.randrange(180)]] for _ in range(3)]
    asked += [known(model, some_parts(family, chance, count)) for count in (0, 1, 2, 0, 3)]
    lengths = [chance.randint(6, 24) for _ in asked]
    reference = tiny.Reference(family, model)
    wanted = [reference.generate(parts, count) for parts, count in zip(asked, lengths, strict=True)]
    for head in (bigram_head(model), random_head(model, hidden=(1,))):
        statistics = SpeculationStatistics()
        options: dict[str, Any] = {"draft_model": head, "drafter": drafter, "draft_length": "fixed"}
        assert told(model, [prompt(each) for each in asked], lengths, statistics=statistics, **options) == wanted
        assert statistics.drafted > 0


@pytest.mark.parametrize("family", ["qwen2_5_vl", "muse_spark"])
@pytest.mark.parametrize(
    "policy",
    [
        CachePolicy(bits=8, group_size=32),
        CachePolicy(budget=24, keep_recent=8, sinks=2, margin=10),
        CachePolicy(budget=24, keep_recent=8, sinks=2, margin=10, score="kvzip"),
    ],
    ids=["8", "budget", "kvzip"],
)
@pytest.mark.parametrize("drafter", [None, "suffix"])
def test_drafts_leave_the_text_as_it_is_with_every_policy(
    family: str, policy: CachePolicy, drafter: str | None
) -> None:
    chance = random.Random(family)
    model: Any = calm(tiny.make_model(family))
    asked = [prompt(known(model, some_parts(family, chance, count))) for count in (2, 0, 3, 1)]
    wanted = told(model, asked, [24] * 4, policy=policy)
    options = {"drafter": drafter} if drafter else {"draft_model": bigram_head(model)}
    assert told(model, asked, [24] * 4, policy=policy, draft_length="fixed", **options) == wanted


@pytest.mark.parametrize("family", ["qwen3_vl", "muse_spark"])
def test_a_head_of_a_file_is_that_of_a_model_with_images(family: str, tmp_path: Path) -> None:
    model: Any = calm(tiny.make_model(family))
    head = HeadShape(128, 4, 2, 32, 64, 50).make_head()
    head.guess_only(mx.arange(50, dtype=mx.int32))
    head.bind(model)
    save_draft_head(tmp_path / "x.kvdraft.safetensors", head, model)
    asked = [prompt(known(model, some_parts(family, random.Random(count), count))) for count in (2, 0)]
    loaded = load_draft_head(tmp_path / "x.kvdraft.safetensors", model)
    options: dict[str, Any] = {"draft_model": loaded, "draft_length": "fixed"}
    assert told(model, asked, [12, 12], **options) == told(model, asked, [12, 12])


# --- readers, files and tokens before ---------------------------------------------------------------------------------


@FAMILIES
@pytest.mark.parametrize("kind", ["memory", "disk", "none"])
def test_a_reader_goes_on_from_what_it_kept(family: str, kind: str, tmp_path: Path) -> None:
    """Of two prompts with the same two images, the second goes on behind the first of them, or within."""
    chance, model = random.Random(family), tiny.make_model(family)
    begins = [[chance.randrange(3, 180) for _ in range(80)]]  # long enough to be looked up
    parts = [*begins, *known(model, some_parts(family, chance, 2))]
    store: Any = {"memory": PromptMemory(1 << 30), "disk": PromptStore(tmp_path), "none": None}[kind]
    for last in (parts, [*parts[:4], *known(model, [tiny.make_image(family, 99)]), [5, 6]]):
        asked = prompt(last)
        reader = PromptReader(model, make_prompt_cache(model), asked, store, step=7)
        before, encoded = ImagePrompt(asked.tokens[:-1]), model.images.encoded
        caches = reader.finish()
        rest = stream_generate(model, tokenizer(), asked.tokens[-1:], None, 8, prompt_cache=caches, before=before)
        assert [each.token for each in rest] == tiny.Reference(family, model).generate(last, 8)
    if kind == "memory" and family not in tiny.WINDOWED:  # whose windows are kept at some places alone
        assert reader.reused == len(tiny.with_images(parts[:4])) + 1  # and the mark of the image to come
        assert model.images.encoded == encoded + 1


def test_a_reader_holds_its_images() -> None:
    model = tiny.make_model("llava")
    reader = PromptReader(model, make_prompt_cache(model), prompt([[5], tiny.make_image("llava", 1), [6, 7]]))
    with pytest.raises(ValueError, match="give it again"):  # nobody has added it
        reader.finish()
    asked = prompt(known(model, [[5], tiny.make_image("llava", 1), [6, 7]]))
    reader = PromptReader(model, make_prompt_cache(model), asked)
    del asked
    reader.finish()


def able_to_go_back(family: str) -> CachePolicy | None:
    return CachePolicy(max_rollback=8) if family in tiny.WINDOWED else None


def tokenizer() -> Any:
    return load(model_path("reference"))[1]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3", "muse_spark"])
@pytest.mark.parametrize("drafter", [None, "suffix", "head"])
def test_a_file_has_the_tokens_of_images_and_goes_on(family: str, drafter: str | None, tmp_path: Path) -> None:
    chance, model = random.Random(family), tiny.make_model(family)
    first = known(model, some_parts(family, chance, 2))
    asked, caches = prompt(first), make_prompt_cache(model, able_to_go_back(family))
    said = [each.token for each in stream_generate(model, tokenizer(), asked, None, 4, prompt_cache=caches)]
    save_prompt_cache(tmp_path / "x.safetensors", caches, tokens=[*asked.tokens, *said])
    file = load_prompt_file(tmp_path / "x.safetensors")
    assert file.tokens == [*asked.tokens, *said]
    more = [[7], *known(model, some_parts(family, chance, 1))]
    seen: list[list[int]] = []

    def watch(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())  # type: ignore[arg-type]
        return logits

    options: dict[str, Any] = {"prompt_cache": file.caches, "before": ImagePrompt(file.tokens)}
    options |= {"logits_processors": [watch]}
    if drafter is None:
        answer = stream_generate(model, tokenizer(), prompt(more), None, 8, **options)
    else:
        head = bigram_head(model) if drafter == "head" else None
        drafting = {"drafter": None if head else drafter, "draft_length": "fixed", **options}
        answer = speculative_generate(model, head, None, prompt(more), 8, **drafting)
    whole = [*first, said, *more]
    assert [each.token for each in answer] == tiny.Reference(family, model).generate(whole, 8)
    assert seen[0][: len(tiny.plain_tokens(whole))] == tiny.plain_tokens(whole)


@pytest.mark.parametrize("family", ["qwen3_vl", "muse_spark"])
def test_the_command_goes_on_from_a_file_with_images(family: str, tmp_path: Path) -> None:
    """Also with `--image`, without a file."""
    folder = tiny.save_model(family, tmp_path / "model")
    model, words = load(folder)
    picture = Pillow.fromarray(np.random.default_rng(1).integers(0, 256, (40, 60, 3), np.uint8))
    picture.save(tmp_path / "a.png")
    seen = [{"type": "image", "image": picture}, {"type": "text", "text": "so?"}]
    asked, caches = encode_images(model, words, [{"role": "user", "content": seen}]), make_prompt_cache(model)
    settings = ["generate", "--model", str(folder), "--max-tokens", "8", "--temp", "0"]
    told = CliRunner().invoke(command, [*settings, "--image", str(tmp_path / "a.png"), "--prompt", "so?"])
    assert generate(model, words, asked, max_tokens=8) in told.output
    PromptReader(model, caches, asked).finish()
    file, fingerprint = tmp_path / "x.safetensors", model_fingerprint(model, words)
    save_prompt_cache(file, caches, tokens=asked.tokens[:-1], fingerprint=fingerprint)
    wanted = list(
        stream_generate(model, words, [*words.encode("and?", add_special_tokens=False)], None, 8, prompt_cache=caches)
    )
    more = ["--prompt-cache-file", str(file), "--ignore-chat-template", "--prompt", "and?", "--draft", "suffix"]
    told = CliRunner().invoke(command, [*settings, *more])
    assert "".join(each.text for each in wanted) in told.output


def test_what_reads_no_images_refuses_their_tokens(tmp_path: Path) -> None:
    text, words = load(model_path("reference"))
    asked = ImagePrompt([5, PLACES, 6])
    with pytest.raises(ValueError, match="reads none"):
        PromptReader(text, make_prompt_cache(text), asked)
    with pytest.raises(ValueError, match="reads none"):
        list(stream_generate(text, words, [5], prompt_cache=make_prompt_cache(text), before=asked))
    with pytest.raises(ValueError, match="vocabulary"):
        PromptReader(text, make_prompt_cache(text), ImagePrompt([5, 100_000]))


# --- positions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.SEVERAL_AXES)
def test_no_score_that_undoes_rope_is_fitted_where_positions_have_several_axes(family: str) -> None:
    """Budgets of heads need no positions."""
    model = tiny.make_model(family)
    texts = [mx.random.randint(3, 180, (64,), key=mx.random.key(seed)).tolist() for seed in range(6)]
    with pytest.raises(ValueError, match=f"layer 0 of {family} change with the position"):
        calibrate(model, None, texts)
    calibration = calibrate(model, None, texts[:1], budgets_only=True)
    with pytest.raises(ValueError, match="no weights"):
        CachePolicy(budget=24, score="fitted", calibration=calibration)
    policy = CachePolicy(budget=24, keep_recent=8, sinks=2, margin=10, share="head", layers=calibration.heads)
    assert_rows_are_alone(family, model, policy)


@pytest.mark.parametrize("family", [family for family in tiny.FAMILIES if family not in tiny.SEVERAL_AXES])
def test_a_fitted_score_undoes_rope_of_images(family: str) -> None:
    """In the first layer the key of the same place of the same image is the same, wherever the image is."""
    model = tiny.make_model(family)
    ((rope, _),) = cache_ropes(model, (0,))
    (image,) = known(model, [tiny.make_image(family, 3)])
    assert isinstance(image, Image)
    caches: list[Any] = [stock.KVCache() for _ in model.layers]
    tokens = tiny.with_images([[5], image, [6, 7, 8], image, [9]])
    model(mx.array([tokens]), cache=caches)
    keys, places = caches[0].keys[:, :, : len(tokens)], [i for i, token in enumerate(tokens) if token >= PLACES]
    assert rope is not None
    plain = rope.undo(keys, mx.arange(keys.shape[2])[None, None])[:, :, mx.array(places)]
    one, other = mx.split(plain, 2, axis=2)
    assert mx.allclose(one, other, atol=1e-3)


@pytest.mark.parametrize("family", ["llava", "muse_spark"])
def test_rows_with_a_fitted_score_get_the_tokens_of_each_alone(family: str) -> None:
    model = tiny.make_model(family)
    texts = [mx.random.randint(3, 180, (64,), key=mx.random.key(seed)).tolist() for seed in range(6)]
    calibration = calibrate(model, None, texts)
    assert_rows_are_alone(family, model, CachePolicy(budget=24, keep_recent=8, score="fitted", calibration=calibration))


def assert_rows_are_alone(family: str, model: Any, policy: CachePolicy) -> None:
    chance = random.Random(family)
    asked = [prompt(known(model, some_parts(family, chance, count))) for count in (2, 0, 3, 1)]
    alone = [told(model, [each], [12], policy=policy)[0] for each in asked]
    assert told(model, asked, [12] * 4, policy=policy) == alone
