"""Combines the pieces of requests that were cut, in place of their rows of the result.

A CTA of one warpgroup has a row of a cut request.  It reads the pieces in groups, all loads of a group before their
first use, and keeps a running softmax over their log-sum-exps (base 2).
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkv_kernels.mosaic_gpu.build import kernel

LN2 = math.log(2)


def combine(out, lse, part_out, part_lse, plan, *, rows, interpret):
    """The result [B, >= rows, R] and lse [B, >= rows], with `rows` rows of cut requests made from their pieces."""
    batch, _, latent = out.shape
    group = 8 if plan.pieces > 8 * batch else 4  # always 4 for batch-invariant plans: sums must not change their order

    def body(part_out_ref, part_lse_ref, cut_ref, out_ref, lse_ref):
        cut, row = lax.axis_index("cut"), lax.axis_index("row")
        b, first, count = (cut_ref[cut, i] for i in range(3))

        def add(i, carry):
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

        @pl.when(b >= 0)
        def _():
            start = jnp.float32(-1e30), jnp.float32(0), jnp.zeros((latent,), jnp.float32)
            top, total, acc = lax.fori_loop(0, lax.div(count + (group - 1), jnp.int32(group)), add, start)
            empty = total == 0
            total = jnp.where(empty, 1.0, total)
            out_ref[b, row] = (acc / total).astype(out.dtype)
            lse_ref[b, row] = jnp.where(empty, -jnp.inf, (top + jnp.log2(total)) * LN2)

    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    kernel(
        body,
        interpret=interpret,
        kernel_name="combine",
        grid=(plan.cuts.shape[0], rows),
        grid_names=("cut", "row"),
        num_threads=1,
        thread_name="wg",
    )(part_out, part_lse, plan.cuts, out_ref, lse_ref)
    return jax.freeze(out_ref), jax.freeze(lse_ref)
