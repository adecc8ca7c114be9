"""Images in prompts: what is opened, what is refused, and the tokens that a model's own processor makes of a chat."""

from __future__ import annotations

import base64
import io
import json
import random
import struct
import sys
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("mlx_vlm", reason='pip install ".[vision]"')

import vision_models as tiny
from mlx_lm.processors import load_processor
from PIL import Image as Pillow

from mlx_kv import ImagePrompt, encode_images, generate, load
from mlx_kv.cache.layout import PLACES
from mlx_kv.generation.images import MAX_PIXELS, encode_parts, open_picture
from mlx_kv.mlxlm.vision import VisionLanguageModel


def picture(seed: int = 0, size: tuple[int, int] = (60, 40), mode: str = "RGB") -> Any:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Pillow.fromarray(pixels).convert(mode)


def content(image: Any, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def url(image: Any) -> str:
    return "data:image/png;base64," + base64.b64encode(content(image)).decode()


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it is this large, with nothing in it."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(bytes(64))), (b"IEND", b"")]
    body = b"".join(struct.pack(">I", len(x)) + n + x + struct.pack(">I", zlib.crc32(n + x)) for n, x in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


def test_a_picture_is_read_in_any_form(tmp_path: Path) -> None:
    image = picture()
    (tmp_path / "a.png").write_bytes(content(image))
    for source in (image, content(image), str(tmp_path / "a.png"), tmp_path / "a.png", url(image)):
        assert open_picture(source).tobytes() == image.tobytes()


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "I;16"])
def test_a_picture_of_any_mode_becomes_rgb(mode: str) -> None:
    form = "TIFF" if mode == "CMYK" else "PNG"
    image = picture().convert("L").convert("I;16") if mode == "I;16" else picture(mode=mode)
    assert open_picture(content(image, form)).mode == "RGB"


def test_a_picture_that_lies_on_its_side_is_turned() -> None:
    exif = Pillow.Exif()
    exif[0x0112] = 6
    assert open_picture(content(picture(size=(60, 40)), "JPEG", exif=exif)).size == (40, 60)


def test_what_is_transparent_is_on_white_and_what_is_deep_keeps_its_shades() -> None:
    clear = Pillow.new("RGBA", (4, 4), (0, 0, 0, 0))
    assert open_picture(content(clear)).getpixel((0, 0)) == (255, 255, 255)
    deep = Pillow.fromarray(np.array([[0, 16_448, 65_535]], np.uint16))
    assert [open_picture(content(deep)).getpixel((x, 0))[0] for x in range(3)] == [0, 64, 255]


