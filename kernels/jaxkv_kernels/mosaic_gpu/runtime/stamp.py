"""Reads the GPU's clock between two kernels of a program."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.ptx.fragments import splat
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR


def stamp(after) -> jax.Array:
    """The time in nanoseconds modulo 2**32, int32 [1], read once all work that the array `after` depends on is done."""

    def body(after_ref, time_ref):
        del after_ref
        time_ref[0] = _time()

    out_type: Any = jax.ShapeDtypeStruct((1,), jnp.int32)
    return kernel(body, interpret=False, out_type=out_type, kernel_name="stamp")(after)


def _time() -> jax.Array:
    from jax.experimental.mosaic import gpu as mgpu
    from jax.extend.mlir import ir

    @plgpu.inline_mgpu(arg_types=(), return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=SCALAR))
    def read(_):
        i32 = ir.IntegerType.get_signless(32)
        low = mgpu.utils.inline_ptx("mov.u32 $0, %globaltimer_lo;", result_types=i32, has_side_effects=True)
        return splat(low)

    return read()
