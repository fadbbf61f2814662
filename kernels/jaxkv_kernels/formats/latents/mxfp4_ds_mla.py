"""`mxfp4_ds_mla`: the MXFP4 entry of SGLang for Hopper, 368 bytes for 448 + 64 values, 400 for 512 + 64.

The latent is e2m1, with an e8m0 scale (a power of two) for each tile of 32 values; the rotary part is bf16, unscaled.
Scales are padded with zeros to a multiple of 16 bytes.  SGLang publishes 448 + 64 values, of DeepSeek V4; other sizes
are stored in the same way.

The byte map is that of SGLang's `mxfp4_k_cache.py` (pull requests 32741 and 37136, 2026).  A scale is 2 ** ceil(log2(
amax / 6)), as its later revisions compute it; the first rounded the exponent to nearest, so that the largest value of a
tile could saturate.  Values are rounded to nearest even.  A scale is at least 2**-124, so that denormal values, which
XLA treats as 0 on CPUs, are 0 on every device; SGLang's is at least 2**-127.  A tile with NaN has the scale NaN.
"""

from types import MappingProxyType

import jax.numpy as jnp

from jaxkv_kernels.formats.bits import largest_magnitude, power_of_two_scale
from jaxkv_kernels.formats.entries import MLAEntry
from jaxkv_kernels.formats.format import Format, join, together
from jaxkv_kernels.formats.fp4 import E2M1_MAX, from_e2m1, from_e8m0, tiles_of, to_e2m1, to_e8m0

TILE = 32
"""Values that share a scale."""
PADDED = 16
"""Bytes to a multiple of which the scales are padded."""
SMALLEST_EXPONENT = -124


class Mxfp4DsMla(Format):
    """The number of values must be a multiple of 32 in the latent."""

    name = "mxfp4_ds_mla"
    kinds = (MLAEntry,)
    dtype = "uint8"
    typical = MappingProxyType({"latent": 448, "rope": 64})

    def fields(self, sizes, block_size):
        """The latent, its scales, padding unless they fill it, then the rotary part."""
        latent, rope = sizes["latent"], sizes["rope"]
        if latent % TILE or not rope:
            raise ValueError(
                f"mxfp4_ds_mla entry of `latent` {latent} and `rope` {rope}: expected a multiple of {TILE} for the "
                "latent and a rotary part"
            )
        count = latent // TILE
        padding = [("padding", "uint8", -count % PADDED)] if count % PADDED else []
        return together(
            ("latent", "e2m1x2", latent // 2), ("scales", "e8m0", count), *padding, ("rope", "bfloat16", rope)
        )

    def encode(self, values, scales):
        """Computes each scale from the largest magnitude of its tile."""
        latent, rope = values
        tiles = tiles_of(latent, TILE)
        scale, _ = power_of_two_scale(largest_magnitude(tiles), SMALLEST_EXPONENT, E2M1_MAX)
        padding = jnp.zeros((*scale.shape[:-1], -scale.shape[-1] % PADDED), jnp.uint8)
        return join((to_e2m1(tiles, scale), to_e8m0(scale), padding, rope.astype(jnp.bfloat16)), self.dtype)

    def decode(self, row, sizes, scales, dtype):
        """Multiplies the latent in float32 and rounds it to `dtype`; converts the rotary part."""
        found = {field.name: field.read(row) for field in self.fields(sizes, 1)}
        latent = from_e2m1(found["latent"], from_e8m0(found["scales"]))
        return [latent.astype(dtype), found["rope"].astype(dtype)]
