"""Which experts any of a few tokens have chosen: tiles of rows for kernels in which each of them multiplies all tokens.

Work.  One CTA of one warpgroup.  Timeline:

    clear the bits of all experts | each thread: load choices, set the bits of their experts | count the bits before
    each word; each lane of the first warp: store the expert of its bit of each word

What bounds it: latency.
Barriers.  Named barriers of the warpgroup, before and after bits are set.
Budget.  Shared memory: a word per 32 experts.  Registers: scalars only.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel

WORDS = 32
"""Words of bits: one per lane of a warp."""
MOST_EXPERTS = 32 * WORDS


@partial(jax.jit, static_argnames=("count", "more", "size", "interpret"))
def list_chosen(experts, *, count: int, more: int, size: int, interpret: bool) -> tuple[jax.Array, ...]:
    """The tiles of rows of the chosen experts, in order of their ids, as `products` expects them.

    Args:
      experts: int32 [T, K], ids of experts.  Ids outside [0, `count`) are not chosen.
      count: the experts that tokens choose from.
      more: the experts after these, which are always chosen.
      size: the rows of an expert, in units of 8 rows; those of expert e begin at e * `size`.
      interpret: whether the kernel is interpreted.

    Returns:
      Ids, first rows and sizes, int32 [min(E, T * K) + more], of which the first n are defined; and n, int32 [1].
    """
    most = min(count, experts.size) + more

    def body(experts_ref, *refs):
        if interpret:
            outs = refs[:-1]
            ids = jnp.arange(count + more)
            chosen = (experts_ref[...][:, None] == ids).any(axis=0) | (ids >= count)
            (found,) = jnp.nonzero(chosen, size=most)
            for ref, values in zip(outs, (found, found * size, jnp.full(most, size), chosen.sum()[None]), strict=True):
                ref[...] = values.astype(jnp.int32)
            return

        @plgpu.inline_mgpu(arg_types=([plgpu.RefType()] * (len(refs) + 1),))
        def store(_, refs):
            from jaxkv_kernels.mosaic_gpu.experts import routing_lanes

            routing_lanes.list_chosen(refs, experts.size, count, more, size)

        store([experts_ref, *refs])

    shape = jax.ShapeDtypeStruct((most,), jnp.int32)
    out_type: Any = [shape, shape, shape, jax.ShapeDtypeStruct((1,), jnp.int32)]
    return tuple(
        kernel(
            body,
            interpret=interpret,
            auto_barriers=False,
            kernel_name="experts_listed",
            out_type=out_type,
            grid=(1,),
            grid_names=("cta",),
            num_threads=1,
            thread_name="wg",
            scratch_types=[plgpu.SMEM((WORDS,), jnp.int32)],
        )(experts.reshape(-1))
    )
