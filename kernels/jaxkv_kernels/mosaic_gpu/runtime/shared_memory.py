"""Shared memory that TMA and wgmma use, and hints to the L2 cache."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
"""A load of contiguous memory must promise this to become one bulk copy."""


def swizzled(*shape: int, dtype) -> Any:
    """Shared memory in 128-byte swizzled tiles, which TMA writes and wgmma reads."""
    transforms = (plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


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
