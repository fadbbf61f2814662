"""The positions of the k largest logits of each row.

A CTA of up to four warpgroups has up to 32,768 logits of a row in registers.  It searches for the k-th largest, and
keeps the k largest in any order.  Further launches select from what the chunks of a row have kept, until that fits in a
single chunk.  The last launch sorts its k largest, and looks up their slots.  Timeline of a CTA:

    load | count the logits at or above a guess, until there are k | collect | sort, or store what is kept

The search narrows a range: at least k logits reach its lower end, and fewer reach its upper end.  A guess interpolates
within the range by these two counts.  Every third guess is instead the middle of the range of bits, which bounds the
number of guesses.  If more logits than needed equal the k-th largest, the search goes on over their positions.

What bounds it: the latency of about ten counts (100 instructions per thread each) and, for k = 2048, of the 66 steps of
the sorting network.
Barriers.  One of the CTA, after each count and in the sort.
Budget.  Registers: 64 logits per thread or, in later launches, 32 and as many positions.  Shared memory of the last
launch: 12 bytes per logit, for k logits rounded up to a power of two: the logit's key, its position, and a word to sort
by.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.calls import SelectTopk
from jaxkv_kernels.mosaic_gpu import topk_sorting
from jaxkv_kernels.mosaic_gpu.interpreter import topk as interpreted
from jaxkv_kernels.mosaic_gpu.ptx.block_tables import BlockTables
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting, multiprocessors
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel, pdl_launch_dependents
from jaxkv_kernels.mosaic_gpu.topk_chunk import COUNTERS, EMPTY, VECTOR, Chunks, wait_for_all

LOGITS, KEPT = 64, 32
"""Logits per thread, and keys of later launches, whose positions take registers as well."""
WARPGROUPS = 4
MOST_SELECTED = 4096
NOWHERE = -(2**31)
"""A place that precedes all others, even those of elements past the end of a row."""


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
    values, places, end = logits.reshape(-1, length), None, length
    chunks = Chunks(WARPGROUPS)
    while True:
        length = values.shape[1]
        # Registers of positions, or of the addresses of unaligned logits, which are loaded one by one.
        most = chunks.threads * (LOGITS if places is None and length % VECTOR == 0 else KEPT)
        size = min(most, -(-length // chunks.unit) * chunks.unit)
        count = -(-length // size)
        found = _keep(values, places, tables, chunks, size=size, count=count, k=k, end=end)
        if count == 1:
            return found[0].reshape(*leading, k)
        values, places = found


def _keep(values, places, tables: BlockTables | None, of_gpu: Chunks, *, size, count, k, end):
    """Keys and places [rows, count * k] of the k largest of each chunk, or with one chunk sorted places [rows, k].

    With `tables`, these are the slots of the places.
    """
    rows, interpret = values.shape[0], bool(interpreting.value)
    chunks = interpreted if interpret else of_gpu
    last = count == 1
    looks_up = last and tables is not None
    sorted_size = max(of_gpu.threads, 1 << (k - 1).bit_length())

    def body(values_ref, *refs):
        places_ref = refs[0] if places is not None else None
        refs = refs[places is not None :]
        table_ref = refs[0] if looks_up else None
        refs = refs[looks_up:]
        outs, (counters, *memory) = (refs[:1], refs[1:]) if last else (refs[:2], refs[2:])
        # Only the next launch reads what this one keeps.  With many CTAs, an early start would make CTAs of both share
        # multiprocessors.
        if not last and rows * count <= multiprocessors() // 2:
            pdl_launch_dependents(values_ref, interpret=interpret)
        row, part = lax.axis_index("row"), lax.axis_index("chunk")
        first = part * size
        keys = chunks.load(values_ref, row, first, size, logits=places is None)
        if places_ref is None:
            at = chunks.places(first, size)
        else:
            at = chunks.load(places_ref, row, first, size, logits=False)
        least, before, low, high = _search(chunks, counters, keys, at, k, end)
        refs, index, slots = (memory[:2], (), sorted_size) if last else (outs, (row, part), k)
        chunks.collect(counters, keys, at, least, before, refs, index, slots)
        if last:
            slots = None if tables is None else tables._replace(array=table_ref)
            if interpret:
                interpreted.store_sorted(memory, outs[0], row, k, slots)
                return
            plgpu.inline_mgpu()(lambda _: wait_for_all())()
            topk_sorting.store_sorted(memory, counters, low, high, outs[0], row, k, slots, of_gpu.warpgroups)

    shape = jax.ShapeDtypeStruct
    return kernel(
        body,
        interpret=interpret,
        auto_barriers=False,
        out_type=[shape((rows, k), jnp.int32)] if last else [shape((rows, count * k), jnp.int32)] * 2,
        grid=(rows, count),
        grid_names=("row", "chunk"),
        num_threads=1 if interpret else of_gpu.warpgroups,  # the interpreter's chunks are arrays of one thread
        thread_name="wg",
        kernel_name="select_topk",
        scratch_types=[plgpu.SMEM((COUNTERS,), jnp.int32)] + [plgpu.SMEM((sorted_size,), jnp.int32)] * (3 * last),
    )(values, *([] if places is None else [places]), *([tables.array] if looks_up else []))


def _search(chunks, counters, keys, places, k: int, end: int):
    """Returns a key and a place, and a lower bound and the maximum of the k largest keys.

    The k largest logits are those above the key, and those equal to it before the place.

    `chunks` has the operations on chunks.  `end` is the number of places.  With k or fewer logits above EMPTY, the key
    is EMPTY and the place NOWHERE.
    """
    count = partial(chunks.count, counters, keys=keys)
    valid = count(step=jnp.int32(0), least=jnp.int32(EMPTY + 1))
    low, high = chunks.extremes(counters, keys)

    def guess(step, low, at_low, high, at_high):
        """A key above `low` and below `high`."""
        middle = (low & high) + ((low ^ high) >> 1)
        share = (at_low - k).astype(jnp.float32) / (at_low - at_high).astype(jnp.float32)
        found = chunks.between(low, high, share)
        usable = (found > low) & (lax.rem(step, jnp.int32(3)) != 0)
        return jnp.clip(jnp.where(usable, found, middle), low + 1, high - 1)

    def unknown(carry):
        _, low, at_low, high, _ = carry
        return (at_low > k) & (low + 1 < high)

    def narrow(carry):
        step, low, at_low, high, at_high = carry
        least = guess(step, low, at_low, high, at_high)
        at_least = count(step=step, least=least)
        enough = at_least >= k
        step, low, at_low = step + 1, jnp.where(enough, least, low), jnp.where(enough, at_least, at_low)
        return step, low, at_low, jnp.where(enough, high, least), jnp.where(enough, at_high, at_least)

    def search():
        carry = jnp.int32(1), low, valid, high + 1, jnp.int32(0)
        step, least, found, _, above = lax.while_loop(unknown, narrow, carry)
        return lax.cond(found > k, lambda: among_equal(step, least, k - above), lambda: (least, jnp.int32(end)))

    def among_equal(step, least, wanted):
        """The place before which `wanted` keys equal `least`."""

        def halve(carry):
            step, low, high = carry
            middle = low + ((high - low) >> 1)
            before = chunks.count_before(counters, step, keys, places, least, middle)
            enough = before >= wanted
            return step + 1, jnp.where(enough, low, middle), jnp.where(enough, middle, high)

        carry = step, jnp.int32(0), jnp.int32(end)
        return least, lax.while_loop(lambda carry: carry[2] - carry[1] > 1, halve, carry)[2]

    least, before = lax.cond(valid > k, search, lambda: (jnp.int32(EMPTY), jnp.int32(NOWHERE)))
    return least, before, jnp.maximum(least, low), high
