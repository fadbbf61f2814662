"""`fp4_v41` and `fp4_v41_split`: the FP4 entry of DeepSeek V4.1, 288 bytes for 448 + 64 values, in two byte maps.

Latent and rotary part are e2m1, with an e4m3 scale for each tile of 16 values.  DeepSeek V4.1 stores its compressed
entries so, and those of the window as `fp8_v41`.

In `fp4_v41`, the scales of a token (32 bytes) follow its values (256 bytes), and pages have no padding.  In
`fp4_v41_split`, pages are split: a page stores the values of all tokens, then the scales of all tokens, and is rounded
up to a multiple of 256 bytes.  FlashMLA (`ModelType::V41_FP4`) reads the first since its release of 2026-09-30, and
vLLM 0.33 stores it (`V41_NVFP4_BYTES_PER_TOKEN`); SGLang 0.5.23 has both, as `KVLayout.V41_FP4_NEW` and
`KVLayout.V41_FP4`.  `fp8_v41.py` has more about the two.

A scale is amax / 6 rounded to the nearest e4m3 value, at least 2**-9 and at most 448.  Values are divided by it,
rounded to nearest even, and saturate.  vLLM multiplies by the rounded reciprocal of 6, which gives the same scales for
bf16 and float16 values.  A tile with NaN has the scale NaN.
"""

import jax.numpy as jnp

from jaxkv_kernels.formats.bits import FP8, largest_magnitude
from jaxkv_kernels.formats.format import join
from jaxkv_kernels.formats.fp4 import e4m3_scale, from_e2m1, tiles_of, to_e2m1
from jaxkv_kernels.formats.latents.fp8_v41 import V41

TILE = 16
"""Values that share a scale."""


class Fp4V41(V41):
    """The number of values must be a multiple of 16 in both parts."""

    tile, stored = TILE, ("e2m1x2", "e4m3")

    def encode(self, values, scales):
        """Computes each scale from the largest magnitude of its tile."""
        tiles = tiles_of(jnp.concatenate([x.astype(jnp.float32) for x in values], axis=-1), TILE)
        scale = e4m3_scale(largest_magnitude(tiles))
        return join((to_e2m1(tiles, scale), scale.astype(FP8)), self.dtype)

    def decode(self, row, sizes, scales, dtype):
        """Multiplies in float32 and rounds to `dtype`, which is exact for bf16 and float16."""
        latent, rope, scale = (field.read(row) for field in self.fields(sizes, 1))
        values = from_e2m1(jnp.concatenate([latent, rope], axis=-1), scale.astype(jnp.float32)).astype(dtype)
        return [values[..., : sizes["latent"]], values[..., sizes["latent"] :]]
