"""`nvfp4`: keys and values of e2m1, with an e4m3 scale for each tile of 16 values, 144 bytes for 128 + 128 values.

A scale per tensor or per head multiplies the scales of tiles; the caller keeps it, as for `fp8`.

The arithmetic is NVIDIA's, as in vLLM's `reshape_and_cache_nvfp4`: the scale of a tile is amax / 6, divided by the
scale of the tensor, rounded to the nearest e4m3 value, at most 448.  It is at least 2**-9, whereas vLLM stores 0 for
smaller tiles, which are lost.  Values are rounded to nearest even and saturate; vLLM uses approximate reciprocals, and
can differ next to ties.  A tile with NaN has the scale NaN.

The byte map is jaxkv's own: vLLM keeps the scales of a block in a region of its own, those of V permuted across four
tokens (`jaxkv.swizzle_scales`), and does so in two ways for two generations of GPUs.
"""

import jax.numpy as jnp

from jaxkv_kernels.formats.bits import FP8, corrected_quotient, largest_magnitude
from jaxkv_kernels.formats.entries import KVEntry
from jaxkv_kernels.formats.format import Format, join, together
from jaxkv_kernels.formats.fp4 import e4m3_scale, from_e2m1, tiles_of, to_e2m1

TILE = 16
"""Values that share a scale."""


class Nvfp4(Format):
    """stored = e2m1(value / (scale * scale of the tile)); value = stored * scale of the tile * scale."""

    name = "nvfp4"
    kinds = (KVEntry,)
    dtype = "uint8"
    scaled = True

    def fields(self, sizes, block_size):
        """The values of K and V, then the scales of the tiles of K and V."""
        if any(count % TILE for count in sizes.values()):
            raise ValueError(f"nvfp4 entry of {dict(sizes)}: expected multiples of {TILE} values")
        return together(
            *((name, "e2m1x2", count // 2) for name, count in sizes.items()),
            *((f"{name} scales", "e4m3", count // TILE) for name, count in sizes.items()),
        )

    def encode(self, values, scales):
        """Divides by the caller's scale in float32, and computes the scale of each tile from its largest magnitude."""
        pairs, found = [], []
        for x, whole in zip(values, scales, strict=True):
            tiles = tiles_of(corrected_quotient(x.astype(jnp.float32), whole[..., None]), TILE)
            scale = e4m3_scale(largest_magnitude(tiles))
            found.append(scale.astype(FP8))
            pairs.append(to_e2m1(tiles, scale))
        return join((*pairs, *found), self.dtype)

    def decode(self, row, sizes, scales, dtype):
        """Multiplies in float32 and rounds to `dtype`.  With a scale of None, bf16 and float16 values are exact."""
        found = [field.read(row) for field in self.fields(sizes, 1)]
        values = []
        for pairs, own, whole in zip(found[: len(sizes)], found[len(sizes) :], scales, strict=True):
            value = from_e2m1(pairs, own.astype(jnp.float32))
            values.append((value if whole is None else value * whole[..., None]).astype(dtype))
        return values
