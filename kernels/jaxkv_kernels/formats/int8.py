"""`int8`: keys and values of int8, with a float32 scale for each token, head and array, 264 bytes for 128 + 128 values.

The arithmetic is that of vLLM's `int8_per_token_head`: a scale is max(amax / 127, 1e-6), and values divided by it are
rounded to nearest even.  vLLM multiplies by the rounded reciprocal of a scale, so that quotients next to a tie can
differ by 1.  The byte map is jaxkv's own: vLLM stores scales in arrays beside the cache, whereas here they are part of
an entry.  An array of values with infinity or NaN has an infinite or NaN scale, and is read as NaN.
"""

import jax.numpy as jnp

from jaxkv_kernels.formats.bits import corrected_quotient, largest_magnitude
from jaxkv_kernels.formats.entries import KVEntry
from jaxkv_kernels.formats.format import Format, join, together

LARGEST = 127.0
SMALLEST_SCALE = 1e-6


class Int8(Format):
    """The number of values of an entry, K and V together, must be a multiple of 4, so that scales are aligned."""

    name = "int8"
    kinds = (KVEntry,)
    dtype = "uint8"
    in_float32 = True

    def parts(self, sizes, block_size):
        """The values of K and V, then the scales of K and V."""
        if sum(sizes.values()) % 4:
            raise ValueError(f"int8 entry of {dict(sizes)}: expected a multiple of 4 values, K and V together")
        return together(*((name, "int8", count) for name, count in sizes.items()), ("scales", "float32", len(sizes)))

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
        return join((*quantised, *found), self.dtype)

    def decode(self, row, sizes, scales, dtype):
        """Multiplies in float32 and rounds to `dtype`."""
        *values, scale = (part.read(row) for part in self.parts(sizes, 1))
        return [(x.astype(jnp.float32) * scale[..., n : n + 1]).astype(dtype) for n, x in enumerate(values)]
