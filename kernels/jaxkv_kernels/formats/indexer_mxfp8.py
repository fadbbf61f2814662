"""`indexer_mxfp8`: indexer keys of 128 e4m3 values with an e8m0 scale for each tile of 32, 132 bytes per token.

Pages are split: a page stores the values of all tokens ([block_size, 128] bytes), then their scales ([block_size, 4]).
This is the byte map that vLLM 0.33 writes and DeepGEMM reads on Blackwell (`mqa_logits_use_mx_scales`); `indexer_fp8`
has as many bytes, with a float32 scale in place of the four.

vLLM stores the same scale four times, that of the whole key, and so does jaxkv: it is computed as in `indexer_fp8`, so
that both formats store the same values.  Keys whose four scales differ, written elsewhere, are read correctly.  A key
with NaN has NaN scales.
"""

import jax.numpy as jnp

from jaxkv_kernels.formats.bits import largest_magnitude, power_of_two_scale, to_fp8
from jaxkv_kernels.formats.entries import IndexerEntry
from jaxkv_kernels.formats.format import Format, join, split_by_page
from jaxkv_kernels.formats.fp4 import from_e8m0, tiles_of, to_e8m0
from jaxkv_kernels.formats.indexer_fp8 import SMALLEST_EXPONENT

TILE = 32
"""Values that share a scale."""


class IndexerMxfp8(Format):
    """The number of values must be a multiple of 32."""

    name = "indexer_mxfp8"
    kinds = (IndexerEntry,)
    dtype = "uint8"

    def fields(self, sizes, block_size):
        """The values, then their scales."""
        count = sizes["key"]
        if count % TILE:
            raise ValueError(f"indexer_mxfp8 entry of `head_dim` {count}: expected a multiple of {TILE} values")
        return split_by_page(block_size, [("values", "e4m3", count)], [("scales", "e8m0", count // TILE)])

    def encode(self, values, scales):
        """Computes one scale from the largest magnitude of the key."""
        key = values[0].astype(jnp.float32)
        scale, inverse = power_of_two_scale(largest_magnitude(key)[..., None], SMALLEST_EXPONENT)
        return join((to_fp8(key * inverse), jnp.repeat(to_e8m0(scale), key.shape[-1] // TILE, axis=-1)), self.dtype)

    def decode(self, row, sizes, scales, dtype):
        """Multiplies in float32 and rounds to `dtype`."""
        (key,), scale = self.decode_factored(row, sizes, jnp.float32)
        return [(key * scale).astype(dtype)]

    def decode_factored(self, row, sizes, dtype):
        """Divides by the key's largest scale: equal scales leave the stored values, which every `dtype` represents."""
        values, scale = (field.read(row) for field in self.fields(sizes, 1))
        scale = from_e8m0(scale)
        largest = jnp.maximum(scale.max(axis=-1, keepdims=True), 2.0**SMALLEST_EXPONENT)
        tiles = tiles_of(values, TILE) * (scale / largest)[..., None]
        return [tiles.reshape(values.shape).astype(dtype)], largest
