"""What an entry format is: its byte map as data, and the conversion of values to stored elements and back."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp

from jaxkv_kernels.formats.bits import FP8, view_as

SHORT_NAMES = {"e4m3": FP8}
"""The dtypes of parts that have a shorter name than NumPy's."""

FORMATS: dict[str, "Format"] = {}
"""The registered formats by name, in the order in which messages and tables list them."""


def register(format: "Format") -> None:
    """Makes `format` available under its name to the entry kinds that it serves.

    Raises:
      ValueError: `format` is not a `Format`, or its name is taken.
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

    A format stores the parts of an entry together, or `per_page`.  A split page, the tokens of one block, layer and
    head, holds the first part of all its tokens, then the second part of all of them, and so on.
    """

    name: str
    dtype: str
    """A name of `SHORT_NAMES`, or one of NumPy's."""
    count: int
    """Values per entry."""
    offset: int
    """Bytes from the start of the entry; of a part `per_page`, from the start of the page to its first token's."""
    per_page: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes per value, of values of at least a byte; addresses of the part are multiples of it."""
        return max(_bits(self.dtype) // 8, 1)

    @property
    def nbytes(self) -> int:
        """Bytes per entry."""
        return self.count * _bits(self.dtype) // 8

    def read(self, row: jax.Array) -> jax.Array:
        """This part of rows [..., width] as `Format.encode` returns them, in its own dtype [..., count]."""
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
    """How entries are stored; the only place that knows it.

    `sizes` are the lengths of an entry's values by name, in order: {"latent": 512, "rope": 64}, say.  `scales` are
    float32 arrays that broadcast to the leading axes, one per value, where the format is `scaled`, and None otherwise.
    """

    name: str
    """The name that users choose it by."""
    kinds: tuple[type, ...]
    """The entry kinds (classes of `entries`) that may use it."""
    dtype: str
    """Natural dtype of the buffer, "uint8" where no dtype of a buffer is that of all parts."""
    scaled: bool = False
    """Whether the caller keeps a scale for each value: value = stored * scale."""

    @abstractmethod
    def parts(self, sizes: Mapping[str, int], block_size: int) -> tuple[Part, ...]:
        """The byte map in a page of `block_size` tokens: all parts together, or all per page.

        Raises:
          ValueError: the format cannot store values of these sizes.
        """

    @abstractmethod
    def encode(self, values: Sequence[jax.Array], scales: Sequence[jax.Array | None]) -> jax.Array:
        """Values [..., n_i] to stored elements [..., width] of `dtype`: the parts of a page of one token."""

    @abstractmethod
    def decode(
        self, row: jax.Array, sizes: Mapping[str, int], scales: Sequence[jax.Array | None], dtype
    ) -> list[jax.Array]:
        """Stored elements [..., width] to values [..., n_i] of `dtype`.

        A scale of None leaves values of a scaled format as they are stored: the caller multiplies the sums of their
        products by the scale.
        """

    def decode_factored(self, row: jax.Array, sizes: Mapping[str, int], dtype) -> tuple[list[jax.Array], jax.Array]:
        """Like `decode`, as values [..., n_i] of `dtype` that are yet to be multiplied by a float32 factor [..., 1].

        For formats whose stored values are exact in `dtype` while their product with a scale may not be.
        """
        values = self.decode(row, sizes, [None] * len(sizes), dtype)
        return values, jnp.ones((*row.shape[:-1], 1), jnp.float32)
