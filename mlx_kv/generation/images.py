"""Images in prompts: pictures that are safe to open, and the token ids of chats and texts that have some.

A model's own processor decides what it sees of a picture, and how many tokens it takes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import inspect
import io
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np

from mlx_kv.cache.checks import check_type
from mlx_kv.cache.layout import PLACES
from mlx_kv.generation.encoding import TemplateError, apply_template, encode_prompt, has_chats, wrap_tokenizer
from mlx_kv.mlxlm.probe import check_model
from mlx_kv.mlxlm.vision import Image, VisionLanguageModel
from mlx_kv.settings import shown

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_BYTES, MAX_PIXELS, MAX_IMAGES = 32 << 20, 64_000_000, 64  # of a file; of a picture; of a prompt
MAX_NEW_PIXELS = 256_000_000  # of all pictures of a prompt that were not there before
GONE = "[image, which is no longer here]"
# Of what a processor returns, what is of the text.
OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt with images, in place of token ids.

    Attributes:
        tokens: ids, of which those of images are from 2^31 up.
        images: whose ids they are; the model can read the prompt as long as they are held.
    """

    tokens: list[int]
    images: tuple[Image, ...] = ()


def images_of(model: nn.Module, prompt: Any) -> tuple[Image, ...]:
    """The images that come with a prompt.

    Raises:
        ValueError: there are some, and the model reads none.
    """
    if not isinstance(prompt, ImagePrompt):
        return ()
    if not isinstance(model, VisionLanguageModel) and any(token >= PLACES for token in prompt.tokens):
        raise ValueError("a prompt has images, and this model reads none: give it text alone")
    return prompt.images


def open_picture(source: Any) -> Any:
    """A picture of Pillow in RGB, upright, of a file's name or content, a data URL or a picture.

    Raises:
        ValueError: it is none that can be read whole, an animation, or larger than is safe to open.
    """
    from PIL import Image as Pillow
    from PIL import ImageOps, UnidentifiedImageError

    if isinstance(source, Pillow.Image):
        picture = source
    else:
        content = image_content(source)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow's own limit
                picture = Pillow.open(io.BytesIO(content), formats=FORMATS)
        except Pillow.DecompressionBombError:
            raise ValueError(f"an image has more than {MAX_PIXELS:,} pixels: make it smaller") from None
        except (UnidentifiedImageError, OSError, ValueError, SyntaxError):
            raise ValueError(f"an image is none of {', '.join(FORMATS)}: convert it") from None
    width, height = picture.size
    if not 0 < width * height <= MAX_PIXELS:  # before any of them is decoded
        raise ValueError(f"an image has {width:,} x {height:,} pixels, of 1 to {MAX_PIXELS:,}: make it smaller")
    if (frames := getattr(picture, "n_frames", 1)) > 1 and picture.format != "MPO":  # a phone's, with more than a photo
        raise ValueError(f"an image has {frames} frames: give one of them")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a profile or tag that is not as it should be
            picture.load()
            return _rgb(ImageOps.exif_transpose(picture))
    except (OSError, ValueError, SyntaxError, EOFError, MemoryError) as error:
        raise ValueError(f"an image is damaged: {error}") from None


def _rgb(picture: Any) -> Any:
    """A picture in RGB, with what is transparent on white."""
    from PIL import Image as Pillow

    if picture.mode.startswith("I") or picture.mode == "F":  # more than 8 bits: Pillow would cut them off
        values = np.asarray(picture, np.float32)
        most = 1.0 if picture.mode == "F" and values.max(initial=0.0) <= 1 else 65_535.0
        return Pillow.fromarray(np.clip(values / most * 255, 0, 255).astype(np.uint8)).convert("RGB")
    if "A" in picture.getbands() or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        return Pillow.alpha_composite(Pillow.new("RGBA", picture.size, "white"), picture).convert("RGB")
    return picture.convert("RGB")


