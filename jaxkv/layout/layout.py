"""Where the entries of a cache lie: `CacheLayout`."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar, get_args

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxkv.layout.describe import Axis, Description, page_contents, table
from jaxkv.layout.draw import draw, svg
from jaxkv.layout.overlap import overlapping_entries
from jaxkv_kernels.addressing import MAX_SLOTS, Pages, entry_view
from jaxkv_kernels.formats.entries import Entry
from jaxkv_kernels.integers import as_int

Order = Literal["LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC"]
ORDERS: tuple[Order, ...] = get_args(Order)
"""Physical orders of the axes, outermost first."""

BUFFER_DTYPES = ("bfloat16", "float16", "float32", "uint8", "int8", "uint16", "int16", "uint32", "int32")
"""Dtypes of a buffer.  Not float8: if a device lacks an operation on it, XLA would convert the whole buffer."""

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
    part: int = 0
    """From the key of an entry to its value, where they lie apart; 0 if the value follows the key."""


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


UNDIVIDED = TokenShards()
"""One device has all tokens."""


# Not a type parameter of the functions: pdoc resolves the names in quoted annotations in this module.
Kind = TypeVar("Kind", bound=Entry)


@dataclass(frozen=True, init=False)
class CacheLayout[E: Entry]:
    """The memory layout of a paged cache in one flat buffer: frozen, hashable, static under `jit`.

    Entry (layer, block, head, token) begins at element
    `offset + layer * strides.layer + block * strides.block + head * strides.head + token * strides.token`.
    Keys and values may lie apart, in planes of their own: the value then begins `strides.part` elements after the key.
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
      shards: how the tokens of requests are divided over devices, if this is the layout of one device's cache under
        context parallelism.  It changes no address.

    Raises:
      ValueError: entries overlap (those that interleave without sharing an element do not overlap), addresses are
        outside the buffer, alignment, sizes or dtype are invalid, or the buffer has more than 2**31 elements and a size
        without divisors by which to index it in int32; the message has the numbers.
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
    ):
        self._set_sizes(num_layers, num_blocks, block_size, num_heads, entry, dtype)
        object.__setattr__(self, "shards", checked_shards(shards))
        block_padding = checked_int("block_padding", block_padding, "0 or more elements", least=0)
        offset = checked_int("offset", offset)
        if strides is None:
            if size is not None or offset:
                raise ValueError(f"`size` is {size} and `offset` is {offset}: expected neither without `strides`")
            self._set_addresses(*self._packed("BLNHC" if order is None else order, block_padding))
        else:
            if order is not None or block_padding:
                raise ValueError(
                    f"`order` is {order!r} and `block_padding` is {block_padding}: expected neither beside `strides`"
                )
            self._set_addresses(_checked_strides(strides), offset, checked_int("size", size))

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
    ) -> "CacheLayout[Kind]":
        """A layout of a buffer of `size` elements that another library laid out; strides and offset in its elements.

        `strides` may have a `part` if keys and values lie apart: an array [2, B, N, H, D] of a layer's keys and values
        has the strides `{"part": B * N * H * D, "block": N * H * D, "token": H * D, "head": D, "layer": 0}`.
        """
        return CacheLayout(
            num_layers=num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_heads=num_heads,
            entry=entry,
            dtype=dtype,
            strides=_checked_strides(strides),
            offset=offset,
            size=size,
            shards=shards,
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
            raise ValueError(f"`order` is {order!r}: expected one of {', '.join(ORDERS)}")
        counts, strides, extent = self._counts(False), {}, self.width
        for axis in reversed(order[:-1]):
            if axis == "B":
                extent += block_padding
            strides[AXES[axis]] = extent
            extent = self._page_width if axis == "N" and self.entry.split else extent * counts[AXES[axis]]
        return Strides(**strides), 0, extent

    def _set_addresses(self, strides, offset, size):
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "offset", offset)
        self._check_part(strides)
        object.__setattr__(self, "strides", self._canonical(strides, size))
        self._check_addresses()
        entry_view(self.pages)  # ValueError if int32 indices cannot address so large a buffer

    def _canonical(self, given: Strides, size: int) -> Strides:
        """Strides in which axes of length 1 have the strides of a packed cache.

        Callers may pass any stride there, and kernels divide by strides.  A value that follows its key is part of the
        same run.
        """
        if 2 * given.part == self.width:
            given = replace(given, part=0)
        counts = self._counts(bool(given.part))
        run = self.width // counts.get("part", 1)
        strides = {axis: getattr(given, axis) for axis in counts if counts[axis] > 1}
        strides.setdefault("head", run)
        strides.setdefault("token", run)
        pages = strides["head"] * counts["head"], strides["token"] * counts["token"], self._page_width
        strides.setdefault("layer", max(pages))
        strides.setdefault("block", size)
        return Strides(**strides, content=given.content)

    def _counts(self, apart: bool | None = None) -> dict[str, int]:
        """The length of each axis.  `part` is one if keys and values lie `apart`, by default as the strides say."""
        counts = {"layer": self.num_layers, "block": self.num_blocks, "head": self.num_heads, "token": self.block_size}
        return counts | ({"part": 2} if (self.strides.part if apart is None else apart) else {})

    def _check_part(self, strides: Strides):
        """ValueError if keys and values lie apart, and the entry is not just a key and a value of the same size."""
        if not strides.part:
            return
        parts = [(part.name, part.nbytes) for part in self.entry.fields()]
        if self.entry.split or [name for name, _ in parts] != ["K", "V"] or parts[0][1] != parts[1][1]:
            raise ValueError(
                f"`strides.part` is {strides.part}: expected 0 for {self.entry}, as only keys and values of equal "
                "size, without scales in the entry, may lie apart"
            )
        if self.width % 2:
            raise ValueError(
                f"`dtype` is {self.dtype}, which does not divide the keys of {self.entry}, which lie apart"
            )

    def _check_addresses(self):
        counts, strides = self._counts(), vars(self.strides)
        if self.strides.content != 1:
            raise ValueError(
                f"`strides.content` is {self.strides.content}: expected 1, as the content of an entry is contiguous"
            )
        stepped = {axis: (count, strides[axis]) for axis, count in counts.items() if count > 1}
        for axis, (count, stride) in stepped.items():
            if stride < 1:
                raise ValueError(f"`strides.{axis}` is {stride}: expected at least 1, as the axis has {count} steps")
        run = self.pages.width
        if found := overlapping_entries(stepped, run):
            names = [f"({', '.join(f'{axis} {entry.get(axis, 0)}' for axis in counts)})" for entry in found]
            begins = [self.offset + sum(i * strides[axis] for axis, i in entry.items()) for entry in found]
            raise ValueError(
                f"entries overlap: entry {names[1]} begins at element {begins[1]}, and entry {names[0]} has elements "
                f"[{begins[0]}, {begins[0] + run}) (strides {self.strides}, counts {counts})"
            )
        end = run + sum((count - 1) * stride for count, stride in stepped.values())
        if self.offset < 0 or self.offset + end > self.size:
            raise ValueError(
                f"strides leave the buffer: entries lie in elements [{self.offset}, {self.offset + end}), the buffer "
                f"has `size` {self.size} (strides {self.strides}, counts {counts})"
            )
        if self.alignment % self.entry.alignment:
            raise ValueError(
                f"entries of format {self.entry.format!r} begin at multiples of {self.entry.alignment} bytes; "
                f"offset {self.offset} and strides {self.strides}, in elements of {self.itemsize} bytes, keep only "
                f"{self.alignment}"
            )
        if self.entry.split and self.block_size > 1 and self.strides.token != self.width:
            contents = page_contents(self.entry)
            raise ValueError(
                f"`strides.token` is {self.strides.token}: a page of {self.entry.format} entries is one run of "
                f"{self.block_size} * {self.width} elements ({contents}), so its token stride is the entry's width"
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
        return self.size * self.itemsize

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
        counts, strides = self._counts(), vars(self.strides)
        steps = [self.offset, *(strides[axis] for axis in counts if counts[axis] > 1), 1 << 20]
        return min((step * self.itemsize) & -(step * self.itemsize) for step in steps if step)

    @property
    def blocks_are_runs(self) -> bool:
        """Whether a block, including its padding and other groups packed in it, is one run of memory."""
        return self.pages.blocks_are_runs

    @property
    def is_block_contiguous(self) -> bool:
        """Whether the entries of a block, in all layers, are one run of memory without a gap."""
        return self._is_run("layer", "head", "token", "part")

    @property
    def is_layer_contiguous(self) -> bool:
        """Whether the entries of a layer, in all blocks, are one run of memory without a gap."""
        return self._is_run("block", "head", "token", "part")

    def _is_run(self, *axes):
        counts, strides = self._counts(), vars(self.strides)
        end = self.pages.width
        for axis in sorted((a for a in axes if counts.get(a, 1) > 1), key=lambda a: strides[a]):
            if strides[axis] != end:
                return False
            end *= counts[axis]
        return True

    @property
    def block_nbytes(self) -> int:
        """Bytes of an exported block (`read_blocks`): the whole run, or only the entries if blocks are not runs."""
        return self.pages.block_elements * self.itemsize

    @cached_property
    def pages(self) -> Pages:
        """The addresses, as kernels expect them."""
        return Pages(
            num_layers=self.num_layers,
            num_blocks=self.num_blocks,
            num_heads=self.num_heads,
            block_size=self.block_size,
            layer_stride=self.strides.layer,
            block_stride=self.strides.block,
            head_stride=self.strides.head,
            token_stride=self.strides.token,
            offset=self.offset,
            width=self.width // self._counts().get("part", 1),
            size=self.size,
            num_parts=self._counts().get("part", 1),
            part_stride=self.strides.part,
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
        inner = {axis: stride for axis, _, stride in self.pages.row_axes}
        apart = {"part_bytes": inner["part"] * self.itemsize} if "part" in inner else {}
        divided = {"shards": [self.shards.num_shards, self.shards.interleave]} if self.shards.num_shards > 1 else {}
        # Blocks of the same bytes have the same name, whatever the stride of an axis of length 1.
        strides = vars(self._canonical(Strides(block=0, **inner), 0))
        return {
            "entry": self.entry.description,
            "counts": [self.num_layers, self.num_heads, self.block_size],
            "strides_bytes": [strides[axis] * self.itemsize for axis in ("layer", "head", "token")],
            "offset_bytes": self.pages.row_offset * self.itemsize,
            "block_bytes": self.block_nbytes,
            "dtype": str(self.dtype),
            **apart,
            **divided,
        }

    def describe(self) -> Description:
        """The layout in plain numbers, for the table and the memory map."""
        counts, strides = self._counts(), vars(self.strides)
        # The sort is stable: of axes with equal strides, those of length 1, the order stays.
        names = [*(AXES[x] for x in self.order if x in AXES), *(["part"] if "part" in counts else [])]
        axes = sorted(names, key=lambda axis: -strides[axis])
        return Description(
            entry=self.entry,
            block_size=self.block_size,
            axes=tuple(Axis(axis, counts[axis], strides[axis] * self.itemsize) for axis in axes),
            order=self.order,
            offset=self.offset * self.itemsize,
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

    def __str__(self):
        return table({"": self.describe()})

    def draw(self, path=None):
        """The memory map as a matplotlib figure, saved if `path` is given (.svg or .png)."""
        return draw({"": self.describe()}, path)

    def _repr_svg_(self):
        return svg({"": self.describe()})


def checked_shards(shards) -> TokenShards:
    """`shards` as it is; ValueError unless it is TokenShards."""
    if not isinstance(shards, TokenShards):
        raise ValueError(f"`shards` is {shards!r}: expected TokenShards, such as `cache.layout.shards`")
    return shards


def _checked_strides(strides) -> Strides:
    """`strides` as Strides of Python ints."""
    given = vars(strides) if isinstance(strides, Strides) else strides
    axes = tuple(AXES.values())
    if not isinstance(given, Mapping) or not {*axes} <= {*given} <= {*axes, "content", "part"}:
        raise ValueError(f"`strides` is {strides!r}: expected Strides, or a mapping with {', '.join(axes)}")
    return Strides(**{axis: checked_int(f"strides.{axis}", stride) for axis, stride in given.items()})


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
