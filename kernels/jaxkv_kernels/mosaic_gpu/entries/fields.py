"""The fields of an entry: what each stores, and at which byte addresses.  Lanes move fields in chunks."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any

from jaxkv_kernels.addressing.pages import Pages
from jaxkv_kernels.formats import indexer_fp8
from jaxkv_kernels.formats.entries import Entry
from jaxkv_kernels.formats.format import Part
from jaxkv_kernels.formats.latents import fp8_ds_mla

CHUNK = 8
"""Values that a lane moves at once: 16 bytes of bf16."""
WIDEST = 16
"""Bytes of the widest load or store of a lane."""
SMALLEST_EXPONENTS = {
    "fp8_ds_mla": fp8_ds_mla.SMALLEST_EXPONENT,
    "indexer_fp8": indexer_fp8.SMALLEST_EXPONENT,
}
"""The smallest exponent of a scale, by format, for formats that store scales."""


@dataclass(frozen=True)
class PartAddress:
    """Where a part of the entries lies: its first byte, and the strides in bytes of the axes longer than 1."""

    first: int
    strides: tuple[tuple[str, int], ...]

    @property
    def alignment(self) -> int:
        """The alignment of all addresses in bytes, at most `WIDEST`."""
        return gcd(WIDEST, self.first, *(stride for _, stride in self.strides))

    def terms(self, index: dict[str, Any]) -> Iterator[tuple[Any, int]]:
        """Pairs of an index and its stride.  An address is `first` plus the sum of their products."""
        for axis, stride in self.strides:
            yield index[axis], stride


@dataclass(frozen=True)
class Field:
    """One of the arrays of values that an entry stores, such as the latent: a part of the byte map, with its scales."""

    number: int
    """The index of the array among those of the entry."""
    count: int
    stored: str
    """`e4m3`, or the NumPy name of a float dtype."""
    address: PartAddress
    scaled: bool = False
    """Whether values are divided by a scale that the caller keeps."""
    scales: PartAddress | None = None
    """Where the entry's own scales lie."""
    tile: int = 0
    """Values that share a scale of the entry: 128, or all of them."""
    smallest_exponent: int = 0

    @property
    def chunks(self) -> int:
        """The number of chunks per entry."""
        return self.count // CHUNK


def fields_of(entry: Entry, pages: Pages, itemsize: int) -> tuple[Field, ...]:
    """The fields of an entry in a buffer whose elements have `itemsize` bytes."""
    parts = {part.name: part for part in entry.parts(pages.block_size if entry.split else 1)}
    scales = parts.pop("scales", None)
    found = []
    for number, part in enumerate(parts.values()):
        more: dict[str, Any] = {}
        if part.dtype == "e4m3" and scales is not None:
            more = {
                "scales": _address(scales, pages, itemsize),
                "tile": part.count // scales.count,
                "smallest_exponent": SMALLEST_EXPONENTS[entry.format],
            }
        address = _address(part, pages, itemsize)
        found.append(Field(number, part.count, part.dtype, address, entry.codec.scaled, **more))
    return tuple(found)


def _address(part: Part, pages: Pages, itemsize: int) -> PartAddress:
    token = part.step if part.step is not None else pages.token_stride * itemsize
    steps = {
        "layer": (pages.num_layers, pages.layer_stride * itemsize),
        "block": (pages.num_blocks, pages.block_stride * itemsize),
        "head": (pages.num_heads, pages.head_stride * itemsize),
        "token": (pages.block_size, token),
    }
    strides = tuple((axis, stride) for axis, (count, stride) in steps.items() if count > 1)
    return PartAddress(pages.offset * itemsize + part.offset, strides)
