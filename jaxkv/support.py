"""What is supported: every operation asked, with a sample call an entry format, which implementations take it."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.cache import KVCache
from jaxkv.dispatch.backends import LADDER, call_of, implementations
from jaxkv.layout.layout import CacheLayout
from jaxkv.ops import attention as decode
from jaxkv.ops import blocks, gathers, indexer, merge, plan, writes
from jaxkv_kernels.formats.entries import Entry, IndexerEntry, KVEntry, MLAEntry
from jaxkv_kernels.formats.format import FORMATS

BATCH, HEADS, TABLE, TOKENS, CHOSEN = 2, 16, 4, 8, 32

Sample = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def sample_calls() -> Iterator[tuple[str, str, Sample]]:
    """(operation, entry format, call): every operation with every format it takes, on the default layout."""
    for name in MLAEntry.formats:
        yield from _mla(MLAEntry(name))
    for name in KVEntry.formats:
        yield from _kv(KVEntry(name))
    for name in IndexerEntry.formats:
        yield from _indexer(IndexerEntry(name))
    yield "select_topk", "", (indexer.select_topk, (_array("float32", BATCH, 1, 512), 64), {})
    parts = _array("bfloat16", 2, BATCH, HEADS, 512), _array("float32", 2, BATCH, HEADS)
    yield "merge_states", "", (merge.merge_states, parts, {})


def support_matrix() -> str:
    """A Markdown table: operations down, implementations across, the entry formats that each takes within.

    The same on every machine: what an implementation takes where its device is.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for operation, name, (function, args, kwargs) in sample_calls():
        row = found.setdefault(operation, {candidate.name: [] for candidate in LADDER})
        call = call_of(function, *args, **kwargs)
        for candidate in LADDER:
            if not candidate.refuses(call) and (name or "any") not in row[candidate.name]:
                row[candidate.name].append(name or "any")
    names = [f"`{name}` ({devices})" for name, devices in implementations().items()]
    lines = [f"| operation | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for operation, row in found.items():
        cells = (", ".join(formats) if formats else "-" for formats in row.values())
        lines.append(f"| `{operation}` | {' | '.join(cells)} |")
    return "\n".join(lines)


PAGE = 64
"""Tokens of the page that `format_table` shows where pages are split."""


def format_table() -> str:
    """A Markdown table of the entry formats, made from their byte maps.

    It shows the entry of default sizes of the first kind that a format serves; the other kinds are stored alike.
    """
    lines = ["| format | entries | bytes per token and head | byte map |", "|---|---|---|---|"]
    for name, form in FORMATS.items():
        entry = form.kinds[0](name)
        kinds = ", ".join(f"`{kind.__name__}`" for kind in form.kinds)
        size = f"{entry.nbytes:,} for {' + '.join(map(str, entry.sizes))} values"
        lines.append(f"| `{name}` | {kinds} | {size} | {_byte_map(entry)} |")
    return "\n".join(lines)


def _byte_map(entry: Entry) -> str:
    tokens = PAGE if entry.split else 1
    found = [f"of a page of {tokens} tokens: "] if entry.split else []
    for part in entry.parts(tokens):
        stop = part.offset + part.nbytes * tokens
        values = f"{tokens} x {part.count}" if entry.split else f"{part.count}"
        found.append(f"[{part.offset}, {stop}) {part.name}, {values} {part.dtype}; ")
    scale = "value = stored * scale, which the caller keeps" if entry.codec.scaled else ""
    return ("".join(found) + scale).removesuffix("; ")


def _array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _cache(entry: Entry) -> KVCache:
    heads = 1 if entry.one_head else 4
    layout = CacheLayout(num_layers=4, num_blocks=16, block_size=64, num_heads=heads, entry=entry)
    return KVCache(_array(layout.dtype, layout.size), layout)  # type: ignore[arg-type]


def _requests():
    tables = _array("int32", BATCH, TABLE)
    return (tables, _array("int32", BATCH)), (tables, _array("int32", BATCH + 1))


def _mla(entry: MLAEntry) -> Iterator[tuple[str, str, Sample]]:
    cache, dtype, (paged, ragged) = _cache(entry), entry.input_dtype, _requests()
    scale: dict[str, Any] = {"layer": 0, **({"kv_scale": 1.0} if entry.codec.scaled else {})}
    new = [_array(dtype, TOKENS, n) for n in entry.sizes]
    q = [_array(dtype, BATCH, 1, HEADS, n) for n in entry.sizes]
    chosen = _array("int32", BATCH, 1, CHOSEN)
    calls: dict[str, Sample] = {
        "write_mla": (writes.write_mla, (cache, *new, _array("int32", TOKENS)), scale),
        "gather_mla": (gathers.gather_mla, (cache, *ragged), {"total": TOKENS, "dtype": dtype, **scale}),
        "plan_decode": (plan.plan_decode, (cache, *paged), {"num_heads": HEADS}),
        "decode_mla": (decode.decode_mla, (*q, cache, *paged), {"scale": 1.0, **scale}),
        "decode_mla_sparse": (decode.decode_mla_sparse, (*q, cache, chosen), {"scale": 1.0, **scale}),
        **_blocks(cache),
    }
    for operation, call in calls.items():
        yield operation, entry.format, call


def _kv(entry: KVEntry) -> Iterator[tuple[str, str, Sample]]:
    cache, dtype, (paged, ragged) = _cache(entry), entry.input_dtype, _requests()
    scale: dict[str, Any] = {"layer": 0, **({"k_scale": 1.0, "v_scale": 1.0} if entry.codec.scaled else {})}
    new = [_array(dtype, TOKENS, cache.layout.num_heads, n) for n in entry.sizes]
    q = _array(dtype, BATCH, 1, HEADS, entry.head_dim)
    calls: dict[str, Sample] = {
        "write_kv": (writes.write_kv, (cache, *new, _array("int32", TOKENS)), scale),
        "gather_kv": (gathers.gather_kv, (cache, *ragged), {"total": TOKENS, "dtype": dtype, **scale}),
        "plan_decode": (plan.plan_decode, (cache, *paged), {"num_heads": HEADS}),
        "decode_kv": (decode.decode_kv, (q, cache, *paged), {"scale": 1.0, **scale}),
        **_blocks(cache),
    }
    for operation, call in calls.items():
        yield operation, entry.format, call


def _indexer(entry: IndexerEntry) -> Iterator[tuple[str, str, Sample]]:
    cache, dtype, (paged, ragged) = _cache(entry), entry.input_dtype, _requests()
    q, weights = _array(dtype, BATCH, 1, 64, entry.head_dim), _array("float32", BATCH, 1, 64)
    calls: dict[str, Sample] = {
        "write_indexer_k": (
            writes.write_indexer_k,
            (cache, _array(dtype, TOKENS, entry.head_dim), _array("int32", TOKENS)),
            {"layer": 0},
        ),
        "gather_indexer_k": (gathers.gather_indexer_k, (cache, *ragged), {"layer": 0, "total": TOKENS, "dtype": dtype}),
        "indexer_logits": (indexer.indexer_logits, (q, weights, cache, *paged), {"layer": 0, "max_len": 256}),
        **_blocks(cache),
    }
    for operation, call in calls.items():
        yield operation, entry.format, call


def _blocks(cache: KVCache) -> dict[str, Sample]:
    ids, data = _array("int32", 3), _array(cache.layout.dtype, 3, cache.layout.pages.block_elements)
    return {
        "copy_blocks": (blocks.copy_blocks, (cache, ids, ids), {}),
        "read_blocks": (blocks.read_blocks, (cache, ids), {}),
        "write_blocks": (blocks.write_blocks, (cache, ids, data), {}),
    }
