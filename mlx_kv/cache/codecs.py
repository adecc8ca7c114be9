"""Codecs: how one tensor is stored, as planes.

A tensor of shape (B, H, S, D) becomes a tuple of *planes* that share every axis but the last: plain has one, affine
quantisation three (packed words, scales, biases). Independent of slots, lengths and attention: every slot operation
maps over planes, so rings, budgets and ragged rows need no code of their own for any codec.

In order: the protocol, the codecs (plain, affine, microscaled, centred), and pairs of them by name.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from mlx_kv.settings import OpenSet, SettingError, as_int, integer_fields

# --- the protocol -----------------------------------------------------------------------------------------------------


Planes = tuple[mx.array, ...]


def takes_slices() -> bool:
    """Whether `mx.quantized_matmul` takes the first slots of a buffer: CUDA has no kernel for them (mlx 0.32.4)."""
    return not mx.cuda.is_available()


def in_rows(planes: Planes) -> Planes:
    """Planes as `mx.quantized_matmul` takes them: copied where it takes no slices."""
    return planes if takes_slices() else tuple([mx.contiguous(plane) for plane in planes])


class Plane(NamedTuple):
    """What one plane is, for tensors of some head dim and dtype.

    Attributes:
        width: of its last axis.
        dtype: of its elements.
    """

    width: int
    dtype: mx.Dtype


class Packing(NamedTuple):
    """Planes as `mx.quantized_matmul` reads them: packed words, scales, and biases where the mode has them.

    Attributes:
        bits: per element.
        group_size: elements that share a scale.
        mode: of `mx.quantize`. mlx-lm's attention supports only "affine".
        rotated: whether the planes are those of the tensor times `rotated`: queries are to be rotated, too,
            and the weighted sum of values is to be rotated back.
        centre: what was subtracted from the tensor first; None is nothing.
    """

    bits: int
    group_size: int
    mode: str = "affine"
    rotated: bool = False
    centre: Centre | None = None

    @property
    def stock(self) -> bool:
        """Whether mlx-lm's attention reads such planes."""
        return self.mode == "affine" and not self.rotated and self.centre is None


class Codec(Protocol):
    """Turns (B, H, S, D) into planes and back. A codec is immutable, and encodes each token independently.

    One that stores heads differently also has `of_head(head)`, the codec of planes of that head alone; one that differs
    from cache to cache of a model `of_layer(number)`, by the place in the list of caches.
    """

    @property
    def name(self) -> str:
        """The name that it is registered under; saved caches refer to it."""
        ...

    @property
    def parameters(self) -> dict[str, Any]:
        """The arguments of its factory, as JSON values."""
        ...

    @property
    def packed(self) -> Packing | None:
        """How attention can read the planes as they are; None where they must be decoded first."""
        ...

    def check(self, name: str, x: mx.array) -> None:
        """Raises ValueError where this codec cannot store x (B, H, S, D), before anything has changed.

        Args:
            name: "keys" or "values", for the message.
        """
        ...

    def planes(self, head_dim: int, dtype: mx.Dtype) -> tuple[Plane, ...]:
        """The planes (B, H, S, width) of a tensor (B, H, S, head_dim): one or more."""
        ...

    def encode(self, x: mx.array) -> Planes:
        """The planes of a tensor (B, H, S, D), as `planes` describes them."""
        ...

    def decode(self, planes: Planes, dtype: mx.Dtype) -> mx.array:
        """The tensor (B, H, S, D), in the dtype that it had."""
        ...


# --- codecs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plain:
    """One plane: the tensor itself."""

    name: ClassVar[str] = "plain"
    packed: ClassVar[None] = None
    parameters: ClassVar[dict[str, Any]] = {}

    def check(self, name: str, x: mx.array) -> None:
        pass

    def planes(self, head_dim: int, dtype: mx.Dtype) -> tuple[Plane, ...]:
        return (Plane(head_dim, dtype),)

    def encode(self, x: mx.array) -> Planes:
        return (x,)

    def decode(self, planes: Planes, dtype: mx.Dtype) -> mx.array:
        return planes[0]


