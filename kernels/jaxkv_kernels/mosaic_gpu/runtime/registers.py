"""Arrays in registers: layouts, constants, broadcasts, stores, and votes of a warp or a warpgroup."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.ptx.fragments import elements, splat
from jaxkv_kernels.mosaic_gpu.ptx.inline import i32, ptx

WGMMA = plgpu.Layout.WGMMA
"""The layout of wgmma's results: a quad of lanes shares a row."""
ROW = plgpu.Layout.WGMMA.reduce(1)
"""One value per row of a WGMMA tile."""
COLUMN = plgpu.Layout.WGMMA.reduce(0)
"""One value per column of a WGMMA tile."""
SCALAR = plgpu.Layout.WG_SPLAT
"""One value, the same in all lanes of a warp."""
TCGEN05 = plgpu.Layout.TCGEN05
"""The layout of tiles of 128 rows in tensor memory.  A quad of lanes shares a row, as in WGMMA, but a warp has 32 rows
instead of 16: those that it can load from tensor memory."""
LANE_COLUMNS = 8
"""The number of columns after `fold_columns`: each lane of such tiles holds two of every eight columns."""


def filled(layout, value: float, *shape: int) -> jax.Array:
    """A float32 array of `shape` filled with `value`."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def zeros(*shape: int) -> jax.Array:
    """A float32 WGMMA tile of zeros."""
    return filled(WGMMA, 0, *shape)


def over_columns(row_values: jax.Array, columns: int) -> jax.Array:
    """One value per row, broadcast over the columns of a tile."""
    return jax.lax.broadcast_in_dim(row_values, (row_values.shape[0], columns), [0])


def over_rows(column_values: jax.Array, rows: int) -> jax.Array:
    """One value per column, broadcast over the rows of a tile."""
    return jax.lax.broadcast_in_dim(column_values, (rows, column_values.shape[0]), [1])


def store(to, x: jax.Array) -> None:
    """Stores a register array to device memory, with stores as wide as each lane's consecutive values allow."""
    if hasattr(plgpu, "store"):
        plgpu.store(to, x, optimized=False)
    else:  # jax 0.11
        to[...] = x


def fold_columns(op: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    """Reduces the columns of a WGMMA or TCGEN05 tile by `op` to LANE_COLUMNS.

    Each lane reduces its own, without shuffles.
    """
    while x.shape[1] > LANE_COLUMNS:
        half = x.shape[1] // 2
        x = op(x[:, :half], x[:, half:])
    return x


def any_positive(x: jax.Array, *, interpret: bool, warpgroup: bool = False, tile: plgpu.Layout = WGMMA) -> jax.Array:
    """Whether any value of a register array that the calling warp holds is positive; results of warps may differ.

    `x` is a tile of this layout, or has one value per row of such a tile.

    With `warpgroup`, whether any value of the whole array is positive.  The warps of the warpgroup then wait for each
    other.
    """
    if interpret:
        return (x > 0).any()
    from jax.experimental.mosaic import gpu as mgpu

    layout = tile if x.ndim == 2 else tile.reduce(1)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=SCALAR))
    def vote(_, x):
        values = elements(x)
        others = "".join(f"setp.gt.or.f32 p, ${n}, 0f00000000, p; " for n in range(2, len(values) + 1))
        instruction = "vote.sync.any.pred p, p, -1;"
        if warpgroup:
            instruction = f"bar.red.or.pred p, ${len(values) + 1}, {mgpu.utils.WARPGROUP_SIZE}, p;"
            values.append(mgpu.utils.warpgroup_barrier_idx(sync=False))
        code = f"{{.reg .pred p; setp.gt.f32 p, $1, 0f00000000; {others}{instruction} selp.b32 $0, 1, 0, p;}}"
        return splat(ptx(code, *values, result_types=i32(), has_side_effects=True, convergent=True))

    return vote(x) != 0
