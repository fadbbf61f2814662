"""Scores of the DeepSeek V3.2 indexer against every cached key, for keys of 128 values, on sm_90.

logit[j] = sum over heads h of relu(q_h . k_j) * w_h, times the scale of key j.

The query tokens of a request are divided into groups of up to 256 rows (query tokens x heads).  Below, and in the
kernel, "request" means such a group.  A persistent CTA per multiprocessor has an even share of all tiles of 64 keys
(`indexer_work.py`).  One warpgroup, the producer, copies keys and scales by TMA; each of the others, the consumers,
multiplies tiles of its own: keys are the left operand of wgmma (64 rows), the queries of all heads the right one.
Timeline of a CTA:

    producer     queries of the 1st request | tiles 0, 1, 2, ... as fast as stages are free | queries of the 2nd ...
    consumers    -inf past the requests' ends | tile w, w + consumers, w + 2 * consumers, ...
    per tile, for up to 128 rows at a time:
                 q k^T | relu, times the weights, sum over heads, times the scale, mask, store

Keys of bf16 and f16 are multiplied from shared memory, with queries of the same dtype; queries of e4m3 are first
converted to that dtype.

Keys of e4m3 are multiplied with queries of e4m3 as they are.  Hopper accumulates such products with about 13 bits after
the leading one.  With queries of bf16 and f16, keys of e4m3 are multiplied as float16: a consumer converts its keys to
float16 in registers, exactly.

Barriers:
    k_full, k_free    per stage of keys: the tile has landed; its consumer has multiplied it
    q_full, q_free    per stage of queries: a request's queries (and weights) have landed; all consumers have read them

Budget.  Shared memory: 8.25 KiB (e4m3) or 16 KiB per stage of keys.  By default, there are 8 or 9 stages of keys, or as
many as fit.  A stage of queries takes 8 KiB (e4m3) or 16 KiB per 64 rows.  If keys are e4m3 and queries have more than
128 rows, a stage of queries also has up to 1 KiB of weights.
Registers of a consumer: 32 of products and 16 of weights per 64 rows of queries, up to 128 rows at a time.  With e4m3
keys and bf16 or f16 queries, it also has the keys, 16 of bytes and 32 of float16.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.calls import IndexerLogits
from jaxkv_kernels.formats.bits import FP8
from jaxkv_kernels.mosaic_gpu import indexer_lanes
from jaxkv_kernels.mosaic_gpu.indexer_keys import BLOCKS, DIM, KeyTiles, key_rows, key_tiles
from jaxkv_kernels.mosaic_gpu.indexer_lanes import WINDOW
from jaxkv_kernels.mosaic_gpu.indexer_work import COLUMNS, QUERY_ROWS, TILE, Groups, Tiles, rows_per_token
from jaxkv_kernels.mosaic_gpu.interpreter import indexer as interpreted
from jaxkv_kernels.mosaic_gpu.layout_reasons import block_sizes, origins
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import floordiv
from jaxkv_kernels.mosaic_gpu.runtime.device import SHARED_MEMORY, interpreting, multiprocessors
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel
from jaxkv_kernels.mosaic_gpu.runtime.registers import COLUMN, WGMMA
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import IN_BOUNDS, swizzled
from jaxkv_kernels.tuning import configuration, require

RESERVED = 3072
"""Bytes of shared memory for barriers, alignment and weights."""
LARGEST = 2.0**15
"""An upper bound of the magnitudes of bf16 queries after they are scaled to fit float16."""


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """The numbers of `indexer_logits` that can be tuned.

    Times are in milliseconds on an H200 (jax 0.11.2), for 64 requests of 32,768 tokens with 64 heads unless another
    call is named.
    """

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {
        "consumers": (2, 3, 4),
        "stages_per_consumer": (2, 3, 4, 6),
        "query_stages": (1, 2),
    }

    consumers: int = 3
    """Warpgroups that multiply; each has tiles of its own."""
    stages_per_consumer: int = 3
    """Tiles of keys in shared memory, per consumer; fewer if queries leave less room.  With 2, 3, 4 and 6 stages,
    calls with two query tokens of e4m3 take 0.0825, 0.0807, 0.0813 and 0.0830 ms."""
    query_stages: int = 2
    """How many groups of query tokens (`Groups`) have their queries in shared memory at once."""
    producer_registers: int = 40
    """Registers per lane of the producer warpgroup."""

    @property
    def consumer_registers(self) -> int:
        """Registers per lane of each consumer: an equal share of those at launch, less the producer's."""
        warpgroups = self.consumers + 1
        launched = 512 // warpgroups // 8 * 8 * warpgroups
        return (launched - self.producer_registers) // self.consumers // 8 * 8

    def __post_init__(self):
        require(
            2 <= self.consumers <= 4, self, "consumers", "2 to 4, as a warpgroup has at most 256 registers per lane"
        )
        require(self.stages_per_consumer >= 1, self, "stages_per_consumer", "1 or more")
        require(1 <= self.query_stages <= 2, self, "query_stages", "1 or 2, which always fit in shared memory")
        require(self.producer_registers in (24, 40, 56), self, "producer_registers", "24, 40 or 56")


