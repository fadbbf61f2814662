"""`int8`: keys and values of int8, with a float32 scale for each token, head and array, 272 bytes for 128 + 128 values.

The arithmetic is that of vLLM's `int8_per_token_head`: a scale is max(amax / 127, 1e-6), and values divided by it are
rounded to nearest even.  vLLM multiplies by the rounded reciprocal of a scale, so that quotients next to a tie can
differ by 1.  The byte map is jaxkv's own: vLLM stores scales in arrays beside the cache, whereas here they are part of
an entry, which is padded with zeros to a multiple of 16 bytes, as copies by TMA require.  An array of values with
infinity or NaN has an infinite or NaN scale, and is read as NaN."""

import jax.numpy as jnp

from jaxkv_kernels.formats.bits import corrected_quotient, largest_magnitude
from jaxkv_kernels.formats.entries import KVEntry
from jaxkv_kernels.formats.format import Format, join, together

LARGEST = 127.0
SMALLEST_SCALE = 1e-6
PADDED = 16
"""Bytes to a multiple of which entries are padded."""


class Int8(Format):
    """The number of values of an entry, K and V together, must be a multiple of 4, so that scales are aligned."""

    name = "int8"
    kinds = (KVEntry,)
    dtype = "uint8"
    in_float32 = True

    def fields(self, sizes, block_size):
        """The values of K and V, then the scales of K and V."""
        if sum(sizes.values()) % 4:
            raise ValueError(f"int8 entry of {dict(sizes)}: expected a multiple of 4 values, K and V together")
        padding = -(sum(sizes.values()) + 4 * len(sizes)) % PADDED
        return together(
            *((name, "int8", count) for name, count in sizes.items()),
            *((f"{name} scales", "float32", 1) for name in sizes),
            *[("padding", "uint8", padding)] * (padding > 0),
        )

    def encode(self, values, scales):
        """Computes each scale from the largest magnitude of its array of values."""
        quantised, found = [], []
        for x in values:
            x = x.astype(jnp.float32)
            amax = largest_magnitude(x)[..., None]
            scale = jnp.maximum(corrected_quotient(amax, jnp.float32(LARGEST)), SMALLEST_SCALE)
            quotient = corrected_quotient(x, scale)
            quotient = jnp.where(jnp.isnan(quotient), 0, jnp.clip(jnp.round(quotient), -LARGEST, LARGEST))
            quantised.append(quotient.astype(jnp.int8))
            found.append(scale)
        nbytes = sum(x.shape[-1] * x.dtype.itemsize for x in (*quantised, *found))
        padding = jnp.zeros((*found[0].shape[:-1], -nbytes % PADDED), jnp.uint8)
        return join((*quantised, *found, padding), self.dtype)

    def decode(self, row, sizes, scales, dtype):
        """Multiplies in float32 and rounds to `dtype`."""
        found = [field.read(row) for field in self.fields(sizes, 1)]
        pairs = zip(found[: len(sizes)], found[len(sizes) : 2 * len(sizes)], strict=True)
        return [(x.astype(jnp.float32) * scale).astype(dtype) for x, scale in pairs]
