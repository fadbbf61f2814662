"""`fp8_ds_mla`: the MLA entry of DeepSeek V3.2, 656 bytes for 512 + 64 values.

The latent is e4m3, with a float32 scale for each tile of 128 values; the rotary part is bf16, unscaled.

The byte map is that of vLLM and FlashMLA's sparse kernels.  The pages of FlashMLA's dense fp8 kernel (`V32_FP8`) have
the same size and another byte map, which is not supported.

A scale is a power of two, at least 2**-13, as in FlashMLA's reference quantiser.  Other readers round scales to
different types (float32, bf16, or only an exponent), so only powers of two decode to the same bits everywhere.  Entries
written by others with arbitrary float32 scales are read correctly.
"""

import jax.numpy as jnp

from jaxkv_kernels.formats.bits import largest_magnitude, power_of_two_scale, to_fp8
from jaxkv_kernels.formats.entries import MLAEntry
from jaxkv_kernels.formats.format import Format, join, together

TILE = 128
"""Values that share a scale."""
SMALLEST_EXPONENT = -13
"""Smallest exponent of a scale: 2 ** ceil(log2(1e-4)), FlashMLA's lower bound."""


class Fp8DsMla(Format):
    """The number of values must be a multiple of 128 in the latent, and even in the rotary part."""

    name = "fp8_ds_mla"
    kinds = (MLAEntry,)
    dtype = "uint8"

    def fields(self, sizes, block_size):
        """The latent, its scales, then the rotary part."""
        latent, rope = sizes["latent"], sizes["rope"]
        if latent % TILE or rope % 2 or not rope:
            raise ValueError(
                f"fp8_ds_mla entry of `latent` {latent} and `rope` {rope}: expected a multiple of {TILE} for the "
                "latent and a positive even number for the rotary part"
            )
        return together(("latent", "e4m3", latent), ("scales", "float32", latent // TILE), ("rope", "bfloat16", rope))

    def encode(self, values, scales):
        """Computes each scale from the largest magnitude of its tile."""
        latent, rope = values
        tiles = _tiles(latent.astype(jnp.float32))
        scale, inverse = power_of_two_scale(largest_magnitude(tiles), SMALLEST_EXPONENT)
        quantised = to_fp8(tiles * inverse[..., None]).reshape(latent.shape)
        return join((quantised, scale, rope.astype(jnp.bfloat16)), self.dtype)

    def decode(self, row, sizes, scales, dtype):
        """Multiplies the latent in float32 and rounds it to `dtype`; converts the rotary part."""
        latent, scale, rope = (field.read(row) for field in self.fields(sizes, 1))
        values = _tiles(latent.astype(jnp.float32)) * scale[..., None]
        return [values.reshape(latent.shape).astype(dtype), rope.astype(dtype)]


def _tiles(latent):
    """The latent [..., n] reshaped to [..., n / TILE, TILE]."""
    return latent.reshape(*latent.shape[:-1], latent.shape[-1] // TILE, TILE)
