"""The reasons against calls on caches whose entries are supported: a function per operation."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from jaxkv_kernels.addressing.row_view import ROW_LIMIT, row_view
from jaxkv_kernels.formats.bits import FP8
from jaxkv_kernels.formats.entries import IndexerEntry
from jaxkv_kernels.logit_cap import too_large
from jaxkv_kernels.mosaic_gpu.attention.config import FEW_ROWS, by_slots
from jaxkv_kernels.mosaic_gpu.attention.paging.token_rows import TILE_COLUMNS, origin_step
from jaxkv_kernels.mosaic_gpu.bulk.block_runs import block_runs
from jaxkv_kernels.mosaic_gpu.bulk.entry_bytes import EntryBytes
from jaxkv_kernels.mosaic_gpu.bulk.warp_share import MOST_BYTES, token_ways
from jaxkv_kernels.mosaic_gpu.entries.fields import CHUNK, fields_of
from jaxkv_kernels.mosaic_gpu.indexer.key_rows import QUERY_ROWS, key_rows, rows_per_token
from jaxkv_kernels.mosaic_gpu.runtime.available import WGMMA, unavailable_reasons

INDEXER_DIM, INDEXER_BLOCKS = 128, (32, 64, 128, 256)
MOST_SELECTED = 4096
LATENT, ROPE = 512, 64
"""The sizes of DeepSeek's entries, which are the largest."""
ROPES = (0, 16, 32, 64)
"""Rotary parts of dense attention to plain entries."""
EXPANDED = (128, 64, 128)
"""Values of a key without and in its rotary part, and of a value, for attention to expanded keys: DeepSeek's."""
TILE_ROWS = 8
"""Keys of a chunk come in multiples of it: TMA clips copies of tiles only then."""
SPARSE_LATENTS = {"fp8_v4": (448,), "mxfp4_ds_mla": (448, 512)}
"""Latents of sparse attention, by format, if not of 512 values."""
HEAD_DIMS = (64, 128, 192, 256)
BULK = 16
"""Bytes: addresses and sizes of bulk copies are multiples of it."""
PLAIN = ("bf16", "f16", "f32")
"""Formats of entries that can be copied as they are."""
WORD = 4
"""Bytes: addresses of entries that lanes convert are multiples of it."""
MOST_VALUES = 2048
"""Values of an entry that a team of lanes keeps in registers."""


