"""Writes store new entries at slots of a layer, in place; gathers read the entries of ragged runs of tokens.

Entries whose values stay as they are move by bulk copies (`entry_copies.py`).  All others are encoded and decoded by
lanes, from and to values of any float dtype, by the two kernels of this file.

Work.  A team of lanes (`entry_lanes.py`) moves an entry (one head of one token, or of one row of the result), or two
entries if there are many.

Timeline of a team that encodes:

    load the slot; load the values, a chunk of 8 per lane and round
    largest magnitudes of the tiles of values that share a scale, by shuffles; scales
    convert; store chunks and scales

Timeline of a team that decodes:

    find the place of the token, by a search in the running sums and the block table
    load the stored chunks, of 8 values per lane and round, and their scales
    convert; store chunks

For rows without a token, zeros are stored and nothing is loaded.

What bounds them: memory bandwidth; for few written entries the latency of one load and one store; for gathers the
latency of dependent loads: sums, table, entry.  All loads of an entry, and all entries of a multiprocessor, are in
flight at the same time.  Writing 8,192 indexer keys takes 2.40 us on an H200.  Of these, loading slots, with the
launch, takes 0.78 us, loading values 1.13, the largest magnitudes 0.06, and converting and storing 0.43.

Barriers.  None.
Budget.  No shared memory.  Registers: the values of a team's entries, 4 per chunk of bf16, or the stored chunks, 2 per
chunk of e4m3.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxkv_kernels.formats.bits import view_as
from jaxkv_kernels.mosaic_gpu.entry_copies import EntryBytes, load_entries, store_entries
from jaxkv_kernels.mosaic_gpu.entry_fields import fields_of
from jaxkv_kernels.mosaic_gpu.entry_lanes import mover, scale_of, step_of, teams
from jaxkv_kernels.mosaic_gpu.ragged_places import place_of
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import floordiv
from jaxkv_kernels.mosaic_gpu.runtime.launch import freeze
from jaxkv_kernels.mosaic_gpu.unsupported import copied


def write_mla(buffer, kv_c, k_pe, slot_mapping, layer, kv_scale, cos_sin, *, pages, entry, interleaved):
    """Stores kv_c [T, R] and k_pe [T, P], rotated by cos_sin [T, P] (or None); returns the new buffer."""
    scales = (kv_scale,) if entry.codec.scaled else ()
    if cos_sin is not None:
        return encode_entries(
            buffer, (kv_c, k_pe), slot_mapping, layer, scales, cos_sin,
            pages=pages, entry=entry, interleaved=interleaved,
        )  # fmt: skip
    return _write(buffer, (kv_c, k_pe), slot_mapping, layer, scales, pages=pages, entry=entry)


def write_kv(buffer, k, v, slot_mapping, layer, k_scale, v_scale, *, pages, entry):
    """Stores k [T, H, D] and v [T, H, Dv] at slots [T] of a layer; returns the new buffer."""
    scales = (k_scale, v_scale) if entry.codec.scaled else ()
    return _write(buffer, (k, v), slot_mapping, layer, scales, pages=pages, entry=entry)


def write_indexer_k(buffer, k, slot_mapping, layer, *, pages, entry):
    """Stores k [T, head_dim] at slots [T] of a layer; returns the new buffer."""
    return _write(buffer, (k,), slot_mapping, layer, (), pages=pages, entry=entry)


def _write(buffer, values, slots, layer, scales, *, pages, entry):
    if copied(entry, [value.dtype for value in values]):
        return store_entries(buffer, values, slots, layer, pages=pages)
    return encode_entries(buffer, values, slots, layer, scales, pages=pages, entry=entry)


def gather_mla(buffer, block_tables, cu_seq_lens, seq_starts, layer, kv_scale, *, pages, entry, total, dtype):
    """Returns kv_c [total, R] and k_pe [total, P] of `dtype`; rows without a token are 0."""
    scales = (kv_scale,) if entry.codec.scaled else ()
    runs = block_tables, cu_seq_lens, seq_starts
    return _gather(buffer, runs, layer, scales, pages=pages, entry=entry, total=total, dtype=dtype)


def gather_kv(buffer, block_tables, cu_seq_lens, seq_starts, layer, k_scale, v_scale, *, pages, entry, total, dtype):
    """Returns k [total, H, D] and v [total, H, Dv] of `dtype`; rows without a token are 0."""
    scales = (k_scale, v_scale) if entry.codec.scaled else ()
    runs = block_tables, cu_seq_lens, seq_starts
    return _gather(buffer, runs, layer, scales, pages=pages, entry=entry, total=total, dtype=dtype)


def gather_indexer_k(buffer, block_tables, cu_seq_lens, seq_starts, layer, *, pages, entry, total, dtype):
    """Returns k [total, head_dim] of `dtype`; rows without a token are 0."""
    runs = block_tables, cu_seq_lens, seq_starts
    return _gather(buffer, runs, layer, (), pages=pages, entry=entry, total=total, dtype=dtype)[0]


def gather_entries(buffer, block_tables, cu_seq_lens, seq_starts, layer, *, pages, entry, total):
    """Returns the bytes of entries, uint8 [total, (H,) nbytes]; rows without a token are 0."""
    runs, copied_entry = (block_tables, cu_seq_lens, seq_starts), EntryBytes(entry.nbytes, entry.one_head)
    return load_entries(buffer, *runs, layer, pages=pages, entry=copied_entry, total=total)[0]


def _gather(buffer, runs, layer, scales, *, pages, entry, total, dtype):
    if copied(entry, [dtype]):
        return load_entries(buffer, *runs, layer, pages=pages, entry=entry, total=total)
    return decode_entries(buffer, *runs, layer, scales, pages=pages, entry=entry, total=total, dtype=dtype)


@partial(jax.jit, static_argnames=("pages", "entry", "interleaved"))
def encode_entries(buffer, values, slots, layer, scales=(), cos_sin=None, *, pages, entry, interleaved=False):
    """The buffer with values [T, (H,) n_i] stored at slots [T] of a layer; slots outside the cache are skipped.

    For formats whose scales the caller keeps, `scales` has a float32 scalar or [H] per value, or a single one for all.
    With `cos_sin` [T, n], the last value is rotated first (`jaxkv_kernels.rotary`); entries then have one head.
    """
    if not slots.size:
        return buffer
    heads = pages.num_heads
    fields = fields_of(entry, pages, buffer.dtype.itemsize)
    entries = slots.size * heads
    team = teams(fields, entries)
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


@partial(jax.jit, static_argnames=("pages", "entry", "total", "dtype"))
def decode_entries(buffer, block_tables, cu_seq_lens, seq_starts, layer, scales=(), *, pages, entry, total, dtype):
    """The values of the tokens of ragged runs, [total, (H,) n_i] of `dtype`; rows without a token are 0.

    For formats whose scales the caller keeps, `scales` has a float32 scalar or [H] per value, or a single one for all.
    """
    heads = pages.num_heads
    fields = fields_of(entry, pages, buffer.dtype.itemsize)
    team = teams(fields, total * heads)
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
