"""`indexer_fp8`: a quantised indexer key, 128 e4m3 values and one float32 scale: 132 bytes a token.

The page is split: all its values first ([block_size, 128] bytes), then all its scales ([block_size] float32), the map
that vLLM writes and DeepGEMM reads.  `encode` gives a token's 128 + 4 bytes; the operations put them in their places.
The scale is a power of two, from an absolute maximum of at least 1e-4 (vLLM's `ue8m0` choice).
"""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxkv_kernels.formats.bits import FP8, power_of_two_scale, to_fp8, view_as

SCALE_BYTES = 4
SMALLEST_EXPONENT = -22  # 2 ** ceil(log2(1e-4 / 448))


@dataclass(frozen=True)
class IndexerFp8:
    """One key of n e4m3 values and its float32 scale."""

    name: str = "indexer_fp8"
    dtype: str = "uint8"
    alignment: int = 4
    scaled: bool = False

    def width(self, sizes):
        """Bytes: 132 for 128 values."""
        if len(sizes) != 1 or sizes[0] % 4:
            raise ValueError(f"indexer_fp8 stores one key of a multiple of 4 values; got parts {sizes}")
        return sizes[0] + SCALE_BYTES

    def encode(self, parts, scales):
        """A key [..., n] to bytes [..., n + 4]."""
        (key,) = parts
        key = key.astype(jnp.float32)
        scale, inverse = power_of_two_scale(jnp.abs(key).max(axis=-1, keepdims=True), SMALLEST_EXPONENT)
        pieces = (to_fp8(key * inverse), scale)
        return jnp.concatenate([view_as(piece, jnp.uint8) for piece in pieces], axis=-1)

    def decode(self, row, sizes, scales, dtype):
        """The key, multiplied in float32, then rounded to `dtype`."""
        values, scale = self.split(row, sizes)
        return [(values.astype(jnp.float32) * scale).astype(dtype)]

    def split(self, row, sizes):
        """Bytes [..., n + 4] to e4m3 values [..., n] and a float32 scale [..., 1]."""
        return view_as(row[..., : sizes[0]], FP8), view_as(row[..., sizes[0] :], jnp.float32)
