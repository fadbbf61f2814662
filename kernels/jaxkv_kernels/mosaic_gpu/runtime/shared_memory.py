"""Shared memory for TMA and wgmma, and prefetches to the L2 cache."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
"""Option for loads of contiguous memory, which Pallas compiles to one bulk copy only with this promise."""


def swizzled(*shape: int, dtype, swizzle: int = 128) -> Any:
    """Shared memory of `shape` in swizzled tiles of `swizzle` bytes by 8, which TMA writes and wgmma reads."""
    transforms = (plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def rotary_type(*shape: int, rope: int, dtype) -> Any:
    """Shared memory [*shape, rope] of 16, 32 or 64 rotary values, whose tiles are as wide."""
    return swizzled(*shape, rope, dtype=dtype, swizzle=rope * jnp.dtype(dtype).itemsize)


def zero_rows(ref, place: tuple[Any, ...], first: int, count: int, low, high, *, interpret: bool) -> None:
    """Zeroes rows `low` to `high` - 1 of `count` columns, from `first` on, of a tile in swizzled shared memory.

    `ref` [..., rows, columns] has elements of 16 bits, and `place` is the tile's index.  Both numbers of columns are
    multiples of 64.  Whole rows of swizzled tiles are zeroed without regard to the order of their columns: nothing is
    loaded, and a store is 16 bytes wide.
    """
    rows, columns = ref.shape[-2:]
    if interpret:
        part = ref.at[(*place, slice(None), pl.ds(first, count))]
        row = jnp.arange(rows)[:, None]
        part[...] = jnp.where((row >= low) & (row < high), jnp.zeros((), ref.dtype), part[...])
        return
    from jax.experimental.mosaic import gpu as mgpu
    from jax.extend.mlir.dialects import arith

    from jaxkv_kernels.mosaic_gpu.ptx.inline import at, c32, ptx
    from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR

    tile_rows, tile_columns, tile_nbytes = 8, 64, 1024
    groups, at_once = columns // tile_columns, mgpu.utils.WARPGROUP_SIZE * 16 // tile_nbytes
    index = jnp.int32(0)
    for n, size in zip(place, ref.shape[:-2], strict=True):
        index = index * size + n
    instruction = (
        "{{ .reg .pred p; setp.ge.s32 p, $1, $2; setp.lt.and.s32 p, $1, $3, p; "
        "@p st.shared.v4.b32 [$0 + {}], {{$4, $4, $4, $4}}; }}"
    )

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(swizzled(1, dtype=ref.dtype).transforms), SCALAR, SCALAR, SCALAR))
    def zero(_, ref, *scalars):
        index, low, high = (x.registers.item() for x in scalars)
        thread = arith.remui(mgpu.utils.thread_idx(), c32(mgpu.utils.WARPGROUP_SIZE))
        place = arith.shli(thread, c32(4))  # lanes take consecutive chunks of one or more column tiles
        row = arith.andi(arith.shrui(thread, c32(3)), c32(tile_rows - 1))
        column_tile = arith.shrui(place, c32(10))
        start = arith.addi(arith.muli(index, c32(2 * rows * columns)), place)
        start = at(mgpu.utils.memref_ptr(ref), start)
        for group in range(rows // tile_rows):
            own = arith.addi(row, c32(group * tile_rows))
            for done in range(0, count // tile_columns, at_once):
                left = count // tile_columns - done
                if left < at_once:
                    has_tile = arith.cmpi(arith.CmpIPredicate.ult, column_tile, c32(left))
                    own = arith.select(has_tile, own, c32(2**31 - 1))
                offset = (group * groups + first // tile_columns + done) * tile_nbytes
                ptx(instruction.format(offset), start, own, low, high, c32(0))

    zero(ref, index, low, high)


def prefetch_to_l2(start, nbytes: int, *, interpret: bool) -> None:
    """Prefetches `nbytes` of device memory, from a reference on, to the L2 cache, by one instruction of one thread."""
    if interpret:
        return
    from jax.experimental.mosaic import gpu as mgpu

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def bulk_prefetch(_, ref):
        one = mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)
        instruction = f"cp.async.bulk.prefetch.L2.global [$0], {nbytes};"
        mgpu.utils.inline_ptx(instruction, mgpu.utils.memref_ptr(ref), predicate=one, has_side_effects=True)

    bulk_prefetch(start)
