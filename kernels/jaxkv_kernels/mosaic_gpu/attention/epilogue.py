"""What attention kernels store: results of whole requests, and splits in float16.

A split's values are weighted means of a part of the keys.  They are stored in float16, with each row (or half of a
row) divided by its largest magnitude, which is stored as well: half the bytes of float32, with the range of float32.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

SPLIT_DTYPE = jnp.float16
FINITE = 1e37
"""Rows with a larger magnitude (infinity, NaN) are not divided, so that they stay what they are."""


def result_types(
    leading: tuple[int, ...], splits: int, dtype, *, rows: int, width: int, lse: int, split_lse: int, scales: int
) -> tuple[Any, ...]:
    """Values and log-sum-exps of whole requests; values, log-sum-exps (base 2) and scales of splits.

    `leading` is (requests,) or (requests, heads).  `lse` and `split_lse` are the numbers of rows of the arrays with one
    value per row.  A row of a split has `scales` scales, one for each equal part of its values.
    """
    batch, *heads = leading
    shape, per_row = jax.ShapeDtypeStruct, partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    return (
        shape((batch, *heads, rows, width), dtype),
        per_row((batch, *heads, lse)),
        shape((splits, *heads, rows, width), dtype),  # the bits of SPLIT_DTYPE: shared memory has one dtype
        per_row((splits, *heads, split_lse)),
        per_row((splits, scales, *heads, split_lse)),
    )


def split_scale(magnitude):
    """The divisors of the rows of a split, from the rows' largest magnitudes."""
    return jnp.where(magnitude < FINITE, jnp.maximum(magnitude, 1 / FINITE), 1.0)
