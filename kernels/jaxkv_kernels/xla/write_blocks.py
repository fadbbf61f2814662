"""Writes whole blocks."""

from functools import partial

import jax

from jaxkv_kernels.xla.block_rows import write_rows


@partial(jax.jit, static_argnames="pages")
def write_blocks(buffer, blocks, data, *, pages):
    """Rows [n, block_elements] over blocks [n]; a bad id is skipped."""
    return write_rows(buffer, pages, blocks, data)
