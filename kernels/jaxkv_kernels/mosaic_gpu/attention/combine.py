"""Combines the pieces of requests that were cut, in place of their rows of the result.

A CTA of one warpgroup has a chunk of the columns of a row of a cut request, or, where requests have few pieces, of four
rows or more, each in one warp: log-sum-exps and scales, most of all loads, are then loaded by one warp instead of four.
Pieces are read in groups, all loads of a group before their first use, into running softmaxes over their log-sum-exps
(base 2).  Most plans cut few requests or none: the grid, which must have room for all, is kept small.

A CTA begins where one of the attention kernel has ended, and learns which request is its own while others still run.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.attention.token_rows import divided
from jaxkv_kernels.mosaic_gpu.runtime.build import (
    EMPTY,
    LOG2E,
    MULTIPROCESSORS,
    across,
    filled,
    frozen,
    kernel,
    store,
    wait_for_previous,
)

LN2 = math.log(2)
WARPS, LANES = 4, 32
MOST_CTAS = 4 * MULTIPROCESSORS
"""Rows of cut requests beyond these share CTAs: so many run at once, and idle ones take time as well."""
MANY_PIECES, AT_ONCE = 16, 32
"""Pieces per request from which a CTA has one row, since there are few; and the most that it has under way at once."""
FEW_PIECES = MANY_PIECES // 2
"""The largest group of a row that has one warp; of smaller ones a warp has several at once, if rows divide evenly."""
CHUNK = 256
"""The most columns of a CTA: 16 bytes of float16 a lane, where a warp has a row."""


def combine(out, lse, part_out, part_lse, part_scale, plan, *, rows, interpret, sinks=None):
    """The result [B, >= rows, R] and lse [B, >= rows], with `rows` rows of cut requests made from their pieces.

    Pieces: part_out [pieces, >= rows, R], part_lse [pieces, >= rows]; part_scale [pieces, parts, >= rows] is what the
    equal parts of a row's values are to be multiplied by, None where by nothing.  `sinks` [>= rows] are logits that
    take part in the softmax of their row without a value; lse does not count them.
    """
    batch, height, latent = out.shape
    # About the pieces of a request.  Always the same for batch-invariant plans, whose sums must keep their order.
    pieces = max(plan.pieces // batch, 2)
    group = min(1 << (pieces.bit_length() - 1), AT_ONCE)
    scales = [] if part_scale is None else [part_scale]
    optional = [*scales, *([] if sinks is None else [sinks])]
    parts = 1 if part_scale is None else part_scale.shape[1]
    width = math.gcd(latent // parts, CHUNK)
    chunks = latent // width
    if pieces < MANY_PIECES and height % WARPS == 0:
        together = WARPS * math.gcd(FEW_PIECES // group, height // WARPS)
        tiles: Any = ((WARPS, width), (width // LANES,))
    else:
        together = 1
        tiles = ((1, width), (width // WARPS,), (width // WARPS // LANES,))
    tile = plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    a_row = tile.reduce(1)
    read = partial(plgpu.load, optimized=False)  # `optimized` loads are of shared memory
    steps = max(plan.cuts.shape[0] * chunks * rows // (together * MOST_CTAS), 1)

    def body(part_out_ref, part_lse_ref, *refs):
        *optional_refs, cut_ref, out_ref, lse_ref = refs
        scale_refs, sink_refs = optional_refs[: len(scales)], optional_refs[len(scales) :]
        cut, step0, chunk = lax.axis_index("cut"), lax.axis_index("rows") * steps, lax.axis_index("chunk")
        part, columns = divided(chunk * parts, chunks), pl.ds(pl.multiple_of(chunk * width, width), width)
        b, first, count = (cut_ref[cut, i] for i in range(3))
        wait_for_previous(interpret=interpret)  # attention

        def load(at_rows, n):
            """Of the n-th piece of some rows: log-sum-exps, scales and values."""
            piece = first + jnp.minimum(n, count - 1)
            found = read(part_lse_ref.at[piece, at_rows], layout=a_row) + jnp.where(n < count, 0.0, -jnp.inf)
            scale = [read(ref.at[piece, part, at_rows], layout=a_row) for ref in scale_refs]
            return found, scale, read(part_out_ref.at[piece, at_rows, columns], layout=tile)

        def add(at_rows, i, carry):
            loaded = [load(at_rows, i * group + n) for n in range(group)]
            top, total, acc = carry
            new = top
            for found, *_ in loaded:
                new = jnp.maximum(new, found)
            shrink = jnp.exp2(top - new)
            total, acc = total * shrink, acc * across(shrink, width)
            for found, scale, values in loaded:
                weight = jnp.exp2(found - new)
                total += weight
                acc += values.astype(jnp.float32) * across(math.prod(scale, start=weight), width)
            return new, total, acc

        def combine_rows(step, _):
            at_rows = pl.ds(jnp.minimum(step * together, height - together), together)  # past the last: those again
            groups = lax.div(count + (group - 1), jnp.int32(group))
            start = filled(a_row, EMPTY, together), filled(a_row, 0, together), filled(tile, 0, together, width)
            top, total, acc = lax.fori_loop(0, groups, partial(add, at_rows), start)
            empty = total == 0
            total = jnp.where(empty, 1.0, total)

            @pl.when(chunk == 0)
            def _():
                store(lse_ref.at[b, at_rows], jnp.where(empty, -jnp.inf, (top + jnp.log2(total)) * LN2))

            for ref in sink_refs:
                total += jnp.exp2(read(ref.at[at_rows], layout=a_row) * LOG2E - top)
            store(out_ref.at[b, at_rows, columns], (acc / across(total, width)).astype(out.dtype))

        @pl.when(b >= 0)
        def _():
            lax.fori_loop(step0, step0 + steps, combine_rows, None)

    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    kernel(
        body,
        interpret=interpret,
        kernel_name="combine",
        grid=(plan.cuts.shape[0], -(-rows // (together * steps)), chunks),
        grid_names=("cut", "rows", "chunk"),
        num_threads=1,
        thread_name="wg",
        waits=True,
    )(part_out, part_lse, *optional, plan.cuts, out_ref, lse_ref)
    return frozen(out_ref), frozen(lse_ref)
