"""Where the entries of a cache lie: `CacheLayout`."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import prod
from typing import Any, Literal, TypeVar, get_args

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxkv.layout.describe import Axis, Description, Run, page_contents, table
from jaxkv.layout.draw import draw, for_notebook
from jaxkv.layout.overlap import Plane, overlapping_entries, overlapping_planes
from jaxkv_kernels.addressing import MAX_SLOTS, Pages, entry_view
from jaxkv_kernels.formats.entries import Entry, IndexerEntry, KVEntry, MLAEntry
from jaxkv_kernels.formats.format import Field
from jaxkv_kernels.formats.states import StateEntry
from jaxkv_kernels.integers import as_int
from jaxkv_kernels.names import expected_one_of

Order = Literal["LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC"]
ORDERS: tuple[Order, ...] = get_args(Order)
"""Physical orders of the axes, outermost first."""

BUFFER_DTYPES = ("bfloat16", "float16", "float32", "uint8", "int8", "uint16", "int16", "uint32", "int32")
"""Dtypes of a buffer.  Not float8: if a device lacks an operation on it, XLA would convert the whole buffer."""

KINDS: dict[str, Any] = {kind.__name__: kind for kind in (MLAEntry, KVEntry, IndexerEntry, StateEntry)}
"""The kinds of entries, by name."""
AXES = {"L": "layer", "B": "block", "H": "head", "N": "token"}


def checked_int(name: str, value, expected="an int", least: int | None = None) -> int:
    """`value` as a Python int; ValueError for anything else (a bool, a float) and below `least`."""
    number = as_int(value)
    if number is None or (least is not None and number < least):
        raise ValueError(f"`{name}` is {value!r}: expected {expected}")
    return number


@dataclass(frozen=True)
class Strides:
    """Distance between neighbours along each axis, in elements of the buffer."""

    layer: int
    block: int
    head: int
    token: int
    content: int = 1


@dataclass(frozen=True)
class TokenShards:
    """How context parallelism divides the tokens of each request: token i is on device `i // interleave % num_shards`.

    A device stores its tokens in its own cache as if they were the whole request, one after the other.  The bytes of a
    block do not show which tokens these are.  The division is therefore part of the layout and of its fingerprint.

    Args:
      num_shards: the number of devices.  1 means that tokens are not divided; `interleave` is then 1, too.
      interleave: consecutive tokens on one device.

    Raises:
      ValueError: an argument is not a positive int.
    """

    num_shards: int = 1
    interleave: int = 1

    def __post_init__(self):
        for name in ("num_shards", "interleave"):
            number = checked_int(name, getattr(self, name), "a positive int (it is static)", least=1)
            object.__setattr__(self, name, number)
        if self.num_shards == 1:
            object.__setattr__(self, "interleave", 1)

    def place(self, tokens):
        """The device of each token, and the token's index among the tokens of that device.

        `tokens` are positions in the request, an int or an array of integers; so are the results.
        """
        rounds = self.num_shards * self.interleave
        index = tokens // rounds * self.interleave + tokens % self.interleave
        return tokens // self.interleave % self.num_shards, index

    def largest_share(self, tokens: int) -> int:
        """How many of the first `tokens` tokens of a request device 0 has; no other device has more of them."""
        rounds, rest = divmod(tokens, self.num_shards * self.interleave)
        return rounds * self.interleave + min(rest, self.interleave)

    def capacity(self, share: int) -> int:
        """The most tokens that a request may have if every device has room for `share` of them."""
        rounds, rest = divmod(share, self.interleave)
        return rounds * self.interleave * self.num_shards + rest


UNDIVIDED = TokenShards()
"""One device has all tokens."""


# Not a type parameter of the functions: pdoc resolves the names in quoted annotations in this module.
Kind = TypeVar("Kind", bound=Entry)


@dataclass(frozen=True, init=False)
class CacheLayout[E: Entry]:
    """The memory layout of a paged cache in one flat buffer: frozen, hashable, static under `jit`.

    Entry (layer, block, head, token) begins at element
    `offset + layer * strides.layer + block * strides.block + head * strides.head + token * strides.token`.
    The keys and values of a `KVEntry` may lie apart, each in a plane of its own: these are then the addresses of keys,
    and those of values are the same sum of `value_offset` and `value_strides`.  Each plane has the values and the
    scales of its own, without padding (`KVEntry.planes`).
    Two layouts that address the same bytes are equal, however they were described.  A group of a `PackedLayout` with
    several groups is equal only to groups of equal blocks.

    Sizes may be ints of any kind, including NumPy's; arithmetic with them is exact.  `dataclasses.replace` keeps
    strides, offset and size unless they are replaced, and checks the result like any other layout.  For a group of a
    `PackedLayout`, it returns an independent layout, no longer part of the packed block.

    Args:
      num_layers: layers (L).
      num_blocks: blocks (B) of `block_size` token slots (N) each.
      block_size: tokens per block; any positive int.
      entry: what one token stores for one head: `MLAEntry`, `KVEntry`, `IndexerEntry` or `StateEntry`.
      num_heads: KV heads (H); 1 for MLA and indexer entries.
      order: physical order of the axes, outermost first, one of `ORDERS`.  `BLNHC` (cross-layer), the default, keeps
        everything that a block needs, in every layer, in one run of memory.  Pages are padded where the entry's format
        requires it (`entry.page_nbytes`).
      block_padding: unused elements after each step of the block axis.  Keep blocks at multiples of 128 bytes where
        speed matters (`packed.ALIGNMENT`); kernels for GPUs need multiples of 16.
      dtype: dtype of the buffer; default the entry's own.  Any dtype whose itemsize divides the entry's bytes is
        allowed (uint8 for a buffer that groups of several dtypes share): entries are stored bit for bit.
      strides: instead of `order` and `block_padding`, as in `from_strides`; `offset` and `size` go with it.
      offset: element of the buffer where entry (0, 0, 0, 0) begins.
      size: elements of the buffer.
      value_offset: element of the buffer where the value of entry (0, 0, 0, 0) begins, before or after the key; by
        default, values follow their keys.
      value_strides: the strides of values, by default `strides`.
      value_size: elements of an array of their own, in which values lie.  The buffer of a cache is then a pair of
        arrays, and `value_offset`, by default 0, counts from the start of the second.
      shards: how the tokens of requests are divided over devices, if this is the layout of one device's cache under
        context parallelism.  It changes no address.

    Raises:
      ValueError: entries overlap (those that interleave without sharing an element do not overlap), addresses are
        outside the buffer, alignment, sizes or dtype are invalid, the entry's format stores keys and values only
        together, or the buffer has more than 2**31 elements and a size without divisors by which to index it in int32;
        the message has the numbers.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_heads: int
    entry: E
    dtype: jnp.dtype
    strides: Strides
    offset: int
    size: int
    """Elements of the whole buffer."""
    shards: TokenShards = UNDIVIDED
    value_strides: Strides | None = None
    """Of values that do not follow their keys; None otherwise, as `value_offset`."""
    value_offset: int | None = None
    value_size: int | None = None
    """Elements of the values' own array; None if one buffer has keys and values."""
    packed: str | None = field(default=None, init=False)
    """The fingerprint of the `PackedLayout` of which this is one of several groups; None otherwise."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        entry: E,
        num_heads: int = 1,
        order: Order | None = None,
        block_padding: int = 0,
        dtype: DTypeLike | None = None,
        strides: Strides | Mapping[str, int] | None = None,
        offset: int = 0,
        size: int | None = None,
        shards: TokenShards = UNDIVIDED,
        value_strides: Strides | Mapping[str, int] | None = None,
        value_offset: int | None = None,
        value_size: int | None = None,
    ):
        self._set_sizes(num_layers, num_blocks, block_size, num_heads, entry, dtype)
        object.__setattr__(self, "shards", checked_shards(shards))
        block_padding = checked_int("block_padding", block_padding, "0 or more elements", least=0)
        offset = checked_int("offset", offset)
        if strides is None:
            if size is not None or offset:
                raise ValueError(f"`size` is {size} and `offset` is {offset}: expected neither without `strides`")
            if (value_strides, value_offset, value_size) != (None, None, None):
                raise ValueError(
                    f"`value_strides` is {value_strides}, `value_offset` is {value_offset} and `value_size` is "
                    f"{value_size}: expected none of them without `strides`"
                )
            self._set_addresses(*self._packed("BLNHC" if order is None else order, block_padding))
        else:
            if order is not None or block_padding:
                raise ValueError(
                    f"`order` is {order!r} and `block_padding` is {block_padding}: expected neither beside `strides`"
                )
            size, strides = checked_int("size", size), _checked_strides("strides", strides)
            if value_strides is not None:
                value_strides = _checked_strides("value_strides", value_strides)
            if value_offset is not None:
                value_offset = checked_int("value_offset", value_offset)
            if value_size is not None:
                object.__setattr__(self, "value_size", checked_int("value_size", value_size))
            self._set_addresses(strides, offset, size, value_strides, value_offset)

    @staticmethod
    def from_strides(
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        entry: Kind,
        strides: Strides | Mapping[str, int],
        size: int,
        num_heads: int = 1,
        offset: int = 0,
        dtype: DTypeLike | None = None,
        shards: TokenShards = UNDIVIDED,
        value_strides: Strides | Mapping[str, int] | None = None,
        value_offset: int | None = None,
        value_size: int | None = None,
    ) -> "CacheLayout[Kind]":
        """A layout of a buffer of `size` elements that another library laid out; strides and offsets in its elements.

        Keys and values may lie apart: an array [2, B, N, H, D] of a layer's keys and values has the strides
        `{"block": N * H * D, "token": H * D, "head": D, "layer": 0}` and the `value_offset` B * N * H * D.
        """
        return CacheLayout(
            num_layers=num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_heads=num_heads,
            entry=entry,
            dtype=dtype,
            strides=_checked_strides("strides", strides),
            offset=offset,
            size=size,
            shards=shards,
            value_strides=value_strides,
            value_offset=value_offset,
            value_size=value_size,
        )

    def _set_sizes(self, num_layers, num_blocks, block_size, num_heads, entry, dtype):
        sizes = {"num_layers": num_layers, "num_blocks": num_blocks, "block_size": block_size, "num_heads": num_heads}
        for name, value in sizes.items():
            object.__setattr__(self, name, checked_int(name, value, "a positive int", least=1))
        if not isinstance(entry, Entry):
            raise ValueError(f"`entry` is {entry!r}: expected an MLAEntry, a KVEntry, an IndexerEntry or a StateEntry")
        if self.num_heads > 1 and entry.one_head:
            raise ValueError(
                f"`num_heads` is {self.num_heads}: a {type(entry).__name__} has one head for all query heads"
            )
        if self.num_slots > MAX_SLOTS:
            raise ValueError(
                f"{self.num_blocks} blocks of {self.block_size} tokens are {self.num_slots} slots: slots are int32, "
                f"so at most {MAX_SLOTS}"
            )
        object.__setattr__(self, "entry", entry)
        object.__setattr__(self, "dtype", entry.dtype if dtype is None else checked_dtype(dtype))
        runs = [region[0].step or entry.nbytes for region in entry.regions()]
        if any(nbytes % self.itemsize for nbytes in runs):
            raise ValueError(
                f"`dtype` is {self.dtype} of {self.itemsize} bytes, which does not divide the "
                f"{' and '.join(map(str, runs))} bytes of {entry}"
            )

    def _packed(self, order: str, block_padding: int) -> tuple[Strides, int, int]:
        """Strides, offset and size of a buffer without gaps, except for the padding of blocks."""
        if order not in ORDERS:
            raise ValueError(f"`order` is {order!r}: {expected_one_of(order, ORDERS)}")
        counts, strides, extent = self._counts, {}, self.width
        for axis in reversed(order[:-1]):
            if axis == "B":
                extent += block_padding
            strides[AXES[axis]] = extent
            extent = self._page_width if axis == "N" and self.entry.split else extent * counts[AXES[axis]]
        return Strides(**strides), 0, extent

    def _set_addresses(self, strides, offset, size, value_strides=None, value_offset=None):
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "offset", offset)
        width, page_width = self.width, self._page_width
        own_array = self.value_size is not None
        if own_array or value_strides is not None or value_offset is not None:
            width, value_width = self._plane_widths()
            page_width = width * self.block_size
            value_strides = strides if value_strides is None else value_strides
            if value_offset is None:
                value_offset = 0 if own_array else offset + width
            stepped = [{axis: vars(of)[axis] for axis in self._stepped} for of in (strides, value_strides)]
            in_planes = [field.name for plane in self.entry.planes for field in plane]
            whole = in_planes == [field.name for field in self.entry.fields()]
            whole &= not own_array
            if whole and stepped[0] == stepped[1] and value_offset == offset + width and value_strides.content == 1:
                width, page_width, value_strides, value_offset = self.width, self._page_width, None, None
            else:
                canonical = self._canonical(
                    value_strides, value_width, value_width * self.block_size, self.value_size or size
                )
                object.__setattr__(self, "value_strides", canonical)
                object.__setattr__(self, "value_offset", value_offset)
        object.__setattr__(self, "strides", self._canonical(strides, width, page_width, size))
        self._check_addresses()
        for part in self.pages.parts:
            entry_view(part)  # ValueError if int32 indices cannot address so large a buffer

    def _canonical(self, given: Strides, width: int, page_width: int, size: int) -> Strides:
        """Strides in which axes of length 1 have the strides of a packed cache of entries of `width` elements.

        Callers may pass any stride there, and kernels divide by strides.
        """
        counts = self._counts
        strides = {axis: getattr(given, axis) for axis in self._stepped}
        strides.setdefault("head", width)
        strides.setdefault("token", width)
        pages = strides["head"] * counts["head"], strides["token"] * counts["token"], page_width
        strides.setdefault("layer", max(pages))
        strides.setdefault("block", size)
        return Strides(**strides, content=given.content)

    @property
    def _counts(self) -> dict[str, int]:
        """The length of each axis."""
        return {"layer": self.num_layers, "block": self.num_blocks, "head": self.num_heads, "token": self.block_size}

    @property
    def _stepped(self) -> list[str]:
        """The axes of more than one step."""
        return [axis for axis, count in self._counts.items() if count > 1]

    def _plane_widths(self) -> list[int]:
        """Elements of a key and of a value that lie apart; ValueError if the entry or the dtype does not allow that."""
        sizes = [sum(field.nbytes for field in plane) for plane in self.entry.planes]
        if any(nbytes % self.itemsize for nbytes in sizes):
            raise ValueError(
                f"`dtype` is {self.dtype} of {self.itemsize} bytes, which does not divide the "
                f"{' and '.join(map(str, sizes))} bytes of keys and values of {self.entry}, which lie apart"
            )
        return [nbytes // self.itemsize for nbytes in sizes]

    @property
    def _planes(self) -> dict[str, tuple[Strides, Plane]]:
        """The strides and the addresses of each "entry", or of each "key" and "value", if these lie apart."""
        parts, counts = self.pages.parts, self._counts
        strides = {"entry": self.strides}
        if self.value_strides is not None:
            strides = {"key": self.strides, "value": self.value_strides}
        return {
            name: (
                own,
                Plane({axis: (counts[axis], vars(own)[axis]) for axis in self._stepped}, part.offset, part.width),
            )
            for (name, own), part in zip(strides.items(), parts, strict=True)
        }

    def _check_addresses(self):
        for name, (strides, plane) in self._planes.items():
            argument = "value_strides" if name == "value" else "strides"
            if strides.content != 1:
                raise ValueError(
                    f"`{argument}.content` is {strides.content}: expected 1, as the content of an entry is contiguous"
                )
            for axis, (count, stride) in plane.axes.items():
                if stride < 1:
                    raise ValueError(
                        f"`{argument}.{axis}` is {stride}: expected at least 1, as the axis has {count} steps"
                    )
        self._check_overlap()
        for name, (strides, plane) in self._planes.items():
            begin, end, size = plane.offset, plane.end, self.size
            if name == "value" and self.value_size is not None:
                size = self.value_size
            if begin < 0 or end > size:
                many = {"entry": "entries", "key": "keys", "value": "values"}[name]
                raise ValueError(
                    f"strides leave the buffer: {many} lie in elements [{begin}, {end}), the buffer has `size` "
                    f"{size} (strides {strides}, counts {self._counts})"
                )
        required = [self.entry.alignment]
        if self.value_strides is not None:
            required = [max(field.itemsize for field in fields) for fields in self.entry.planes]
        planes = (plane for _, plane in self._planes.values())
        if any(self._alignment_of(plane) % least for plane, least in zip(planes, required, strict=True)):
            places = " and ".join(f"offset {plane.offset}, {strides}" for strides, plane in self._planes.values())
            raise ValueError(
                f"entries of format {self.entry.label!r} begin at multiples of {self.entry.alignment} bytes; "
                f"{places}, in elements of {self.itemsize} bytes, keep only {self.alignment}"
            )
        if self.entry.split and self.block_size > 1 and self.strides.token != self.width:
            contents = page_contents(self.entry)
            raise ValueError(
                f"`strides.token` is {self.strides.token}: a page of {self.entry.format} entries is one run of "
                f"{self.block_size} * {self.width} elements ({contents}), so its token stride is the entry's width"
            )

    def _check_overlap(self):
        planes = self._planes
        found = [(name, name, overlapping_entries(plane.axes, plane.width)) for name, (_, plane) in planes.items()]
        if len(planes) > 1 and self.value_size is None:
            found.append(("key", "value", overlapping_planes(*(plane for _, plane in planes.values()))))
        for *names, indices in found:
            if indices is None:
                continue
            places = []
            for name, at in zip(names, indices, strict=True):
                plane = planes[name][1]
                begin = plane.offset + sum(i * plane.axes[axis][1] for axis, i in at.items())
                where = f"{name} ({', '.join(f'{axis} {at.get(axis, 0)}' for axis in self._counts)})"
                places.append((begin, where, begin + plane.width))
            (begin, where, end), (other, there, _) = sorted(places, key=lambda place: place[0])
            strides = " and ".join(str(planes[name][0]) for name in dict.fromkeys(names))
            raise ValueError(
                f"entries overlap: {there} begins at element {other}, and {where} has elements [{begin}, {end}) "
                f"(strides {strides}, counts {self._counts})"
            )

    @property
    def itemsize(self) -> int:
        """Bytes per element of the buffer."""
        return self.dtype.itemsize

    @property
    def width(self) -> int:
        """Elements of the buffer per entry."""
        return self.entry.nbytes // self.itemsize

    @property
    def _page_width(self) -> int:
        """Elements of the buffer per page, padding included."""
        return self.entry.page_nbytes(self.block_size) // self.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return (self.size + (self.value_size or 0)) * self.itemsize

    @property
    def num_slots(self) -> int:
        """Token slots: `num_blocks * block_size`."""
        return self.num_blocks * self.block_size

    @property
    def order(self) -> str:
        """The physical order of the axes, outermost first, read off the strides."""
        strides = vars(self.strides)
        return "".join(sorted("BLNH", key=lambda axis: -strides[AXES[axis]])) + "C"

    @property
    def alignment(self) -> int:
        """The largest power of two, up to 2**20, that divides the address of every entry, in bytes from the start."""
        return min(self._alignment_of(plane) for _, plane in self._planes.values())

    def _alignment_of(self, plane: Plane) -> int:
        steps = [1 << 20, plane.offset, *(stride for _, stride in plane.axes.values())]
        return min((step * self.itemsize) & -(step * self.itemsize) for step in steps if step)

    @property
    def blocks_are_runs(self) -> bool:
        """Whether a block, including its padding and other groups packed in it, is one run of memory."""
        return self.pages.blocks_are_runs

    @property
    def is_block_contiguous(self) -> bool:
        """Whether the entries of a block, in all layers, are one run of memory without a gap."""
        return self._is_run("layer", "head", "token")

    @property
    def is_layer_contiguous(self) -> bool:
        """Whether the entries of a layer, in all blocks, are one run of memory without a gap."""
        return self._is_run("block", "head", "token")

    def _is_run(self, *axes):
        begins, ends, elements = [], [], 0
        for _, plane in self._planes.values():
            inner = [plane.axes[axis] for axis in axes if axis in plane.axes]
            begins.append(plane.offset)
            ends.append(plane.offset + plane.width + sum((count - 1) * stride for count, stride in inner))
            elements += plane.width * prod(count for count, _ in inner)
        return self.value_size is None and max(ends) - min(begins) == elements  # entries do not overlap

    @property
    def block_nbytes(self) -> int:
        """Bytes of an exported block (`read_blocks`): the whole run, or only the entries if blocks are not runs."""
        return self.pages.block_elements * self.itemsize

    @cached_property
    def pages(self) -> Pages:
        """The addresses, as kernels expect them."""
        if self.value_strides is None or self.value_offset is None:
            return self._pages(self.strides, self.offset, self.width)
        width, value_width = self._plane_widths()
        values = self._pages(self.value_strides, self.value_offset, value_width)
        if self.value_size is not None:
            values = replace(values, size=self.value_size, own_array=True)
        return self._pages(self.strides, self.offset, width, values)

    def _pages(self, strides: Strides, offset: int, width: int, values: Pages | None = None) -> Pages:
        return Pages(
            num_layers=self.num_layers,
            num_blocks=self.num_blocks,
            num_heads=self.num_heads,
            block_size=self.block_size,
            layer_stride=strides.layer,
            block_stride=strides.block,
            head_stride=strides.head,
            token_stride=strides.token,
            offset=offset,
            width=width,
            size=self.size,
            values=values,
        )

    @property
    def fingerprint(self) -> str:
        """A stable name (32 hex digits) for the contents of an exported block and their order.

        Two caches may exchange blocks only if their fingerprints agree.  It covers the entry, the counts and strides
        inside a block, the padding, and how tokens are divided over devices (`shards`).  It does not cover the number
        of blocks, nor the stride of an axis of length 1.  A group of a `PackedLayout` has the fingerprint of the whole,
        because blocks are exported with all groups.
        """
        return self.packed or fingerprint(self._block_description())

    def _block_description(self) -> dict[str, Any]:
        keys, *values = (self._part_description(part) for part in self.pages.exported.parts)
        divided = {"shards": [self.shards.num_shards, self.shards.interleave]} if self.shards.num_shards > 1 else {}
        return {
            "entry": self.entry.description,
            "counts": [self.num_layers, self.num_heads, self.block_size],
            **keys,
            "block_bytes": self.block_nbytes,
            "dtype": str(self.dtype),
            **({"values": values[0]} if values else {}),
            **divided,
        }

    def _part_description(self, part: Pages) -> dict[str, Any]:
        page_width = self._page_width if self.value_strides is None else part.width * self.block_size
        given = Strides(part.layer_stride, part.block_stride, part.head_stride, part.token_stride)
        # Blocks of the same bytes have the same name, whatever the stride of an axis of length 1.
        strides = vars(self._canonical(given, part.width, page_width, part.size))
        return {
            "strides_bytes": [strides[axis] * self.itemsize for axis in ("layer", "head", "token")],
            "offset_bytes": part.offset * self.itemsize,
        }

    def to_json(self) -> str:
        """The layout as a JSON text, of which `from_json` makes an equal layout in any process."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        entry = {"kind": type(self.entry).__name__, **self.entry.arguments}
        return json.dumps(own | {"entry": entry, "dtype": str(self.dtype)}, default=vars)

    @staticmethod
    def from_json(text: str) -> "CacheLayout[Any]":
        """The layout of a text that `to_json` made.

        Raises:
          ValueError: `text` is another text, such as one with an entry of a format that is not registered here.
        """
        try:
            own = json.loads(text)
            if set(own) != {field.name for field in fields(CacheLayout)}:
                raise KeyError(*own)
            packed, shards, entry = own.pop("packed"), own.pop("shards"), own.pop("entry")
            if not isinstance(packed, str | None):
                raise TypeError(packed)
            entry = KINDS[entry.pop("kind")](**entry)
            layout = CacheLayout(**own, entry=entry, shards=TokenShards(**shards))
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"`text` is {text[:200]!r}: expected a text that `CacheLayout.to_json` made") from error
        object.__setattr__(layout, "packed", packed)
        return layout

    def describe(self) -> Description:
        """The layout in plain numbers, for the table and the memory map."""
        names = ("entries",) if self.value_strides is None else ("keys", "values")
        fields = [self.entry.fields()] if self.value_strides is None else self.entry.planes
        return Description(
            entry=self.entry,
            block_size=self.block_size,
            runs=tuple(
                self._describe_run(name, part, own)
                for name, part, own in zip(names, self.pages.parts, fields, strict=True)
            ),
            order=self.order,
            nbytes=self.nbytes,
            block_nbytes=self.block_nbytes,
            dtype=str(self.dtype),
            itemsize=self.itemsize,
            alignment=self.alignment,
            blocks_are_runs=self.blocks_are_runs,
            is_block_contiguous=self.is_block_contiguous,
            is_layer_contiguous=self.is_layer_contiguous,
            fingerprint=self.fingerprint,
            shards=(self.shards.num_shards, self.shards.interleave),
        )

    def _describe_run(self, name: str, part: Pages, fields: Sequence[Field]) -> Run:
        strides = {axis: vars(part)[f"{axis}_stride"] for axis in AXES.values()}
        # The sort is stable: of axes with equal strides, those of length 1, the order stays.
        axes = sorted((AXES[x] for x in self.order if x in AXES), key=lambda axis: -strides[axis])
        return Run(
            name=name,
            fields=tuple(fields),
            axes=tuple(Axis(axis, self._counts[axis], strides[axis] * self.itemsize) for axis in axes),
            offset=part.offset * self.itemsize,
            nbytes=part.width * self.itemsize,
            own_array=part.own_array,
        )

    def __str__(self):
        return table({"": self.describe()})

    def draw(self, path=None):
        """The memory map as a matplotlib figure, saved if `path` is given (.svg or .png)."""
        return draw({"": self.describe()}, path)

    def _repr_svg_(self):
        return for_notebook({"": self.describe()})


