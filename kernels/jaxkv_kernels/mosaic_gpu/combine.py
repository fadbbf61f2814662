"""Combines the splits of requests and writes the results to the rows of these requests.

A CTA combines one chunk of columns of one or more rows of a split request.  There are two ways to divide this work
among its warps:

    by rows       for few splits: each warp of the CTA's only warpgroup has one or more rows, and all of their splits
    by splits     for many splits, and if four warps cannot divide the rows evenly: the CTA has one row at a time,
                  and one, two or four warpgroups.  Warp w of n has the splits w, w + n, w + 2 n, ...  Warps merge their
                  sums in shared memory.

Timeline of a CTA.  `->` names the barrier that a line waits for; `stored` and `merged` are barriers 0 and 1.

    look up the request and its splits        -> wait_for_previous, if there are any
    per group of splits, usually only one:
      load log-sum-exps, scales and values of all splits of the group
      add them by an online softmax over log-sum-exps (base 2)
    by splits only:
      store maximum, sum of weights and sums of values to shared memory, arrive at `stored`
      warpgroup 0 merges those of all warps, in order           -> stored
    store results
    by splits only, before another row: arrive at `merged`      -> merged

CTAs start as CTAs of the attention kernel finish (programmatic dependent launch), and look up their request while other
CTAs of the attention kernel are still running.  The grid must have room for all requests, but is kept small, because
most plans split few requests or none.

Budget, by splits.  Shared memory: per warp, 1 KiB of sums, its maximum and its sum of weights; 17 KiB for 16 warps.
Registers: 4 per lane and split of a group for values and 2 for weights, up to 48, and 8 for sums.
"""

import math
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.epilogue import SPLIT_DTYPE, KernelResults
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import LOG2E, floordiv
from jaxkv_kernels.mosaic_gpu.runtime.device import multiprocessors
from jaxkv_kernels.mosaic_gpu.runtime.launch import freeze, kernel, wait_for_previous
from jaxkv_kernels.mosaic_gpu.runtime.registers import filled, over_columns, store
from jaxkv_kernels.mosaic_gpu.softmax import EMPTY
from jaxkv_kernels.mosaic_gpu.tile_scheduler import Plan

LN2 = math.log(2)
WARPS, LANES = 4, 32
CTAS = 4
"""The most CTAs of one warpgroup each, per multiprocessor: as many as run at once.  With more rows of split requests, a
CTA has several.

Idle CTAs take time as well.
"""
MANY_SPLITS = 16
"""Splits per request from which the warps of a CTA divide its work by splits."""
FEW_SPLITS = MANY_SPLITS // 2
"""The most splits that a warp loads at once.  With 16, combining 8 requests x 128 heads took 3.9 us instead of 2.7.  By
rows, a warp that loads fewer splits at once has several rows."""
FEW_WARPGROUPS, MOST_WARPGROUPS, MANY_CTAS_AT_ONCE = 2, 4, 4
"""By splits: a CTA has FEW_WARPGROUPS warpgroups if there are many CTAs, and MOST_WARPGROUPS if there are few.
With many CTAs, a warp loads MANY_CTAS_AT_ONCE splits at once.  ThunderMLA's case, 512 CTAs for up to 89 splits, takes
6.1 us; with one or four warpgroups, it took 8.9 or 9.8.
"""
CHUNK = 256
"""The most columns per CTA: 16 bytes of float16 per lane if a warp has a row."""


