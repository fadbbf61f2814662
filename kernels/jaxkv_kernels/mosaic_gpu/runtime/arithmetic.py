"""Arithmetic of device-side code: integers, capped scores, products on the tensor cores."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2E = math.log2(math.e)
OPAQUE_LIMIT = 1 << 20
"""Where `opaque_zero` ends to be 0."""


def floordiv(a, b: int):
    """`a // b` for non-negative integers, because kernels do not support floor division of traced integers."""
    return lax.div(a, a.dtype.type(b))


def opaque_zero(i):
    """0, computed from an integer `i` from 0 to OPAQUE_LIMIT - 1 in a way that the compiler does not see through.

    `i` is the index of a tile of keys, of a pair of tiles or of a request; `layout_reasons.table_sizes` limits these.
    It is added to the stage index of a wgmma operand in shared memory.  With a constant index, the compiler would hoist
    the 64-bit descriptors of all operands out of the loop and spill them, which makes a kernel half as fast.
    """
    return floordiv(i, OPAQUE_LIMIT)


def cap_scores(scores: jax.Array, cap: float) -> jax.Array:
    """`cap * tanh(scores / cap)`.  Scores and the result are in base 2, that is, multiplied by log2(e)."""
    # Computed from exp2, because the hardware's tanh has only 11 accurate bits.
    return (1 - 2 / (1 + jnp.exp2(scores * (2 / cap)))) * (cap * LOG2E)


def multiply_add(acc: jax.Array, a, b, meanwhile: Callable[[], Any] | None = None, *, scratch=None) -> Any:
    """`acc + a @ b` in registers, complete on return, and the result of `meanwhile`, which overlaps with the product.

    `a` is in registers or shared memory, `b` in shared memory.  `scratch`, a tile of shared memory for `a`, is passed
    only in the interpreter, which supports neither an initial accumulator nor a register operand: the product is then
    computed by other steps.
    """
    shape = acc.shape[0], acc.shape[1]
    if scratch is None:

        def product(ref):
            ref[...] = acc
            plgpu.wgmma(ref, a, b)
            beside = meanwhile() if meanwhile else None
            return ref[...], beside

        return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
    if isinstance(a, jax.Array):
        a = register_operand(a, scratch)

    def added(ref):
        plgpu.wgmma(ref, a, b)
        return ref[...]

    return acc + pl.run_scoped(added, plgpu.ACC(shape, jnp.float32)), meanwhile() if meanwhile else None


def register_operand(a: jax.Array, scratch):
    """`a` in registers, as an operand of wgmma.  In the interpreter, which supports none, a copy of it in `scratch`.

    `scratch`, a tile of shared memory, is None on a GPU.
    """
    if scratch is None:
        return a
    scratch[...] = a
    plgpu.commit_smem()
    return scratch
