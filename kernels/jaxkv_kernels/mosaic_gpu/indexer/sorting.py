"""Device-side: sorts the chosen keys of a row, largest first, equal keys by place.

A bitonic network.  Thread t has elements t * n to t * n + n - 1 in registers: short distances are between registers of
a thread, longer ones between lanes (shuffles), the longest between warps (shared memory).

It first sorts words of 32 bits: the leading bits of a key's distance from the smallest key, and the key's slot.  Then
it looks up keys and places, and exchanges neighbours that are in the wrong order.  If more than a few keys have equal
leading bits, that does not suffice, and it sorts pairs of 64 bits: keys and the complements of places.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.indexer.chunk import EMPTY, THREADS
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR

LANE_BITS = 5


def layout(size: int) -> Any:
    """The layout of int32 arrays [size] in the sorting network."""
    return plgpu.Layout.WG_STRIDED((size,), 1)


def store_sorted(refs, counters, low, high, out_ref, row, k: int, *, interpret: bool) -> None:
    """Sorts keys and places in shared memory, and stores the places of the first `k` to a row; -1 for EMPTY.

    `refs` are the keys, the places and memory for the words.  Their size is a power of two, at least 128.  Keys
    that are not EMPTY are from `low` to `high`.
    """
    if interpret:
        keys, places = (ref[...] for ref in refs[:2])
        order = jnp.lexsort((places, ~keys))
        out_ref[row] = jnp.where(keys[order] == EMPTY, -1, places[order])[:k]
        return
    network = Network(refs)
    words = network.sort(network.step("load_words", 1, (), (low, high), refs[:1]))
    pairs = network.step("look_up", 2, words, (), refs[:2])
    wrong = network.count_wrong(pairs, counters)
    pairs = lax.cond(wrong > 0, lambda: network.sort(network.step("load", 2, (), (), refs[:2])), lambda: pairs)

    @plgpu.inline_mgpu(arg_types=([layout(network.size)] * 2, plgpu.RefType(), SCALAR))
    def store(_, arrays, ref, row):
        from jaxkv_kernels.mosaic_gpu.indexer import network

        network.store(arrays, ref, row.registers.item(), k)

    store(list(pairs), out_ref, row)


class Network:
    """Sorts arrays in registers: one of unsigned numbers, or two of keys and complemented places."""

    def __init__(self, refs):
        self._refs = refs
        self.size = refs[0].shape[0]
        self._own_bits = (self.size // THREADS).bit_length() - 1

    def step(self, name: str, results: int, arrays, scalars=(), refs=()) -> tuple[Any, ...]:
        """Calls function `name` of `network.py`, which returns `results` arrays."""
        shape = plgpu.ShapeDtypeStruct((self.size,), jnp.dtype(jnp.int32), layout=layout(self.size))

        @plgpu.inline_mgpu(
            arg_types=([layout(self.size)] * len(arrays), [SCALAR] * len(scalars), [plgpu.RefType()] * len(refs)),
            return_type=[shape] * results,
        )
        def run(_, arrays, scalars, refs):
            from jaxkv_kernels.mosaic_gpu.indexer import network

            return getattr(network, name)(arrays, refs, *(x.registers.item() for x in scalars))

        return tuple(run(list(arrays), list(scalars), list(refs)))

    def count_wrong(self, pairs, counters):
        """The number of pairs of neighbours that are in the wrong order."""

        @plgpu.inline_mgpu(
            arg_types=([layout(self.size)] * 2, plgpu.RefType()),
            return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=SCALAR),
        )
        def count(_, arrays, counters):
            from jaxkv_kernels.mosaic_gpu.indexer import network

            return network.count_wrong(arrays, counters)

        return count(list(pairs), counters)

    def sort(self, arrays) -> tuple[Any, ...]:
        """The arrays, sorted, largest first."""
        arrays = self.step("within_thread", len(arrays), arrays)
        return lax.fori_loop(self._own_bits + 1, self.size.bit_length(), self._merge, arrays)

    def _merge(self, stage, arrays):
        """Makes sorted runs of 2**stage elements."""
        stage = stage - self._own_bits
        warp_steps = jnp.maximum(stage - LANE_BITS, 0)

        def between_warps(i, arrays):
            refs = self._refs[2:] if len(arrays) == 1 else self._refs[:2]
            return self.step("between_warps", len(arrays), arrays, (stage, stage - 1 - i), refs)

        def between_lanes(i, arrays):
            return self.step("between_lanes", len(arrays), arrays, (stage, stage - warp_steps - 1 - i))

        arrays = lax.fori_loop(0, warp_steps, between_warps, arrays)
        arrays = lax.fori_loop(0, stage - warp_steps, between_lanes, arrays)
        return self.step("between_registers", len(arrays), arrays, (stage,))
