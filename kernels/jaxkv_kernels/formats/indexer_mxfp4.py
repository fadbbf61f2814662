"""`indexer_mxfp4`: indexer keys of 128 e2m1 values with an e8m0 scale for each tile of 32, 68 bytes per token.

Pages are split: a page stores the values of all tokens ([block_size, 64] bytes), then their scales ([block_size, 4]).
This is the byte map that vLLM writes (`indexer_k_norm_rope_store`) and DeepGEMM reads.  A scale is 2 ** ceil(log2(amax
/ 6)).  It is at least 2**-124, so that denormal values, which XLA treats as 0 on CPUs, are 0 on every device; vLLM's is
at least 2**-126.  Values are rounded to nearest even.  A tile with NaN has the scale NaN."""

import jax.numpy as jnp

from jaxkv_kernels.formats.bits import largest_magnitude, power_of_two_scale
from jaxkv_kernels.formats.entries import IndexerEntry
from jaxkv_kernels.formats.format import Format, join, split_by_page
from jaxkv_kernels.formats.fp4 import E2M1_MAX, from_e2m1, from_e8m0, tiles_of, to_e2m1, to_e8m0

TILE = 32
"""Values that share a scale."""
SMALLEST_EXPONENT = -124


class IndexerMxfp4(Format):
    """The number of values must be a multiple of 32."""

    name = "indexer_mxfp4"
    kinds = (IndexerEntry,)
    dtype = "uint8"

    def fields(self, sizes, block_size):
        """The values, then their scales."""
        count = sizes["key"]
        if count % TILE:
            raise ValueError(f"indexer_mxfp4 entry of `head_dim` {count}: expected a multiple of {TILE} values")
        return split_by_page(block_size, [("values", "e2m1x2", count // 2)], [("scales", "e8m0", count // TILE)])

    def encode(self, values, scales):
        """Computes each scale from the largest magnitude of its tile."""
        tiles = tiles_of(values[0], TILE)
        scale, _ = power_of_two_scale(largest_magnitude(tiles), SMALLEST_EXPONENT, E2M1_MAX)
        return join((to_e2m1(tiles, scale), to_e8m0(scale)), self.dtype)

    def decode(self, row, sizes, scales, dtype):
        """Multiplies in float32 and rounds to `dtype`, which is exact for bf16."""
        pairs, scale = (field.read(row) for field in self.fields(sizes, 1))
        return [from_e2m1(pairs, from_e8m0(scale)).astype(dtype)]

    def decode_factored(self, row, sizes, dtype):
        """Divides by the key's largest scale, so that float16 represents values down to 2**-22 times the largest."""
        pairs, scale = (field.read(row) for field in self.fields(sizes, 1))
        scale = from_e8m0(scale)
        largest = jnp.maximum(scale.max(axis=-1, keepdims=True), 2.0**SMALLEST_EXPONENT)
        return [from_e2m1(pairs, scale / largest).astype(dtype)], largest
