"""What one lane does to load e4m3 weights as operands of wgmma (`e4m3.py` has their order): MLIR and inline PTX."""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.mosaic_gpu.ptx.convert import E4M3_TO_F16
from jaxkv_kernels.mosaic_gpu.ptx.fragments import Lane, as_pair, fragmented, permuted, registers_of
from jaxkv_kernels.mosaic_gpu.ptx.inline import at, c32, i32, ptx
from jaxkv_kernels.mosaic_gpu.ptx.memory import LOAD_SHARED

ROW = 128
"""Bytes of a row of weights."""
F16_TO_BF16 = (
    "{ .reg .b16 low, high; .reg .f32 a, b; mov.b32 {low, high}, $1; cvt.f32.f16 a, low; cvt.f32.f16 b, high; "
    "cvt.rn.bf16x2.f32 $0, b, a; }"
)
"""Converts two float16 values to bf16."""


def operands(ref, first_row, layout, *, bf16: bool) -> list[Any]:
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
