"""`kvfp4`: SGLang's FP4 pool, e2m1 with an e8m0 scale (a power of two) for each tile of 16 values of both parts.

324 bytes for a latent of 512 + 64 values, 144 for keys and values of 128 + 128.

SGLang (`--kv-cache-dtype fp4_e2m1`; `MHATokenToKVPoolFP4` and `MLATokenToKVPoolFP4` in mem_cache/memory_pool.py, values
by `batched_quantize` in kvfp4_tensor.py, 2025 and 2026) keeps scales in arrays of their own: `kv_buffer` [slots, 1,
(R + P) / 2] and `kv_scale_buffer` [slots, (R + P) / 16] of latents; `k_buffer` [slots, H, D / 2] and `k_scale_buffer`
[slots, H * D / 16] of keys, and the same of values.  The bytes of each token are the same here.  Where they lie
differs, as one cache has one buffer:

- Pages of latents are split: a page stores the values of all its tokens, then their scales.  It is a slice of
  `kv_buffer` followed by the same slice of `kv_scale_buffer`.
- The scales of keys and values follow the values of each token and head, because heads of split pages could not lie
  beside each other.

`Entry.pack` joins SGLang's arrays to rows of bytes, which `write_entries` stores at SGLang's slots; `gather_entries`
reads such rows, and `Entry.unpack` separates them into the arrays again.

A scale is 2 ** ceil(log2(max(amax / 6, 1e-10))), at least 2**-33.  Values are rounded to nearest, ties away from 0;
other FP4 formats round ties to even.  The sign of negative values that become 0 is stored, but not that of -0 and of
denormal values.  SGLang compiles this with a logarithm in float32, whose rounding can change the exponent if amax is
next to 6 times a power of two; 16-bit values are never that close.  It does not define scales of NaN and infinity.
Here, a tile with NaN has the scale NaN, and is read as NaN.
"""

from itertools import accumulate

import jax.numpy as jnp

from jaxkv_kernels.formats.bits import largest_magnitude, power_of_two_scale
from jaxkv_kernels.formats.entries import KVEntry, MLAEntry
from jaxkv_kernels.formats.format import Format, join, split_by_page, together
from jaxkv_kernels.formats.fp4 import E2M1_MAX, from_e2m1, from_e8m0, tiles_of, to_e2m1, to_e8m0

TILE = 16
"""Values that share a scale."""
SMALLEST_EXPONENT = -33
"""Smallest exponent of a scale: ceil(log2(1e-10))."""
SMALLEST_NORMAL = 2.0**-126
"""Smaller values are denormal: some devices take them for 0."""


class KvFp4(Format):
    """The number of values must be a positive multiple of 16 in both parts."""

    name = "kvfp4"
    kinds = (MLAEntry, KVEntry)
    dtype = "uint8"

    def fields(self, sizes, block_size):
        """The values of both parts, then their scales: those of a latent and its rotary part are one field."""
        if any(count % TILE or not count for count in sizes.values()):
            raise ValueError(f"kvfp4 entry of {dict(sizes)}: expected positive multiples of {TILE} values")
        values = [(name, "e2m1x2", count // 2) for name, count in sizes.items()]
        if "latent" in sizes:
            return split_by_page(block_size, values, [("scales", "e8m0", sum(sizes.values()) // TILE)])
        return together(*values, *((f"{name} scales", "e8m0", count // TILE) for name, count in sizes.items()))

    def encode(self, values, scales):
        """Computes each scale from the largest magnitude of its tile."""
        pairs, found = [], []
        for x in values:
            tiles = tiles_of(x, TILE)
            scale, _ = power_of_two_scale(largest_magnitude(tiles), SMALLEST_EXPONENT, E2M1_MAX)
            signed = jnp.where(tiles <= -SMALLEST_NORMAL, tiles, jnp.abs(tiles))
            pairs.append(to_e2m1(signed, scale, ties_to_even=False))
            found.append(to_e8m0(scale))
        return join((*pairs, *found), self.dtype)

    def decode(self, row, sizes, scales, dtype):
        """Multiplies in float32 and rounds to `dtype`, which is exact for bf16."""
        found = [field.read(row) for field in self.fields(sizes, 1)]
        scale = jnp.concatenate([from_e8m0(x) for x in found[len(sizes) :]], axis=-1)
        values = from_e2m1(jnp.concatenate(found[: len(sizes)], axis=-1), scale).astype(dtype)
        return jnp.split(values, [*accumulate(sizes.values())][:-1], axis=-1)
