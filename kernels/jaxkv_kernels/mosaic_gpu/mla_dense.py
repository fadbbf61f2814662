"""MLA decode in tiles of 64 rows: two consumer warpgroups share each pair of key tiles.

Work.  A tile is 64 rows (query tokens x heads of a request) by 64 keys.  A CTA owns 64 rows and walks its partition of
the plan: work tiles, each a range of pairs of key tiles of a request.  If the rows of a request are an even number of
tiles (65 to 128 rows, say), two CTAs form a cluster, and TMA multicast brings each key tile to both.  With an odd
number (up to 64 rows, or 129 to 192) there is no such cluster.  If the plan is shared, which takes a single tile of
rows, two CTAs form a cluster as well: each has half of the keys of a work tile, and the two merge their results at its
end (`cluster_sharing.py`).

Timeline of a pair, whose key tiles are K0 and K1, downwards.  Each consumer warpgroup holds half of the output O, 64 x
256 float32 in 128 registers per lane if latents are of 512 values.  `->` names the barrier that a line waits for
(producer: on the next line).

    producer                       consumer 0                          consumer 1
    K0 left + rope, K0 right       S0 = Q K0'        -> k_full, r_full
    (-> k_free[0], k_free[1])        arrives s_issued
    K1 right + rope, K1 left       softmax, P0: arrives p_ready[0]     S1 = Q K1'         -> s_issued, k_full, r_full
    (-> k_free[3], k_free[2])      O0 += P0 K0 left                    O1 += P0 K0 right  -> p_ready[0]
    next pair to the L2 cache        arrives k_free[0]                   meanwhile softmax, P1: arrives p_ready[1]
    (-> k_full[0], k_full[1])      O0 += P1 K1 left  -> p_ready[1]       arrives k_free[1]
                                     arrives k_free[2]                 O1 += P1 K1 right, arrives k_free[3]

The columns are `Producer.pair`, `Consumer.pair_of_consumer_0` and `Consumer.pair_of_consumer_1`.  `Consumer.scores`
computes S0 and S1.  It multiplies each by the softmax scale, times log2(e), as soon as the product is complete: before
the logit cap, the mask and the softmax.  `Consumer.add_values` computes the products that are added to O.

Only CTAs that share key tiles prefetch to the L2 cache, and only if `prefetch` is set and tokens are contiguous.  If a
pair needs a mask, scores are masked before the softmax, and each consumer zeroes the values of unseen tokens in its own
half of the tile before it multiplies them.

Around the pairs of a work tile (`Producer.fetch_queries`; `load_queries` of the tiles, and `Consumer.work_tile`):

    producer                       consumers
    after K0 of the first pair,    -> qr_full: rotary queries from p[0] to registers; both arrive and wait on `both`
    the queries of the work tile   -> q_full: the pairs; after S0 and S1 of the last pair both arrive q_free
    (-> q_free, for Q)             consumer 1 arrives p_free after O1 += P0 K0 right of the last pair
    (-> p_free, for p[0])          results, staged in K1: arrive k_free[2], k_free[3] once TMA has read them

The longest dependency cycle is S0, P0, the release of K0 and the load of the next K0.  It determines the time per pair.
Both consumers therefore add P0 K0 before P1 K1, and S1 waits until all products of S0 have been issued.  Each consumer
passes its P and the running max (in `stats`) to the other through shared memory, and sums the weights of its own tiles.

The queries of a CTA's first work tile are fetched before all keys.

Latents have up to 512 values, and their halves are of the same multiple of 64 columns.  If a latent is not a multiple
of 128, columns at the end of the second half are not part of it.  Rotary queries of fewer than 64 values stay in shared
memory of their own.

Barriers (mbarriers; the fields of `Barriers`), and how many arrivals complete them: of TMA copies for `full`, of
consumers for the others.  `PlainTiles.types` has their counts.
    q_full, qr_full    the queries have landed (2: halves); their rotary part has landed in p[0] or `qr` (1)
    q_free, p_free     both consumers have multiplied with the queries for the last time (2); consumer 1 has multiplied
                       P0 of the last pair, so rotary queries may land in p[0] (1).  So the queries of the next work
                       tile are loaded while this one ends.
    k_full[2t + h]     half h of key tile t has landed (1 per page); r_full[t]: its rotary part has landed (1 per page)
    k_free[2t + h]     consumer h is done with this half; the other one has only computed scores from it, before (1
                       per CTA of the cluster).  k_free[0] also frees K0's rotary part, and k_free[3] K1's.  K1's halves
                       stage the result of a work tile, and are freed once TMA has read it.  In a cluster with
                       multicast, one thread of the consumer arrives for each CTA (Pallas's ClusterBarrier), without
                       waiting for the other warps: like CUTLASS's pipelines, this relies on wgmma completing for the
                       warpgroup.
    s_issued           S0's products have been issued (1)
    p_ready[t]         P of tile t is in p[t], and the running max after tile t is in stats[0] (1)
    both               both consumers arrive, and both wait (2): both have read the rotary queries, which P0 overwrites;
                       the row sums of both are in stats[1:3]
These order every reuse of `p` and `stats`:
    P0, stats[0] by consumer 0    after p_ready[1], and after K0 has landed again, which consumer 1 allowed (k_free[1])
                                  when it was done with P0
    P1, stats[0] by consumer 1    after the next p_ready[0]
The kernel is compiled without the barriers that Mosaic GPU inserts by default (`auto_barriers`).  So what one thread
stores to shared memory is visible to others only (a) to TMA and wgmma after `commit_smem`, or (b) after a wait for
`both`.

A warpgroup must wait for every completion of a barrier that it waits on, because Pallas keeps one phase bit per barrier
and warpgroup.  The consumers take key tiles in turn.  Each stage must therefore always belong to the same consumer: the
number of stages is even.

Budget, for latents of 512.  Shared memory: Q 64 KiB + K 128 KiB + rotary keys 16 KiB + P 16 KiB + stats and barriers 1
KiB = 225 KiB of 227.  Registers: 240 per lane for consumers, 24 for the producer; ptxas reports 168, what a lane has
before `set_max_registers`.

Quantised entries (`fp8`).  The stored bytes of half a tile take half the shared memory of its float16 values.  TMA
copies them to the first half of that memory, and the producer converts them to float16 in place
(`E4M3Tiles.convert`): it waits for k_landed and arrives k_full, in the order in which the consumers use the halves.
Both CTAs of a cluster convert all keys.  If each converted half of a tile and stored it to the shared memory of both,
128 requests of 4,096 tokens with 128 heads would take 0.416 ms on an H100 instead of 0.278 (`gather_keys.py`).
The timeline of the consumers is the same.  `E4M3Tiles` has all differences from `PlainTiles`, which leave enough
registers for the producer:

- Queries become float16, scaled to fit (`queries.py`).  Their rotary part stays in shared memory, so there is
  no p_free, and q_full also covers it.
- P0 and P1 use the same shared memory: consumer 1 stores P1 once it has multiplied P0.
- Pairs that need a mask have loops of their own (`loops`), so that the loop over the others keeps no operands of masks
  live.
- The rotary keys are converted with the first half of their tile.  Its k_full covers them, so there is no r_full.
- The single scale of all entries is part of the softmax scale, and also multiplies the result.
Shared memory is then Q 72 KiB + K 128 KiB + rotary keys 16 KiB + P 8 KiB + stats 2 KiB = 226 KiB; registers are 216 per
lane for consumers and 72 for the producer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.addressing import dtype_of
from jaxkv_kernels.calls import DecodeCall, DecodeMLA, PlanDecode
from jaxkv_kernels.mosaic_gpu import cluster_sharing, masks
from jaxkv_kernels.mosaic_gpu.attention_reasons import latent_sizes, plain_latents
from jaxkv_kernels.mosaic_gpu.epilogue import HalvesEpilogue, KernelResults, half_columns, result_types
from jaxkv_kernels.mosaic_gpu.layout_reasons import block_sizes, steps, unaligned
from jaxkv_kernels.mosaic_gpu.paged_tma import Columns, PagedKeys, PageTable, copies_per_tile, token_rows
from jaxkv_kernels.mosaic_gpu.ptx import conversions_in_place
from jaxkv_kernels.mosaic_gpu.queries import fit_queries
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import LOG2E, cap_scores, multiply_add, opaque_zero, register_operand
from jaxkv_kernels.mosaic_gpu.runtime.device import consumer_registers
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel, pdl_launch_dependents
from jaxkv_kernels.mosaic_gpu.runtime.registers import LANE_COLUMNS, ROW, WGMMA, fold_columns, over_columns, zeros
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import rotary_type, swizzled
from jaxkv_kernels.mosaic_gpu.sizes import HALF, PAIR, ROPE, TILE
from jaxkv_kernels.mosaic_gpu.softmax import THRESHOLDS, OnlineSoftmax, check_threshold
from jaxkv_kernels.mosaic_gpu.tile_scheduler import (
    CTAS,
    PAIR_COSTS,
    SplitCosts,
    WorkTile,
    load_work_range,
    load_work_tile,
)
from jaxkv_kernels.mosaic_gpu.token_rows import in_entries_dtype
from jaxkv_kernels.tuning import require

DTYPE = jnp.dtype(jnp.float16)
"""The dtype to which quantised keys are converted."""
Q_MAX = 3
"""The row of `stats` with the largest magnitudes of queries that consumer 0 finds; the next is consumer 1's."""


