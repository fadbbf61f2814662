"""The flat buffer as rows of 128 bytes: an `indexer_fp8` page is a row per key, followed by rows of scales.

A TMA copy of up to 64 consecutive rows is a tile of keys in the layout that wgmma reads.
"""

from dataclasses import dataclass

import jax

from jaxkv_kernels.addressing import Pages

ROW_BYTES = 128
SCALE_BYTES = 4
SCALES_PER_ROW = ROW_BYTES // SCALE_BYTES
COLUMNS = 128
"""The most columns of a product."""
QUERY_ROWS = 256
"""The most rows (query tokens x heads) of a group of query tokens: all of them must fit in shared memory."""


@dataclass(frozen=True)
class KeyRows:
    """A view [rows, elements of 128 bytes] of the buffer; pages begin at a row."""

    shape: tuple[int, int]
    first: int
    layer: int
    block: int
    """`layer` and `block`: the number of rows from one layer, or one block, to the next."""

    def page(self, layer, block):
        """The first row of a page."""
        return self.first + layer * self.layer + block * self.block

    def of(self, buffer: jax.Array) -> jax.Array:
        """The view of `buffer`.  It is not a copy."""
        return buffer.reshape(self.shape)


def key_rows(pages: Pages, itemsize: int) -> KeyRows:
    """The view of a cache; raises ValueError with the reason if pages do not begin at rows of 128 bytes."""
    numbers = {"offset": pages.offset}
    numbers |= {"layer stride": pages.layer_stride} if pages.num_layers > 1 else {}
    numbers |= {"block stride": pages.block_stride} if pages.num_blocks > 1 else {}
    numbers["buffer size"] = pages.size
    rows = {}
    for name, elements in numbers.items():
        rows[name], rest = divmod(elements * itemsize, ROW_BYTES)
        if rest:
            raise ValueError(f"{name} of {elements * itemsize} bytes: supports multiples of {ROW_BYTES}")
    if rows["buffer size"] >= 2**31:
        raise ValueError(f"buffer of {rows['buffer size']} rows of {ROW_BYTES} bytes: supports fewer than 2**31")
    return KeyRows(
        (rows["buffer size"], ROW_BYTES // itemsize), rows["offset"], rows.get("layer stride", 0),
        rows.get("block stride", 0),
    )  # fmt: skip


def rows_per_token(heads: int) -> int:
    """Heads, rounded up to a multiple of 8 (wgmma's columns) or, above 128 heads, to whole products of 128 columns."""
    return -(-heads // 8) * 8 if heads <= COLUMNS else -(-heads // COLUMNS) * COLUMNS
