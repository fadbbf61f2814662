"""Decode of few rows (query tokens x heads that share entries) from quantised entries: latents, or keys and values.

As in `mla_dense_swap_ab.py`, the operands of the products are swapped: keys provide the 64 rows of wgmma, queries its
columns.

    S' = K Q'     [64 keys, 16]
    O' += V' P'   [columns of V, 16]       of latents, V is K's first 512 columns

K and V' are register operands, converted as the bytes of the cache are loaded from shared memory
(`quantised_tiles.py`).  Shared memory holds no converted entries.  The bytes of a latent are loaded from shared memory
twice, once for K and once for V.  Keys and values that lie apart are copied separately, each from a view of its own to
a part of the stage of its own.

Keys are those of block tables or, for sparse attention to latents with up to 16 heads, those at chosen slots
(`entry_slots.py`): each query token is then a request of its own.

Work.  A CTA of a producer and two to four consumer warpgroups owns a KV head (latents have one) and walks its partition
of the plan: work tiles, each a range of key tiles of a request.  The consumers take turns at tiles, so that one
converts while another multiplies or waits.  With a window, a request begins at the tile with the first key that some
row sees.

Timeline of a work tile, downwards; `->` names the barrier that a line waits for.

    producer                                  consumer w
    loads the queries to registers            every second to fourth tile: -> q_full[stage] once, k_full[stage]
    first tile of entries (in the first         in a masked tile: zeroes values of unseen tokens
      work tile, as many as there are           S' = K Q'; mask; vote: does any score exceed the running max by more
      stages): a copy or two per page             than the threshold?  If so: new maximum over keys, rescale O' and
      -> k_free[stage]                            the row sums
    the queries, scaled and reordered, to       P = exp2(S' - running max) to shared memory
      shared memory, arrives q_full[stage]      O' += V' P', arrives k_free[stage] once the last values are in registers
      -> q_free[stage], of 2 work tiles ago   after the last tile: arrives q_free[stage];
    the other tiles -> k_free[stage]            consumers 1, ...: store running max, row sums and O' to shared memory,
                                                  all of O' at once or, if it does not fit, a quarter at a time
                                                  -> taken[w - 1]; arrives given[w - 1]
                                                consumer 0: for each of them: -> given[w - 1]; adds theirs to its own,
                                                  arrives taken[w - 1].  Stores the result

Before a batch of products is started, the warpgroup waits for the previous batch, which ran while the operands of this
one were converted.  (If the wait left some products running, the compiler would serialize all of them.)  The compiler
starts the products of a batch between the conversions of their operands, so K and V' may be a batch each.

Numerics.  Queries become float16, each row divided by a power of two that makes it fit, which multiplies its scores.

`fp8` and `nvfp4` entries have a scale of keys and one of values, which multiply scores and results.  The scales of 16
`nvfp4` values are multiplied into them as they are converted.  Tokens of `fp8_ds_mla` have four scales.  S' is then the
sum of four products, each times its scale, and of the product of the rotary parts, which stay bf16.  Each group of 128
latents has weights of its own, which must fit float16 whatever the scales are.  Let `largest` be the token's largest
scale, rounded down to a power of two.  The running max is that of score + log2(largest), and P is exp2(score +
log2(largest) - running max).  The weights of a group are P * scale / largest, and row sums are of P / largest.  Weights
are multiplied by a power of two (`lift`), as large as float16 allows, before they are stored: many small weights add
up, and float16 has few exponents below 1.  Tokens of `int8` entries have a scale of keys, which multiplies S', and one
of values, which is treated like those of a single group.

Barriers, and how many arrivals complete them.
    q_full[stage]    the queries are stored (1: the producer)
    q_free[stage]    the consumers have multiplied with the queries for the last time (1 per consumer)
    k_full[stage]    a tile of entries has landed (1 per copy)
    k_free[stage]    the tile is in registers (1: its consumer, which is `stage` modulo the number of consumers)
    given[w - 1]     the result of consumer w > 0, or a quarter of it, is in `other` (1)
    taken[w - 1]     consumer 0 has read it (1)
Automatic barriers are off.  Within a consumer warpgroup, the vote is also a barrier: after it, all warps have finished
with the previous tile's P.

Budget, for latents.  Shared memory: entries 4 x 36 KiB (fp8_ds_mla 41) + queries 2 x 18 KiB + P 4 KiB (16) + `other` 32
KiB (8) + stats 1 KiB = 217 KiB (225) of 227.  Registers: 208 per lane for two consumers (O' takes 64, operands some
80), 88 for the producer, which holds the queries of a work tile.  Three consumers have 136 each, four 96; O' of 128
values takes 16.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.addressing import Pages, dtype_of, row_view
from jaxkv_kernels.calls import DecodeCall, DecodeKV, DecodeMLA, DecodeMLASparse, PlanDecode
from jaxkv_kernels.mosaic_gpu.attention_reasons import latent_sizes, values_of
from jaxkv_kernels.mosaic_gpu.entry_slots import SlotSource
from jaxkv_kernels.mosaic_gpu.epilogue import SPLIT_DTYPE, KernelResults, result_types, split_scale
from jaxkv_kernels.mosaic_gpu.interpreter.quantised import (
    InterpretedHeads,
    InterpretedInt8,
    InterpretedLatents,
    InterpretedNvfp4,
    InterpretedRowTiles,
)
from jaxkv_kernels.mosaic_gpu.layout_reasons import block_sizes, origins, steps, unaligned
from jaxkv_kernels.mosaic_gpu.masks import Ends, apply_mask, ends_of, first_seen, first_unmasked
from jaxkv_kernels.mosaic_gpu.paged_tma import PageTable
from jaxkv_kernels.mosaic_gpu.quantised_tiles import (
    GROUP,
    INVERSES,
    KEY_GROUP,
    STATS,
    HeadTiles,
    Int8Tiles,
    KVTiles,
    LatentTiles,
    N,
    Nvfp4Tiles,
    RowTiles,
    Tiles,
)
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import LOG2E, cap_scores, opaque_zero
from jaxkv_kernels.mosaic_gpu.runtime.device import consumer_registers
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel, pdl_launch_dependents
from jaxkv_kernels.mosaic_gpu.runtime.registers import COLUMN, WGMMA, over_columns, over_rows, store, zeros
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import swizzled
from jaxkv_kernels.mosaic_gpu.scaling import EXPONENT, INVERSE, LEAST_FACTOR, MOST_FACTOR
from jaxkv_kernels.mosaic_gpu.sizes import TILE
from jaxkv_kernels.mosaic_gpu.softmax import THRESHOLDS, OnlineSoftmax, check_threshold
from jaxkv_kernels.mosaic_gpu.tile_scheduler import (
    TILE_COSTS,
    Plan,
    SplitCosts,
    WorkTile,
    load_work_range,
    load_work_tile,
)
from jaxkv_kernels.mosaic_gpu.token_rows import in_entries_dtype
from jaxkv_kernels.tuning import require

_QUANTISED_TILE_COSTS = replace(TILE_COSTS, least=4)


@dataclass(frozen=True, kw_only=True)
class QuantisedSwapABConfig:
    """`decode_mla` with up to SWAP_AB_ROWS rows per request, and entries of format `fp8` or `fp8_ds_mla`."""

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {
        "keys_at_once": (1, 2, 3),
        "rescale_threshold": THRESHOLDS,
        "split_costs": tuple(replace(_QUANTISED_TILE_COSTS, least=least) for least in (2, 4, 8)),
    }

    stages: int = 4
    """Tiles of entries in shared memory, 36 or 41 KiB each.  A multiple of the number of consumers, so that a consumer
    always uses the same stages."""
    consumers: int = 2
    """Consumer warpgroups, which take turns at tiles."""
    query_stages: int = 2
    """Work tiles whose queries are in shared memory, 18 KiB each."""
    keys_at_once: int = 2
    """Groups of 64 columns of keys that are converted at once, while the products of the previous groups run.  Each
    converted group takes 16 registers per lane."""
    values_at_once: int = 1
    """Groups of 16 tokens whose values are converted at once, likewise.  128 columns take 8 registers per lane."""
    producer_registers: int = 88
    """As in MLADenseConfig.  The producer holds the queries of a work tile while it scales them."""
    rescale_threshold: int = 4
    """As in MLADenseConfig.  Weights are float16, multiplied by a power of two for which the threshold leaves room.  So
    a lower threshold keeps all bits of smaller weights: with 4, of those down to 2**-24."""
    split_costs: SplitCosts = _QUANTISED_TILE_COSTS
    """In steps of one tile, which has half the bytes of a bf16 tile."""

    def __post_init__(self):
        require(self.consumers in (2, 3, 4), self, "consumers", "2 to 4, which have registers for their results")
        most = 20 if isinstance(self, QuantisedGQAConfig) else 4
        ok = self.stages % self.consumers == 0 and self.consumers <= self.stages <= most
        require(ok, self, "stages", f"a multiple of the {self.consumers} consumers, at most {most}")
        require(1 <= self.query_stages <= 2, self, "query_stages", "1 or 2, which is what shared memory holds")
        require(1 <= self.keys_at_once <= 4, self, "keys_at_once", "1 to 4")
        require(self.values_at_once in (1, 2, 4), self, "values_at_once", "1, 2 or 4, divisors of the 4 of a tile")
        require(self.producer_registers in (72, 88, 104), self, "producer_registers", "72, 88 or 104")
        check_threshold(self)


@dataclass(frozen=True, kw_only=True)
class QuantisedGQAConfig(QuantisedSwapABConfig):
    """`decode_kv` with quantised entries."""

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {
        **QuantisedSwapABConfig.SEARCH,
        "stages": (3, 4, 6, 8, 9),
        "values_at_once": (1, 2, 4),
    }

    stages: int = 6
    """The most tiles of keys and values in shared memory, 9 to 17 KiB each for heads of 128; larger ones leave room for
    fewer."""
    consumers: int = 3


def gqa_config(entry) -> QuantisedGQAConfig:
    """The default configuration of a `decode_kv` call with quantised entries.

    64 requests of 8,192 tokens with 64 heads and 8 KV heads:

    - `fp8` takes 0.248 ms on an H200 with 3 consumers and 6 stages, 0.252 with 9 stages, and 0.254 with 2 consumers
      and 8 stages.
    - `int8` takes 0.420 ms on an H100 with 3 consumers and 3 stages, 0.432 with 2 and 4, and 0.444 with 4 and 4; on an
      H200, 0.296 ms with 2 consumers and 4 stages, 0.314 with 6 stages, and 0.326 with 8.  Entries of 272 bytes share
      lines of the L2 cache with those of other heads, which other CTAs load at about the same time.  The more is
      loaded in advance, the more often a line is loaded twice.
    - `nvfp4` takes 0.239 ms on an H100 with 3 consumers and 6 stages, and 0.257 with 4 and 8.  It is bound by copies,
      which alone take 0.243 and 0.254; with each head's entries of a block in one piece (`BLHNC`), it takes 0.220 ms.
    - With heads wider than 128, more than 2 consumers would spill registers.
    """
    if max(entry.sizes) > 128:
        return QuantisedGQAConfig(consumers=2, stages=8)
    if entry.format == "int8":
        return QuantisedGQAConfig(stages=3, values_at_once=4)
    if entry.format == "nvfp4":
        return QuantisedGQAConfig(values_at_once=4)
    return QuantisedGQAConfig()


KV_TILES: dict[str, tuple[type[KVTiles], type[KVTiles]]] = {
    "fp8": (HeadTiles, InterpretedHeads),
    "int8": (Int8Tiles, InterpretedInt8),
    "nvfp4": (Nvfp4Tiles, InterpretedNvfp4),
}
"""Tiles of quantised keys and values by format: for the GPU, and for the interpreter."""


def tiles_of(entry, pages: Pages, *, interpret: bool) -> Tiles:
    """The tiles of entries of this kind and format in such pages."""
    if entry.one_head:
        return (InterpretedLatents if interpret else LatentTiles)(entry)
    kinds, apart = KV_TILES[entry.format], pages.values is not None
    if apart and kinds[0] is HeadTiles and entry.value_dim < GROUP:
        kinds = RowTiles, InterpretedRowTiles
    return kinds[interpret](entry, apart)


def mla_reasons(call: DecodeCall | PlanDecode) -> Iterator[str]:
    """Reasons against attending to the latents of this call."""
    pages = call.pages
    yield from latent_sizes(call.entry)
    yield from block_sizes(pages)
    if pages.token_stride != pages.width:
        yield f"token stride {pages.token_stride}: supports {pages.width}, tokens that are contiguous"
    yield from unaligned(steps(pages, ("layer",)), dtype_of(call.buffer).itemsize)
    try:
        row_view(pages)
    except ValueError as error:
        yield str(error)


def gqa_reasons(call: DecodeCall | PlanDecode, rows: int, most_rows: int) -> Iterator[str]:
    """Reasons against attending to the keys and values of this call with `rows` query rows per KV head."""
    # TMA copies whole entries of 64 + 64 values, in multiples of 16 bytes; those of `nvfp4` have 72.  In planes, they
    # would be padded, but there are no loads of `nvfp4` values for 64 columns.
    narrow = call.entry.sizes == (KEY_GROUP, KEY_GROUP) and call.entry.nbytes % 16 == 0
    if not narrow and not {*call.entry.sizes} <= {128, 256}:
        yield f"{values_of(call.entry)}: supports 128 and 256 of each, if quantised, and 64 + 64 of fp8 and int8"
    if rows > most_rows:
        yield (
            f"query tokens x heads of {rows} per KV head: supports up to {most_rows} with entries of "
            f"format {call.entry.format!r}"
        )
    yield from block_sizes(call.pages)
    yield from origins(call.pages, call.buffer)


class Place(NamedTuple):
    """A tile of keys of a request."""

    stage: Any
    request: Any
    first_token: Any
    ends: Ends
    masked: Any
    """Whether some row does not see some of its tokens."""


class PageSource:
    """The keys of dense attention: those in the pages of block tables."""

    stats = STATS

    def __init__(self, call: DecodeMLA | DecodeKV, tiles: Tiles):
        buffer, self.pages = in_entries_dtype(call.buffer, call.pages, tiles.dtype)
        self.operands, self.table = tiles.operands(buffer, self.pages), call.block_tables
        self.tiles, self.tokens, self.group = tiles, call.q_len, call.heads // call.pages.num_heads
        self.window, self.ahead = call.window, call.ahead

    def memory(self, stages: int) -> dict[str, Any]:
        """The scratch memory of `keys`."""
        return {"k_full": plgpu.Barrier(num_arrivals=self.tiles.copies(self.pages), num_barriers=stages)}

    def keys(self, kv_refs, table_ref, scratch) -> "PageKeys":
        """The keys, given references to `operands` and `table`."""
        return PageKeys(self, kv_refs, PageTable(table_ref, self.pages), scratch["raw"], scratch["k_full"])


@dataclass(frozen=True)
class PageKeys:
    """Tiles of keys in pages, in a kernel."""

    source: PageSource
    kv_refs: Any
    table: PageTable
    raw: Any
    k_full: Any

    def loader(self, layer, in_cache, head) -> "PageLoader":
        """The producer's part."""
        return PageLoader(self, self.source.tiles.loader(self.kv_refs, self.table, jnp.where(in_cache, layer, 0), head))

    def wait(self, stage, use) -> None:
        """Waits for tile number `use`: `use` // stages is the phase of the barrier of its stage."""
        del use
        plgpu.barrier_wait(self.k_full.at[stage])

    def clear_unseen(self, place: Place) -> None:
        """Zeroes the values of a tile that no row sees."""
        source, (stage, request, first_token, ends, masked) = self.source, place
        clear = partial(source.tiles.clear, self.raw, stage)

        @pl.when(masked)
        def _():
            clear(jnp.clip(ends.seen - first_token, 0, TILE), TILE)
            if source.window is not None:
                clear(0, jnp.clip(first_seen(ends, source.tokens, source.window) - first_token, 0, TILE))
            for c, block in enumerate(self.table.blocks(request, first_token)):
                begin = c * self.table.copy_rows
                unknown = jnp.where(self.table.known(block), 0, self.table.copy_rows)
                clear(begin, begin + unknown)
            plgpu.commit_smem()

    def mask(self, place: Place, scores):
        """The scores [64, N] of a tile, with those of keys that a row does not see masked."""
        source = self.source
        mask = partial(
            apply_mask, table=self.table, request=place.request, first_token=place.first_token, first_row=0,
            ends=place.ends, tokens=source.tokens, heads=source.group, keys=0, window=source.window, ahead=source.ahead,
        )  # fmt: skip
        return lax.cond(place.masked, mask, lambda s: s, scores)


