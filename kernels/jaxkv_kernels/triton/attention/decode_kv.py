"""Grouped-query and multi-head attention over paged keys and values.

Who does what.  A program has a tile of rows (query tokens x query heads of one KV head) of a request and an item of the
plan, a range of the request's tokens, and walks it in tiles of keys.  An item that is the whole request gives the
result; one that is a piece leaves its part for `combine`.

What orders what.  Triton fetches tiles ahead, `stages` of them, by asynchronous copies; the block table is read one
tile earlier still, as addresses depend on it.

Budget on sm_90, bf16, 128 + 128 values.  Rows 16, keys 64, 4 warps: 38 KiB of shared memory and 116 registers a thread:
four programs a multiprocessor, whose loads fill the memory's bandwidth.
"""

from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxkv_kernels.triton.attention.combine import combine
from jaxkv_kernels.triton.attention.decode_tiles import pair_tiles, power_of_two
from jaxkv_kernels.triton.attention.plan_decode import plan_decode
from jaxkv_kernels.triton.attention.softmax import EMPTY, LOG2E, MASKED, added, capped, divisor, log_sum, weighted
from jaxkv_kernels.triton.codecs.e4m3 import has_e4m3
from jaxkv_kernels.triton.codecs.widen import widened
from jaxkv_kernels.triton.entries.addresses import in_bytes, slots_of, token_address
from jaxkv_kernels.triton.entries.tiles import load_pieces
from jaxkv_kernels.triton.runtime.arithmetic import dot, rounded
from jaxkv_kernels.triton.runtime.dtypes import element_type
from jaxkv_kernels.triton.runtime.launch import launch


