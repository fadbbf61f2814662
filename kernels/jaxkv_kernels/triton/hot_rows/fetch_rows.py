"""Gives a row on the device to each selected token, and copies tokens that had none from host memory."""

from functools import partial

import jax

from jaxkv_kernels.triton.hot_rows.assign_rows import assign_rows
from jaxkv_kernels.triton.hot_rows.copy_rows import load_rows


@partial(jax.jit, static_argnames=("pages", "host_pages", "entry", "hot", "copied"))
def fetch_rows(buffer, maps, address, writes, positions, block_tables, layer, *, pages, host_pages, entry, hot, copied):
    """Returns the buffer, the maps and the slots [B, N] of the rows of tokens; see the function of `xla`."""
    maps, slots, counts, sources, targets = assign_rows(
        maps, positions, block_tables, layer, hot=hot, host_pages=host_pages
    )
    if copied:
        buffer = load_rows(
            buffer, address, writes, counts, sources, targets, layer, pages=pages, host_pages=host_pages, entry=entry
        )
    return buffer, maps, slots