def image_content(source: Any) -> bytes:
    """The content of a file by its name, of a data URL, or itself.

    Raises:
        ValueError: it is something else, or too large.
    """
    if isinstance(source, str) and source.startswith("data:"):
        source = content_of_url(source)
    elif isinstance(source, str) and source.startswith(("http:", "https:")):
        raise ValueError("an image is given by its URL, and none is fetched: give a file, or its content")
    elif isinstance(source, str | os.PathLike):
        try:
            if not Path(source).is_file():
                raise ValueError(f"the image {shown(str(source))} is no file: give the name of one")
            with Path(source).open("rb") as file:
                source = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise ValueError(f"the image {shown(str(source))} cannot be read: {error.strerror}") from None
    if not isinstance(source, bytes):
        raise ValueError(f"an image is {shown(source)}: give the name of a file, its content, or a picture")
    if len(source) > MAX_BYTES:
        raise ValueError(f"an image has more than {MAX_BYTES:,} bytes: make it smaller")
    return source


def content_of_url(url: str) -> bytes:
    """The content of a data URL in base64.

    Raises:
        ValueError: it is something else.
    """
    kind, comma, data = url.partition(",")
    if not comma or not kind.endswith(";base64"):
        raise ValueError("an image is a data URL without base64: write data:image/png;base64,…")
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("an image is a data URL whose base64 cannot be decoded") from None


