"""Models that read images: logits and tokens of the library's own way, whatever was read, reused or shared before."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest

pytest.importorskip("mlx_vlm", reason='pip install ".[vision]"')

import vision_models as tiny
from vision_models import Parts, known, prompt, some_parts

from mlx_kv import CachePolicy, batch_generate, load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_kv.cache.layout import PLACES
from mlx_kv.generation.images import ImagePrompt
from mlx_kv.mlxlm.traverse import trim_prompt_cache
from mlx_kv.mlxlm.vision import Image, VisionLanguageModel

FAMILIES = pytest.mark.parametrize("family", tiny.FAMILIES)
CLOSE = 2e-4  # float32 over three layers; logits are about 10


def read(model: VisionLanguageModel, caches: list[object], tokens: list[int], chance: random.Random) -> mx.array:
    """Logits (S, V) of tokens that are read in chunks of any length."""
    logits = []
    while tokens:
        count = chance.randint(1, 17)
        logits.append(model(mx.array([tokens[:count]]), cache=caches)[0])
        tokens = tokens[count:]
    return mx.concatenate(logits)


def assert_close(found: mx.array, expected: mx.array) -> None:
    assert mx.abs(found - expected).max().item() < CLOSE * mx.abs(expected).max().item()


@FAMILIES
@pytest.mark.parametrize("seed", range(3))
def test_chunks_of_any_length_give_the_logits_of_the_library(family: str, seed: int) -> None:
    chance, model = random.Random(seed), tiny.make_model(family, seed)
    parts = known(model, some_parts(family, chance, 3))
    caches = make_prompt_cache(model)
    found = read(model, caches, tiny.with_images(parts), chance)
    assert_close(found, tiny.Reference(family, model).logits(parts))
    assert model.images.encoded == len({id(part) for part in parts if isinstance(part, Image)})


@FAMILIES
@pytest.mark.parametrize("seed", range(3))
def test_what_is_trimmed_saved_and_loaded_goes_on_from_any_place(family: str, seed: int, tmp_path: Path) -> None:
    """Also from a place within an image: the rest of it follows."""
    chance, model = random.Random(seed), tiny.make_model(family, seed)
    first = known(model, some_parts(family, chance, 3))
    caches = make_prompt_cache(model, CachePolicy(max_rollback=200) if family in tiny.WINDOWED else None)
    tokens = tiny.with_images(first)
    read(model, caches, tokens, chance)
    expected = tiny.Reference(family, model).logits(first)
    for _ in range(4):
        count = chance.randrange(len(tokens))
        trim_prompt_cache(caches, len(tokens) - count, strict=True)
        save_prompt_cache(str(tmp_path / "caches.safetensors"), caches)
        caches = load_prompt_cache(str(tmp_path / "caches.safetensors"))
        assert_close(read(model, caches, tokens[count:], chance), expected[count:])
    other = [*first[:2], [5, 6, 7], *known(model, some_parts(family, chance, 2))[1:]]  # as far as the first image
    common = len(tiny.with_images(first[:2]))
    trim_prompt_cache(caches, len(tokens) - common, strict=True)
    found = read(model, caches, tiny.with_images(other)[common:], chance)
    assert_close(found, tiny.Reference(family, model).logits(other)[common:])


@FAMILIES
@pytest.mark.parametrize("policy", [CachePolicy(), CachePolicy(budget=400)], ids=["plain", "budget"])
def test_batches_with_and_without_images_get_the_tokens_of_the_library(family: str, policy: CachePolicy) -> None:
    """More prompts than rows, some of which begin alike: they join, leave and share while others decode."""
    chance, model = random.Random(family), tiny.make_model(family)
    begins = known(model, some_parts(family, chance, 2))
    prompts: list[Parts] = [[*begins, [9, 11, chance.randrange(180)]] for _ in range(3)]
    prompts += [known(model, some_parts(family, chance, count)) for count in (0, 1, 2, 0, 3)]
    lengths = [chance.randint(2, 14) for _ in prompts]
    reference = tiny.Reference(family, model)
    for drafter in (None, "suffix"):
        said: list[list[int]] = [[] for _ in prompts]
        asked = [prompt(parts) for parts in prompts]
        options = {} if drafter is None else {"drafter": drafter, "draft_length": "fixed"}
        for token in batch_generate(model, None, asked, policy, lengths, max_batch_size=3, **options):  # type: ignore
            said[token.index].append(token.token)
        assert said == [reference.generate(parts, count) for parts, count in zip(prompts, lengths, strict=True)]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "muse_spark"])
@pytest.mark.parametrize(
    "policy",
    [
        CachePolicy(bits=8, group_size=32),
        CachePolicy(bits=4, group_size=32, residual_length=16),
        CachePolicy(budget=24, score="key_diff"),
        CachePolicy(budget=24, score="kvzip"),
        CachePolicy(budget=24, bits=8, group_size=32),
    ],
    ids=["8", "residual", "budget", "twice", "both"],
)
def test_batches_get_the_tokens_of_each_prompt_alone(family: str, policy: CachePolicy) -> None:
    chance, model = random.Random(family), tiny.make_model(family)
    prompts = [prompt(known(model, some_parts(family, chance, count))) for count in (2, 0, 3, 1)]

    def answers(asked: Sequence[ImagePrompt]) -> list[list[int]]:
        said: list[list[int]] = [[] for _ in asked]
        for token in batch_generate(model, None, asked, policy, 12, max_batch_size=3):
            said[token.index].append(token.token)
        return said

    assert answers(prompts) == [answers([each])[0] for each in prompts]


def test_ids_follow_from_the_content_and_the_place() -> None:
    images = [tiny.make_image("qwen3_vl", seed) for seed in (1, 1, 2)]
    assert images[0].ids == images[1].ids
    assert not set(images[0].ids) & set(images[2].ids)
    assert len(set(images[0].ids)) == len(images[0].ids)
    assert PLACES <= min(images[0].ids) <= max(images[0].ids) < 2 * PLACES
    changed = dict(images[0].inputs)
    changed["pixel_values"] = changed["pixel_values"].copy()
    changed["pixel_values"][0, 0] += 1e-3
    assert not set(Image(images[0].tokens, tiny.IMAGE, changed).ids) & set(images[0].ids)


def test_an_image_that_nobody_holds_is_asked_for_again() -> None:
    model = tiny.make_model("llava")
    tokens = tiny.with_images([[5], model.images.add(tiny.make_image("llava", 1)), [6]])
    with pytest.raises(ValueError, match="give it again"):
        model(mx.array([tokens]))


def test_features_are_kept_as_long_as_they_fit_and_made_again() -> None:
    model = tiny.make_model("llava")
    images = [model.images.add(tiny.make_image("llava", seed)) for seed in range(3)]
    model.images.max_bytes = images[0].nbytes + 1
    expected = [model(mx.array([tiny.with_images([[5], image, [6]])])) for image in images]
    assert model.images.encoded == 3
    assert [image.features is None for image in images] == [True, True, False]
    found = [model(mx.array([tiny.with_images([[5], image, [6]])])) for image in images]
    assert model.images.encoded == 6
    assert all(mx.array_equal(one, other).item() for one, other in zip(found, expected, strict=True))
