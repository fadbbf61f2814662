"""Shared memory for TMA and wgmma, and prefetches to the L2 cache."""

import math
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
"""Option for loads of contiguous memory, which Pallas compiles to one bulk copy only with this promise."""


def swizzled(*shape: int, dtype) -> Any:
    """Shared memory of `shape` in 128-byte swizzled tiles, which TMA writes and wgmma reads."""
    transforms = (plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def prefetch_to_l2(source, *, interpret: bool) -> None:
    """Prefetches the contiguous device memory of `source` to the L2 cache, by one instruction of one thread."""
    if interpret:
        return
    from jax.experimental.mosaic import gpu as mgpu
    from jax.extend.mlir import ir

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def bulk_prefetch(_, ref):
        kind = ir.MemRefType(ref.type)
        nbytes = math.prod(kind.shape) * mgpu.utils.bytewidth(kind.element_type)
        one = mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)
        instruction = f"cp.async.bulk.prefetch.L2.global [$0], {nbytes};"
        mgpu.utils.inline_ptx(instruction, mgpu.utils.memref_ptr(ref), predicate=one, has_side_effects=True)

    bulk_prefetch(source)
