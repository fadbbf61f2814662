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

The function `scores` computes S0 and S1.  It multiplies each by the softmax scale, times log2(e), as soon as the
product is complete: before the logit cap, the mask and the softmax.

Only CTAs that share key tiles prefetch to the L2 cache, and only if `prefetch` is set and tokens are contiguous.  If a
pair needs a mask, scores are masked before the softmax, and each consumer zeroes the values of unseen tokens in its own
half of the tile before it multiplies them.

Around the pairs of a work tile:

    producer                       consumers
    after K0 of the first pair,    -> qr_full: rotary queries from p[0] to registers; both arrive and wait on `both`
    the queries of the work tile   -> q_full: the pairs; after S0 and S1 of the last pair both arrive q_free
    (-> q_free, for Q)             consumer 1 arrives p_free after O1 += P0 K0 right of the last pair
    (-> p_free, for p[0])          results, staged in K1: arrive k_free[2], k_free[3] once TMA has read them

The longest dependency cycle is S0, P0, the release of K0 and the load of the next K0.  It determines the time per pair.
Both consumers therefore add P0 K0 before P1 K1, and S1 waits until all products of S0 have been issued.  Each consumer
passes its P and the running max (in `stats`) to the other through shared memory, and sums the weights of its own tiles.

Latents have up to 512 values, and their halves are of the same multiple of 64 columns.  If a latent is not a multiple
of 128, columns at the end of the second half are not part of it.  Rotary queries of fewer than 64 values stay in shared
memory of their own.

Barriers (mbarriers), and how many arrivals complete them: of TMA copies for `full`, of consumers for the others.
    q_full, qr_full    the queries have landed (2: halves); their rotary part has landed in p[0] or `qr` (1)
    q_free, p_free     both consumers have multiplied with the queries for the last time (2); p[0] was read for the
                       last time (1).  So the queries of the next work tile are loaded while this one ends.
    k_full[2t + h]     half h of key tile t has landed (1 per page); r_full[t]: its rotary part has landed (1 per page)
    k_free[2t + h]     consumer h, which is the last to multiply this half, is done with it (1 per CTA of the
                       cluster).  k_free[0] also frees K0's rotary part, and k_free[3] K1's.  K1's halves stage the
                       result of a work tile, and are freed once TMA has read it.
    s_issued           S0's products have been issued (1)
    p_ready[t]         P of tile t is in p[t], and the running max after tile t is in stats[0] (1)
    both               both consumers arrive, and both wait (2): both have read the rotary queries, which P0 overwrites;
                       the row sums of both are in stats[1:3]
These order every reuse of `p` and `stats`.  Consumer 0 overwrites P0 and stats[0] only after p_ready[1] and after K0
has landed again, which consumer 1 allowed when it was done with P0.  Consumer 1 overwrites P1 and stats[0] only after
the next p_ready[0].  The kernel is compiled without the barriers that Mosaic GPU inserts by default (`auto_barriers`).
If a thread writes to shared memory, the other threads of its warpgroup may therefore read that memory in two ways only:
by TMA or wgmma after `commit_smem`, or after they have waited for `both`.

Budget, for latents of 512.  Shared memory: Q 64 KiB + K 128 KiB + rotary keys 16 KiB + P 16 KiB + stats and barriers 1
KiB = 225 KiB of 227.  Registers: 240 per lane for consumers, 24 for the producer.

Quantised entries (`fp8`).  The stored bytes of half a tile take half the shared memory of its float16 values.  TMA
copies them to the first half of that memory, and the producer converts them to float16 in place (`E4M3Tiles`): it
waits for k_landed and arrives k_full, in the order in which the consumers use the halves.  The timeline of the
consumers is the same, with these differences, which leave enough registers for the producer:

- Queries become float16, scaled to fit (`queries.py`).  Their rotary part stays in shared memory, so there is
  no p_free, and q_full also covers it.
