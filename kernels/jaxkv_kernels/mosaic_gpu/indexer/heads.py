"""What one lane does with the scores of heads (`stores.py`): MLIR and inline PTX.

A quad of lanes holds rows r and r + 8 of a WGMMA tile: lane l of the quad has columns 2 l and 2 l + 1 of every eight.
"""

from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from jaxkv_kernels.mosaic_gpu.ptx.fragments import elements
from jaxkv_kernels.mosaic_gpu.ptx.inline import f32, ptx
from jaxkv_kernels.mosaic_gpu.runtime.registers import WGMMA

MINUS_INFINITY = "0fFF800000"
ADDRESS = "mul.wide.u32 a, $1, {bytes}; mul.wide.u32 b, i, 4; add.s64 a, a, b; add.s64 a, a, $0;"
"""Computes the address `a` of element `i` of row $1 of the array at $0."""
WEIGH = "{ .reg .f32 x; max.NaN.f32 x, $1, 0f00000000; fma.rn.f32 $0, x, $2, $3; }"
OWN = 4
"""Values of a partial sum that a lane holds: of two rows and two columns."""


def weigh(scores, weights, partial=None) -> Any:
    """What one lane does in `stores.weigh`.  Multiply-adds are explicit, because no compiler fuses them here."""
    sums = [mgpu.c(0.0, f32())] * OWN if partial is None else elements(partial)
    weight = elements(weights)
    for n, score in enumerate(elements(scores)):  # by eight columns, then by row, then by column
        column = n // OWN * 2 + n % 2
        sums[n % OWN] = ptx(WEIGH, score, weight[column], sums[n % OWN], result_types=f32())
    pair = ir.VectorType.get((2,), f32())
    held = np.empty((2,), dtype=object)
    held[:] = [vector.from_elements(pair, sums[:2]), vector.from_elements(pair, sums[2:])]
    layout = WGMMA.to_mgpu()
    registers = held.reshape(layout.registers_shape((64, 8)))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def store(ref, scalars, partial, scales, *, length: int, part: int) -> None:
    """What one lane does in `stores.store_logits`: it stores the logit of one row and one query token.

    `scalars` are `row`, `first`, `end` and `known` of `store_logits`, and `skipped` unless it is None.  A quad of
    lanes holds partial sums of four logits: two rows of two query tokens.  Each lane first exchanges its sums of one
    query token for those of the other, then the sum of one row for that of the other, so that it has a single logit.
    With one query token, only two lanes of a quad store.
    """
    operands = [mgpu.utils.memref_ptr(ref), *scalars]
    skipped = f"${len(operands) - 1}" if len(scalars) > 4 else None
    names = []
    for sums in partial:
        first, second, third, fourth = elements(sums)
        names.append([f"${len(operands) + n}" for n in range(2)])
        operands += [arith.addf(first, second), arith.addf(third, fourth)]
    code = (
        "{ .reg .pred p, q, r; .reg .b32 i, n, lane; .reg .b64 a, b; .reg .f32 x, y, low, high; mov.u32 lane, %laneid; "
        "and.b32 n, lane, 2; setp.ne.b32 q, n, 0; and.b32 n, lane, 1; setp.ne.b32 r, n, 0; "  # q: token, r: row
    )
    if len(partial) == 2:
        for half, one, two in zip(("low", "high"), *names, strict=True):
            code += f"selp.f32 x, {one}, {two}, q; selp.f32 y, {two}, {one}, q; "
            code += f"shfl.sync.bfly.b32 x, x, 2, 31, -1; add.rn.f32 {half}, x, y; "
    else:
        for half, own in zip(("low", "high"), names[0], strict=True):
            code += f"shfl.sync.bfly.b32 x, {own}, 2, 31, -1; add.rn.f32 {half}, x, {own}; "
    code += "selp.f32 x, low, high, r; selp.f32 y, high, low, r; shfl.sync.bfly.b32 x, x, 1, 31, -1; "
    code += "add.rn.f32 x, x, y; "
    for scale in scales:
        low, high = (f"${len(operands) + n}" for n in range(2))
        operands += elements(scale)
        code += f"selp.f32 y, {high}, {low}, r; mul.rn.f32 x, x, y; "
    code += (
        "shl.b32 n, n, 3; shr.u32 i, lane, 2; add.s32 n, n, i; mov.u32 i, %tid.x; shr.u32 i, i, 1; and.b32 i, i, 48; "
        "add.s32 n, n, i; add.s32 i, n, $2; "  # n: the key within the tile, i: its position
        f"shr.u32 n, n, {part.bit_length() - 1}; shr.u32 n, $4, n; and.b32 n, n, 1; setp.eq.b32 p, n, 0; "
        "selp.b32 n, 1, 0, q; add.s32 lane, $3, n; "
        f"setp.ge.or.s32 p, i, lane, p; selp.f32 x, {MINUS_INFINITY}, x, p; setp.lt.s32 p, i, {length}; "
    )
    if skipped:
        code += f"setp.ge.and.s32 p, n, {skipped}, p; "
    if len(partial) == 1:
        code += "setp.eq.and.b32 p, n, 0, p; "
    code += (
        f"add.s32 n, n, $1; {ADDRESS.format(bytes=4 * length).replace('$1', 'n')} "
        # Logits stay in the L2 cache while keys pass through it: the selection reads them next.
        "createpolicy.fractional.L2::evict_last.b64 b, 0f3F800000; @p st.global.L2::cache_hint.f32 [a], x, b; }"
    )
    ptx(code, *operands, result_types=None, has_side_effects=True, convergent=True)
