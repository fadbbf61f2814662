"""Attention of the queries of requests to latents, whose keys are (latent, rope) and whose values are the latents.

Who does what.  A program has a tile of rows (query tokens x heads of a request) and an item of the plan, a range of the
request's tokens, and walks it in tiles of keys.  Latents are loaded once and used as keys and as values.  An item that
is the whole request gives the result; one that is a piece leaves its part for `combine`.
Tokens come through a table of blocks, or of slots, which is one of blocks of one token.

What orders what.  Triton fetches tiles by asynchronous copies, issued when an iteration of the loop ends: of two
stages, the next turn begins by waiting for them, of three, they have that turn to arrive.  The table is read one tile
earlier still, as addresses depend on it.  Products with parts of a latent, `columns` wide, do not wait for each other,
which a single product of 512 would, and take fewer registers.

Factors.  They have the queries' dtype, but those of `fp8` entries are float16, which has e4m3 exactly: the GPU converts
to it, two values at a time (`e4m3_pairs`), and queries are divided by a power of two a row, so that it has them, too.

Budget on sm_90.  bf16, rows 64, keys 64, 8 warps: queries 72 KiB + 2 tiles of 72 = 216 KiB of shared memory, and 128
registers a thread for the results, of 255.  Rows 16, keys 32, 4 warps: 18 + 2 x 36 = 91 KiB, 168 registers: two
programs a multiprocessor.  fp8, rows 16, keys 64, 4 warps: 18 + 2 x 36 + 2 = 92 KiB, 193 registers: two programs.
fp8_ds_mla, rows 64, keys 64, 8 warps: queries 72 KiB, a tile's values 64, two tiles as stored 66, three of rotary keys
24 = 226 KiB.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxkv_kernels.triton.attention.combine import combine
from jaxkv_kernels.triton.attention.decode_tiles import latent_tiles, power_of_two
from jaxkv_kernels.triton.attention.load_latents import load_latent, load_rope
from jaxkv_kernels.triton.attention.plan_decode import Plan
from jaxkv_kernels.triton.attention.softmax import (
    EMPTY,
    LOG2E,
    MASKED,
    added,
    capped,
    divisor,
    divisor_with_sink,
    log_sum,
    weighted,
)
from jaxkv_kernels.triton.codecs.e4m3 import has_e4m3, power_of_two_scale
from jaxkv_kernels.triton.codecs.e4m3_pairs import in_halves
from jaxkv_kernels.triton.entries.addresses import in_bytes, slots_of, token_address
from jaxkv_kernels.triton.entries.tiles import load_pieces
from jaxkv_kernels.triton.runtime.arithmetic import dot, rounded
from jaxkv_kernels.triton.runtime.dtypes import element_type
from jaxkv_kernels.triton.runtime.launch import launch

SMALLEST_EXPONENT = tl.constexpr(-100)
"""Of what queries are divided by: that of queries of zeros."""


def attend_latents(
    q_latent, q_pe, buffer, table, seq_lens, layer, scale, kv_scale, sinks, plan: Plan,
    *, pages, entry, logit_cap, table_block,
):  # fmt: skip
    """q_latent [B, Q, Hq, R], q_pe [B, Q, Hq, P] to out [B, Q, Hq, R] and float32 lse [B, Q, Hq].

    `table` [B, M] are blocks of `table_block` tokens: those of the cache, or slots where that is 1.
    """
    batch, tokens, heads, latent = q_latent.shape
    rows, dtype = tokens * heads, q_latent.dtype
    tiles = latent_tiles(entry, rows, dtype)
    groups, items = tiles.groups(rows), plan.items.shape[0]
    halved = entry.codec.scaled
    least = 32 if halved else 16  # columns that products take
    columns = min(tiles.columns, max(least, power_of_two(latent)))
    factors = jnp.float16 if halved and dtype != jnp.float32 else dtype
    in_memory = in_bytes(pages, buffer.dtype.itemsize)
    steps = (in_memory.offset, in_memory.layer_stride, in_memory.block_stride, in_memory.token_stride)
    one = (1,)
    out, lse, part_out, part_lse = launch(
        _attend_latents,
        (
            q_latent, q_pe, buffer, table, seq_lens, plan.items, jnp.reshape(layer, one), jnp.reshape(scale, one),
            jnp.reshape(scale if kv_scale is None else kv_scale, one), scale if sinks is None else sinks,
        ),
        (
            jax.ShapeDtypeStruct(q_latent.shape, dtype),
            jax.ShapeDtypeStruct((batch, tokens, heads), jnp.float32),
            jax.ShapeDtypeStruct((items if plan.cutting else 1, rows, latent), jnp.float32),
            jax.ShapeDtypeStruct((items if plan.cutting else 1, rows), jnp.float32),
        ),
        grid=(items * groups,), warps=tiles.warps, stages=tiles.stages,
        PAGES=in_memory, FORMAT=entry.format, STORED=element_type(entry.dtype),
        DTYPE=element_type(factors), NATIVE=has_e4m3(), TABLE=table.shape[1], TABLE_BLOCK=table_block,
        EVEN=not any(n % 2 for n in (*steps, *entry.sizes)), SIZES=entry.sizes, TOKENS=tokens, HEADS=heads,
        GROUPS=groups, CAP=logit_cap, SINKS=sinks is not None, ROWS=tiles.rows, KEYS=tiles.keys, COLUMNS=columns,
        PARTS=-(-latent // columns), ROPE=max(least, power_of_two(entry.sizes[1])),
    )  # fmt: skip
    if plan.cutting:
        out, lse = combine(out, lse, part_out, part_lse, plan, sinks)
    return out, lse


@triton.jit
def _unit(tiles):
    """Powers of two [n] by which rows of tiles [n, m] are divided for float16 to hold them; NaN of rows with NaN."""
    most = tl.zeros((tiles[0].shape[0],), tl.float32)
    for i in tl.static_range(len(tiles)):
        most = tl.maximum(most, tl.max(tl.abs(tiles[i].to(tl.float32)), axis=1))
    return power_of_two_scale(most[:, None], SMALLEST_EXPONENT)[0]


@triton.jit
def _halved(tiles, unit, DTYPE: tl.constexpr):
    """Tiles of queries, divided by `unit` [n], in halves."""
    found = ()
    for i in tl.static_range(len(tiles)):
        low, high = in_halves(rounded(tiles[i].to(tl.float32) / unit[:, None], DTYPE))
        found += (low, high)
    return found


@triton.jit
def _whole(halves, factor):
    """Tiles from their halves, multiplied by `factor`."""
    found = ()
    for i in tl.static_range(len(halves) // 2):
        found += (tl.interleave(halves[2 * i], halves[2 * i + 1]) * factor,)
    return found


@triton.jit
def _scores(q, k, score):
    """`score` [rows, keys] and the products of the tiles `q` [rows, n] with the tiles `k` [keys, n]."""
    for part in tl.static_range(len(k)):
        if score.shape[0] < 64:  # small products wait for their own sums: several at a time
            score += dot(q[part], tl.trans(k[part]), tl.zeros(score.shape, tl.float32))
        else:
            score = dot(q[part], tl.trans(k[part]), score)
    return score


@triton.jit
def _store_result(array, row, live, acc, below, LATENT: tl.constexpr):
    """The parts `acc` of a tile of sums, divided by `below` [n], to rows `row` [n] of `array` [..., LATENT]."""
    for part in tl.static_range(len(acc)):
        column = part * acc[part].shape[1] + tl.arange(0, acc[part].shape[1])
        target = array + row[:, None] * LATENT + column[None, :]
        result = rounded(acc[part] / below[:, None], array.dtype.element_ty)
        tl.store(target, result, mask=live[:, None] & (column < LATENT)[None, :])


@triton.jit
def _attend_latents(
    q_latent, q_pe, buffer, table, seq_lens, items, layers, scales, kv_scales, sinks, out, lse, part_out, part_lse,
    PAGES: tl.constexpr, FORMAT: tl.constexpr, STORED: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr,
    EVEN: tl.constexpr, TABLE: tl.constexpr, TABLE_BLOCK: tl.constexpr, SIZES: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    LATENT: tl.constexpr = SIZES[0]
    ALL: tl.constexpr = TOKENS * HEADS
    HALVED: tl.constexpr = FORMAT == "fp8"
    item = tl.program_id(0) // GROUPS
    request = tl.load(items + item * 4)
    if request < 0:
        return
    begin, end, piece = tl.load(items + item * 4 + 1), tl.load(items + item * 4 + 2), tl.load(items + item * 4 + 3)
    row = tl.program_id(0) % GROUPS * ROWS + tl.arange(0, ROWS)
    live = row < ALL
    query = request.to(tl.int64) * ALL + row
    q, acc = (), ()
    for part in tl.static_range(PARTS):
        q += (load_pieces(q_latent + query * LATENT + part * COLUMNS, live, LATENT - part * COLUMNS, COLUMNS),)
    q_rope = (load_pieces(q_pe + query * SIZES[1], live, SIZES[1], ROPE),)
    scale = tl.load(scales)
    if HALVED:
        unit = _unit(q + q_rope)
        scale *= tl.load(kv_scales) * unit[:, None]
        q, q_rope = _halved(q, unit, DTYPE), _halved(q_rope, unit, DTYPE)
    for part in tl.static_range(len(q)):
        acc += (tl.zeros(q[part].shape, tl.float32),)

    layer = tl.load(layers)
    blocks = slots_of(layer, PAGES) // TABLE_BLOCK
    table += request.to(tl.int64) * TABLE
    key = tl.arange(0, KEYS)
    block = tl.load(table + (begin + key) // TABLE_BLOCK, mask=begin + key < end, other=-1)
    length = tl.minimum(tl.load(seq_lens + request), TABLE * TABLE_BLOCK)
    sight = length - (TOKENS - 1) + row // HEADS  # the end of what each row sees
    top = tl.full((ROWS,), EMPTY, tl.float32)
    SPREAD: tl.constexpr = HALVED and NATIVE and ROWS < 64  # where registers are left for sums by place
    sums = tl.zeros((ROWS, KEYS) if SPREAD else (ROWS,), tl.float32)
    for start in tl.range(begin, end, KEYS):
        position = start + key
        known = (block >= 0) & (block < blocks)
        slot = tl.where(known, block, 0) * TABLE_BLOCK + position % TABLE_BLOCK
        ahead = position + KEYS
        block = tl.load(table + ahead // TABLE_BLOCK, mask=ahead < end, other=-1)
        place = token_address(buffer, layer, slot, 0, PAGES)
        k = ()
        for part in tl.static_range(PARTS):
            k += load_latent(place, known, part * COLUMNS, COLUMNS, LATENT, FORMAT, STORED, DTYPE, NATIVE, EVEN)
        k_rope = load_rope(place, known, LATENT, SIZES[1], ROPE, FORMAT, STORED, DTYPE, NATIVE, EVEN)
        score = _scores(q, k, _scores(q_rope, k_rope, tl.zeros((ROWS, KEYS), tl.float32)))
        seen = known[None, :]
        if TOKENS > 1:
            seen = seen & (position[None, :] < sight[:, None])
        score = tl.where(seen, capped(score * scale, CAP), MASKED)
        weight, shrink, top = weighted(score, top, DTYPE)
        sums = added(sums, shrink, weight)
        weight = rounded(weight, DTYPE)
        summed = ()
        for part in tl.static_range(len(k)):
            summed += (dot(weight, k[part], acc[part] * shrink[:, None]),)
        acc = summed

    if HALVED:
        acc = _whole(acc, tl.load(kv_scales))
    total = tl.sum(sums, axis=1) if SPREAD else sums
    below = divisor(total)
    if piece == 0:
        if SINKS:
            below = divisor_with_sink(top, total, tl.load(sinks + row % HEADS, mask=live))
        _store_result(out, query, live, acc, below, LATENT)
        tl.store(lse + query, log_sum(top, total) / LOG2E, mask=live)
    else:
        left = item.to(tl.int64) * ALL + row
        _store_result(part_out, left, live, acc, below, LATENT)
        tl.store(part_lse + left, log_sum(top, total), mask=live)
