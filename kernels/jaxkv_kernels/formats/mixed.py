"""Keys in one format and values in another, each stored as that format stores an array of its own."""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxkv_kernels.formats.bits import view_as
from jaxkv_kernels.formats.format import Field, Format, together

PADDED = 16
"""Bytes to a multiple of which keys and values are padded, as copies by TMA require."""


@dataclass(frozen=True)
class Mixed(Format):
    """The key as an entry that consists of a key alone, and the value likewise, each padded with zeros.

    It has no name, and is not registered: a `KVEntry` that has a `value_format` makes it from two registered formats.
    """

    keys: Format
    values: Format

    kinds = ()

    @property
    def parts(self) -> tuple[Format, Format]:
        """The formats of keys and of values."""
        return self.keys, self.values

    @property
    def dtype(self) -> str:  # type: ignore[bad-override]
        """That of both formats, or "uint8"."""
        return self.keys.dtype if self.keys.dtype == self.values.dtype else "uint8"

    @property
    def scaled(self) -> bool:  # type: ignore[bad-override]
        """Whether keys or values have a scale: `Entry.scaled` says which."""
        return self.keys.scaled or self.values.scaled

    @property
    def in_float32(self) -> bool:  # type: ignore[bad-override]
        """Whether attention multiplies keys or values in float32."""
        return self.keys.in_float32 or self.values.in_float32

    def fields(self, sizes, block_size):
        """The values and the scales of K and padding, then those of V."""
        specs = []
        for (name, count), part in zip(sizes.items(), self.parts, strict=True):
            fields = part.fields({name: count}, 1)
            self._check(part, name, fields)
            padding = -_nbytes(fields) % PADDED
            specs += [(field.name, field.dtype, field.count) for field in fields]
            specs += [("padding", "uint8", padding)] * (padding > 0)
        return together(*specs)

    def _check(self, part: Format, name: str, fields: tuple[Field, ...]):
        """ValueError unless the fields of an array lie together and are its own."""
        others = [field.name for field in fields if field.name.partition(" ")[0] not in (name, "padding")]
        if others or fields[0].step is not None:
            raise ValueError(
                f"format {part.name!r} stores keys and values only together: expected the same format for both"
            )

    def encode(self, values, scales):
        """Encodes each array in its format."""
        rows = []
        for part, x, scale in zip(self.parts, values, scales, strict=True):
            row = view_as(part.encode([x], [scale]), self.dtype)
            unit = PADDED // row.dtype.itemsize
            rows += [row, jnp.zeros((*row.shape[:-1], -row.shape[-1] % unit), row.dtype)]
        return jnp.concatenate(rows, axis=-1)

    def decode(self, row, sizes, scales, dtype):
        """Decodes each array from its format."""
        item, first, values = row.dtype.itemsize, 0, []
        for part, (name, count), scale in zip(self.parts, sizes.items(), scales, strict=True):
            nbytes = _nbytes(part.fields({name: count}, 1))
            own = view_as(row[..., first // item : (first + nbytes) // item], part.dtype)
            values += part.decode(own, {name: count}, [scale], dtype)
            first += nbytes + -nbytes % PADDED
        return values


def _nbytes(fields: tuple[Field, ...]) -> int:
    return sum(field.nbytes for field in fields)
