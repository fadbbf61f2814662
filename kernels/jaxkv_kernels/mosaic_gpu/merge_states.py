"""Combines partial attentions of the same queries over disjoint keys.

It computes out = sum of exp(lse_i - lse) * out_i, where lse = log(sum of exp(lse_i)).

Work.  A team of lanes (`teams.py`) combines the partial results of one query: a row of each.

Timeline of a team, with up to `TOGETHER` partial results:

    load all rows and LSEs; maximum of the LSEs; weights; weighted sum; store

With more partial results, it loops over them twice: for the maximum of the LSEs, and for the weighted sum.

What bounds it: memory bandwidth.

Barriers.  None.
Budget.  No shared memory.  Registers: the rows of up to `TOGETHER` partial results, and a sum in float32.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.calls import MergeStates
from jaxkv_kernels.mosaic_gpu.entry_fields import CHUNK, Field, PartAddress
from jaxkv_kernels.mosaic_gpu.entry_lanes import MOST_VALUES, mover, teams

TOGETHER = 8
"""The most partial results whose rows are loaded at the same time."""


def unsupported_reasons(call: MergeStates) -> Iterator[str]:
    """Reasons against a call."""
    size = call.outs.shape[-1]
    if size % CHUNK or not 0 < size <= MOST_VALUES:
        yield f"results of {size} values: supports multiples of {CHUNK} up to {MOST_VALUES}"


@jax.jit
def merge_states(call: MergeStates) -> tuple[jax.Array, jax.Array]:
    """Merges outs [N, ..., D] and lses [N, ...] into out [..., D] and float32 lse [...]."""
    outs, lses = call.outs, call.lses
    parts, *rows, size = outs.shape
    count = lses[0].size
    shapes = [jax.ShapeDtypeStruct((count, size), outs.dtype), jax.ShapeDtypeStruct((count,), jnp.float32)]
    if not count:
        return jnp.zeros(outs.shape[1:], outs.dtype), jnp.zeros(rows, jnp.float32)
    field = Field(0, size, str(outs.dtype), PartAddress(0, ()))
    team = teams((field,), count, most=1)
    lanes = mover(team)

    def row_of(part, i, out_refs):
        return lanes.load_values(field, out_refs, part * count + i)

    def lse_of(part, i, lse_refs):
        found = lse_refs[part * count + i]
        return jnp.where(found < jnp.inf, found, -jnp.inf)  # some kernels return +inf or NaN for no keys

    def load(i, inside, out_refs, lse_refs, out_ref, lse_ref):
        few = range(parts if parts <= TOGETHER else 0)
        return i, inside, [row_of(part, i, out_refs) for part in few], [lse_of(part, i, lse_refs) for part in few]

    def store(loaded, out_refs, lse_refs, out_ref, lse_ref):
        i, inside, raw, found = loaded

        def add(part_lse, raw, sums, base):
            acc, total = sums
            weight = jnp.exp(part_lse - base)
            return lanes.add_weighted(field, acc, raw, str(out_refs.dtype), weight), total + weight

        zero = jnp.float32(0)
        if found:
            top = found[0]
            for other in found[1:]:
                top = jnp.maximum(top, other)
            base = jnp.where(top == -jnp.inf, zero, top)
            sums = lanes.zeros(field), zero
            for part_lse, values in zip(found, raw, strict=True):
                sums = add(part_lse, values, sums, base)
        else:
            lowest = -jnp.float32(jnp.inf)
            top = lax.fori_loop(0, parts, lambda part, top: jnp.maximum(top, lse_of(part, i, lse_refs)), lowest)
            base = jnp.where(top == -jnp.inf, zero, top)

            def add_part(part, sums):
                return add(lse_of(part, i, lse_refs), row_of(part, i, out_refs), sums, base)

            sums = lax.fori_loop(0, parts, add_part, (lanes.zeros(field), zero))
        acc, total = sums
        divisor = jnp.where(total > 0, total, jnp.float32(1))
        lanes.store_scaled(field, out_ref, acc, 1 / divisor, i, inside)
        lanes.store_scalar(lse_ref, jnp.where(total > 0, base + jnp.log(divisor), -jnp.inf), i, inside)

    out, lse = team.run("merge_states", load, store, outs.reshape(-1, size), lses.reshape(-1), out_type=shapes)
    return out.reshape(outs.shape[1:]), lse.reshape(rows)
