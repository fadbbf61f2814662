"""The products of a single token, after its norm, and the rows of one or more matrices, on sm_90.

A warp multiplies a row at a time, without tensor cores.  One kernel computes the norm and all products of a token
instead of XLA's one per matrix, each of which computes the norm again.  Timeline of a CTA:

    each warp loads its first two rows | waits for the previous kernel | all threads: square the token's values, sum
    over the CTA, normalise, store to shared memory | per row: multiply, sum over lanes, store, load the next but one

What bounds it: reading the matrices, 15 MB for queries and latents of DeepSeek-V2-Lite.
Barriers.  Two of the whole CTA: the sums of all warps, and the normalised token, are in shared memory.
Budget.  Shared memory: the token.  Registers: 128 per lane, of which 64 hold weights.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.runtime.hopper import MULTIPROCESSORS
from jaxkv_kernels.mosaic_gpu.runtime.interpreting import interpreting
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR

WARPGROUPS = 4


def normed_products(x, norm, matrices, *, eps: float) -> tuple[jax.Array, ...]:
    """The products [O] of the normalised token and each matrix.

    Args:
      x: [D], bfloat16 or float16.
      norm: [D], the weights of the norm, of x's dtype.
      matrices: several [O, D], of x's dtype.
      eps: the epsilon of the norm.
    """
    return _products(x, norm, *matrices, eps=eps, interpret=bool(interpreting.value))


@partial(jax.jit, static_argnames=("eps", "interpret"))
def _products(x, norm, *matrices, eps, interpret):
    width, dtype, rows = len(x), x.dtype, tuple(len(matrix) for matrix in matrices)

    def body(x_ref, norm_ref, *refs):
        matrix_refs, out_refs, scratch = refs[: len(rows)], refs[len(rows) : 2 * len(rows)], refs[2 * len(rows) :]
        if interpret:
            wide = x_ref[...].astype(jnp.float32)
            wide = (wide * lax.rsqrt((wide * wide).mean() + eps)).astype(dtype) * norm_ref[...]
            for matrix_ref, out_ref in zip(matrix_refs, out_refs, strict=True):
                product = jnp.einsum("d,od->o", wide, matrix_ref[...], preferred_element_type=jnp.float32)
                out_ref[...] = product.astype(dtype)
            return

        @plgpu.inline_mgpu(arg_types=([plgpu.RefType()] * (2 + len(refs)), SCALAR))
        def multiply(_, refs, cta):
            from jaxkv_kernels.mosaic_gpu.one_token import normed_lanes

            normed_lanes.normed(refs, cta.registers.item(), dtype=str(dtype), rows=rows, width=width, eps=eps)

        multiply([x_ref, norm_ref, *matrix_refs, *out_refs, *scratch], lax.axis_index("cta"))

    return tuple(
        kernel(
            body,
            interpret=interpret,
            auto_barriers=False,
            waits=True,
            kernel_name="gemv_of_one",
            out_type=[jax.ShapeDtypeStruct((count,), dtype) for count in rows],
            grid=(1 if interpret else MULTIPROCESSORS,),
            grid_names=("cta",),
            num_threads=1 if interpret else WARPGROUPS,
            thread_name="wg",
            scratch_types=[plgpu.SMEM((width,), dtype), plgpu.SMEM((4 * WARPGROUPS,), jnp.float32)],
        )(x, norm, *matrices)
    )