def test_a_photo_with_a_second_picture_is_read() -> None:
    photo = content(picture(), "MPO", save_all=True, append_images=[picture(1)])
    assert open_picture(photo).size == (60, 40)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        pytest.param(content(picture())[:300], "damaged", id="cut"),
        (b"", "none of PNG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of PNG"),
        (b"%PDF-1.7", "none of PNG"),
        pytest.param(png_header(MAX_PIXELS, 2), "make it smaller", id="wide"),
        pytest.param(png_header(30_000, 30_000), "make it smaller", id="bomb"),
        pytest.param(png_header(0, 8), "none of PNG", id="empty"),
        pytest.param(content(picture(), "GIF", save_all=True, append_images=[picture(1)]), "2 frames", id="animated"),
        pytest.param(bytes((32 << 20) + 1), "bytes: make it smaller", id="large"),
        ("data:image/png,abc", "without base64"),
        ("data:image/png;base64,@@", "cannot be decoded"),
        ("/does/not/exist.png", "is no file"),
        ("/dev/zero", "is no file"),
        ("https://example.org/a.png", "none is fetched"),
        (7, "give the name of a file"),
    ],
)
def test_what_is_no_picture_is_refused(source: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        open_picture(source)


def read_by_mlx_lm(model: VisionLanguageModel, tokenizer: Any, text: str, pictures: list[Any]) -> dict[str, Any]:
    """As its command and its server do."""
    processor: Any = load_processor(model.model, asdict(model.model.args))
    written, pixels = processor(text, images=[np.asarray(picture) for picture in pictures])
    return {"input_ids": mx.array([tokenizer.encode(written, add_special_tokens=False)]), "pixel_values": pixels}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_chat_becomes_the_tokens_and_the_answer_of_the_library(family: str, tmp_path: Path) -> None:
    model, tokenizer = load(tiny.save_model(family, tmp_path))
    assert isinstance(model, VisionLanguageModel)
    one, other = picture(1), picture(2, (40, 40))
    parts = [{"type": "image", "image": one}, {"type": "text", "text": "so?"}, {"type": "image", "image": other}]
    chat = [{"role": "user", "content": [*parts, {"type": "text", "text": "and?"}]}]
    asked = encode_images(model, tokenizer, chat)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"} if "image" in each else each for each in chat[0]["content"]]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    if family == "llava":  # whose processor refuses the padding that the library asks for
        prepared = model.processor(text=[text], images=[one, other])
    elif family in tiny.OF_MLX_LM:
        prepared = read_by_mlx_lm(model, tokenizer, text, [one, other])
    else:
        from mlx_vlm.utils import prepare_inputs

        prepared = prepare_inputs(model.processor, [one, other], prompts=[text])
    expected: Any = prepared["input_ids"].tolist()[0]
    expected = expected[expected[:2] == [1, 1] :]
    assert [model.image_token if token >= PLACES else token for token in asked.tokens] == expected
    said = generate(model, tokenizer, chat, max_tokens=8)
    reference = tiny.Reference(family, model)
    inputs = {name: value for name, value in prepared.items() if name not in ("input_ids", "attention_mask")}
    assert said == tokenizer.decode(reference.continue_inputs(expected, inputs, 8))


def test_the_same_picture_has_the_same_ids_and_is_encoded_once(tmp_path: Path) -> None:
    model, tokenizer = load(tiny.save_model("qwen3_vl", tmp_path))
    chance = random.Random(0)
    one, changed = picture(3), picture(3)
    place = chance.randrange(60), chance.randrange(40)
    changed.putpixel(place, tuple(255 - value for value in changed.getpixel(place)))

    def ids(*pictures: Any) -> list[list[int]]:
        texts = ["a" * (1 + chance.randrange(5)) for _ in range(len(pictures) + 1)]
        return [image.ids for image in encode_parts(model, tokenizer, texts, pictures).images]

    first, second = ids(one, changed)
    assert ids(changed, one, one) == [second, first, first]
    assert not set(first) & set(second)
    asked = encode_parts(model, tokenizer, ["a", "b", "c"], [one, one])
    generate(model, tokenizer, asked, max_tokens=1)  # type: ignore[arg-type]
    assert model.images.encoded == 1


def test_prompts_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    model, tokenizer = load(tiny.save_model("llava", tmp_path))
    with pytest.raises(ValueError, match="ends with an image"):
        encode_parts(model, tokenizer, ["a", ""], [picture()])
    with pytest.raises(ValueError, match="<image> in a text"):
        encode_parts(model, tokenizer, ["<image> a", "b"], [picture()])
    with pytest.raises(ValueError, match="at most 64"):
        encode_parts(model, tokenizer, ["a"] * 66, [picture()] * 65)
    text, words = load(str(Path(__file__).parents[2] / "mlx_kv/models/reference"))
    with pytest.raises(ValueError, match="reads no images"):
        encode_images(text, words, [{"role": "user", "content": [{"type": "image", "image": picture()}]}])


def test_templates_that_take_parts_alone_get_texts_too(tmp_path: Path) -> None:
    folder = tiny.save_model("smolvlm", tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{% for m in messages %}{{ m.role }}:{% for p in m.content %}"
        "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %};{% endfor %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model, tokenizer = load(folder)
    told = tokenizer.apply_chat_template([{"role": "user", "content": "wombat"}], tokenize=False)
    assert told == "user:wombat;"
    chat = [{"role": "system", "content": "quoll"}]
    chat += [{"role": "user", "content": [{"type": "image", "image": picture()}, {"type": "text", "text": "numbat"}]}]
    asked = encode_images(model, tokenizer, chat)
    words = tokenizer.decode([token for token in asked.tokens if token < PLACES])
    assert words.startswith("system:quoll;user:")
    assert words.endswith("numbat;")
    assert len(asked.images) == 1


def test_ids_of_images_are_refused_where_nobody_reads_them(tmp_path: Path) -> None:
    text, words = load(str(Path(__file__).parents[2] / "mlx_kv/models/reference"))
    for tokens, why in (([5, PLACES, 6], "reads none"), ([5, 100_000], "vocabulary"), ([], "empty")):
        with pytest.raises(ValueError, match=why):
            generate(text, words, ImagePrompt(tokens), max_tokens=1)


def test_images_that_mlx_lm_reads_need_no_other_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.save_model("muse_spark", tmp_path)
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    model, tokenizer = load(folder)
    chat = [{"role": "user", "content": [{"type": "image", "image": picture()}, {"type": "text", "text": "so?"}]}]
    assert encode_images(model, tokenizer, chat).images[0].ids
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert type(load(folder)[0]) is type(model.model)


@pytest.mark.parametrize("family", ["gemma3", "muse_spark"])
def test_a_text_part_alone_is_loaded_when_asked_for(family: str, tmp_path: Path) -> None:
    folder = tiny.save_model(family, tmp_path)
    assert not isinstance(load(folder, images=False)[0], VisionLanguageModel)
