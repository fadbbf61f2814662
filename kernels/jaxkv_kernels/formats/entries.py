"""Entry kinds.  An entry is what one token stores for one head in one layer: values in a format."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self, cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxkv_kernels.formats.bits import view_as
from jaxkv_kernels.formats.format import FORMATS, SHORT_NAMES, Field, Format, regions_of, together
from jaxkv_kernels.formats.mixed import Mixed
from jaxkv_kernels.gradients import without_gradients
from jaxkv_kernels.integers import as_int
from jaxkv_kernels.names import expected_one_of

FloatFormat = Literal["bf16", "f16", "f32"]
MLAFormat = Literal[
    FloatFormat, "fp8", "fp8_e5m2", "fp8_ds_mla", "fp8_v4", "fp8_v41", "fp8_v41_split", "nvfp4_ds_mla", "mxfp4_ds_mla",
    "fp4_v41", "fp4_v41_split", "kvfp4",
]  # fmt: skip
KVFormat = Literal[FloatFormat, "fp8", "fp8_e5m2", "int8", "nvfp4", "kvfp4", "int4"]
IndexerFormat = Literal[FloatFormat, "indexer_fp8", "indexer_mxfp4", "indexer_mxfp8"]


class _FormatNames:
    """A descriptor that reads the registry on each access, so that it includes formats that are registered later."""

    def __get__(self, entry, kind: type) -> tuple[str, ...]:
        return tuple(name for name, format in FORMATS.items() if issubclass(kind, format.kinds))


@dataclass(frozen=True)
class Entry:
    """Base class of the entry kinds.  `format` is the name of a registered format that supports the kind."""

    format: str

    formats = _FormatNames()
    """The names of the formats that support this kind of entry."""
    one_head: ClassVar[bool] = True
    """Whether all query heads share the entry, so that a cache of it has one head."""
    may_be_empty: ClassVar[tuple[str, ...]] = ()
    """The fields that may be 0."""

    def __post_init__(self):
        for argument, name in zip(("format", "value_format"), self.format_names, strict=False):
            if name not in self.formats:
                expected = expected_one_of(name, self.formats)
                raise ValueError(f"{type(self).__name__} {argument} {name!r}: {expected}")
        for name in (field.name for field in fields(self) if field.type is int):
            size = as_int(getattr(self, name))
            least = 0 if name in self.may_be_empty else 1
            if size is None or size < least:
                expected = "a positive int" if least else "an int of at least 0"
                raise ValueError(f"{self}: `{name}` is {getattr(self, name)!r}, expected {expected}")
            object.__setattr__(self, name, size)
        self.fields()

    @classmethod
    def typical(cls, format: str) -> Self:
        """The entry of a format that has the sizes of the models for which the format was made."""
        return cls(format, **FORMATS[format].typical)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that make an equal entry, in a form that JSON can have."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def named_sizes(self) -> dict[str, int]:
        """The lengths of the arrays of values that an entry stores, by name, in order."""
        raise NotImplementedError

    @property
    def sizes(self) -> tuple[int, ...]:
        """The lengths of the arrays of values, in order."""
        return tuple(self.named_sizes.values())

    @property
    def description(self) -> list[Any]:
        """What identifies the entry, for fingerprints: values that JSON has."""
        return [type(self).__name__, self.format, *self.sizes]

    @property
    def format_names(self) -> tuple[str, ...]:
        """The formats of the entry: one, or that of keys and that of values, if these differ."""
        return (self.format,)

    @property
    def label(self) -> str:
        """The formats of the entry in one word, for tables and messages."""
        return "+".join(self.format_names)

    @property
    def codec(self) -> Format:
        """The registered format whose name is `format`, or for values in another format one made of both."""
        return FORMATS[self.format]

    @property
    def scaled(self) -> tuple[bool, ...]:
        """Whether the caller passes a scale, for each array of values."""
        return (self.codec.scaled,) * len(self.named_sizes)

    def fields(self, block_size: int = 1) -> tuple[Field, ...]:
        """The byte map of a page of `block_size` tokens.  With 1, it is that of an encoded entry."""
        return self.codec.fields(self.named_sizes, block_size)

    @property
    def split(self) -> bool:
        """Whether pages are split: they store some fields of all tokens, then other fields of all tokens."""
        return self.fields()[0].step is not None

    def regions(self, block_size: int = 1) -> list[tuple[Field, ...]]:
        """The fields of a split page of `block_size` tokens, by region."""
        return regions_of(self.fields(block_size))

    def page_nbytes(self, block_size: int) -> int:
        """Bytes of a page of `block_size` tokens, padding included."""
        nbytes = block_size * self.nbytes
        if self.codec.pads_pages:
            nbytes += -nbytes % sum(field.nbytes for field in self.regions()[0])
        return nbytes

    @property
    def planes(self) -> tuple[tuple[Field, ...], ...]:
        """The byte maps of the arrays of values where these lie apart; ValueError if the entry is stored as a whole."""
        raise ValueError(f"{self} is stored as a whole: only the keys and values of a KVEntry may lie apart")

    def to_planes(self, row: jax.Array) -> list[jax.Array]:
        """What the planes store [..., n_i] of encoded entries [..., width]."""
        whole, item = {field.name: field for field in self.fields()}, row.dtype.itemsize
        found = []
        for plane in self.planes:
            fields = [whole[field.name] for field in plane]
            pieces = [row[..., field.offset // item : (field.offset + field.nbytes) // item] for field in fields]
            found.append(jnp.concatenate(pieces, axis=-1))
        return found

    def from_planes(self, planes: Sequence[jax.Array]) -> jax.Array:
        """Encoded entries [..., width] from what the planes store [..., n_i]; padding is 0."""
        (*shape, _), dtype, pieces = planes[0].shape, planes[0].dtype, {}
        for plane, row in zip(self.planes, planes, strict=True):
            for field in plane:
                first, last = field.offset // dtype.itemsize, (field.offset + field.nbytes) // dtype.itemsize
                pieces[field.name] = row[..., first:last]
        rows = [
            pieces.get(field.name, jnp.zeros((*shape, field.nbytes // dtype.itemsize), dtype))
            for field in self.fields()
        ]
        return jnp.concatenate(rows, axis=-1)

    @property
    def dtype(self):
        """The natural dtype of the buffer, which is that of the stored elements."""
        return jnp.dtype(self.codec.dtype)

    @property
    def quantised(self) -> bool:
        """Whether the stored elements are not values of a float dtype, so that values are encoded and decoded."""
        return not jnp.issubdtype(self.dtype, jnp.floating)

    @property
    def input_dtype(self):
        """The usual dtype of new values and queries: that of the buffer, or bfloat16 if entries are quantised."""
        return jnp.dtype(jnp.bfloat16) if self.quantised else self.dtype

    @property
    def values_dtype(self) -> jnp.dtype | None:
        """The dtype of all values, if an entry consists of its arrays of values alone, whose dtype is the same."""
        stored = {field.dtype for field in self.fields()}
        alone = [field.name for field in self.fields()] == [*self.named_sizes] and len(stored) == 1
        return jnp.dtype(SHORT_NAMES.get(*stored, *stored)) if alone else None

    @property
    def nbytes(self) -> int:
        """Bytes per entry."""
        return max(field.offset + field.nbytes for field in self.fields())

    @property
    def alignment(self) -> int:
        """The address of an entry must be a multiple of this many bytes, the itemsize of its widest field."""
        return max(field.itemsize for field in self.fields())

    def encode(self, values, scales=(None, None)) -> jax.Array:
        """Converts values [..., n_i] to stored elements [..., width] of the natural dtype.

        Quantised entries have no gradients: differentiating them raises NotImplementedError.
        """
        if self.quantised:
            reason = f"values that are stored in entries of format {self.label!r}, as {self.dtype}, have no gradients"
            advice = "keep them in arrays or in entries of format bf16, f16 or f32"
            values, scales = without_gradients((values, scales), f"{reason}: {advice}")
        return self.codec.encode(values, scales)

    def decode(self, row, dtype, scales=(None, None)) -> list[jax.Array]:
        """Converts stored elements [..., width] to values [..., n_i] of `dtype`."""
        return self.codec.decode(row, self.named_sizes, scales, dtype)

    @property
    def _stored(self) -> dict[str, Field]:
        """The byte map of an encoded entry by name, without padding."""
        return {field.name: field for field in self.fields() if field.name != "padding"}

    def pack(self, stored: Mapping[str, ArrayLike]) -> jax.Array:
        """Joins the fields of entries to their bytes, as `write_entries` stores them.

        Other libraries may have the same fields in arrays of their own, such as scales beside the cache.

        Args:
          stored: an array [..., count] for each of `fields()` but padding, by name, in the dtype of the field, or its
            bytes as uint8.

        Returns:
          uint8 [..., nbytes], the fields in the order of `fields()`; padding is 0.

        Raises:
          ValueError: a name or the last axis of an array is wrong, or the other axes of arrays differ.
        """
        if stored.keys() != self._stored.keys():
            raise ValueError(f"`stored` has {', '.join(stored) or 'no fields'}: expected {', '.join(self._stored)}")
        rows = {name: view_as(jnp.asarray(array), jnp.uint8) for name, array in stored.items()}
        leading = next(iter(rows.values())).shape[:-1]
        for name, field in self._stored.items():
            if rows[name].shape != (*leading, field.nbytes):
                array = jnp.asarray(stored[name])
                raise ValueError(
                    f"`stored[{name!r}]` is {array.dtype}{list(array.shape)}: expected {field.count} {field.dtype} "
                    f"({field.nbytes} bytes) in the last axis, and {list(leading)} in the others"
                )
        padded = (rows.get(f.name, jnp.zeros((*leading, f.nbytes), jnp.uint8)) for f in self.fields())
        return jnp.concatenate([*padded], axis=-1)

    def unpack(self, rows: ArrayLike) -> dict[str, jax.Array]:
        """Separates the bytes of entries, as `gather_entries` returns them, into fields: the inverse of `pack`.

        Args:
          rows: uint8 [..., nbytes].

        Returns:
          An array [..., count] for each of `fields()` but padding, by name, in the dtype of the field.  A pair of 4-bit
          values is a byte.

        Raises:
          ValueError: `rows` are not bytes, or not `nbytes` of them in the last axis.
        """
        rows = jnp.asarray(rows)
        if rows.dtype != jnp.uint8 or rows.shape[-1:] != (self.nbytes,):
            raise ValueError(f"`rows` is {rows.dtype}{list(rows.shape)}: expected uint8 [..., {self.nbytes}]")
        return {name: field.read(rows) for name, field in self._stored.items()}


@dataclass(frozen=True)
class MLAEntry(Entry):
    """Multi-head latent attention: a latent of `latent` values (R) and a rotary part of `rope` values (P).

    Models without rotary parts have `rope=0`; `k_pe` and `q_pe` are then arrays whose last axis has length 0.
    """

    format: MLAFormat
    latent: int = 512
    rope: int = 64

    may_be_empty = ("rope",)

    @property
    def named_sizes(self):
        """R under the name "latent", P under "rope"."""
        return {"latent": self.latent, "rope": self.rope}

    @property
    def value_dim(self) -> int:
        """The values of an entry that attention sums (V): the latent, and in formats of DeepSeek V4 the rotary part."""
        return self.latent + self.rope * self.codec.rope_in_values

    def keys_and_values(self, row, dtype, scales=(None, None)) -> tuple[jax.Array, jax.Array]:
        """Converts stored elements [..., width] to keys [..., R + P] and values [..., V] of `dtype`."""
        keys = jnp.concatenate(self.decode(row, dtype, scales), axis=-1)
        return keys, keys[..., : self.value_dim]


@dataclass(frozen=True)
class KVEntry(Entry):
    """A key of `head_dim` values (D), and a value of `value_dim` (Dv, default D).

    The value follows the key, unless the layout puts it elsewhere (`value_offset` of `CacheLayout`).

    Values may have a format of their own, `value_format`.  The key is then stored as its format stores a key alone: its
    values, its scales, and zeros up to a multiple of 16 bytes.  The value follows, stored likewise.  Elements of the
    buffer are bytes unless both formats have the same dtype.  Operations require `k_scale` and `v_scale` as the format
    of keys and that of values does: `KVEntry("bf16", value_format="fp8")` has a `v_scale` only.
    """

    format: KVFormat
    head_dim: int = 128
    value_dim: int = 0
    value_format: KVFormat | None = None
    """None if it is `format`, also where that is passed."""

    one_head = False

    def __post_init__(self):
        if as_int(self.value_dim) == 0:
            object.__setattr__(self, "value_dim", self.head_dim)
        if self.value_format == self.format:
            object.__setattr__(self, "value_format", None)
        super().__post_init__()

    def __repr__(self):
        values = "" if self.value_format is None else f", value_format={self.value_format!r}"
        sizes = f"head_dim={self.head_dim!r}, value_dim={self.value_dim!r}"
        return f"{type(self).__name__}(format={self.format!r}, {sizes}{values})"

    @property
    def format_names(self):
        """The format of both, or that of keys and that of values."""
        return (self.format,) if self.value_format is None else (self.format, self.value_format)

    @property
    def description(self):
        """As of other entries, and the format of values if it differs."""
        return [*super().description, *self.format_names[1:]]

    @property
    def codec(self):
        """The registered format, or one made of that of keys and that of values."""
        return super().codec if self.value_format is None else Mixed(*map(FORMATS.__getitem__, self.format_names))

    @property
    def input_dtype(self):
        """That of the values that are not quantised, or bfloat16 if all are."""
        dtypes = [jnp.dtype(FORMATS[name].dtype) for name in self.format_names]
        floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
        return jnp.result_type(*floats) if floats else super().input_dtype

    @property
    def scaled(self):
        """Whether keys have a `k_scale`, and values a `v_scale`."""
        return tuple(FORMATS[name].scaled for name in (self.format, self.format_names[-1]))

    @property
    def named_sizes(self):
        """D under the name "K", Dv under "V"."""
        return {"K": self.head_dim, "V": self.value_dim}

    @property
    def planes(self) -> tuple[tuple[Field, ...], ...]:
        """The byte maps of a key and of a value that lie apart: its values, then its own scales, without padding.

        ValueError if the format has fields that belong to both, or if the sizes leave scales unaligned.
        """
        fields = [field for field in self.fields() if field.name != "padding"]
        found = []
        for name in self.named_sizes:
            own = [field for field in fields if field.name.partition(" ")[0] == name]
            found.append(together(*((field.name, field.dtype, field.count) for field in own)))
        if self.split or sum(map(len, found)) < len(fields):
            raise ValueError(f"{self} is stored as a whole: its keys and values have fields in common")
        for field in (field for plane in found for field in plane):
            if field.offset % field.itemsize:
                raise ValueError(
                    f"{self} is stored as a whole: where keys and values lie apart, {field.name} would begin at byte "
                    f"{field.offset}, expected a multiple of {field.itemsize}"
                )
        return tuple(found)

    def keys_and_values(self, row, dtype, scales=(None, None)) -> tuple[jax.Array, jax.Array]:
        """Converts stored elements [..., width] to keys [..., D] and values [..., Dv] of `dtype`."""
        keys, values = self.decode(row, dtype, scales)
        return keys, values


@dataclass(frozen=True)
class IndexerEntry(Entry):
    """A DeepSeek V3.2 indexer key of `head_dim` values."""

    format: IndexerFormat = "indexer_fp8"
    head_dim: int = 128

    @classmethod
    def for_latents(cls, latents: str, head_dim: int) -> "IndexerEntry":
        """The indexer entry for a model whose latents have format `latents`.

        Its format is that of the latents if `IndexerEntry` supports it, otherwise `indexer_fp8`.  With latents of a
        float format, keys are therefore not quantised, because quantised keys would rank tokens differently.
        """
        return cls(cast(IndexerFormat, latents), head_dim) if latents in cls.formats else cls(head_dim=head_dim)

    def key_and_scale(self, row, dtype) -> tuple[jax.Array, jax.Array]:
        """Converts stored elements [..., width] to keys [..., head_dim] of `dtype` and their float32 scales [..., 1].

        Keys are exact in `dtype`, and the caller multiplies their products with queries by the scales.
        """
        (key,), scale = self.codec.decode_factored(row, self.named_sizes, dtype)
        return key, scale

    @property
    def named_sizes(self):
        """D under the name "key"."""
        return {"key": self.head_dim}
