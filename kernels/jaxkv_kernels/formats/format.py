"""`Format`, the interface of entry formats: a byte map as data, and the conversion between values and bytes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp

from jaxkv_kernels.formats.bits import FP8, view_as

SHORT_NAMES = {"e4m3": FP8}
"""Dtypes of parts that have a shorter name than in NumPy."""

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
class Part:
    """A run of values of one dtype in the byte map of a format.

    A format stores all parts of an entry together, or all parts `per_page`.  A page holds the tokens of one block,
    layer and head.  A split page stores the first part of all its tokens, then the second part of all its tokens, and
    so on.
    """

    name: str
    dtype: str
    """A name in `SHORT_NAMES`, or a NumPy name."""
    count: int
    """Values per entry."""
    offset: int
    """Bytes from the start of the entry.  For a part `per_page`, the offset of the first token's part in the page."""
    per_page: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes per value, at least 1.  Addresses of the part are multiples of this."""
        return max(_bits(self.dtype) // 8, 1)

    @property
    def nbytes(self) -> int:
        """Bytes per entry."""
        return self.count * _bits(self.dtype) // 8

    def read(self, row: jax.Array) -> jax.Array:
        """Extracts this part [..., count], in its own dtype, from rows [..., width] as `Format.encode` returns them."""
        item = row.dtype.itemsize
        return view_as(row[..., self.offset // item : (self.offset + self.nbytes) // item], _dtype(self.dtype))


def _dtype(name: str):
    return jnp.dtype(SHORT_NAMES.get(name, name))


@cache
def _bits(name: str) -> int:
    dtype = _dtype(name)
    info = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
    return int(info.bits)


def together(*fields: tuple[str, str, int]) -> tuple[Part, ...]:
    """Parts of an entry, stored one after the other; each of `fields` is (name, dtype, count)."""
    return _in_order(fields, tokens=1, per_page=False)


def split_by_page(block_size: int, *fields: tuple[str, str, int]) -> tuple[Part, ...]:
    """Parts of a split page of `block_size` tokens; each of `fields` is (name, dtype, count)."""
    return _in_order(fields, tokens=block_size, per_page=True)


def _in_order(fields, *, tokens: int, per_page: bool) -> tuple[Part, ...]:
    parts, offset = [], 0
    for name, dtype, count in fields:
        parts.append(Part(name, dtype, count, offset, per_page))
        offset += parts[-1].nbytes * tokens
    return tuple(parts)


def join(arrays: Sequence[jax.Array], dtype) -> jax.Array:
    """The bytes of `arrays` [..., n_i], one after the other, as elements of `dtype`."""
    return jnp.concatenate([view_as(x, dtype) for x in arrays], axis=-1)


class Format(ABC):
    """How entries are stored.  Only formats and the codecs of GPU kernels depend on the bytes of an entry.

    In the methods, `sizes` are the lengths of an entry's arrays of values by name, in order, such as {"latent": 512,
    "rope": 64}.  `scales` has an element for each of these arrays: a float32 array that broadcasts to the leading axes
    if the format is `scaled`, otherwise None.
    """

    name: str
    """The name by which users choose it."""
    kinds: tuple[type, ...]
    """The entry kinds (classes of `entries`) that may use it."""
    dtype: str
    """The natural dtype of the buffer: that of all parts, or "uint8" if they differ."""
    scaled: bool = False
    """Whether the caller passes a scale for each array of values: value = stored * scale."""

    @abstractmethod
    def parts(self, sizes: Mapping[str, int], block_size: int) -> tuple[Part, ...]:
        """The byte map of a page of `block_size` tokens: all parts together, or all `per_page`.

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
