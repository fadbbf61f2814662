"""The attention kernel of `decode_mla` and `decode_mla_sparse`, whose entries are latents.

It computes softmax(scale * (q_latent . latent + q_pe . rope)) . latent: keys are (latent, rope), values are the
latents.

A program processes a work tile of the plan (a range of a request's tokens) for a tile of query rows (query tokens x
heads).  It loads each latent once and uses it as key and as value.  It runs the loop of `attend_tiles.py`, in which a
latent is several tiles of `columns` values.

What bounds it.  With few rows: memory bandwidth, which takes two programs per multiprocessor to saturate.  With 64
rows: registers, half of which hold results, and shared memory, which has room for two tiles of keys.  `config.py` has
the budgets.

Operands of products have the queries' dtype.  For `fp8` entries they are float16 instead, which represents every e4m3
value exactly; the GPU converts two values per instruction (`codecs/e4m3_pairs.py`).  Queries are then divided by a
power of two per row, so that they are in the range of float16.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxkv_kernels.formats.latents.fp8_ds_mla import TILE
from jaxkv_kernels.triton.attention.attend_tiles import attend_tiles, load_range, query_rows, store_results
from jaxkv_kernels.triton.attention.combine import combine
from jaxkv_kernels.triton.attention.config import latent_config, next_power_of_two
from jaxkv_kernels.triton.attention.load_keys import EntryLoads
from jaxkv_kernels.triton.attention.plan_decode import Plan
from jaxkv_kernels.triton.codecs.e4m3 import has_e4m3, power_of_two_scale
from jaxkv_kernels.triton.codecs.e4m3_pairs import in_halves
from jaxkv_kernels.triton.entries.addresses import in_bytes
from jaxkv_kernels.triton.entries.tiles import load_pieces
from jaxkv_kernels.triton.runtime.arithmetic import rounded
from jaxkv_kernels.triton.runtime.dtypes import element_type
from jaxkv_kernels.triton.runtime.launch import launch

SMALLEST_EXPONENT = tl.constexpr(-100)
"""The smallest exponent of the powers of two that queries are divided by.  Rows of zeros get this one."""


def attend_latents(
    q_latent, q_pe, buffer, table, seq_lens, layer, scale, kv_scale, sinks, plan: Plan,
    *, pages, entry, logit_cap, window, table_block,
):  # fmt: skip
    """Attention of q_latent [B, Q, Hq, R] and q_pe [B, Q, Hq, P]: out [B, Q, Hq, R] and float32 lse [B, Q, Hq].

    `table` [B, M] holds the ids of blocks of `table_block` tokens: blocks of the cache, or slots if `table_block` is 1.
    """
    batch, q_len, heads, latent = q_latent.shape
    dtype = q_latent.dtype
    config = latent_config(entry, q_len * heads, dtype)
    row_tiles, work_tiles = config.row_tiles(q_len * heads), plan.work_tiles.shape[0]
    in_memory = in_bytes(pages, buffer.dtype.itemsize)
    one = (1,)
    split_shape = (work_tiles if plan.may_split else 1, q_len * heads)
    out, lse, split_out, split_lse = launch(
        _attend_latents,
        (
            q_latent, q_pe, buffer, table, seq_lens, plan.work_tiles, jnp.reshape(layer, one), jnp.reshape(scale, one),
            jnp.reshape(scale if kv_scale is None else kv_scale, one), scale if sinks is None else sinks,
        ),
        (
            jax.ShapeDtypeStruct(q_latent.shape, dtype),
            jax.ShapeDtypeStruct((batch, q_len, heads), jnp.float32),
            jax.ShapeDtypeStruct((*split_shape, latent), jnp.float32),
            jax.ShapeDtypeStruct(split_shape, jnp.float32),
        ),
        grid=(work_tiles * row_tiles,), warps=config.warps, stages=config.stages,
        PAGES=in_memory, LOADS=_loads(entry, in_memory, config.columns, dtype), TABLE=table.shape[1],
        TABLE_BLOCK=table_block, Q_LEN=q_len, HEADS=heads, ROW_TILES=row_tiles, CAP=logit_cap, WINDOW=window,
        SINKS=sinks is not None, CONFIG=config,
    )  # fmt: skip
    if plan.may_split:
        out, lse = combine(out, lse, split_out, split_lse, plan, sinks)
    return out, lse


def _loads(entry, in_memory, columns, dtype) -> EntryLoads:
    if entry.format == "fp8_ds_mla" and columns % TILE:
        raise ValueError(f"`columns` is {columns}: expected a multiple of {TILE} for fp8_ds_mla")
    latent, rope = entry.sizes
    least = 32 if entry.codec.scaled else 16  # columns of the smallest product; twice that if a load gives two tiles
    steps = (in_memory.offset, in_memory.layer_stride, in_memory.block_stride, in_memory.token_stride)
    operands = jnp.float16 if entry.codec.scaled and dtype != jnp.float32 else dtype
    return EntryLoads(
        format=entry.format, latents=True, first=latent, second=rope,
        first_columns=min(columns, max(least, next_power_of_two(latent))),
        second_columns=max(least, next_power_of_two(rope)),
        stored=element_type(entry.dtype), dtype=element_type(operands), native=has_e4m3(),
        even=not any(n % 2 for n in (*steps, *entry.sizes)),
    )  # fmt: skip


@triton.jit
def _power_of_two_per_row(tiles):
    """Powers of two [n] that bring rows of tiles [n, m] within the range of float16; NaN for rows with a NaN."""
    largest = tl.zeros((tiles[0].shape[0],), tl.float32)
    for i in tl.static_range(len(tiles)):
        largest = tl.maximum(largest, tl.max(tl.abs(tiles[i].to(tl.float32)), axis=1))
    return power_of_two_scale(largest[:, None], SMALLEST_EXPONENT)[0]


@triton.jit
def _split_into_pairs(tiles, divisor, DTYPE: tl.constexpr):
    """Divides tiles of queries by `divisor` [n], and splits each into a tile of its even and one of its odd columns."""
    found = ()
    for i in tl.static_range(len(tiles)):
        low, high = in_halves(rounded(tiles[i].to(tl.float32) / divisor[:, None], DTYPE))
        found += (low, high)
    return found


@triton.jit
def _join_pairs(halves, factor):
    """Tiles made from the tiles `halves` of their even and odd columns, multiplied by `factor`."""
    found = ()
    for i in tl.static_range(len(halves) // 2):
        found += (tl.interleave(halves[2 * i], halves[2 * i + 1]) * factor,)
    return found


@triton.jit
def _attend_latents(
    q_latent, q_pe, buffer, table, seq_lens, work_tiles, layers, scales, kv_scales, sinks,
    out, lse, split_out, split_lse,
    PAGES: tl.constexpr, LOADS: tl.constexpr, TABLE: tl.constexpr, TABLE_BLOCK: tl.constexpr, Q_LEN: tl.constexpr,
    HEADS: tl.constexpr, ROW_TILES: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    CONFIG: tl.constexpr,
):  # fmt: skip
    LATENT: tl.constexpr = LOADS.first
    ROPE: tl.constexpr = LOADS.second
    COLUMNS: tl.constexpr = LOADS.first_columns
    NUM_LOADS: tl.constexpr = LOADS.loads
    index = tl.program_id(0) // ROW_TILES
    request = tl.load(work_tiles + index * 4)
    if request < 0:
        return
    begin, end, is_split = load_range(work_tiles, index)
    head, token, line, live = query_rows(tl.program_id(0) % ROW_TILES, 1, Q_LEN, HEADS, CONFIG.rows)
    query = request.to(tl.int64) * (Q_LEN * HEADS) + line
    q = ()
    for i in tl.static_range(NUM_LOADS):
        q += (load_pieces(q_latent + query * LATENT + i * COLUMNS, live, LATENT - i * COLUMNS, COLUMNS),)
    q_rope = (load_pieces(q_pe + query * ROPE, live, ROPE, LOADS.second_columns),)
    scale = tl.load(scales)
    if LOADS.ways == 2:
        divisor = _power_of_two_per_row(q + q_rope)
        scale *= tl.load(kv_scales) * divisor[:, None]
        q, q_rope = _split_into_pairs(q, divisor, LOADS.dtype), _split_into_pairs(q_rope, divisor, LOADS.dtype)

    # With few rows, enough registers are left for a row sum per column.
    SUM_PER_COLUMN: tl.constexpr = LOADS.ways == 2 and LOADS.native and CONFIG.rows < 64
    acc, row_max, row_sum = attend_tiles(
        q_rope + q, scale, buffer, layers, table, seq_lens, request, begin, end, head, token,
        PAGES, LOADS, TABLE, TABLE_BLOCK, Q_LEN, CAP, WINDOW, CONFIG, SUM_PER_COLUMN,
    )  # fmt: skip
    if LOADS.ways == 2:
        acc = _join_pairs(acc, tl.load(kv_scales))
    store_results(
        acc, row_max, row_sum, out, lse, split_out, split_lse, sinks, index, request, is_split, line, live,
        line % HEADS, Q_LEN * HEADS, LATENT, SINKS,
    )  # fmt: skip
