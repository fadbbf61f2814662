"""`fp8`: e4m3 values, side by side, each part divided by a scale that the caller keeps (one a layer, or one a head).

The buffer is one of bytes: XLA widens an array of float8 as a whole where a device lacks an operation on it.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxkv_kernels.formats.bits import FP8, to_fp8, view_as


@dataclass(frozen=True)
class Fp8:
    """stored = e4m3(value / scale), saturating; value = stored * scale."""

    name: str = "fp8"
    dtype: str = "uint8"
    alignment: int = 1
    scaled: bool = True

    def width(self, sizes):
        """One byte a value."""
        return sum(sizes)

    def encode(self, parts, scales):
        """Parts [..., n_i] with scales broadcastable to [...] to [..., sum n_i]."""
        quantised = [to_fp8(p.astype(jnp.float32) / s[..., None]) for p, s in zip(parts, scales, strict=True)]
        return view_as(jnp.concatenate(quantised, axis=-1), jnp.uint8)

    def decode(self, row, sizes, scales, dtype):
        """Multiplied in float32, then rounded to `dtype`; without a scale, the stored values, exact in any `dtype`."""
        first, parts = 0, []
        for size, scale in zip(sizes, scales, strict=True):
            part = view_as(row[..., first : first + size], FP8)
            if scale is not None:
                part = part.astype(jnp.float32) * scale[..., None]
            parts.append(part.astype(dtype))
            first += size
        return parts
