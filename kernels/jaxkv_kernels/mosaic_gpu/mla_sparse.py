"""Sparse MLA decode on sm_90, in tiles of 64 rows: each query token attends to slots of its own.

Latents have 512 or 448 values, and rotary parts 64.  To the plan, each query token is a request of its own, with
`counts` slots.

Dense calls on some quantised entries also run here, with slots from the block table (`decode_by_slots`).  Reading a
slot adds 4 bytes to the 352 to 656 of each token.  Several query tokens of a request each read its entries again.  With
a window, a query token has the slots of the tokens in it only.

Work.  A tile is 64 heads of a query token by 64 keys (slots).  A CTA owns one tile of heads and walks its partition of
the plan: work tiles, each a range of pairs of key tiles of a query token.

Timeline of a pair, whose key tiles are K0 and K1.  Each consumer warpgroup holds half of the output O,
64 x 256 float32 in 128 registers per lane.  Time runs downwards; `->` names the barrier that a line waits for.

    producer (all lanes gather)          consumer 0                       consumer 1
                      -> k_free[0]       S0 = Q K0'  -> k_full[0], [1]
    factors of K0                          arrives s_issued
    copies K0 left                       softmax, P0: arrives p_ready[0]  S1 = Q K1'  -> s_issued, k_full[3], [2]
                      -> k_free[1]       O0 += P0 K0 left                 O1 += P0 K0 right  -> p_ready[0]
    copies K0 right, rotary keys           arrives k_free[0]                meanwhile softmax of S1
    in the first pair, the queries                                          arrives k_free[1]
                      -> q_free                                           O1 += P1 K1 right, arrives k_free[3]
    K1 likewise, right half first                                           meanwhile P1: arrives p_ready[1]
                      -> k_free[3], [2]  O0 += P1 K1 left  -> p_ready[1]
                                           arrives k_free[2]

This is the order of `mla_dense.py`.  Copies arrive at k_full when they land, while the producer goes on to the next
half.

For `fp8_v4` entries, V is the whole entry, RoPE included: K = V (`gather_fp8_v4.py`).  Their rotary parts are the last
columns of K, and those of the queries the last columns of Q: what this page says of rotary keys and queries does not
concern them.  Their slots may be in two caches, of which the second one's tiles follow those of the first.

Tiles of quantised entries are not copied: they pass through registers of the producer, which converts them.  Its loads
run ahead of its stores, also from one tile or work tile to the next (`gather_keys.py`), so that the values of a half
are in registers when k_free completes.  Rotary keys of `fp8_ds_mla` entries are copied; the copies start before K0 left
is stored.  Rotary keys of `fp8` entries are loaded before K0 left is stored, and converted and stored after K0 right.

P0 and P1 use the same shared memory.  The rotary queries stay in shared memory: the registers that hold them in
`mla_dense.py` belong to the producer here.

Numerics.  Each key has a factor, by which its values in shared memory are to be multiplied (`scaling.py`).  In
nearly all tiles, all factors are 1, and the steps that apply factors are skipped.  In other tiles, scores are
multiplied by the factors, and the running max is that of score + log2(factor).  So weights,
exp2(score - running max) * factor, are at most 2**rescale_threshold whatever the scales are.  Row sums are of weights
without factors.  For quantised entries, queries become float16 in place, each row divided by a power of two that makes
it fit; for `fp8_ds_mla` entries, their rotary part stays bf16.  The single scale of all `fp8` entries is part of the
softmax scale, and also multiplies the result.  `fp8_v4` entries become bf16, as the queries are, and their factors are
those of masked keys only.

Barriers.
    q_full           the queries have landed
    q_free           both consumers have multiplied with the queries for the last time
    k_full[2t + h]   half h of key tile t is in shared memory.  The half that is stored first also covers the factors,
                     and the half that is stored last the rotary keys.  For copies, these are not Pallas's barriers
                     (`gather_keys.py`).
    k_free[2t + h]   the consumer that is the last to multiply this half is done with it.  K1's halves stage the result
                     of a work tile, and are freed once TMA has read it.
    s_issued         S0's products have been issued
    p_ready[t]       P of tile t is in p, and the running max after tile t is in stats[0]
    both             both consumers arrive, and both wait: the largest magnitudes of queries, the scaled queries or the
                     row sums of both are in shared memory
These order every reuse.  P1 overwrites P0 once consumer 1, its only reader, has multiplied it.  The next P0 overwrites
P1 once consumer 0, its only reader, has multiplied it.  Factors and rotary keys of a tile are read by one
consumer, before it frees the half that was stored first.  Automatic barriers are off, as in `mla_dense.py`.

Budget.  Shared memory: Q 72 KiB + K 128 KiB + rotary keys 16 KiB + P 8 KiB + stats 2 KiB = 226 KiB of 227; 202 KiB for
`fp8_v4` entries.  Registers: 224 per lane for consumers, 56 for the producer; 208 and 88 for quantised entries.
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

from jaxkv_kernels.addressing import Pages, lengths_in_table, slots_for, table_tokens
from jaxkv_kernels.calls import DecodeCall, DecodeMLA, DecodeMLASparse, PlanDecode, max_logits_reasons
from jaxkv_kernels.formats.entries import MLAEntry
from jaxkv_kernels.mosaic_gpu import quantised_swap_ab
from jaxkv_kernels.mosaic_gpu.attention_reasons import latent_sizes, query_dtype
from jaxkv_kernels.mosaic_gpu.combine import combine
from jaxkv_kernels.mosaic_gpu.epilogue import HalvesEpilogue, KernelResults, half_columns, result_types
from jaxkv_kernels.mosaic_gpu.gather_fp8_v4 import ExtraRefs, FP8V4Rows, FP8V4Tiles
from jaxkv_kernels.mosaic_gpu.gather_keys import (
    BARRIERS,
    FACTOR,
    FLAG,
    FULL,
    HALVES,
    STATS,
    ConvertedTiles,
    CopiedTiles,
    GatheredRows,
)
from jaxkv_kernels.mosaic_gpu.interpreter.gather import InterpretedFP8V4Rows, InterpretedRows
from jaxkv_kernels.mosaic_gpu.lane_barriers import CopyBarriers, InterpretedBarriers, LaneBarriers
from jaxkv_kernels.mosaic_gpu.layout_reasons import steps, unaligned
from jaxkv_kernels.mosaic_gpu.masks import MASKED
from jaxkv_kernels.mosaic_gpu.ptx.fragments import LANES
from jaxkv_kernels.mosaic_gpu.quantised_swap_ab import QuantisedSwapABConfig
from jaxkv_kernels.mosaic_gpu.quantised_tiles import N
from jaxkv_kernels.mosaic_gpu.queries import fit_queries
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import LOG2E, cap_scores, multiply_add, opaque_zero
from jaxkv_kernels.mosaic_gpu.runtime.device import consumer_registers, interpreting, multiprocessors
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel, pdl_launch_dependents
from jaxkv_kernels.mosaic_gpu.runtime.registers import (
    COLUMN,
    LANE_COLUMNS,
    ROW,
    filled,
    fold_columns,
    over_columns,
    over_rows,
    zeros,
)
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import swizzled
from jaxkv_kernels.mosaic_gpu.sizes import HALF, LATENT, PAIR, ROPE, TILE
from jaxkv_kernels.mosaic_gpu.softmax import THRESHOLDS, OnlineSoftmax, check_threshold
from jaxkv_kernels.mosaic_gpu.tile_scheduler import (
    CTAS,
    PAIR_COSTS,
    Plan,
    SplitCosts,
    WorkTile,
    load_work_range,
    load_work_tile,
    plan_slots,
)
from jaxkv_kernels.scores import too_large
from jaxkv_kernels.tuning import configuration, require
from jaxkv_kernels.xla.paged import query_ranges

COLUMNS = 64
"""Columns of queries that are copied at once, if their rotary parts follow the latents: those of a swizzled tile."""
Q_MAX = 3
"""The row of `stats` with the largest magnitudes of queries that consumer 0 finds; the next is consumer 1's."""
PREFETCHED_TILES = 32
"""Key tiles per CTA from which sparse attention to `fp8_ds_mla` entries prefetches: with 64 it takes 1 % less time."""
_SPLIT_COSTS = replace(PAIR_COSTS, split=4)
LATENT_SIZES = {"fp8_v4": (448,), "mxfp4_ds_mla": (448, 512)}
"""Values of latents, by format, if not 512."""


