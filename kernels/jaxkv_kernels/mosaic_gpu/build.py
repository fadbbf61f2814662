"""How the kernels are built, and the words that they share."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WGMMA = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
"""Layout of one value a row of a WGMMA tile."""
IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
"""What a load must promise to become one bulk copy of contiguous memory."""

LOG2E = math.log2(math.e)
MASKED, EMPTY = -1e33, -1e30
"""Score of a masked key, and maximum of a row without keys: far enough apart that exp2 of the difference is 0."""

MULTIPROCESSORS, SHARED_MEMORY = 132, 232_448
"""Of an H100 or H200; bytes a CTA."""


def kernel(body, *, interpret: bool, **spec) -> Any:
    """`plgpu.kernel` with what all kernels here share."""
    params: Any = plgpu.InterpretGPUParams(detect_races=True) if interpret else None
    return plgpu.kernel(
        body,
        interpret=params,
        # Row reductions stay inside a quad of lanes: no scratch.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **spec,
    )


def frozen(ref) -> jax.Array:
    """What a kernel left in `ref`, its operand that it wrote to."""
    # Without the barrier, where a scan stacks such results, rows that the kernel left alone came back as zeros (H200,
    # jax 0.11.2).
    return jax.lax.optimization_barrier(jax.freeze(ref))


def swizzled(*shape: int, dtype) -> Any:
    """Shared memory that TMA fills and wgmma reads."""
    transforms = (plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def zeros(*shape: int) -> jax.Array:
    """A float32 tile of zeros in registers."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA)


def row_of(rows: int, value: float) -> jax.Array:
    """One value a row, in registers."""
    return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), ROW)


def across(row: jax.Array, columns: int) -> jax.Array:
    """A row vector broadcast over the columns of a tile."""
    return jax.lax.broadcast_in_dim(row, (row.shape[0], columns), [0])


def multiply_add(onto: jax.Array, a, b, meanwhile: Callable[[], Any] | None = None, *, scratch=None) -> Any:
    """`onto + a @ b` in registers, drained on return, and the result of `meanwhile`, which runs beside the product.

    `a` is a register tile or shared memory, `b` shared memory.  The interpreter knows neither accumulators that start
    from registers nor a register operand: with a `scratch` tile in shared memory it is told in other words.
    """
    shape = onto.shape[0], onto.shape[1]
    if scratch is None:

        def product(acc):
            acc[...] = onto
            plgpu.wgmma(acc, a, b)
            beside = meanwhile() if meanwhile else None
            return acc[...], beside

        return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
    if isinstance(a, jax.Array):
        scratch[...] = a
        plgpu.commit_smem()
        a = scratch

    def added(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return onto + pl.run_scoped(added, plgpu.ACC(shape, jnp.float32)), meanwhile() if meanwhile else None


def store(ref, value: jax.Array) -> None:
    """`ref[...] = value` for values that reach memory in pieces of less than a sector, which jax 0.12 wants told."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