def combine(
    results: KernelResults, plan: Plan, *, rows: int, interpret: bool, sinks: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns out [B, >= rows, Dv] and lse [B, >= rows] after combining the `rows` rows of each split request.

    `sinks` [>= rows] are logits, one per row, that are part of the softmax's sum but have no value; lse excludes them.
    """
    out, lse, split_out, split_lse, split_scale = results
    split_out = jax.lax.bitcast_convert_type(split_out, SPLIT_DTYPE)
    batch, height, latent = out.shape
    # An estimate of the splits per request.  It is constant for batch-invariant plans, because the order of their sums
    # must not change.
    splits = max(plan.max_splits // batch, 2)
    parts = split_scale.shape[1]
    width = math.gcd(split_out.shape[-1] // parts, CHUNK, latent)
    chunks, split_chunks = latent // width, split_out.shape[-1] // width
    requests = plan.split_requests.shape[0]
    # A warpgroup merges the sums of a row only if it has a column for each lane.
    # Otherwise, heights are multiples of 8.
    by_splits = width >= WARPS * LANES and (splits >= MANY_SPLITS or height % WARPS != 0)
    most_ctas = CTAS * multiprocessors()
    if by_splits:
        most = plan.max_splits - batch if splits >= MANY_SPLITS else splits  # of a request, if others have one each
        warpgroups, group = _share_splits(most, requests * chunks * rows if splits >= MANY_SPLITS else most_ctas)
        together, held = 1, WARPS
    else:
        warpgroups, group = 1, min(1 << ((4 * splits // 3).bit_length() - 1), FEW_SPLITS)
        together = held = WARPS * math.gcd(FEW_SPLITS // group, height // WARPS)
    # `held`: how many rows, or splits of one row, a warpgroup holds in one array.
    tile = plgpu.Layout.TILED(
        plgpu.Tiling(((WARPS, width), (width // LANES,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
    )
    per_row = tile.reduce(1)
    flat = plgpu.Layout.WG_STRIDED((width,), width // (WARPS * LANES))
    read = partial(plgpu.load, optimized=False)  # `optimized` loads are for shared memory
    steps = max(requests * chunks * rows // (together * most_ctas), 1)

    def body(split_out_ref, split_lse_ref, split_scale_ref, split_requests_ref, *refs, **scratch):
        *sink_refs, out_ref, lse_ref = refs
        n, step0, chunk = lax.axis_index("request"), lax.axis_index("rows") * steps, lax.axis_index("chunk")
        wg = lax.axis_index("wg")
        part, columns = floordiv(chunk * parts, split_chunks), pl.ds(pl.multiple_of(chunk * width, width), width)
        request, first, count = (split_requests_ref[n, i] for i in range(3))
        is_used, is_first = request >= 0, (n == 0) & (step0 == 0) & (chunk == 0)
        # Idle CTAs do not wait for the attention kernel, which leaves less to do after it.  But one CTA always waits:
        # kernels that wait for this one rely on the attention kernel having ended, too.
        pl.when(is_used | is_first)(partial(wait_for_previous, interpret=interpret))

        def of_rows(step, n):
            """The index of the n-th split of some rows, and whether it belongs to the request."""
            at_rows = pl.ds(jnp.minimum(step * together, height - together), together)  # past the end: the last rows
            return (first + jnp.minimum(n, count - 1), at_rows), jnp.full(held, n < count), None

        def of_splits(step, n):
            """The indices of the n-th splits of this warpgroup's warps, of one row, and which are of the request."""
            number = (n * warpgroups + wg) * WARPS
            last = lax.div(count - 1, jnp.int32(WARPS)) * WARPS
            # At the end of the array, splits move to other warps, and are merged in another order.  This never happens
            # with batch-invariant plans: they have room for INVARIANT_SPLITS, a multiple of WARPS, per request.
            start = jnp.minimum(first + jnp.minimum(number, last), split_out_ref.shape[0] - WARPS)

            def counts(layout, *shape):
                split = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + start
                return (split >= first + number) & (split < first + count)

            row = jnp.minimum(step, height - 1)
            return (pl.ds(start, WARPS), row), counts(per_row, WARPS), counts(tile, WARPS, width)

        def load(step, n):
            """Loads log-sum-exps, scales and values."""
            (split, at_rows), counts, are_known = (of_splits if by_splits else of_rows)(step, n)
            lse = jnp.where(counts, read(split_lse_ref.at[split, at_rows], layout=per_row), -jnp.inf)
            scale = read(split_scale_ref.at[split, part, at_rows], layout=per_row)
            values = read(split_out_ref.at[split, at_rows, columns], layout=tile)
            # Splits of other requests may hold any value, even NaN.
            return lse, scale, values, are_known

        def add(step, i, carry):
            loaded = [load(step, i * group + n) for n in range(group)]
            old_max, row_sum, acc = carry
            running_max = reduce(jnp.maximum, [lse for lse, *_ in loaded], old_max)
            factor = jnp.exp2(old_max - running_max)
            row_sum, acc = row_sum * factor, acc * over_columns(factor, width)
            for lse, scale, values, are_known in loaded:
                weight = jnp.exp2(lse - running_max)
                row_sum += weight
                added = values.astype(jnp.float32) * over_columns(weight * scale, width)
                acc += added if are_known is None else jnp.where(are_known, added, 0.0)
            return running_max, row_sum, acc

        def sums(step):
            """The maximum of log-sum-exps, the sum of weights and the sums of values, of each row or warp."""
            at_once = group * (WARPS * warpgroups if by_splits else 1)
            groups = lax.div(count + (at_once - 1), jnp.int32(at_once))
            start = filled(per_row, EMPTY, held), filled(per_row, 0, held), filled(tile, 0, held, width)
            return lax.fori_loop(0, groups, partial(add, step), start)

        def merged(states, values):
            """The same sums of one row, from those of all warps, which are merged in order."""
            warps = range(WARPS * warpgroups)
            maxima = [states[0, n] for n in warps]
            running_max = reduce(jnp.maximum, maxima)
            factors = [jnp.exp2(x - running_max) for x in maxima]
            row_sum = sum(factor * states[1, n] for n, factor in zip(warps, factors, strict=True))
            acc = filled(flat, 0, width)
            for n, factor in zip(warps, factors, strict=True):
                acc += plgpu.load(values.at[n], layout=flat) * factor
            return running_max, row_sum, acc

        def finish(place, running_max, row_sum, acc):
            """Stores the results of some rows."""
            empty = row_sum == 0
            row_sum = jnp.where(empty, 1.0, row_sum)

            @pl.when(chunk == 0)
            def _():
                lse = jnp.where(empty, -jnp.inf, (running_max + jnp.log2(row_sum)) * LN2)
                if by_splits:
                    lse_ref[request, place] = lse
                else:
                    store(lse_ref.at[request, place], lse)

            for ref in sink_refs:
                sink = ref[place] if by_splits else read(ref.at[place], layout=per_row)
                row_sum += jnp.exp2(sink * LOG2E - running_max)
            divisor = row_sum if by_splits else over_columns(row_sum, width)
            store(out_ref.at[request, place, columns], (acc / divisor).astype(out.dtype))

        def combine_rows(step, _):
            if not by_splits:
                at_rows = pl.ds(jnp.minimum(step * together, height - together), together)
                return finish(at_rows, *sums(step))
            states, values = scratch["states"], scratch["values"]
            own = pl.ds(wg * WARPS, WARPS)
            for ref, x in zip((states.at[0, own], states.at[1, own], values.at[own]), sums(step), strict=True):
                store(ref, x)
            plgpu.commit_smem()
            meet(0)

            @pl.when(wg == 0)
            def _():
                finish(jnp.minimum(step, height - 1), *merged(states, values))

            if steps > 1:
                meet(1)
            return None

        def meet(n):
            """Waits for the other warpgroups."""
            if warpgroups > 1:
                plgpu.barrier_arrive(scratch["barriers"].at[n])
                plgpu.barrier_wait(scratch["barriers"].at[n])

        @pl.when(is_used)
        def _():
            lax.fori_loop(step0, step0 + steps, combine_rows, None)

    shared: dict[str, Any] = {}
    if by_splits:
        shared = {
            "states": plgpu.SMEM((2, WARPS * warpgroups), jnp.float32),
            "values": plgpu.SMEM((WARPS * warpgroups, width), jnp.float32),
        }
        if warpgroups > 1:
            shared["barriers"] = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=2)
    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    kernel(
        body,
        interpret=interpret,
        kernel_name="combine",
        grid=(requests, -(-rows // (together * steps)), chunks),
        grid_names=("request", "rows", "chunk"),
        num_threads=warpgroups,
        thread_name="wg",
        waits=True,
        scratch_types=shared,
    )(split_out, split_lse, split_scale, plan.split_requests, *([] if sinks is None else [sinks]), out_ref, lse_ref)
    return freeze(out_ref), freeze(lse_ref)


def _share_splits(most: int, ctas: int) -> tuple[int, int]:
    """Warpgroups per CTA, and splits that a warp loads at once, for up to `most` splits per row and `ctas` CTAs."""
    at_once = 1 << max(most.bit_length() - 1, 0)
    if at_once < 2 * WARPS * FEW_WARPGROUPS:
        return 1, max(at_once // WARPS, 1)
    most_ctas = CTAS * multiprocessors()
    if ctas * FEW_WARPGROUPS > most_ctas:
        return FEW_WARPGROUPS, MANY_CTAS_AT_ONCE
    warpgroups = MOST_WARPGROUPS if MOST_WARPGROUPS * ctas <= most_ctas else FEW_WARPGROUPS
    return warpgroups, min(at_once // (WARPS * warpgroups), FEW_SPLITS)
