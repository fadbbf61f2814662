"""Combines the splits of requests and writes the results to the rows of these requests.

A CTA of one warpgroup combines one chunk of columns of one row of a split request.  If requests have few splits, it
combines four or more rows, each in one warp.  Most loads are then of log-sum-exps and scales, and this way they are
loaded by one warp per row instead of four.  Splits are read in groups: all loads of a group are issued before the first
is used, and the group is added by an online softmax over log-sum-exps (base 2).  The grid must have room for all
requests, but is kept small, because most plans split few requests or none.

CTAs start as CTAs of the attention kernel finish (programmatic dependent launch), and look up their request while the
others are still running.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.attention.epilogue import SPLIT_DTYPE
from jaxkv_kernels.mosaic_gpu.attention.softmax import EMPTY
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import LOG2E
from jaxkv_kernels.mosaic_gpu.runtime.hopper import MULTIPROCESSORS
from jaxkv_kernels.mosaic_gpu.runtime.integers import floordiv
from jaxkv_kernels.mosaic_gpu.runtime.launch import freeze, kernel, wait_for_previous
from jaxkv_kernels.mosaic_gpu.runtime.registers import filled, over_columns, store

LN2 = math.log(2)
WARPS, LANES = 4, 32
MOST_CTAS = 4 * MULTIPROCESSORS
"""The most CTAs: as many as run at once.  With more rows of split requests, rows share CTAs.

Idle CTAs take time, too.
"""
MANY_SPLITS, AT_ONCE = 16, 32
"""MANY_SPLITS: splits per request from which a CTA has only one row, because there are few rows then.

AT_ONCE: the most splits that it loads at once.
"""
FEW_SPLITS = MANY_SPLITS // 2
"""The largest group of splits for which a row has one warp.  With smaller groups, a warp has several rows."""
CHUNK = 256
"""The most columns per CTA: 16 bytes of float16 per lane if a warp has a row."""


def combine(out, lse, split_out, split_lse, split_scale, plan, *, rows, interpret, sinks=None):
    """Returns out [B, >= rows, R] and lse [B, >= rows] after combining the `rows` rows of each split request.

    split_out [splits, >= rows, R] holds the bits of SPLIT_DTYPE, split_lse [splits, >= rows] log-sum-exps in base 2.
    split_scale [splits, parts, >= rows] has a factor for each of the equal parts of a row's values.  `sinks` [>= rows]
    are logits, one per row, that are part of the softmax's sum but have no value; lse excludes them.
    """
    split_out = jax.lax.bitcast_convert_type(split_out, SPLIT_DTYPE)
    batch, height, latent = out.shape
    # An estimate of the splits per request.  It is constant for batch-invariant plans, because the order of their sums
    # must not change.
    splits = max(plan.max_splits // batch, 2)
    group = min(1 << (splits.bit_length() - 1), AT_ONCE)
    parts = split_scale.shape[1]
    width = math.gcd(latent // parts, CHUNK)
    chunks = latent // width
    if splits < MANY_SPLITS and height % WARPS == 0:
        together = WARPS * math.gcd(FEW_SPLITS // group, height // WARPS)
        tiles: Any = ((WARPS, width), (width // LANES,))
    else:
        together = 1
        tiles = ((1, width), (width // WARPS,), (width // WARPS // LANES,))
    tile = plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    per_row = tile.reduce(1)
    read = partial(plgpu.load, optimized=False)  # `optimized` loads are for shared memory
    steps = max(plan.split_requests.shape[0] * chunks * rows // (together * MOST_CTAS), 1)

    def body(split_out_ref, split_lse_ref, split_scale_ref, split_requests_ref, *refs):
        *sink_refs, out_ref, lse_ref = refs
        n, step0, chunk = lax.axis_index("request"), lax.axis_index("rows") * steps, lax.axis_index("chunk")
        part, columns = floordiv(chunk * parts, chunks), pl.ds(pl.multiple_of(chunk * width, width), width)
        request, first, count = (split_requests_ref[n, i] for i in range(3))
        wait_for_previous(interpret=interpret)  # the attention kernel

        def load(at_rows, n):
            """Loads log-sum-exps, scales and values of the n-th split of some rows."""
            split = first + jnp.minimum(n, count - 1)
            lse = read(split_lse_ref.at[split, at_rows], layout=per_row) + jnp.where(n < count, 0.0, -jnp.inf)
            scale = read(split_scale_ref.at[split, part, at_rows], layout=per_row)
            return lse, scale, read(split_out_ref.at[split, at_rows, columns], layout=tile)

        def add(at_rows, i, carry):
            loaded = [load(at_rows, i * group + n) for n in range(group)]
            old_max, row_sum, acc = carry
            running_max = old_max
            for lse, *_ in loaded:
                running_max = jnp.maximum(running_max, lse)
            factor = jnp.exp2(old_max - running_max)
            row_sum, acc = row_sum * factor, acc * over_columns(factor, width)
            for lse, scale, values in loaded:
                weight = jnp.exp2(lse - running_max)
                row_sum += weight
                acc += values.astype(jnp.float32) * over_columns(weight * scale, width)
            return running_max, row_sum, acc

        def combine_rows(step, _):
            at_rows = pl.ds(jnp.minimum(step * together, height - together), together)  # past the end: the last rows
            groups = lax.div(count + (group - 1), jnp.int32(group))
            start = filled(per_row, EMPTY, together), filled(per_row, 0, together), filled(tile, 0, together, width)
            running_max, row_sum, acc = lax.fori_loop(0, groups, partial(add, at_rows), start)
            empty = row_sum == 0
            row_sum = jnp.where(empty, 1.0, row_sum)

            @pl.when(chunk == 0)
            def _():
                lse = jnp.where(empty, -jnp.inf, (running_max + jnp.log2(row_sum)) * LN2)
                store(lse_ref.at[request, at_rows], lse)

            for ref in sink_refs:
                row_sum += jnp.exp2(read(ref.at[at_rows], layout=per_row) * LOG2E - running_max)
            store(out_ref.at[request, at_rows, columns], (acc / over_columns(row_sum, width)).astype(out.dtype))

        @pl.when(request >= 0)
        def _():
            lax.fori_loop(step0, step0 + steps, combine_rows, None)

    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    kernel(
        body,
        interpret=interpret,
        kernel_name="combine",
        grid=(plan.split_requests.shape[0], -(-rows // (together * steps)), chunks),
        grid_names=("request", "rows", "chunk"),
        num_threads=1,
        thread_name="wg",
        waits=True,
    )(split_out, split_lse, split_scale, plan.split_requests, *([] if sinks is None else [sinks]), out_ref, lse_ref)
    return freeze(out_ref), freeze(lse_ref)
