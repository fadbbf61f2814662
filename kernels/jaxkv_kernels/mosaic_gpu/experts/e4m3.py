"""e4m3 weights as the left operand of wgmma: converted as they are loaded from shared memory to registers.

e4m3 values are exact in bf16 and float16, so the products of the values of a tile of 128 x 128 are multiplied by the
tile's scale in float32.  Neither weights nor scales are rounded.

A lane reads 16 consecutive values of a row of weights.  These are not the values that the register layout of wgmma
assigns to it.  The summed dimension is therefore permuted in both operands, in the same way for every 64 values, and so
are the rows of weights, so that eight lanes that read shared memory together use different banks.  Position

    p = (s1 s0 j q1 q0 e)    product s of 16 values, half j of it, lane q of a quad, first or second value of a register

holds the value

    k = (q1 q0 s1 e s0 j)    in binary

`in_positions` and `from_positions` convert tokens before the first product, and sums after the second one.  In between,
the results of the first product are in the order that the second one expects, because of its permuted rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR, WGMMA
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import swizzled

GROUP = 64
"""Values that are permuted among each other: the rows of a warpgroup's wgmma, and the columns of an operand."""
_VALUE = (4, 2, 2, 2, 2)
"""The axes of k: q, s1, e, s0, j."""
_TO_POSITION, _TO_VALUE = (1, 3, 4, 0, 2), (3, 0, 4, 1, 2)


def in_positions(x) -> jax.Array:
    """x [..., n], with each 64 values of the last axis in the order of positions."""
    return _permuted(x, _VALUE, _TO_POSITION)


def from_positions(x) -> jax.Array:
    """The inverse of `in_positions`."""
    return _permuted(x, tuple(_VALUE[axis] for axis in _TO_POSITION), _TO_VALUE)


def _permuted(x, axes, order):
    stack = x.shape[:-1]
    apart = x.reshape(*stack, -1, *axes)
    first = len(stack) + 1
    return apart.transpose(*range(first), *(first + axis for axis in order)).reshape(x.shape)


def operands(w_s, stage, half: int, wg, dtype, *, interpret: bool) -> list[Any]:
    """The 64 x 128 weights of a consumer as two operands [64, 64] of `dtype`, rows and columns by position.

    Args:
      w_s: shared memory of weights, e4m3 [stages, 2, rows, 128], swizzled.
      stage: the stage.
      half: which of the two products.
      wg: the consumer; it has rows from 64 * `wg` on.
      dtype: bfloat16 or float16.
      interpret: whether the kernel is interpreted.
    """
    if interpret:
        weights = w_s[stage, half, pl.ds(wg * GROUP, GROUP)].astype(dtype)
        weights = in_positions(in_positions(weights).T).T
        return [weights[:, :GROUP], weights[:, GROUP:]]
    from jaxkv_kernels.mosaic_gpu.experts import lanes

    operand = plgpu.ShapeDtypeStruct((GROUP, GROUP), dtype, layout=WGMMA)
    ref_type = plgpu.RefType(swizzled(1, dtype=w_s.dtype).transforms)

    @plgpu.inline_mgpu(arg_types=(ref_type, SCALAR), return_type=[operand] * 2)
    def load(_, ref, first_row):
        return lanes.operands(ref, first_row.registers.item(), WGMMA, bf16=dtype == jnp.bfloat16)

    return load(w_s, (2 * stage + half) * w_s.shape[2] + wg * GROUP)
