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
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.mosaic_gpu.ptx.conversions import E4M3_TO_F16
from jaxkv_kernels.mosaic_gpu.ptx.fragments import Lane, as_pair, fragmented, permuted, registers_of
from jaxkv_kernels.mosaic_gpu.ptx.inline import at, c32, i32, ptx
from jaxkv_kernels.mosaic_gpu.ptx.loads import LOAD_SHARED
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR, WGMMA
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import swizzled

GROUP = 64
"""Values that are permuted among each other: the rows of a warpgroup's wgmma, and the columns of an operand."""
ROW = 128
"""Bytes of a row of weights."""
F16_TO_BF16 = (
    "{ .reg .b16 low, high; .reg .f32 a, b; mov.b32 {low, high}, $1; cvt.f32.f16 a, low; cvt.f32.f16 b, high; "
    "cvt.rn.bf16x2.f32 $0, b, a; }"
)
"""Converts two float16 values to bf16."""
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


def operands(w_s, stage, half: int, wg, dtype) -> list[Any]:
    """The 64 x 128 weights of a consumer as two operands [64, 64] of `dtype`, rows and columns by position.

    Args:
      w_s: shared memory of weights, e4m3 [stages, 2, rows, 128], swizzled.
      stage: the stage.
      half: which of the two products.
      wg: the consumer; it has rows from 64 * `wg` on.
      dtype: bfloat16 or float16.
    """
    if interpreting.value:
        weights = w_s[stage, half, pl.ds(wg * GROUP, GROUP)].astype(dtype)
        weights = in_positions(in_positions(weights).T).T
        return [weights[:, :GROUP], weights[:, GROUP:]]
    operand = plgpu.ShapeDtypeStruct((GROUP, GROUP), dtype, layout=WGMMA)
    ref_type = plgpu.RefType(swizzled(1, dtype=w_s.dtype).transforms)

    @plgpu.inline_mgpu(arg_types=(ref_type, SCALAR), return_type=[operand] * 2)
    def load(_, ref, first_row):
        return _operands(ref, first_row.registers.item(), WGMMA, bf16=dtype == jnp.bfloat16)

    return load(w_s, (2 * stage + half) * w_s.shape[2] + wg * GROUP)


def _operands(ref, first_row, layout, *, bf16: bool) -> list[Any]:
    """The two operands [64, 64] of the 64 rows from `first_row` on of weights in 128-byte swizzled tiles."""
    lane = Lane()
    even, warp = arith.andi(lane.row, c32(1)), arith.andi(lane.warp, c32(1))
    row = _sum(
        first_row,
        arith.shli(arith.shrui(lane.row, c32(1)), c32(4)),
        arith.shli(arith.shrui(lane.warp, c32(1)), c32(3)),
        arith.shli(even, c32(2)),
        arith.shli(warp, c32(1)),
    )
    # The swizzle XORs the row modulo 8 into the number of the chunk of 16 bytes.
    chunk = arith.xori(_sum(lane.quad, arith.shli(even, c32(2))), arith.shli(warp, c32(1)))
    start = _sum(arith.shli(row, c32(7)), arith.shli(chunk, c32(4)))
    found = []
    for group in range(2):
        registers = registers_of(layout, (64, 64))
        for half in range(2):
            place = arith.xori(start, c32(group * 64 + half * 16))
            code = LOAD_SHARED.format(offset=half * ROW)
            address = at(mgpu.utils.memref_ptr(ref), place)
            loaded = list(ptx(code, address, result_types=[i32()] * 4, has_side_effects=True))
            for column, word in enumerate(_pairs(loaded, bf16)):
                kind = ir.BF16Type if bf16 else ir.F16Type
                registers[0, column, 0, 0, half, 0, 0, 0, 0] = as_pair(word, kind.get())
        found.append(fragmented(registers, layout))
    return found


def _pairs(loaded, bf16: bool):
    """The pairs of 16-bit values of 16 e4m3 values, in the order of (s1 s0 j); a pair has bytes of two words."""
    for first, second in (loaded[:2], loaded[2:]):
        for selector in (0x5140, 0x7362):
            together = permuted(first, second, c32(selector))
            for values in ptx(E4M3_TO_F16, together, result_types=[i32()] * 2):
                yield ptx(F16_TO_BF16, values, result_types=i32()) if bf16 else values


def _sum(*terms) -> Any:
    first, *others = terms
    for term in others:
        first = arith.addi(first, term)
    return first
