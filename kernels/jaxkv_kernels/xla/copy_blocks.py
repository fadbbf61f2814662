"""Copies whole blocks within a cache."""

from functools import partial

import jax

from jaxkv_kernels.xla.block_rows import read_rows, write_rows


@partial(jax.jit, static_argnames="pages")
def copy_blocks(buffer, src, dst, *, pages):
    """Blocks `src` [n] over blocks `dst` [n], all read before any is written; a pair with a bad id is skipped."""
    keep = (src >= 0) & (src < pages.num_blocks)
    return write_rows(buffer, pages, dst, read_rows(buffer, pages, src), keep)
