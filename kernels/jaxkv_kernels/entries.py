"""What one token stores for one head in one layer: its parts and their format."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxkv_kernels.formats import FORMATS, Format
from jaxkv_kernels.formats.indexer_fp8 import IndexerFp8
from jaxkv_kernels.integers import as_int


@dataclass(frozen=True)
class Entry:
    """Base of the entries; `format` is a name in `FORMATS`."""

    format: str

    formats: ClassVar[tuple[str, ...]] = ()
    """The format names that this kind of entry takes."""
    one_head: ClassVar[bool] = True
    """Whether all query heads share the entry, so that a cache of it has one head."""

    def __post_init__(self):
        if self.format not in self.formats:
            raise ValueError(f"{type(self).__name__} format {self.format!r}: expected one of {', '.join(self.formats)}")
        for name in (field.name for field in fields(self) if field.name != "format"):
            size = as_int(getattr(self, name))
            if size is None or size < 1:
                raise ValueError(f"{self}: every size must be a positive int")
            object.__setattr__(self, name, size)
        self.codec.width(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the parts, in values."""
        raise NotImplementedError

    @property
    def codec(self) -> Format:
        """The format itself."""
        return FORMATS[self.format]

    @property
    def dtype(self):
        """Natural dtype of the buffer: that of the stored elements."""
        return jnp.dtype(self.codec.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes an entry."""
        return self.codec.width(self.sizes) * self.dtype.itemsize

    def encode(self, parts, scales=(None, None)) -> jax.Array:
        """Parts [..., n_i] to stored elements [..., width] of the natural dtype."""
        return self.codec.encode(parts, scales)

    def decode(self, row, dtype, scales=(None, None)) -> list[jax.Array]:
        """Stored elements [..., width] to parts [..., n_i] of `dtype`."""
        return self.codec.decode(row, self.sizes, scales, dtype)


@dataclass(frozen=True)
class MLAEntry(Entry):
    """Multi-head latent attention: a latent of `latent` values (R) and a rotary part of `rope` values (P)."""

    latent: int = 512
    rope: int = 64

    formats = ("bf16", "f16", "f32", "fp8", "fp8_ds_mla")

    @property
    def sizes(self):
        """(R, P)."""
        return self.latent, self.rope


@dataclass(frozen=True)
class KVEntry(Entry):
    """Keys of `head_dim` values (D) and values of `value_dim` (Dv, default D), packed: K first."""

    head_dim: int = 128
    value_dim: int = 0

    formats = ("bf16", "f16", "f32", "fp8")
    one_head = False

    def __post_init__(self):
        if as_int(self.value_dim) == 0:
            object.__setattr__(self, "value_dim", self.head_dim)
        super().__post_init__()

    @property
    def sizes(self):
        """(D, Dv)."""
        return self.head_dim, self.value_dim


@dataclass(frozen=True)
class IndexerEntry(Entry):
    """A DeepSeek V3.2 indexer key of `head_dim` values."""

    format: str = "indexer_fp8"
    head_dim: int = 128

    formats = ("bf16", "f16", "f32", "indexer_fp8")

    @property
    def split(self) -> bool:
        """Whether a page is split: all its values, then all its scales."""
        return isinstance(self.codec, IndexerFp8)

    def key_and_scale(self, row, dtype) -> tuple[jax.Array, jax.Array]:
        """Stored elements [..., width] to a key [..., head_dim] of `dtype` and its float32 scale [..., 1].

        An e4m3 value is exact in every dtype of queries, so that products need not see the scale.
        """
        if isinstance(self.codec, IndexerFp8):
            values, scale = self.codec.split(row, self.sizes)
            return values.astype(dtype), scale
        (key,) = self.decode(row, dtype)
        return key, jnp.ones((*key.shape[:-1], 1), jnp.float32)

    @property
    def sizes(self):
        """(head_dim,)."""
        return (self.head_dim,)


Listed = Mapping[type[Entry], Collection[str]]
"""Formats by kind of entry."""


def unlisted(listed: Listed, options: Mapping[str, Any]) -> list[str]:
    """The reason against a call with an `entry` whose kind (the class itself) or format is not `listed`.

    A kernel knows the bytes of the entries that it was written for.  It must not guess those of others.
    """
    entry = options.get("entry")
    if entry is None:
        return []
    formats = listed.get(type(entry))
    if formats is None:
        return [f"entries of kind {type(entry).__name__}: supports {', '.join(kind.__name__ for kind in listed)}"]
    if entry.format not in formats:
        return [f"entries of format {entry.format!r}: supports {', '.join(formats)}"]
    return []
