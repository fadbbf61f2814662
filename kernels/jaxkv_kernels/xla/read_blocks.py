"""Reads whole blocks."""

from functools import partial

import jax

from jaxkv_kernels.xla.block_rows import read_rows


@partial(jax.jit, static_argnames="pages")
def read_blocks(buffer, blocks, *, pages):
    """Blocks [n] as rows [n, block_elements]; 0 where the id is bad."""
    return read_rows(buffer, pages, blocks)