@partial(jax.jit, static_argnames=("pages", "entry", "logit_cap", "window"))
def decode_kv(
    q, buffer, block_tables, seq_lens, layer, scale, k_scale, v_scale, plan, *, pages, entry, logit_cap, window
):
    """Q [B, Q, Hq, D] to out [B, Q, Hq, Dv] and float32 lse [B, Q, Hq]; query head i reads KV head i // (Hq / H)."""
    batch, tokens, heads, _ = q.shape
    if plan is None:
        plan = plan_decode(
            buffer, block_tables, seq_lens,
            pages=pages, entry=entry, heads=heads, tokens=tokens, window=window, batch_invariant=False,
        )  # fmt: skip
    rows, value = tokens * (heads // pages.num_heads), entry.value_dim
    tiles = pair_tiles(entry, rows, q.dtype)
    groups, items = pages.num_heads * tiles.groups(rows), plan.items.shape[0]
    columns = [max(16, power_of_two(n)) for n in entry.sizes]
    one = (1,)
    scales = [jnp.reshape(scale if x is None else x, (-1,)) for x in (k_scale, v_scale)]
    out, lse, part_out, part_lse = launch(
        _attend_pairs,
        (q, buffer, block_tables, seq_lens, plan.items, jnp.reshape(layer, one), jnp.reshape(scale, one), *scales),
        (
            jax.ShapeDtypeStruct((batch, tokens, heads, value), q.dtype),
            jax.ShapeDtypeStruct((batch, tokens, heads), jnp.float32),
            jax.ShapeDtypeStruct((items if plan.cutting else 1, tokens * heads, value), jnp.float32),
            jax.ShapeDtypeStruct((items if plan.cutting else 1, tokens * heads), jnp.float32),
        ),
        grid=(items * groups,), warps=tiles.warps, stages=tiles.stages,
        PAGES=in_bytes(pages, buffer.dtype.itemsize), SCALE_STEPS=tuple(int(x.size > 1) for x in scales),
        SCALED=entry.codec.scaled, STORED=element_type(entry.dtype), DTYPE=element_type(q.dtype),
        NATIVE=has_e4m3(), TABLE=block_tables.shape[1], SIZES=entry.sizes, TOKENS=tokens,
        HEADS=heads, SHARING=heads // pages.num_heads, GROUPS=groups, CAP=logit_cap, WINDOW=window,
        ROWS=tiles.rows, KEYS=tiles.keys, KEY_COLUMNS=columns[0], VALUE_COLUMNS=columns[1],
    )  # fmt: skip
    if plan.cutting:
        out, lse = combine(out, lse, part_out, part_lse, plan)
    return out, lse


@triton.jit
def _load_values(
    place, known, FIRST: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    SCALED: tl.constexpr, STORED: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Values FIRST, FIRST + 1, ... of entries as a tile [n, COLUMNS] of DTYPE; those of a scaled format as stored."""
    values = load_pieces(place.to(tl.pointer_type(STORED)) + FIRST, known, SIZE, COLUMNS)
    return widened(values, None, DTYPE, NATIVE) if SCALED else rounded(values, DTYPE)


@triton.jit
def _attend_pairs(
    q, buffer, table, seq_lens, items, layers, scales, k_scales, v_scales, out, lse, part_out, part_lse,
    PAGES: tl.constexpr, SCALE_STEPS: tl.constexpr, SCALED: tl.constexpr, STORED: tl.constexpr, DTYPE: tl.constexpr,
    NATIVE: tl.constexpr, TABLE: tl.constexpr, SIZES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    SHARING: tl.constexpr, GROUPS: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, KEY_COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0) // GROUPS
    request = tl.load(items + item * 4)
    if request < 0:
        return
    begin, end, piece = tl.load(items + item * 4 + 1), tl.load(items + item * 4 + 2), tl.load(items + item * 4 + 3)
    group = tl.program_id(0) % GROUPS
    head = group % PAGES.num_heads
    row = group // PAGES.num_heads * ROWS + tl.arange(0, ROWS)
    token = row // SHARING
    live = token < TOKENS
    line = token * HEADS + head * SHARING + row % SHARING
    queries = load_pieces(q + (request.to(tl.int64) * (TOKENS * HEADS) + line) * SIZES[0], live, SIZES[0], KEY_COLUMNS)
    scale = tl.load(scales)
    if SCALED:
        scale *= tl.load(k_scales + head * SCALE_STEPS[0])

    layer = tl.load(layers)
    blocks = slots_of(layer, PAGES) // PAGES.block_size
    table += request.to(tl.int64) * TABLE
    key = tl.arange(0, KEYS)
    block = tl.load(table + (begin + key) // PAGES.block_size, mask=begin + key < end, other=-1)
    length = tl.minimum(tl.load(seq_lens + request), TABLE * PAGES.block_size)
    sight = length - (TOKENS - 1) + token  # the end of what each row sees
    top = tl.full((ROWS,), EMPTY, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VALUE_COLUMNS), tl.float32)
    for start in tl.range(begin, end, KEYS):
        position = start + key
        known = (block >= 0) & (block < blocks)
        slot = tl.where(known, block, 0) * PAGES.block_size + position % PAGES.block_size
        ahead = position + KEYS
        block = tl.load(table + ahead // PAGES.block_size, mask=ahead < end, other=-1)
        place = token_address(buffer, layer, slot, head, PAGES)
        k = _load_values(place, known, 0, SIZES[0], KEY_COLUMNS, SCALED, STORED, DTYPE, NATIVE)
        v = _load_values(place, known, SIZES[0], SIZES[1], VALUE_COLUMNS, SCALED, STORED, DTYPE, NATIVE)
        score = dot(queries, tl.trans(k), tl.zeros((ROWS, KEYS), tl.float32))
        seen = known[None, :]
        if TOKENS > 1:
            seen = seen & (position[None, :] < sight[:, None])
        if WINDOW is not None:
            seen = seen & (position[None, :] >= sight[:, None] - WINDOW)
        score = tl.where(seen, capped(score * scale, CAP), MASKED)
        weight, shrink, top = weighted(score, top, DTYPE)
        total = added(total, shrink, weight)
        acc = dot(rounded(weight, DTYPE), v, acc * shrink[:, None])

    if SCALED:
        acc *= tl.load(v_scales + head * SCALE_STEPS[1])
    acc /= divisor(total)[:, None]
    column = tl.arange(0, VALUE_COLUMNS)[None, :]
    mask = live[:, None] & (column < SIZES[1])
    if piece == 0:
        place = request.to(tl.int64) * (TOKENS * HEADS) + line
        tl.store(out + place[:, None] * SIZES[1] + column, rounded(acc, DTYPE), mask=mask)
        tl.store(lse + place, log_sum(top, total) / LOG2E, mask=live)
    else:
        place = item.to(tl.int64) * (TOKENS * HEADS) + line
        tl.store(part_out + place[:, None] * SIZES[1] + column, acc, mask=mask)
        tl.store(part_lse + place, log_sum(top, total), mask=live)
