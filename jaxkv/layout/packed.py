"""`PackedLayout`: several groups of layers, each with its own entry, packed in one block."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxkv.layout.describe import Description, table
from jaxkv.layout.draw import draw, svg
from jaxkv.layout.layout import CacheLayout, Strides, checked_dtype, checked_int, fingerprint
from jaxkv_kernels.formats.entries import Entry

ALIGNMENT = 128
"""Bytes to which the region of each group, and the block, are rounded up by default.

Kernels for GPUs require 16.  The default is the length of a cache line, so that a row of whole lines touches no others.
Attention to blocks that begin 16 bytes after a multiple of 128 takes 5 to 9 % longer (H200, `MLAEntry` bf16).
"""


@dataclass(frozen=True)
class Group:
    """Layers that store the same entry."""

    num_layers: int
    entry: Entry
    num_heads: int = 1


class PackedLayout(Mapping[str, CacheLayout]):
    """Layouts, by name, of groups whose entries lie side by side in every block of one buffer.

    A block is one run of memory with everything that its tokens need, such as the latents of all layers and then the
    indexer keys of all layers.  Each group is an ordinary `CacheLayout` over the shared buffer:

        packed = PackedLayout(num_blocks=64, block_size=64, groups={
            "latent": Group(61, MLAEntry("bf16")), "indexer": Group(61, IndexerEntry())})
        cache = KVCache.zeros(packed["latent"])
        cache = write_mla(cache, ...)
        cache = write_indexer_k(cache.view(packed["indexer"]), ...)

    Args:
      num_blocks: blocks of `block_size` token slots.
      block_size: tokens per block, the same for all groups.
      groups: the groups, in the order in which they lie in a block.
      order: order of the axes within a block: one of the block-major orders.
      dtype: dtype of the buffer; default the dtype of the entries if all have the same, else uint8.
      alignment: bytes to which the region of each group, and the block, are rounded up: a multiple of the bytes of an
        element.  It changes the fingerprint where something is rounded.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        groups: Mapping[str, Group],
        order="BLNHC",
        dtype=None,
        alignment: int = ALIGNMENT,
    ):
        if order not in ("BLNHC", "BLHNC", "BHLNC"):
            raise ValueError(f"`order` is {order!r}: a packed block is one run, so expected BLNHC, BLHNC or BHLNC")
        if not isinstance(groups, Mapping) or not all(isinstance(group, Group) for group in groups.values()):
            raise ValueError(f"`groups` is {groups!r}: expected a mapping of names to Groups")
        if not groups:
            raise ValueError(f"`groups` is {groups!r}, empty: expected at least one Group")
        num_blocks = checked_int("num_blocks", num_blocks, "a positive int", least=1)
        natural = {group.entry.dtype for group in groups.values()}
        dtype = checked_dtype(dtype or (natural.pop() if len(natural) == 1 else "uint8"))
        alignment = checked_int("alignment", alignment, "a positive int", least=1)
        if alignment % dtype.itemsize:
            raise ValueError(
                f"`alignment` is {alignment} bytes: expected a multiple of the {dtype.itemsize} of {dtype}"
            )
        unit = alignment // dtype.itemsize
        alone = {
            name: CacheLayout(
                num_layers=group.num_layers,
                num_blocks=2,
                block_size=block_size,
                num_heads=group.num_heads,
                entry=group.entry,
                order=order,
                dtype=dtype,
            )
            for name, group in groups.items()
        }
        offsets, block = {}, 0
        for name, layout in alone.items():
            offsets[name] = block
            block += -(-layout.strides.block // unit) * unit
        self._layouts = {
            name: CacheLayout.from_strides(
                num_layers=layout.num_layers,
                num_blocks=num_blocks,
                block_size=block_size,
                num_heads=layout.num_heads,
                entry=layout.entry,
                strides=Strides(layout.strides.layer, block, layout.strides.head, layout.strides.token),
                offset=offsets[name],
                size=num_blocks * block,
                dtype=dtype,
            )
            for name, layout in alone.items()
        }
        if len(self) > 1:
            whole = fingerprint({name: layout.fingerprint for name, layout in self.items()})
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
    def fingerprint(self) -> str:
        """Like `CacheLayout.fingerprint`, for a block with all its groups; each group has the same."""
        return next(iter(self.values())).fingerprint

    def describe(self) -> dict[str, Description]:
        """The groups in plain numbers, for the table and the memory map."""
        return {name: layout.describe() for name, layout in self.items()}

    def __str__(self):
        return table(self.describe())

    def draw(self, path=None):
        """The memory map as a matplotlib figure, saved if `path` is given (.svg or .png)."""
        return draw(self.describe(), path)

    def _repr_svg_(self):
        return svg(self.describe())
