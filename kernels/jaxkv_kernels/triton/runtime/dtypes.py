"""Triton's names of element types."""

import jax.numpy as jnp
import triton.language as tl

_TYPES = {
    "bfloat16": tl.bfloat16,
    "float16": tl.float16,
    "float32": tl.float32,
    "uint8": tl.uint8,
}


def element_type(dtype) -> tl.dtype:
    """The type that pointers to elements of `dtype` have; a constant of kernels."""
    return _TYPES[str(jnp.dtype(dtype))]
