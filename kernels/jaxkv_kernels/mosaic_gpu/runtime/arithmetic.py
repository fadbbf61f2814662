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
    """`cap * tanh(scores / cap)`.  Scores and the result are in base 2, that is, multiplied by log2(e)."""
    # Computed from exp2, because the hardware's tanh has only 11 accurate bits.
    return (1 - 2 / (1 + jnp.exp2(scores * (2 / cap)))) * (cap * LOG2E)


def multiply_add(acc, a, b, meanwhile: Callable[[], Any] | None = None, *, scratch=None) -> Any:
    """`acc + a @ b` in registers, complete on return, and the result of `meanwhile`, which overlaps with the product.

    `acc` and `b` may also be tuples of equal length, whose elements lie side by side: parts of the columns.

    `a` is in registers or shared memory, `b` in shared memory.  `scratch`, a tile of shared memory for `a`, is passed
    only in the interpreter, which supports neither an initial accumulator nor a register operand: the product is then
    computed by other steps.
    """
    if not isinstance(acc, tuple):
        (total,), beside = multiply_add((acc,), a, (b,), meanwhile, scratch=scratch)
        return total, beside
    types = [plgpu.ACC((x.shape[0], x.shape[1]), jnp.float32) for x in acc]
    if scratch is None:

        def product(*refs):
            for ref, x in zip(refs, acc, strict=True):
                ref[...] = x
            for ref, part in zip(refs, b, strict=True):
                plgpu.wgmma(ref, a, part)
            beside = meanwhile() if meanwhile else None
            return tuple(ref[...] for ref in refs), beside

        return pl.run_scoped(product, *types)
    if isinstance(a, jax.Array):
        scratch[...] = a
        plgpu.commit_smem()
        a = scratch

    def added(*refs):
        for ref, part in zip(refs, b, strict=True):
            plgpu.wgmma(ref, a, part)
        return tuple(ref[...] for ref in refs)

    found = pl.run_scoped(added, *types)
    return tuple(x + y for x, y in zip(acc, found, strict=True)), meanwhile() if meanwhile else None