@dataclass(frozen=True, kw_only=True)
class MLADenseConfig:
    """`decode_mla` with more than SWAP_AB_ROWS rows per request."""

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {
        "prefetch": (True, False),
        "rescale_threshold": THRESHOLDS,
        "producer_registers": (24, 40),
        "split_costs": tuple(replace(PAIR_COSTS, overhead=overhead) for overhead in (1, 2, 4)),
    }

    producer_registers: int = 24
    """Registers per lane of the producer warpgroup.  The consumers get the rest, 240 each: an output half takes 128."""
    rescale_threshold: int = 8
    """How far, in powers of 2, a score may exceed the running maximum before sums are rescaled.  At 8, sums are nearly
    never rescaled after the first tiles, and weights of at most 256 lose no precision in bf16 or float16."""
    prefetch: bool = True
    """Whether a cluster prefetches its next pair of tiles to the L2 cache, where a page is contiguous.  CTAs without a
    cluster never prefetch: they are memory-bound, and lose 10 % to the additional requests."""
    split_costs: SplitCosts = PAIR_COSTS
    """In steps of two tiles.  For each request, a CTA loads 64 KiB of queries and stores 64 KiB of results."""

    def __post_init__(self):
        require(self.producer_registers in (24, 40, 56), self, "producer_registers", "24, 40 or 56")
        check_threshold(self)


def default_config(rows: int) -> MLADenseConfig:
    """The default configuration of a `decode_mla` call with `rows` rows per request.

    With up to TILE rows, an overhead of 1 instead of 2 steps is faster: 64 requests of 256 to 1,024 tokens, with 16
    heads and 4 query tokens, take 0.0309 ms instead of 0.0320.  Clusters, which have more rows, are up to 1 % slower.
    With `split` of 16, a plan would leave such requests whole, which takes 0.0376 ms.
    """
    return MLADenseConfig(split_costs=replace(PAIR_COSTS, overhead=1, split=4)) if rows <= TILE else MLADenseConfig()


@dataclass(frozen=True, kw_only=True)
class QuantisedMLADenseConfig:
    """`decode_mla` with more than SWAP_AB_ROWS rows per request, and quantised entries."""

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {
        "prefetch": (True, False),
        "producer_registers": (56, 72, 88),
        "rescale_threshold": THRESHOLDS,
        "split_costs": tuple(replace(PAIR_COSTS, overhead=overhead) for overhead in (1, 2, 4)),
    }

    producer_registers: int = 72
    """Registers per lane of the producer warpgroup, which holds half a tile of keys, 32 registers, to convert it."""
    prefetch: bool = True
    """As in MLADenseConfig."""
    rescale_threshold: int = 8
    """As in MLADenseConfig."""
    split_costs: SplitCosts = PAIR_COSTS
    """In steps of two tiles, as in MLADenseConfig."""

    def __post_init__(self):
        require(self.producer_registers in (56, 72, 88), self, "producer_registers", "56, 72 or 88")
        check_threshold(self)


def unsupported_reasons(call: DecodeCall | PlanDecode) -> Iterator[str]:
    """Reasons against attending to the entries of this call."""
    if not call.entry.quantised:
        yield from plain_latents(call)
        return
    yield from latent_sizes(call.entry)
    yield from block_sizes(call.pages)
    yield from unaligned(steps(call.pages, ("layer", "token")), dtype_of(call.buffer).itemsize)


