"""Device-side: a chunk of a row of logits in the registers of a warpgroup, and the operations of the search in it.

Logits are int32 keys in the order of float32, with -0 as 0 and every NaN above all others.  EMPTY stands for -inf, and
for elements past the end of a row.  Register 4 v + c of thread t has element 512 v + 4 t + c of the chunk.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.formats.bits import ordered_bits
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR

THREADS, VECTOR = 128, 4
UNIT = THREADS * VECTOR
"""The number of elements of a chunk is a multiple of this."""
EMPTY, NAN = -0x7F800001, 0x7FC00000
COUNTERS = 16
"""int32 words of shared memory that the threads count with."""


def layout(size: int) -> Any:
    """The layout of int32 arrays [size] in registers."""
    return plgpu.Layout.WG_STRIDED((size,), VECTOR)


def load(ref, row, first, size: int, *, logits: bool, interpret: bool):
    """Elements `first` to `first + size` of a row: keys, of float32 if `logits`; EMPTY past the end."""
    length = ref.shape[1]
    if interpret:
        place = first + jnp.arange(size, dtype=jnp.int32)
        values = ref[row][jnp.minimum(place, length - 1)]
        if logits:
            values = jnp.where(jnp.isnan(values), NAN, ordered_bits(values))
        return jnp.where(place < length, values, EMPTY)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((size,), jnp.dtype(jnp.int32), layout=layout(size)),
    )
    def load(_, ref, row, first):
        from jaxkv_kernels.mosaic_gpu.indexer import lanes

        return lanes.load(ref, row.registers.item(), first.registers.item(), length, size, logits=logits)

    return load(ref, row, first)


def _ordered(bits):
    """float32 bits in the order of the values, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def between(low, high, share, *, interpret: bool):
    """The key of the value at fraction `share` between the values of `low` and `high`; EMPTY if that is not finite."""
    if interpret:
        start, end = (lax.bitcast_convert_type(_ordered(key), jnp.float32) for key in (low, high))
        found = start + (end - start) * share + 0.0
        usable = jnp.abs(found) < jnp.inf
        return jnp.where(usable, _ordered(lax.bitcast_convert_type(found, jnp.int32)), EMPTY)

    @plgpu.inline_mgpu(
        arg_types=(SCALAR, SCALAR, SCALAR), return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=SCALAR)
    )
    def between(_, low, high, share):
        from jaxkv_kernels.mosaic_gpu.indexer import lanes

        return lanes.between(*(x.registers.item() for x in (low, high, share)))

    return between(low, high, share)


def places(first, size: int, *, interpret: bool):
    """The positions of the elements of a chunk that begins at `first`."""
    if interpret:
        return first + jnp.arange(size, dtype=jnp.int32)

    @plgpu.inline_mgpu(
        arg_types=(SCALAR,), return_type=plgpu.ShapeDtypeStruct((size,), jnp.dtype(jnp.int32), layout=layout(size))
    )
    def places(_, first):
        from jaxkv_kernels.mosaic_gpu.indexer import lanes

        return lanes.places(first.registers.item(), size)

    return places(first)


def count(counters, step, keys, least, *, interpret: bool):
    """How many keys are `least` or more.  `step` selects the counters, and must alternate between even and odd."""
    if interpret:
        return (keys >= least).sum(dtype=jnp.int32)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, layout(keys.size), SCALAR),
        return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=SCALAR),
    )
    def count(_, counters, step, keys, least):
        from jaxkv_kernels.mosaic_gpu.indexer import lanes

        return lanes.count(counters, step.registers.item(), keys, least.registers.item())

    return count(counters, step, keys, least)


def count_before(counters, step, keys, places, key, end, *, interpret: bool):
    """How many keys equal `key` at places before `end`."""
    if interpret:
        return ((keys == key) & (places < end)).sum(dtype=jnp.int32)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, layout(keys.size), layout(keys.size), SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=SCALAR),
    )
    def count(_, counters, step, keys, places, key, end):
        from jaxkv_kernels.mosaic_gpu.indexer import lanes

        return lanes.count_before(
            counters, step.registers.item(), keys, places, key.registers.item(), end.registers.item()
        )

    return count(counters, step, keys, places, key, end)


def extremes(counters, keys, *, interpret: bool):
    """The smallest key other than EMPTY, and the largest key.  If all are EMPTY, the former is arbitrary."""
    if interpret:
        return jnp.where(keys == EMPTY, jnp.iinfo(jnp.int32).max, keys).min(), keys.max()

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout(keys.size)),
        return_type=[plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=SCALAR)] * 2,
    )
    def extremes(_, counters, keys):
        from jaxkv_kernels.mosaic_gpu.indexer import lanes

        return lanes.extremes(counters, keys)

    return extremes(counters, keys)


def collect(counters, keys, places, least, end, refs, index, slots: int, *, interpret: bool) -> None:
    """Stores the keys above `least`, and those equal to it at places before `end`, with their places, in any order.

    There are at most `slots` of them.  They go to `refs` (keys, places): to part `index[1]` of row `index[0]`, or
    without `index` to shared memory.  The remaining slots become EMPTY.
    """
    if interpret:
        chosen = (keys > least) | ((keys == least) & (places < end))
        # Modulo, so that too many chosen keys give wrong results here as well.
        slot = jnp.where(chosen, (jnp.cumsum(chosen) - 1) % slots, slots)
        for ref, values, rest in zip(refs, (keys, places), (EMPTY, 0), strict=True):
            found = jnp.full(slots + 1, rest, jnp.int32).at[slot].set(values)[:slots]
            if index:
                ref[index[0], pl.ds(index[1] * slots, slots)] = found
            else:
                ref[...] = found
        return
    shape = layout(keys.size)

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(), shape, shape, SCALAR, SCALAR, [plgpu.RefType()] * 2, [SCALAR] * len(index)
        )
    )  # fmt: skip
    def collect(_, counters, keys, places, least, end, refs, index):
        from jaxkv_kernels.mosaic_gpu.indexer import lanes

        lanes.collect(
            counters, keys, places, least.registers.item(), end.registers.item(), refs,
            [i.registers.item() for i in index], slots,
        )  # fmt: skip

    collect(counters, keys, places, least, end, list(refs), list(index))