@dataclass(frozen=True, kw_only=True)
class SparseConfig:
    """`decode_mla_sparse`."""

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {
        "producer_registers": (40, 56, 72, 88, 104),
        "units_ahead": (1, 2, 4),
        "prefetch": (True, False),
        "rescale_threshold": THRESHOLDS,
        "split_costs": tuple(replace(_SPLIT_COSTS, overhead=overhead) for overhead in (1, 2, 4)),
    }

    producer_registers: int = 56
    """Registers per lane of the producer warpgroup, which holds addresses of rows, the slots of two tiles and, for
    quantised entries, the units that are being loaded.  The consumers get the rest, 224 each."""
    units_ahead: int = 2
    """Units of quantised latents, 16 registers per lane each, that are loaded before the first of them is stored.  A
    divisor of the 4 units of a tile, so that each unit always has the same registers.  With 4, which need 104 registers
    of the producer, one request with 128 heads and `fp8_ds_mla` entries takes 0.0153 ms instead of 0.0145."""
    prefetch: bool = False
    """Whether the rows of the tile after next are prefetched to the L2 cache.  `fp8_ds_mla` entries are faster with
    it if a CTA has many tiles, and `fp8_v4` entries if it has few; 128 requests with 128 heads and bf16 entries take
    0.160 ms with it instead of 0.134.  The first two tiles of a CTA are not prefetched: one request took 0.0208 ms
    instead of 0.0145."""
    rescale_threshold: int = 8
    """As in MLADenseConfig."""
    split_costs: SplitCosts = _SPLIT_COSTS
    """In steps of two tiles.  With `split` of 16, 8 requests with 128 heads and `fp8_ds_mla` entries take 0.0255 ms
    instead of 0.0215: fewer, longer partitions.  With `least` of 2, one request takes 0.0190 ms instead of 0.0145."""

    def __post_init__(self):
        require(self.producer_registers in (40, 56, 72, 88, 104), self, "producer_registers", "40, 56, 72, 88 or 104")
        require(self.units_ahead in (1, 2, 4), self, "units_ahead", "1, 2 or 4, divisors of the units of a tile")
        check_threshold(self)