def attend(
    call: DecodeMLA,
    queries: Sequence[jax.Array],
    config: MLADenseConfig | QuantisedMLADenseConfig,
    *,
    interpret: bool,
) -> KernelResults:
    """Results of whole requests and splits, by the plan of `call`.

    `queries` are those of `call` as [B, rows, R] and, if entries have a rotary part, [B, rows, P], with a multiple of 8
    rows.  With a QuantisedMLADenseConfig, entries are e4m3 and have 512 + 64 values.
    """
    return MLADense(call, queries, config, interpret=interpret).run()


class Operands(NamedTuple):
    """The arrays that the kernel reads; in the kernel, references to them."""

    q: Any
    """Queries [B, rows, R]."""
    qr: Any
    """Rotary queries [B, rows, P]; None if entries have no rotary part."""
    kv: Any
    """The cache, in the view of `token_rows`."""
    block_tables: Any
    layer: Any
    """int32 [1]."""
    scale: Any
    """The softmax scale, float32 [1]."""
    kv_scale: Any
    """The scale of quantised entries, float32 [1]; None for others."""
    partitions: Any
    """Of the plan, like the next two."""
    work_tiles: Any
    split_requests: Any


class Memory(NamedTuple):
    """Shared memory: operands of the products, and the places where TMA puts them, which are the same memory."""

    q: Any
    """Queries [2, 64, half]: halves."""
    qr: Any
    """Rotary queries [64, P].  They are p[0] if P0 may overwrite them; None if entries have no rotary part."""
    k: Any
    """Keys [2, 2, 64, half]: key tiles, halves."""
    r: Any
    """Rotary keys [2, 64, P]: key tiles; None if entries have no rotary part."""
    q_in: Any
    """Where queries land: `q` in their dtype."""
    qr_in: Any
    """Where rotary queries land: `qr` in their dtype."""
    k_in: Any
    """Where keys land, by key tile and half: `k` as keys are stored."""
    r_in: Any
    """Where rotary keys land, by key tile: `r` as they are stored."""
    results: Any
    """`k` in the dtype of results, which are staged there."""
    p: Any
    """Weights [tiles, 64, 64]: P0 and P1, or a single tile for both in turn."""
    stats: Any
    """float32 [3 or 5, 64]: the running max, and the row sums of each consumer; for quantised entries, the largest
    magnitudes of the queries that each consumer finds, from row Q_MAX on."""
    register_operands: Any
    """Register operands of wgmma [2 or 4, 64, 64], which the interpreter needs in shared memory; None on a GPU."""

    def p_stage(self, t: int) -> int:
        """The index of P of key tile `t` in `p`."""
        return t % self.p.shape[0]


class Barriers(NamedTuple):
    """The barriers of the table at the head of this file."""

    q_full: Any
    qr_full: Any
    q_free: Any
    p_free: Any
    """None if rotary queries stay in memory of their own.  Otherwise P1 must have memory of its own."""
    k_landed: Any
    """By 2t + h, like k_full and k_free.  The same barriers as k_full, unless the producer converts keys."""
    r_landed: Any
    """By key tile.  The same barriers as r_full, unless the producer converts keys."""
    k_full: Any
    r_full: Any
    """None if k_full covers rotary keys."""
    k_free: Any
    s_issued: Any
    p_ready: Any
    both: Any

    def wait_for_both(self) -> None:
        """Called by both consumers; returns when both have called it."""
        plgpu.barrier_arrive(self.both)
        plgpu.barrier_wait(self.both)


class Queries(NamedTuple):
    """What a consumer has of the queries besides those in shared memory."""

    rope: Any
    """The rotary queries, an operand of wgmma; None if entries have no rotary part."""
    factor: Any
    """The factor of the scores, in base 2: a scalar, or one per row."""


