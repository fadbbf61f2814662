"""Stores results from registers to device memory, without shared memory.

Staged in shared memory, results would take the place of keys, and the next keys could not be loaded until the copy
engine has read the results.
"""

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR, WGMMA


def store_tile(values, to, place, first_row, first_column: int) -> None:
    """Stores a WGMMA tile [64, n] of 16-bit values to `to[place]` [rows, columns], from a row and a column on.

    Rows beyond the end of `to` are dropped.  n is a multiple of 32.

    In a row of a WGMMA tile, each lane of a quad holds two of every eight values.  The lanes of a quad exchange them, so
    that each has eight consecutive values, 16 bytes, and a quad stores 64 consecutive bytes.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jax.extend.mlir.dialects import arith

    from jaxkv_kernels.mosaic_gpu.runtime.ptx import at, c32, c64, i32, i64

    _, rows, columns = to.shape

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType(), SCALAR, SCALAR))
    def store(_, values, to, *scalars):
        place, first_row = (x.registers.item() for x in scalars)
        words = [mgpu.utils.bitcast(x, i32()) for x in values.registers.flat]  # by blocks of 8 columns, then by row
        thread = arith.remui(mgpu.utils.thread_idx(), c32(mgpu.utils.WARPGROUP_SIZE))
        lane, warp = arith.andi(thread, c32(31)), arith.shrui(thread, c32(5))
        quad_lane = arith.andi(lane, c32(3))
        is_set = [arith.cmpi(arith.CmpIPredicate.ne, arith.andi(quad_lane, c32(bit)), c32(0)) for bit in (1, 2)]
        own_row = arith.addi(first_row, arith.addi(arith.shli(warp, c32(4)), arith.shrui(lane, c32(2))))

        def transposed(four):
            """Words by lane, of the block whose number is the lane's, from words by block."""
            for bit, is_one in zip((1, 2), is_set, strict=True):
                for n in (n for n in range(4) if not n & bit):
                    low, high = four[n], four[n | bit]
                    received = mgpu.utils.shfl_bfly(arith.select(is_one, low, high), bit)
                    four[n], four[n | bit] = arith.select(is_one, received, low), arith.select(is_one, high, received)
            return four

        for half in range(2):
            row = arith.addi(own_row, c32(8 * half))
            is_row = arith.cmpi(arith.CmpIPredicate.slt, row, c32(rows))
            index = arith.extui(i64(), arith.addi(arith.muli(place, c32(rows)), row))
            start = at(mgpu.utils.memref_ptr(to), arith.muli(index, c64(2 * columns)))
            start = at(start, arith.shli(quad_lane, c32(4)))
            for block in range(0, len(words) // 2, 4):
                four = transposed([words[2 * (block + n) + half] for n in range(4)])
                instruction = f"st.global.v4.b32 [$0 + {2 * (first_column + 8 * block)}], {{$1, $2, $3, $4}};"
                mgpu.utils.inline_ptx(instruction, start, *four, predicate=is_row, has_side_effects=True)

    store(values, to, jnp.int32(place), jnp.int32(first_row))
