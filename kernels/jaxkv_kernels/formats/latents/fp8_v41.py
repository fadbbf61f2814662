"""`fp8_v41`: the MXFP8 entry of DeepSeek V4.1, 528 bytes for 448 + 64 values.

Latent and rotary part are e4m3, with an e8m0 scale (a power of two) for each tile of 32 values.  Pages are split: a
page stores the values of all tokens (512 bytes per token), then their scales (16 bytes).  Pages are rounded up to a
multiple of 512 bytes.

The byte map is that of FlashMLA (`ModelType::V41`) as SGLang (`KVLayout.V41`) and vLLM (`V41_BYTES_PER_TOKEN`) describe
it.  A scale is 2 ** ceil(log2(max(amax, 1e-4) / 448)), at least 2**-22, as in vLLM; SGLang's is at least 2**-13.
Values are rounded to nearest even and saturate.  A tile with NaN has the scale NaN."""

from types import MappingProxyType

import jax.numpy as jnp

from jaxkv_kernels.formats.bits import largest_magnitude, power_of_two_scale, to_fp8
from jaxkv_kernels.formats.entries import MLAEntry
from jaxkv_kernels.formats.format import Format, Part, join, split_by_page
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
    rope_in_values = True
    typical = MappingProxyType({"latent": 448, "rope": 64})

    def parts(self, sizes, block_size):
        """The values of both parts, then their scales."""
        return tiled_parts(self.name, sizes, block_size, TILE, "e4m3", "e8m0")

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


def tiled_parts(name: str, sizes, block_size: int, tile: int, values: str, scales: str) -> tuple[Part, ...]:
    """The parts of a `name` entry: arrays of `values`, which share tiles of one kind, then their `scales` (dtypes)."""
    if any(size % tile or not size for size in sizes.values()):
        raise ValueError(f"{name} entry of {dict(sizes)}: expected positive multiples of {tile} values")
    pairs = 2 if values == "e2m1x2" else 1
    arrays = [(part, values, count // pairs) for part, count in sizes.items()]
    return split_by_page(block_size, arrays, [("scales", scales, sum(sizes.values()) // tile)])