- P0 and P1 use the same shared memory: consumer 1 stores P1 once it has multiplied P0.
- Pairs that need a mask have a loop of their own, so that the loop over the others keeps no operands of masks live.
- The rotary keys are converted with the first half of their tile.  Its k_full covers them, so there is no r_full.
- The single scale of all entries is part of the softmax scale, and also multiplies the result.
Shared memory is then Q 72 KiB + K 128 KiB + rotary keys 16 KiB + P 8 KiB + stats 2 KiB = 226 KiB; registers are 216 per
lane for consumers and 72 for the producer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

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
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import LOG2E, cap_scores, multiply_add, opaque_zero
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
    batch, rows, latent = queries[0].shape
    rope = queries[1].shape[-1] if len(queries) > 1 else 0
    _, tokens, heads, _ = call.q_latent.shape
    plan, window, ahead, logit_cap = call.plan, call.window, call.ahead, call.logit_cap
    buffer, pages = in_entries_dtype(call.buffer, call.pages, call.entry.dtype)
    half_width = -(-latent // (2 * TILE)) * TILE
    filled = half_width, latent - half_width  # columns of each half that belong to the latent
    row_tiles = -(-rows // TILE)
    quantised = isinstance(config, QuantisedMLADenseConfig)
    cluster = 2 if row_tiles % 2 == 0 else 1  # CTAs that share key tiles by multicast
    groups = row_tiles // cluster
    view = token_rows(pages)
    dtype = queries[0].dtype
    k_dtype = DTYPE if quantised else dtype
    stored = min(rows, TILE)  # rows of a tile in arrays with one value per row: TMA does not clip copies to them
    padded = (groups * cluster - 1) * TILE + stored
    multicast: Any = {"collective_axes": "cta"} if cluster > 1 else {}
    prefetching = config.prefetch and cluster > 1 and pages.token_stride == pages.width
    softmax = OnlineSoftmax(keys=1, threshold=config.rescale_threshold, interpret=interpret)
    outputs = result_types(
        (batch,), plan.max_splits, dtype,
        rows=rows, width=latent, split_width=2 * half_width, lse=padded, split_lse=row_tiles * TILE, scales=2,
    )  # fmt: skip
    sizes: Any = {"copies": copies_per_tile(pages), "cluster": cluster, "interpret": interpret}
    types = partial(quantised_types, dtype, k_dtype) if quantised else partial(plain_types, dtype, half_width, rope)
    scratch_types = types(**sizes)
    if plan.shared:
        exchanged, scratch = cluster_sharing.exchange_types(plan.num_partitions, TILE, half_width, dtype)
        outputs, scratch_types = (*outputs, *exchanged), scratch_types | scratch

    def body(*refs, stats, r: Any = None, qr: Any = None, operands: Any = None, **memory):
        (q_ref, *qr_refs), refs = refs[: len(queries)], refs[len(queries) :]
        kv_ref, table_ref, layer_ref, scale_ref, *refs = refs
        *kv_scale_refs, partitions_ref, work_tiles_ref, split_requests_ref = refs[: -len(outputs)]
        results, exchange_refs = KernelResults(*refs[-len(outputs) :][:5]), refs[-len(outputs) :][5:]
        # Views of the same memory: in the dtype that is multiplied, and in the dtype of queries and results.
        if quantised:
            (q_in, q, *_), (qr_in, qr), (stages, k, raw_k), (_, r, raw_r) = memory["q"], qr, memory["k"], r
            p = memory["p"]
        else:
            q, p, k = (memory[name] for name in ("q", "p", "k"))
            q_in, qr_in, stages, raw_k, raw_r = q, p.at[0] if qr is None else qr, k, k, r
        (
            q_full, qr_full, q_free, p_free, k_full, r_full, k_free, s_issued, p_ready, both,
        ) = barriers(memory, quantised=quantised)  # fmt: skip
        k_landed = [memory["k_landed"].at[n] for n in range(4)] if quantised else k_full
        r_landed = [memory["r_landed"].at[n] for n in range(2)] if quantised else r_full
        pdl_launch_dependents(split_requests_ref, interpret=interpret)
        partition, group, cta, wg = (lax.axis_index(axis) for axis in ("partition", "group", "cta", "wg"))
        row_tile = group if plan.shared else group * cluster + cta
        first_row = row_tile * TILE
        table = PageTable(table_ref, pages)

        def own_part(tile):
            return cluster_sharing.own_steps(tile, cta, PAIR) if plan.shared else tile

        def from_origin(origin, token):
            return token if window is None else origin + token

        def load_work():
            """The work of this CTA, and the layer, in independent loads."""
            first, end, tile = load_work_range(partitions_ref, partition)
            layer = layer_ref[0]
            return first, end, own_part(tile), layer, (layer >= 0) & (layer < pages.num_layers)

        def producer():
            plgpu.set_max_registers(config.producer_registers, action="decrease")
            first, end, first_tile, layer, in_cache = load_work()
            layer = jnp.where(in_cache, layer, 0)
            paged = PagedKeys(kv_ref, view, table, layer)
            place = (0,) if quantised else ()

            def look_up(request, origin, pair):
                return tuple(paged.look_up(request, from_origin(origin, pair * PAIR + t * TILE)) for t in range(2))

            def fetch(found, origin, pair, t, half, with_rope, used):
                @pl.when(used > 0)
                def _():
                    plgpu.barrier_wait(k_free[2 * t + half])

                parts = [Columns(half * half_width, half_width, raw_k.at[t, half, *place], k_landed[2 * t + half])]
                if with_rope and rope:
                    parts.append(Columns(latent, rope, raw_r.at[t, *place], r_landed[t]))
                paged.fetch(found[t], from_origin(origin, (2 * pair + t) * TILE), *parts, **multicast)

            def range_of(tile: WorkTile):
                return tile.request, tile.begin, tile.end, None if window is None else tile.origin

            def convert(t):
                """Converts a tile as it lands: half t and the rotary keys, then the other half."""
                for half in (t, 1 - t):
                    plgpu.barrier_wait(k_landed[2 * t + half])
                    if half == t:
                        plgpu.barrier_wait(r_landed[t])
                    E4M3Tiles(k, r, raw_k, raw_r, interpret).convert(t, half, rope=half == t)
                    plgpu.barrier_arrive(k_full[2 * t + half])

            def prefetch(found, origin, pair):
                """This CTA's tile of a pair: one of the two that the cluster will fetch."""
                own = tuple(jnp.where(cta == 0, *each) for each in zip(*found, strict=True))
                paged.prefetch(own, from_origin(origin, (2 * pair + cta) * TILE), interpret=interpret)

            def fetch_queries(request, again):
                """Fetches the queries of a request; if `again`, waits until the previous ones are no longer needed."""
                if again:
                    plgpu.barrier_wait(q_free)
                for half in range(2):
                    columns = half_columns(half, latent, request, half_width)
                    source = q_ref.at[request, pl.ds(first_row, TILE), columns]
                    plgpu.copy_gmem_to_smem(source, q_in.at[half], q_full)
                if again and not quantised:
                    plgpu.barrier_wait(p_free)
                for ref in qr_refs:
                    plgpu.copy_gmem_to_smem(ref.at[request, pl.ds(first_row, TILE)], qr_in, qr_full)

            def run(n, carry):
                used, (request, begin, end, origin) = carry

                def pair(i, carry):
                    used, found, next_tile = carry
                    ahead = look_up(request, origin, i + 1)  # the loads proceed while the producer waits for k_free
                    fetch(found, origin, i, 0, 0, True, used)
                    fetch(found, origin, i, 0, 1, False, used)

                    @pl.when((i == begin) & (n > first))
                    def _():
                        fetch_queries(request, again=True)

                    if quantised:
                        convert(0)
                    fetch(found, origin, i, 1, 1, True, used)
                    fetch(found, origin, i, 1, 0, False, used)
                    if prefetching:
                        for half in range(0 if quantised else 2):
                            plgpu.barrier_wait(k_full[half])  # all CTAs start at once: keys have priority
                        pl.when(i + 1 < end)(partial(prefetch, ahead, origin, i + 1))
                    if quantised:
                        convert(1)
                    # After the copies are issued, since spilling these values to local memory would wait for the load.
                    next_tile = lax.cond(
                        i == begin, lambda: range_of(own_part(load_work_tile(work_tiles_ref, n + 1))), lambda: next_tile
                    )
                    return used + 1, ahead, next_tile

                start = used, look_up(request, origin, begin), (request, begin, end, origin)
                used, _, next_tile = lax.fori_loop(begin, end, pair, start)
                return used, next_tile

            pl.when(end > first)(partial(fetch_queries, first_tile.request, again=False))  # before all keys
            lax.fori_loop(first, end, run, (jnp.int32(0), range_of(first_tile)))

            # Wait for the last use of everything: a peer may still arrive on these barriers.
            @pl.when(end > first)
            def _():
                plgpu.barrier_wait(q_free)
                if not quantised:
                    plgpu.barrier_wait(p_free)
                for stage in range(4):
                    plgpu.barrier_wait(k_free[stage])

        def consumer(side):
            scratch = operands.at[side] if interpret else None

            def wait_for_both():
                plgpu.barrier_arrive(both)
                plgpu.barrier_wait(both)

            plgpu.set_max_registers(consumer_registers(config.producer_registers), action="increase")
            first, end, first_tile, _, in_cache = load_work()
            value_scale = kv_scale_refs[0][0] if quantised else None
            storing = results, stats, wait_for_both, softmax, first_row, stored, value_scale
            epilogue = HalvesEpilogue(*storing)
            if plan.shared:
                exchange = cluster_sharing.Exchange.of(exchange_refs, partition, memory, cta)
                epilogue = cluster_sharing.SharedEpilogue(*storing, exchange=exchange)
            scale = scale_ref[0] * LOG2E

            def load_queries():
                """Waits for the queries; returns the rotary queries, and the factor of the scores."""
                if rope:
                    plgpu.barrier_wait(qr_full)
                if quantised:
                    inverse = fit_queries(side, (q_in, q), (qr_in, qr), stats, 3, wait_for_both)
                    return qr, inverse * (scale * value_scale)
                q_rope = qr
                if rope == ROPE:
                    q_rope = plgpu.load(p.at[0], layout=WGMMA)
                    if scratch is not None:
                        operands[2 + side] = q_rope
                        plgpu.commit_smem()
                        q_rope = operands.at[2 + side]
                wait_for_both()  # both have read p[0], which P0 overwrites
                plgpu.barrier_wait(q_full)
                return q_rope, scale

            def part(half, ref, *place):
                """The columns of a half of queries or keys that belong to the latent."""
                return ref.at[place] if filled[half] == half_width else ref.at[*place, :, pl.ds(0, filled[half])]

            def scores(queries, i, request, origin, ends, masked, last):
                z, (q_rope, row_scale) = opaque_zero(i), queries
                stage = z + side
                near, far = (0, 1) if side == 0 else (1, 0)

                def product(acc):
                    if side == 1:
                        plgpu.barrier_wait(s_issued)
                    for half in (near, far):
                        plgpu.barrier_wait(k_full[2 * side + half])
                        if filled[half]:
                            plgpu.wgmma(acc, part(half, q, z + half), part(half, k, stage, half).transpose((1, 0)))
                    if not quantised and rope:
                        plgpu.barrier_wait(r_full[side])
                    if rope:
                        plgpu.wgmma(acc, q_rope, r.at[stage].transpose((1, 0)))
                    if side == 0:
                        plgpu.barrier_arrive(s_issued)
                    return acc[...]

                s = pl.run_scoped(product, plgpu.ACC((TILE, TILE), jnp.float32))
                s *= over_columns(row_scale, TILE) if quantised else row_scale

                @pl.when(i == last)
                def _():
                    plgpu.barrier_arrive(q_free)  # the producer may fetch the next request's queries

                if logit_cap is not None:
                    s = cap_scores(s, logit_cap)

                mask = partial(
                    masks.apply_mask, table=table, request=request, first_row=first_row, ends=ends, tokens=tokens,
                    first_token=from_origin(origin, (2 * i + side) * TILE), heads=heads, keys=1,
                    window=window, ahead=ahead,
                )  # fmt: skip
                return mask(s) if masked is True else s if masked is False else lax.cond(masked, mask, lambda s: s, s)

            def clear(i, t, request, origin, ends):
                place, token = (opaque_zero(i) + t, jnp.int32(side)), from_origin(origin, (2 * i + t) * TILE)
                masks.clear_values(
                    k, place, 0, half_width, table, request, token, ends.seen,
                    first_seen=masks.first_seen(ends, tokens, window), interpret=interpret,
                )  # fmt: skip

            def add_values(weights, i, t, request, origin, ends, masked, acc, meanwhile=None):
                """acc + weights @ (this side's half of a tile's values), and the result of `meanwhile`."""
                z = opaque_zero(i)
                if masked is not False:
                    pl.when(masked)(partial(clear, i, t, request, origin, ends))
                return multiply_add(acc, weights, k.at[z + t, z + side], meanwhile, scratch=scratch)

            def share_max(running_max):
                stats[0] = running_max

            def share_weights(s, running_max, t):
                """Shares the weights of a tile with the other consumer; returns them, and their sums per lane."""
                w = softmax.weights(s, running_max)
                w16 = w.astype(k_dtype)
                if t == 0 or not quantised:
                    share(w16, t)
                return w16, fold_columns(jnp.add, w)

            def share(w16, t):
                p[t * (p.shape[0] - 1)] = w16
                plgpu.commit_smem()
                plgpu.barrier_arrive(p_ready[t])

            def pair0(queries, request, origin, ends, unmasked, last, i, carry):
                acc, old_max, row_sum = carry
                masked = unmasked if quantised else masks.is_masked(unmasked, i)
                s = scores(queries, i, request, origin, ends, masked, last)
                max0 = softmax.update_max(s, old_max, share_max)
                w16, added = share_weights(s, max0, 0)
                acc, row_sum = softmax.rescale(old_max, max0, acc, row_sum)
                acc, _ = add_values(w16, i, 0, request, origin, ends, masked, acc)
                plgpu.barrier_arrive(k_free[0])
                plgpu.barrier_wait(p_ready[1])
                max1 = plgpu.load(stats.at[0], layout=ROW)
                z = opaque_zero(i)
                acc, row_sum = softmax.rescale(max0, max1, acc, row_sum + added)
                acc, _ = add_values(p.at[z + p.shape[0] - 1], i, 1, request, origin, ends, masked, acc)

                @pl.when(i != last)
                def _():
                    plgpu.barrier_arrive(k_free[2])

                return acc, max1, row_sum

            def pair1(queries, request, origin, ends, unmasked, last, i, carry):
                acc, old_max, row_sum = carry
                masked = unmasked if quantised else masks.is_masked(unmasked, i)
                s = scores(queries, i, request, origin, ends, masked, last)
                plgpu.barrier_wait(p_ready[0])
                max0 = plgpu.load(stats.at[0], layout=ROW)
                acc, row_sum = softmax.rescale(old_max, max0, acc, row_sum)

                def softmax_of_tile_1():
                    max1 = softmax.update_max(s, max0, share_max)
                    return max1, *share_weights(s, max1, 1)

                z = opaque_zero(i)
                acc, (max1, w16, added) = add_values(
                    p.at[z], i, 0, request, origin, ends, masked, acc, meanwhile=softmax_of_tile_1
                )
                plgpu.barrier_arrive(k_free[1])

                if not quantised:
                    pl.when(i == last)(lambda: plgpu.barrier_arrive(p_free))
                acc, row_sum = softmax.rescale(max0, max1, acc, row_sum)
                late = partial(share, w16, 1) if quantised else None
                acc, _ = add_values(w16, i, 1, request, origin, ends, masked, acc, meanwhile=late)

                @pl.when(i != last)
                def _():
                    plgpu.barrier_arrive(k_free[3])

                return acc, max1, row_sum + added

            step = (pair0, pair1)[side]

            def run(n, tile: WorkTile):
                next_tile = own_part(
                    load_work_tile(work_tiles_ref, n + 1)
                )  # the loads proceed while this one is computed
                request, begin, end, split, origin = tile.request, tile.begin, tile.end, tile.split, tile.origin
                ends, unmasked = masks.seen_tokens(tile, in_cache, PAIR, window)
                queries = load_queries()
                last = end - 1
                if side == 0:
                    stats[0] = softmax.empty_max(TILE)
                carry = zeros(TILE, half_width), softmax.empty_max(TILE), zeros(TILE, LANE_COLUMNS)
                if quantised:  # in a loop of their own, pairs without a mask take fewer registers
                    for low, high, masked in masks.divided_by_masks(begin, end, unmasked):
                        one = partial(step, queries, request, origin, ends, masked, last)
                        carry = lax.fori_loop(low, high, one, carry)
                else:
                    one = partial(step, queries, request, origin, ends, unmasked, last)
                    carry = lax.fori_loop(begin, end, one, carry)
                acc, running_max, row_sum = carry
                if filled[side] < half_width:  # other columns hold products with rotary keys
                    column = plgpu.broadcasted_iota(jnp.int32, acc.shape, 1, layout=WGMMA)
                    acc = jnp.where(column < filled[side], acc, 0.0)

                stage = stages.at[opaque_zero(last) + 1, side]
                found = side, acc, row_sum, running_max, request, split, stage
                if isinstance(epilogue, cluster_sharing.SharedEpilogue):
                    epilogue.store_shared(*found, place=lax.rem(n - first, jnp.int32(cluster_sharing.PLACES)))
                else:
                    epilogue.store(*found)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(k_free[2 + side])
                return next_tile

            lax.fori_loop(first, end, run, first_tile)

        # Nested branches: with three in a row, values that the last one needs would be live, and spilled, in the first.
        lax.cond(wg == 2, producer, lambda: lax.cond(wg == 0, partial(consumer, 0), partial(consumer, 1)))

    kv_scales = [] if call.kv_scale is None else [jnp.reshape(call.kv_scale, (1,))]
    found = kernel(
        body,
        interpret=interpret,
        auto_barriers=False,
        out_type=outputs,
        grid=(groups, plan.num_partitions),
        grid_names=("group", "partition"),
        cluster=(CTAS if plan.shared else cluster,),
        cluster_names=("cta",),
        num_threads=3,
        thread_name="wg",
        kernel_name="decode_mla",
        scratch_types=scratch_types,
    )(
        *queries, view.of(buffer), call.block_tables, jnp.reshape(call.layer, (1,)), jnp.reshape(call.scale, (1,)),
        *kv_scales, plan.partitions, plan.work_tiles, plan.split_requests,
    )  # fmt: skip
    return KernelResults(*found[:5])


def plain_types(dtype, half: int, rope: int, *, copies: int, cluster: int, interpret: bool) -> dict[str, Any]:
    """Scratch types where TMA brings keys of the queries' dtype, in `copies` copies per tile and part.

    `half` and `rope`: columns of half a latent, and of the rotary part.
    """
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
        "k_free": _free(cluster),
        "s_issued": plgpu.Barrier(),
        "p_ready": plgpu.Barrier(num_barriers=2),
        "both": plgpu.Barrier(num_arrivals=2),
        **_operands(4, dtype, interpret),
    }


def quantised_types(dtype, k_dtype, *, copies: int, cluster: int, interpret: bool) -> dict[str, Any]:
    """Scratch types where the producer converts keys to `k_dtype`, and queries and results are of `dtype`.

    "q", "qr", "k" and "r" are views of the same memory: in `dtype`, in `k_dtype`, and as bytes.  Barriers with
    equal numbers of arrivals share an array: their addresses and phases take fewer registers.
    """

    def viewed(*shape, raw=()):
        views = swizzled(*shape, dtype=dtype), swizzled(*shape, dtype=k_dtype), *raw
        # The interpreter reports any two accesses to a union through different views as a race.
        return views if interpret else plgpu.RefUnion(*views)

    return {
        "q": viewed(2, TILE, HALF),
        "qr": viewed(TILE, ROPE),
        "k": viewed(2, 2, TILE, HALF, raw=(raw_halves(),)),
        "r": viewed(2, TILE, ROPE, raw=(raw_ropes(),)),
        "p": swizzled(1, TILE, TILE, dtype=k_dtype),
        "stats": plgpu.SMEM((5, TILE), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=3),
        "k_landed": plgpu.Barrier(num_arrivals=copies, num_barriers=4),
        "r_landed": plgpu.Barrier(num_arrivals=copies, num_barriers=2),
        "k_free": _free(cluster),
        "one_arrives": plgpu.Barrier(num_barriers=7),
        "two_arrive": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        **_operands(2, k_dtype, interpret),
    }


def barriers(memory: dict[str, Any], *, quantised: bool) -> tuple[Any, ...]:
    """From `memory`: q_full, qr_full, q_free, p_free, k_full, r_full, k_free, s_issued, p_ready, both."""
    if quantised:
        one = [memory["one_arrives"].at[n] for n in range(7)]
        free = [memory["k_free"].at[n] for n in range(4)]
        q_free, both = (memory["two_arrive"].at[n] for n in range(2))
        q_full = memory["q_full"]
        return q_full, q_full, q_free, None, one[:4], None, free, one[4], one[5:], both
    counts = {"k_full": 4, "r_full": 2, "k_free": 4, "p_ready": 2}
    arrays = {name: [memory[name].at[n] for n in range(count)] for name, count in counts.items()}
    names = ("q_full", "qr_full", "q_free", "p_free", "k_full", "r_full", "k_free", "s_issued", "p_ready", "both")
    return tuple(arrays.get(name, memory[name]) for name in names)


def _free(cluster: int) -> plgpu.Barrier | plgpu.ClusterBarrier:
    if cluster > 1:
        return plgpu.ClusterBarrier(collective_axes=("cta",), num_barriers=4)
    return plgpu.Barrier(num_barriers=4)


def _operands(count: int, dtype, interpret: bool) -> dict[str, Any]:
    """Shared memory for register operands of wgmma, where the interpreter needs them."""
    return {"operands": swizzled(count, TILE, TILE, dtype=dtype)} if interpret else {}


def raw_halves() -> pl.MemoryRef:
    """Shared memory of two tiles' halves [2, 2, 64, 256] as bytes, each in the place of its float16 values."""
    return plgpu.SMEM((2, 2, 2, TILE, HALF), jnp.uint8)


def raw_ropes() -> pl.MemoryRef:
    """Shared memory of two tiles' rotary keys [2, 64, 64] as bytes, each in the place of its float16 values."""
    return plgpu.SMEM((2, 2, TILE, ROPE), jnp.uint8)


@dataclass(frozen=True)
class E4M3Tiles:
    """Two tiles of e4m3 keys in shared memory, as bytes and as float16 values, which represent e4m3 values exactly.

    TMA copies half a tile of keys as it is stored, 16 KiB, into the first half of the shared memory of its float16
    values.  A warpgroup loads all of it to registers, and then stores it converted.  So keys need no additional
    memory, and the copies of all halves can be in flight at once.

    Converting keys in registers, as the first operand of S' = K Q', and storing only values was slower: 128 requests
    with 128 heads and 4,096 tokens take 0.293 ms as it is, 0.310 if each consumer converts the tile that it multiplies
    with the queries, and more than 0.337 if one warpgroup computes all weights and two multiply them with the values.
    """

    k: Any
    """float16 [2, 2, 64, 256]: tiles, halves."""
    r: Any
    """float16 [2, 64, 64]."""
    raw_k: Any
    """See `raw_halves`."""
    raw_r: Any
    """See `raw_ropes`."""
    interpret: bool

    def convert(self, tile: int, half: int, *, rope: bool) -> None:
        """Converts half a tile that has landed, and with `rope` the tile's rotary keys."""
        if self.interpret:
            self.k[tile, half] = _converted(self.raw_k[tile, half, 0])
            if rope:
                self.r[tile] = _converted(self.raw_r[tile, 0])
        else:
            self._convert_in_place(tile, half, rope)
        plgpu.commit_smem()

    def _convert_in_place(self, tile, half, rope):
        raw_type, ref_type = plgpu.RefType(), plgpu.RefType(swizzled(1, dtype=DTYPE).transforms)
        k_offset = (2 * tile + half) * TILE * HALF * DTYPE.itemsize
        r_offset = tile * TILE * ROPE * DTYPE.itemsize

        @plgpu.inline_mgpu(arg_types=(ref_type, ref_type, raw_type, raw_type))
        def convert(_, k, r, raw_k, raw_r):
            chunks = conversions_in_place.load_half(raw_k, k_offset)
            ropes = conversions_in_place.load_rope(raw_r, r_offset) if rope else []
            mgpu.utils.warpgroup_barrier()
            conversions_in_place.store_half(k, k_offset, chunks)
            conversions_in_place.store_rope(r, r_offset, ropes)

        convert(self.k, self.r, self.raw_k, self.raw_r)


def _converted(raw):
    return lax.bitcast_convert_type(raw, jnp.float8_e4m3fn).astype(DTYPE)
