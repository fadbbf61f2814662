"""`PackedLayout`: several groups of layers, each with its own entry, packed in the blocks of one buffer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from jax.typing import DTypeLike

from jaxkv.layout.describe import Description, table
from jaxkv.layout.draw import draw, for_notebook
from jaxkv.layout.layout import (
    UNDIVIDED,
    CacheLayout,
    Strides,
    TokenShards,
    checked_dtype,
    checked_int,
    checked_shards,
    fingerprint,
)
from jaxkv_kernels.formats.entries import Entry
from jaxkv_kernels.names import expected_one_of

ALIGNMENT = 128
"""Bytes to which the region of each group, and the block, are rounded up by default.

Kernels for GPUs require 16.  The default is the length of a cache line, so that a row of whole lines touches no others.
Attention to blocks that begin 16 bytes after a multiple of 128 takes 5 to 9 % longer (H200, `MLAEntry` bf16).
"""


@dataclass(frozen=True)
class Group:
    """Layers that store the same entry.

    Args:
      num_layers: the layers that have such entries, which may be fewer than the model's.
      entry: what each of them stores.
      num_heads: KV heads; 1 unless the entry is a `KVEntry`.
      rate: tokens per entry.  Entry w of a request covers the tokens [w * rate, (w + 1) * rate): compressed keys, or a
        state per block, whose rate is the block size of its table.
      table: the name of the block tables with which the group is addressed.  Groups of one table share its blocks.
      window: how many of the last tokens of a request its entries are read of; None for all.  Blocks of a table whose
        groups all have a window are needed no longer when the longest window has passed them.  A state is read only
        where it was written last: its window is 1.

    Raises:
      ValueError: `num_layers`, `num_heads`, `rate` or `window` is not a positive int, or `table` is not a string.
    """

    num_layers: int
    entry: Entry
    num_heads: int = 1
    rate: int = 1
    table: str = ""
    window: int | None = None

    def __post_init__(self):
        for name, expected in (
            ("num_layers", "a positive int"),
            ("num_heads", "a positive int"),
            ("rate", "a positive int, tokens per entry"),
        ):
            object.__setattr__(self, name, checked_int(name, getattr(self, name), expected, least=1))
        if self.window is not None:
            expected = "None, or a positive int, a number of tokens"
            object.__setattr__(self, "window", checked_int("window", self.window, expected, least=1))
        if not isinstance(self.table, str):
            raise ValueError(f"`table` is {self.table!r}: expected a string, the name of a block table")

    def __repr__(self):
        given = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return f"Group({', '.join(f'{name}={value!r}' for name, value, default in given if value != default)})"


@dataclass(frozen=True)
class Table:
    """What one of the block tables of a request addresses."""

    block_size: int
    """Tokens per block."""
    window: int | None
    """Blocks that lie before the last `window` tokens of a request are not read any more; None if all are."""
    groups: tuple[str, ...]
    """The names of the groups in its blocks."""


class PackedLayout(Mapping[str, CacheLayout]):
    """Layouts, by name, of groups whose entries lie side by side in every block of one buffer.

    A block is one run of memory with everything that its tokens need, such as the latents of all layers and then the
    indexer keys of all layers.  Each group is an ordinary `CacheLayout` over the shared buffer:

        packed = PackedLayout(num_blocks=64, block_size=64, groups={
            "latent": Group(61, MLAEntry("bf16")), "indexer": Group(61, IndexerEntry())})
        cache = KVCache.zeros(packed["latent"])
        cache = write_mla(cache, ...)
        cache = write_indexer_k(cache.view(packed["indexer"]), ...)

    A group that stores one entry per several tokens (`Group.rate`) has as many fewer entries per block, and
    `packed[name].block_size` is their number.  Entry w of a request has the slot

        slots_for(block_tables, w, packed[name])

    Groups of other tables have blocks of their own, of the same number of bytes, from the same buffer.  A request then
    has a list of blocks per table (`tables`).  A block belongs to one table at a time.

    Args:
      num_blocks: the blocks of all tables together.
      block_size: tokens per block.  With several tables, an int for all of them, or a mapping of their names to ints.
        Each is a multiple of the rates of the table's groups.
      groups: the groups, in the order in which they lie in a block.
      order: order of the axes within a block: one of the block-major orders.
      dtype: dtype of the buffer; default the dtype of the entries if all have the same, else uint8.
      alignment: bytes to which the region of each group, and the block, are rounded up: a multiple of the bytes of an
        element.  It changes the fingerprint where something is rounded.
      shards: how the tokens of requests are divided over devices, as in `CacheLayout`; supported if all groups have one
        entry per token and no window, in one table without a name.

    Raises:
      ValueError: an argument is invalid, or a block size is not a multiple of a rate; the message has the numbers.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int | Mapping[str, int],
        groups: Mapping[str, Group],
        order: Literal["BLNHC", "BLHNC", "BHLNC"] = "BLNHC",
        dtype: DTypeLike | None = None,
        alignment: int = ALIGNMENT,
        shards: TokenShards = UNDIVIDED,
    ):
        if order not in (orders := ("BLNHC", "BLHNC", "BHLNC")):
            raise ValueError(f"`order` is {order!r}: a packed block is one run, so {expected_one_of(order, orders)}")
        if not isinstance(groups, Mapping) or not all(isinstance(group, Group) for group in groups.values()):
            raise ValueError(f"`groups` is {groups!r}: expected a mapping of names to Groups")
        if not groups:
            raise ValueError(f"`groups` is {groups!r}, empty: expected at least one Group")
        num_blocks = checked_int("num_blocks", num_blocks, "a positive int", least=1)
        natural = {group.entry.dtype for group in groups.values()}
        default_dtype = natural.pop() if len(natural) == 1 else "uint8"
        dtype = checked_dtype(dtype or default_dtype)
        alignment = checked_int("alignment", alignment, "a positive int", least=1)
        if alignment % dtype.itemsize:
            raise ValueError(
                f"`alignment` is {alignment} bytes: expected a multiple of the {dtype.itemsize} of {dtype}"
            )
        self.groups = dict(groups)
        """The groups by name, as they were passed."""
        if checked_shards(shards).num_shards > 1 and not self._is_plain:
            raise ValueError(
                f"`shards` is {shards}: expected groups with one entry per token and no window, in one table without a "
                "name, because only their tokens can be divided over devices"
            )
        options = {
            "order": (order, "BLNHC"),
            "dtype": (str(dtype), str(default_dtype)),
            "alignment": (alignment, ALIGNMENT),
            "shards": (shards, UNDIVIDED),
        }
        self._options = {name: value for name, (value, default) in options.items() if value != default}
        self.tables = _tables(self.groups, block_size)
        """The tables by name, in the order of their first groups."""
        unit = alignment // dtype.itemsize
        alone = {
            name: CacheLayout(
                num_layers=group.num_layers,
                num_blocks=2,
                block_size=self.tables[group.table].block_size // group.rate,
                num_heads=group.num_heads,
                entry=group.entry,
                order=order,
                dtype=dtype,
            )
            for name, group in groups.items()
        }
        offsets, ends = {}, dict.fromkeys(self.tables, 0)
        for name, layout in alone.items():
            offsets[name] = ends[groups[name].table]
            ends[groups[name].table] += -(-layout.strides.block // unit) * unit
        block = max(ends.values())
        self._layouts = {
            name: CacheLayout.from_strides(
                num_layers=layout.num_layers,
                num_blocks=num_blocks,
                block_size=layout.block_size,
                num_heads=layout.num_heads,
                entry=layout.entry,
                strides=Strides(layout.strides.layer, block, layout.strides.head, layout.strides.token),
                offset=offsets[name],
                size=num_blocks * block,
                dtype=dtype,
                shards=shards,
            )
            for name, layout in alone.items()
        }
        if len(self) > 1 or not self._is_plain:
            whole = fingerprint(self._block_description())
            for layout in self.values():
                object.__setattr__(layout, "packed", whole)

    def __getitem__(self, name: str) -> CacheLayout:
        return self._layouts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layouts)

    def __len__(self) -> int:
        return len(self._layouts)

    def __hash__(self) -> int:
        return hash(tuple(self.items()))

    @property
    def _is_plain(self) -> bool:
        """Whether all groups have one entry per token, without a window, in one table without a name."""
        return all(group == Group(group.num_layers, group.entry, group.num_heads) for group in self.groups.values())

    def _block_description(self) -> Any:
        blocks = {name: layout.fingerprint for name, layout in self.items()}
        if self._is_plain:
            return blocks
        tables = {name: [about.block_size, about.window] for name, about in self.tables.items()}
        return [blocks, tables, {name: [group.table, group.rate, group.window] for name, group in self.groups.items()}]

    @property
    def fingerprint(self) -> str:
        """Like `CacheLayout.fingerprint`, for a block with all its groups; each group has the same."""
        return next(iter(self.values())).fingerprint

    def describe(self) -> dict[str, Description]:
        """The groups in plain numbers, for the table and the memory map."""
        return {name: self._describe(name, group) for name, group in self.groups.items()}

    def _describe(self, name: str, group: Group) -> Description:
        notes = [
            f"one entry per {group.rate:,} tokens" * (group.rate > 1),
            f"table {group.table!r}" * (len(self.tables) > 1),
            "" if group.window is None else f"window of {group.window:,} token{'s' * (group.window > 1)}",
        ]
        return replace(self[name].describe(), table=group.table, note=", ".join(filter(None, notes)))

    def __repr__(self):
        sizes = {name: about.block_size for name, about in self.tables.items()}
        block_size = sizes if len(set(sizes.values())) > 1 else next(iter(sizes.values()))
        num_blocks = next(iter(self.values())).num_blocks
        given = {"num_blocks": num_blocks, "block_size": block_size, "groups": self.groups, **self._options}
        return f"PackedLayout({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def __str__(self):
        return table(self.describe())

    def draw(self, path=None):
        """The memory map as a matplotlib figure, saved if `path` is given (.svg or .png)."""
        return draw(self.describe(), path)

    def _repr_svg_(self):
        return for_notebook(self.describe())


def _tables(groups: Mapping[str, Group], block_size: int | Mapping[str, int]) -> dict[str, Table]:
    """The tables of the groups; ValueError if a block size is missing, superfluous or not a multiple of a rate."""
    members: dict[str, list[str]] = {}
    for name, group in groups.items():
        members.setdefault(group.table, []).append(name)
    sizes = block_size if isinstance(block_size, Mapping) else dict.fromkeys(members, block_size)
    if set(sizes) != set(members):
        raise ValueError(
            f"`block_size` is {block_size!r}: expected an int, or one for each table of the groups, "
            f"{', '.join(map(repr, members))}"
        )
    found = {}
    for address, names in members.items():
        what = f"block_size[{address!r}]" if isinstance(block_size, Mapping) else "block_size"
        size = checked_int(what, sizes[address], "a positive int", least=1)
        for name in names:
            if size % groups[name].rate:
                raise ValueError(
                    f"`{what}` is {size} tokens: expected a multiple of the {groups[name].rate} tokens per entry of "
                    f"group {name!r}"
                )
        windows = [groups[name].window for name in names]
        longest = None if None in windows else max(window for window in windows if window is not None)
        found[address] = Table(size, longest, tuple(names))
    return found
