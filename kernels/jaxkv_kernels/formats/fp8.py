"""`fp8`: e4m3 values without gaps, divided by a scale per tensor or per head that the caller keeps.

The elements of the buffer are bytes (uint8).  With float8 elements, XLA would convert the whole buffer on devices that
lack an operation on float8.
"""

import jax.numpy as jnp

from jaxkv_kernels.formats.bits import corrected_quotient, to_fp8
from jaxkv_kernels.formats.entries import KVEntry, MLAEntry
from jaxkv_kernels.formats.format import Format, join, together


class Fp8(Format):
    """stored = e4m3(value / scale), saturating; value = stored * scale."""

    name = "fp8"
    kinds = (MLAEntry, KVEntry)
    dtype = "uint8"
    scaled = True

    def parts(self, sizes, block_size):
        """One part for each array of values (such as K and V)."""
        return together(*((name, "e4m3", count) for name, count in sizes.items()))

    def encode(self, values, scales):
        """Divides in float32 and rounds to e4m3, saturating."""
        quotients = (
            corrected_quotient(x.astype(jnp.float32), scale[..., None]) for x, scale in zip(values, scales, strict=True)
        )
        return join([to_fp8(quotient) for quotient in quotients], self.dtype)

    def decode(self, row, sizes, scales, dtype):
        """Multiplies in float32 and rounds to `dtype`.  With a scale of None, returns the stored values unchanged."""
        values = []
        for part, scale in zip(self.parts(sizes, 1), scales, strict=True):
            value = part.read(row)
            values.append((value if scale is None else value.astype(jnp.float32) * scale[..., None]).astype(dtype))
        return values
