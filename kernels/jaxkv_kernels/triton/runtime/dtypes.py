"""Triton's element types."""

import jax.numpy as jnp
import triton.language as tl

_TYPES = {
    "bfloat16": tl.bfloat16,
    "float16": tl.float16,
    "float32": tl.float32,
    "uint8": tl.uint8,
    "int8": tl.int8,
}


def element_type(dtype) -> tl.dtype:
    """Triton's type for elements of `dtype`, to be passed to kernels as a constant."""
    return _TYPES[str(jnp.dtype(dtype))]
