"""Device-side: sorts the chosen keys of a row, largest first, the earlier place where equal.

A bitonic network.  Thread t has elements t * n to t * n + n - 1 in registers: short distances are between registers of
a thread, longer ones between lanes (shuffles), the longest between warps (shared memory).  Keys and places make up one
number of 64 bits, whose low half is the complement of the place.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.indexer.chunk import EMPTY, THREADS
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR

LANE_BITS = 5


def _layout(size: int):
    return plgpu.Layout.WG_STRIDED((size,), 1)


def store_sorted(keys_ref, places_ref, out_ref, row, k: int, *, interpret: bool) -> None:
    """Sorts keys and places in shared memory, and stores the places of the first `k` to a row; -1 for EMPTY.

    The memory has a power of two of elements, at least 128.
    """
    if interpret:
        keys, places = keys_ref[...], places_ref[...]
        order = jnp.lexsort((places, ~keys))
        out_ref[row] = jnp.where(keys[order] == EMPTY, -1, places[order])[:k]
        return
    size = keys_ref.shape[0]
    own_bits = (size // THREADS).bit_length() - 1
    bits = size.bit_length() - 1
    arrays = (_layout(size), _layout(size))
    result = [plgpu.ShapeDtypeStruct((size,), jnp.int32, layout=_layout(size))] * 2

    def inline(name, *scalars, refs=()):
        """A step of `network.py` on keys and places."""

        def call(*values):
            @plgpu.inline_mgpu(
                arg_types=(arrays, [SCALAR] * len(scalars), [plgpu.RefType()] * len(refs)), return_type=result
            )
            def step(_, arrays, scalars, refs):
                from jaxkv_kernels.mosaic_gpu.indexer import network

                return getattr(network, name)(*arrays, *refs, *(x.registers.item() for x in scalars))

            return tuple(step(values, list(scalars), list(refs)))

        return call

    def load():
        @plgpu.inline_mgpu(arg_types=([plgpu.RefType()] * 2,), return_type=result)
        def load(_, refs):
            from jaxkv_kernels.mosaic_gpu.indexer import network

            return network.load(*refs)

        return tuple(load([keys_ref, places_ref]))

    def merge(stage, values):
        """Makes sorted runs of 2**stage elements."""

        def between_warps(i, values):
            return inline("between_warps", stage - own_bits, stage - own_bits - 1 - i, refs=(keys_ref, places_ref))(
                *values
            )

        def between_lanes(i, values):
            distance = jnp.minimum(stage - own_bits, LANE_BITS) - 1 - i
            return inline("between_lanes", stage - own_bits, distance)(*values)

        warp_steps = jnp.maximum(stage - own_bits - LANE_BITS, 0)
        values = lax.fori_loop(0, warp_steps, between_warps, values)
        values = lax.fori_loop(0, stage - own_bits - warp_steps, between_lanes, values)
        return inline("between_registers", stage - own_bits)(*values)

    values = inline("within_thread")(*load())
    values = lax.fori_loop(own_bits + 1, bits + 1, merge, values)

    @plgpu.inline_mgpu(arg_types=(arrays, plgpu.RefType(), SCALAR))
    def store(_, arrays, ref, row):
        from jaxkv_kernels.mosaic_gpu.indexer import network

        keys, places = arrays
        network.store(keys, places, ref, row.registers.item(), k)

    store(values, out_ref, row)
