"""Scores of the DeepSeek V3.2 indexer against every cached key.

It computes, per query token and key, the sum over heads of relu(q . k) * weight, times the key's scale.  Keys of
`indexer_fp8` (`_e4m3_keys`) have one scale.  Those of `indexer_mxfp4` (`_e2m1_keys`) have one per tile of values, which
are divided by the largest of them.  Others are plain values (`_keys`).

A program processes one query token of one request, with all heads, and up to RUN_TILES tiles of cached tokens.  q stays
in shared memory.  The loop, as a timeline (loads are asynchronous copies, up to BUFFERS tiles ahead):

    blocks of tile i + 1   loaded
    keys of tile i + 1     load ............................................ arrive
    tile i                 decode to q's dtype | q k^T | relu, sum over heads | mask, store

For tokens that the query token does not see, the program stores -inf.  Programs of query tokens of the same request are
adjacent in the grid, so that they share its keys in the L2 cache.  Each logit is stored by exactly one program.

What bounds it: memory bandwidth, with four programs per multiprocessor on Hopper.  With 64 heads x 128 values, bf16 q
takes 16 KiB of shared memory, a tile of e4m3 keys 8 KiB, and the products 32 of about 120 registers of 128 threads.
float32 q and keys take 81 KiB of shared memory, of the 99 KiB that sm_86 has.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxkv_kernels.calls import IndexerLogits
from jaxkv_kernels.formats import indexer_mxfp4
from jaxkv_kernels.formats.bits import FP8
from jaxkv_kernels.triton.arithmetic import dot, rounded
from jaxkv_kernels.triton.codecs import e2m1_value, from_e8m0, in_halves, in_word_order, unpacked
from jaxkv_kernels.triton.language import tl, triton
from jaxkv_kernels.triton.launch import element_type, launch
from jaxkv_kernels.triton.tiles import in_bytes, page_address

SCALE_TILE = tl.constexpr(indexer_mxfp4.TILE)
"""Values of an `indexer_mxfp4` key that share a scale."""
TILES = {2: (64, 4), 4: (16, 4)}
"""(tokens per tile, warps), by the bytes per value of q."""
E2M1_HEADS = 64
"""Heads above which tiles of `indexer_mxfp4` keys have half as many tokens, so that registers hold the products."""
PROGRAMS, RUN_TILES = 2048, 32
BUFFERS, BUFFER_BYTES = 2, 32768
"""Tiles of keys in flight per program, and the most bytes that they may have."""


MOST_HEADS, MOST_VALUES = {2: 128, 4: 64}, 128
"""Limits of queries: heads, by the bytes per value, and values per head."""


def unsupported_reasons(call: IndexerLogits) -> Iterator[str]:
    """Reasons against a call."""
    *_, heads, dim = call.q.shape
    most = MOST_HEADS[max(call.q.dtype.itemsize, 2)]
    if heads > most:
        yield f"`q` of {heads} heads of {call.q.dtype}: supports at most {most}, which shared memory holds"
    if dim > MOST_VALUES:
        yield f"keys of {dim} values: supports at most {MOST_VALUES}, which shared memory holds"


@jax.jit
def indexer_logits(call: IndexerLogits) -> jax.Array:
    """Logits, float32 [B, Q, max_len].

    A logit is the sum over heads of relu(q . k) * w, times the scale of k; -inf for keys that a query token does not
    see.
    """
    buffer, block_tables, entry, max_len = call.buffer, call.block_tables, call.entry, call.max_len
    q = call.q.astype(jnp.bfloat16) if call.q.dtype == FP8 else call.q
    batch, tokens, heads, dim = q.shape
    tile, warps = TILES[q.dtype.itemsize]
    if entry.format == "indexer_mxfp4" and heads > E2M1_HEADS:
        tile //= 2
    tiles = triton.cdiv(max_len, tile)
    run = min(max(triton.cdiv(batch * tokens * tiles, PROGRAMS), 1), RUN_TILES)
    constants = {
        "PAGES": in_bytes(call.pages, buffer.dtype.itemsize),
        "FORMAT": entry.format,
        "DTYPE": element_type(entry.dtype),
        "QUERIES": tokens,
        "HEADS": heads,
        "DIM": dim,
        "COLUMNS": block_tables.shape[1],
        "MAX_LEN": max_len,
        "RUN": run * tile,
        "TOKENS": tile,
        "H_TILE": max(16, triton.next_power_of_2(heads)),
        "D_TILE": max(16, triton.next_power_of_2(dim)),
    }
    weights, layer = call.weights.astype(jnp.float32), jnp.reshape(call.layer, (1,))
    operands = (q, weights, buffer, block_tables, call.seq_lens, layer)
    logits = jax.ShapeDtypeStruct((batch, tokens, max_len), jnp.float32)
    # A buffer needs two stages of Triton's pipeline: the block ids of a tile are loaded one stage before its keys.
    stages = 1 + 2 * max(1, min(BUFFERS, BUFFER_BYTES // (tile * entry.nbytes)))
    grid = (batch * tokens, triton.cdiv(tiles, run))
    return launch(_indexer_logits, operands, (logits,), grid=grid, warps=warps, stages=stages, **constants)[0]


@triton.jit
def _indexer_logits(
    q, weights, buffer, tables, lengths, layers, logits,
    PAGES: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, MAX_LEN: tl.constexpr, RUN: tl.constexpr,
    TOKENS: tl.constexpr, H_TILE: tl.constexpr, D_TILE: tl.constexpr,
):  # fmt: skip
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * RUN
    request, last = row // QUERIES, tl.minimum(first + RUN, MAX_LEN)
    layer = tl.load(layers)
    length = tl.minimum(tl.maximum(tl.load(lengths + request), 0), COLUMNS * PAGES.block_size)
    end = tl.minimum(length - (QUERIES - 1) + tl.program_id(0) % QUERIES, last)
    end = tl.where((layer >= 0) & (layer < PAGES.num_layers), end, 0)

    head, dim = row * HEADS + tl.arange(0, H_TILE), tl.arange(0, D_TILE)
    some = tl.arange(0, H_TILE) < HEADS
    weight = tl.load(weights + head, mask=some, other=0.0)
    query = tl.load(q + head[:, None] * DIM + dim, mask=some[:, None] & (dim < DIM), other=0.0)
    if FORMAT == "indexer_mxfp4":
        even, odd = in_halves(query)
        queries = (tl.trans(even), tl.trans(odd))
    elif FORMAT == "indexer_fp8":
        queries = (tl.trans(in_word_order(query)),)
    else:
        queries = (tl.trans(query),)

    table, out = tables + request * COLUMNS, logits + row * MAX_LEN
    for start in range(first, end, TOKENS):
        position = start + tl.arange(0, TOKENS)
        # A tile that lies within one page needs only one entry of the table.
        looked = start if PAGES.block_size % TOKENS == 0 else position
        block = tl.load(table + looked // PAGES.block_size, mask=looked < end, other=-1)
        valid = (block >= 0) & (block < PAGES.num_blocks)
        page = page_address(buffer, layer, tl.where(valid, block, 0), 0, PAGES)
        place = (position % PAGES.block_size).to(tl.int64)
        factor = 1.0
        if FORMAT == "indexer_mxfp4":
            even_keys, odd_keys, factor = _e2m1_keys(page, place, query.dtype, PAGES.block_size, DIM, D_TILE)
            keys = (even_keys, odd_keys)
        elif FORMAT == "indexer_fp8":
            keys = (_e4m3_keys(page + place * DIM, query.dtype, DIM, D_TILE),)
        else:
            keys = (_keys(page + place * PAGES.token_stride, query.dtype, DTYPE, DIM, D_TILE),)
        scores = tl.zeros([TOKENS, H_TILE], tl.float32)
        for i in tl.static_range(len(keys)):
            scores = dot(keys[i], queries[i], scores, PRECISION="tf32x3")
        logit = tl.sum(tl.maximum(scores, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight, axis=1)
        if FORMAT == "indexer_mxfp4":
            logit *= factor
        elif FORMAT == "indexer_fp8":
            logit *= tl.load((page + PAGES.block_size * DIM).to(tl.pointer_type(tl.float32)) + place)
        tl.store(out + position, tl.where(valid & (position < end), logit, float("-inf")), mask=position < last)
    # The loop above has stored whole tiles.  Store -inf from the end of the last one.
    for start in range(first + tl.cdiv(tl.maximum(end - first, 0), TOKENS) * TOKENS, last, TOKENS):
        position = start + tl.arange(0, TOKENS)
        tl.store(out + position, tl.full([TOKENS], float("-inf"), tl.float32), mask=position < last)


@triton.jit
def _keys(places, TO: tl.constexpr, DTYPE: tl.constexpr, DIM: tl.constexpr, D_TILE: tl.constexpr):
    """Loads keys of type DTYPE from byte pointers `places` [N] as type TO, [N, D_TILE]; 0 past DIM."""
    dim = tl.arange(0, D_TILE)
    return rounded(tl.load(places.to(tl.pointer_type(DTYPE))[:, None] + dim, mask=dim < DIM, other=0.0), TO)


@triton.jit
def _e4m3_keys(places, TO: tl.constexpr, DIM: tl.constexpr, D_TILE: tl.constexpr):
    """Like `_keys`, for e4m3 keys.  Columns are in the order of `in_word_order`."""
    word = tl.arange(0, D_TILE // 4)
    return unpacked(tl.load(places.to(tl.pointer_type(tl.int32))[:, None] + word, mask=word < DIM // 4, other=0), TO)


@triton.jit
def _e2m1_keys(page, place, TO: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, D_TILE: tl.constexpr):
    """Keys of e2m1 as two tiles of type TO, their even and their odd values, [N, D_TILE // 2], and their factors [N].

    `page` and `place` [N] are the pages of the keys, and their numbers there.  Values are multiplied by the scale of
    their tile and divided by the key's largest one, the factor.  All are powers of two, and TO represents values down
    to 2**-22 times the largest.  A scale of NaN makes the factor NaN.
    """
    SCALES: tl.constexpr = D_TILE // SCALE_TILE
    tile, pair = tl.arange(0, SCALES), tl.arange(0, D_TILE // 2)
    scales = page + BLOCK_SIZE * (DIM // 2) + place * (DIM // SCALE_TILE)
    pairs = tl.load((page + place * (DIM // 2))[:, None] + pair, mask=pair < DIM // 2, other=0).to(tl.int32)
    exponent = tl.load(scales[:, None] + tile, mask=tile < DIM // SCALE_TILE, other=0).to(tl.int32)
    largest = tl.max(exponent, axis=1)
    # Scales of 2**-126 times the largest are 0 here: TO would not represent their products with values.
    scale = tl.maximum(127 + exponent - largest[:, None], 0) << 23
    scale = tl.broadcast_to(scale.to(tl.float32, bitcast=True)[:, :, None], (place.shape[0], SCALES, SCALE_TILE // 2))
    scale = tl.reshape(scale, (place.shape[0], D_TILE // 2))
    even, odd = rounded(e2m1_value(pairs) * scale, TO), rounded(e2m1_value(pairs >> 4) * scale, TO)
    return even, odd, from_e8m0(largest)
