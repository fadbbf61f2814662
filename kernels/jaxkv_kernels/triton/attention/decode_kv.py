"""Grouped-query and multi-head attention over paged keys and values.

It computes softmax(scale * q . k) . v per query head.  Each KV head is shared by (query heads / KV heads) query heads.

A program processes a work tile of the plan (a range of a request's tokens) for a tile of query rows (query tokens x
query heads of one KV head), and runs the loop of `attend_tiles.py`.

What bounds it: memory bandwidth.  `config.py` sizes tiles so that several programs per multiprocessor keep loads in
flight.
"""

from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxkv_kernels.triton.attention.attend_tiles import attend_tiles, load_range, query_rows, store_results
from jaxkv_kernels.triton.attention.combine import combine
from jaxkv_kernels.triton.attention.config import kv_config, next_power_of_two
from jaxkv_kernels.triton.attention.load_keys import EntryLoads, join_columns, split_columns
from jaxkv_kernels.triton.attention.plan_decode import plan_or_default
from jaxkv_kernels.triton.codecs.e4m3 import has_e4m3
from jaxkv_kernels.triton.entries.addresses import in_bytes
from jaxkv_kernels.triton.entries.tiles import load_pieces
from jaxkv_kernels.triton.entries.two_parts import second_part
from jaxkv_kernels.triton.runtime.dtypes import element_type
from jaxkv_kernels.triton.runtime.launch import launch


@partial(jax.jit, static_argnames=("pages", "entry", "logit_cap", "window"))
def decode_kv(
    q, buffer, block_tables, seq_lens, layer, scale, k_scale, v_scale, plan, *, pages, entry, logit_cap, window
):
    """Attention of queries q [B, Q, Hq, D]: out [B, Q, Hq, Dv] and float32 lse [B, Q, Hq].

    Query head i reads KV head i // (Hq / H).
    """
    plan = plan_or_default(plan, q, block_tables, seq_lens, pages=pages, entry=entry, window=window)
    batch, q_len, heads, _ = q.shape
    rows = q_len * (heads // pages.num_heads)
    config = kv_config(entry, rows, q.dtype)
    row_tiles, work_tiles = pages.num_heads * config.row_tiles(rows), plan.work_tiles.shape[0]
    in_memory = in_bytes(pages, buffer.dtype.itemsize)
    loads = _loads(entry, in_memory, element_type(q.dtype), second_part(entry, pages, buffer.dtype.itemsize))
    one = (1,)
    scales = [jnp.reshape(scale if x is None else x, (-1,)) for x in (k_scale, v_scale)]
    split_shape = (work_tiles if plan.may_split else 1, q_len * heads)
    out, lse, split_out, split_lse = launch(
        _attend_kv,
        (q, buffer, block_tables, seq_lens, plan.work_tiles, jnp.reshape(layer, one), jnp.reshape(scale, one), *scales),
        (
            jax.ShapeDtypeStruct((batch, q_len, heads, entry.value_dim), q.dtype),
            jax.ShapeDtypeStruct((batch, q_len, heads), jnp.float32),
            jax.ShapeDtypeStruct((*split_shape, entry.value_dim), jnp.float32),
            jax.ShapeDtypeStruct(split_shape, jnp.float32),
        ),
        grid=(work_tiles * row_tiles,), warps=config.warps, stages=config.stages,
        PAGES=in_memory, LOADS=loads, SCALED=entry.codec.scaled,
        SCALE_STEPS=tuple(int(x.size > 1) for x in scales), TABLE=block_tables.shape[1], Q_LEN=q_len, HEADS=heads,
        ROW_TILES=row_tiles, CAP=logit_cap, WINDOW=window, CONFIG=config,
    )  # fmt: skip
    if plan.may_split:
        out, lse = combine(out, lse, split_out, split_lse, plan)
    return out, lse


def _loads(entry, in_memory, dtype, second_at) -> EntryLoads:
    least = {"nvfp4": 64, "int8": 32}.get(entry.format, 16)  # columns of the smallest product, 16, of each tile
    first, second = entry.sizes
    steps = (in_memory.layer_stride, in_memory.block_stride, in_memory.head_stride, in_memory.token_stride)
    return EntryLoads(
        format=entry.format, latents=False, first=first, second=second,
        first_columns=max(least, next_power_of_two(first)), second_columns=max(least, next_power_of_two(second)),
        stored=element_type(entry.dtype), dtype=dtype, native=has_e4m3(),
        even=not any(n % 2 for n in (in_memory.offset, *steps, *entry.sizes)), second_at=second_at,
    )  # fmt: skip


@triton.jit
def _attend_kv(
    q, buffer, table, seq_lens, work_tiles, layers, scales, k_scales, v_scales, out, lse, split_out, split_lse,
    PAGES: tl.constexpr, LOADS: tl.constexpr, SCALED: tl.constexpr, SCALE_STEPS: tl.constexpr, TABLE: tl.constexpr,
    Q_LEN: tl.constexpr, HEADS: tl.constexpr, ROW_TILES: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr,
    CONFIG: tl.constexpr,
):  # fmt: skip
    ALL: tl.constexpr = Q_LEN * HEADS
    index = tl.program_id(0) // ROW_TILES
    request = tl.load(work_tiles + index * 4)
    if request < 0:
        return
    begin, end, is_split = load_range(work_tiles, index)
    head, token, line, live = query_rows(tl.program_id(0) % ROW_TILES, PAGES.num_heads, Q_LEN, HEADS, CONFIG.rows)
    query = q + (request.to(tl.int64) * ALL + line) * LOADS.first
    queries = split_columns(load_pieces(query, live, LOADS.first, LOADS.first_columns), LOADS.ways)
    scale = tl.load(scales) * LOADS.unit
    if SCALED:
        scale *= tl.load(k_scales + head * SCALE_STEPS[0])
    acc, row_max, row_sum = attend_tiles(
        queries, scale, buffer, layers, table, seq_lens, request, begin, end, head, token,
        PAGES, LOADS, TABLE, PAGES.block_size, Q_LEN, CAP, WINDOW, CONFIG, False,
    )  # fmt: skip
    result = join_columns(acc, LOADS.ways) * LOADS.unit
    if SCALED:
        result *= tl.load(v_scales + head * SCALE_STEPS[1])
    store_results(
        (result,), row_max, row_sum, out, lse, split_out, split_lse, scales, index, request, is_split, line, live,
        line, ALL, LOADS.second, False,
    )  # fmt: skip
