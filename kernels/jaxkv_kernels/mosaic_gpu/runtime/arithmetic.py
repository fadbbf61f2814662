"""Arithmetic of device-side code: capped scores, products on the tensor cores."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2E = math.log2(math.e)


def cap_scores(scores: jax.Array, cap: float) -> jax.Array:
    """`cap * tanh(scores / cap)`; scores come and go in base 2, that is, times log2(e)."""
    # By way of exp2: the hardware's own tanh is accurate to 11 bits only.
    return (1 - 2 / (1 + jnp.exp2(scores * (2 / cap)))) * (cap * LOG2E)


def multiply_add(acc: jax.Array, a, b, meanwhile: Callable[[], Any] | None = None, *, scratch=None) -> Any:
    """`acc + a @ b` in registers, complete on return, and the result of `meanwhile`, which overlaps with the product.

    `a` is a register tile or shared memory, `b` shared memory.  The interpreter supports neither an accumulator that
    starts from registers nor a register operand: with `scratch`, a tile of shared memory for `a`, other steps compute
    the same.
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
        scratch[...] = a
        plgpu.commit_smem()
        a = scratch

    def added(ref):
        plgpu.wgmma(ref, a, b)
        return ref[...]

    return acc + pl.run_scoped(added, plgpu.ACC(shape, jnp.float32)), meanwhile() if meanwhile else None
