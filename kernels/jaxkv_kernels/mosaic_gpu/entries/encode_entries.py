"""Encodes new entries and stores them at slots of a layer, in place: every format, from values of any float dtype.

Work.  A team of lanes (`teams.py`) encodes an entry (one head of one token), or two entries if there are many.

Timeline of a team:

    load the slot; load the values, a chunk of 8 per lane and round
    largest magnitudes of the tiles of values that share a scale, by shuffles; scales
    convert; store chunks and scales

What bounds it: memory bandwidth, and for few entries the latency of one load and one store.  All loads of an entry, and
all entries of a multiprocessor, are in flight at the same time.
Writing 8,192 indexer keys takes 2.40 us on an H200.  Of these, loading slots, with the launch, takes 0.78 us, loading
values 1.13, the largest magnitudes 0.06, and converting and storing 0.43.

Barriers.  None.
Budget.  No shared memory.  Registers: the values of a team's entries, 4 per chunk of bf16.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxkv_kernels.formats.bits import view_as
from jaxkv_kernels.mosaic_gpu.entries.fields import fields_of
from jaxkv_kernels.mosaic_gpu.entries.movers import mover, scale_of, step_of
from jaxkv_kernels.mosaic_gpu.entries.teams import teams
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import floordiv
from jaxkv_kernels.mosaic_gpu.runtime.launch import freeze


@partial(jax.jit, static_argnames=("pages", "entry", "interleaved", "interpret"))
def encode_entries(
    buffer, values, slots, layer, scales=(), cos_sin=None, *, pages, entry, interleaved=False, interpret
):
    """The buffer with values [T, (H,) n_i] stored at slots [T] of a layer; slots outside the cache are skipped.

    For formats whose scales the caller keeps, `scales` has a float32 scalar or [H] per value, or a single one for all.
    With `cos_sin` [T, n], the last value is rotated first (`jaxkv_kernels.rotary`); entries then have one head.
    """
    if not slots.size:
        return buffer
    heads = pages.num_heads
    fields = fields_of(entry, pages, buffer.dtype.itemsize)
    entries = slots.size * heads
    team = teams(fields, entries, interpret=interpret)
    lanes = mover(team)
    values = [value.reshape(entries, -1) for value in values]
    scales = [jnp.reshape(scale, (-1,)).astype(jnp.float32) for scale in scales]

    angles = () if cos_sin is None else (cos_sin,)

    def load(i, inside, *refs):
        value_refs, (slot_ref, layer_ref, *others) = refs[: len(values)], refs[len(values) : -1]
        scale_refs, angle_refs = others[: len(scales)], others[len(scales) :]
        token = floordiv(i, heads)
        head = i - token * heads
        slot, layer = slot_ref[token], layer_ref[0]
        found_scales = [ref[head * step_of(ref)] for ref in scale_refs]
        *plain, last = zip(fields, value_refs, strict=True)
        raw = [lanes.load_values(*each, i) for each in plain]
        raw.append(lanes.load_rotated(*last, *angle_refs, i, interleaved) if angles else lanes.load_values(*last, i))
        keep = inside & (slot >= 0) & (slot < pages.num_slots) & (layer >= 0) & (layer < pages.num_layers)
        slot, layer = jnp.where(keep, slot, 0), jnp.where(keep, layer, 0)
        block = floordiv(slot, pages.block_size)
        index = {"layer": layer, "block": block, "head": head, "token": slot - block * pages.block_size}
        return raw, keep, index, found_scales

    def store(loaded, *refs):
        raw, keep, index, found_scales = loaded
        for field, value, chunks in zip(fields, values, raw, strict=True):
            scale = scale_of(field, found_scales)
            lanes.store_entry(field, refs[-1], chunks, str(value.dtype), keep, index, scale)

    ref = jax.new_ref(lanes.buffer(buffer))
    team.run("encode_entries", load, store, *values, slots, jnp.reshape(layer, (1,)), *scales, *angles, ref)
    return view_as(freeze(ref), buffer.dtype)
