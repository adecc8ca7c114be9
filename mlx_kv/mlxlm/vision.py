"""Models that read images, of mlx-vlm and of mlx-lm: tokens and caches in, logits out, as of any model of mlx-lm.

An image is tokens, too: each of its places has an id from 2^31 up, of 31 bits of a digest of what the processor made of
the image, and of the place. So texts that begin alike are found by their ids, with images as without, and all that
compares, stores or shares tokens needs to know nothing of images. This model alone replaces such ids by embeddings.

Models with several axes of positions (Qwen2-VL and later) count fewer positions than tokens in an image. Each row of a
cache keeps where that was (`Row.images`), so that it continues from wherever it is trimmed to.

B rows, S tokens, n places of an image, D hidden size.
"""

from __future__ import annotations

import hashlib
import importlib.util
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache as stock

from mlx_kv.cache.layout import PLACES
from mlx_kv.mlxlm.traverse import leaves, places_of

FEATURE_BYTES = 512 << 20  # of images that nobody waits for, kept for the next prompt that has them
# Whose logits and tokens are tested against mlx-vlm's own. Others want more than embeddings and positions (inputs of
# each layer, other masks, positions that are kept on the model), which nothing here would notice.
FAMILIES = ("gemma3", "idefics3", "llava", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm")


class Image:
    """An image as a model reads it.

    Args:
        tokens: of the prompt, from the image's first place to its last; some stand between its parts.
        token: that stands for a place.
        inputs: what the processor made of the image, by the names of the model's arguments.
        text: that the processor writes for it.

    Attributes:
        ids: of its places, from 2^31 up.
        features: (n, D) and, where layers add their own, (layers, n, D); None before it is encoded.
        axes: positions (3, n) relative to the first one; None where places count as tokens do.
        extent: positions that it takes.
    """

    def __init__(self, tokens: Sequence[int], token: int, inputs: Mapping[str, Any], text: str = "") -> None:
        self.tokens, self.token, self.inputs, self.text = list(tokens), token, dict(inputs), text
        digest = hashlib.sha256()
        for name, value in sorted(self.inputs.items()):
            array = np.asarray(value)
            digest.update(f"{name} {array.dtype} {array.shape} ".encode() + np.ascontiguousarray(array).tobytes())
        count = sum(each == token for each in self.tokens)
        drawn = hashlib.shake_256(digest.digest()).digest(4 * count)
        self.ids: list[int] = (np.frombuffer(drawn, ">u4").astype(np.int64) | PLACES).tolist()
        self.features: mx.array | None = None
        self.layers: mx.array | None = None
        self.axes: np.ndarray[Any, Any] | None = None
        self.extent = count

    @property
    def nbytes(self) -> int:
        """Of its features and of the processor's arrays."""
        arrays = [self.features, self.layers, *self.inputs.values()]
        return sum(int(getattr(each, "nbytes", 0)) for each in arrays)


class ImageTable:
    """The images that a model knows: those that someone holds, and the last ones, as long as their bytes fit.

    Attributes:
        max_bytes: of those that nobody holds.
        encoded: how many images were encoded.
    """

    def __init__(self, max_bytes: int = FEATURE_BYTES) -> None:
        self.max_bytes, self.encoded = max_bytes, 0
        self._by_place: weakref.WeakValueDictionary[tuple[int, ...], Image] = weakref.WeakValueDictionary()
        self._by_source: weakref.WeakValueDictionary[bytes, Image] = weakref.WeakValueDictionary()
        self._last: OrderedDict[int, Image] = OrderedDict()
        self._lock = threading.Lock()  # prompts are made in other threads than they are read in

    def of_source(self, digest: bytes) -> Image | None:
        """The image that was made of this file or picture, if it is still known."""
        return self._by_source.get(digest)

    def clear(self) -> None:
        """Lets go of all images that nobody holds."""
        with self._lock:
            for image in self._last.values():
                image.features = image.layers = None
            self._last.clear()

    def add(self, image: Image, source: bytes | None = None) -> Image:
        """Adds an image; returns the one of the same content that is known already, if any."""
        with self._lock:
            known = self._by_place.get(tuple(image.ids[:2]))
            image = known if known is not None and known.ids == image.ids else image
            if image is not known:
                for number, token in enumerate(image.ids):
                    self._by_place[tuple(image.ids[number : number + 2])] = self._by_place[(token,)] = image
            if source is not None:
                self._by_source[source] = image
            return image

    def find(self, ids: Sequence[int], start: int) -> tuple[Image, int, int]:
        """The image of the place ids[start], which of its places this is, and how many of them follow from here.

        Raises:
            ValueError: nobody holds this image any more.
        """
        for length in (2, 1):  # two ids are 62 bits; the last place of a part of an image stands alone
            if (image := self._by_place.get(tuple(ids[start : start + length]))) is not None:
                first, count = image.ids.index(ids[start]), 1
                for token, other in zip(ids[start + 1 :], image.ids[first + 1 :], strict=False):
                    if token != other:
                        break
                    count += 1
                return image, first, count
        raise ValueError("an image of this prompt is not known here any more: give it again with the prompt")

    def touch(self, image: Image) -> None:
        """Keeps an image that was just read, and lets go of others, the longest unread ones first."""
        with self._lock:
            self._last[id(image)] = image
            self._last.move_to_end(id(image))
            while len(self._last) > 1 and sum(each.nbytes for each in self._last.values()) > self.max_bytes:
                _, oldest = self._last.popitem(last=False)
                oldest.features = oldest.layers = None  # a prompt that holds it has it encoded again


class VisionLanguageModel(nn.Module):
    """A model of mlx-vlm as mlx-lm's models are called, whose tokens may be places of images.

    Args:
        model: of mlx-vlm, with `get_input_embeddings` and a `language_model`.
        processor: its processor, to make prompts with images.

    Attributes:
        images: that it knows.
        image_token: that stands for a place of an image in texts.

    Raises:
        ValueError: a model of another family.
    """

    def __init__(self, model: nn.Module, processor: Any = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        config: Any = model.config
        if config.model_type not in FAMILIES:
            raise ValueError(f"images of {config.model_type} are not supported, of {', '.join(FAMILIES)} they are")
        self.model, self.processor, self.images = model, processor, ImageTable()
        self.args = config.text_config
        self.model_type = config.model_type
        token = getattr(config, "image_token_index", None)
        self.image_token: int = config.image_token_id if token is None else token
        self._axes = hasattr(model.language_model, "get_rope_index")
        # Models with several axes know an image by the token before it.
        self._before: list[int] = [config.vision_start_token_id] if self._axes else []

    @property
    def of_library(self) -> nn.Module:
        return self.model

    @property
    def layers(self) -> Any:
        return self.model.layers

    def make_cache(self) -> list[Any]:
        """mlx-lm's caches for its layers.

        Raises:
            ValueError: the model has layers of another kind.
        """
        language: Any = self.model.language_model
        if not hasattr(language, "make_cache"):
            return [stock.KVCache() for _ in self.layers]  # type: ignore[no-untyped-call]
        return [_stock_cache(cache, self.model_type) for cache in language.make_cache()]

    def __call__(
        self, inputs: mx.array, cache: list[Any] | None = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        """Logits (B, S, V) of tokens (B, S), places of images among them."""
        options: dict[str, Any] = {} if input_embeddings is None else {"inputs_embeds": input_embeddings}
        ends: list[tuple[int, ...]] = []
        if inputs.dtype == mx.int64:  # only ids above 2^31 need it
            inputs, options, ends = self._embed(inputs.tolist(), cache)  # type: ignore[arg-type]
        elif self._axes:
            options["position_ids"] = self._positions(cache, *inputs.shape)
        logits = self._read(inputs, cache, options)
        if any(ends):
            _note_images(cache or [], ends)
        return logits

    def _read(self, inputs: mx.array, cache: list[Any] | None, options: dict[str, Any]) -> mx.array:
        """Logits (B, S, V) of tokens (B, S) without places."""
        logits: mx.array = self.model.language_model(inputs, cache=cache, **options).logits
        return logits

    def _positions(self, cache: list[Any] | None, rows: int, count: int) -> mx.array:
        """Positions (3, B, S) of the next tokens, all of them text."""
        first = [offset + _delta(images) for offset, images in _stand(cache, rows)]
        line = mx.array(first)[:, None] + mx.arange(count)
        return mx.broadcast_to(line[None], (3, rows, count))

    def _embed(
        self, rows: list[list[int]], cache: list[Any] | None
    ) -> tuple[mx.array, dict[str, Any], list[tuple[int, ...]]]:
        """Tokens (B, S) without places, what the model reads beside them, and the images that end here, by row."""
        count = len(rows[0])
        ids = mx.array([[self.image_token if token >= PLACES else token for token in row] for row in rows])
        embedded = self._embed_texts(ids)
        seen = np.zeros((len(rows), count), bool)
        positions = np.zeros((3, len(rows), count), np.int32)
        layers: list[mx.array] = []
        ends: list[tuple[int, ...]] = []
        for number, (row, (offset, images)) in enumerate(zip(rows, _stand(cache, len(rows)), strict=True)):
            position, at, known = offset + _delta(images), 0, len(images)
            while at < count:
                if row[at] < PLACES:
                    positions[:, number, at] = position
                    position, at = position + 1, at + 1
                    continue
                image, first, length = self.images.find(row, at)
                self._encode(image)
                assert image.features is not None
                embedded[number, at : at + length] = image.features[first : first + length].astype(embedded.dtype)
                seen[number, at : at + length] = True
                if image.layers is not None:
                    layers.append(image.layers[:, first : first + length])
                if image.axes is None:
                    positions[:, number, at : at + length] = position + np.arange(length)
                    position += length
                else:
                    begin = position - first
                    positions[:, number, at : at + length] = begin + image.axes[:, first : first + length]
                    if first + length == len(image.ids):
                        end = offset + at + length
                        position = begin + image.extent
                        images = (*images, end - len(image.ids), end, position - end)
                    else:
                        position = begin + first + length
                at += length
            ends.append(tuple(images[known:]))
        options: dict[str, Any] = {"inputs_embeds": embedded}
        if self._axes:
            options["position_ids"] = mx.array(positions)
        if layers:
            options |= {
                "visual_pos_masks": mx.array(seen),
                "deepstack_visual_embeds": mx.concatenate(layers, axis=1),
            }
        return ids, options, ends

    def _embed_texts(self, tokens: mx.array) -> mx.array:
        """(B, S, D) of tokens (B, S) without places."""
        embedded: mx.array = self.model.get_input_embeddings(tokens).inputs_embeds
        return embedded

    def _encode(self, image: Image) -> None:
        """Computes the features of an image, unless they are there."""
        if image.features is None:
            self.images.encoded += 1
            tokens = [*self._before, *image.tokens]
            inputs = {name: mx.array(value) for name, value in image.inputs.items()}
            self._compute(image, mx.array([tokens]), inputs, mx.array(np.flatnonzero(np.array(tokens) == image.token)))
            mx.eval([each for each in (image.features, image.layers) if each is not None])
        self.images.touch(image)

    def _compute(self, image: Image, tokens: mx.array, inputs: dict[str, mx.array], here: mx.array) -> None:
        """Sets the features of an image.

        Args:
            tokens: (1, S), of the image and those before it that are needed.
            here: (n,), where its places are.
        """
        pixels = inputs.pop("pixel_values")
        result = self.model.get_input_embeddings(tokens, pixels, mask=mx.ones_like(tokens), **inputs)
        image.features = result.inputs_embeds[0][here]
        if result.deepstack_visual_embeds is not None:
            image.layers = mx.stack(list(result.deepstack_visual_embeds))
        if result.position_ids is not None and result.position_ids.ndim == 3:
            axes: Any = np.array(result.position_ids[:, 0])[:, np.array(here)] - len(self._before)
            image.axes, image.extent = axes.astype(np.int32), int(axes.max()) + 1


class EmbeddingModel(VisionLanguageModel):
    """A model of mlx-lm that embeds images itself: it has `embed_inputs`.

    Args:
        model: of mlx-lm.
        processor: an `ImageProcessor`, to make prompts with images.
    """

    def __init__(self, model: nn.Module, processor: Any = None) -> None:
        nn.Module.__init__(self)  # type: ignore[no-untyped-call]
        args: Any = model.args
        self.model, self.processor, self.images = model, processor, ImageTable()
        self.args, self.model_type, self.image_token = args.text, args.model_type, args.image_token_id
        self._axes, self._before = False, []

    def make_cache(self) -> list[Any]:
        made: list[Any] = stock.make_prompt_cache(self.model)
        return made

    def _read(self, inputs: mx.array, cache: list[Any] | None, options: dict[str, Any]) -> mx.array:
        logits: mx.array = self.model(inputs, cache=cache, input_embeddings=options.get("inputs_embeds"))
        return logits

    def _embed_texts(self, tokens: mx.array) -> mx.array:
        embedded: mx.array = self.model.embed_inputs(tokens)
        return embedded

    def _compute(self, image: Image, tokens: mx.array, inputs: dict[str, mx.array], here: mx.array) -> None:
        image.features = self.model.embed_inputs(tokens, pixel_values=[inputs["pixel_values"]])[0][here]


class ImageProcessor:
    """A processor of mlx-lm, called as those of mlx-vlm are.

    Args:
        processor: of mlx-lm, from a text and pictures to a text and pixels.
        tokenizer: of the model.

    Attributes:
        image_token: a text that stands for an image.
    """

    def __init__(self, processor: Any, tokenizer: Any) -> None:
        self._processor, self.tokenizer = processor, tokenizer
        self.image_token: str = processor.image_token

    def __call__(self, text: Sequence[str], images: Sequence[Any]) -> dict[str, Any]:
        """The tokens of a text with one picture, and its pixels (channels, height, width)."""
        written, pixels = self._processor(text[0], images=[np.asarray(picture) for picture in images])
        return {"input_ids": self.tokenizer.encode(written, add_special_tokens=False), "pixel_values": pixels[0]}


def with_images(model: nn.Module, tokenizer: Any, config: Mapping[str, Any]) -> nn.Module:
    """A model of mlx-lm, as one that reads images where it has what that takes: `embed_inputs`, and a processor.

    Args:
        config: the content of its config.json.
    """
    if not hasattr(model, "embed_inputs") or importlib.util.find_spec("PIL") is None:
        return model
    from mlx_lm.processors import load_processor

    processor = load_processor(model, dict(config))
    return model if processor is None else EmbeddingModel(model, ImageProcessor(processor, tokenizer))


def _stock_cache(cache: Any, family: str) -> Any:
    """mlx-lm's cache for one of mlx-vlm's."""
    kind = type(cache).__name__
    if kind == "KVCache":
        return stock.KVCache()  # type: ignore[no-untyped-call]
    if kind == "RotatingKVCache":
        return stock.RotatingKVCache(max_size=cache.max_size, keep=cache.keep)  # type: ignore[no-untyped-call]
    raise ValueError(f"{family} has layers with a {kind} of mlx-vlm: images of this family are not supported")


def _stand(cache: list[Any] | None, rows: int) -> list[tuple[int, tuple[int, ...]]]:
    """Of each row, how many tokens its caches hold, and its images."""
    for leaf in leaves(cache or []):
        if places := places_of(leaf):
            found = [part.view.rows[index] for part, index in places]
            found = found * rows if len(found) == 1 else found  # a cache that was not written to has one row
            return [(row.offset, row.images) for row in found]
        if hasattr(leaf, "offset"):
            offsets: Any = mx.broadcast_to(mx.array(leaf.offset), (rows,)).tolist()
            return [(offset, ()) for offset in offsets]
    return [(0, ())] * rows


def _delta(images: tuple[int, ...]) -> int:
    """Positions minus tokens behind the last image."""
    return images[-1] if images else 0


def _note_images(cache: list[Any], ends: Sequence[tuple[int, ...]]) -> None:
    """Records images that were read in the rows of all layers.

    Raises:
        ValueError: caches that cannot keep where they were.
    """
    for leaf in leaves(cache):
        if not places_of(leaf):
            raise ValueError("these caches cannot keep positions of images: use mlx_kv.make_prompt_cache")
        for (part, index), more in zip(places_of(leaf), ends, strict=False):
            view = part.view
            row = view.rows[index]
            view.rows = (*view.rows[:index], row._replace(images=(*row.images, *more)), *view.rows[index + 1 :])


def text_tokens(model: nn.Module, tokens: Sequence[int]) -> list[int]:
    """Tokens with the one of its texts for each place of an image: for what knows tokens of the vocabulary alone."""
    token = getattr(model, "image_token", None)
    return list(tokens) if token is None else [token if each >= PLACES else each for each in tokens]


def feature_bytes(model: nn.Module) -> int:
    """Bytes that the last images of a model may hold."""
    return model.images.max_bytes if isinstance(model, VisionLanguageModel) else 0


def forget_images(model: nn.Module) -> None:
    """Frees them."""
    if isinstance(model, VisionLanguageModel):
        model.images.clear()


def load_vision(path_or_hub_id: str | Path, **options: Any) -> tuple[Path, VisionLanguageModel]:
    """Loads a model with mlx-vlm, its weights lazy, and its processor; and the folder of its files.

    Args:
        options: of mlx-vlm's `load`.

    Raises:
        ValueError: mlx-vlm cannot load it, or it is of a family that is not supported.
    """
    from mlx_vlm.utils import get_model_path, load

    try:
        folder = Path(get_model_path(str(path_or_hub_id)))
        return folder, VisionLanguageModel(*load(str(folder), lazy=True, **options))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"mlx-vlm cannot load {path_or_hub_id}: {reason[0]}") from error
