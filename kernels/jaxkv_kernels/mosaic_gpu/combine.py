"""Combines the pieces of requests that were cut, in place of their rows of the result.

A CTA of one warpgroup has a row of the request that ends in a part, if that began in an earlier one.  It reads the
pieces in groups, all loads of a group before their first use, and keeps a running softmax over their log-sum-exps
(base 2).
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkv_kernels.mosaic_gpu.build import kernel

GROUP = 8
LN2 = math.log(2)


def combine(out, lse, part_out, part_lse, plan, *, interpret):
    """The result [B, rows, R] and lse [B, rows padded], with the rows of cut requests made from their pieces."""
    parts = plan.bounds.shape[0] - 1
    batch, rows, latent = out.shape

    def body(part_out_ref, part_lse_ref, bound_ref, request_ref, out_ref, lse_ref):
        part, row = lax.axis_index("part"), lax.axis_index("row")
        b = jnp.minimum(bound_ref[part, 0], batch - 1)
        first, last = request_ref[b, 2], request_ref[b, 3]

        @pl.when((bound_ref[part, 0] < batch) & (last == part) & (first < last))
        def _():
            # The first part holds the request as its last one, unless that is also its first.
            head = 2 * first + (bound_ref[first, 0] != b).astype(jnp.int32)

            def group(i, carry):
                top, total, acc = carry
                pieces = []
                for j in range(GROUP):
                    p = first + i * GROUP + j
                    piece = jnp.where(p == first, head, 2 * jnp.minimum(p, last))
                    found = jnp.where(p <= last, part_lse_ref[piece, row], -jnp.inf)
                    pieces.append((found, part_out_ref[piece, row]))
                new = top
                for found, _ in pieces:
                    new = jnp.maximum(new, found)
                shrink = jnp.exp2(top - new)
                total, acc = total * shrink, acc * shrink
                for found, values in pieces:
                    weight = jnp.exp2(found - new)
                    total, acc = total + weight, acc + values * weight
                return new, total, acc

            start = jnp.float32(-1e30), jnp.float32(0), jnp.zeros((latent,), jnp.float32)
            count = lax.div(last - first + GROUP, jnp.int32(GROUP))
            top, total, acc = lax.fori_loop(0, count, group, start)
            empty = total == 0
            total = jnp.where(empty, 1.0, total)
            out_ref[b, row] = (acc / total).astype(out.dtype)
            lse_ref[b, row] = jnp.where(empty, -jnp.inf, (top + jnp.log2(total)) * LN2)

    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    kernel(
        body,
        interpret=interpret,
        grid=(parts, rows),
        grid_names=("part", "row"),
        num_threads=1,
        thread_name="wg",
    )(part_out, part_lse, plan.bounds, plan.requests, out_ref, lse_ref)
    return jax.freeze(out_ref), jax.freeze(lse_ref)
