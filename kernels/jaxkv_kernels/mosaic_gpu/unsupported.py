"""The reasons against calls on caches whose entries are supported: a function per operation."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from jaxkv_kernels.addressing.row_view import row_view
from jaxkv_kernels.logit_cap import too_large
from jaxkv_kernels.mosaic_gpu.attention.config import FEW_ROWS, by_slots
from jaxkv_kernels.mosaic_gpu.attention.paging.token_rows import TILE_COLUMNS
from jaxkv_kernels.mosaic_gpu.layout_reasons import apart, block_sizes, origins, steps, unaligned
from jaxkv_kernels.mosaic_gpu.runtime.device import WGMMA, unavailable_reasons

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
        yield from apart(options["pages"], options["entry"])
        yield from _quantised_kv(entry, options["pages"], arrays["buffer"], q.shape[1] * q.shape[2])
    else:
        yield from _attention(entry, options["pages"], arrays["buffer"])
    yield from _query_dtype(entry, q.dtype, "`q`")
    yield from too_large(options)


def decode_mla_sparse(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `decode_mla_sparse` call."""
    entry, pages, q = options["entry"], options["pages"], arrays["q_latent"]
    extra = arrays["extra"]
    if extra is not None:
        if {entry.format, extra.entry.format} != {"fp8_v4"}:
            yield f"`extra` of format {extra.entry.format!r}, with {entry.format!r}: supports 'fp8_v4' in both caches"
        yield from unaligned(steps(extra.pages, ("layer",)), extra.buffer.dtype.itemsize)
    yield from _gathered(entry, pages, arrays["buffer"])
    yield from _query_dtype(entry, q.dtype, "`q_latent`")
    yield from too_large(options)


def _gathered(entry, pages, buffer) -> Iterator[str]:
    """Reasons against attending to such latents by slot."""
    yield from _latent_sizes(entry, *SPARSE_LATENTS.get(entry.format, (LATENT,)))
    # The regions of split pages store multiples of 16 bytes per token, but their scales.
    yield from unaligned(steps(pages, ("layer",) if entry.split else ("layer", "token")), buffer.dtype.itemsize)


def plan_decode(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against planning `decode_mla` or `decode_kv` calls."""
    entry, pages = options["entry"], options["pages"]
    if entry.quantised:
        yield from apart(options["pages"], options["entry"])
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
    yield from block_sizes(pages)
    if rows > FEW_ROWS:
        yield from unaligned(steps(pages, ("layer", "token")), buffer.dtype.itemsize)
        return
    if pages.token_stride != pages.width:
        yield f"token stride {pages.token_stride}: supports {pages.width}, tokens that are contiguous"
    yield from unaligned(steps(pages, ("layer",)), buffer.dtype.itemsize)
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
    yield from block_sizes(pages)
    yield from origins(pages, buffer)


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


def _attention(entry, pages, buffer) -> Iterator[str]:
    """Reasons against attending to such entries, which are not quantised."""
    if entry.one_head:
        latent, rope = entry.sizes
        if latent % TILE_COLUMNS or latent > LATENT or rope not in ROPES:
            yield f"{_values_of(entry)}: supports multiples of {TILE_COLUMNS} up to {LATENT}, + 0, 16, 32 or 64"
    elif not {*entry.sizes} <= {*HEAD_DIMS}:
        yield f"{_values_of(entry)}: supports 64, 128, 192 and 256 of each"
    yield from block_sizes(pages)
    yield from origins(pages, buffer)


def attend_expanded(dtype, nope: int, rope: int, value: int) -> Iterator[str]:
    """Reasons against `attend_expanded`, part of `prefill_mla`, for such heads; also those of this machine."""
    yield from unavailable_reasons(WGMMA)
    if dtype not in (jnp.bfloat16, jnp.float16):
        yield f"queries of {jnp.dtype(dtype).name}: supports bfloat16 and float16"
    if (nope, rope, value) != EXPANDED:
        yield f"heads of {nope} + {rope} and {value} values: supports {EXPANDED[0]} + {EXPANDED[1]} and {EXPANDED[2]}"