def has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a chat has any."""
    return any(_is_image(part) for message in messages for part in _parts(message))


def _parts(message: Mapping[str, Any]) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def reads_images(model: nn.Module) -> bool:
    """Whether a model reads images, and has a processor for them."""
    return isinstance(model, VisionLanguageModel) and model.processor is not None


def encode_images(
    model: nn.Module,
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    continues: bool = False,
    **template: Any,
) -> ImagePrompt:
    """The tokens of a chat with images, for all functions that take a prompt.

    Args:
        model, tokenizer: as `load` returns them.
        messages: whose contents may be lists of parts: `{"type": "text", "text": …}`, and `{"type": "image", "image":
            …}` (a file's name or content, a data URL, a picture of Pillow) or OpenAI's `image_url`.
        continues: whether the last message is continued.
        template: for the chat template.

    Raises:
        ValueError: a model that reads no images or has no chat template, pictures that cannot be read, too many of
            them, or an image behind which no text comes.
    """
    check_model("model", model)
    check_type("messages", messages, Sequence, "give a list of chat messages")
    reader, tokenizer = _check_reads(model), wrap_tokenizer(tokenizer)
    place = _place(reader)
    sources, asked = list[Any](), list[dict[str, Any]]()
    if not has_chats(tokenizer):
        raise ValueError("the prompt is a chat, and this tokenizer has no chat template: give a text, or token ids")
    for message in messages:
        parts: list[dict[str, Any]] = []
        for part in _parts(message):
            if _is_image(part):
                source = part.get("image", part.get("image_url"))
                source = source.get("url") if isinstance(source, Mapping) else source
                if source is None:
                    raise ValueError("an image of the chat has no source: give a file, its content, or a picture")
                sources.append(source)
                parts.append({"type": "image"})
            elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
                parts.append({"type": "text", "text": part["text"]})
            else:
                raise ValueError(f"a message has the part {shown(part)}: give texts and images")
        asked.append({**message, "content": parts} if parts else dict(message))
        said = [part["text"] for part in parts if "text" in part] or [str(message.get("content") or "")]
        if any(place in each for each in said):
            raise ValueError(f"the chat has {place} in a text, which stands for an image: leave it out")
    text = apply_template(tokenizer, asked, False, continues, **template)
    texts = text.split(place)
    if len(texts) != len(sources) + 1:
        raise ValueError(f"the chat template writes {len(texts) - 1} of {len(sources)} images: give it another one")
    return _encode(reader, tokenizer, texts, sources, place)


def encode_parts(model: nn.Module, tokenizer: Any, texts: Sequence[str], sources: Sequence[Any]) -> ImagePrompt:
    """The tokens of a prompt of texts, and an image between each two of them.

    Args:
        sources: of the images, as of `open_picture`; None for one that is gone, which a text stands for then.

    Raises:
        ValueError: as `encode_images`.
    """
    reader = _check_reads(model)
    place = _place(reader)
    if any(place in each for each in texts):
        raise ValueError(f"the prompt has {place} in a text, which stands for an image: leave it out")
    return _encode(reader, tokenizer, texts, sources, _mark(reader, tokenizer))


def _check_reads(model: nn.Module) -> VisionLanguageModel:
    if not isinstance(model, VisionLanguageModel) or model.processor is None:
        raise ValueError(
            "this model reads no images: give it text alone; those that do need mlx-vlm: pip install mlx-kv[vision]"
        )
    return model


def _mark(model: VisionLanguageModel, tokenizer: Any) -> str:
    """What stands for an image in the text of a prompt, as the chat template writes it."""
    parts = [{"type": "text", "text": "wombat"}, {"type": "image"}, {"type": "text", "text": "quokka"}]
    own = _place(model)
    try:
        text = apply_template(wrap_tokenizer(tokenizer), [{"role": "user", "content": parts}], False)
    except TemplateError:
        return own
    between = text.partition("wombat")[2].partition("quokka")
    return between[0] if between[1] and own in between[0] else own  # some templates put images in front


def _place(model: VisionLanguageModel) -> str:
    """What the processor replaces by the places of an image."""
    processor = model.processor
    return str(getattr(processor, "boi_token", None) or getattr(processor, "image_token", None) or "<image>")


def _encode(
    model: VisionLanguageModel, tokenizer: Any, texts: Sequence[str], sources: Sequence[Any], mark: str
) -> ImagePrompt:
    """The tokens of a prompt: the tokenizer's, of a text in which each image is what the processor writes for it.

    Args:
        mark: what the text has for an image.
    """
    if (count := sum(source is not None for source in sources)) > MAX_IMAGES:
        raise ValueError(f"a prompt has {count} images, of at most {MAX_IMAGES}: leave some out")
    images, pieces, pixels = list[Image](), [texts[0]], 0
    for source, following in zip(sources, texts[1:], strict=True):
        if source is None:
            pieces += [GONE, following]
            continue
        digest = _digest(source)
        image = model.images.of_source(digest)
        if image is None:  # one after the other, so that one picture is in memory
            picture = open_picture(source)
            pixels += picture.width * picture.height
            if pixels > MAX_NEW_PIXELS:
                raise ValueError(f"the images of a prompt have more than {MAX_NEW_PIXELS:,} pixels: make them smaller")
            image = model.images.add(_read(model, tokenizer, picture), digest)
        images.append(image)
        pieces += [mark.replace(_place(model), image.text, 1), following]
    tokens = encode_prompt(wrap_tokenizer(tokenizer), "".join(pieces))
    at = [index for index, token in enumerate(tokens) if token == model.image_token]
    ids = [token for image in images for token in image.ids]
    if len(at) != len(ids):
        raise ValueError(f"the prompt has {len(at)} places for images, and its images {len(ids)}: leave such words out")
    for index, token in zip(at, ids, strict=True):
        tokens[index] = token
    if not tokens or tokens[-1] >= PLACES:
        raise ValueError("the prompt ends with an image: add what to say of it")
    return ImagePrompt(tokens, tuple(images))


def _digest(source: Any) -> bytes:
    """By which the same source is known again."""
    if hasattr(source, "tobytes"):  # a picture
        return hashlib.sha256(f"{source.mode} {source.size} ".encode() + source.tobytes()).digest()
    if isinstance(source, str) and source.startswith("data:"):
        return hashlib.sha256(source.encode("utf-8", "replace")).digest()
    return hashlib.sha256(image_content(source)).digest()


def _read(model: VisionLanguageModel, tokenizer: Any, picture: Any) -> Image:
    """What the processor makes of one picture alone: so the same one has the same ids in every prompt."""
    alone = _process(model.processor, _place(model), picture)
    tokens = [int(token) for token in np.asarray(alone["input_ids"]).reshape(-1)]
    if tokens[:1] == [getattr(model.processor.tokenizer, "bos_token_id", None)]:  # of a tokenizer that adds its own
        del tokens[0]
    places = [index for index, token in enumerate(tokens) if token == model.image_token]
    if not places:
        raise ValueError("the processor of this model takes an image without a place for it")
    inputs = {name: np.array(value) for name, value in alone.items() if name not in OF_TEXT}
    text = wrap_tokenizer(tokenizer).decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return Image(tokens[places[0] : places[-1] + 1], model.image_token, inputs, text)


def _process(processor: Any, text: str, picture: Any) -> Mapping[str, Any]:
    """Raises ValueError for what the processor refuses: it is a program of others, and raises what it likes."""
    try:
        takes = "add_special_tokens" in inspect.signature(processor.__call__).parameters
        options = {"add_special_tokens": False} if takes else {}  # the template has them
        result: Mapping[str, Any] = processor(text=[text], images=[picture], **options)
        return result
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"the model's processor refuses this prompt: {what[:300]}") from error
