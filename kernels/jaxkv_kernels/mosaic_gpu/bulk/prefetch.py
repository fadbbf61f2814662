"""Prefetches arrays to the L2 cache, for kernels that follow: memory is then read while others wait for latencies.

Work.  A CTA of one warpgroup has its share of the chunks of each array.  One of its threads starts the prefetches, and
nothing waits for them.

What bounds it: the launch.
Barriers.  None.
Budget.  No shared memory.  Registers: scalars only.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkv_kernels.mosaic_gpu.runtime.hopper import MULTIPROCESSORS
from jaxkv_kernels.mosaic_gpu.runtime.interpreting import interpreting
from jaxkv_kernels.mosaic_gpu.runtime.launch import freeze, kernel
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import prefetch_to_l2

CHUNK = 16384
"""Bytes of a prefetch."""


def prefetch(x, arrays):
    """`x` as it is, after the prefetches of `arrays` have been started; their sizes are multiples of 16 bytes."""
    return _prefetch(x, arrays, interpret=bool(interpreting.value))


@partial(jax.jit, static_argnames="interpret")
def _prefetch(x, arrays, *, interpret):
    flat = [array.reshape(-1) for array in arrays]

    def body(*refs):
        cta = lax.axis_index("cta")

        @pl.when(cta == 0)
        def _():
            first = (0,) * x.ndim
            refs[-1][first] = refs[-1][first]  # JAX drops kernels that write nothing

        for ref in refs[:-1]:
            size = CHUNK // ref.dtype.itemsize
            chunks, rest = divmod(ref.size, size)
            mine = lax.div(chunks - cta + (MULTIPROCESSORS - 1), jnp.int32(MULTIPROCESSORS))

            @pl.loop(0, mine)
            def _(i, ref=ref, size=size):
                start = (cta + i * MULTIPROCESSORS) * size
                prefetch_to_l2(ref.at[pl.ds(start, size)], CHUNK, interpret=interpret)

            if rest:

                @pl.when(cta == 0)
                def _(ref=ref, start=chunks * size, rest=rest):
                    prefetch_to_l2(ref.at[pl.ds(start, rest)], rest * ref.dtype.itemsize, interpret=interpret)

    held = jax.new_ref(x)
    kernel(
        body,
        interpret=interpret,
        auto_barriers=False,
        kernel_name="prefetch",
        grid=(MULTIPROCESSORS,),
        grid_names=("cta",),
        num_threads=1,
        thread_name="wg",
    )(*flat, held)
    return freeze(held)
