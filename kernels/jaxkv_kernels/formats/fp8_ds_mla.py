"""`fp8_ds_mla`: DeepSeek V3.2's latent entry, 656 bytes for 512 + 64 values.

| bytes | content |
|---|---|
| [0, 512) | the latent, e4m3, in 4 tiles of 128 values |
| [512, 528) | 4 float32 scales, one a tile |
| [528, 656) | the rotary part, bf16, unscaled |

The byte map is that of vLLM and FlashMLA.  A scale is a power of two, at least 2**-13, as FlashMLA's reference
quantiser chooses it: readers differ in how they round a scale (float32, bf16, truncated to an exponent) and agree bit
for bit only on powers of two.  Entries written elsewhere with other float32 scales are read correctly.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxkv_kernels.formats.bits import FP8, power_of_two_scale, to_fp8, view_as

TILE = 128
SMALLEST_EXPONENT = -13  # 2 ** ceil(log2(1e-4)), FlashMLA's floor


@dataclass(frozen=True)
class Fp8DsMla:
    """Latents of any multiple of 128 values, rotary parts of any even number."""

    name: str = "fp8_ds_mla"
    dtype: str = "uint8"
    alignment: int = 4
    scaled: bool = False

    def width(self, sizes):
        """Bytes: 656 for (512, 64)."""
        if len(sizes) != 2 or sizes[0] % TILE or sizes[1] % 2:
            raise ValueError(
                f"fp8_ds_mla stores a latent of a multiple of {TILE} values and an even rotary part; got parts {sizes}"
            )
        return sizes[0] + 4 * (sizes[0] // TILE) + 2 * sizes[1]

    def encode(self, parts, scales):
        """(latent, rope) to bytes."""
        latent, rope = parts
        tiles = latent.astype(jnp.float32).reshape(*latent.shape[:-1], latent.shape[-1] // TILE, TILE)
        scale, inverse = power_of_two_scale(jnp.abs(tiles).max(axis=-1), SMALLEST_EXPONENT)
        values = to_fp8(tiles * inverse[..., None]).reshape(latent.shape)
        pieces = (values, scale, rope.astype(jnp.bfloat16))
        return jnp.concatenate([view_as(piece, jnp.uint8) for piece in pieces], axis=-1)

    def decode(self, row, sizes, scales, dtype):
        """Latent multiplied in float32, then rounded to `dtype`; rope converted."""
        latent = sizes[0]
        first_rope = latent + 4 * (latent // TILE)
        tiles = view_as(row[..., :latent], FP8).astype(jnp.float32).reshape(*row.shape[:-1], latent // TILE, TILE)
        scale = view_as(row[..., latent:first_rope], jnp.float32)
        values = (tiles * scale[..., None]).reshape(*row.shape[:-1], latent)
        return [values.astype(dtype), view_as(row[..., first_rope:], jnp.bfloat16).astype(dtype)]