def default_config(*, quantised: bool, converted: bool, columns: int) -> IndexerConfig:
    """The default configuration of a call.

    `columns` is the width of its products (query tokens x heads); `quantised` is whether keys are e4m3, and `converted`
    whether they are converted to the dtype of the queries.

    Four consumers with two stages each are compared with the three consumers with three stages of `IndexerConfig`.  For
    e4m3 keys and two query tokens of e4m3 (128 columns), four take 0.0799 instead of 0.0807, but for one query token
    (64 columns) 0.0700 instead of 0.0690.  For converted keys and one query token of bf16 (64 columns), they take
    0.0882 (0.0897 with three stages) instead of 0.0946; with 128 columns, converted keys leave too few registers for
    four consumers.  For a chunk of 512 query tokens of one request, four consumers with three stages take 0.250 instead
    of 0.254 with e4m3 keys; with bf16 keys, four consumers take 0.505 instead of 0.387.
    """
    if quantised and (columns > TILE) != converted:
        return IndexerConfig(consumers=4, stages_per_consumer=2)
    return IndexerConfig()


def unsupported_reasons(call: IndexerLogits) -> Iterator[str]:
    """Reasons against a call."""
    entry, pages, q = call.entry, call.pages, call.q
    if entry.head_dim != DIM:
        yield f"keys of {entry.head_dim} values: supports {DIM}"
    if entry.quantised and q.dtype not in (FP8, jnp.bfloat16, jnp.float16):
        yield f"`q` of {q.dtype}: supports float8_e4m3fn, bfloat16 and float16"
    if not entry.quantised and q.dtype not in (FP8, entry.dtype):
        yield f"`q` of {q.dtype}: supports float8_e4m3fn and {entry.dtype} with keys of format {entry.format!r}"
    if rows_per_token(q.shape[2]) > QUERY_ROWS:
        yield f"`q` of {q.shape[2]} heads: supports at most {QUERY_ROWS}"
    if call.max_len >= 2**28:
        yield f"`max_len` of {call.max_len}: supports less than 2**28"
    if not entry.quantised:
        yield from block_sizes(pages)
        yield from origins(pages, call.buffer)
        return
    if pages.block_size not in BLOCKS:
        yield f"blocks of {pages.block_size} tokens: supports {', '.join(map(str, BLOCKS))}"
    try:
        key_rows(pages, call.buffer.dtype.itemsize)
    except ValueError as error:
        yield str(error)


def indexer_logits(call: IndexerLogits) -> jax.Array:
    """Maps q [B, Q, Hi, D] and weights [B, Q, Hi] to float32 logits [B, Q, max_len]."""
    _, q_len, heads, _ = call.q.shape
    rows = rows_per_token(heads)
    _, widest = products(Groups.of(q_len, rows).tokens, rows)[0]
    converted = call.entry.quantised and call.q.dtype != FP8
    default = default_config(quantised=call.entry.quantised, converted=converted, columns=widest)
    return _logits(call, config=configuration(default))


