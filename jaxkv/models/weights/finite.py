"""Weights must be finite, both in the checkpoint and in the dtype in which the model keeps them."""

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxkv.models.weights.checkpoint import Checkpoint


@partial(jax.jit, static_argnums=1)
def counts(values, dtype) -> jax.Array:
    """How many of `values` are NaN, infinite, and finite but beyond the largest number of `dtype`: int32 [3]."""
    wide = values.astype(jnp.float32)
    infinite = jnp.isinf(wide)
    beyond = jnp.isinf(wide.astype(dtype)) & ~infinite
    return jnp.stack([jnp.isnan(wide).sum(), infinite.sum(), beyond.sum()])


def check(checkpoint: "Checkpoint", name: str, found: jax.Array, size: int, dtype, *, scaled: bool = False) -> None:
    """ValueError, which names the file and the weight, unless all `counts` of a weight's `size` values are 0.

    `scaled` says that the values were multiplied by their scales.
    """
    nan, infinite, beyond = map(int, found)
    times = " times their scales" if scaled else ""
    if nan:
        raise checkpoint.error(name, f"holds {nan} NaN of {size} values{times}")
    if infinite:
        raise checkpoint.error(name, f"holds {infinite} infinite values of {size}{times}")
    if beyond:
        kind = jnp.dtype(dtype)
        raise checkpoint.error(
            name,
            f"holds {beyond} of {size} values{times} beyond {float(jnp.finfo(kind).max):g}, the largest of {kind}: "
            "load it with another `dtype`, such as 'float32'",
        )
