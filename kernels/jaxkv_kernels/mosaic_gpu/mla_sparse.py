"""Sparse MLA decode on sm_90, in tiles of 64 rows: each query token attends to slots of its own.

Latents have 512 or 448 values, and rotary parts 64.  To the plan, each query token is a request of its own, with
`counts` slots.

Dense calls on some quantised entries also run here (`decode_from_pages`): the slots are then those of the positions of
a block table, which the producer looks up.  Several query tokens of a request each read its entries again.  With a
window, a query token has the slots of the tokens in it only.

Work.  A tile is 64 heads of a query token by 64 keys (slots).  A CTA owns one tile of heads and walks its partition of
the plan: work tiles, each a range of pairs of key tiles of a query token.

With up to 16 heads, `fp8` and `fp8_ds_mla` entries run in the kernel of few rows instead (`swaps_operands`).

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
    K1 likewise (factors, right half, ...)                                  meanwhile P1: arrives p_ready[1]
                      -> k_free[3], [2]  O0 += P1 K1 left  -> p_ready[1]
                                           arrives k_free[2]

The columns are `GatherTiles.run` with `_fetch_pair` (`gather_keys.py`), `Consumer.pair_of_consumer_0` and
`Consumer.pair_of_consumer_1`.  This is the order of `mla_dense.py`.  Copies arrive at k_full when they land, while the
producer goes on to the next half.

For `fp8_v4` entries, V is the whole entry, RoPE included: K = V (`gather_fp8_v4.py`).  Their rotary parts are the last
columns of K, and those of the queries the last columns of Q: ignore what follows about rotary keys and queries
for them.  Their slots may be in two caches, of which the second one's tiles follow those of the first.

Tiles of quantised entries are not copied: they pass through registers of the producer, which converts them.  Its loads
run ahead of its stores, also from one tile or work tile to the next (`gather_keys.py`), so that the values of a half
are in registers when k_free completes.  Rotary keys of `fp8_ds_mla` entries are copied; the copies start before K0 left
is stored, and the producer does not wait for them.  Rotary keys of `fp8` entries are loaded before K0 left is stored,
and converted and stored after K0 right.

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
    k_full[2t + h]   half h of key tile t is in shared memory (each lane of the producer).  The half that is stored
                     first also covers the factors.  If keys are copied, the half that is stored last covers the rotary
                     keys, which otherwise have barrier 4 + t.  These are not Pallas's barriers (`lane_barriers.py`).
    k_free[2t + h]   the consumer that is the last to multiply this half is done with it.  K1's halves stage the result
                     of a work tile, and are freed once TMA has read it.
    s_issued         S0's products have been issued
    p_ready[t]       P of tile t is in p, and the running max after tile t is in stats[0]
    both             both consumers arrive, and both wait: the largest magnitudes of queries, the scaled queries or the
                     row sums of both are in shared memory
These order every reuse.  P1 overwrites P0 once consumer 1, its only reader, has multiplied it.  The next P0 overwrites
P1 once consumer 0, its only reader, has multiplied it.  Factors and rotary keys of a tile are read by one
consumer, before it frees the half that was stored first.  Automatic barriers are off, as in `mla_dense.py`.

Budget.  Shared memory: Q 72 KiB + K 128 KiB + rotary keys 16 KiB + P 8 KiB + stats 2 KiB = 226 KiB, and 80 bytes of
Pallas's barriers, of 227 KiB; 202 KiB for `fp8_v4` entries.  Registers: 224 per lane for consumers, 56 for the
producer; 208 and 88 for quantised entries.  Pallas places each array at a multiple of 1,024 bytes, so `stats`, float32
[8, 64], cannot have another row:

    0        the running max; at the end of a work tile, the lse
    1, 2     row sums of the consumers (`epilogue.py`)
    3, 4     largest magnitudes of the queries, by consumer (Q_MAX), if queries are converted
    5, 6     factors of key tiles 0 and 1 (FACTOR)
    7        columns 0 to 7: whether tiles have factors other than 1, by tile and warp (FLAG); columns 32 to 43:
             barriers of two words each (BARRIERS)
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.addressing import Pages, lengths_in_table, table_tokens
from jaxkv_kernels.calls import STATIC, DecodeCall, DecodeMLA, DecodeMLASparse, PlanDecode, max_logits_reasons, record
from jaxkv_kernels.extra_slots import ExtraSlots
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
    Slots,
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


def default_config(format: str, tiles: int) -> SparseConfig:
    """The default configuration of a `decode_mla_sparse` call, for entries of a format and key tiles per CTA.

    Calls with few tiles per CTA are slower with prefetching: 8 requests with 128 heads and 2,048 slots (4 tiles) take
    0.0276 ms instead of 0.0215, and 32 requests (16 tiles) 0.0634 instead of 0.0594.  With an overhead of 2 steps, 64
    requests with 64 heads and 128 + 512 slots of `fp8_v4` entries stay whole, and take 0.0404 ms instead of 0.0354.
    With prefetching, these took 0.0300 ms instead of 0.0303, later, and with 128 heads 0.0354 instead of 0.0356 (the
    least of seven chains, beside other programs).  More tiles per CTA were not timed with the present loads.
    """
    if format in ("bf16", "f16"):
        return SparseConfig()
    if format == "fp8_v4":
        prefetch = tiles < PREFETCHED_TILES
        return SparseConfig(producer_registers=88, prefetch=prefetch, split_costs=replace(_SPLIT_COSTS, overhead=1))
    return SparseConfig(producer_registers=88, prefetch=format == "fp8_ds_mla" and tiles >= PREFETCHED_TILES)


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
        config, step = configuration(QuantisedSwapABConfig()), TILE
    else:
        config, step = config_of(call.entry.format, queries=batch * tokens, size=size, heads=heads), PAIR
    plan_of = partial(
        plan_slots, size=size, heads=heads, step=step, costs=config.split_costs, batch_invariant=call.batch_invariant
    )
    if lengths is None:
        with jax.ensure_compile_time_eval():
            plan = plan_of(jnp.full(batch * tokens, size, jnp.int32))
            plan = replace(plan, whole=not bool((plan.split_requests[:, 0] >= 0).any()))
    else:
        plan = plan_of(lengths.reshape(-1), by_kernel=not interpreting.value)
    if isinstance(config, QuantisedSwapABConfig):
        return _attend_few_heads(call, plan, config=config, interpret=bool(interpreting.value))
    return _attend_to_slots(_by_query_token(call), plan, config=config, interpret=bool(interpreting.value))


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
    tiles = queries * -(-size // TILE) * -(-heads // TILE)
    return configuration(default_config(format, tiles // multiprocessors()))


@record
class SlotAttention:
    """Attention of each query token to the entries at slots of its own, or of the block table of its request."""

    q_latent: jax.Array
    """[B, Q, heads, R]."""
    q_pe: jax.Array
    """[B, Q, heads, P]."""
    buffer: jax.Array
    slots: Slots
    """Of B x Q query tokens."""
    counts: jax.Array | None
    """int32 [B x Q], how many slots of the first of two lists are used; None for all.  Those of one list: the plan."""
    sinks: jax.Array | None
    """float32 [heads]."""
    layer: jax.Array
    scale: jax.Array
    kv_scale: jax.Array | None
    extra: ExtraSlots | None
    """The slots [B x Q, K'] of a second cache."""
    pages: Pages = field(metadata=STATIC)
    entry: MLAEntry = field(metadata=STATIC)
    logit_cap: float | None = field(metadata=STATIC)


def _by_query_token(call: DecodeMLASparse) -> SlotAttention:
    """The same call, with slots and counts by query token."""
    queries, counts, extra = call.slots.shape[0] * call.slots.shape[1], None, call.extra
    if extra is not None:
        counts = None if call.counts is None else call.counts.reshape(-1)
        extra = replace(extra, slots=extra.slots.reshape(queries, -1))
    return SlotAttention(
        q_latent=call.q_latent,
        q_pe=call.q_pe,
        buffer=call.buffer,
        slots=Slots(of=call.slots.reshape(queries, -1)),
        counts=counts,
        sinks=call.sinks,
        layer=call.layer,
        scale=call.scale,
        kv_scale=call.kv_scale,
        extra=extra,
        pages=call.pages,
        entry=call.entry,
        logit_cap=call.logit_cap,
    )


@partial(jax.jit, static_argnames=("config", "interpret"))
def _attend_to_slots(
    call: SlotAttention, plan: Plan, *, config: SparseConfig, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Out [B, Q, heads, R] and lse [B, Q, heads], by a plan in which each query token is a request."""
    batch, tokens, heads, _ = call.q_latent.shape
    requests = batch * tokens
    pad = ((0, 0), (0, -heads % 8), (0, 0))  # TMA tiles are of 8 rows
    q_latent, q_pe = (jnp.pad(q.reshape(requests, heads, -1), pad) for q in (call.q_latent, call.q_pe))
    sinks, extra = None if call.sinks is None else jnp.pad(call.sinks, (0, -heads % TILE)), call.extra
    rows: Any = (InterpretedRows if interpret else GatheredRows)(call.pages, call.entry, call.buffer.dtype.itemsize)
    if call.entry.codec.rope_in_values:
        sources = [rows]
        if extra is not None:
            sources.append(GatheredRows(extra.pages, extra.entry, extra.buffer.dtype.itemsize))
        first_tiles = 2 * -(-call.slots.of.shape[-1] // PAIR)
        rows = (InterpretedFP8V4Rows if interpret else FP8V4Rows)(tuple(sources), first_tiles)
    padded = replace(call, q_latent=q_latent, q_pe=q_pe, sinks=sinks)
    results = attend(padded, plan, rows, config, interpret=interpret)
    out, lse = results.out, results.lse
    if not plan.whole:
        out, lse = combine(results, plan, rows=heads, interpret=interpret, sinks=sinks)
    return out[:, :heads].reshape(batch, tokens, heads, -1), lse[:, :heads].reshape(batch, tokens, heads)


def attend(
    call: SlotAttention, plan: Plan, rows: GatheredRows | FP8V4Rows, config: SparseConfig, *, interpret: bool
) -> KernelResults:
    """Results of whole query tokens, and of splits.

    The queries of `call` are by query token, [N, heads rounded up to 8, R], and sinks are [heads rounded up to 64].
    Entries are multiplied by `kv_scale` unless that is None.  R is 512, or 448.  With `FP8V4Rows`, rotary parts then
    follow, as part of keys and values.  With other rows, queries and keys in shared memory end with zeros, and the last
    columns of the output are not stored.

    `extra` are the slots [N, K'] of a second cache, whose tiles follow those of `slots`.  The plan counts slots as if
    `slots` were whole pairs of tiles.  Of these, the first `counts` [N] are used, or all.
    """
    return MLASparse(call, plan, rows, config, interpret=interpret).run()


class ExtraOperands(NamedTuple):
    """The arrays of a second cache."""

    kv: Any
    slots: Any
    layer: Any
    """int32 [1]."""


class Operands(NamedTuple):
    """The arrays that the kernel reads; in the kernel, references to them."""

    q: Any
    """Queries [N, heads, R]."""
    qr: Any
    """Rotary queries [N, heads, P]."""
    kv: Any
    """The cache."""
    zeros: Any
    """See `GatheredRows.zeros`."""
    slots: Any
    """The arrays of `Slots`."""
    layer: Any
    """int32 [1]."""
    scale: Any
    """The softmax scale, float32 [1]."""
    partitions: Any
    """Of the plan, like the next two."""
    work_tiles: Any
    split_requests: Any
    kv_scale: Any
    """float32 [1], or None."""
    sinks: Any
    """float32 [heads rounded up to 64], or None."""
    counts: Any
    """int32 [N], or None."""
    extra: ExtraOperands | None


class Memory(NamedTuple):
    """Shared memory: operands of the products, and the places where queries land and results are staged."""

    q: Any
    """Queries [2, 64, 256], by halves, or [8, 64, 64] if rotary parts are their last columns."""
    qr: Any
    """Rotary queries [64, 64]; None if they are in `q`."""
    k: Any
    """Keys [2, 2, 64, 256]: key tiles, halves."""
    r: Any
    """Rotary keys [2, 64, 64]: key tiles; None if they are in `k`."""
    q_in: Any
    """`q` in the dtype of queries."""
    qr_in: Any
    """`qr` in the dtype of queries."""
    results: Any
    """`k` in the dtype of results."""
    p: Any
    """Weights [64, 64], of both tiles in turn."""
    stats: Any
    """float32 [STATS, 64]."""
    register_operands: Any
    """Register operands of wgmma [2, 64, 64], which the interpreter needs in shared memory; None on a GPU."""


class Barriers(NamedTuple):
    """The barriers of the table at the head of this file."""

    q_full: Any
    q_free: Any
    k_full: Any
    """`LaneBarriers`, `CopyBarriers` or `InterpretedBarriers`: halves 2t + h and, with HALVES + t, rotary keys."""
    k_free: Any
    s_issued: Any
    p_ready: Any
    both: Any

    def wait_for_both(self) -> None:
        """Called by both consumers; returns when both have called it."""
        plgpu.barrier_arrive(self.both)
        plgpu.barrier_wait(self.both)


class MLASparse:
    """The kernel for calls of these shapes: its sizes, its memory, and its launch."""

    def __init__(self, call: SlotAttention, plan: Plan, rows, config: SparseConfig, *, interpret: bool):
        self.call, self.plan, self.rows, self.config, self.interpret = call, plan, rows, config, interpret
        self.batch, self.heads, self.latent = call.q_latent.shape
        self.tiles = -(-self.heads // TILE)
        self.rope_in_values = isinstance(rows, FP8V4Rows)
        self.width = self.latent + call.q_pe.shape[-1] if self.rope_in_values else self.latent
        # Rows of a tile in arrays with one value per row: TMA does not clip copies to them.
        self.stored = min(self.heads, TILE)
        self.dtype, self.k_dtype = call.q_latent.dtype, rows.latent_dtype
        self.softmax = OnlineSoftmax(keys=1, threshold=config.rescale_threshold, interpret=interpret)

    def run(self) -> KernelResults:
        """Launches a CTA per partition of the plan and tile of heads."""
        (results,) = kernel(
            self.cta,
            interpret=self.interpret,
            auto_barriers=False,
            out_type=(self.result_types(),),
            grid=(self.tiles, self.plan.num_partitions),
            grid_names=("group", "partition"),
            num_threads=3,
            thread_name="wg",
            kernel_name="decode_mla_sparse",
            scratch_types=self.scratch_types(),
        )(self.operands())
        return results

    def operands(self) -> Operands:
        """The arrays that the kernel reads."""
        call, plan, extra = self.call, self.plan, self.call.extra
        if extra is not None:
            extra = ExtraOperands(self.rows.buffer(extra.buffer), extra.slots, jnp.reshape(extra.layer, (1,)))
        return Operands(
            q=call.q_latent,
            qr=call.q_pe,
            kv=self.rows.buffer(call.buffer),
            zeros=self.rows.zeros(),
            slots=call.slots.refs,
            layer=jnp.reshape(call.layer, (1,)),
            scale=jnp.reshape(call.scale, (1,)),
            partitions=plan.partitions,
            work_tiles=plan.work_tiles,
            split_requests=plan.split_requests,
            kv_scale=None if call.kv_scale is None else jnp.reshape(call.kv_scale, (1,)),
            sinks=call.sinks,
            counts=call.counts,
            extra=extra,
        )

    def result_types(self) -> KernelResults:
        """Shapes and dtypes of the results."""
        return result_types(
            (self.batch,),
            self.plan.max_splits,
            self.dtype,
            rows=self.heads,
            width=self.width,
            split_width=LATENT,
            lse=(self.tiles - 1) * TILE + self.stored,
            split_lse=self.tiles * TILE,
            scales=2,
        )

    def scratch_types(self) -> dict[str, Any]:
        """Shared memory and barriers.

        "q", "qr" and "k" are two views of the same memory, unless their dtype is that of queries and results.  Barriers
        with equal numbers of arrivals share an array: their addresses and phases take fewer registers.
        """
        width, k_dtype = self.width, self.k_dtype

        def viewed(*shape, own_dtype=k_dtype):
            own = swizzled(*shape, dtype=own_dtype)
            if self.dtype == own_dtype:
                return own
            views = own, swizzled(*shape, dtype=self.dtype)
            # The interpreter reports any two accesses to a union through different views as a race.
            return views if self.interpret else plgpu.RefUnion(*views)

        rotary = {}
        if isinstance(self.rows, GatheredRows):
            rotary["qr"] = viewed(TILE, ROPE, own_dtype=self.rows.rope_dtype)
            rotary["r"] = swizzled(2, TILE, ROPE, dtype=self.rows.rope_dtype)
        return {
            "q": viewed(width // COLUMNS, TILE, COLUMNS) if self.rope_in_values else viewed(2, TILE, HALF),
            "k": viewed(2, 2, TILE, HALF),
            **rotary,
            "p": swizzled(TILE, TILE, dtype=k_dtype),
            "stats": plgpu.SMEM((STATS, TILE), jnp.float32),
            "q_full": plgpu.Barrier(num_arrivals=width // COLUMNS if self.rope_in_values else 3),
            "one_arrives": plgpu.Barrier(num_barriers=3 + FULL if self.interpret else 3),
            "k_free": plgpu.Barrier(num_barriers=HALVES),
            "two_arrive": plgpu.Barrier(num_arrivals=2, num_barriers=2),
            # The interpreter needs register operands of wgmma in shared memory.
            **({"register_operands": swizzled(2, TILE, TILE, dtype=k_dtype)} if self.interpret else {}),
        }

    def memory(self, scratch: dict[str, Any]) -> Memory:
        """The shared memory of `scratch_types`, by name and view."""

        def views(name: str, own) -> tuple[Any, Any]:
            memory: Any = scratch.get(name)
            return (memory, memory) if own == self.dtype else tuple(memory)

        (q, q_in), (k, results) = views("q", self.k_dtype), views("k", self.k_dtype)
        qr, qr_in = views("qr", self.rows.rope_dtype)
        return Memory(
            q=q, qr=qr, k=k, r=scratch.get("r"), q_in=q_in, qr_in=qr_in, results=results, p=scratch["p"],
            stats=scratch["stats"], register_operands=scratch.get("register_operands"),
        )  # fmt: skip

    def barriers(self, scratch: dict[str, Any]) -> Barriers:
        """The barriers of `scratch_types` and of `stats`."""
        one, two, stats = scratch["one_arrives"], scratch["two_arrive"], scratch["stats"]
        k_free = [scratch["k_free"].at[n] for n in range(HALVES)]
        s_issued, *p_ready = (one.at[n] for n in range(3))
        q_free, both = (two.at[n] for n in range(2))
        k_full: Any = LaneBarriers(stats, BARRIERS, FULL)
        if self.interpret:
            k_full = InterpretedBarriers([one.at[3 + n] for n in range(FULL)])
        elif not self.rows.quantised:
            k_full = CopyBarriers(stats, BARRIERS, HALVES, arrivals=2 * LANES)
        return Barriers(scratch["q_full"], q_free, k_full, k_free, s_issued, p_ready, both)

    def cta(self, operands: Operands, results: KernelResults, **scratch) -> None:
        """What a CTA runs."""
        memory, barriers = self.memory(scratch), self.barriers(scratch)
        if not self.plan.whole:  # otherwise the next kernel may be one of XLA's, instead of `combine`
            pdl_launch_dependents(operands.split_requests, interpret=self.interpret)
        partition, group, wg = (lax.axis_index(axis) for axis in ("partition", "group", "wg"))
        cta = CTA(self, operands, memory, barriers, partition, group * TILE)
        barriers.k_full.start()
        # Nested branches: with three in a row, values that the last one needs would be live, and spilled, in the first.
        consumers = [Consumer(cta, side, results) for side in range(2)]
        lax.cond(wg == 2, Producer(cta).run, lambda: lax.cond(wg == 0, *(consumer.run for consumer in consumers)))


@dataclass(frozen=True)
class CTA:
    """What producer and consumers of a CTA share."""

    kernel: MLASparse
    operands: Operands
    memory: Memory
    barriers: Barriers
    partition: Any
    first_row: Any
    """The first row of its tile of heads."""

    def load_work(self) -> tuple[Any, Any, WorkTile]:
        """The index of the first work tile of this CTA, that after the last, and the first one."""
        return load_work_range(self.operands.partitions, self.partition)

    def load_tile(self, n) -> WorkTile:
        """The n-th work tile."""
        return load_work_tile(self.operands.work_tiles, n)


class Producer:
    """The warpgroup that gathers keys, and has queries fetched; `gather_keys.py` has its loop over tiles."""

    def __init__(self, cta: CTA):
        self.cta, self.kernel = cta, cta.kernel

    def run(self) -> None:
        """Walks the work tiles of the CTA."""
        plgpu.set_max_registers(self.kernel.config.producer_registers, action="decrease")
        first, end, first_tile = self.cta.load_work()
        tiles = self.tiles()
        layer, q_free = self.cta.operands.layer[0], self.cta.barriers.q_free
        tiles.run(layer, first, end, first_tile, self.cta.load_tile, q_free, self.fetch_queries)

    def tiles(self) -> ConvertedTiles | CopiedTiles | FP8V4Tiles:
        """The gathered tiles: where they come from, where they go, and their barriers."""
        kernel, operands, memory, barriers = self.kernel, self.cta.operands, self.cta.memory, self.cta.barriers
        fields: dict[str, Any] = {
            "rows": kernel.rows,
            "prefetch": kernel.config.prefetch,
            "units_ahead": kernel.config.units_ahead,
            "kv_ref": operands.kv,
            "zero_ref": operands.zeros,
            "slots": kernel.call.slots.with_refs(operands.slots),
            "k": memory.k,
            "r": memory.r,
            "stats": memory.stats,
            "k_full": barriers.k_full,
            "k_free": barriers.k_free,
        }
        if not kernel.rope_in_values:
            return (ConvertedTiles if kernel.rows.quantised else CopiedTiles)(**fields)
        extra = operands.extra
        if extra is not None:
            extra = ExtraRefs(extra.kv, extra.slots, extra.layer[0])
        return FP8V4Tiles(**fields, extra=extra, count_ref=operands.counts)

    def fetch_queries(self, request) -> None:
        """Starts the copies of the queries of a request."""
        kernel, operands, memory, full = self.kernel, self.cta.operands, self.cta.memory, self.cta.barriers.q_full
        rows = pl.ds(self.cta.first_row, TILE)
        if kernel.rope_in_values:
            for n in range(kernel.width // COLUMNS):
                of_latent = n * COLUMNS < kernel.latent
                ref, first = (operands.q, n * COLUMNS) if of_latent else (operands.qr, n * COLUMNS - kernel.latent)
                plgpu.copy_gmem_to_smem(ref.at[request, rows, pl.ds(first, COLUMNS)], memory.q_in.at[n], full)
            return
        for half in range(2):
            columns = half_columns(half, kernel.latent, request)
            plgpu.copy_gmem_to_smem(operands.q.at[request, rows, columns], memory.q_in.at[half], full)
        plgpu.copy_gmem_to_smem(operands.qr.at[request, rows], memory.qr_in, full)


class Walk(NamedTuple):
    """What the pairs of a work tile have in common."""

    row_scale: Any
    """The factor of the scores of each row, in base 2."""
    last: Any
    """The last pair."""
    pairs_before: Any
    """Pairs of earlier work tiles, minus the first pair of this one."""


class Consumer:
    """Consumer `side` of two: it computes the scores of key tile `side` of each pair, and half `side` of the output."""

    def __init__(self, cta: CTA, side: int, results: KernelResults):
        self.cta, self.side, self.results, self.kernel = cta, side, results, cta.kernel
        self.memory, self.barriers, self.softmax = cta.memory, cta.barriers, cta.kernel.softmax
        self.scratch = self.memory.register_operands.at[side] if self.kernel.interpret else None
        # Set by `run`, since they are loaded.
        self.scale: Any
        self.value_scale: Any

    def run(self) -> None:
        """Walks the work tiles of the CTA."""
        plgpu.set_max_registers(consumer_registers(self.kernel.config.producer_registers), action="increase")
        first, end, first_tile = self.cta.load_work()
        operands = self.cta.operands
        self.value_scale = None if operands.kv_scale is None else operands.kv_scale[0]
        self.scale = operands.scale[0] * LOG2E
        if self.value_scale is not None:
            self.scale *= self.value_scale
        lax.fori_loop(first, end, self.work_tile, (first_tile, jnp.int32(0)))

    def work_tile(self, n, state: tuple[WorkTile, Any]) -> tuple[WorkTile, Any]:
        """Attends to the keys of a work tile and stores the result; returns the next one.  The numbers count pairs."""
        tile, pairs_before = state
        ahead = self.cta.load_tile(n + 1)  # the loads proceed while this one is computed
        request, begin, end, split = tile.request, tile.begin, tile.end, tile.split
        plgpu.barrier_wait(self.barriers.q_full)
        row_scale = self.scale_queries()
        last = end - 1
        if self.side == 0:
            self.share_max(self.softmax.empty_max(TILE))
        carry = zeros(TILE, HALF), self.softmax.empty_max(TILE), zeros(TILE, LANE_COLUMNS)
        walk = Walk(row_scale, last, pairs_before - begin)
        acc, running_max, row_sum = lax.fori_loop(begin, end, partial(self.pair, walk), carry)
        self.store(walk, request, split, acc, running_max, row_sum)
        return ahead, pairs_before + (end - begin)

    def scale_queries(self):
        """Converts the queries to float16, if necessary; returns the factor of the scores of each row."""
        kernel, memory = self.kernel, self.memory
        if kernel.dtype == kernel.k_dtype:
            return filled(ROW, 1.0, TILE) * self.scale
        latent, rope = (memory.q_in, memory.q), (memory.qr_in, memory.qr)
        return fit_queries(self.side, latent, rope, memory.stats, Q_MAX, self.barriers.wait_for_both) * self.scale

    def pair(self, walk: Walk, i, carry):
        """Attends to a pair of key tiles: the column of this consumer in the timeline."""
        return (self.pair_of_consumer_0, self.pair_of_consumer_1)[self.side](walk, i, *carry)

    def pair_of_consumer_0(self, walk: Walk, i, acc, old_max, row_sum):
        """S0, P0, and the left half of the values: O0 += P0 K0 left + P1 K1 left."""
        barriers, softmax = self.barriers, self.softmax
        s0, factors = self.scores(walk, i)
        max0 = softmax.update_max(s0, old_max, self.share_max)
        p0, sum0 = self.weights(s0, max0, factors)
        self.share_weights(p0, 0)
        acc, row_sum = softmax.rescale(old_max, max0, acc, row_sum)
        acc, _ = self.add_values(p0, i, 0, acc)
        plgpu.barrier_arrive(barriers.k_free[0])

        plgpu.barrier_wait(barriers.p_ready[1])
        max1 = self.shared_max()
        acc, row_sum = softmax.rescale(max0, max1, acc, row_sum + sum0)
        acc, _ = self.add_values(self.memory.p, i, 1, acc)
        pl.when(i != walk.last)(lambda: plgpu.barrier_arrive(barriers.k_free[2]))
        return acc, max1, row_sum

    def pair_of_consumer_1(self, walk: Walk, i, acc, old_max, row_sum):
        """S1, P1, and the right half of the values: O1 += P0 K0 right + P1 K1 right."""
        barriers, softmax = self.barriers, self.softmax
        s1, factors = self.scores(walk, i)
        plgpu.barrier_wait(barriers.p_ready[0])
        max0 = self.shared_max()
        acc, row_sum = softmax.rescale(old_max, max0, acc, row_sum)

        def softmax_of_tile_1():
            max1 = softmax.update_max(s1, max0, self.share_max)
            return max1, *self.weights(s1, max1, factors)

        acc, (max1, p1, sum1) = self.add_values(self.memory.p, i, 0, acc, meanwhile=softmax_of_tile_1)
        plgpu.barrier_arrive(barriers.k_free[1])
        acc, row_sum = softmax.rescale(max0, max1, acc, row_sum)
        acc, _ = self.add_values(p1, i, 1, acc, meanwhile=partial(self.share_weights, p1, 1))
        pl.when(i != walk.last)(lambda: plgpu.barrier_arrive(barriers.k_free[3]))
        return acc, max1, row_sum + sum1

    def scores(self, walk: Walk, i):
        """S of this consumer's key tile, plus logarithms of factors, and the `Factors` of its keys."""
        phase = walk.pairs_before + i
        z = opaque_zero(i)
        product = partial(self.multiply_queries, z, z + self.side, phase)
        s = pl.run_scoped(product, plgpu.ACC((TILE, TILE), jnp.float32)) * over_columns(walk.row_scale, TILE)
        # The producer may fetch the next request's queries.
        pl.when(i == walk.last)(lambda: plgpu.barrier_arrive(self.barriers.q_free))
        factors = Factors.of(self.memory.stats, self.side)
        return factors.apply(s, self.kernel.call.logit_cap), factors

    def multiply_queries(self, z, tile, phase, acc):
        """Q K' for key tile `tile`; `z` is an opaque zero, `phase` counts earlier pairs, `acc` accumulates."""
        kernel, memory, barriers, side = self.kernel, self.memory, self.barriers, self.side
        if side == 1:
            plgpu.barrier_wait(barriers.s_issued)
        for half in (side, 1 - side):  # in the order in which they are stored
            barriers.k_full.wait(2 * side + half, phase)
            if kernel.rope_in_values:
                for n in range(HALF // COLUMNS):
                    keys = memory.k.at[tile, half, :, pl.ds(n * COLUMNS, COLUMNS)]
                    plgpu.wgmma(acc, memory.q.at[z + (half * HALF // COLUMNS + n)], keys.transpose((1, 0)))
            else:
                plgpu.wgmma(acc, memory.q.at[z + half], memory.k.at[tile, half].transpose((1, 0)))
        if not kernel.rope_in_values:
            if kernel.rows.quantised:
                barriers.k_full.wait(HALVES + side, phase)
            plgpu.wgmma(acc, memory.qr, memory.r.at[tile].transpose((1, 0)))
        if side == 0:
            plgpu.barrier_arrive(barriers.s_issued)
        return acc[...]

    def weights(self, s, running_max, factors: "Factors"):
        """P of a tile, and its row sums per lane."""
        w = self.softmax.weights(s, running_max)
        return w.astype(self.kernel.k_dtype), factors.row_sums(w)

    def share_weights(self, p, t: int) -> None:
        """Passes P of key tile `t` to the other consumer."""
        self.memory.p[...] = p
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.barriers.p_ready[t])

    def share_max(self, running_max) -> None:
        """Passes the running max to the other consumer, with the weights that are shared next."""
        self.memory.stats[0] = running_max

    def shared_max(self):
        """The running max that the other consumer has passed."""
        return plgpu.load(self.memory.stats.at[0], layout=ROW)

    def add_values(self, p, i, t: int, acc, meanwhile=None):
        """O + P V for this side's half of key tile `t`, and what `meanwhile` returned."""
        z = opaque_zero(i)
        return multiply_add(acc, p, self.memory.k.at[z + t, z + self.side], meanwhile, scratch=self.scratch)

    def store(self, walk: Walk, request, split, acc, running_max, row_sum) -> None:
        """Stores this side's half of a result, staged in K1, which is free once TMA has read it."""
        kernel, memory, barriers = self.kernel, self.memory, self.barriers
        stage = memory.results.at[opaque_zero(walk.last) + 1, self.side]
        epilogue = HalvesEpilogue(
            self.results, memory.stats, barriers.wait_for_both, self.softmax, self.cta.first_row, kernel.stored,
            self.value_scale,
        )  # fmt: skip
        load_sinks = None if self.cta.operands.sinks is None else self.load_sinks
        epilogue.store(self.side, acc, row_sum, running_max, request, split, stage, load_sinks)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(barriers.k_free[2 + self.side])

    def load_sinks(self):
        """The sinks of the rows, in base 2."""
        rows = self.cta.operands.sinks.at[pl.ds(self.cta.first_row, TILE)]
        return plgpu.load(rows, layout=ROW, optimized=False) * LOG2E


@dataclass(frozen=True)
class Factors:
    """The factors of the keys of a tile, which are nearly always 1; every step that needs them skips a tile of ones."""

    stats: Any
    side: int
    special: Any
    """Whether some key has another one."""

    @classmethod
    def of(cls, stats, side: int) -> "Factors":
        """Those of tile `side`."""
        flags = [stats[FLAG, 4 * side + warp] for warp in range(4)]
        return cls(stats, side, flags[0] + flags[1] + flags[2] + flags[3] > 0)

    def load(self):
        """One per key; negative for masked keys."""
        return plgpu.load(self.stats.at[FACTOR + self.side], layout=COLUMN)

    def apply(self, s, logit_cap: float | None):
        """Scores times factors, capped, plus the logarithms of factors; those of masked keys masked."""
        if logit_cap is None:
            return lax.cond(self.special, lambda s: self.add_logarithms(self.multiply(s)), lambda s: s, s)
        s = cap_scores(lax.cond(self.special, self.multiply, lambda s: s, s), logit_cap)
        return lax.cond(self.special, self.add_logarithms, lambda s: s, s)

    def multiply(self, s):
        """Scores times the factors of keys."""
        return s * over_rows(jnp.abs(self.load()), TILE)

    def add_logarithms(self, s):
        """Scores plus the logarithms of factors; those of masked keys masked."""
        factors = self.load()
        masked = over_rows(factors, TILE) < 0
        return jnp.where(masked, MASKED, s + over_rows(jnp.log2(jnp.abs(factors)), TILE))

    def row_sums(self, w):
        """Sums per lane of weights without their factors."""
        return lax.cond(
            self.special,
            lambda w: fold_columns(jnp.add, w * over_rows(1 / jnp.abs(self.load()), TILE)),
            partial(fold_columns, jnp.add),
            w,
        )


def decode_from_pages(call: DecodeMLA) -> tuple[jax.Array, jax.Array]:
    """A `decode_mla` call, with a plan of `plan_from_pages`: each query token attends to the slots of its blocks."""
    batch, tokens, heads, _ = call.q_latent.shape
    begins = None if call.window is None else _seen(call)[0].reshape(-1)
    attention = SlotAttention(
        q_latent=call.q_latent,
        q_pe=call.q_pe,
        buffer=call.buffer,
        slots=Slots(of=call.block_tables, begins=begins, block_size=call.pages.block_size, tokens=tokens),
        counts=None,
        sinks=None,
        layer=call.layer,
        scale=call.scale,
        kv_scale=None,
        extra=None,
        pages=call.pages,
        entry=call.entry,
        logit_cap=call.logit_cap,
    )
    config = config_of(call.entry.format, queries=batch * tokens, size=_most_slots(call), heads=heads)
    return _attend_to_slots(attention, call.plan, config=config, interpret=bool(interpreting.value))


def plan_from_pages(call: DecodeCall | PlanDecode) -> Plan:
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
