"""`fp8_v41`: the MXFP8 entry of DeepSeek V4.1, 528 bytes for 448 + 64 values.

Latent and rotary part are e4m3, with an e8m0 scale (a power of two) for each tile of 32 values.  Pages are split: a
page stores the values of all tokens (512 bytes per token), then their scales (16 bytes).  Pages are rounded up to a
multiple of 512 bytes.

The byte map is that of FlashMLA (`ModelType::V41`) as SGLang (`KVLayout.V41`) and vLLM (`V41_BYTES_PER_TOKEN`) describe
it.  A scale is 2 ** ceil(log2(max(amax, 1e-4) / 448)), at least 2**-22, as in vLLM; SGLang's is at least 2**-13.  Values
are rounded to nearest even and saturate.  A tile with NaN has the scale NaN.
"""

import jax.numpy as jnp

from jaxkv_kernels.formats.bits import largest_magnitude, power_of_two_scale, to_fp8
from jaxkv_kernels.formats.entries import MLAEntry
from jaxkv_kernels.formats.format import Format, join, split_by_page
from jaxkv_kernels.formats.fp4 import from_e8m0, tiles_of, to_e8m0

TILE = 32
"""Values that share a scale."""
SMALLEST_EXPONENT = -22
"""Smallest exponent of a scale: 2 ** ceil(log2(1e-4 / 448))."""


class Fp8V41(Format):
    """The number of values must be a multiple of 32 in both parts."""

    name = "fp8_v41"
    kinds = (MLAEntry,)
    dtype = "uint8"
    pads_pages = True
    typical = {"latent": 448, "rope": 64}

    def parts(self, sizes, block_size):
        """The values of both parts, then their scales."""
        check_tiles(self.name, sizes, TILE)
        values = [(name, "e4m3", count) for name, count in sizes.items()]
        return split_by_page(block_size, values, [("scales", "e8m0", sum(sizes.values()) // TILE)])

    def encode(self, values, scales):
        """Computes each scale from the largest magnitude of its tile."""
        tiles = tiles_of(jnp.concatenate([x.astype(jnp.float32) for x in values], axis=-1), TILE)
        scale, inverse = power_of_two_scale(largest_magnitude(tiles), SMALLEST_EXPONENT)
        quantised = to_fp8(tiles * inverse[..., None]).reshape(*tiles.shape[:-2], tiles.shape[-2] * TILE)
        return join((quantised, to_e8m0(scale)), self.dtype)

    def decode(self, row, sizes, scales, dtype):
        """Multiplies in float32 and rounds to `dtype`."""
        latent, rope, scale = (part.read(row) for part in self.parts(sizes, 1))
        values = tiles_of(jnp.concatenate([latent, rope], axis=-1), TILE) * from_e8m0(scale)[..., None]
        values = values.reshape(*row.shape[:-1], sum(sizes.values())).astype(dtype)
        return [values[..., : sizes["latent"]], values[..., sizes["latent"] :]]


def check_tiles(name: str, sizes, tile: int) -> None:
    """ValueError unless each array of values of a `name` entry consists of whole tiles."""
    if any(size % tile for size in sizes.values()):
        raise ValueError(f"{name} entry of {dict(sizes)}: expected multiples of {tile} values")
