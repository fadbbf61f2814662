"""`fp8_v4`: the entry of DeepSeek V4, 584 bytes for 448 + 64 values.

The latent is e4m3, with an e8m0 scale (a power of two) for each tile of 64 values; the rotary part is bf16, unscaled.
Pages are split: a page stores latents and rotary parts of all tokens (576 bytes per token), then their scales (7 bytes,
and one that is 0).  Pages are rounded up to a multiple of 576 bytes.

The byte map is that of FlashMLA (`MODEL1_FP8Sparse` in tests/quant.py), vLLM (`quantize_and_insert_k_cache`) and SGLang
(`KVLayout.V4`).  A scale is 2 ** ceil(log2(max(amax, 1e-4) / 448)), at least 2**-22, as in vLLM; FlashMLA's tests have
a lower bound of 2**-13.  Values are rounded to nearest even and saturate.  A tile with NaN has the scale NaN.
"""

from types import MappingProxyType

import jax.numpy as jnp

from jaxkv_kernels.formats.bits import largest_magnitude, power_of_two_scale, to_fp8
from jaxkv_kernels.formats.entries import MLAEntry
from jaxkv_kernels.formats.format import Format, join, split_by_page
from jaxkv_kernels.formats.fp4 import from_e8m0, tiles_of, to_e8m0

TILE = 64
"""Values that share a scale."""
PADDED = 8
"""Bytes to a multiple of which the scales of a token are padded."""
SMALLEST_EXPONENT = -22
"""Smallest exponent of a scale: 2 ** ceil(log2(1e-4 / 448))."""


class Fp8V4(Format):
    """The number of values must be a multiple of 64 in the latent, and even in the rotary part."""

    name = "fp8_v4"
    kinds = (MLAEntry,)
    dtype = "uint8"
    pads_pages = True
    rope_in_values = True
    typical = MappingProxyType({"latent": 448, "rope": 64})

    def fields(self, sizes, block_size):
        """The latent and the rotary part, then the scales and their padding."""
        latent, rope = sizes["latent"], sizes["rope"]
        if latent % TILE or rope % 2 or not rope:
            raise ValueError(
                f"fp8_v4 entry of `latent` {latent} and `rope` {rope}: expected a multiple of {TILE} for the latent "
                "and a positive even number for the rotary part"
            )
        count = latent // TILE
        padding = [("padding", "uint8", -count % PADDED)] if count % PADDED else []
        return split_by_page(
            block_size,
            [("latent", "e4m3", latent), ("rope", "bfloat16", rope)],
            [("scales", "e8m0", count), *padding],
        )

    def encode(self, values, scales):
        """Computes each scale from the largest magnitude of its tile."""
        latent, rope = values
        tiles = tiles_of(latent, TILE)
        scale, inverse = power_of_two_scale(largest_magnitude(tiles), SMALLEST_EXPONENT)
        quantised = to_fp8(tiles * inverse[..., None]).reshape(latent.shape)
        padding = jnp.zeros((*scale.shape[:-1], -scale.shape[-1] % PADDED), jnp.uint8)
        return join((quantised, rope.astype(jnp.bfloat16), to_e8m0(scale), padding), self.dtype)

    def decode(self, row, sizes, scales, dtype):
        """Multiplies the latent in float32 and rounds it to `dtype`; converts the rotary part."""
        latent, rope, scale, *_ = (field.read(row) for field in self.fields(sizes, 1))
        values = tiles_of(latent, TILE) * from_e8m0(scale)[..., None]
        return [values.reshape(latent.shape).astype(dtype), rope.astype(dtype)]
