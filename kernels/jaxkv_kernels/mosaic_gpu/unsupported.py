"""The reasons against calls on caches whose entries are supported: a function per operation."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from jaxkv_kernels.addressing.row_view import ROW_LIMIT, row_view
from jaxkv_kernels.formats.bits import FP8
from jaxkv_kernels.formats.entries import IndexerEntry
from jaxkv_kernels.mosaic_gpu.copies import block_runs
from jaxkv_kernels.mosaic_gpu.entry_copies import MOST_BYTES, EntryBytes, token_ways
from jaxkv_kernels.mosaic_gpu.entry_fields import CHUNK, fields_of
from jaxkv_kernels.mosaic_gpu.indexer_keys import key_rows
from jaxkv_kernels.mosaic_gpu.indexer_work import QUERY_ROWS, rows_per_token
from jaxkv_kernels.mosaic_gpu.layout_reasons import apart, block_sizes, origins, steps, unaligned

INDEXER_DIM, INDEXER_BLOCKS = 128, (32, 64, 128, 256)
MOST_SELECTED = 4096
PLAIN = ("bf16", "f16", "f32")
"""Formats of entries that can be copied as they are."""
WORD = 4
"""Bytes: addresses of entries that lanes convert are multiples of it."""
MOST_VALUES = 2048
"""Values of an entry that a team of lanes keeps in registers."""


def indexer_logits(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against an `indexer_logits` call."""
    entry, pages, q = options["entry"], options["pages"], arrays["q"]
    if entry.head_dim != INDEXER_DIM:
        yield f"keys of {entry.head_dim} values: supports {INDEXER_DIM}"
    if entry.quantised and q.dtype not in (FP8, jnp.bfloat16, jnp.float16):
        yield f"`q` of {q.dtype}: supports float8_e4m3fn, bfloat16 and float16"
    if not entry.quantised and q.dtype not in (FP8, entry.dtype):
        yield f"`q` of {q.dtype}: supports float8_e4m3fn and {entry.dtype} with keys of format {entry.format!r}"
    if rows_per_token(q.shape[2]) > QUERY_ROWS:
        yield f"`q` of {q.shape[2]} heads: supports at most {QUERY_ROWS}"
    if options["max_len"] >= 2**28:
        yield f"`max_len` of {options['max_len']}: supports less than 2**28"
    if not entry.quantised:
        yield from block_sizes(pages)
        yield from origins(pages, arrays["buffer"])
        return
    if pages.block_size not in INDEXER_BLOCKS:
        yield f"blocks of {pages.block_size} tokens: supports {', '.join(map(str, INDEXER_BLOCKS))}"
    try:
        key_rows(pages, arrays["buffer"].dtype.itemsize)
    except ValueError as error:
        yield str(error)


