"""The loop over tiles of keys that all attention kernels share, and the steps before and after it.

A program is given one work tile of the plan (a range of the tokens of a request) and one tile of query rows:

    load_range, query_rows       which tokens, which rows; the kernel then loads the queries
    attend_tiles                 the loop (see its docstring)
    store_results                a whole request is final; a split goes to memory for `combine`

Triton inlines these functions, so calling them costs nothing.
"""

import triton
import triton.language as tl

from jaxkv_kernels.triton.attention.load_keys import load_keys_and_values
from jaxkv_kernels.triton.attention.softmax import (
    LOG2E,
    MASKED,
    NO_KEYS,
    cap_scores,
    log2_sum,
    normalizer,
    normalizer_with_sink,
    update_max,
    update_sum,
)
from jaxkv_kernels.triton.entries.addresses import slots_of, token_address
from jaxkv_kernels.triton.runtime.arithmetic import dot, rounded


@triton.jit
def load_range(work_tiles, index):
    """Loads the columns of a work tile except its request: first token, end, and whether it is a split."""
    tile = work_tiles + index * 4
    return tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)


@triton.jit
def query_rows(group, KV_HEADS: tl.constexpr, Q_LEN: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """The KV head and the query rows of program `group` of a work tile.

    For each of ROWS rows, it returns the query token, the index among the Q_LEN * HEADS rows of the request, and
    whether that row exists.
    """
    SHARING: tl.constexpr = HEADS // KV_HEADS
    head = group % KV_HEADS
    row = group // KV_HEADS * ROWS + tl.arange(0, ROWS)
    token = row // SHARING
    line = row
    if KV_HEADS > 1:
        line = token * HEADS + head * SHARING + row % SHARING
    return head, token, line, token < Q_LEN


@triton.jit
def _visible(known, position, sight, Q_LEN: tl.constexpr, WINDOW: tl.constexpr):
    """A mask of the visible keys, [1 or rows, keys].

    A key is visible if it is `known` (its position is in the work tile and its block in the cache), and if its
    `position` [keys] is within the window and before `sight` [rows], the end of what the row's query token sees.
    """
    visible = known[None, :]
    if Q_LEN > 1:
        visible = visible & (position[None, :] < sight[:, None])
    if WINDOW is not None:
        visible = visible & (position[None, :] >= sight[:, None] - WINDOW)
    return visible


@triton.jit
def _scores(q, k, score):
    """`score` [rows, keys] plus the products of tiles `q` [rows, n] with the corresponding tiles `k` [keys, n]."""
    for i in tl.static_range(len(k)):
        score = dot(q[i], tl.trans(k[i]), score)
    return score


@triton.jit
def attend_tiles(
    q, scale, buffer, layers, table, seq_lens, request, begin, end, head, token,
    PAGES: tl.constexpr, LOADS: tl.constexpr, TABLE: tl.constexpr, TABLE_BLOCK: tl.constexpr, Q_LEN: tl.constexpr,
    CAP: tl.constexpr, WINDOW: tl.constexpr, CONFIG: tl.constexpr, SUM_PER_COLUMN: tl.constexpr,
):  # fmt: skip
    """Attends with the query tiles `q` to the tokens from `begin` to `end` of a request.

    One iteration per tile of keys, as a timeline (loads are asynchronous copies, up to CONFIG.stages tiles ahead):

        blocks of tile i + 1   loaded (addresses depend on them, so they are one tile ahead of the keys)
        keys of tile i + 1     load ......................................... arrive
        tile i                 scores = q k^T | mask | max, weights | acc = acc * rescale + weights v

    `table` [B, TABLE] holds ids of blocks of TABLE_BLOCK tokens: blocks of the cache, or slots if TABLE_BLOCK is 1.

    Returns the unnormalized sums (a tuple of float32 [rows, columns], one per tile of values), the running maximum
    [rows], and the row sums ([rows], or [rows, keys] with SUM_PER_COLUMN).
    """
    ROWS: tl.constexpr = CONFIG.rows
    KEYS: tl.constexpr = CONFIG.keys
    VALUE_TILES: tl.constexpr = LOADS.value_tiles
    VALUE_COLUMNS: tl.constexpr = LOADS.value_columns
    acc = ()
    for _ in tl.static_range(VALUE_TILES):
        acc += (tl.zeros((ROWS, VALUE_COLUMNS), tl.float32),)
    layer = tl.load(layers)
    blocks = slots_of(layer, PAGES) // TABLE_BLOCK
    table += request.to(tl.int64) * TABLE
    key = tl.arange(0, KEYS)
    block = tl.load(table + (begin + key) // TABLE_BLOCK, mask=begin + key < end, other=-1)
    length = tl.minimum(tl.load(seq_lens + request), TABLE * TABLE_BLOCK)
    sight = length - (Q_LEN - 1) + token
    row_max = tl.full((ROWS,), NO_KEYS, tl.float32)
    row_sum = tl.zeros((ROWS, KEYS) if SUM_PER_COLUMN else (ROWS,), tl.float32)
    for start in tl.range(begin, end, KEYS):
        position = start + key
        known = (block >= 0) & (block < blocks)
        slot = tl.where(known, block, 0) * TABLE_BLOCK + position % TABLE_BLOCK
        ahead = position + KEYS
        block = tl.load(table + ahead // TABLE_BLOCK, mask=ahead < end, other=-1)
        k, v, factors = load_keys_and_values(token_address(buffer, layer, slot, head, PAGES), known, LOADS)
        score = _scores(q, k, tl.zeros((ROWS, KEYS), tl.float32))
        if LOADS.per_token:
            score *= factors[0][None, :]
        visible = _visible(known, position, sight, Q_LEN, WINDOW)
        score = tl.where(visible, cap_scores(score * scale, CAP, LOADS.dtype), MASKED)
        weight, rescale, row_max = update_max(score, row_max, LOADS.dtype)
        row_sum = update_sum(row_sum, rescale, weight)
        if LOADS.per_token:
            weight *= factors[1][None, :]
        weight = rounded(weight, LOADS.dtype)
        sums = ()
        for i in tl.static_range(len(v)):
            sums += (dot(weight, v[i], acc[i] * rescale[:, None]),)
        acc = sums
    return acc, row_max, tl.sum(row_sum, axis=1) if SUM_PER_COLUMN else row_sum


@triton.jit
def store_results(
    acc, row_max, row_sum, out, lse, split_out, split_lse, sinks, index, request, is_split, line, live, head_of_row,
    ALL: tl.constexpr, SIZE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Stores rows of whole requests to `out` [B, ALL, SIZE] and `lse` [B, ALL], those of splits to `split_*`.

    Both are normalized.  The LSE of a whole request is natural, that of a split in base 2.  Sinks must count once per
    request, so `combine` adds them to split requests.
    """
    divisor = normalizer(row_sum)
    if SINKS:
        sink = tl.load(sinks + head_of_row, mask=live)
        divisor = tl.where(is_split == 0, normalizer_with_sink(row_max, row_sum, sink), divisor)
    rows = ()
    for i in tl.static_range(len(acc)):
        rows += (acc[i] / divisor[:, None],)
    log2 = log2_sum(row_max, row_sum)
    if is_split == 0:
        row = request.to(tl.int64) * ALL + line
        _store_rows(out, row, live, rows, SIZE)
        tl.store(lse + row, log2 / LOG2E, mask=live)
    else:
        row = index.to(tl.int64) * ALL + line
        _store_rows(split_out, row, live, rows, SIZE)
        tl.store(split_lse + row, log2, mask=live)


@triton.jit
def _store_rows(array, row, live, tiles, SIZE: tl.constexpr):
    """Stores tiles of adjacent columns to rows `row` [n] of `array` [..., SIZE]."""
    for i in tl.static_range(len(tiles)):
        column = i * tiles[i].shape[1] + tl.arange(0, tiles[i].shape[1])
        target = array + row[:, None] * SIZE + column[None, :]
        result = rounded(tiles[i], array.dtype.element_ty)
        tl.store(target, result, mask=live[:, None] & (column < SIZE)[None, :])
