"""The positions of the k largest logits of each row.

A CTA of four warpgroups has up to 32,768 logits of a row in registers.  It searches for the k-th largest, and keeps the
k largest in any order.  If a row has several chunks, further launches select among what these kept, until one chunk
holds it all.  The last launch sorts its k largest, and looks up their slots.  Timeline of a CTA:

    load, first histogram | collect candidates | load them | histograms | collect | sort, or store what is kept

A histogram counts the keys of a range in 2,048 bins of shared memory.  The bin that has the k-th largest key becomes
the next range, so that three histograms suffice.  The search ends earlier if a bin has no more keys than are still
needed.  If too many logits equal the k-th largest, it goes on over their positions, and keeps the first ones.

The first histogram covers all float32 numbers, and has four bins per power of two.  Keys are counted as they arrive.
Usually, few keys are in the bin of the k-th largest.  These and the larger ones, the candidates, go through shared
memory to a few registers of each thread, so that the further steps are short.

What bounds it, for 32,768 logits: the instructions of the first histogram, 7 per logit, and of collecting candidates, 8
per logit.  Then the latency of 20 barriers, and of what the threads do between them.
On an H100, 64 rows of 32,768 normal logits take 0.0108 ms for k = 2,048, rows of equal logits 0.0215.

Barriers.  Only that of the CTA (`bar.sync 0`): three times per histogram, twice per collection, and in the sort.

Budget.  Registers: 64 logits per thread or, in later launches, 32 and as many positions.  Shared memory: 8 KiB of bins.
Let S be k rounded up to a power of two, at least 512.  Candidates take 16 S bytes, at least 16 KiB, or none if the
chunk is as small.  The last launch takes 16 S bytes to sort, for keys, positions, and pairs of these.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.calls import SelectTopk
from jaxkv_kernels.mosaic_gpu import topk_chunk, topk_sorting
from jaxkv_kernels.mosaic_gpu.interpreter import topk as interpreted
from jaxkv_kernels.mosaic_gpu.ptx.block_tables import BlockTables
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting, multiprocessors
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel, pdl_launch_dependents
from jaxkv_kernels.mosaic_gpu.topk_chunk import (
    ALL,
    BINS,
    COUNTERS,
    EMPTY,
    THREADS,
    UNIT,
    VECTOR,
    WARPGROUPS,
    wait_for_all,
)

LOGITS, KEPT = 64, 32
"""Logits per thread, and keys of later launches, whose positions take registers as well."""
MOST_SELECTED = 4096


def unsupported_reasons(call: SelectTopk) -> Iterator[str]:
    """Reasons against a call."""
    if call.k > MOST_SELECTED:
        yield f"`k` of {call.k}: supports at most {MOST_SELECTED}, which are sorted in registers"
    if call.logits.shape[-1] >= 2**28:
        yield f"rows of {call.logits.shape[-1]} logits: supports fewer than 2**28"


@jax.jit
def select_topk(call: SelectTopk) -> jax.Array:
    """Positions or slots, int32 [..., k]: those of the largest logits first, equal ones by position; -1 for -inf."""
    logits, k = call.logits, call.k
    *leading, length = logits.shape
    if not logits.size:
        return jnp.full((*leading, k), -1, jnp.int32)
    tables = None
    if call.block_tables is not None and call.block_size is not None:
        tables = BlockTables(call.block_tables, call.block_size, rows=leading[-1])
    found, kept, end = logits.reshape(-1, length), False, length
    while True:
        # Registers of positions, or of the addresses of unaligned logits, which are loaded one by one.
        most = THREADS * (KEPT if kept or length % VECTOR else LOGITS)
        size = min(most, -(-length // UNIT) * UNIT)
        count = -(-length // size)
        found = _keep(found, tables, kept=kept, size=size, count=count, k=k, end=end)
        if count == 1:
            return found.reshape(*leading, k)
        kept, length = True, count * k


def _keep(values, tables: BlockTables | None, *, kept: bool, size: int, count: int, k: int, end: int):
    """Keys and places of the k largest of each chunk, or with one chunk sorted places [rows, k].

    With `tables`, these are the slots of the places.  Keys and places are halves of an array [rows, 2 * count * k].
    `values` are such an array if they are `kept` by another launch, or else logits.
    """
    rows, interpret = values.shape[0], bool(interpreting.value)
    chunks = interpreted if interpret else topk_chunk
    last = count == 1
    looks_up = last and tables is not None
    sorted_size = max(THREADS, 1 << (k - 1).bit_length())
    # Candidates: the k largest, and the others in the bin of the k-th largest.
    room = max(UNIT, 2 * sorted_size)
    collects = size > room

    def body(values_ref, *refs):
        table_ref = refs[0] if looks_up else None
        out_ref, counters, bins, *memory = refs[looks_up:]
        # Only the next launch reads what this one keeps.  With many CTAs, an early start would make CTAs of both share
        # multiprocessors.
        if not last and rows * count <= multiprocessors() // 2:
            pdl_launch_dependents(values_ref, interpret=interpret)
        chunks.clear(bins)
        row, part = lax.axis_index("row"), lax.axis_index("chunk")
        first = part * size
        load = chunks.load_kept if kept else chunks.load_logits
        keys, at = load(values_ref, row, first, size)
        search = partial(_search, chunks, counters, bins, k=k, end=end)
        state = tuple(map(jnp.int32, (*ALL, k, size)))
        if collects:
            # The first histogram, which is always needed, is not in the loop: it overlaps with the loads.
            candidates, *memory = memory
            state = chunks.narrow(counters, bins, keys, state)
            keys, state = search(keys, at, state, most=room)
            chunks.collect(counters, keys, at, state[0], candidates, (), room)
            keys, at = chunks.load_candidates(candidates)
        keys, state = search(keys, at, state, most=k)
        least = state[0]
        if not last:
            chunks.collect(counters, keys, at, least, out_ref, (row, part), k)
            return
        low, high = chunks.extremes(counters, keys)
        chunks.collect(counters, keys, at, least, memory[0], (), sorted_size)
        slots = None if tables is None else tables._replace(array=table_ref)
        if interpret:
            interpreted.store_sorted(memory, out_ref, row, k, slots)
            return
        plgpu.inline_mgpu()(lambda _: wait_for_all())()
        low = jnp.maximum(low, least)
        high = jnp.maximum(low, high)  # `high` is EMPTY if no value is finite
        topk_sorting.store_sorted(memory, counters, bins, low, high, out_ref, row, k, slots)

    memory = [COUNTERS, BINS + 1]
    memory += [2 * room] if collects else []
    memory += [2 * sorted_size] * 2 if last else []
    return kernel(
        body,
        interpret=interpret,
        auto_barriers=False,
        out_type=jax.ShapeDtypeStruct((rows, k if last else 2 * count * k), jnp.int32),
        grid=(rows, count),
        grid_names=("row", "chunk"),
        num_threads=1 if interpret else WARPGROUPS,  # the interpreter's chunks are arrays of one thread
        thread_name="wg",
        kernel_name="select_topk",
        scratch_types=[plgpu.SMEM((words,), jnp.int32) for words in memory],
    )(values, *([tables.array] if looks_up else []))


def _search(chunks, counters, bins, keys, places, state, *, k: int, end: int, most: int):
    """Narrows the range of the k-th largest key until at most `most` keys are in it or above.

    Returns the keys and the new state.  The range may be a single key that too many keys equal.  Those at the last
    places then become EMPTY.  `chunks` has the operations on chunks, and `narrow` explains the state.  `end` is the
    number of places.
    """

    def narrowed(narrow, state):
        def too_many(state):
            _, extent, wanted, held = state
            return (k - wanted + held > most) & (extent != 0)

        return lax.while_loop(too_many, narrow, state)

    def among_equal():
        first = jnp.int32(-end), jnp.int32(end - 1), wanted, held
        low, *_ = narrowed(partial(chunks.narrow_places, counters, bins, keys, places, least), first)
        return jnp.where((keys == least) & (places > ~low), EMPTY, keys)

    state = narrowed(partial(chunks.narrow, counters, bins, keys), state)
    least, _, wanted, held = state
    return lax.cond(k - wanted + held > most, among_equal, lambda: keys), state