class MLADense:
    """The kernel for calls of these shapes: its sizes, its memory, and its launch."""

    def __init__(self, call: DecodeMLA, queries: Sequence[jax.Array], config, *, interpret: bool):
        self.call, self.plan, self.config, self.interpret = call, call.plan, config, interpret
        self.q, self.qr, *_ = *queries, None
        self.batch, self.rows, self.latent = self.q.shape
        self.rope = 0 if self.qr is None else self.qr.shape[-1]
        _, self.tokens, self.heads, _ = call.q_latent.shape
        self.buffer, self.pages = in_entries_dtype(call.buffer, call.pages, call.entry.dtype)
        self.view = token_rows(self.pages)
        self.half = -(-self.latent // (2 * TILE)) * TILE
        self.filled = self.half, self.latent - self.half  # columns of each half that belong to the latent
        self.row_tiles = -(-self.rows // TILE)
        self.cluster = 2 if self.row_tiles % 2 == 0 else 1  # CTAs that share key tiles by multicast
        self.groups = self.row_tiles // self.cluster
        # Rows of a tile in arrays with one value per row: TMA does not clip copies to them.
        self.stored = min(self.rows, TILE)
        quantised = isinstance(config, QuantisedMLADenseConfig)
        self.tiles_type = E4M3Tiles if quantised else PlainTiles
        self.dtype = self.q.dtype
        self.k_dtype = DTYPE if quantised else self.dtype
        self.prefetches = config.prefetch and self.cluster > 1 and self.pages.token_stride == self.pages.width
        self.softmax = OnlineSoftmax(keys=1, threshold=config.rescale_threshold, interpret=interpret)

    def run(self) -> KernelResults:
        """Launches a cluster per partition of the plan and group of row tiles."""
        call, plan = self.call, self.plan
        exchanged, exchange_scratch = (), {}
        if plan.shared:
            exchanged, exchange_scratch = cluster_sharing.exchange_types(
                plan.num_partitions, TILE, self.half, self.dtype
            )
        results, _ = kernel(
            self.cta,
            interpret=self.interpret,
            auto_barriers=False,
            out_type=(self.result_types(), exchanged),
            grid=(self.groups, plan.num_partitions),
            grid_names=("group", "partition"),
            cluster=(CTAS if plan.shared else self.cluster,),
            cluster_names=("cta",),
            num_threads=3,
            thread_name="wg",
            kernel_name="decode_mla",
            scratch_types=self.tiles_type.types(self) | exchange_scratch,
        )(
            Operands(
                q=self.q,
                qr=self.qr,
                kv=self.view.of(self.buffer),
                block_tables=call.block_tables,
                layer=jnp.reshape(call.layer, (1,)),
                scale=jnp.reshape(call.scale, (1,)),
                kv_scale=None if call.kv_scale is None else jnp.reshape(call.kv_scale, (1,)),
                partitions=plan.partitions,
                work_tiles=plan.work_tiles,
                split_requests=plan.split_requests,
            )
        )
        return results

    def result_types(self) -> KernelResults:
        """Shapes and dtypes of the results."""
        return result_types(
            (self.batch,),
            self.plan.max_splits,
            self.dtype,
            rows=self.rows,
            width=self.latent,
            split_width=2 * self.half,
            lse=(self.row_tiles - 1) * TILE + self.stored,
            split_lse=self.row_tiles * TILE,
            scales=2,
        )

    def cta(self, operands: Operands, results: KernelResults, exchanged, **scratch) -> None:
        """What a CTA runs; `exchanged` are the places of `cluster_sharing`, if the plan is shared."""
        pdl_launch_dependents(operands.split_requests, interpret=self.interpret)
        partition, group, rank, wg = (lax.axis_index(axis) for axis in ("partition", "group", "cta", "wg"))
        row_tile = group if self.plan.shared else group * self.cluster + rank
        cta = CTA(self, operands, self.tiles_type(self, scratch), partition, rank, row_tile * TILE)

        def consumer(side):
            exchange = None
            if self.plan.shared:
                exchange = cluster_sharing.Exchange.of(exchanged, partition, scratch, rank, interpret=self.interpret)
            Consumer(cta, side, results, exchange).run()

        # Nested branches: with three in a row, values that the last one needs would be live, and spilled, in the first.
        lax.cond(wg == 2, Producer(cta).run, lambda: lax.cond(wg == 0, partial(consumer, 0), partial(consumer, 1)))


class Work(NamedTuple):
    """The work of a CTA, and where the layer is."""

    first: Any
    """The index of the first work tile of its partition."""
    end: Any
    """The index after the last one."""
    tile: WorkTile
    """The CTA's part of the first one."""
    layer: Any
    in_cache: Any
    """Whether the layer is in the cache."""


@dataclass(frozen=True)
class CTA:
    """What producer and consumers of a CTA share."""

    kernel: MLADense
    operands: Operands
    tiles: "PlainTiles | E4M3Tiles"
    partition: Any
    rank: Any
    """The index of the CTA in its cluster."""
    first_row: Any
    """The first row of its tile."""

    @property
    def table(self) -> PageTable:
        """The block table."""
        return PageTable(self.operands.block_tables, self.kernel.pages)

    def load_work(self) -> Work:
        """The work of this CTA, and the layer, in independent loads."""
        first, end, tile = load_work_range(self.operands.partitions, self.partition)
        layer = self.operands.layer[0]
        return Work(first, end, self.own_part(tile), layer, (layer >= 0) & (layer < self.kernel.pages.num_layers))

    def load_tile(self, n) -> WorkTile:
        """This CTA's part of the n-th work tile."""
        return self.own_part(load_work_tile(self.operands.work_tiles, n))

    def own_part(self, tile: WorkTile) -> WorkTile:
        """The steps of a work tile that this CTA walks: all, unless the two CTAs of a cluster share its keys."""
        return cluster_sharing.own_steps(tile, self.rank, PAIR) if self.kernel.plan.shared else tile

    def from_origin(self, tile: "WorkTile | Pairs", token):
        """The position of a token that is counted from the work tile's origin, which is 0 without a window."""
        return token if self.kernel.call.window is None else tile.origin + token


class Pairs(NamedTuple):
    """What the producer holds of a work tile, in few registers."""

    request: Any
    begin: Any
    end: Any
    origin: Any
    """None without a window."""


class Producer:
    """The warpgroup that copies queries and keys to shared memory, and converts quantised keys there."""

    def __init__(self, cta: CTA):
        self.cta, self.kernel, self.tiles = cta, cta.kernel, cta.tiles
        self.memory, self.barriers = cta.tiles.memory, cta.tiles.barriers
        # Set by `run`, since they are computed from loads.
        self.paged: PagedKeys
        self.first: Any

    def run(self) -> None:
        """Walks the work tiles of the CTA."""
        plgpu.set_max_registers(self.kernel.config.producer_registers, action="decrease")
        work = self.cta.load_work()
        layer = jnp.where(work.in_cache, work.layer, 0)
        self.paged = PagedKeys(self.cta.operands.kv, self.kernel.view, self.cta.table, layer)
        self.first = work.first
        pl.when(work.end > work.first)(partial(self.fetch_queries, work.tile.request, again=False))  # before all keys
        lax.fori_loop(work.first, work.end, self.work_tile, (jnp.int32(0), self.pairs_of(work.tile)))
        pl.when(work.end > work.first)(self.wait_for_last_use)

    def work_tile(self, n, carry):
        """Fetches the keys of a work tile; `used` counts pairs."""
        used, pairs = carry
        start = used, self.look_up(pairs, pairs.begin), pairs
        used, _, next_pairs = lax.fori_loop(pairs.begin, pairs.end, partial(self.pair, n, pairs), start)
        return used, next_pairs

    def pair(self, n, pairs: Pairs, i, carry):
        """Fetches a pair of key tiles, in the order in which the consumers use them."""
        used, found, next_pairs = carry
        ahead = self.look_up(pairs, i + 1)  # the loads proceed while the producer waits for k_free
        self.fetch(found, pairs, i, 0, 0, used, with_rope=True)
        self.fetch(found, pairs, i, 0, 1, used)
        pl.when((i == pairs.begin) & (n > self.first))(partial(self.fetch_queries, pairs.request, again=True))
        self.tiles.convert(0)
        self.fetch(found, pairs, i, 1, 1, used, with_rope=True)
        self.fetch(found, pairs, i, 1, 0, used)
        if self.kernel.prefetches:
            self.tiles.wait_for_first_tile()  # all CTAs start at once: keys have priority
            pl.when(i + 1 < pairs.end)(partial(self.prefetch, ahead, pairs, i + 1))
        self.tiles.convert(1)
        # After the copies are issued, since spilling these values to local memory would wait for the load.
        next_pairs = lax.cond(i == pairs.begin, lambda: self.pairs_of(self.cta.load_tile(n + 1)), lambda: next_pairs)
        return used + 1, ahead, next_pairs

    def pairs_of(self, tile: WorkTile) -> Pairs:
        """What the producer holds of a work tile."""
        origin = None if self.kernel.call.window is None else tile.origin
        return Pairs(tile.request, tile.begin, tile.end, origin)

    def look_up(self, pairs: Pairs, i):
        """The blocks of both tiles of pair `i`."""
        tokens = (self.cta.from_origin(pairs, i * PAIR + t * TILE) for t in range(2))
        return tuple(self.paged.look_up(pairs.request, token) for token in tokens)

    def fetch(self, found, pairs: Pairs, i, t: int, half: int, used, *, with_rope: bool = False) -> None:
        """Fetches half a key tile, once it is free, and with `with_rope` the tile's rotary keys."""
        kernel, stage = self.kernel, 2 * t + half
        pl.when(used > 0)(lambda: plgpu.barrier_wait(self.barriers.k_free[stage]))
        into, landed = self.memory.k_in[t][half], self.barriers.k_landed[stage]
        parts = [Columns(half * kernel.half, kernel.half, into, landed)]
        if with_rope and kernel.rope:
            parts.append(Columns(kernel.latent, kernel.rope, self.memory.r_in[t], self.barriers.r_landed[t]))
        multicast = {"collective_axes": "cta"} if kernel.cluster > 1 else {}
        self.paged.fetch(found[t], self.cta.from_origin(pairs, (2 * i + t) * TILE), *parts, **multicast)

    def prefetch(self, found, pairs: Pairs, i) -> None:
        """Prefetches this CTA's tile of pair `i` to the L2 cache: one of the two that the cluster will fetch."""
        rank = self.cta.rank
        own = tuple(jnp.where(rank == 0, *each) for each in zip(*found, strict=True))
        token = self.cta.from_origin(pairs, (2 * i + rank) * TILE)
        self.paged.prefetch(own, token, interpret=self.kernel.interpret)

    def fetch_queries(self, request, *, again: bool) -> None:
        """Fetches the queries of a request; if `again`, waits until the previous ones are no longer needed."""
        kernel, memory, barriers = self.kernel, self.memory, self.barriers
        rows = pl.ds(self.cta.first_row, TILE)
        if again:
            plgpu.barrier_wait(barriers.q_free)
        for half in range(2):
            columns = half_columns(half, kernel.latent, request, kernel.half)
            source = self.cta.operands.q.at[request, rows, columns]
            plgpu.copy_gmem_to_smem(source, memory.q_in.at[half], barriers.q_full)
        if again and barriers.p_free is not None:
            plgpu.barrier_wait(barriers.p_free)
        if kernel.rope:
            plgpu.copy_gmem_to_smem(self.cta.operands.qr.at[request, rows], memory.qr_in, barriers.qr_full)

    def wait_for_last_use(self) -> None:
        """Waits for the last use of everything: a peer may still arrive on these barriers."""
        barriers = self.barriers
        plgpu.barrier_wait(barriers.q_free)
        if barriers.p_free is not None:
            plgpu.barrier_wait(barriers.p_free)
        for free in barriers.k_free:
            plgpu.barrier_wait(free)


class Walk(NamedTuple):
    """What the pairs of a work tile have in common."""

    tile: WorkTile
    ends: masks.Ends
    queries: Queries
    last: Any
    """The last pair."""


class Consumer:
    """Consumer `side` of two: it computes the scores of key tile `side` of each pair, and half `side` of the output."""

    def __init__(self, cta: CTA, side: int, results: KernelResults, exchange: cluster_sharing.Exchange | None):
        self.cta, self.side, self.kernel, self.tiles = cta, side, cta.kernel, cta.tiles
        self.results, self.exchange = results, exchange
        self.memory, self.barriers, self.softmax = cta.tiles.memory, cta.tiles.barriers, cta.kernel.softmax
        self.scratch = self.memory.register_operands.at[side] if self.kernel.interpret else None
        # Set by `run`, since they are loaded.
        self.work: Work
        self.scale: Any
        self.value_scale: Any

    def run(self) -> None:
        """Walks the work tiles of the CTA."""
        plgpu.set_max_registers(consumer_registers(self.kernel.config.producer_registers), action="increase")
        operands = self.cta.operands
        self.work = self.cta.load_work()
        self.value_scale = None if operands.kv_scale is None else operands.kv_scale[0]
        self.scale = operands.scale[0] * LOG2E
        lax.fori_loop(self.work.first, self.work.end, self.work_tile, self.work.tile)

    def work_tile(self, n, tile: WorkTile) -> WorkTile:
        """Attends to the keys of a work tile and stores the result; returns the next work tile."""
        kernel, side = self.kernel, self.side
        next_tile = self.cta.load_tile(n + 1)  # the loads proceed while this one is computed
        ends, unmasked = masks.seen_tokens(tile, self.work.in_cache, PAIR, kernel.call.window)
        queries = self.tiles.load_queries(side, self.scale, self.value_scale)
        walk = Walk(tile, ends, queries, tile.end - 1)
        if side == 0:
            self.share_max(self.softmax.empty_max(TILE))
        carry = zeros(TILE, kernel.half), self.softmax.empty_max(TILE), zeros(TILE, LANE_COLUMNS)
        for begin, end, is_masked in self.tiles.loops(tile, unmasked):
            carry = lax.fori_loop(begin, end, partial(self.pair, walk, is_masked), carry)
        self.store(walk, n, *carry)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.barriers.k_free[2 + side])
        return next_tile

    def pair(self, walk: Walk, is_masked, i, carry):
        """Attends to a pair of key tiles: the column of this consumer in the timeline."""
        step = (self.pair_of_consumer_0, self.pair_of_consumer_1)[self.side]
        return step(walk, i, is_masked(i), *carry)

    def pair_of_consumer_0(self, walk: Walk, i, masked, acc, old_max, row_sum):
        """S0, P0, and the left half of the values: O0 += P0 K0 left + P1 K1 left."""
        barriers, softmax, p = self.barriers, self.softmax, self.memory.p
        s0 = self.scores(walk, i, masked)
        max0 = softmax.update_max(s0, old_max, self.share_max)
        w0 = softmax.weights(s0, max0)
        p0 = w0.astype(p.dtype)
        self.share_weights(p0, 0)
        sum0 = fold_columns(jnp.add, w0)
        acc, row_sum = softmax.rescale(old_max, max0, acc, row_sum)
        acc, _ = self.add_values(p0, walk, i, 0, masked, acc)
        plgpu.barrier_arrive(barriers.k_free[0])

        plgpu.barrier_wait(barriers.p_ready[1])
        max1 = self.shared_max()
        acc, row_sum = softmax.rescale(max0, max1, acc, row_sum + sum0)
        p1 = p.at[opaque_zero(i) + self.memory.p_stage(1)]
        acc, _ = self.add_values(p1, walk, i, 1, masked, acc)
        pl.when(i != walk.last)(lambda: plgpu.barrier_arrive(barriers.k_free[2]))
        return acc, max1, row_sum

    def pair_of_consumer_1(self, walk: Walk, i, masked, acc, old_max, row_sum):
        """S1, P1, and the right half of the values: O1 += P0 K0 right + P1 K1 right."""
        barriers, softmax, p = self.barriers, self.softmax, self.memory.p
        has_own_memory = self.memory.p_stage(1) != 0  # P1; otherwise it overwrites P0, once that is multiplied
        s1 = self.scores(walk, i, masked)
        plgpu.barrier_wait(barriers.p_ready[0])
        max0 = self.shared_max()
        acc, row_sum = softmax.rescale(old_max, max0, acc, row_sum)

        def softmax_of_tile_1():
            max1 = softmax.update_max(s1, max0, self.share_max)
            w1 = softmax.weights(s1, max1)
            p1 = w1.astype(p.dtype)
            if has_own_memory:
                self.share_weights(p1, 1)
            return max1, p1, fold_columns(jnp.add, w1)

        p0 = p.at[opaque_zero(i)]
        acc, (max1, p1, sum1) = self.add_values(p0, walk, i, 0, masked, acc, meanwhile=softmax_of_tile_1)
        plgpu.barrier_arrive(barriers.k_free[1])
        if barriers.p_free is not None:
            pl.when(i == walk.last)(lambda: plgpu.barrier_arrive(barriers.p_free))

        acc, row_sum = softmax.rescale(max0, max1, acc, row_sum)
        share = None if has_own_memory else partial(self.share_weights, p1, 1)
        acc, _ = self.add_values(p1, walk, i, 1, masked, acc, meanwhile=share)
        pl.when(i != walk.last)(lambda: plgpu.barrier_arrive(barriers.k_free[3]))
        return acc, max1, row_sum + sum1

    def scores(self, walk: Walk, i, masked):
        """S of this consumer's key tile, scaled, capped and masked; `masked` is a bool, or one that is traced."""
        kernel, call, side, (q_rope, factor) = self.kernel, self.kernel.call, self.side, walk.queries
        z = opaque_zero(i)
        product = partial(self.multiply_queries, q_rope, z, z + side)
        s = pl.run_scoped(product, plgpu.ACC((TILE, TILE), jnp.float32))
        s *= over_columns(factor, TILE) if factor.ndim else factor
        # The producer may fetch the next request's queries.
        pl.when(i == walk.last)(lambda: plgpu.barrier_arrive(self.barriers.q_free))
        if call.logit_cap is not None:
            s = cap_scores(s, call.logit_cap)
        mask = partial(
            masks.apply_mask,
            table=self.cta.table,
            request=walk.tile.request,
            first_row=self.cta.first_row,
            ends=walk.ends,
            tokens=kernel.tokens,
            first_token=self.cta.from_origin(walk.tile, (2 * i + side) * TILE),
            heads=kernel.heads,
            keys=1,
            window=call.window,
            ahead=call.ahead,
        )
        if isinstance(masked, bool):
            return mask(s) if masked else s
        return lax.cond(masked, mask, lambda s: s, s)

    def multiply_queries(self, q_rope, z, stage, acc):
        """Q K' for the key tile in `stage`; `z` is an opaque zero, `acc` an accumulator."""
        memory, barriers, side = self.memory, self.barriers, self.side
        if side == 1:
            plgpu.barrier_wait(barriers.s_issued)
        for half in (side, 1 - side):  # in the order in which they land
            plgpu.barrier_wait(barriers.k_full[2 * side + half])
            if self.kernel.filled[half]:
                q, k = self.of_latent(half, memory.q, z + half), self.of_latent(half, memory.k, stage, half)
                plgpu.wgmma(acc, q, k.transpose((1, 0)))
        if self.kernel.rope:
            if barriers.r_full is not None:
                plgpu.barrier_wait(barriers.r_full[side])
            plgpu.wgmma(acc, q_rope, memory.r.at[stage].transpose((1, 0)))
        if side == 0:
            plgpu.barrier_arrive(barriers.s_issued)
        return acc[...]

    def of_latent(self, half: int, ref, *place):
        """The columns of a half of queries or keys that belong to the latent."""
        filled = self.kernel.filled[half]
        return ref.at[place] if filled == self.kernel.half else ref.at[*place, :, pl.ds(0, filled)]

    def share_weights(self, p, t: int) -> None:
        """Passes P of key tile `t`, and the running max after it, to the other consumer."""
        self.memory.p[self.memory.p_stage(t)] = p
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.barriers.p_ready[t])

    def share_max(self, running_max) -> None:
        """Passes the running max to the other consumer, with the weights that are shared next."""
        self.memory.stats[0] = running_max

    def shared_max(self):
        """The running max that the other consumer has passed."""
        return plgpu.load(self.memory.stats.at[0], layout=ROW)

    def add_values(self, p, walk: Walk, i, t: int, masked, acc, meanwhile=None):
        """O + P V for this side's half of key tile `t`, and the result of `meanwhile`."""
        z = opaque_zero(i)
        if masked is not False:
            pl.when(masked)(partial(self.clear_values, walk, i, t))
        return multiply_add(acc, p, self.memory.k.at[z + t, z + self.side], meanwhile, scratch=self.scratch)

    def clear_values(self, walk: Walk, i, t: int) -> None:
        """Zeroes the values of unseen tokens in this side's half of key tile `t`."""
        kernel, tile, ends = self.kernel, walk.tile, walk.ends
        place = opaque_zero(i) + t, jnp.int32(self.side)
        first_token = self.cta.from_origin(tile, (2 * i + t) * TILE)
        first_seen = masks.first_seen(ends, kernel.tokens, kernel.call.window)
        masks.clear_values(
            self.memory.k, place, 0, kernel.half, self.cta.table, tile.request, first_token, ends.seen,
            first_seen=first_seen, interpret=kernel.interpret,
        )  # fmt: skip

    def store(self, walk: Walk, n, acc, running_max, row_sum) -> None:
        """Starts the stores of this side's half of a result, staged in K1."""
        kernel, side, tile = self.kernel, self.side, walk.tile
        if kernel.filled[side] < kernel.half:  # other columns hold products with rotary keys
            column = plgpu.broadcasted_iota(jnp.int32, acc.shape, 1, layout=WGMMA)
            acc = jnp.where(column < kernel.filled[side], acc, 0.0)
        stage = self.memory.results.at[opaque_zero(walk.last) + 1, side]
        result = side, acc, row_sum, running_max, tile.request, tile.split, stage
        fields: Any = {
            "refs": self.results,
            "stats": self.memory.stats,
            "wait_for_both": self.barriers.wait_for_both,
            "softmax": self.softmax,
            "first_row": self.cta.first_row,
            "stored": kernel.stored,
            "value_scale": self.value_scale,
        }
        if self.exchange is None:
            HalvesEpilogue(**fields).store(*result)
        else:
            place = lax.rem(n - self.work.first, jnp.int32(cluster_sharing.PLACES))
            cluster_sharing.SharedEpilogue(**fields, exchange=self.exchange).store_shared(*result, place=place)


