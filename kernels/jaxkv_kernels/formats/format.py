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
"""The registered formats by name, in the order of messages and tables."""


def register(format: "Format") -> None:
    """Makes `format` available under its name to its entry kinds.

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

    A format stores the parts of an entry together, or `per_page`.  A page is the tokens of one block, layer and head.
    A split page stores the first part of all its tokens, then the second part of all its tokens, and so on.
    """

    name: str
    dtype: str
    """A name in `SHORT_NAMES`, or a NumPy name."""
    count: int
    """Values per entry."""
    offset: int
    """Bytes from the start of the entry; for a part `per_page`, of its first token from the start of the page."""
    per_page: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes per value, at least 1.  Addresses of the part are multiples of it."""
        return max(_bits(self.dtype) // 8, 1)

    @property
    def nbytes(self) -> int:
        """Bytes per entry."""
        return self.count * _bits(self.dtype) // 8

    def read(self, row: jax.Array) -> jax.Array:
        """This part [..., count], in its own dtype, of rows [..., width] that `Format.encode` returned."""
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
    """Parts (name, dtype, count) of an entry, one after the other."""
    return _in_order(fields, tokens=1, per_page=False)


def split_by_page(block_size: int, *fields: tuple[str, str, int]) -> tuple[Part, ...]:
    """Parts (name, dtype, count) of a page of `block_size` tokens: the first part of all tokens, then the second."""
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
    """How entries are stored.  Nothing else knows the bytes of an entry, except the codecs of GPU kernels.

    In the methods, `sizes` are the lengths of an entry's values by name, in order, such as {"latent": 512, "rope": 64}.
    `scales` has one element per value: a float32 array that broadcasts to the leading axes if the format is `scaled`,
    None otherwise.
    """

    name: str
    """The name by which users choose it."""
    kinds: tuple[type, ...]
    """The entry kinds (classes of `entries`) that may use it."""
    dtype: str
    """Natural dtype of the buffer: that of all parts, or "uint8" if they differ."""
    scaled: bool = False
    """Whether the caller passes a scale for each value: value = stored * scale."""

    @abstractmethod
    def parts(self, sizes: Mapping[str, int], block_size: int) -> tuple[Part, ...]:
        """The byte map of a page of `block_size` tokens: all parts together, or all `per_page`.

        Raises:
          ValueError: the format cannot store values of these sizes.
        """

    @abstractmethod
    def encode(self, values: Sequence[jax.Array], scales: Sequence[jax.Array | None]) -> jax.Array:
        """Converts values [..., n_i] to stored elements [..., width] of `dtype`, a page of one token."""

    @abstractmethod
    def decode(
        self, row: jax.Array, sizes: Mapping[str, int], scales: Sequence[jax.Array | None], dtype
    ) -> list[jax.Array]:
        """Converts stored elements [..., width] to values [..., n_i] of `dtype`.

        In a scaled format, a scale of None leaves values as they are stored: the caller then applies the scale to sums
        of their products.
        """

    def decode_factored(self, row: jax.Array, sizes: Mapping[str, int], dtype) -> tuple[list[jax.Array], jax.Array]:
        """Like `decode`, but returns values [..., n_i] of `dtype` and a float32 factor [..., 1] to multiply them by.

        Formats override it if their stored values are exact in `dtype`, but may not be once multiplied by a scale.
        """
        values = self.decode(row, sizes, [None] * len(sizes), dtype)
        return values, jnp.ones((*row.shape[:-1], 1), jnp.float32)
