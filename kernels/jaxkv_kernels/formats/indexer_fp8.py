"""`indexer_fp8`: quantised indexer keys of 128 e4m3 values with a float32 scale, 132 bytes per token.

Pages are split: a page stores the values of all tokens ([block_size, 128] bytes), then their scales ([block_size]
float32).  This is the byte map that vLLM writes and DeepGEMM reads, on Hopper.  Two others also have 132 bytes per
token: on Blackwell, vLLM 0.33 stores the scale as four equal e8m0 bytes, which is `indexer_mxfp8`, and on ROCm, values
in tiles of 16 tokens, which is not supported.

A scale is a power of two.  It is computed from the key's absolute maximum, or 1e-4 if that is larger, as in vLLM's
`ue8m0` mode.
"""

import jax.numpy as jnp

from jaxkv_kernels.formats.bits import largest_magnitude, power_of_two_scale, to_fp8
from jaxkv_kernels.formats.entries import IndexerEntry
from jaxkv_kernels.formats.format import Format, join, split_by_page

SMALLEST_EXPONENT = -22
"""Smallest exponent of a scale: 2 ** ceil(log2(1e-4 / 448))."""


class IndexerFp8(Format):
    """One key of n e4m3 values and its float32 scale.  n must be a multiple of 4, so that scales are aligned."""

    name = "indexer_fp8"
    kinds = (IndexerEntry,)
    dtype = "uint8"

    def fields(self, sizes, block_size):
        """The values, then the scale."""
        if sizes["key"] % 4:
            raise ValueError(f"indexer_fp8 entry of `head_dim` {sizes['key']}: expected a multiple of 4 values")
        return split_by_page(block_size, [("values", "e4m3", sizes["key"])], [("scales", "float32", 1)])

    def encode(self, values, scales):
        """Computes each scale from the largest magnitude of its key."""
        key = values[0].astype(jnp.float32)
        scale, inverse = power_of_two_scale(largest_magnitude(key)[..., None], SMALLEST_EXPONENT)
        return join((to_fp8(key * inverse), scale), self.dtype)

    def decode(self, row, sizes, scales, dtype):
        """Multiplies in float32 and rounds to `dtype`."""
        (key,), scale = self.decode_factored(row, sizes, jnp.float32)
        return [(key * scale).astype(dtype)]

    def decode_factored(self, row, sizes, dtype):
        """Returns the stored values, which every `dtype` represents exactly, and their scale."""
        values, scale = (field.read(row) for field in self.fields(sizes, 1))
        return [values.astype(dtype)], scale