def products(tokens: int, rows: int) -> list[tuple[int, int]]:
    """The columns (first, count) of each product of a tile of keys, for `tokens` query tokens of `rows` columns."""
    width = rows * (COLUMNS // rows) if rows <= COLUMNS else COLUMNS
    return [(first, min(width, tokens * rows - first)) for first in range(0, tokens * rows, width)]


@partial(jax.jit, static_argnames="config")
def _logits(call: IndexerLogits, config: IndexerConfig) -> jax.Array:
    batch, q_len, heads, _ = call.q.shape
    q, weights = _operands(call)
    rows = rows_per_token(heads)
    groups = Groups.of(q_len, rows)
    pad = ((0, 0), (groups.padding, 0), (0, rows - heads))
    q, weights = jnp.pad(q, (*pad, (0, 0))), jnp.pad(weights, pad)
    q_rows = groups.tokens * rows
    q, weights = q.reshape(batch * groups.count, q_rows, DIM), weights.reshape(batch * groups.count, q_rows)
    tiles = Tiles(call.block_tables.shape[1] * call.pages.block_size, call.max_len)
    lengths = groups.lengths(call.seq_lens, tiles.capacity)
    logits = _run(replace(call, q=q, weights=weights, seq_lens=lengths), groups, tiles, config)
    return logits[:, : call.max_len].reshape(batch, q_len, call.max_len)


def _operands(call: IndexerLogits) -> tuple[jax.Array, jax.Array]:
    """The queries in the dtype in which they are multiplied, and the weights in float32."""
    q, weights = call.q, call.weights.astype(jnp.float32)
    if not call.entry.quantised:
        return q.astype(call.entry.dtype), weights
    if q.dtype in (FP8, jnp.float16):
        return q, weights
    largest = jnp.abs(q).max(axis=-1).astype(jnp.float32)
    exponent = jnp.frexp(LARGEST / jnp.where(jnp.isfinite(largest), jnp.maximum(largest, 2.0**-100), 1))[1]
    scale = jnp.clip(exponent - 1, -126, 126)
    q = jnp.ldexp(q.astype(jnp.float32), scale[..., None]).astype(jnp.float16)
    return q, jnp.ldexp(weights, -scale)


def _run(call: IndexerLogits, groups: Groups, tiles: Tiles, config: IndexerConfig) -> jax.Array:
    """Logits, float32 [B * Q, max_len], of a call whose requests are groups of query tokens.

    Its queries are [requests, tokens x rows, D], its weights [requests, tokens x rows].
    """
    q, pages, interpret = call.q, call.pages, bool(interpreting.value)
    keys: KeyTiles = key_tiles(call.entry, pages, call.buffer, interpret=interpret)
    requests, q_rows, _ = q.shape
    tokens, max_len = groups.tokens, tiles.max_len
    rows = q_rows // tokens
    columns = products(tokens, rows)
    consumers, block_size = config.consumers, pages.block_size
    stages = _stages(config, keys.stage_bytes, q_rows * DIM * q.dtype.itemsize)
    part = min(block_size, TILE)
    copies = TILE // part
    tiles_per_window = WINDOW * block_size // TILE
    ctas = 2 if interpret else multiprocessors()
    converted = q.dtype != keys.dtype
    # With a single product, weights stay in registers.  With several, they are loaded for each tile: from shared
    # memory, unless keys have 16 bits: their products need all the bandwidth of shared memory.
    weights_shared = len(columns) > 1 and keys.dtype == FP8
    key_operands, key_scratch = keys.operands(call.buffer), keys.shared(stages)

    def body(q_ref, weight_ref, *refs):
        key_refs, refs = refs[: len(key_operands)], refs[len(key_operands) :]
        table_ref, length_ref, layer_ref, out_ref, *refs = refs
        k_s, (q_s, k_full, k_free, q_full, q_free, *scratch) = refs[: len(key_scratch)], refs[len(key_scratch) :]
        w_s: Any = scratch.pop(0) if weights_shared else None
        cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
        layer = layer_ref[0]
        in_cache = (layer >= 0) & (layer < pages.num_layers)
        lanes = interpreted if interpret else indexer_lanes
        share = lanes.find_share(length_ref, cta, ctas, tiles, in_cache, filled=False)

        def each_request(run):
            """Calls `run(used, n, request, begin, end)` for every request of the share.

            `used` requests and n tiles come before it.
            """

            def one(request, carry):
                used, n = carry
                begin, end = share.tiles(request, jnp.int32(0), tiles.computed(length_ref[request]))

                def some():
                    run(used, n, request, begin, end)
                    return used + 1, n + end - begin

                return lax.cond(begin < end, some, lambda: (used, n))

            return lax.fori_loop(share.first_request, share.last_request + 1, one, (jnp.int32(0), jnp.int32(0)))

        def each_window(request, begin, end, run):
            """Calls `run(blocks, first, low, high)` per window of the block table: `first` is its first tile."""
            first_window = floordiv(begin, tiles_per_window)
            last_window = floordiv(end - 1, tiles_per_window)
            table = groups.request(request)

            def one(window, blocks):
                ahead = lanes.load_window(table_ref, table, window + 1)
                first = window * tiles_per_window
                run(blocks, first, jnp.maximum(first, begin), jnp.minimum(first + tiles_per_window, end))
                return ahead

            lax.fori_loop(first_window, last_window + 1, one, lanes.load_window(table_ref, table, first_window))

        def blocks_of(blocks, first, tile):
            """The blocks of a tile's copies."""
            column = floordiv((tile - first) * (TILE // part), max(block_size // TILE, 1))
            return [lanes.block_of(table_ref, blocks, column + c) for c in range(copies)]

        def known(block):
            return (block >= 0) & (block < pages.num_blocks)

        def stage_of(n):
            return lax.rem(n, jnp.int32(stages))

        def query_stage_of(used):
            return lax.rem(used, jnp.int32(config.query_stages))

        def producer():
            plgpu.set_max_registers(config.producer_registers, action="decrease")
            keys.install(key_refs)

            def fetch(blocks, first, offset, tile, _):
                n = offset + tile
                stage = stage_of(n)

                @pl.when(n >= stages)
                def _():
                    plgpu.barrier_wait(k_free.at[stage])

                in_block = lax.rem(tile, jnp.int32(max(block_size // TILE, 1)))
                for c, block in enumerate(blocks_of(blocks, first, tile)):
                    # Block 0 stands in for blocks outside the cache, whose tokens are masked later.
                    page = layer, jnp.where(known(block), block, 0)
                    keys.fetch(key_refs, k_s, stage, c * part, part, page, in_block, k_full.at[stage])

            def run(used, n, request, begin, end):
                stage = query_stage_of(used)

                @pl.when(used >= config.query_stages)
                def _():
                    plgpu.barrier_wait(q_free.at[stage])

                plgpu.copy_gmem_to_smem(q_ref.at[request], q_s.at[stage], q_full.at[stage])
                if weights_shared:
                    plgpu.copy_gmem_to_smem(weight_ref.at[request], w_s.at[stage], q_full.at[stage], oob_mode=IN_BOUNDS)

                def window(blocks, first, low, high):
                    lax.fori_loop(low, high, partial(fetch, blocks, first, n - begin), None)

                each_window(request, begin, end, window)

            used, n = each_request(run)

            # Every completion of a barrier must be waited for.
            @pl.loop(jnp.maximum(n - stages, 0), n)
            def _(n):
                plgpu.barrier_wait(k_free.at[stage_of(n)])

            @pl.loop(jnp.maximum(used - config.query_stages, 0), used)
            def _(used):
                plgpu.barrier_wait(q_free.at[query_stage_of(used)])

        def consumer():
            plgpu.set_max_registers(config.consumer_registers, action="increase")
            fill_share()

            def operand(stage):
                """A tile of keys [64, D]; it is in registers if it is converted."""
                tile = keys.tile(k_s, stage)
                if not converted:
                    return tile
                if interpret:
                    scratch[0].at[wg][...] = tile[...].astype(q.dtype)
                    plgpu.commit_smem()
                    return scratch[0].at[wg]
                upcast = plgpu.load(tile, layout=plgpu.Layout.WGMMA_UPCAST_2X)
                return plgpu.layout_cast(upcast.astype(q.dtype), WGMMA)

            def multiply(tile_keys, q_stage, first, width):
                """Scores of a tile of keys, float32 [64, width]."""
                queries = q_s.at[q_stage, pl.ds(first, width)].transpose((1, 0))

                def product(acc):
                    plgpu.wgmma(acc, tile_keys, queries)
                    return acc[...]

                return pl.run_scoped(product, plgpu.ACC((TILE, width), jnp.float32))

            def load_weights(request, q_stage, first, width):
                ref, row = (w_s, q_stage) if weights_shared else (weight_ref, request)
                return plgpu.load(ref.at[row, pl.ds(first, width)], layout=COLUMN, optimized=False)

            def tile_logits(n, tile, request, length, q_stage, loaded, block_ids):
                stage = stage_of(n)
                plgpu.barrier_wait(k_full.at[stage])
                scale = keys.scales(k_s, stage)
                in_table = jnp.int32(0)
                for c, block in enumerate(block_ids):
                    in_table = in_table | jnp.where(known(block), 1 << c, 0)
                tile_keys = operand(stage)
                partial: dict[int, Any] = {}
                for unit, (first, width) in enumerate(columns):
                    # Loaded first, so that the loads overlap the products.
                    weight = loaded[unit] if loaded else load_weights(request, q_stage, first, width)
                    scores = multiply(tile_keys, q_stage, first, width)
                    if unit == len(columns) - 1:
                        plgpu.barrier_arrive(k_free.at[stage])
                    each = min(rows, width)
                    for low in range(0, width, each):
                        token, rest = divmod(first + low + each, rows)
                        token -= rest == 0
                        own = (
                            (scores, weight)
                            if each == width
                            else (scores[:, low : low + each], weight[low : low + each])
                        )
                        partial[token] = lanes.weigh(partial.get(token), *own)
                        # Two tokens at a time: each lane of a quad then stores one logit.
                        if rest == 0 and (token % 2 == 1 or token == tokens - 1):
                            even = token - token % 2
                            row, first_key = groups.row(request, even), tile * TILE
                            end = length - (tokens - 1) + even
                            sums = [partial.pop(t) for t in range(even, token + 1)]
                            skipped = groups.skipped(request, even)
                            place = out_ref, row, first_key, end, in_table
                            lanes.store_logits(*place, part, sums, scale, skipped=skipped)

            def run(used, n, request, begin, end):
                q_stage = query_stage_of(used)
                loaded = [load_weights(request, q_stage, *columns[0])] if len(columns) == 1 else []
                length = jnp.clip(length_ref[request], 0, tiles.capacity)
                plgpu.barrier_wait(q_full.at[q_stage])

                def window(blocks, first, low, high):
                    offset = n - begin
                    skip = lax.rem(wg + consumers - lax.rem(offset + low, jnp.int32(consumers)), jnp.int32(consumers))
                    count = floordiv(jnp.maximum(high - low - skip, 0) + (consumers - 1), consumers)

                    def one(i, _):
                        tile = low + skip + i * consumers
                        block_ids = blocks_of(blocks, first, tile)
                        tile_logits(offset + tile, tile, request, length, q_stage, loaded, block_ids)

                    lax.fori_loop(0, count, one, None)

                each_window(request, begin, end, window)
                if weights_shared:
                    plgpu.commit_smem()  # orders these loads before the next copy to the same memory
                plgpu.barrier_arrive(q_free.at[q_stage])

            each_request(run)

        def fill_share():
            """Stores -inf to the tiles that are not computed; the consumers share them by rows of the result."""
            rest = lanes.find_share(length_ref, cta, ctas, tiles, in_cache, filled=True)

            def one(request, _):
                computed = tiles.computed(jnp.where(in_cache, length_ref[request], 0))
                begin, end = rest.tiles(request, jnp.int32(0), tiles.per_request - computed)
                first, last = ((computed + x) * TILE for x in (begin, end))
                for token in range(tokens):
                    row, skipped = groups.row(request, token), groups.skipped(request, token)
                    real = True if skipped is None else skipped == 0

                    @pl.when((lax.rem(row, jnp.int32(consumers)) == wg) & real)
                    def _(row=row):
                        lanes.fill(out_ref, row, first, jnp.minimum(last, max_len))

            lax.fori_loop(rest.first_request, rest.last_request + 1, one, None)

        lax.cond(wg == consumers, producer, consumer)

    # The interpreter stores whole tiles.
    length = tiles.per_request * TILE if interpret else max_len
    return kernel(
        body,
        interpret=interpret,
        auto_barriers=False,
        out_type=jax.ShapeDtypeStruct((groups.rows(requests), length), jnp.float32),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=consumers + 1,
        thread_name="wg",
        kernel_name="indexer_logits",
        scratch_types=[
            *key_scratch,
            swizzled(config.query_stages, q_rows, DIM, dtype=q.dtype),
            plgpu.Barrier(num_arrivals=keys.copies * copies, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=1 + weights_shared, num_barriers=config.query_stages),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=config.query_stages),
            *([plgpu.SMEM((config.query_stages, q_rows), jnp.float32)] if weights_shared else []),
            *([swizzled(consumers, TILE, DIM, dtype=q.dtype)] if interpret and converted else []),
        ],
    )(q, call.weights, *key_operands, call.block_tables, call.seq_lens, jnp.reshape(call.layer, (1,)))


def _stages(config: IndexerConfig, stage_bytes: int, query_bytes: int) -> int:
    """Stages of keys: as many as are configured, or as fit beside the queries."""
    room = SHARED_MEMORY - RESERVED - config.query_stages * query_bytes
    return config.consumers * max(min(config.stages_per_consumer, room // stage_bytes // config.consumers), 1)