def checked_shards(shards) -> TokenShards:
    """`shards` as it is; ValueError unless it is TokenShards."""
    if not isinstance(shards, TokenShards):
        raise ValueError(f"`shards` is {shards!r}: expected TokenShards, such as `cache.layout.shards`")
    return shards


def _checked_strides(name: str, strides) -> Strides:
    """`strides` as Strides of Python ints."""
    given = vars(strides) if isinstance(strides, Strides) else strides
    axes = tuple(AXES.values())
    if not isinstance(given, Mapping) or not {*axes} <= {*given} <= {*axes, "content"}:
        raise ValueError(f"`{name}` is {strides!r}: expected Strides, or a mapping with {', '.join(axes)}")
    return Strides(**{axis: checked_int(f"{name}.{axis}", stride) for axis, stride in given.items()})


def checked_dtype(dtype: Any) -> jnp.dtype:
    """`dtype` as a jnp dtype; ValueError unless it is one of `BUFFER_DTYPES`."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        raise ValueError(f"`dtype` is {dtype!r}: expected a dtype, or the name of one") from None
    if str(found) not in BUFFER_DTYPES:
        raise ValueError(f"`dtype` is {found}: expected one of {', '.join(BUFFER_DTYPES)}")
    return found


def fingerprint(description) -> str:
    """32 hex digits of a JSON-able description."""
    text = json.dumps(description, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"jaxkv block 1 {text}".encode()).hexdigest()[:32]
