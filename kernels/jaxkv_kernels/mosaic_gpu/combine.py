"""Combines the pieces of requests that were cut, in place of their rows of the result.

A CTA of one warpgroup has a few rows of a cut request.  It reads the pieces in groups, all loads of a group, of several
rows, before their first use, and keeps running softmaxes over their log-sum-exps (base 2).  Most plans cut few requests
or none: the grid, which must have room for all, is kept small.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkv_kernels.mosaic_gpu.build import MULTIPROCESSORS, frozen, kernel

LN2 = math.log(2)
MOST_CTAS = 4 * MULTIPROCESSORS
"""Rows of cut requests beyond these share CTAs: so many run at once, and idle ones take time as well."""
MOST_ROWS, AT_ONCE = 4, 32
"""Rows, and rows times pieces, of which a CTA has the loads under way at once."""


def combine(out, lse, part_out, part_lse, part_scale, plan, *, rows, interpret):
    """The result [B, >= rows, R] and lse [B, >= rows], with `rows` rows of cut requests made from their pieces.

    Pieces: part_out [pieces, >= rows, R], part_lse [pieces, >= rows]; part_scale, of the same shape, is what the values
    of a row are to be multiplied by, None where by nothing.
    """
    batch, _, latent = out.shape
    scales = [] if part_scale is None else [part_scale]
    # About the pieces of a request.  Always the same for batch-invariant plans, whose sums must keep their order.
    group = min(1 << (max(plan.pieces // batch, 2).bit_length() - 1), AT_ONCE)
    each = max(plan.cuts.shape[0] * rows // MOST_CTAS, 1)
    together = min(each, AT_ONCE // group, MOST_ROWS)
    each += -each % together

    def body(part_out_ref, part_lse_ref, *refs):
        *scale_refs, cut_ref, out_ref, lse_ref = refs
        cut, row0 = lax.axis_index("cut"), lax.axis_index("rows") * each
        b, first, count = (cut_ref[cut, i] for i in range(3))

        def load(row, n):
            """Of the n-th piece of a row: log-sum-exp, scale and values."""
            piece = first + jnp.minimum(n, count - 1)
            found = jnp.where(n < count, part_lse_ref[piece, row], -jnp.inf)
            return found, [ref[piece, row] for ref in scale_refs], part_out_ref[piece, row]

        def add(carry, pieces):
            top, total, acc = carry
            new = top
            for found, *_ in pieces:
                new = jnp.maximum(new, found)
            shrink = jnp.exp2(top - new)
            total, acc = total * shrink, acc * shrink
            for found, scale, values in pieces:
                weight = jnp.exp2(found - new)
                total, acc = total + weight, acc + values.astype(jnp.float32) * math.prod(scale, start=weight)
            return new, total, acc

        def combine_rows(row):
            # Past the last row, the last is done again.
            which = [jnp.minimum(row + i, rows - 1) for i in range(together)]

            def add_group(i, carries):
                pieces = [[load(row, i * group + n) for n in range(group)] for row in which]
                return tuple(map(add, carries, pieces))

            start = jnp.float32(-1e30), jnp.float32(0), jnp.zeros((latent,), jnp.float32)
            groups = lax.div(count + (group - 1), jnp.int32(group))
            for row, (top, total, acc) in zip(
                which, lax.fori_loop(0, groups, add_group, (start,) * together), strict=True
            ):
                empty = total == 0
                total = jnp.where(empty, 1.0, total)
                out_ref[b, row] = (acc / total).astype(out.dtype)
                lse_ref[b, row] = jnp.where(empty, -jnp.inf, (top + jnp.log2(total)) * LN2)

        @pl.when(b >= 0)
        def _():
            lax.fori_loop(0, each // together, lambda i, _: combine_rows(row0 + i * together), None)

    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    kernel(
        body,
        interpret=interpret,
        kernel_name="combine",
        grid=(plan.cuts.shape[0], -(-rows // each)),
        grid_names=("cut", "rows"),
        num_threads=1,
        thread_name="wg",
    )(part_out, part_lse, *scales, plan.cuts, out_ref, lse_ref)
    return frozen(out_ref), frozen(lse_ref)
