"""Reads the entries of ragged runs of tokens, decoded: every format, to values of any float dtype.

Work.  A team of lanes (`teams.py`) decodes an entry (one head of one row of the result), or two entries if there are
many.

Timeline of a team:

    find the place of the token, by a search in the running sums and the block table
    load the stored chunks, of 8 values per lane and round, and their scales
    convert; store chunks

For rows without a token, zeros are stored and nothing is loaded.

What bounds it: memory bandwidth, and the latency of dependent loads: sums, table, entry.

Barriers.  None.
Budget.  No shared memory.  Registers: the stored chunks of a team's entries, 2 per chunk of e4m3.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxkv_kernels.mosaic_gpu.bulk.ragged_places import place_of
from jaxkv_kernels.mosaic_gpu.entries.fields import fields_of
from jaxkv_kernels.mosaic_gpu.entries.movers import mover, scale_of, step_of
from jaxkv_kernels.mosaic_gpu.entries.teams import teams
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import floordiv


@partial(jax.jit, static_argnames=("pages", "entry", "total", "dtype", "interpret"))
def decode_entries(
    buffer, block_tables, cu_seq_lens, seq_starts, layer, scales=(), *, pages, entry, total, dtype, interpret
):
    """The values of the tokens of ragged runs, [total, (H,) n_i] of `dtype`; rows without a token are 0.

    For formats whose scales the caller keeps, `scales` has a float32 scalar or [H] per value, or a single one for all.
    """
    heads = pages.num_heads
    fields = fields_of(entry, pages, buffer.dtype.itemsize)
    team = teams(fields, total * heads, interpret=interpret)
    lanes = mover(team)
    starts = [] if seq_starts is None else [seq_starts]
    scales = [jnp.reshape(scale, (-1,)).astype(jnp.float32) for scale in scales]

    def load(i, inside, cache_ref, table_ref, cu_ref, layer_ref, *refs):
        start_ref = refs[0] if starts else None
        scale_refs = refs[len(starts) : len(starts) + len(scales)]
        row = floordiv(i, heads)
        head = i - row * heads
        layer = layer_ref[0]
        found_scales = [ref[head * step_of(ref)] for ref in scale_refs]
        place = place_of(row, table_ref, cu_ref, start_ref, pages=pages)
        in_cache = (layer >= 0) & (layer < pages.num_layers)
        index = {"layer": jnp.where(in_cache, layer, 0), "block": place.block, "head": head, "token": place.token}
        live = place.live & in_cache
        found_scales = [jnp.where(live, scale, 0) for scale in found_scales]
        return i, inside, [lanes.load_entry(field, cache_ref, live, index) for field in fields], found_scales

    def store(loaded, *refs):
        i, inside, found, found_scales = loaded
        for field, ref, chunks in zip(fields, refs[-len(fields) :], found, strict=True):
            scale = scale_of(field, found_scales)
            lanes.store_values(field, ref, chunks, i, inside, scale)

    out_type = [jax.ShapeDtypeStruct((total * heads, field.count), dtype) for field in fields]
    operands = (lanes.buffer(buffer), block_tables, cu_seq_lens, jnp.reshape(layer, (1,)), *starts, *scales)
    found = team.run("decode_entries", load, store, *operands, out_type=out_type)
    rows = (total,) if entry.one_head else (total, heads)
    return tuple(values.reshape(*rows, -1) for values in found)
