"""The fields of an entry: what each stores, and at which byte addresses.  Lanes move fields in chunks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from jaxkv_kernels import formats
from jaxkv_kernels.addressing import Pages
from jaxkv_kernels.formats.entries import Entry
from jaxkv_kernels.formats.scales import NO_SCALES, RULES, ScaleRule

CHUNK = 8
"""Values that a lane moves at once: 16 bytes of bf16."""
WIDEST = 16
"""Bytes of the widest load or store of a lane."""


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
    """`e4m3`, `e2m1x2`, or the NumPy name of a dtype."""
    address: PartAddress
    scaled: bool = False
    """Whether values are divided by a scale that the caller keeps."""
    scales: PartAddress | None = None
    """Where the entry's own scales lie."""
    rule: ScaleRule = NO_SCALES
    """How they are computed."""
    tile: int = 0
    """Values that share a scale of the entry, which divide 256, or all of them."""
    padding: tuple[PartAddress, int] | None = None
    """Bytes after the scales that are stored as zeros: where they begin, and how many."""

    @property
    def chunks(self) -> int:
        """The number of chunks per entry."""
        return self.count // CHUNK

    @property
    def num_scales(self) -> int:
        """The number of scales per entry."""
        return self.count // self.tile


def fields_of(entry: Entry, pages: Pages, itemsize: int) -> tuple[Field, ...]:
    """The fields of an entry in a buffer whose elements have `itemsize` bytes."""
    planes = [entry.fields(pages.block_size if entry.split else 1)] if pages.values is None else entry.planes
    parts = {part.name: part for plane in planes for part in plane}
    addresses = {
        part.name: _address(part, own, itemsize)
        for plane, own in zip(planes, pages.parts, strict=True)
        for part in plane
    }
    values = [part for name, part in parts.items() if "scales" not in name and name != "padding"]
    rule, padding, found = RULES.get(entry.format, NO_SCALES), parts.get("padding"), []
    zeros = None if padding is None else (addresses["padding"], padding.count)
    for number, (part, count) in enumerate(zip(values, entry.sizes, strict=True)):
        field = Field(number, count, part.dtype, addresses[part.name], entry.codec.scaled)
        if part.dtype == rule.values:
            whole = next(part for name, part in parts.items() if "scales" in name)
            scales = parts.get(f"{part.name} scales", whole)
            field = replace(field, scales=addresses[scales.name], rule=rule, tile=count // scales.count, padding=zeros)
        found.append(field)
    return tuple(found)


def _address(part: formats.Field, pages: Pages, itemsize: int) -> PartAddress:
    token = part.step if part.step is not None else pages.token_stride * itemsize
    steps = {
        "layer": (pages.num_layers, pages.layer_stride * itemsize),
        "block": (pages.num_blocks, pages.block_stride * itemsize),
        "head": (pages.num_heads, pages.head_stride * itemsize),
        "token": (pages.block_size, token),
    }
    strides = tuple((axis, stride) for axis, (count, stride) in steps.items() if count > 1)
    return PartAddress(pages.offset * itemsize + part.offset, strides)