def default_config(format: str, tiles: int, shared: bool) -> SparseConfig:
    """The default configuration of a `decode_mla_sparse` call, for entries of a format and key tiles per CTA.

    `shared`: whether two CTAs share key tiles.  Each then has half of the units of a tile, and needs fewer registers.

    Calls with few tiles per CTA are slower with prefetching: 8 requests with 128 heads and 2,048 slots (4 tiles) take
    0.0276 ms instead of 0.0215, and 32 requests (16 tiles) 0.0634 instead of 0.0594.  With an overhead of 2 steps, 64
    requests with 64 heads and 128 + 512 slots of `fp8_v4` entries stay whole, and take 0.0404 ms instead of 0.0354.
    With prefetching, these took 0.0300 ms instead of 0.0303, later, and with 128 heads 0.0354 instead of 0.0356 (the
    least of seven chains, beside other programs).  More tiles per CTA were not timed with the present loads.
    """
    if format in ("bf16", "f16"):
        return SparseConfig()
    producer = SparseConfig(producer_registers=72, units_ahead=1) if shared else SparseConfig(producer_registers=88)
    if format == "fp8_v4":
        prefetch = tiles < PREFETCHED_TILES
        return replace(producer, prefetch=prefetch, split_costs=replace(_SPLIT_COSTS, overhead=1))
    return replace(producer, prefetch=format == "fp8_ds_mla" and tiles >= PREFETCHED_TILES)


def unsupported_reasons(call: DecodeMLASparse) -> Iterator[str]:
    """Reasons against a `decode_mla_sparse` call."""
    entry, extra = call.entry, call.extra
    if extra is not None:
        if {entry.format, extra.entry.format} != {"fp8_v4"}:
            yield f"`extra` of format {extra.entry.format!r}, with {entry.format!r}: supports 'fp8_v4' in both caches"
        yield from unaligned(steps(extra.pages, ("layer",)), extra.buffer.dtype.itemsize)
    yield from gathered_reasons(entry, call.pages, call.buffer)
    yield from query_dtype(entry, call.q_latent.dtype, "`q_latent`")
    yield from too_large(call.logit_cap)
    yield from max_logits_reasons(call)


def gathered_reasons(entry: MLAEntry, pages: Pages, buffer) -> Iterator[str]:
    """Reasons against attending to such latents by slot."""
    yield from latent_sizes(entry, *LATENT_SIZES.get(entry.format, (LATENT,)))
    # The regions of split pages store multiples of 16 bytes per token, but their scales.
    yield from unaligned(steps(pages, ("layer",) if entry.split else ("layer", "token")), buffer.dtype.itemsize)


def decode_mla_sparse(call: DecodeMLASparse) -> tuple[jax.Array, jax.Array]:
    """Out [B, Q, Hq, R] and float32 lse [B, Q, Hq]."""
    batch, tokens, heads, _ = call.q_latent.shape
    size, lengths = _listed(call)
    config: SparseConfig | QuantisedSwapABConfig
    if swaps_operands(call):
        config, step, run = configuration(QuantisedSwapABConfig()), TILE, _attend_few_heads
    else:
        config = config_of(call.entry.format, queries=batch * tokens, size=size, heads=heads)
        step, run = PAIR, _attend_and_combine
    plan_of = partial(
        plan_slots, size=size, heads=heads, step=step, costs=config.split_costs, batch_invariant=call.batch_invariant
    )
    if lengths is None:
        with jax.ensure_compile_time_eval():
            plan = plan_of(jnp.full(batch * tokens, size, jnp.int32))
            plan = replace(plan, whole=not bool((plan.split_requests[:, 0] >= 0).any()))
    else:
        plan = plan_of(lengths.reshape(-1), by_kernel=not interpreting.value)
    return run(call, plan, config=config, interpret=bool(interpreting.value))


