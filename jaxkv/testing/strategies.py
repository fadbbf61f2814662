"""Random layouts for property-based tests with hypothesis, which is imported when they are drawn."""

from typing import Any

import numpy as np

import jaxkv
from jaxkv.testing.random_layouts import SMALL, Sizes, draw_entry, draw_group, draw_strides
from jaxkv_kernels.formats.entries import Entry


def layouts(entry: Entry | None = None) -> Any:
    """A hypothesis strategy of small layouts: orders with padding, explicit strides, and groups of packed blocks.

    Strides are any that do not overlap: axes nest in any order, with gaps, behind an offset, or interleave.  Failing
    examples are shrunk to few layers, blocks, tokens and heads.

    Args:
      entry: the entry of all layouts; by default, entries of every kind but states, format and size are drawn, too.

    Returns:
      A `SearchStrategy` of `CacheLayout`.

    Raises:
      ImportError: hypothesis is not installed.
      ValueError: `entry` is neither an entry nor None.
    """
    if entry is not None and not isinstance(entry, Entry):
        raise ValueError(f"`entry` is {entry!r}: expected an entry, such as MLAEntry('bf16'), or None")
    try:
        from hypothesis import strategies as st
    except ImportError as error:
        raise ImportError("jaxkv.testing.layouts needs hypothesis: pip install hypothesis") from error

    def layout_of(kind: str, seed: int, layers: int, blocks: int, block_size: int, heads: int, padding: int):
        rng = np.random.default_rng(seed)
        chosen = entry or draw_entry(rng, (jaxkv.MLAEntry, jaxkv.KVEntry, jaxkv.IndexerEntry), SMALL)
        sizes: Sizes = {"num_layers": layers, "num_blocks": blocks, "block_size": block_size, "entry": chosen}
        sizes["num_heads"] = 1 if chosen.one_head else heads
        if kind == "strides":
            return draw_strides(rng, chosen, sizes)
        if kind == "packed":
            return draw_group(rng, sizes)
        unit = 16 // chosen.dtype.itemsize
        return jaxkv.CacheLayout(**sizes, order=kind, block_padding=padding * unit)  # type: ignore[arg-type]

    return st.builds(
        layout_of,
        st.sampled_from([*jaxkv.ORDERS, "packed", "strides", "strides"]),
        st.integers(0, 2**32 - 1),
        layers=st.integers(1, 4),
        blocks=st.integers(2, 6),
        block_size=st.sampled_from([1, 3, 16, 61, 64]),
        heads=st.integers(1, 3),
        padding=st.integers(0, 3),
    )
