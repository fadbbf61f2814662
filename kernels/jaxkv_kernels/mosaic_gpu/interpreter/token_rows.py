"""`TokenRows` for Pallas's interpreter."""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxkv_kernels.mosaic_gpu.token_rows import TokenRows


@dataclass(frozen=True)
class InterpretedTokenRows(TokenRows):
    """The same for Pallas's interpreter, which has no strides: a copy of the pages, by layer, block and head."""

    def index(self, layer, block, token, head=0):
        """The number of a page, and the row of `token`."""
        pages = self.pages
        return (layer * pages.num_blocks + block) * pages.num_heads + head, token

    def of(self, buffer):
        """The pages of the buffer, copied."""
        pages = self.pages
        page = jnp.arange(pages.num_layers * pages.num_blocks * pages.num_heads)
        head, block = page % pages.num_heads, page // pages.num_heads % pages.num_blocks
        origin, _ = super().index(page // (pages.num_heads * pages.num_blocks), block, 0, head)
        token, column = jnp.arange(pages.block_size), jnp.arange(pages.width)
        return buffer[(origin * self.step)[:, None, None] + (token * pages.token_stride)[:, None] + column]

    def install(self, ref):
        """Does nothing."""
