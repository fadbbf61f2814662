"""`int4`: rotated keys and values of 4 bits, with a float32 scale for each token, head and array; 144 bytes for
128 + 128 values.

A Hadamard transform first spreads the values of a head, so that a few large ones do not take the range of all others,
as in vLLM's TurboQuant (pull request 38479) and `int4_per_token_head` (40835).  It is H / sqrt(n), orthonormal, where H
is the n x n matrix of 1 and -1 in Sylvester's order, n is the number of values of the array (a power of two), and
H * H = n.  With code = round(H x / (n * scale)) from -7 to 7, a value is scale * (H code).

A scale is the largest magnitude of H x / n, divided by 7, at least 2**-30.  Codes are rounded to nearest even.  H x is
the sum, in float32, of log2(n) steps: step s replaces the values a and b at i and i + 2**s by a + b and a - b.  H code
is a sum of integers, and exact.  The order of sums is part of the format, so that all devices store the same bytes.

A code is a two's complement number of 4 bits.  A byte has two codes, the first in the low bits.  Entries are padded
with zeros to a multiple of 16 bytes, as copies by TMA require.  An array of values with infinity or NaN has an infinite
or NaN scale, and is read as NaN.

The byte map is jaxkv's own.  vLLM's `int4_per_token_head` draws signs for the values before the transform, and stores
codes from 0 to 15 with their zero in the last bits of the scale; TurboQuant stores keys as indices of a table, beside
their norm, and values without a rotation.
"""

import jax
import jax.numpy as jnp

from jaxkv_kernels.formats.bits import corrected_quotient, largest_magnitude
from jaxkv_kernels.formats.entries import KVEntry
from jaxkv_kernels.formats.format import Format, join, together

LARGEST = 7.0
SMALLEST_SCALE = 2.0**-30
FEWEST = 8
"""Values of an array: with at least these, scales are aligned."""
PADDED = 16
"""Bytes to a multiple of which entries are padded."""


class Int4(Format):
    """The number of values must be a power of two, at least 8, in both arrays."""

    name = "int4"
    kinds = (KVEntry,)
    dtype = "uint8"
    in_float32 = True

    def fields(self, sizes, block_size):
        """The codes of K and V, then the scales of K and V."""
        if any(count < FEWEST or count & (count - 1) for count in sizes.values()):
            raise ValueError(f"int4 entry of {dict(sizes)}: expected powers of two, at least {FEWEST}")
        padding = -(sum(sizes.values()) // 2 + 4 * len(sizes)) % PADDED
        return together(
            *((name, "int4x2", count // 2) for name, count in sizes.items()),
            *((f"{name} scales", "float32", 1) for name in sizes),
            *[("padding", "uint8", padding)] * (padding > 0),
        )

    def encode(self, values, scales):
        """Computes each scale from the largest magnitude of its rotated array."""
        pairs, found = [], []
        for x in values:
            rotated = _transformed(x.astype(jnp.float32) * (1 / x.shape[-1]))  # a power of two: exact
            amax = largest_magnitude(rotated)[..., None]
            scale = jnp.maximum(corrected_quotient(amax, jnp.float32(LARGEST)), SMALLEST_SCALE)
            quotient = corrected_quotient(rotated, scale)
            quotient = jnp.where(jnp.isnan(quotient), 0, jnp.clip(jnp.round(quotient), -LARGEST, LARGEST))
            code = quotient.astype(jnp.int8).astype(jnp.uint8) & 15
            pairs.append(code[..., 0::2] | code[..., 1::2] << 4)
            found.append(scale)
        nbytes = sum(x.shape[-1] * x.dtype.itemsize for x in (*pairs, *found))
        padding = jnp.zeros((*found[0].shape[:-1], -nbytes % PADDED), jnp.uint8)
        return join((*pairs, *found, padding), self.dtype)

    def decode(self, row, sizes, scales, dtype):
        """Multiplies in float32 and rounds to `dtype`."""
        found = [field.read(row) for field in self.fields(sizes, 1)]
        values = []
        for pairs, scale in zip(found[: len(sizes)], found[len(sizes) : 2 * len(sizes)], strict=True):
            code = jnp.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], 2 * pairs.shape[-1])
            signed = (code ^ 8).astype(jnp.float32) - 8
            values.append((_transformed(signed) * scale).astype(dtype))
        return values


def _transformed(x: jax.Array) -> jax.Array:
    """H x of float32 `x` [..., n]."""
    count, apart = x.shape[-1], 1
    while apart < count:
        halves = x.reshape(*x.shape[:-1], count // (2 * apart), 2, apart)
        a, b = halves[..., 0, :], halves[..., 1, :]
        x = jnp.stack([a + b, a - b], axis=-2).reshape(x.shape)
        apart *= 2
    return x
