"""NumPy arrays to devices and back, without a program.

`jnp.asarray` and `astype` compile a program per shape and dtype.  Thousands of tests, whose shapes differ, would spend
much of their time on that.
"""

import jax
import numpy as np


def on_device(array, dtype=None) -> jax.Array:
    """A copy of a NumPy array, or of nested lists, as a JAX array."""
    return jax.device_put(np.array(array, dtype))


def as_float64(array) -> np.ndarray:
    """A JAX array of any float dtype, such as bfloat16, as a NumPy array."""
    return np.asarray(array).astype(np.float64)
