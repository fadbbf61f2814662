"""`fp8` and `fp8_e5m2`: e4m3 or e5m2 values without gaps, divided by a scale per tensor or per head.

The caller keeps the scale.  The elements of the buffer are bytes (uint8).  With float8 elements, XLA would convert the
whole buffer on devices that lack an operation on float8.
"""

import jax.numpy as jnp

from jaxkv_kernels.formats.bits import corrected_quotient, to_fp8
from jaxkv_kernels.formats.entries import KVEntry, MLAEntry
from jaxkv_kernels.formats.format import SHORT_NAMES, Format, join, together


class Fp8(Format):
    """stored = fp8(value / scale), saturating; value = stored * scale."""

    kinds = (MLAEntry, KVEntry)
    dtype = "uint8"
    scaled = True

    def __init__(self, name: str, stored: str):
        self.name, self.stored = name, stored

    def fields(self, sizes, block_size):
        """One field for each array of values (such as K and V)."""
        return together(*((name, self.stored, count) for name, count in sizes.items()))

    def encode(self, values, scales):
        """Divides in float32 and rounds to nearest even, saturating, also for infinity."""
        quotients = (
            corrected_quotient(x.astype(jnp.float32), scale[..., None]) for x, scale in zip(values, scales, strict=True)
        )
        return join([to_fp8(quotient, SHORT_NAMES[self.stored]) for quotient in quotients], self.dtype)

    def decode(self, row, sizes, scales, dtype):
        """Multiplies in float32 and rounds to `dtype`.  With a scale of None, returns the stored values unchanged."""
        values = []
        for field, scale in zip(self.fields(sizes, 1), scales, strict=True):
            value = field.read(row)
            values.append((value if scale is None else value.astype(jnp.float32) * scale[..., None]).astype(dtype))
        return values