class PlainTiles:
    """Shared memory and barriers for keys of the queries' dtype, which TMA brings as they are multiplied."""

    @staticmethod
    def types(kernel: MLADense) -> dict[str, Any]:
        """Scratch types."""
        half, rope, dtype, copies = kernel.half, kernel.rope, kernel.dtype, copies_per_tile(kernel.pages)
        return {
            "q": swizzled(2, TILE, half, dtype=dtype),
            "k": swizzled(2, 2, TILE, half, dtype=dtype),
            **({"r": rotary_type(2, TILE, rope=rope, dtype=dtype)} if rope else {}),
            **({"qr": rotary_type(TILE, rope=rope, dtype=dtype)} if 0 < rope < ROPE else {}),
            "p": swizzled(2, TILE, TILE, dtype=dtype),
            "stats": plgpu.SMEM((3, TILE), jnp.float32),
            "q_full": plgpu.Barrier(num_arrivals=2),
            "qr_full": plgpu.Barrier(),
            "q_free": plgpu.Barrier(num_arrivals=2),
            "p_free": plgpu.Barrier(),
            "k_full": plgpu.Barrier(num_arrivals=copies, num_barriers=4),
            "r_full": plgpu.Barrier(num_arrivals=copies, num_barriers=2),
            "k_free": _k_free(kernel),
            "s_issued": plgpu.Barrier(),
            "p_ready": plgpu.Barrier(num_barriers=2),
            "both": plgpu.Barrier(num_arrivals=2),
            **_register_operands(4, kernel),
        }

    def __init__(self, kernel: MLADense, scratch: dict[str, Any]):
        self.kernel = kernel
        q, k, p = scratch["q"], scratch["k"], scratch["p"]
        qr, r = scratch.get("qr", p.at[0] if kernel.rope else None), scratch.get("r")
        self.memory = Memory(
            q=q, qr=qr, k=k, r=r, q_in=q, qr_in=qr,
            k_in=[[k.at[t, half] for half in range(2)] for t in range(2)],
            r_in=None if r is None else _each(r, 2),
            results=k, p=p, stats=scratch["stats"], register_operands=scratch.get("register_operands"),
        )  # fmt: skip
        k_full, r_full = _each(scratch["k_full"], 4), _each(scratch["r_full"], 2)
        self.barriers = Barriers(
            q_full=scratch["q_full"],
            qr_full=scratch["qr_full"],
            q_free=scratch["q_free"],
            p_free=scratch["p_free"],
            k_landed=k_full,
            r_landed=r_full,
            k_full=k_full,
            r_full=r_full,
            k_free=_each(scratch["k_free"], 4),
            s_issued=scratch["s_issued"],
            p_ready=_each(scratch["p_ready"], 2),
            both=scratch["both"],
        )

    def convert(self, t: int) -> None:
        """Makes key tile `t` ready to multiply, once it has landed: nothing to do."""

    def wait_for_first_tile(self) -> None:
        """Waits until K0 has landed."""
        for half in range(2):
            plgpu.barrier_wait(self.barriers.k_full[half])

    def load_queries(self, side: int, scale, value_scale) -> Queries:
        """Waits for the queries of a work tile, and loads the rotary ones to registers if P0 overwrites them."""
        del value_scale
        barriers, rope, interpreted = self.barriers, self.memory.qr, self.memory.register_operands
        if self.kernel.rope:
            plgpu.barrier_wait(barriers.qr_full)
        if self.kernel.rope == ROPE:
            loaded = plgpu.load(self.memory.p.at[0], layout=WGMMA)
            rope = register_operand(loaded, None if interpreted is None else interpreted.at[2 + side])
        barriers.wait_for_both()  # both have read p[0], which P0 overwrites
        plgpu.barrier_wait(barriers.q_full)
        return Queries(rope, scale)

    def loops(self, tile: WorkTile, unmasked):
        """The loops over the pairs of a work tile: begin, end, and whether a pair is masked.  `unmasked`: see `masks`.

        There is one, whose pairs branch.
        """
        return [(tile.begin, tile.end, partial(masks.is_masked, unmasked))]


