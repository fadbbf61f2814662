"""`nvfp4_ds_mla`: the FP4 MLA entry of vLLM for DeepSeek V3.2, 352 bytes for 512 + 64 values.

The latent is e2m1, with an e4m3 scale for each tile of 16 values; the rotary part is e4m3, unscaled.  The bytes of
scales are permuted, as the transpose of 4 columns: that of tile t is byte n / 4 * (t % 4) + t // 4 of n.

The byte map and the scales are those of vLLM's `concat_and_cache_nvfp4_ds_mla` (csrc, nvfp4 MLA cache kernels, 2026).
A scale is the smallest e4m3 value of at least amax / 6, and at least 2**-9.  Values are rounded to nearest even and
saturate; the rotary part saturates at 448.  Two details differ: vLLM multiplies by the rounded reciprocal of a scale,
so that some ties go down instead of to even, and it stores NaN as 6 times the scale, where a tile with NaN has a NaN
scale here."""

import jax.numpy as jnp

from jaxkv_kernels.formats.bits import FP8, largest_magnitude, to_fp8
from jaxkv_kernels.formats.entries import MLAEntry
from jaxkv_kernels.formats.format import Format, join, together
from jaxkv_kernels.formats.fp4 import e4m3_scale, from_e2m1, tiles_of, to_e2m1

TILE = 16
"""Values that share a scale."""
COLUMNS = 4
"""Scales are stored as the transpose of a matrix with this many columns: consecutive ones lie n / 4 bytes apart."""


class Nvfp4DsMla(Format):
    """The number of values must be a multiple of 64 in the latent."""

    name = "nvfp4_ds_mla"
    kinds = (MLAEntry,)
    dtype = "uint8"

    def fields(self, sizes, block_size):
        """The latent, the rotary part, then the scales."""
        latent, rope = sizes["latent"], sizes["rope"]
        if latent % (TILE * COLUMNS) or not rope:
            raise ValueError(
                f"nvfp4_ds_mla entry of `latent` {latent} and `rope` {rope}: expected a multiple of {TILE * COLUMNS} "
                "for the latent and a rotary part"
            )
        return together(
            ("latent", "e2m1x2", latent // 2), ("rope", "e4m3", rope), ("permuted scales", "e4m3", latent // TILE)
        )

    def encode(self, values, scales):
        """Computes each scale from the largest magnitude of its tile."""
        latent, rope = values
        tiles = tiles_of(latent, TILE)
        scale = e4m3_scale(largest_magnitude(tiles), round_up=True)
        pairs = to_e2m1(tiles, scale)
        permuted = _transposed(scale.astype(FP8), (scale.shape[-1] // COLUMNS, COLUMNS))
        return join((pairs, to_fp8(rope.astype(jnp.float32)), permuted), self.dtype)

    def decode(self, row, sizes, scales, dtype):
        """Multiplies in float32 and rounds to `dtype`, which is exact for bf16 and float16."""
        pairs, rope, permuted = (field.read(row) for field in self.fields(sizes, 1))
        scale = _transposed(permuted, (COLUMNS, permuted.shape[-1] // COLUMNS)).astype(jnp.float32)
        return [from_e2m1(pairs, scale).astype(dtype), rope.astype(dtype)]


def _transposed(scale, shape):
    """Scales [..., n], reshaped to [..., *shape], transposed and flattened."""
    matrix = scale.reshape(*scale.shape[:-1], *shape)
    return jnp.swapaxes(matrix, -1, -2).reshape(scale.shape)