def select_topk(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `select_topk` call."""
    if options["k"] > MOST_SELECTED:
        yield f"`k` of {options['k']}: supports at most {MOST_SELECTED}, which are sorted in registers"
    if arrays["logits"].shape[-1] >= 2**28:
        yield f"rows of {arrays['logits'].shape[-1]} logits: supports fewer than 2**28"


def write_mla(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `write_mla` call."""
    if arrays["cos_sin"] is None:
        yield from _entries_moved(arrays, options, [arrays[name].dtype for name in ("kv_c", "k_pe")])
        return
    entry = options["entry"]
    yield from _entries_converted(entry, options["pages"], arrays["buffer"].dtype.itemsize)
    if not options["interleaved"] and entry.sizes[-1] % (2 * CHUNK):
        yield f"`cos_sin` for halves of {entry.sizes[-1] // 2} values: supports multiples of {CHUNK}"


def write_kv(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `write_kv` call."""
    yield from _entries_moved(arrays, options, [arrays[name].dtype for name in ("k", "v")])


def write_indexer_k(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `write_indexer_k` call."""
    yield from _entries_moved(arrays, options, [arrays["k"].dtype])


def gather_mla(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a call that gathers entries."""
    yield from _entries_moved(arrays, options, [options["dtype"]])


gather_kv = gather_indexer_k = gather_mla


def gather_entries(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a call that gathers the bytes of entries."""
    entry = options["entry"]
    if entry.split:
        yield "split pages: supports entries whose parts lie together"
    elif options["pages"].num_parts > 1:
        yield from apart(options["pages"], options["entry"])
    else:
        whole = EntryBytes(entry.nbytes, entry.one_head)
        yield from _entries_copied(whole, options["pages"], arrays["buffer"].dtype.itemsize)


def merge_states(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `merge_states` call."""
    del options
    size = arrays["outs"].shape[-1]
    if size % CHUNK or not 0 < size <= MOST_VALUES:
        yield f"results of {size} values: supports multiples of {CHUNK} up to {MOST_VALUES}"


def copy_blocks(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a call that moves whole blocks: `copy_blocks`, `read_blocks`, `write_blocks`."""
    pages, itemsize = options["pages"], arrays["buffer"].dtype.itemsize
    if pages.block_elements >= ROW_LIMIT:
        yield f"blocks of {pages.block_elements} elements: supports fewer than 2**31"
    try:
        runs = block_runs(pages)
    except ValueError as error:
        yield str(error)
        return
    strides = {} if pages.blocks_are_runs else steps(pages, [axis for axis, *_ in runs.axes])
    yield from unaligned({"run of a block": runs.length, **strides}, itemsize)


read_blocks = write_blocks = copy_blocks


def write_state(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a call that moves states: `write_state`, `read_state`."""
    pages, entry = options["pages"], options["entry"]
    yield from unaligned({f"array {part.name!r}": part.nbytes for part in entry.parts() if part.name != "padding"}, 1)
    yield from unaligned(steps(pages, ("layer", "token")), arrays["buffer"].dtype.itemsize)
    try:
        row_view(pages)
    except ValueError as error:
        yield str(error)


read_state = write_state


def copied(entry, dtypes) -> bool:
    """Whether moving an entry to or from values of `dtypes` copies them as they are, in bulk.

    Indexer keys are too short to gain from bulk copies.
    """
    return entry.format in PLAIN and not isinstance(entry, IndexerEntry) and all(entry.dtype == d for d in dtypes)


def _entries_moved(arrays, options, dtypes) -> Iterator[str]:
    """Reasons against moving entries between the cache and arrays of their values, of `dtypes`."""
    entry, pages, itemsize = options["entry"], options["pages"], arrays["buffer"].dtype.itemsize
    if copied(entry, dtypes):
        yield from _entries_copied(entry, pages, itemsize)
    elif pages.num_parts > 1:
        yield from apart(options["pages"], options["entry"])
    else:
        yield from _entries_converted(entry, pages, itemsize)


def _empty_parts(entry) -> Iterator[str]:
    for size in entry.sizes:
        if not size:
            yield "part of 0 values: supports positive numbers of values"


def _entries_copied(entry, pages, itemsize) -> Iterator[str]:
    """Reasons against moving entries by bulk copies."""
    yield from _empty_parts(entry)
    yield from unaligned({f"part of {size} values": size for size in entry.sizes}, entry.dtype.itemsize)
    yield from unaligned(steps(pages, ("layer", "token", "head", "part")), itemsize)
    token = pages.num_heads * entry.nbytes
    if token * token_ways(pages.num_heads) > MOST_BYTES:
        most = MOST_BYTES // token_ways(pages.num_heads)
        yield f"a token of {token} bytes in all heads: supports at most {most}, which shared memory holds"
    try:
        row_view(pages)
    except ValueError as error:
        yield str(error)


def _entries_converted(entry, pages, itemsize) -> Iterator[str]:
    """Reasons against encoding or decoding entries by lanes."""
    yield from _empty_parts(entry)
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