class E4M3Tiles:
    """Shared memory and barriers for e4m3 keys, which the producer converts to float16; it represents them exactly.

    TMA copies half a tile of keys as it is stored, 16 KiB, into the first half of the shared memory of its float16
    values.  A warpgroup loads all of it to registers, and then stores it converted.  So keys need no additional
    memory, and the copies of all halves can be in flight at once.

    Converting keys in registers, as the first operand of S' = K Q', and storing only values was slower: 128 requests
    with 128 heads and 4,096 tokens take 0.293 ms as it is, 0.310 if each consumer converts the tile that it multiplies
    with the queries, and more than 0.337 if one warpgroup computes all weights and two multiply them with the values.
    """

    @staticmethod
    def types(kernel: MLADense) -> dict[str, Any]:
        """Scratch types.

        "q", "qr", "k" and "r" are views of the same memory: in the dtype of queries and results, in float16, and as
        bytes.  Barriers with equal numbers of arrivals share an array: their addresses and phases take fewer registers.
        """
        copies = copies_per_tile(kernel.pages)

        def viewed(*shape, raw=()):
            views = swizzled(*shape, dtype=kernel.dtype), swizzled(*shape, dtype=DTYPE), *raw
            # The interpreter reports any two accesses to a union through different views as a race.
            return views if kernel.interpret else plgpu.RefUnion(*views)

        # Bytes in the place of their float16 values, of which they take half.
        raw_k, raw_r = plgpu.SMEM((2, 2, 2, TILE, HALF), jnp.uint8), plgpu.SMEM((2, 2, TILE, ROPE), jnp.uint8)
        return {
            "q": viewed(2, TILE, HALF),
            "qr": viewed(TILE, ROPE),
            "k": viewed(2, 2, TILE, HALF, raw=(raw_k,)),
            "r": viewed(2, TILE, ROPE, raw=(raw_r,)),
            "p": swizzled(1, TILE, TILE, dtype=DTYPE),
            "stats": plgpu.SMEM((5, TILE), jnp.float32),
            "q_full": plgpu.Barrier(num_arrivals=3),
            "k_landed": plgpu.Barrier(num_arrivals=copies, num_barriers=4),
            "r_landed": plgpu.Barrier(num_arrivals=copies, num_barriers=2),
            "k_free": _k_free(kernel),
            "one_arrives": plgpu.Barrier(num_barriers=7),
            "two_arrive": plgpu.Barrier(num_arrivals=2, num_barriers=2),
            **_register_operands(2, kernel),
        }

    def __init__(self, kernel: MLADense, scratch: dict[str, Any]):
        self.kernel = kernel
        (q_in, q), (qr_in, qr) = scratch["q"], scratch["qr"]
        (results, k, self.raw_k), (_, r, self.raw_r) = scratch["k"], scratch["r"]
        self.memory = Memory(
            q=q, qr=qr, k=k, r=r, q_in=q_in, qr_in=qr_in,
            k_in=[[self.raw_k.at[t, half, 0] for half in range(2)] for t in range(2)],
            r_in=[self.raw_r.at[t, 0] for t in range(2)],
            results=results, p=scratch["p"], stats=scratch["stats"], register_operands=scratch.get("register_operands"),
        )  # fmt: skip
        one, (q_free, both) = _each(scratch["one_arrives"], 7), _each(scratch["two_arrive"], 2)
        self.barriers = Barriers(
            q_full=scratch["q_full"],
            qr_full=scratch["q_full"],
            q_free=q_free,
            p_free=None,
            k_landed=_each(scratch["k_landed"], 4),
            r_landed=_each(scratch["r_landed"], 2),
            k_full=one[:4],
            r_full=None,
            k_free=_each(scratch["k_free"], 4),
            s_issued=one[4],
            p_ready=one[5:],
            both=both,
        )

    def convert(self, t: int) -> None:
        """Converts key tile `t` as it lands: half `t` and the rotary keys, then the other half."""
        barriers = self.barriers
        for half in (t, 1 - t):
            plgpu.barrier_wait(barriers.k_landed[2 * t + half])
            if half == t:
                plgpu.barrier_wait(barriers.r_landed[t])
            convert_half = self._interpret_conversion if self.kernel.interpret else self._convert_in_place
            convert_half(t, half, rope=half == t)
            plgpu.commit_smem()
            plgpu.barrier_arrive(barriers.k_full[2 * t + half])

    def _convert_in_place(self, t: int, half: int, *, rope: bool) -> None:
        raw_type, ref_type = plgpu.RefType(), plgpu.RefType(swizzled(1, dtype=DTYPE).transforms)
        k_offset = (2 * t + half) * TILE * HALF * DTYPE.itemsize
        r_offset = t * TILE * ROPE * DTYPE.itemsize

        @plgpu.inline_mgpu(arg_types=(ref_type, ref_type, raw_type, raw_type))
        def convert(_, k, r, raw_k, raw_r):
            chunks = conversions_in_place.load_half(raw_k, k_offset)
            ropes = conversions_in_place.load_rope(raw_r, r_offset) if rope else []
            mgpu.utils.warpgroup_barrier()
            conversions_in_place.store_half(k, k_offset, chunks)
            conversions_in_place.store_rope(r, r_offset, ropes)

        convert(self.memory.k, self.memory.r, self.raw_k, self.raw_r)

    def _interpret_conversion(self, t: int, half: int, *, rope: bool) -> None:
        def converted(raw):
            return lax.bitcast_convert_type(raw, jnp.float8_e4m3fn).astype(DTYPE)

        self.memory.k[t, half] = converted(self.raw_k[t, half, 0])
        if rope:
            self.memory.r[t] = converted(self.raw_r[t, 0])

    def wait_for_first_tile(self) -> None:
        """As in PlainTiles: `convert` has waited."""

    def load_queries(self, side: int, scale, value_scale) -> Queries:
        """Waits for the queries of a work tile, and converts them."""
        memory, barriers = self.memory, self.barriers
        plgpu.barrier_wait(barriers.q_full)
        latent, rope = (memory.q_in, memory.q), (memory.qr_in, memory.qr)
        inverse = fit_queries(side, latent, rope, memory.stats, Q_MAX, barriers.wait_for_both)
        return Queries(memory.qr, inverse * (scale * value_scale))

    def loops(self, tile: WorkTile, unmasked):
        """As in PlainTiles.  Pairs that need a mask have loops of their own: the others then take fewer registers."""
        for begin, end, masked in masks.divided_by_masks(tile.begin, tile.end, unmasked):
            yield begin, end, lambda i, masked=masked: masked


def _each(ref, count: int) -> list[Any]:
    return [ref.at[n] for n in range(count)]


def _k_free(kernel: MLADense) -> plgpu.Barrier | plgpu.ClusterBarrier:
    if kernel.cluster > 1:
        return plgpu.ClusterBarrier(collective_axes=("cta",), num_barriers=4)
    return plgpu.Barrier(num_barriers=4)


def _register_operands(count: int, kernel: MLADense) -> dict[str, Any]:
    """Shared memory for register operands of wgmma, where the interpreter needs them."""
    return {"register_operands": swizzled(count, TILE, TILE, dtype=kernel.k_dtype)} if kernel.interpret else {}
