"""`Format`, the interface of entry formats: a byte map as data, and the conversion between values and bytes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp

from jaxkv_kernels.formats.bits import FP8, view_as

SHORT_NAMES = {
    "e4m3": FP8,
    "e5m2": jnp.float8_e5m2,
    "e8m0": jnp.float8_e8m0fnu,
    "e2m1x2": jnp.uint8,
    "int4x2": jnp.uint8,
}
"""Dtypes of fields that are not called as in NumPy.  An e2m1x2 is a byte with two e2m1 values, the first in the low
bits; `fp4.py` converts them.  An int4x2 is a byte with two integers from -8 to 7, likewise."""

FORMATS: dict[str, "Format"] = {}
"""The registered formats by name.  Messages and tables show them in this order."""


def register(format: "Format") -> None:
    """Makes `format` available, under its name, to the entry kinds that it lists.

    Raises:
      ValueError: `format` is not a `Format`, or its name is already registered.
    """
    if not isinstance(format, Format):
        raise ValueError(f"`format` is {format!r}: expected a Format")
    if format.name in FORMATS:
        raise ValueError(f"a format named {format.name!r} is already registered")
    FORMATS[format.name] = format


def unquantised(dtype) -> str:
    """The name of the format that stores floats of `dtype` (bfloat16, float16 or float32) as they are."""
    return next(name for name, format in FORMATS.items() if format.dtype == str(dtype))


@dataclass(frozen=True)
class Field:
    """A run of values of one dtype in the byte map of a format.

    A format stores all fields of an entry together, or in split pages.  A page holds the tokens of one block, layer and
    head.  A split page consists of regions.  A region stores one or several fields of each token, token by token;
    then the next region stores the next fields of all tokens.
    """

    name: str
    dtype: str
    """A name in `SHORT_NAMES`, or a NumPy name."""
    count: int
    """Values per entry."""
    offset: int
    """Bytes from the start of the entry.  In a split page, the offset of the first token's field in the page."""
    step: int | None = None
    """In a split page, the bytes from the field of one token to that of the next.  None if fields lie together."""

    @property
    def itemsize(self) -> int:
        """Bytes per value, at least 1.  Addresses of the field are multiples of this."""
        return max(_bits(self.dtype) // 8, 1)

    @property
    def nbytes(self) -> int:
        """Bytes per entry."""
        return self.count * _bits(self.dtype) // 8

    def read(self, row: jax.Array) -> jax.Array:
        """Extracts this field [..., count], in its own dtype, from rows [..., width] that `Format.encode` returned."""
        item = row.dtype.itemsize
        return view_as(row[..., self.offset // item : (self.offset + self.nbytes) // item], _dtype(self.dtype))


def _dtype(name: str):
    return jnp.dtype(SHORT_NAMES.get(name, name))


@cache
def _bits(name: str) -> int:
    dtype = _dtype(name)
    info = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
    return int(info.bits)


Spec = tuple[str, str, int]
"""The name, dtype and count of a field."""


def together(*specs: Spec) -> tuple[Field, ...]:
    """Fields of an entry, stored one after the other."""
    return tuple(_in_order(specs, 0, None))


def split_by_page(block_size: int, *regions: Sequence[Spec]) -> tuple[Field, ...]:
    """Fields of a split page of `block_size` tokens, whose `regions` store these fields of each token."""
    fields, offset = [], 0
    for specs in regions:
        step = sum(field.nbytes for field in _in_order(specs, 0, None))
        fields += _in_order(specs, offset, step)
        offset += step * block_size
    return tuple(fields)


def regions_of(fields: Sequence[Field]) -> list[tuple[Field, ...]]:
    """The fields of a split page, by region."""
    found: list[tuple[Field, ...]] = []
    for field in fields:
        if found and field.offset < found[-1][0].offset + (field.step or 0):
            found[-1] += (field,)
        else:
            found.append((field,))
    return found


def _in_order(specs: Sequence[Spec], offset: int, step: int | None) -> list[Field]:
    fields = []
    for name, dtype, count in specs:
        fields.append(Field(name, dtype, count, offset, step))
        offset += fields[-1].nbytes
    return fields


def join(arrays: Sequence[jax.Array], dtype) -> jax.Array:
    """The bytes of `arrays` [..., n_i], one after the other, as elements of `dtype`."""
    return jnp.concatenate([view_as(x, dtype) for x in arrays], axis=-1)


class Format(ABC):
    """How entries are stored.  Only formats and the codecs of GPU kernels depend on the bytes of an entry.

    In the methods, `sizes` are the lengths of an entry's arrays of values by name, in order, such as {"latent": 512,
    "rope": 64}; where keys and values have different formats, {"K": 128} or {"V": 128} alone.  `scales` has an element
    for each of these arrays: a float32 array that broadcasts to the leading axes if the format is `scaled`, otherwise
    None.
    """

    name: str
    """The name by which users choose it."""
    kinds: tuple[type, ...]
    """The entry kinds (classes of `entries`) that may use it."""
    dtype: str
    """The natural dtype of the buffer: that of all fields, or "uint8" if they differ."""
    scaled: bool = False
    """Whether the caller passes a scale for each array of values: value = stored * scale."""
    in_float32: bool = False
    """Whether attention multiplies decoded values in float32: bf16 and float16 do not represent them exactly."""
    pads_pages: bool = False
    """Whether pages, which are split, are rounded up to a multiple of what their first region stores per token.
    Readers that load pages by TMA need such strides."""
    rope_in_values: bool = False
    """Of formats of latents: whether attention sums whole entries, rotary parts included, as DeepSeek V4 does."""
    typical: Mapping[str, int] = {}
    """Arguments of an entry that has the sizes of the models for which the format was made, if its defaults do not."""

    @abstractmethod
    def fields(self, sizes: Mapping[str, int], block_size: int) -> tuple[Field, ...]:
        """The byte map of a page of `block_size` tokens: all fields together, or in regions.

        Raises:
          ValueError: the format cannot store values of these sizes.
        """

    @abstractmethod
    def encode(self, values: Sequence[jax.Array], scales: Sequence[jax.Array | None]) -> jax.Array:
        """Converts values [..., n_i] to stored elements [..., width] of the format's `dtype`: pages of one token."""

    @abstractmethod
    def decode(
        self, row: jax.Array, sizes: Mapping[str, int], scales: Sequence[jax.Array | None], dtype
    ) -> list[jax.Array]:
        """Converts stored elements [..., width] to values [..., n_i] of `dtype`.

        In a scaled format, a scale of None returns the values as they are stored.  The caller then multiplies sums of
        their products by the scale.
        """

    def decode_factored(self, row: jax.Array, sizes: Mapping[str, int], dtype) -> tuple[list[jax.Array], jax.Array]:
        """Like `decode`, but returns values [..., n_i] of `dtype` and a float32 factor [..., 1] to multiply them by.

        Formats override this method if `dtype` represents their stored values exactly, but not always their products
        with a scale.
        """
        values = self.decode(row, sizes, [None] * len(sizes), dtype)
        return values, jnp.ones((*row.shape[:-1], 1), jnp.float32)