# An orthogonal matrix that spreads what is large in one channel over many, for head dims that 16 divides.
#
# A Hadamard matrix of 2^k channels where the head dim is such a power (QuaRot, Ashkboos et al. 2024), 256 at most.
# Where it is m times that, the Kronecker product of I - 2/m, a reflection of the m blocks, and the Hadamard matrix:
# of 576 channels, the width of MLA, 9 times 64; of 512, two times 256, each mixed for itself. Both are symmetric, so
# the matrix is its own inverse. MLX's transform is only asked for powers of two up to 256, where it was found to be
# right: on a CPU it corrupts memory for other sizes.


MIN_MIXED, MAX_MIXED = 16, 256  # channels that one transform mixes


def power_of_two_in(dim: int) -> int:
    """The largest power of two that divides it, MAX_MIXED at most."""
    return min(dim & -dim, MAX_MIXED)


def check_rotation(name: str, dim: int) -> None:
    """Raises ValueError for a head dim of "keys" or "values" (`name`) that cannot be mixed well."""
    if dim < MIN_MIXED or power_of_two_in(dim) < MIN_MIXED:
        raise ValueError(
            f"{name} have head dim {dim}, which {MIN_MIXED} does not divide, so they cannot be rotated; leave it out"
        )


def rotated(x: mx.array) -> mx.array:
    """x (..., D) times the matrix, which is its own inverse."""
    dim = x.shape[-1]
    power = power_of_two_in(dim)
    turned: mx.array = mx.hadamard_transform(x.reshape(*x.shape[:-1], -1, power))  # (..., m, 2^k)
    blocks = dim // power
    if blocks > 1:
        turned = turned - turned.mean(axis=-2, keepdims=True) * 2  # mx.mean is 1/m of the sum
    return turned.reshape(x.shape)


BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class Affine:
    """Three planes: uint32 (…, D·bits/32), scales and biases (…, D/group_size).

    Args:
        bits: per element, one of `BITS`.
        group_size: elements of a token and head that share a scale and a bias, one of `GROUP_SIZES`.
        rotate: whether it is the tensor times `rotated` that is stored; named "rotated" then.

    Raises:
        ValueError: bits or a group size that `mx.quantize` does not support.
    """

    bits: int = 8
    group_size: int = 64
    rotate: bool = False

    def __post_init__(self) -> None:
        integer_fields(self, "bits", "group_size")
        if type(self.bits) is not int or self.bits not in BITS:
            raise SettingError("{bits:is}: a quantised cache has {} bits", ", ".join(map(str, BITS)), bits=self.bits)
        if type(self.group_size) is not int or self.group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise SettingError("{group_size:is}: choose one of {}", sizes, group_size=self.group_size)

    @property
    def name(self) -> str:
        return "rotated" if self.rotate else "affine"

    @property
    def parameters(self) -> dict[str, Any]:
        return {"bits": self.bits, "group_size": self.group_size}

    @property
    def packed(self) -> Packing:
        return Packing(self.bits, self.group_size, rotated=self.rotate)

    def check(self, name: str, x: mx.array) -> None:
        dim = x.shape[-1]
        if dim % self.group_size:
            sizes = " or ".join(str(size) for size in GROUP_SIZES if dim % size == 0)
            raise SettingError(
                "{0} have head dim {1}, not a multiple of {group_size:=}; "
                + ("use {group_size:={2}}" if sizes else "{bits:omit}: no group size divides it"),
                *(name, dim, sizes),
                group_size=self.group_size,
            )
        if self.rotate:
            check_rotation(name, dim)

    def planes(self, head_dim: int, dtype: mx.Dtype) -> tuple[Plane, ...]:
        groups = Plane(head_dim // self.group_size, dtype)
        return Plane(head_dim * self.bits // 32, mx.uint32), groups, groups

    def encode(self, x: mx.array) -> Planes:
        x = rotated(x) if self.rotate else x
        packed, scales, biases = mx.quantize(x, group_size=self.group_size, bits=self.bits)
        return packed, scales, biases

    def decode(self, planes: Planes, dtype: mx.Dtype) -> mx.array:
        packed, scales, biases = planes
        decoded = mx.dequantize(packed, scales, biases, group_size=self.group_size, bits=self.bits)
        return rotated(decoded) if self.rotate else decoded


# The formats of floats that share an 8-bit scale in small groups, as `mx.quantize` makes them.
#
# mxfp4 and mxfp8 are the OCP's microscaling formats (groups of 32, scales are powers of two), nvfp4 is NVIDIA's (groups
# of 16, scales are floats of 8 bits).


FORMATS = {"mxfp4": Packing(4, 32, "mxfp4"), "mxfp8": Packing(8, 32, "mxfp8"), "nvfp4": Packing(4, 16, "nvfp4")}


@dataclass(frozen=True)
class Microscaled:
    """Two planes: uint32 (…, D·bits/32), and scales as uint8 (…, D/group_size).

    Args:
        name: "mxfp4", "mxfp8" or "nvfp4".

    Raises:
        ValueError: another name.
    """

    name: str
    parameters: ClassVar[dict[str, Any]] = {}

    def __post_init__(self) -> None:
        if self.name not in FORMATS:
            raise ValueError(f"there is no format {self.name!r}: choose one of {', '.join(FORMATS)}")

    @property
    def packed(self) -> Packing:
        return FORMATS[self.name]

    def check(self, name: str, x: mx.array) -> None:
        if x.shape[-1] % 32:  # words of 32 bits, and groups
            raise ValueError(f"{name} have head dim {x.shape[-1]}, which {self.name} cannot store: 32 must divide it")

    def planes(self, head_dim: int, dtype: mx.Dtype) -> tuple[Plane, ...]:
        bits, group_size, *_ = self.packed
        return Plane(head_dim * bits // 32, mx.uint32), Plane(head_dim // group_size, mx.uint8)

    def encode(self, x: mx.array) -> Planes:
        bits, group_size, mode, *_ = self.packed
        return tuple(mx.quantize(x, group_size=group_size, bits=bits, mode=mode))

    def decode(self, planes: Planes, dtype: mx.Dtype) -> mx.array:
        bits, group_size, mode, *_ = self.packed
        packed, scales = planes
        return mx.dequantize(packed, scales, group_size=group_size, bits=bits, mode=mode, dtype=dtype)


MICROSCALED = {name: partial(Microscaled, name) for name in FORMATS}


# --- centred ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Centre:
    """Where the channels of one layer's keys, or values, lie: (H, D) numbers.

    Args:
        heads: H.
        numbers: base64 of the numbers, head by head, as little-endian float16: a text, to be saved as
            JSON, hashed and compared.

    Raises:
        ValueError: no head, a text that holds no such numbers, or numbers that are not finite.
    """

    heads: int
    numbers: str = field(repr=False)

    def __post_init__(self) -> None:
        integer_fields(self, "heads")
        if type(self.heads) is not int or self.heads < 1 or not isinstance(self.numbers, str):
            raise ValueError("a centre has 1 head or more, and base64 of float16: make one with Centre.of(keys)")
        try:
            array = self._array
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"a centre is base64 of float16 for {self.heads} heads: {error}") from error
        if not array.size or not np.isfinite(array).all():
            raise ValueError("a centre is finite in float16, and these keys are not: store them without one")

    @classmethod
    def of(cls, x: mx.array) -> Centre:
        """The mean of all tokens of x (B, H, S, D), S of 1 or more.

        Raises:
            ValueError: a mean that is not finite in float16.
        """
        return cls._of(np.array(x.astype(mx.float32).mean(axis=(0, 2))))

    @classmethod
    def _of(cls, numbers: np.ndarray) -> Centre:
        return cls(len(numbers), base64.b64encode(numbers.astype("<f2").tobytes()).decode())

    def of_head(self, head: int) -> Centre:
        """That of one head: (1, D)."""
        return self._of(self._array[head : head + 1])

    @property
    def dim(self) -> int:
        """D."""
        return int(self._array.shape[1])

    def array(self, dtype: mx.Dtype) -> mx.array:
        """(H, 1, D)."""
        return self._on_device.astype(dtype)

    @cached_property
    def _array(self) -> np.ndarray:
        flat = np.frombuffer(base64.b64decode(self.numbers, validate=True), dtype="<f2")
        return flat.reshape(self.heads, -1)

    @cached_property
    def _on_device(self) -> mx.array:
        return mx.array(self._array.astype(np.float32))[:, None]


# A codec that stores the difference of each channel from its centre by another codec.
#
# Keys have channels that lie far from zero for all tokens alike (KIVI, Liu et al. 2024), so that within a group of
# channels they take its whole range. KIVI scales each channel over a group of tokens; a centre that was measured once
# for a layer removes the same offset at no bytes a token, and tokens are still encoded independently.


@dataclass(frozen=True)
class Centred:
    """The planes of `codec`, of a tensor (B, H, S, D) less the centre of its channels.

    Args:
        centre: of this layer.
        codec: how the difference is stored.
    """

    name: ClassVar[str] = "centred"
    centre: Centre
    codec: Codec

    @property
    def parameters(self) -> dict[str, Any]:
        centre = {"heads": self.centre.heads, "numbers": self.centre.numbers}
        return centre | {"codec": [self.codec.name, self.codec.parameters]}

    @property
    def packed(self) -> Packing | None:
        packed = self.codec.packed
        return None if packed is None else packed._replace(centre=self.centre)

    def of_head(self, head: int) -> Codec:
        """What decodes the planes of one head alone."""
        return Centred(self.centre.of_head(head), self.codec)

    def check(self, name: str, x: mx.array) -> None:
        self.codec.check(name, x)
        heads, dim = x.shape[1], x.shape[3]
        if (heads, dim) != (self.centre.heads, self.centre.dim):
            raise ValueError(
                f"{name} have {heads} heads of {dim} channels and their centre {self.centre.heads} of "
                f"{self.centre.dim}: it is another model's or layer's; measure that of this one"
            )

    def planes(self, head_dim: int, dtype: mx.Dtype) -> tuple[Plane, ...]:
        return self.codec.planes(head_dim, dtype)

    def encode(self, x: mx.array) -> Planes:
        return self.codec.encode(x - self.centre.array(x.dtype))

    def decode(self, planes: Planes, dtype: mx.Dtype) -> mx.array:
        return self.codec.decode(planes, dtype) + self.centre.array(dtype)


@dataclass(frozen=True)
class CentredByLayer:
    """`Centred` with another centre in each layer: for policies. A cache takes that of its layer (`of_layer`).

    Args:
        centres: of each of a model's caches, in their order; None where there are no keys.
        codec: as in `Centred`.
    """

    name: ClassVar[str] = Centred.name
    centres: tuple[Centre | None, ...]
    codec: Codec

    @property
    def parameters(self) -> dict[str, Any]:
        layers = [None if each is None else [each.heads, each.numbers] for each in self.centres]
        return {"layers": layers, "codec": [self.codec.name, self.codec.parameters]}

    @property
    def packed(self) -> Packing | None:
        packed = self.codec.packed
        return None if packed is None else packed._replace(centre=next(filter(None, self.centres)))

    def of_layer(self, layer: int) -> Codec:
        """The codec of one of the caches.

        Raises:
            ValueError: a layer whose centre is not among these.
        """
        centre = self.centres[layer] if layer < len(self.centres) else None
        if centre is None:
            raise ValueError(f"there is no centre of cache {layer}: they are of another model; measure those of this")
        return Centred(centre, self.codec)

    def check(self, name: str, x: mx.array) -> None:
        raise ValueError(
            f"the centre of {name} is another in each layer: make caches with make_prompt_cache(model, policy), or "
            "take that of one layer: codec.of_layer(3)"
        )

    def planes(self, head_dim: int, dtype: mx.Dtype) -> tuple[Plane, ...]:
        return self.codec.planes(head_dim, dtype)

    def encode(self, x: mx.array) -> Planes:
        raise NotImplementedError("checked before")

    def decode(self, planes: Planes, dtype: mx.Dtype) -> mx.array:
        raise NotImplementedError("checked before")


# --- by name, and in pairs --------------------------------------------------------------------------------------------

# One codec for keys and one for values, from the settings `bits` and `codec`.


Codecs = tuple[Codec, Codec]  # of keys, of values
Choice = str | Codec | tuple[str | Codec, str | Codec]
Bits = int | tuple[int | None, int | None]  # of both tensors, or (of keys, of values)
PLAIN: Codecs = (Plain(), Plain())
MAX_CHARACTERS = 200  # of parameters in messages
TAKE_BITS = ("affine", "rotated")  # the codecs that are made with bits and a group size


def find_codecs(bits: Bits | None, group_size: int, codec: Choice | None = None) -> Codecs:
    """The codecs for the settings of a cache.

    Args:
        bits: of both tensors, or (of keys, of values); None is plain. With a codec, only one of `TAKE_BITS`, by name.
        group_size: elements that share a scale; without bits it is not looked at.
        codec: of both tensors, or (of keys, of values); each a codec or its name.

    Raises:
        ValueError: bits and a codec that takes none, or what does not exist.
    """
    kinds, counts = keys_and_values("codec", codec), keys_and_values("bits", bits)
    keys, values = (_codec(*each, group_size) for each in zip(kinds, counts, strict=True))
    return keys, values


def _codec(kind: str | Codec | None, bits: int | None, group_size: int) -> Codec:
    if bits is None:
        return Plain() if kind is None else find_codec(kind)
    if kind is not None and kind not in TAKE_BITS:
        raise SettingError(
            "got {bits:=} and {codec:=}, which both describe how tensors are stored: give one of them, or "
            "{codec:='rotated'} beside {bits}",
            bits=bits,
            codec=kind if isinstance(kind, str) else kind.name,
        )
    return find_codec(kind or "affine", {"bits": bits, "group_size": group_size})


def keys_and_values(name: str, given: Any) -> tuple[Any, Any]:
    """A setting as a pair, of keys and of values, from a pair or from one for both."""
    if not isinstance(given, (tuple, list)):
        return given, given
    if len(given) != 2:
        raise SettingError(f"{{{name}:is}}: give one, or two, of keys and of values", **{name: given})
    return given[0], given[1]


def one_or_two(given: Any) -> Any:
    """A setting of both tensors in a form to be compared: one where keys and values have the same, else a tuple."""
    if not isinstance(given, (tuple, list)):
        return as_int(given)
    one, *others = given = [as_int(each) for each in given] or [None]
    same = len(others) == 1 and type(one) is type(others[0]) and one == others[0]
    return one if same else tuple(given)


def of_cache(codecs: Codecs, number: int) -> Codecs:
    """The codecs of one of a model's caches, by its index; a codec that differs between caches has an `of_layer`.

    Raises:
        ValueError: such a codec has none for this cache.
    """
    keys, values = (getattr(codec, "of_layer", lambda _, codec=codec: codec)(number) for codec in codecs)
    return keys, values


def of_head(codec: Codec, head: int) -> Codec:
    """What decodes one head's planes alone; a codec that stores heads differently has an `of_head`."""
    head_codec: Codec = getattr(codec, "of_head", lambda _: codec)(head)
    return head_codec


def alike(one: Codec, other: Codec) -> bool:
    """Whether two codecs store the same planes: third parties' need no `==` for that."""
    return one is other or (type(one) is type(other) and one.name == other.name and one.parameters == other.parameters)


def are_plain(codecs: Codecs) -> bool:
    """Whether both tensors are stored as they are."""
    return all(codec.name == Plain.name for codec in codecs)


def packing_of(codecs: Codecs) -> Packing | None:
    """How mlx-lm can read both tensors packed: it supports one number of bits and one group size for both."""
    keys, values = (codec.packed for codec in codecs)
    return keys if keys == values and (keys is None or keys.stock) else None


def packings_of(codecs: Codecs) -> tuple[Packing, Packing] | None:
    """How our own attention reads both tensors packed; None where one of them must be decoded, or mlx-lm's can."""
    keys, values = (codec.packed for codec in codecs)
    return None if keys is None or values is None or packing_of(codecs) is not None else (keys, values)


def find_packings(codecs: Codecs, residual: bool) -> tuple[Packing | None, tuple[Packing, Packing] | None]:
    """How mlx-lm's attention reads the planes, and how our own does, of keys and of values; None where it cannot.

    Args:
        residual: whether there is one, which mlx-lm's cannot read: then our own reads all planes.
    """
    keys, values = (codec.packed for codec in codecs)
    if residual:
        return None, None if keys is None or values is None else (keys, values)
    return packing_of(codecs), packings_of(codecs)


def affine_of(codecs: Codecs) -> Packing | None:
    """The bits and the group size of both, where both are affine with the same ones; else None."""
    return packing_of(codecs) if all(codec.name == "affine" for codec in codecs) else None


def in_words(codecs: Codecs) -> str:
    """How tensors are stored, nothing where they are plain. Two say the same only if they store the same."""
    if (affine := affine_of(codecs)) is not None:
        return f"{affine.bits} bits in groups of {affine.group_size}"
    keys, values = (f"{codec.name} {_described(codec.parameters)}" for codec in codecs)
    return "" if are_plain(codecs) else f"keys as {keys} and values as {values}"


def briefly(codecs: Codecs) -> str:
    """As `in_words`, but only the bits where both are affine."""
    affine = affine_of(codecs)
    return in_words(codecs) if affine is None else f"bits={affine.bits}"


def _described(parameters: dict[str, Any]) -> str:
    """Parameters as JSON, or a digest where that is too long to read."""
    text = json.dumps(parameters, sort_keys=True)
    return text if len(text) <= MAX_CHARACTERS else hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


Factory = Callable[..., Codec]  # takes the codec's `parameters` by their names, each with a default


def _centred(heads: int = 0, numbers: str = "", codec: Sequence[Any] = ("affine", {})) -> Centred:
    if not numbers:
        raise ValueError("keys are centred by numbers of their model: give calibration.centred(codec)")
    name, parameters = codec
    return Centred(Centre(heads, numbers), find_codec(name, parameters))


CODECS: OpenSet[Factory] = OpenSet(
    "codec",
    "a codec",
    {
        "plain": Plain,
        "affine": Affine,
        "rotated": partial(Affine, rotate=True),
        Centred.name: _centred,
        **MICROSCALED,
    },
)


def codec_names() -> list[str]:
    """All that `codec=` takes by name; "centred" needs numbers of a model, so a codec is given in its place."""
    return CODECS.names()


def register_codec(name: str, factory: Factory) -> None:
    """Registers a codec under a name, for `codec=` and for loaded caches.

    Args:
        name: the `name` of the codec; replaces a codec of the same name.
        factory: makes one, usually its class. A loaded cache gives it the `parameters` of the saved one.

    Raises:
        ValueError: a factory that cannot be called, or a name that is no text.
    """
    if not isinstance(name, str):
        raise ValueError(f"the name of a codec is {name!r}: give a text")
    if not callable(factory):
        raise ValueError(f"the codec {name} is {factory!r}: give what makes one, such as its class")
    CODECS.registered[name] = factory


def find_codec(codec: str | Codec, parameters: Mapping[str, Any] | None = None) -> Codec:
    """The codec of a name, or the one that is given.

    Args:
        parameters: of the codec, instead of its defaults; only with a name.

    Raises:
        ValueError: no codec has this name, it is no codec, or its parameters are wrong.
    """
    if not isinstance(codec, str):
        if not callable(getattr(codec, "encode", None)):
            raise SettingError("{codec:is}: give a codec such as Affine(8, 64), or a name", codec=codec)
        return codec
    return CODECS.find(codec)(**(parameters or {}))
