"""Writes store new entries at slots of a layer, in place; gathers read the entries of ragged runs of tokens.

Reads of given slots are gathers with a run of one token per slot (`ReadCall` in `calls.py`).

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

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing import Buffer, Pages, arrays_of, dtype_of, join_runs, split_runs
from jaxkv_kernels.calls import (
    GatherEntries,
    GatherIndexerK,
    GatherKV,
    GatherMLA,
    ReadIndexerK,
    ReadKV,
    ReadMLA,
    WriteEntries,
    WriteIndexerK,
    WriteKV,
    WriteMLA,
    token_scale_reasons,
)
from jaxkv_kernels.formats.bits import view_as
from jaxkv_kernels.formats.entries import Entry, IndexerEntry
from jaxkv_kernels.mosaic_gpu.entry_copies import EntryBytes, copy_reasons, load_entries, store_entries
from jaxkv_kernels.mosaic_gpu.entry_fields import CHUNK, fields_of
from jaxkv_kernels.mosaic_gpu.entry_lanes import MOST_VALUES, mover, scale_of, step_of, teams
from jaxkv_kernels.mosaic_gpu.ragged_places import place_of
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import floordiv
from jaxkv_kernels.mosaic_gpu.runtime.launch import freeze, thaw

Write = WriteMLA | WriteKV | WriteIndexerK
Gather = GatherMLA | GatherKV | GatherIndexerK
Read = ReadMLA | ReadKV | ReadIndexerK
PLAIN = ("bf16", "f16", "f32")
"""Formats of entries that can be copied as they are."""
WORD = 4
"""Bytes: addresses of entries that lanes convert are multiples of it."""


def write(call: Write) -> Buffer:
    """Stores new entries at slots of a layer; returns the new buffer."""
    if not _angles(call) and _copied(call.entry, [value.dtype for value in _values(call)]):
        return store_entries(call, _values(call))
    return encode_entries(call)


def gather(call: Gather) -> tuple[jax.Array, ...]:
    """The values of the tokens of ragged runs, [total, (H,) n_i] of the call's dtype; rows without a token are 0."""
    return load_entries(call, call.entry) if _copied(call.entry, [call.dtype]) else decode_entries(call)


def write_entries(call: WriteEntries) -> Buffer:
    """Stores the bytes of entries at slots of a layer; returns the new buffer."""
    return store_entries(call, split_runs(call.pages, call.entry, call.rows, dtype_of(call.buffer)))


def gather_entries(call: GatherEntries) -> jax.Array:
    """The bytes of entries, uint8 [total, (H,) nbytes]; rows without a token are 0."""
    return join_runs(call.pages, call.entry, load_entries(call, EntryBytes.of(call)))


def write_unsupported_reasons(call: Write) -> Iterator[str]:
    """Reasons against a call that writes entries."""
    yield from token_scale_reasons(call)
    if isinstance(call, WriteMLA) and call.cos_sin is not None:
        yield from _conversion_reasons(call.entry, call.pages, dtype_of(call.buffer).itemsize)
        if not call.interleaved and call.entry.sizes[-1] % (2 * CHUNK):
            yield f"`cos_sin` for halves of {call.entry.sizes[-1] // 2} values: supports multiples of {CHUNK}"
    else:
        yield from _move_reasons(call, [value.dtype for value in _values(call)])


def gather_unsupported_reasons(call: Gather | Read) -> Iterator[str]:
    """Reasons against a call that gathers entries."""
    yield from token_scale_reasons(call)
    yield from _move_reasons(call, [call.dtype])


def read_unsupported_reasons(call: Read) -> Iterator[str]:
    """Reasons against a call that reads entries at slots, by the kernels of gathers."""
    yield from gather_unsupported_reasons(call)
    if not call.slots.size:
        yield "no slots: supports at least one"


def bytes_unsupported_reasons(call: WriteEntries | GatherEntries) -> Iterator[str]:
    """Reasons against a call that writes or gathers the bytes of entries."""
    if call.entry.split:
        yield "split pages: supports entries whose parts lie together"
    else:
        yield from copy_reasons(EntryBytes.of(call), call.pages, dtype_of(call.buffer).itemsize)


def _values(call: Write) -> tuple[jax.Array, ...]:
    match call:
        case WriteMLA():
            return call.kv_c, call.k_pe
        case WriteKV():
            return call.k, call.v
        case WriteIndexerK():
            return (call.k,)


def _scales(call: Write | Gather) -> list[jax.Array]:
    """float32 scales that the caller keeps, [H] or [1] per value, or a single one for all; none for other formats."""
    if not call.entry.codec.scaled or isinstance(call, WriteIndexerK | GatherIndexerK):
        return []
    scales = [call.kv_scale] if isinstance(call, WriteMLA | GatherMLA) else [call.k_scale, call.v_scale]
    return [jnp.reshape(scale, (-1,)).astype(jnp.float32) for scale in scales if scale is not None]


