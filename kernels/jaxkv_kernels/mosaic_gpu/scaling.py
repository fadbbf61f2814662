"""How the scales of quantised entries, and the queries of calls on such entries, are made to fit float16.

The latent becomes float16, which represents every e4m3 value exactly.  A token's scales are multiplied into it where
that is safe: where all four are at least 2**-14 and below 2**7, products neither overflow nor lose bits of a scale.
Otherwise they are first divided by a power of two, the token's factor.  Scores and weights of the token are multiplied
by its factor in float32, and its rotary key is divided by it.  Products with scales that are powers of two are exact,
except for scales below 2**-15 times the token's largest; other scales are rounded to float16.

Scales of e8m0, of e2m1 values, are treated in the same way, as their exponents: they are multiplied into values as they
are where all are in a range in which products are exact.  Otherwise, those below 2**-20 times the token's largest count
as 0.  Scales of e4m3 need no factor: float16 represents all products.

The constants are bit patterns of float32 values.  They are compared, added and subtracted as integers.
"""

import jax.numpy as jnp
from jax import lax

MASKED_KEY = -1.0
"""The factor of a masked key."""
SMALLEST, LARGEST = 0x38800000, 0x43000000
"""2**-14 and 2**7: scales from the first up to the second are multiplied into values as they are."""
EXPONENT = 0x7F800000
"""A mask of the exponent.  What it leaves of a positive value is the largest power of two that is not above it."""
LEAST_FACTOR, MOST_FACTOR = 27 << 23, 253 << 23
"""2**-100 and 2**126."""
INVERSE = 254 << 23
"""The sum of the bits of a power of two and of its inverse."""
E8M0_RANGE = 21, 107, 136
"""The exponent of float16 2**6, which is part of the scales of e2m1 values (`ptx/gather.py`); the smallest and the
largest e8m0 scales that are multiplied into values as they are."""
_FIT = 14 << 23
"""2**14, as a difference of bits: scaled rows of queries have their largest magnitude from 2**14 up to 2**15."""
_LEAST_QUERY, _MOST_QUERY = 20 << 23, 254 << 23
"""2**-107, below which rows of queries are not scaled up further, and 2**127."""


def scale_to_fit(largest):
    """The powers of two that rows of queries are multiplied by to fit float16, and their inverses, for the scores.

    `largest` has the largest magnitude of each row.
    """
    bits = jnp.clip(lax.bitcast_convert_type(largest, jnp.int32) & EXPONENT, _LEAST_QUERY, _MOST_QUERY)
    factor = _int32(INVERSE + _FIT) - bits
    return tuple(lax.bitcast_convert_type(x, jnp.float32) for x in (factor, bits - _FIT))


def _int32(bits: int):
    """An int32 of these 32 bits."""
    return jnp.int32(bits - (1 << 32) if bits >= 1 << 31 else bits)
