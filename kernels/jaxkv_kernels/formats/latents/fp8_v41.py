"""`fp8_v41` and `fp8_v41_split`: the MXFP8 entry of DeepSeek V4.1, 528 bytes for 448 + 64 values, in two byte maps.

Latent and rotary part are e4m3, with an e8m0 scale (a power of two) for each tile of 32 values.  FlashMLA changed where
the scales are in its release of 2026-09-30.  Both byte maps have the same number of bytes per token, from which
FlashMLA infers the format, so that it misreads a cache of the other one without an error.

In `fp8_v41`, the scales of a token (16 bytes) follow its values (512 bytes), and pages have no padding.  FlashMLA reads
this byte map since that release, tokens as rows of the whole cache: the stride of its blocks must be a multiple of 528
bytes.  vLLM 0.33 stores it (`V41_BYTES_PER_TOKEN` in models/deepseek_v41/common/ops/cache_utils.py), and SGLang 0.5.23
calls it `KVLayout.V41_NEW`.

In `fp8_v41_split`, pages are split: a page stores the values of all tokens, then the scales of all tokens.  Pages are
rounded up to a multiple of 512 bytes.  This is the byte map of FlashMLA's earlier releases (`ModelType::V41`) and of
SGLang's `KVLayout.V41`, which SGLang 0.5.23 selects by default.

A scale is 2 ** ceil(log2(max(amax, 1e-4) / 448)), at least 2**-22, as in vLLM; SGLang's is at least 2**-13.  Values are
rounded to nearest even and saturate.  A tile with NaN has the scale NaN.
"""

from types import MappingProxyType

import jax.numpy as jnp

from jaxkv_kernels.formats.bits import largest_magnitude, power_of_two_scale, to_fp8
from jaxkv_kernels.formats.entries import MLAEntry
from jaxkv_kernels.formats.format import Field, Format, join, split_by_page, together
from jaxkv_kernels.formats.fp4 import from_e8m0, tiles_of, to_e8m0

TILE = 32
"""Values that share a scale."""
SMALLEST_EXPONENT = -22
"""Smallest exponent of a scale: 2 ** ceil(log2(1e-4 / 448))."""


class V41(Format):
    """What the formats of DeepSeek V4.1 share: tiles that span both parts, and scales after them.

    Pages may be split: the scales of all tokens are then after the values of all tokens, and pages are padded.
    """

    kinds = (MLAEntry,)
    dtype = "uint8"
    rope_in_values = True
    typical = MappingProxyType({"latent": 448, "rope": 64})
    tile: int
    """Values that share a scale."""
    stored: tuple[str, str]
    """The dtypes of values and scales."""

    def __init__(self, name: str, *, split: bool):
        self.name = name
        self._split = self.pads_pages = split

    def fields(self, sizes, block_size) -> tuple[Field, ...]:
        """The values of both parts, then their scales."""
        if any(size % self.tile or not size for size in sizes.values()):
            raise ValueError(f"{self.name} entry of {dict(sizes)}: expected positive multiples of {self.tile} values")
        values, scales = self.stored
        pairs = 2 if values == "e2m1x2" else 1
        arrays = [(part, values, count // pairs) for part, count in sizes.items()]
        after = ("scales", scales, sum(sizes.values()) // self.tile)
        return split_by_page(block_size, arrays, [after]) if self._split else together(*arrays, after)


class Fp8V41(V41):
    """The number of values must be a multiple of 32 in both parts."""

    tile, stored = TILE, ("e4m3", "e8m0")

    def encode(self, values, scales):
        """Computes each scale from the largest magnitude of its tile."""
        tiles = tiles_of(jnp.concatenate([x.astype(jnp.float32) for x in values], axis=-1), TILE)
        scale, inverse = power_of_two_scale(largest_magnitude(tiles), SMALLEST_EXPONENT)
        quantised = to_fp8(tiles * inverse[..., None]).reshape(*tiles.shape[:-2], tiles.shape[-2] * TILE)
        return join((quantised, to_e8m0(scale)), self.dtype)

    def decode(self, row, sizes, scales, dtype):
        """Multiplies in float32 and rounds to `dtype`."""
        latent, rope, scale = (field.read(row) for field in self.fields(sizes, 1))
        values = tiles_of(jnp.concatenate([latent, rope], axis=-1), TILE) * from_e8m0(scale)[..., None]
        values = values.reshape(*row.shape[:-1], sum(sizes.values())).astype(dtype)
        return [values[..., : sizes["latent"]], values[..., sizes["latent"] :]]