def _angles(call: Write) -> list[jax.Array]:
    """The cosines and sines by which the last value is rotated; none if it is stored as it is."""
    return [call.cos_sin] if isinstance(call, WriteMLA) and call.cos_sin is not None else []


def _copied(entry: Entry, dtypes) -> bool:
    """Whether moving an entry to or from values of `dtypes` copies them as they are, in bulk.

    Indexer keys are too short to gain from bulk copies.
    """
    return entry.format in PLAIN and not isinstance(entry, IndexerEntry) and all(entry.dtype == d for d in dtypes)


def _move_reasons(call: Write | Gather | Read, dtypes) -> Iterator[str]:
    """Reasons against moving entries between the cache and arrays of their values, of `dtypes`."""
    itemsize = dtype_of(call.buffer).itemsize
    if _copied(call.entry, dtypes):
        yield from copy_reasons(call.entry, call.pages, itemsize)
    else:
        yield from _conversion_reasons(call.entry, call.pages, itemsize)


def _conversion_reasons(entry: Entry, pages: Pages, itemsize: int) -> Iterator[str]:
    """Reasons against encoding or decoding entries by lanes."""
    for size in entry.sizes:
        if not size:
            yield "part of 0 values: supports positive numbers of values"
    for size in entry.sizes:
        if size % CHUNK:
            yield f"part of {size} values: supports multiples of {CHUNK} where they are converted"
    if sum(entry.sizes) > MOST_VALUES:
        yield f"entries of {sum(entry.sizes)} values: supports at most {MOST_VALUES} where they are converted"
    for field in fields_of(entry, pages, itemsize):
        addresses = [field.address]
        if field.scales is not None and field.rule.itemsize == WORD:
            addresses.append(field.scales)
        for address in addresses:
            if address.alignment % WORD:
                yield f"entries at multiples of {address.alignment} bytes: supports multiples of {WORD}"
                return


@jax.jit
def encode_entries(call: Write) -> Buffer:
    """The buffer with the values of a call stored at slots of a layer; slots outside the cache are skipped.

    With `cos_sin`, the last value is rotated first (`jaxkv_kernels.rotary`); entries then have one head.
    """
    buffer, pages, slots = call.buffer, call.pages, call.slot_mapping
    if not slots.size:
        return buffer
    heads, dtype = pages.num_heads, dtype_of(buffer)
    fields = fields_of(call.entry, pages, dtype.itemsize)
    entries = slots.size * heads
    team = teams(fields, entries)
    lanes = mover(team)
    values = [value.reshape(entries, -1) for value in _values(call)]
    scales = _scales(call)
    angles, interleaved = _angles(call), isinstance(call, WriteMLA) and call.interleaved

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
        cache_refs = arrays_of(refs[-1], len(fields))
        for field, cache_ref, value, chunks in zip(fields, cache_refs, values, raw, strict=True):
            scale = scale_of(field, found_scales)
            lanes.store_entry(field, cache_ref, chunks, str(value.dtype), keep, index, scale)

    ref = thaw(jax.tree.map(lanes.buffer, buffer))
    team.run("encode_entries", load, store, *values, slots, jnp.reshape(call.layer, (1,)), *scales, *angles, ref)
    return jax.tree.map(lambda array: view_as(array, dtype), freeze(ref))


@jax.jit
def decode_entries(call: Gather) -> tuple[jax.Array, ...]:
    """The values of the tokens of ragged runs, [total, (H,) n_i] of the call's dtype; rows without a token are 0."""
    buffer, pages, total = call.buffer, call.pages, call.total
    heads = pages.num_heads
    fields = fields_of(call.entry, pages, dtype_of(buffer).itemsize)
    team = teams(fields, total * heads)
    lanes = mover(team)
    starts = [] if call.seq_starts is None else [call.seq_starts]
    scales = _scales(call)

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
        cache_refs = arrays_of(cache_ref, len(fields))
        found = [lanes.load_entry(*each, live, index) for each in zip(fields, cache_refs, strict=True)]
        return i, inside, found, found_scales

    def store(loaded, *refs):
        i, inside, found, found_scales = loaded
        for field, ref, chunks in zip(fields, refs[-len(fields) :], found, strict=True):
            scale = scale_of(field, found_scales)
            lanes.store_values(field, ref, chunks, i, inside, scale)

    out_type = [jax.ShapeDtypeStruct((total * heads, field.count), call.dtype) for field in fields]
    runs = call.block_tables, call.cu_seq_lens, jnp.reshape(call.layer, (1,))
    operands = (jax.tree.map(lanes.buffer, buffer), *runs, *starts, *scales)
    found = team.run("decode_entries", load, store, *operands, out_type=out_type)
    rows = (total,) if call.entry.one_head else (total, heads)
    return tuple(values.reshape(*rows, -1) for values in found)
