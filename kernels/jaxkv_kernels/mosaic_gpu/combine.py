"""Combines the pieces of requests that were cut, in place of their rows of the result.

A CTA of one warpgroup has a few rows of a cut request, one after the other.  It reads the pieces in groups, all loads
of a group before their first use, and keeps a running softmax over their log-sum-exps (base 2).  Most plans cut few
requests or none: the grid, which must have room for all, is kept small.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkv_kernels.mosaic_gpu.build import frozen, kernel

LN2 = math.log(2)
MOST_CTAS = 2048
"""Rows of cut requests beyond these share CTAs: an idle CTA costs about a nanosecond, and this many run at once."""


def combine(out, lse, part_out, part_lse, plan, *, rows, interpret):
    """The result [B, >= rows, R] and lse [B, >= rows], with `rows` rows of cut requests made from their pieces."""
    batch, _, latent = out.shape
    each = max(plan.cuts.shape[0] * rows // MOST_CTAS, 1)
    # About the pieces of a request.  Always the same for batch-invariant plans, whose sums must keep their order.
    group = min(max(pl.next_power_of_2(-(-plan.pieces // batch)), 4), 32)

    def body(part_out_ref, part_lse_ref, cut_ref, out_ref, lse_ref):
        cut, row0 = lax.axis_index("cut"), lax.axis_index("rows") * each
        b, first, count = (cut_ref[cut, i] for i in range(3))

        def add(row, i, carry):
            top, total, acc = carry
            pieces = []
            for n in range(group):
                n += i * group
                piece = first + jnp.minimum(n, count - 1)
                pieces.append((jnp.where(n < count, part_lse_ref[piece, row], -jnp.inf), part_out_ref[piece, row]))
            new = top
            for found, _ in pieces:
                new = jnp.maximum(new, found)
            shrink = jnp.exp2(top - new)
            total, acc = total * shrink, acc * shrink
            for found, values in pieces:
                weight = jnp.exp2(found - new)
                total, acc = total + weight, acc + values * weight
            return new, total, acc

        def combine_row(row):
            start = jnp.float32(-1e30), jnp.float32(0), jnp.zeros((latent,), jnp.float32)
            groups = lax.div(count + (group - 1), jnp.int32(group))
            top, total, acc = lax.fori_loop(0, groups, partial(add, row), start)
            empty = total == 0
            total = jnp.where(empty, 1.0, total)
            out_ref[b, row] = (acc / total).astype(out.dtype)
            lse_ref[b, row] = jnp.where(empty, -jnp.inf, (top + jnp.log2(total)) * LN2)

        @pl.when(b >= 0)
        def _():
            lax.fori_loop(row0, jnp.minimum(row0 + each, rows), lambda row, _: combine_row(row), None)

    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    kernel(
        body,
        interpret=interpret,
        kernel_name="combine",
        grid=(plan.cuts.shape[0], -(-rows // each)),
        grid_names=("cut", "rows"),
        num_threads=1,
        thread_name="wg",
    )(part_out, part_lse, plan.cuts, out_ref, lse_ref)
    return frozen(out_ref), frozen(lse_ref)