def swaps_operands(call: DecodeMLASparse) -> bool:
    """Whether a call has so few heads that the kernel of few rows runs it (`quantised_swap_ab.py`).

    Tiles of 64 heads would be mostly empty.  That kernel has neither sinks nor other formats of latents.
    """
    return call.q_latent.shape[2] <= N and call.entry.format in ("fp8", "fp8_ds_mla") and call.sinks is None


@partial(jax.jit, static_argnames=("config", "interpret"))
def _attend_few_heads(
    call: DecodeMLASparse, plan: Plan, *, config: QuantisedSwapABConfig, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """The results of a call that `swaps_operands`, by a plan in which each query token is a request."""
    batch, tokens, heads, latent = call.q_latent.shape
    requests = batch * tokens
    pad = ((0, 0), (0, -heads % 8), (0, 0))  # queries are loaded in tiles of 8 rows
    queries = [jnp.pad(q.reshape(requests, heads, -1), pad) for q in (call.q_latent, call.q_pe)]
    by_request = replace(call, slots=call.slots.reshape(requests, -1))
    results = quantised_swap_ab.attend(by_request, plan, queries, config, interpret=interpret)
    out, lse = results.out, results.lse
    if not plan.whole:
        out, lse = combine(results, plan, rows=heads, interpret=interpret)
    return out[:, :heads].reshape(batch, tokens, heads, latent), lse[:, :heads].reshape(batch, tokens, heads)


def _listed(call: DecodeMLASparse) -> tuple[int, jax.Array | None]:
    """The size of a query token's list of slots, of both caches, and the lengths [B, Q] used; None if all are `size`.

    In such a list, the slots of the first of two caches take whole pairs of tiles, whether they are used or not.
    """
    size, extra = call.slots.shape[-1], call.extra
    if extra is None:
        return size, call.counts
    first, second = -(-size // PAIR) * PAIR, extra.slots.shape[-1]
    if extra.counts is None:
        return first + second, None
    counts = size if call.counts is None else jnp.minimum(call.counts, size)
    return first + second, jnp.where(extra.counts > 0, first + jnp.minimum(extra.counts, second), counts)


def config_of(format: str, *, queries: int, size: int, heads: int) -> SparseConfig:
    """The configuration of a call whose `queries` query tokens have up to `size` slots: the user's, or the default."""
    row_tiles = -(-heads // TILE)
    tiles = queries * -(-size // TILE) * row_tiles
    return configuration(default_config(format, tiles // multiprocessors(), shares_tiles(format, row_tiles)))


def shares_tiles(format: str, row_tiles: int) -> bool:
    """Whether pairs of CTAs convert each tile of keys together: there is something to convert, and no CTA is left."""
    return format not in ("bf16", "f16") and row_tiles % CTAS == 0


@partial(jax.jit, static_argnames=("config", "interpret"))
def _attend_and_combine(
    call: DecodeMLASparse, plan: Plan, *, config: SparseConfig, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """The results of a call by a plan in which each query token is a request."""
    batch, tokens, heads, _ = call.q_latent.shape
    requests = batch * tokens
    slots = call.slots.reshape(requests, -1)
    pad = ((0, 0), (0, -heads % 8), (0, 0))  # TMA tiles are of 8 rows
    q_latent, q_pe = (jnp.pad(q.reshape(requests, heads, -1), pad) for q in (call.q_latent, call.q_pe))
    sinks = None if call.sinks is None else jnp.pad(call.sinks, (0, -heads % TILE))
    counts, extra = None, call.extra  # without a second cache, the plan knows the counts
    rows: Any = (InterpretedRows if interpret else GatheredRows)(call.pages, call.entry, call.buffer.dtype.itemsize)
    if call.entry.codec.rope_in_values:
        sources = [rows]
        if extra is not None:
            sources.append(GatheredRows(extra.pages, extra.entry, extra.buffer.dtype.itemsize))
        first_tiles = 2 * -(-slots.shape[-1] // PAIR)
        rows = (InterpretedFP8V4Rows if interpret else FP8V4Rows)(tuple(sources), first_tiles)
    if extra is not None:
        counts = None if call.counts is None else call.counts.reshape(-1)
        extra = replace(extra, slots=extra.slots.reshape(requests, -1))
    by_request = replace(call, q_latent=q_latent, q_pe=q_pe, slots=slots, counts=counts, sinks=sinks, extra=extra)
    results = attend(by_request, plan, rows, config, interpret=interpret)
    out, lse = results.out, results.lse
    if not plan.whole:
        out, lse = combine(results, plan, rows=heads, interpret=interpret, sinks=sinks)
    return out[:, :heads].reshape(batch, tokens, heads, -1), lse[:, :heads].reshape(batch, tokens, heads)


def attend(
    call: DecodeMLASparse, plan: Plan, rows: GatheredRows | FP8V4Rows, config: SparseConfig, *, interpret: bool
) -> KernelResults:
    """Results of whole query tokens, and of splits.

    The arrays of `call` are by query token: q_latent [N, heads rounded up to 8, R], slots [N, K], sinks
    [heads rounded up to 64] or None.  Entries are multiplied by `kv_scale` unless that is None.  R is 512, or 448.
    With `FP8V4Rows`, rotary parts then follow, as part of keys and values.  With other rows, queries and keys in shared
    memory end with zeros, and the last columns of the output are not stored.

    `extra` are the slots [N, K'] of a second cache, whose tiles follow those of `slots`.  The plan counts slots as if
    `slots` were whole pairs of tiles.  Of these, the first `counts` [N] are used, or all.
    """
    batch, heads, latent = call.q_latent.shape
    tiles = -(-heads // TILE)
    cluster = CTAS if shares_tiles(call.entry.format, tiles) else 1
    rope_in_values = isinstance(rows, FP8V4Rows)
    copied = not (rows.quantised or interpret)  # the interpreter's loader stores tiles instead
    width = latent + call.q_pe.shape[-1] if rope_in_values else latent
    stored = min(heads, TILE)  # rows of a tile in arrays with one value per row: TMA does not clip copies to them
    dtype, k_dtype = call.q_latent.dtype, rows.latent_dtype
    kv_scales = [] if call.kv_scale is None else [jnp.reshape(call.kv_scale, (1,))]
    sink_arrays, count_arrays = ([] if x is None else [x] for x in (call.sinks, call.counts))
    extra_arrays = []
    if call.extra is not None:
        extra_arrays = [rows.buffer(call.extra.buffer), call.extra.slots, jnp.reshape(call.extra.layer, (1,))]
    softmax = OnlineSoftmax(keys=1, threshold=config.rescale_threshold, interpret=interpret)

    def body(*refs, **scratch):
        (
            q_ref, qr_ref, kv_ref, zero_ref, slot_ref, layer_ref, scale_ref, partitions_ref, work_tiles_ref,
            split_requests_ref, *optional_refs, out_ref, lse_ref, split_out_ref, split_lse_ref, split_scale_ref,
        ) = refs  # fmt: skip
        kv_scale_refs, sink_refs, count_refs, extra_refs = _divided(
            optional_refs, kv_scales, sink_arrays, count_arrays, extra_arrays
        )
        p, stats = scratch["p"], scratch["stats"]
        q_full = scratch["q_full"]
        # Barriers with equal numbers of arrivals share an array: their addresses and phases take fewer registers.
        one, two = scratch["one_arrives"], scratch["two_arrive"]
        k_free = [scratch["k_free"].at[n] for n in range(HALVES)]
        s_issued, *p_ready = (one.at[n] for n in range(3))
        q_free, both = (two.at[n] for n in range(2))

        # Two views of the same memory: in the dtype that is multiplied, and in the dtype of queries and results.
        def views(name: str, own) -> tuple[Any, Any]:
            memory: Any = scratch.get(name)
            return (memory, memory) if own == dtype else tuple(memory)

        (q, q_in), (k, stages), (qr, qr_in) = views("q", k_dtype), views("k", k_dtype), views("qr", rows.rope_dtype)
        r: Any = scratch.get("r")  # without `qr` and `r`, rotary parts are in `q` and `k`
        if not plan.whole:  # otherwise the next kernel may be one of XLA's, instead of `combine`
            pdl_launch_dependents(split_requests_ref, interpret=interpret)
        partition, group, cta, wg = (lax.axis_index(axis) for axis in ("partition", "group", "cta", "wg"))
        first_row = (group * cluster + cta) * TILE
        k_full: Any = InterpretedBarriers([one.at[3 + n] for n in range(FULL)]) if interpret else None
        if copied:
            k_full = CopyBarriers(stats, BARRIERS, HALVES, arrivals=2 * LANES)
        elif not interpret:
            k_full = LaneBarriers(stats, BARRIERS, FULL, shared=cluster > 1)
        k_full.start()

        def fetch_queries(request):
            if rope_in_values:
                for n in range(width // COLUMNS):
                    ref, first = (q_ref, n * COLUMNS) if n * COLUMNS < latent else (qr_ref, n * COLUMNS - latent)
                    some = ref.at[request, pl.ds(first_row, TILE), pl.ds(first, COLUMNS)]
                    plgpu.copy_gmem_to_smem(some, q_in.at[n], q_full)
                return
            for half in range(2):
                columns = half_columns(half, latent, request)
                plgpu.copy_gmem_to_smem(q_ref.at[request, pl.ds(first_row, TILE), columns], q_in.at[half], q_full)
            plgpu.copy_gmem_to_smem(qr_ref.at[request, pl.ds(first_row, TILE)], qr_in, q_full)

        def producer(cta: int | None):
            """`cta` is the number of this CTA in the cluster; None if CTAs do not share tiles."""
            plgpu.set_max_registers(config.producer_registers, action="decrease")
            first, end, first_tile = load_work_range(partitions_ref, partition)
            gather_tiles: Any = ConvertedTiles if rows.quantised else CopiedTiles
            if rope_in_values:
                extra_kv = ExtraRefs(extra_refs[0], extra_refs[1], extra_refs[2][0]) if extra_refs else None
                gather_tiles = partial(FP8V4Tiles, extra=extra_kv, count_ref=count_refs[0] if count_refs else None)
            gather = gather_tiles(
                rows,
                config.prefetch,
                config.units_ahead,
                kv_ref,
                zero_ref,
                slot_ref,
                k,
                r,
                stats,
                k_full,
                k_free,
                cta,
            )
            load_tile = partial(load_work_tile, work_tiles_ref)
            gather.run(layer_ref[0], first, end, first_tile, load_tile, q_free, fetch_queries)

        def consumer(side):
            operand = scratch["operands"].at[side] if interpret else None

            def wait_for_both():
                plgpu.barrier_arrive(both)
                plgpu.barrier_wait(both)

            plgpu.set_max_registers(consumer_registers(config.producer_registers), action="increase")
            first, end, first_tile = load_work_range(partitions_ref, partition)
            results = KernelResults(out_ref, lse_ref, split_out_ref, split_lse_ref, split_scale_ref)
            value_scale = kv_scale_refs[0][0] if kv_scale_refs else None
            epilogue = HalvesEpilogue(results, stats, wait_for_both, softmax, first_row, stored, value_scale)
            scale = scale_ref[0] * LOG2E
            if value_scale is not None:
                scale *= value_scale

            def load_sinks(ref):
                return plgpu.load(ref.at[pl.ds(first_row, TILE)], layout=ROW, optimized=False) * LOG2E

            def scale_queries():
                """Converts the queries to float16, if necessary; returns the factor of the scores of each row."""
                if dtype == k_dtype:
                    return filled(ROW, 1.0, TILE) * scale
                return fit_queries(side, (q_in, q), (qr_in, qr), stats, Q_MAX, wait_for_both) * scale

            def scores(row_scale, i, phase, last):
                """Scores of this side's tile plus logarithms of factors, and a function that sums its weights."""
                z = opaque_zero(i)
                tile = z + side
                near, far = side, 1 - side

                def product(acc):
                    if side == 1:
                        plgpu.barrier_wait(s_issued)
                    for half in (near, far):
                        k_full.wait(2 * side + half, phase)
                        if rope_in_values:
                            for n in range(HALF // COLUMNS):
                                keys = k.at[tile, half, :, pl.ds(n * COLUMNS, COLUMNS)]
                                plgpu.wgmma(acc, q.at[z + (half * HALF // COLUMNS + n)], keys.transpose((1, 0)))
                        else:
                            plgpu.wgmma(acc, q.at[z + half], k.at[tile, half].transpose((1, 0)))
                    if not rope_in_values:
                        if rows.quantised:
                            k_full.wait(HALVES + side, phase)
                        plgpu.wgmma(acc, qr, r.at[tile].transpose((1, 0)))
                    if side == 0:
                        plgpu.barrier_arrive(s_issued)
                    return acc[...]

                s = pl.run_scoped(product, plgpu.ACC((TILE, TILE), jnp.float32)) * over_columns(row_scale, TILE)

                @pl.when(i == last)
                def _():
                    plgpu.barrier_arrive(q_free)  # the producer may fetch the next request's queries

                flags = [stats[FLAG, 4 * side + warp] for warp in range(4)]
                special = flags[0] + flags[1] + flags[2] + flags[3] > 0

                def load_factors():
                    return plgpu.load(stats.at[FACTOR + side], layout=COLUMN)

                def multiply_factors(s):
                    return s * over_rows(jnp.abs(load_factors()), TILE)

                def add_logarithms(s):
                    factors = load_factors()
                    masked = over_rows(factors, TILE) < 0
                    return jnp.where(masked, MASKED, s + over_rows(jnp.log2(jnp.abs(factors)), TILE))

                if call.logit_cap is None:
                    s = lax.cond(special, lambda s: add_logarithms(multiply_factors(s)), lambda s: s, s)
                else:
                    s = cap_scores(lax.cond(special, multiply_factors, lambda s: s, s), call.logit_cap)
                    s = lax.cond(special, add_logarithms, lambda s: s, s)

                def row_sums(w):
                    """Sums per lane of weights without their factors."""
                    return lax.cond(
                        special,
                        lambda w: fold_columns(jnp.add, w * over_rows(1 / jnp.abs(load_factors()), TILE)),
                        partial(fold_columns, jnp.add),
                        w,
                    )

                return s, row_sums

            def share_max(running_max):
                stats[0] = running_max

            def weights(s, running_max, row_sums):
                w = softmax.weights(s, running_max)
                return w.astype(k_dtype), row_sums(w)

            def share_weights(w16, t):
                """Shares the weights of a tile with the other consumer."""
                p[...] = w16
                plgpu.commit_smem()
                plgpu.barrier_arrive(p_ready[t])

            def add_values(weights, i, t, acc, meanwhile=None):
                """acc + weights @ (this side's half of a tile's values), and what `meanwhile` returned."""
                z = opaque_zero(i)
                return multiply_add(acc, weights, k.at[z + t, z + side], meanwhile, scratch=operand)

            def pair0(row_scale, last, pairs_before, i, carry):
                acc, old_max, row_sum = carry
                s, row_sums = scores(row_scale, i, pairs_before + i, last)
                max0 = softmax.update_max(s, old_max, share_max)
                w16, added = weights(s, max0, row_sums)
                share_weights(w16, 0)
                acc, row_sum = softmax.rescale(old_max, max0, acc, row_sum)
                acc, _ = add_values(w16, i, 0, acc)
                plgpu.barrier_arrive(k_free[0])
                plgpu.barrier_wait(p_ready[1])
                max1 = plgpu.load(stats.at[0], layout=ROW)
                acc, row_sum = softmax.rescale(max0, max1, acc, row_sum + added)
                acc, _ = add_values(p, i, 1, acc)

                @pl.when(i != last)
                def _():
                    plgpu.barrier_arrive(k_free[2])

                return acc, max1, row_sum

            def pair1(row_scale, last, pairs_before, i, carry):
                acc, old_max, row_sum = carry
                s, row_sums = scores(row_scale, i, pairs_before + i, last)
                plgpu.barrier_wait(p_ready[0])
                max0 = plgpu.load(stats.at[0], layout=ROW)
                acc, row_sum = softmax.rescale(old_max, max0, acc, row_sum)

                def softmax_of_tile_1():
                    max1 = softmax.update_max(s, max0, share_max)
                    return max1, *weights(s, max1, row_sums)

                acc, (max1, w16, added) = add_values(p, i, 0, acc, meanwhile=softmax_of_tile_1)
                plgpu.barrier_arrive(k_free[1])
                acc, row_sum = softmax.rescale(max0, max1, acc, row_sum)
                acc, _ = add_values(w16, i, 1, acc, meanwhile=partial(share_weights, w16, 1))

                @pl.when(i != last)
                def _():
                    plgpu.barrier_arrive(k_free[3])

                return acc, max1, row_sum + added

            step = (pair0, pair1)[side]

            def run(n, state: tuple[WorkTile, Any]):
                tile, pairs_before = state  # pairs_before: pairs before this work tile
                ahead = load_work_tile(work_tiles_ref, n + 1)  # the loads proceed while this one is computed
                request, begin, end, split = tile.request, tile.begin, tile.end, tile.split
                plgpu.barrier_wait(q_full)
                row_scale = scale_queries()
                last = end - 1
                if side == 0:
                    stats[0] = softmax.empty_max(TILE)
                carry = zeros(TILE, HALF), softmax.empty_max(TILE), zeros(TILE, LANE_COLUMNS)
                acc, running_max, row_sum = lax.fori_loop(
                    begin, end, partial(step, row_scale, last, pairs_before - begin), carry
                )

                stage = stages.at[opaque_zero(last) + 1, side]
                own_sinks = [partial(load_sinks, ref) for ref in sink_refs]
                epilogue.store(side, acc, row_sum, running_max, request, split, stage, *own_sinks)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(k_free[2 + side])
                return ahead, pairs_before + (end - begin)

            lax.fori_loop(first, end, run, (first_tile, jnp.int32(0)))

        def produce():
            if cluster == 1 or interpret:  # the interpreter's CTAs each convert whole tiles
                producer(None)
            else:  # a program for each: where its units lie is then part of the instructions
                lax.cond(cta == 0, partial(producer, 0), partial(producer, 1))

        # Nested branches: with three in a row, values that the last one needs would be live, and spilled, in the first.
        lax.cond(wg == 2, produce, lambda: lax.cond(wg == 0, partial(consumer, 0), partial(consumer, 1)))

    def viewed(*shape, own_dtype=k_dtype):
        """Shared memory with two views: in the dtype that is multiplied, and in the dtype of queries and results."""
        own = swizzled(*shape, dtype=own_dtype)
        if dtype == own_dtype:
            return own
        views = own, swizzled(*shape, dtype=dtype)
        # The interpreter reports any two accesses to a union through different views as a race.
        return views if interpret else plgpu.RefUnion(*views)

    rotary = {}
    if isinstance(rows, GatheredRows):
        rotary["qr"] = viewed(TILE, ROPE, own_dtype=rows.rope_dtype)
        rotary["r"] = swizzled(2, TILE, ROPE, dtype=rows.rope_dtype)
    results = kernel(
        body,
        interpret=interpret,
        auto_barriers=False,
        out_type=result_types(
            (batch,),
            plan.max_splits,
            dtype,
            rows=heads,
            width=width,
            split_width=LATENT,
            lse=(tiles - 1) * TILE + stored,
            split_lse=tiles * TILE,
            scales=2,
        ),
        grid=(tiles // cluster, plan.num_partitions),
        grid_names=("group", "partition"),
        cluster=(cluster,),
        cluster_names=("cta",),
        num_threads=3,
        thread_name="wg",
        kernel_name="decode_mla_sparse",
        scratch_types={
            "q": viewed(width // COLUMNS, TILE, COLUMNS) if rope_in_values else viewed(2, TILE, HALF),
            "k": viewed(2, 2, TILE, HALF),
            **rotary,
            "p": swizzled(TILE, TILE, dtype=k_dtype),
            "stats": plgpu.SMEM((STATS, TILE), jnp.float32),
            "q_full": plgpu.Barrier(num_arrivals=width // COLUMNS if rope_in_values else 3),
            "one_arrives": plgpu.Barrier(num_barriers=3 + FULL if interpret else 3),
            "k_free": plgpu.ClusterBarrier(collective_axes=("cta",), num_barriers=HALVES)
            if cluster > 1
            else plgpu.Barrier(num_barriers=HALVES),
            "two_arrive": plgpu.Barrier(num_arrivals=2, num_barriers=2),
            # The interpreter needs register operands of wgmma in shared memory.
            **({"operands": swizzled(2, TILE, TILE, dtype=k_dtype)} if interpret else {}),
        },
    )(
        call.q_latent,
        call.q_pe,
        rows.buffer(call.buffer),
        rows.zeros(),
        call.slots,
        jnp.reshape(call.layer, (1,)),
        jnp.reshape(call.scale, (1,)),
        plan.partitions,
        plan.work_tiles,
        plan.split_requests,
        *kv_scales,
        *sink_arrays,
        *count_arrays,
        *extra_arrays,
    )
    return KernelResults(*results)


def _divided(refs, *arrays) -> list[Any]:
    """References, in lists as long as those of the arrays that they are for."""
    lists, refs = [], list(refs)
    for some in arrays:
        lists.append(refs[: len(some)])
        refs = refs[len(some) :]
    return lists


def decode_by_slots(call: DecodeMLA) -> tuple[jax.Array, jax.Array]:
    """A `decode_mla` call, with a plan of `plan_by_slots`, as attention of each query token to slots."""
    batch, tokens, heads, _ = call.q_latent.shape
    block_tables, block_size = call.block_tables, call.pages.block_size
    size = _most_slots(call)
    if call.window is None:
        positions = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size))
        slots = slots_for(block_tables, positions, block_size=block_size)
        slots = jnp.broadcast_to(slots[:, None], (batch, tokens, size))
    else:
        first, _ = _seen(call)
        positions = (first[..., None] + jnp.arange(size, dtype=jnp.int32)).reshape(batch, -1)
        slots = slots_for(block_tables, positions, block_size=block_size).reshape(batch, tokens, size)
    by_slots = DecodeMLASparse(
        q_latent=call.q_latent,
        q_pe=call.q_pe,
        buffer=call.buffer,
        slots=slots,
        counts=None,
        sinks=None,
        layer=call.layer,
        scale=call.scale,
        kv_scale=None,
        extra=None,
        pages=call.pages,
        entry=call.entry,
        logit_cap=call.logit_cap,
        batch_invariant=False,
        max_logits=False,
    )
    config = config_of(call.entry.format, queries=batch * tokens, size=size, heads=heads)
    return _attend_and_combine(by_slots, call.plan, config=config, interpret=bool(interpreting.value))


def plan_by_slots(call: DecodeCall | PlanDecode) -> Plan:
    """The schedule of such calls."""
    (begins, ends), size = _seen(call), _most_slots(call)
    counts = (ends - begins).reshape(-1)
    config = config_of(call.entry.format, queries=counts.size, size=size, heads=call.heads)
    return plan_slots(
        counts,
        size=size,
        heads=call.heads,
        costs=config.split_costs,
        batch_invariant=call.batch_invariant,
        by_kernel=not interpreting.value,
    )


def _seen(call: DecodeCall | PlanDecode) -> tuple[jax.Array, jax.Array]:
    """The first token that each query token sees, and the position after the last one; int32 [B, Q]."""
    lengths = lengths_in_table(call.seq_lens, call.block_tables, call.pages.block_size)
    begins, ends = query_ranges(lengths, call.q_len, call.window, call.ahead, call.trailing)
    return begins, jnp.maximum(ends, begins)


def _most_slots(call: DecodeCall | PlanDecode) -> int:
    """The most tokens that a query token sees."""
    size = table_tokens(call.block_tables, call.pages.block_size)
    return size if call.window is None or call.ahead is None else min(size, call.window + call.ahead)
