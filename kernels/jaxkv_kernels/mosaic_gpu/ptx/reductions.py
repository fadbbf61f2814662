"""Reduces over lanes of a warp, over the rows of a tile, or over the columns of a row, by shuffles between lanes."""

from collections.abc import Iterator
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from jaxkv_kernels.mosaic_gpu.ptx.fragments import LANES, Lane, elements, fragmented, registers_of, words
from jaxkv_kernels.mosaic_gpu.ptx.inline import at, c32, i32, ptx


def warp_reduction(operation: str, of: str, other: str) -> Iterator[str]:
    """PTX that reduces a register over the warp, by another one; all lanes get the same bits."""
    for lanes in (16, 8, 4, 2, 1):
        yield f"shfl.sync.bfly.b32 {other}, {of}, {lanes}, 31, -1; {operation} {of}, {of}, {other};\n"


def largest_of_lanes(bits, lanes: int) -> Any:
    """The largest `bits` among `lanes` consecutive lanes."""
    distance = lanes // 2
    while distance:
        shuffle = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;"
        other = ptx(shuffle, bits, result_types=i32(), has_side_effects=True, convergent=True)
        bits, distance = arith.maxui(bits, other), distance // 2
    return bits


def over_warps(x, ref, scratch: int, side, kind: str, layout) -> Any:
    """The maximum or sum over the rows of a float32 [64, 16] tile, in all lanes.

    Four rows of `ref`, from row `scratch` + 4 * `side` on, are scratch memory.
    """
    f32, lane = ir.F32Type.get(), Lane()

    def combine(a, b):
        return ptx(f"{kind}.f32 $0, $1, $2;", a, b, result_types=f32)

    mgpu.utils.warpgroup_barrier()  # scratch memory may still be read
    base = at(mgpu.utils.memref_ptr(ref), arith.addi(arith.shli(lane.quad, c32(3)), arith.shli(side, c32(8))))
    own = at(base, arith.shli(lane.warp, c32(6)))
    first = arith.cmpi(arith.CmpIPredicate.eq, lane.row, c32(0))
    for tile in range(2):
        halves = [words(x.registers[0, tile, 0, 0, half].flat[0]) for half in range(2)]
        columns = []
        for column in range(2):
            value = combine(halves[0][column], halves[1][column])
            for distance in (4, 8, 16):
                shuffle = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;"
                other = ptx(shuffle, value, result_types=f32, has_side_effects=True, convergent=True)
                value = combine(value, other)
            columns.append(value)
        store = f"st.shared.v2.f32 [$0 + {64 * scratch + 32 * tile}], {{$1, $2}};"
        ptx(store, own, *columns, predicate=first)
    mgpu.utils.warpgroup_barrier()
    registers = registers_of(layout, (16,))
    for tile in range(2):
        total: Any = None
        for warp in range(4):
            load = f"ld.shared.v2.f32 {{$0, $1}}, [$2 + {64 * (scratch + warp) + 32 * tile}];"
            found = ptx(load, base, result_types=[f32] * 2, has_side_effects=True)
            total = found if total is None else [combine(a, b) for a, b in zip(total, found, strict=True)]
        registers[tile, 0, 0] = vector.from_elements(ir.VectorType.get((2,), f32), list(total))
    return fragmented(registers, layout)


def largest(raw, layout) -> Any:
    """Per lane, the largest magnitude of its row of bf16 queries, as float32."""
    most: Any = c32(0)
    for word in elements(raw):
        most = ptx("max.u16x2 $0, $1, $2;", most, arith.andi(word, c32(0x7FFF7FFF)), result_types=i32())
    most = arith.maxui(arith.shrui(most, c32(16)), arith.andi(most, c32(0xFFFF)))
    for distance in (1, 2, 4):
        shuffle = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;"
        most = arith.maxui(most, ptx(shuffle, most, result_types=i32(), has_side_effects=True, convergent=True))
    f32 = ir.F32Type.get()
    registers = registers_of(layout, (LANES,))
    value = arith.bitcast(f32, arith.shli(most, c32(16)))
    registers.flat[0] = vector.from_elements(ir.VectorType.get((1,), f32), [value])
    return fragmented(registers, layout)