@dataclass(frozen=True)
class PageLoader:
    """Copies tiles of keys from pages, by TMA."""

    keys: PageKeys
    paged: Any

    def look_up(self, tile: WorkTile, step):
        """Loads what `fetch` needs; call it one tile ahead, so that nothing waits for these loads."""
        return self.paged.look_up(tile.request, tile.origin + step * TILE)

    def fetch(self, found, tile: WorkTile, step, stage) -> None:
        """Starts the copies of a tile that was looked up."""
        parts = self.keys.source.tiles.parts(self.keys.raw, stage, self.keys.k_full.at[stage])
        self.paged.fetch(found, tile.origin + step * TILE, *parts)


def _scales(call: DecodeMLA | DecodeKV | DecodeMLASparse) -> tuple[jax.Array, ...]:
    """The scales of keys and of values, float32 [1] or [heads]; none for entries with scales of their own."""
    if isinstance(call, DecodeMLA | DecodeMLASparse):
        return () if call.kv_scale is None else (jnp.reshape(call.kv_scale, (1,)),) * 2
    return tuple(jnp.reshape(scale, (-1,)) for scale in (call.k_scale, call.v_scale) if scale is not None)


def attend(
    call: DecodeMLA | DecodeKV | DecodeMLASparse,
    plan: Plan,
    queries: Sequence[jax.Array],
    config: QuantisedSwapABConfig,
    *,
    interpret: bool,
) -> KernelResults:
    """Results of whole requests and splits, whose first axis is that of requests or splits x heads.

    `queries` are those of `call` as bf16 [B * heads, rows, ...], with 8 or 16 rows: query tokens x query heads of a KV
    head.  For sparse attention, each query token is a request of its own.
    """
    tiles = tiles_of(call.entry, call.pages, interpret=interpret)
    source = SlotSource(call, interpret) if isinstance(call, DecodeMLASparse) else PageSource(call, tiles)
    logit_cap, scales, pages = call.logit_cap, _scales(call), source.pages
    batch, rows, _ = queries[0].shape
    dtype, width = queries[0].dtype, GROUP * tiles.value_groups
    consumers, query_stages = config.consumers, config.query_stages
    stages = tiles.stages(config.stages, consumers)
    scaled = tiles.scaled
    parts_at_once = 1 if tiles.weight_groups > 1 else tiles.value_groups  # parts of a result in `other`: as many as fit
    lift = 2.0 ** (14 - config.rescale_threshold)

    def body(*refs, **scratch):
        q_refs, refs = refs[: len(queries)], refs[len(queries) :]
        kv_refs, refs = refs[: len(source.operands)], refs[len(source.operands) :]
        (
            table_ref, layer_ref, scale_ref, *scale_refs, partitions_ref, work_tiles_ref, split_requests_ref,
            out_ref, lse_ref, split_out_ref, split_lse_ref, split_scale_ref,
        ) = refs  # fmt: skip
        q, raw, p, other, stats = (scratch[name] for name in ("q", "raw", "p", "other", "stats"))
        q_full, q_free, k_free, given, taken = (
            scratch[name] for name in ("q_full", "q_free", "k_free", "given", "taken")
        )
        keys = source.keys(kv_refs, table_ref, scratch)
        if not plan.whole:  # otherwise the next kernel may be one of XLA's, instead of `combine`
            pdl_launch_dependents(split_requests_ref, interpret=interpret)
        partition, head, wg = (lax.axis_index(axis) for axis in ("partition", "head", "wg"))
        in_cache = (layer_ref[0] >= 0) & (layer_ref[0] < pages.num_layers)
        first, work_end, first_tile = load_work_range(partitions_ref, partition)

        def query_stage_of(n):
            return lax.rem(n - first, jnp.int32(query_stages))

        def stage_of(used):
            return lax.rem(used, jnp.int32(stages))

        def place_of(n):
            """The index of this head in arrays of requests x heads, or splits x heads."""
            return n * pages.num_heads + head

        def producer():
            plgpu.set_max_registers(config.producer_registers, action="decrease")
            loader = keys.loader(layer_ref[0], in_cache, head)

            def fetch(tile, step, carry):
                used, found = carry
                stage = stage_of(used)
                # These loads proceed while the producer waits for k_free.
                next_found = loader.look_up(tile, step + 1)

                @pl.when(used >= stages)
                def _():
                    plgpu.barrier_wait(k_free.at[stage])

                loader.fetch(found, tile, step, stage)
                return used + 1, next_found

            def store_queries(loaded, n):
                stage = query_stage_of(n)

                @pl.when(n - first >= query_stages)
                def _():
                    plgpu.barrier_wait(q_free.at[stage])

                tiles.store_queries(q, stats, stage, loaded)
                plgpu.commit_smem()
                plgpu.barrier_arrive(q_full.at[stage])

            def run(n, carry):
                used, found, tile = carry
                next_tile = load_work_tile(work_tiles_ref, n + 1)
                loaded = tiles.load_queries(q_refs, place_of(tile.request))
                # At first, all stages are free, so their copies need not wait for the queries.
                early = jnp.minimum(tile.begin + jnp.where(n == first, stages, 1), tile.end)
                one = partial(fetch, tile)
                carry = lax.fori_loop(tile.begin, early, one, (used, found))
                store_queries(loaded, n)
                # Early, while entries of this work tile are still to be fetched.
                next_found = loader.look_up(next_tile, next_tile.begin)
                used, _ = lax.fori_loop(early, tile.end, one, carry)
                return used, next_found, next_tile

            found = loader.look_up(first_tile, first_tile.begin)
            used, *_ = lax.fori_loop(first, work_end, run, (jnp.int32(0), found, first_tile))

            @pl.loop(jnp.maximum(used - stages, 0), used)
            def _(use):
                plgpu.barrier_wait(k_free.at[stage_of(use)])  # every completion of a barrier must be waited for

            @pl.loop(jnp.maximum(work_end - query_stages, first), work_end)
            def _(n):
                plgpu.barrier_wait(q_free.at[query_stage_of(n)])

        def consumer(side):
            plgpu.set_max_registers(consumer_registers(config.producer_registers, consumers), action="increase")
            softmax = OnlineSoftmax(
                keys=0, threshold=config.rescale_threshold, interpret=interpret,
                max_over_keys=lambda s: tiles.over_warps("max", s, stats, side),
            )  # fmt: skip
            # One scale for all heads, or one for each.
            key_scale, value_scale = [ref[head if ref.shape[0] > 1 else 0] for ref in scale_refs] or (1.0, 1.0)
            scale = scale_ref[0] * LOG2E * (key_scale * tiles.unit)

            query_columns = [
                lambda stage, ref=ref, n=n: ref.at[stage, :, pl.ds(KEY_GROUP * n, KEY_GROUP)]
                for ref, groups in zip(q, tiles.query_groups, strict=True)
                for n in range(groups)
            ]

            def multiply(acc, a, b):
                """Starts acc += a @ b with `a` in registers, or for the interpreter in shared memory."""
                if interpret:
                    name = "operand_keys" if a.shape[0] == TILE else "operand_values"
                    operand = scratch[f"{name}_{a.dtype}"].at[side]
                    operand[...] = a
                    plgpu.commit_smem()
                    a = operand
                plgpu.wgmma(acc, a, b)

            def wait_for_products():
                if not interpret:
                    plgpu.wgmma_wait(0)

            def scores(stage, z, query_stage, row_scale):
                """Scores of a tile, to base 2, and the scales of its values, if tokens have any."""

                def product(*accs):
                    loaded = [tiles.load_keys(raw, stage, n) for n in batches[0][0]]
                    for batch, following in batches:
                        operands = [tiles.convert_keys(x, n) for x, n in zip(loaded, batch, strict=True)]
                        loaded = [tiles.load_keys(raw, stage, n) for n in following]
                        wait_for_products()  # of the previous batch, which ran during the conversion
                        for operand, n in zip(operands, batch, strict=True):
                            columns = query_columns[n](query_stage + z).transpose((1, 0))
                            multiply(accs[tiles.score_group(n)], operand, columns)
                    return [acc[...] for acc in accs]

                batches = tiles.key_batches(config.keys_at_once)
                scales, weight_scales = tiles.load_scales(raw, stage)
                sums = pl.run_scoped(product, *[plgpu.ACC((TILE, N), jnp.float32)] * tiles.score_groups)
                scaled_sums = [x * over_columns(scale, N) for x, scale in zip(sums, scales, strict=False)]
                *others, last = *scaled_sums, *sums[len(scales) :]
                return reduce(jnp.add, others, last) * over_rows(row_scale, TILE), weight_scales

            def add_values(acc, stage, z):
                """acc + V' P', with P in shared memory."""

                def product(*refs):
                    for ref, x in zip(refs, acc, strict=True):
                        if not interpret:
                            ref[...] = x
                    batches = tiles.value_batches(config.values_at_once)
                    loaded = [tiles.load_values(raw, stage, step) for step in batches[0][0]]
                    for batch, following in batches:
                        ahead = [tiles.load_values(raw, stage, step) for step in following]
                        if not ahead:
                            plgpu.barrier_arrive(k_free.at[stage])
                        operands = [[tiles.convert_values(x, n) for n in range(tiles.value_groups)] for x in loaded]
                        wait_for_products()
                        for step, own in zip(batch, operands, strict=True):
                            for n, (ref, operand) in enumerate(zip(refs, own, strict=True)):
                                weights = p.at[z + side, n if tiles.weight_groups > 1 else 0, pl.ds(N * step, N)]
                                multiply(ref, operand, weights)
                        loaded = ahead
                    return [ref[...] for ref in refs]

                found = pl.run_scoped(product, *[plgpu.ACC((GROUP, N), jnp.float32)] * tiles.value_groups)
                return [a + b for a, b in zip(acc, found, strict=True)] if interpret else found

            def step(request, origin, ends, unmasked, query_stage, row_scale, begin, used, i, carry):
                acc, running_max, row_sum = carry
                stage = stage_of(used + i - begin)
                # Otherwise the descriptors of latents would be hoisted out of the loop, and spill.
                z = opaque_zero(i) if tiles.value_groups > 2 else 0
                first_token = origin + i * TILE
                masked = (i < unmasked[0]) | (i >= unmasked[1])
                keys.wait(stage, used + i - begin)
                place = Place(stage, request, first_token, ends, masked)
                keys.clear_unseen(place)
                s, weight_scales = scores(stage, z, query_stage, row_scale)
                if logit_cap is not None:
                    s = cap_scores(s, logit_cap)
                s = keys.mask(place, s)
                factor, logarithm = inverse_of_largest(weight_scales) if scaled else (None, None)
                if logarithm is not None:
                    s = s + over_columns(logarithm, N)
                running_max, *acc, row_sum = softmax.update(s, running_max, *acc, row_sum)
                w = softmax.weights(s, running_max)
                if factor is None:
                    p.at[z + side, 0][...] = (w * lift).astype(p.dtype)
                else:
                    for n, weight_scale in enumerate(weight_scales):
                        p.at[z + side, n][...] = (w * over_columns(weight_scale * factor * lift, N)).astype(p.dtype)
                    w = w * over_columns(factor, N)
                plgpu.commit_smem()
                acc = add_values(acc, stage, z)
                return acc, running_max, row_sum + w

            def inverse_of_largest(weight_scales):
                """The inverse and the logarithm of each token's largest scale, rounded down to a power of two."""
                bits = lax.bitcast_convert_type(reduce(jnp.maximum, [jnp.abs(x) for x in weight_scales]), jnp.int32)
                largest = jnp.clip(bits & EXPONENT, LEAST_FACTOR, MOST_FACTOR)
                inverse = lax.bitcast_convert_type(INVERSE - largest, jnp.float32)
                return inverse, ((largest >> 23) - 127).astype(jnp.float32)

            def of_this_consumer(begin, end, used, step, carry):
                """Runs `step` for the tiles of this consumer: those with used + i - begin = side, modulo consumers."""
                mine = begin + lax.rem((consumers - 1) * used + side, jnp.int32(consumers))
                count = lax.div(jnp.maximum(end - mine, 0) + (consumers - 1), jnp.int32(consumers))
                return lax.fori_loop(0, count, lambda n, carry: step(mine + consumers * n, carry), carry)

            rounds = [range(at, at + parts_at_once) for at in range(0, tiles.value_groups, parts_at_once)]

            def give(n, acc, running_max, row_sum):
                giver = side - 1
                for i, parts in enumerate(rounds):

                    @pl.when((n > first) | (i > 0))
                    def _():
                        plgpu.barrier_wait(taken.at[giver])

                    if i == 0:
                        stats[2 * giver], stats[2 * giver + 1] = running_max, row_sum
                    for place, part in enumerate(parts):
                        other.at[giver, place][...] = acc[part]
                    plgpu.barrier_arrive(given.at[giver])

            def take(n, acc, running_max, row_sum):
                """The result of all consumers, normalized, and its log-sum-exps."""
                givers = range(consumers - 1)
                states = [(running_max, row_sum)]
                for giver in givers:
                    plgpu.barrier_wait(given.at[giver])
                    their_max, their_sum = (plgpu.load(stats.at[2 * giver + i], layout=COLUMN) for i in range(2))
                    states.append((their_max, their_sum))
                factors, inverse, lse = softmax.merge(*states)
                inverse = inverse * (tiles.unit / lift * value_scale)
                own, *others = [over_rows(factor * inverse, GROUP) for factor in factors]
                merged = []
                for i, parts in enumerate(rounds):
                    sums = [acc[part] * own for part in parts]
                    for giver, factor in zip(givers, others, strict=True):
                        if i > 0:
                            plgpu.barrier_wait(given.at[giver])
                        for place in range(len(parts)):
                            theirs = plgpu.load(other.at[giver, place], layout=WGMMA)
                            sums[place] = sums[place] + theirs * factor

                        @pl.when((n < work_end - 1) | (i < len(rounds) - 1))
                        def _(giver=giver):
                            plgpu.barrier_arrive(taken.at[giver])

                    merged += sums
                return merged, lse

            def store_result(request, split, acc, lse):
                @pl.when(split < 0)
                def _():
                    tiles.store_rows(out_ref, place_of(request), [x.astype(dtype) for x in acc])
                    store(lse_ref.at[place_of(request)], lse[:rows] * (1 / LOG2E))

                @pl.when(split >= 0)
                def _():
                    halves = [jnp.abs(x[at : at + TILE]) for x in acc for at in (0, TILE)]
                    magnitude = split_scale(tiles.over_warps("max", reduce(jnp.maximum, halves), stats, side))
                    factor = over_rows(1 / magnitude, GROUP)
                    values = [lax.bitcast_convert_type((x * factor).astype(SPLIT_DTYPE), dtype) for x in acc]
                    tiles.store_rows(split_out_ref, place_of(split), values)
                    store(split_lse_ref.at[place_of(split)], lse[:rows])
                    store(split_scale_ref.at[place_of(split), 0], magnitude[:rows])

            def run(n, carry):
                used, tile = carry
                request, begin, end, split, origin = tile.request, tile.begin, tile.end, tile.split, tile.origin
                next_tile = load_work_tile(work_tiles_ref, n + 1)  # the loads proceed while this one is computed
                seen, unmasked_end = (jnp.where(in_cache, x, 0) for x in (origin + tile.keys, tile.unmasked_end))
                ends = ends_of(tile, seen)
                unmasked_begin = 0 if source.window is None else first_unmasked(tile, TILE, source.window)
                query_stage = query_stage_of(n)
                plgpu.barrier_wait(q_full.at[query_stage])
                row_scale = plgpu.load(stats.at[INVERSES + query_stage], layout=COLUMN) * scale
                carry = [zeros(GROUP, N)] * tiles.value_groups, softmax.empty_max(N), zeros(TILE, N)
                unmasked = unmasked_begin, unmasked_end
                one = partial(step, request, origin, ends, unmasked, query_stage, row_scale, begin, used)
                acc, running_max, row_sum = of_this_consumer(begin, end, used, one, carry)
                plgpu.barrier_arrive(q_free.at[query_stage])
                row_sum = tiles.over_warps("add", row_sum, stats, side)
                lax.cond(
                    side == 0,
                    lambda: store_result(request, split, *take(n, acc, running_max, row_sum)),
                    lambda: give(n, acc, running_max, row_sum),
                )
                return used + end - begin, next_tile

            lax.fori_loop(first, work_end, run, (jnp.int32(0), first_tile))

        lax.cond(wg == consumers, producer, partial(consumer, wg))

    def narrow(*shape, dtype, swizzle):
        """Shared memory in swizzled tiles of 8 by 16."""
        return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, N)), plgpu.SwizzleTransform(swizzle)))

    # The interpreter needs register operands of wgmma in shared memory.
    operands = {}
    if interpret:
        operands = {f"operand_keys_{d}": swizzled(consumers, TILE, KEY_GROUP, dtype=d) for d in ("float16", "bfloat16")}
        operands["operand_values_float16"] = narrow(consumers, GROUP, N, dtype=jnp.float16, swizzle=32)
    results = kernel(
        body,
        interpret=interpret,
        auto_barriers=False,
        out_type=result_types(
            (batch,), plan.max_splits * pages.num_heads, dtype,
            rows=rows, width=width, lse=rows, split_lse=rows, scales=1,
        ),
        grid=(plan.num_partitions, pages.num_heads),
        grid_names=("partition", "head"),
        num_threads=consumers + 1,
        thread_name="wg",
        kernel_name="decode_quantised",
        scratch_types={
            "q": tuple(
                swizzled(query_stages, N, KEY_GROUP * groups, dtype=d)
                for groups, d in zip(tiles.query_groups, tiles.query_dtypes, strict=True)
            ),
            "raw": tiles.raw_types(stages),
            "p": narrow(consumers, tiles.weight_groups, TILE, N, dtype=jnp.float16, swizzle=32),
            "other": narrow(consumers - 1, parts_at_once, GROUP, N, dtype=jnp.float32, swizzle=64),
            "stats": plgpu.SMEM((source.stats, N), jnp.float32),
            "q_full": plgpu.Barrier(num_barriers=query_stages),
            "q_free": plgpu.Barrier(num_arrivals=consumers, num_barriers=query_stages),
            **source.memory(stages),
            "k_free": plgpu.Barrier(num_barriers=stages),
            "given": plgpu.Barrier(num_barriers=consumers - 1),
            "taken": plgpu.Barrier(num_barriers=consumers - 1),
            **operands,
        },
    )(
        *queries, *source.operands, source.table, jnp.reshape(call.layer, (1,)),
        jnp.reshape(call.scale, (1,)), *scales, plan.partitions, plan.work_tiles, plan.split_requests,
    )  # fmt: skip
    return KernelResults(*results)