def decode_mla(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `decode_mla` call."""
    entry, q = options["entry"], arrays["q_latent"]
    if entry.quantised:
        yield from _quantised_mla(entry, options["pages"], arrays["buffer"], q.shape[1] * q.shape[2])
    else:
        yield from _attention(entry, options["pages"], arrays["buffer"])
    yield from _query_dtype(entry, q.dtype, "`q_latent`")
    yield from too_large(options)


def decode_kv(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `decode_kv` call."""
    entry, q = options["entry"], arrays["q"]
    if entry.quantised:
        yield from apart(options)
        yield from _quantised_kv(entry, options["pages"], arrays["buffer"], q.shape[1] * q.shape[2])
    else:
        yield from _attention(entry, options["pages"], arrays["buffer"])
    yield from _query_dtype(entry, q.dtype, "`q`")
    yield from too_large(options)


def apart(options: Mapping[str, Any]) -> Iterator[str]:
    """A reason against a call on a cache whose keys and values lie apart."""
    if options["pages"].num_parts > 1:
        entry = options["entry"]
        yield f"keys and values of format {entry.format!r} that lie apart: supports values that follow their keys"


def decode_mla_sparse(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `decode_mla_sparse` call."""
    entry, pages, q = options["entry"], options["pages"], arrays["q_latent"]
    extra = arrays["extra"]
    if extra is not None:
        if {entry.format, extra.entry.format} != {"fp8_v4"}:
            yield f"`extra` of format {extra.entry.format!r}, with {entry.format!r}: supports 'fp8_v4' in both caches"
        yield from _unaligned(_steps(extra.pages, ("layer",)), extra.buffer.dtype.itemsize)
    yield from _gathered(entry, pages, arrays["buffer"])
    yield from _query_dtype(entry, q.dtype, "`q_latent`")
    yield from too_large(options)


def _gathered(entry, pages, buffer) -> Iterator[str]:
    """Reasons against attending to such latents by slot."""
    yield from _latent_sizes(entry, *SPARSE_LATENTS.get(entry.format, (LATENT,)))
    # The regions of split pages store multiples of 16 bytes per token, but their scales.
    yield from _unaligned(_steps(pages, ("layer",) if entry.split else ("layer", "token")), buffer.dtype.itemsize)


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
        yield from _block_sizes(pages)
        yield from _origins(pages, arrays["buffer"])
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


def plan_decode(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against planning `decode_mla` or `decode_kv` calls."""
    entry, pages = options["entry"], options["pages"]
    if entry.quantised:
        yield from apart(options)
        reasons = _quantised_mla if entry.one_head else _quantised_kv
        yield from reasons(entry, pages, arrays["buffer"], options["tokens"] * options["heads"])
    else:
        yield from _attention(entry, pages, arrays["buffer"])
    yield from _query_dtype(entry, options["dtype"], "queries")


def _quantised_mla(entry, pages, buffer, rows: int) -> Iterator[str]:
    """Reasons against attending to such latents, quantised, with so many query tokens x heads per request."""
    if by_slots(entry, rows):
        yield from _gathered(entry, pages, buffer)
        return
    yield from _latent_sizes(entry)
    yield from _block_sizes(pages)
    if rows > FEW_ROWS:
        yield from _unaligned(_steps(pages, ("layer", "token")), buffer.dtype.itemsize)
        return
    if pages.token_stride != pages.width:
        yield f"token stride {pages.token_stride}: supports {pages.width}, tokens that are contiguous"
    yield from _unaligned(_steps(pages, ("layer",)), buffer.dtype.itemsize)
    try:
        row_view(pages)
    except ValueError as error:
        yield str(error)


def _quantised_kv(entry, pages, buffer, rows: int) -> Iterator[str]:
    """Reasons against attending to such keys and values, quantised, with so many query tokens x heads per request."""
    if not {*entry.sizes} <= {128, 256}:
        yield f"{_values_of(entry)}: supports 128 and 256 of each, if quantised"
    if rows // pages.num_heads > FEW_ROWS:
        yield (
            f"query tokens x heads of {rows // pages.num_heads} per KV head: supports up to {FEW_ROWS} with entries of "
            f"format {entry.format!r}"
        )
    yield from _block_sizes(pages)
    yield from _origins(pages, buffer)


def _query_dtype(entry, dtype, name: str) -> Iterator[str]:
    """A reason against queries that do not have the entries' input dtype; the message calls the queries `name`."""
    if dtype != entry.input_dtype:
        yield f"{name} of {dtype}: supports {entry.input_dtype} with entries of format {entry.format!r}"


def _latent_sizes(entry, *latents: int) -> Iterator[str]:
    """A reason against latents of such sizes; `latents` are the supported numbers of values, by default 512."""
    supported = [(latent, ROPE) for latent in latents or (LATENT,)]
    if entry.sizes not in supported:
        yield f"{_values_of(entry)}: supports {' and '.join(f'{latent} + {rope}' for latent, rope in supported)}"


def _values_of(entry) -> str:
    return f"entries of {entry.sizes[0]} + {entry.sizes[1]} values"


def _block_sizes(pages) -> Iterator[str]:
    if pages.block_size not in (16, 32, 64, 128, 256):
        yield f"blocks of {pages.block_size} tokens: supports 16, 32, 64, 128 and 256"


def _attention(entry, pages, buffer) -> Iterator[str]:
    """Reasons against attending to such entries, which are not quantised."""
    if entry.one_head:
        latent, rope = entry.sizes
        if latent % TILE_COLUMNS or latent > LATENT or rope not in ROPES:
            yield f"{_values_of(entry)}: supports multiples of {TILE_COLUMNS} up to {LATENT}, + 0, 16, 32 or 64"
    elif not {*entry.sizes} <= {*HEAD_DIMS}:
        yield f"{_values_of(entry)}: supports 64, 128, 192 and 256 of each"
    yield from _block_sizes(pages)
    yield from _origins(pages, buffer)


def _origins(pages, buffer) -> Iterator[str]:
    """Reasons against copying from where the strides put pages."""
    steps = _steps(pages, ("layer", "token", "head", "part"))
    yield from _unaligned({**steps, "buffer": pages.size}, buffer.dtype.itemsize)
    if pages.size // origin_step(pages) >= ROW_LIMIT:
        yield (
            f"a buffer of {pages.size} elements whose strides are multiples of {origin_step(pages)} only: supports "
            f"fewer than 2**31 steps of that size"
        )


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
        yield from apart(options)
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
    steps = {} if pages.blocks_are_runs else _steps(pages, [axis for axis, *_ in runs.axes])
    yield from _unaligned({"run of a block": runs.length, **steps}, itemsize)


read_blocks = write_blocks = copy_blocks


def write_state(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a call that moves states: `write_state`, `read_state`."""
    pages, entry = options["pages"], options["entry"]
    yield from _unaligned({f"array {part.name!r}": part.nbytes for part in entry.parts() if part.name != "padding"}, 1)
    yield from _unaligned(_steps(pages, ("layer", "token")), arrays["buffer"].dtype.itemsize)
    try:
        row_view(pages)
    except ValueError as error:
        yield str(error)


read_state = write_state


def attend_expanded(dtype, nope: int, rope: int, value: int) -> Iterator[str]:
    """Reasons against `attend_expanded`, part of `prefill_mla`, for such heads; also those of this machine."""
    yield from unavailable_reasons(WGMMA)
    if dtype not in (jnp.bfloat16, jnp.float16):
        yield f"queries of {jnp.dtype(dtype).name}: supports bfloat16 and float16"
    if (nope, rope, value) != EXPANDED:
        yield f"heads of {nope} + {rope} and {value} values: supports {EXPANDED[0]} + {EXPANDED[1]} and {EXPANDED[2]}"


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
        yield from apart(options)
    else:
        yield from _entries_converted(entry, pages, itemsize)


def _empty_parts(entry) -> Iterator[str]:
    for size in entry.sizes:
        if not size:
            yield "part of 0 values: supports positive numbers of values"


def _entries_copied(entry, pages, itemsize) -> Iterator[str]:
    """Reasons against moving entries by bulk copies."""
    yield from _empty_parts(entry)
    yield from _unaligned({f"part of {size} values": size for size in entry.sizes}, entry.dtype.itemsize)
    yield from _unaligned(_steps(pages, ("layer", "token", "head", "part")), itemsize)
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


def _steps(pages, axes) -> dict[str, int]:
    """The offset, and the strides of blocks and of `axes`, in elements; axes of length 1 have no step."""
    inner = {f"{axis} stride": stride for axis, count, stride in pages.inner_axes if axis in axes and count > 1}
    block = {"block stride": pages.block_stride} if pages.num_blocks > 1 else {}
    return {"offset": pages.offset, **inner, **block}


def _unaligned(elements: Mapping[str, int], itemsize: int) -> Iterator[str]:
    """Sizes that are not multiples of the unit of bulk copies."""
    for name, count in elements.items():
        if count * itemsize % BULK:
            yield f"{name} of {count * itemsize} bytes: supports multiples of {BULK}"
