"""The tile scheduler (split-KV): which CTA (or cluster) attends to which tokens.

A plan is computed on the device from the lengths, once for all layers of a step.

The tokens of a request are counted in steps: pairs of 64-token tiles, or single tiles for MLA calls with few rows.  By
default, the steps of all requests are laid end to end, and the line is divided into equal partitions: as many as fill
the GPU, with a CTA for each partition, tile of rows and KV head.

Several divisions are compared.  The candidates have from 7/8 of the partitions that fill the GPU up to all of them,
each with and without gaps between requests (a gap is the cost of beginning and ending one).  Another one splits no
request, if there are enough partitions.  The candidate with the least estimated time is used: the time of its longest
partition and of combining its splits.

A batch-invariant plan splits a request by its own length alone.

A work tile is the part of a request that lies in one partition.  The work tiles of a request that was divided store
splits, which `combine` merges.

`Problem` and `Division` have the arithmetic of one request, boundary or work tile.  `divide_by_xla` applies it to
arrays of all of them; two small kernels compute the same plan in less time.  In the kernels, vectors are spread over
lanes, and scalars are uniform.

Timeline of `compare`, a CTA of one warpgroup per candidate division and per request:

    load the lengths of all requests by TMA, into registers as a vector; steps of each request
    a candidate's CTA                                       a request's CTA
    sum of all steps, then the length of a partition        sum of the steps of all requests before it
    a lane has a boundary between two partitions            load its row of the block table by TMA, 512 blocks at once:
    per request: has it ended at the lane's boundary?         does it need a block that is not in the cache?
    work before the boundary; the difference to the next    store its steps, those before it, and whether it needs one
      boundary, of the next lane, is a partition's load
    store the cost: of the maximum of loads, and of splits

Timeline of `divide`, a CTA of one warpgroup per request, per partition, and for the rows after the last work tile:

    wait for `compare`
    the candidate of least cost; where its partitions and requests lie
    a lane has a request: how many of its work tiles precede the first one of this CTA; sums over all requests are the
      number of this work tile, of its request, and of its split
    a request's CTA: store its first work tile, or all of them if the plan is batch-invariant
    a partition's CTA: store the work tile that it begins with among partitions and, if it is not the first of its
      request, among work tiles
    split requests: by the request's CTA, or by that of the partition in which the request ends

A batch-invariant plan has no candidates.

What bounds it: latency.  The longest part is the loop over requests of `compare`, which takes 16 requests at a time, in
108 instructions and about 180 cycles.  It is not unrolled further, because the code runs only once.

Barriers.  `lengths_full` and `blocks_full`: a copy has arrived.  Between stores to shared memory and loads by other
lanes, the warpgroup meets, as in all of Pallas's kernels without `unsafe_no_auto_barriers`.
Budget.  Shared memory of `compare`: two or three vectors of requests, one of boundaries, 2 KiB of blocks; for 1,024
requests 16 KiB.  Registers: for 1,024 requests, a vector has 8 per thread, and a thread uses up to 48.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.addressing import lengths_in_table, table_tokens
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting, multiprocessors
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel, pdl_launch_dependents
from jaxkv_kernels.mosaic_gpu.sizes import PAIR, TILE
from jaxkv_kernels.tuning import require
from jaxkv_kernels.xla.paged import query_ranges

SPLIT_COST_UNIT = 256
"""The cost of walking one step, in the unit of `SplitCosts.combining` and `SplitCosts.split`."""
CTAS = 2
"""CTAs of a cluster that share the keys of each work tile, if requests are few."""
MERGING = 4
"""The cost of merging the results of these CTAs, in steps."""
LOADED_AT_ONCE = 4
"""Splits that the warps of a warpgroup load at once in `combine`."""
INVARIANT_SPLITS, INVARIANT_TOKENS = 8, 1024
"""Of a batch-invariant plan: the most splits of a request, and the fewest tokens of a split."""
UNDIVIDED = 2**23
"""The length of a partition, in steps, in a division that leaves requests whole: more than any request has."""
MOST_REQUESTS = 1024
"""The most requests for which kernels compute a plan: each of their threads has a vector of all requests."""
LANES = 128
"""Lanes of a warpgroup; vectors in registers have a multiple of this many elements."""
BLOCKS = 512
"""Columns of a block table that are looked up at once."""
ALIGNED = 4
"""Copies begin at multiples of this many elements, 16 bytes.  An H100 reports an illegal instruction otherwise."""
UNROLL = 16
"""Requests per iteration of the loop of `compare`."""
CTAS_AT_END = 128
"""The most CTAs of `divide` for the rows after the last work tile."""
HUGE = 2**31 - 1
"""More than any cost, and any number of a candidate."""


@dataclass(frozen=True, kw_only=True)
class SplitCosts:
    """The costs, besides walking over keys, that a plan weighs when it divides requests."""

    least: int
    """The fewest steps of a partition.  Combining shorter splits takes more time than they save."""
    overhead: int
    """The cost of beginning and ending a request, in steps."""
    combining: int
    """The cost of combining, if any request is split; a step costs SPLIT_COST_UNIT."""
    split: int
    """The cost of each split, in the same unit."""

    def __post_init__(self):
        require(self.least >= 1, self, "least", "at least 1 step")
        for name in ("overhead", "combining", "split"):
            require(getattr(self, name) >= 0, self, name, "0 or more")

    def of_shared_steps(self) -> "SplitCosts":
        """The costs if two CTAs share each step, which then takes half the time, and merge their results.

        Combining is made to look four times as expensive as it is, so that requests that are not much longer than
        others stay whole.  With the real cost, 64 requests of 256 to 1,024 tokens with 16 heads would be split, and
        take 0.0247 ms instead of 0.0215.
        """
        overhead = 2 * self.overhead + MERGING
        return replace(self, overhead=overhead, combining=8 * self.combining, split=2 * self.split)


PAIR_COSTS = SplitCosts(least=1, overhead=2, combining=256, split=16)
"""Of kernels that walk in pairs of tiles."""
TILE_COSTS = SplitCosts(least=2, overhead=0, combining=128, split=2)
"""Of kernels that walk in single tiles."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """A schedule; arrays of int32."""

    partitions: jax.Array
    """[partitions + 1, 8 or 9]: the first work tile of each, and its columns, so that a CTA begins with one load
    instead of two dependent ones."""
    work_tiles: jax.Array
    """[work tiles, 7 or 8]: see `WorkTile`."""
    split_requests: jax.Array
    """[requests, 3]: a request that was split (-1: none), its first split, its number of splits."""
    max_splits: int = field(metadata={"static": True})
    """The most splits of all requests together."""
    shared: bool = field(default=False, metadata={"static": True})
    """Whether two CTAs share the keys of each work tile; see `cluster_sharing.py`."""
    whole: bool = field(default=False, metadata={"static": True})
    """Whether it is known while tracing that no request is split."""

    @property
    def num_partitions(self) -> int:
        """Partitions; the CTAs of all tiles of rows, and of all KV heads, of a request walk the same one."""
        return self.partitions.shape[0] - 1


class WorkTile(NamedTuple):
    """A range of steps over the keys of a request.  The fields are the columns of `Plan.work_tiles`."""

    request: Any
    begin: Any
    """The first step."""
    end: Any
    """The step after the last."""
    keys: Any
    """The number of tokens, counted from `origin`, that some query token of the request sees."""
    unmasked_end: Any
    """The steps before this one need no mask."""
    split: Any
    """The index of the split to store the result to; -1 if it is the result of the whole request."""
    origin: Any
    """The token at which step 0 begins; it may be above 0 with a window."""
    beyond: Any = None
    """The number of tokens that some query token sees after the last query token; None if there are none."""


def load_work_tile(work_tiles, n) -> WorkTile:
    """Loads the n-th work tile; the last one if n is larger."""
    n = jnp.minimum(n, work_tiles.shape[0] - 1)
    return WorkTile(*(work_tiles[n, column] for column in range(work_tiles.shape[1])))


def load_work_range(partitions, partition) -> tuple[Any, Any, WorkTile]:
    """Loads the index of a partition's first work tile, that of the one after its last, and the first work tile."""
    n = jnp.minimum(partition, partitions.shape[0] - 1)
    first, *tile = (partitions[n, column] for column in range(partitions.shape[1]))
    return first, partitions[partition + 1, 0], WorkTile(*tile)


def most_partitions(row_tiles: int) -> int:
    """As many partitions as fill the GPU, if `row_tiles` CTAs walk each: tiles of rows, of all KV heads."""
    return 4 if interpreting.value else max(multiprocessors() // row_tiles, 1)


def shares_keys(requests: int, partitions: int) -> bool:
    """Whether two CTAs share the keys of each work tile.

    They do if there are enough pairs of CTAs for each request to have one, but not two: with fewer requests, most are
    split among several pairs, and merging in pairs first takes longer: 0.0300 ms instead of 0.0281 for one request of
    65,536 tokens with 16 heads.  With 64 requests of 4,096 tokens, sharing takes 0.0777 ms instead of 0.0792.
    """
    return CTAS * requests <= partitions < 2 * CTAS * requests


@partial(
    jax.jit,
    static_argnames=(
        "partitions",
        "tokens",
        "block_size",
        "num_blocks",
        "window",
        "ahead",
        "batch_invariant",
        "step",
        "costs",
        "by_kernel",
        "interpret",
    ),
)
def make_plan(
    seq_lens,
    block_tables,
    trailing=None,
    *,
    partitions: int,
    tokens: int,
    block_size: int,
    num_blocks: int | None,
    step: int,
    costs: SplitCosts,
    window: int | None = None,
    ahead: int | None = 0,
    batch_invariant: bool = False,
    by_kernel: bool = False,
    interpret: bool = False,
) -> Plan:
    """The schedule of `partitions` for requests of `seq_lens` [B] with `tokens` query tokens each.

    `trailing` [B], `window` and `ahead` are those of `DecodeCall`.  A request without tokens has one step, all of it
    masked.  With a window, requests begin at the tile of the first key that some query sees.  Without `num_blocks`, no
    block is unknown, and only the shape of the tables matters.
    `by_kernel` computes the schedule of up to MOST_REQUESTS requests by two kernels on a GPU (with `interpret`, in the
    interpreter), others by XLA, which takes several times as long.
    """
    problem = Problem(
        batch=seq_lens.size,
        partitions=partitions,
        tokens=tokens,
        capacity=table_tokens(block_tables, block_size),
        step=step,
        costs=costs,
        window=window,
        ahead=ahead,
        batch_invariant=batch_invariant,
    )
    lengths = [seq_lens]
    if trailing is not None:
        in_table = lengths_in_table(seq_lens, block_tables, block_size)
        seen = jnp.maximum(query_ranges(in_table, 1, None, ahead, trailing)[1][:, 0], 0)
        lengths = [seen, seen - (in_table - trailing)]
    if by_kernel and problem.batch <= MOST_REQUESTS:
        compared = _compare(lengths, block_tables, problem, block_size, num_blocks, interpret=interpret)
        return Plan(*_divide(lengths, compared, problem, interpret=interpret), max_splits=problem.max_splits)
    unknown = jnp.zeros_like(seq_lens)
    if num_blocks is not None:
        origin, keys, _ = problem.of_request(*lengths)
        first = jnp.arange(block_tables.shape[1], dtype=jnp.int32) * block_size
        unknown = _is_unknown(block_tables, num_blocks, first, block_size, *(x[:, None] for x in (origin, keys)))
        unknown = unknown.any(axis=1).astype(jnp.int32)
    return Plan(*divide_by_xla(lengths, unknown, problem), max_splits=problem.max_splits)


def plan_slots(
    counts,
    *,
    size: int,
    heads: int,
    costs: SplitCosts,
    batch_invariant: bool,
    step: int = PAIR,
    by_kernel: bool = False,
) -> Plan:
    """The schedule of query tokens with `counts` [N] slots each, at most `size`, in steps of `step` slots."""
    partitions = most_partitions(-(-heads // TILE))
    # The kernel masks slots, so the plan only sees a table of one valid block per request.
    table = jnp.zeros((counts.size, 1), jnp.int32)
    return make_plan(
        counts,
        table,
        partitions=partitions,
        tokens=1,
        block_size=size,
        num_blocks=None,
        step=step,
        costs=costs,
        batch_invariant=batch_invariant,
        by_kernel=by_kernel,
    )


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a plan is made for, in plain numbers; see `make_plan`."""

    batch: int
    partitions: int
    tokens: int
    capacity: int
    """The most tokens that a block table has room for."""
    step: int
    costs: SplitCosts
    window: int | None
    ahead: int | None
    batch_invariant: bool

    @property
    def tiles(self) -> int:
        """The most work tiles."""
        return self.batch * INVARIANT_SPLITS if self.batch_invariant else self.batch + self.partitions

    @property
    def max_splits(self) -> int:
        """The most splits, for which the results have room: at least as many as `combine` loads at once."""
        most = self.tiles if self.batch_invariant else min(self.tiles, 2 * self.partitions)
        return max(most, LOADED_AT_ONCE)

    @property
    def combined(self) -> int:
        """Rows of `split_requests`: one per request, or one per partition, for the split request that ends in it."""
        return self.batch if self.batch <= self.partitions or self.batch_invariant else self.partitions

    @property
    def fewest(self) -> int:
        """The fewest partitions of a candidate division; the others stay empty."""
        return self.partitions - self.partitions // 8

    @property
    def with_gaps(self) -> int:
        """How many candidates have gaps between requests: divisions into `fewest` to `partitions` partitions."""
        return self.partitions + 1 - self.fewest

    @property
    def may_be_whole(self) -> bool:
        """Whether each request can have a partition of its own.  The last candidate then leaves all of them whole."""
        return self.batch <= self.partitions

    @property
    def candidates(self) -> int:
        """How many divisions are compared: with gaps, then without, then that of whole requests."""
        if self.batch_invariant:
            return 0
        return self.with_gaps * (1 if self.costs.overhead == 0 else 2) + self.may_be_whole

    def of_request(self, length, beyond=None) -> tuple[Any, Any, Any]:
        """The token at which the steps of a request begin, its tokens from there on, and its steps.

        `length` ends at the last token that some query token sees; `beyond` is that of `WorkTile`.
        """
        length = jnp.clip(length, 0, self.capacity)
        origin = jnp.zeros_like(length)
        if self.window is not None:
            query_end = length if beyond is None else length - beyond
            origin = _div(jnp.maximum(query_end - (self.tokens - 1) - self.window, 0), TILE) * TILE
        keys = length - origin
        return origin, keys, _ceil_div(keys, self.step)

    def unmasked_end(self, keys, unknown, beyond=None) -> Any:
        """The steps of a request that need no mask: none if it has `unknown` blocks."""
        hidden = 0  # tokens at the end, which other query tokens see, but the first one does not
        if self.ahead is not None:
            hidden = self.tokens - 1 - self.ahead
            # In this order, no sum overflows.
            hidden = max(hidden, 0) if beyond is None else jnp.maximum(beyond, -hidden) + hidden
        return jnp.where(unknown != 0, 0, _div(jnp.maximum(keys - hidden, 0), self.step))

    def division(self, candidate, total) -> "Division":
        """A candidate division of `total` steps; if the plan is batch-invariant, the only one."""
        gap = jnp.int32(self.costs.overhead)
        if self.batch_invariant:
            return Division(self, _ceil_div(total + self.batch * gap, self.partitions), 1, gap)
        has_gaps = candidate < self.with_gaps
        gap = jnp.where(has_gaps, gap, 0)  # without gaps, equal requests are split alike
        used = self.fewest + candidate - jnp.where(has_gaps, 0, self.with_gaps)
        length = jnp.maximum(_ceil_div(total + self.batch * gap, used), self.costs.least)
        if not self.may_be_whole:
            return Division(self, length, 1, gap)
        whole = candidate == self.candidates - 1
        length, gap = (jnp.where(whole, UNDIVIDED, x) for x in (length, gap))
        return Division(self, length, jnp.where(whole, 0, 1), gap)


class Division(NamedTuple):
    """Where requests and partitions lie on a line of steps."""

    problem: Problem
    length: Any
    """Steps of a partition."""
    in_line: Any
    """1 if requests lie one after another; 0 if each begins at a partition of its own, which it does not leave."""
    gap: Any
    """Steps between the end of a request, or its begin if they are not in line, and the begin of the next one."""

    def begin(self, request, before) -> Any:
        """The step at which a request begins, if the requests before it have `before` steps."""
        return self.in_line * before + self.gap * request

    def passed(self, position, ended, before) -> tuple[Any, Any]:
        """The work that lies before a position, in steps, and whether the position is inside a request.

        `ended` requests, of `before` steps, end at the position or before it.
        """
        inside = jnp.maximum(position - self.begin(ended, before), 0)
        inside = jnp.where(ended < self.problem.batch, inside, 0)
        divides = jnp.where(inside > 0, 1, 0)
        return before + inside + self.problem.costs.overhead * (ended + divides), divides

    def cost(self, load, splits) -> Any:
        """The cost of a division whose longest partition is `load` and which has `splits` positions inside requests."""
        costs = self.problem.costs
        return SPLIT_COST_UNIT * load + jnp.where(splits > 0, costs.combining, 0) + costs.split * splits

    def place(self, request, before, size) -> tuple[Any, Any, Any]:
        """Where a request of `size` steps begins, its steps, and how many work tiles it has."""
        begin = self.begin(request, before)
        if self.problem.batch_invariant:
            count = jnp.clip(_div(size, INVARIANT_TOKENS // self.problem.step), 1, INVARIANT_SPLITS)
        else:
            count = _div(begin + size - 1, self.length) - _div(begin, self.length) + 1
        return begin, size, count

    def preceding(self, place, partition) -> Any:
        """How many work tiles of a request at `place` are in earlier partitions."""
        begin, size, count = place
        if self.problem.batch_invariant:
            before = jnp.clip(partition * self.length - begin, 0, size)
            return _div(before * count + size - 1, size)
        return jnp.clip(partition - _div(begin, self.length), 0, count)

    def work_tile(self, place, n) -> tuple[Any, Any, Any]:
        """The first step and the end of the n-th work tile of a request at `place`, and the tile's partition.

        `n` may be larger than the number of work tiles; tables end with such rows.
        """
        begin, size, count = place
        if self.problem.batch_invariant:
            first, end = (_div(i * size, count) for i in (n, n + 1))
            return first, end, _div(begin + first, self.length)
        partition = _div(begin, self.length) + n
        first, end = (jnp.clip(p * self.length - begin, 0, size) for p in (partition, partition + 1))
        return first, end, partition


def _div(a, b):
    """`a // b` of non-negative numbers."""
    return lax.div(*jnp.broadcast_arrays(a, jnp.asarray(b, jnp.int32)))


def _ceil_div(a, b):
    """`a / b` rounded up, at least 1."""
    return _div(jnp.maximum(a, 1) - 1, b) + 1


def _is_unknown(block, num_blocks, first, block_size, origin, keys) -> Any:
    """Whether a block of a request is needed, but not in the cache; `first` is the number of its first token."""
    is_seen = (first > origin - block_size) & (first < origin + keys)
    return is_seen & ((block < 0) | (block >= num_blocks))


def divide_by_xla(lengths, unknown, problem: Problem) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`partitions`, `work_tiles` and `split_requests` of a plan.

    `lengths` are one or two arrays [B], see `Problem.of_request`; `unknown` [B] is that of `Problem.unmasked_end`.
    """
    _, *beyond = lengths
    request = jnp.arange(problem.batch, dtype=jnp.int32)
    origin, keys, sizes = problem.of_request(*lengths)
    sums = jnp.cumsum(sizes)
    before, total = sums - sizes, sums[-1]

    def cost(candidate):
        division = problem.division(candidate, total)
        position = jnp.arange(problem.partitions + 1, dtype=jnp.int32) * division.length
        ends = division.begin(request, before) + sizes
        ended = jnp.searchsorted(ends, position, side="right", method="compare_all").astype(jnp.int32)
        passed, divides = division.passed(position, ended, jnp.where(ended > 0, sums[ended - 1], 0))
        load = passed[1:] - passed[:-1] + problem.costs.overhead * divides[:-1]
        return division.cost(load.max(), divides[:-1].sum())

    best = None
    if not problem.batch_invariant:
        best = jax.vmap(cost)(jnp.arange(problem.candidates, dtype=jnp.int32)).argmin().astype(jnp.int32)
    division = problem.division(best, total)
    *_, counts = places = division.place(request, before, sizes)
    after, first_split = jnp.cumsum(counts), jnp.cumsum(jnp.where(counts > 1, counts, 0)) - counts

    tile = jnp.arange(problem.tiles, dtype=jnp.int32)
    owner = jnp.searchsorted(after, tile, side="right", method="compare_all").astype(jnp.int32)
    owner = jnp.minimum(owner, problem.batch - 1)
    *_, count = place = tuple(x[owner] for x in places)
    n = tile - (after - counts)[owner]
    first, end, partition = division.work_tile(place, n)
    split = jnp.where(count > 1, first_split[owner] + n, -1)
    unmasked_end = problem.unmasked_end(keys, unknown, *beyond)
    keys, unmasked_end, *others = (x[owner] for x in (keys, unmasked_end, origin, *beyond))
    work_tiles = jnp.stack([owner, first, end, keys, unmasked_end, split, *others], axis=1)

    starts = jnp.where(n < count, partition, problem.partitions)
    starts = jnp.searchsorted(starts, jnp.arange(problem.partitions + 1), method="compare_all").astype(jnp.int32)
    tiles = jnp.minimum(starts, problem.tiles - 1)
    ending, is_last = request, jnp.bool(True)
    if problem.combined != problem.batch:  # the last split of a request is the first work tile of a partition
        ending, is_last = owner[tiles[:-1]], (n == count - 1)[tiles[:-1]]
    split = jnp.where(is_last & (counts > 1)[ending], ending, -1)
    split_requests = jnp.stack([split, first_split[ending], counts[ending]], axis=1)
    return jnp.concatenate([starts[:, None], work_tiles[tiles]], axis=1), work_tiles, split_requests


def _compare(
    lengths, block_tables, problem: Problem, block_size: int, num_blocks: int | None, *, interpret: bool
) -> list[jax.Array]:
    """The steps of each request, the steps of all requests before it, its `unknown`; the cost of each candidate."""
    requests, boundaries, columns = _padded(problem.batch), _padded(problem.partitions + 1), block_tables.shape[1]

    def body(*refs, lengths_s, lengths_full, sizes_s, passed_s, blocks_s, blocks_full):
        *inputs, sizes_ref, before_ref, unknown_ref, costs_ref = refs
        lengths_refs, table_refs = inputs[: len(lengths)], inputs[len(lengths) :]
        pdl_launch_dependents((), interpret=interpret)
        for ref, to in zip(lengths_refs, lengths_s, strict=True):
            _fetch(ref, 0, to, lengths_full)
        plgpu.barrier_wait(lengths_full)
        number = _iota(requests)
        _, _, sizes = problem.of_request(*map(_load, lengths_s))
        sizes = jnp.where(number < problem.batch, sizes, 0)
        candidate = lax.axis_index("cta")
        request = candidate - problem.candidates

        @pl.when(candidate < problem.candidates)
        def _():
            costs_ref[candidate] = _cost(problem, candidate, sizes, sizes_s, passed_s)

        @pl.when(request >= 0)
        def _():
            origin, keys, size = problem.of_request(*(ref[request] for ref in lengths_refs))
            sizes_ref[request] = size
            before_ref[request] = jnp.sum(jnp.where(number < request, sizes, 0))

            row = request * columns
            before = row % ALIGNED
            first_column = _iota(BLOCKS) - before

            def some_blocks(table_ref, n, unknown):
                start = n * BLOCKS
                plgpu.commit_smem()  # all lanes have loaded the blocks before
                _fetch(table_ref, row - before + start, blocks_s, blocks_full)
                plgpu.barrier_wait(blocks_full)
                first = (first_column + start) * block_size
                is_unknown = _is_unknown(_load(blocks_s), num_blocks, first, block_size, origin, keys)
                return jnp.where(is_unknown, 1, unknown)

            unknown = jnp.zeros_like(first_column)
            for table_ref in table_refs:
                end = _ceil_div(origin + keys + before * block_size, BLOCKS * block_size)
                unknown = lax.fori_loop(0, end, partial(some_blocks, table_ref), unknown)
            unknown_ref[request] = jnp.max(unknown)

    return kernel(
        body,
        interpret=interpret,
        reduction_bytes=4 * LANES,
        kernel_name="plan_compare",
        grid=(problem.candidates + problem.batch,),
        grid_names=("cta",),
        num_threads=1,
        thread_name="wg",
        out_type=[_rows(requests), _rows(requests), _rows(problem.batch), _rows(_padded(max(problem.candidates, 1)))],
        scratch_types={
            "lengths_s": [_smem(requests) for _ in lengths],
            "lengths_full": plgpu.Barrier(num_arrivals=len(lengths) * requests // LANES),
            "sizes_s": _smem(requests),
            "passed_s": _smem(boundaries + LANES),
            "blocks_s": _smem(BLOCKS),
            "blocks_full": plgpu.Barrier(num_arrivals=BLOCKS // LANES),
        },
    )(*lengths, *[block_tables.reshape(-1)] * (num_blocks is not None))


def _cost(problem: Problem, candidate, sizes, sizes_s, passed_s) -> jax.Array:
    """The cost of a candidate, in `compare`, for requests of `sizes` steps; 0 after the last request."""
    sizes_s[...] = sizes
    steps = jnp.sum(sizes)
    division = problem.division(candidate, steps)
    boundary = _iota(passed_s.size - LANES)
    position = boundary * division.length

    def some_requests(carry):
        request, total, ended, before = carry
        for _ in range(UNROLL):
            begin, size = division.begin(request, total), sizes_s[request]
            request, total = request + 1, total + size
            has_ended = begin + size <= position
            ended, before = jnp.where(has_ended, request, ended), jnp.where(has_ended, total, before)
        return request, total, ended, before

    start = jnp.int32(0), jnp.int32(0), jnp.zeros_like(boundary), jnp.zeros_like(boundary)
    *_, ended, before = lax.while_loop(lambda carry: carry[1] < steps, some_requests, start)
    # The loop also counts some elements after the last request.
    passed, inside = division.passed(position, jnp.minimum(ended, problem.batch), before)
    passed_s[pl.ds(0, boundary.size)] = passed
    load = _load(passed_s.at[pl.ds(1, boundary.size)]) - passed + problem.costs.overhead * inside
    load, inside = (jnp.where(boundary < problem.partitions, x, 0) for x in (load, inside))
    return division.cost(jnp.max(load), jnp.sum(inside))


def _divide(lengths, compared, problem: Problem, *, interpret: bool) -> list[jax.Array]:
    """`partitions`, `work_tiles` and `split_requests` of a plan, from the results of `_compare`."""
    batch, partitions, columns = problem.batch, problem.partitions, 6 + len(lengths)
    ends = min(problem.tiles - batch, CTAS_AT_END)

    def body(*refs):
        *lengths_refs, sizes_ref, before_ref, unknown_ref, costs_ref = refs[:-3]
        partitions_ref, work_tiles_ref, split_requests_ref = refs[-3:]
        own_request = lax.axis_index("cta")
        own_partition = own_request - batch
        own_end = own_partition - (partitions + 1)
        of_request, at_end = own_request < batch, own_end >= 0
        of_partition = ~of_request & ~at_end
        # All loads that depend on nothing come first, so that they overlap.
        number, sizes, before = _iota(sizes_ref.size), _load(sizes_ref), _load(before_ref)
        total, best = sizes_ref[batch - 1] + before_ref[batch - 1], None
        if not problem.batch_invariant:
            candidate = _iota(costs_ref.size)
            costs = jnp.where(candidate < problem.candidates, _load(costs_ref), HUGE)
            best = jnp.min(jnp.where(costs == jnp.min(costs), candidate, HUGE))
        division = problem.division(best, total)

        # How many work tiles of each request precede this CTA's: all or none, or those in earlier partitions.
        *_, counts = places = division.place(number, before, sizes)
        partition = jnp.where(of_partition, own_partition, 0)
        whole_requests = jnp.where(of_request, own_request, jnp.where(at_end, batch, 0))
        preceding = jnp.where(number < whole_requests, counts, division.preceding(places, partition))
        preceding = jnp.where(number < batch, preceding, 0)  # nothing was stored for numbers after the last request
        tile, split = jnp.sum(preceding), jnp.sum(jnp.where(counts > 1, preceding, 0))
        request = jnp.sum(jnp.where((preceding == counts) & (number < batch), 1, 0))
        request = jnp.minimum(request, batch - 1)

        *_, count = place = division.place(request, before_ref[request], sizes_ref[request])
        n = jnp.where(at_end, count, division.preceding(place, partition))
        is_split = count > 1
        length, *beyond = (ref[request] for ref in lengths_refs)
        origin, keys, _ = problem.of_request(length, *beyond)
        unmasked_end = problem.unmasked_end(keys, unknown_ref[request], *beyond)

        def row(i):
            """Columns of the i-th work tile after the first one of this CTA."""
            first, end, _ = division.work_tile(place, n + i)
            return request, first, end, keys, unmasked_end, jnp.where(is_split, split + i, -1), origin, *beyond

        def store_tile(i, _):
            _store(work_tiles_ref, tile + i, *row(i))
            return ()

        @pl.when(of_request)
        def _():
            # The other work tiles of a request begin a partition, unless the plan is batch-invariant.
            lax.fori_loop(0, count if problem.batch_invariant else 1, store_tile, ())

        @pl.when(of_partition)
        def _():
            if not problem.batch_invariant:
                pl.when((n > 0) & (n < count))(lambda: _store(work_tiles_ref, tile, *row(0)))
            kept = jnp.minimum(problem.tiles - 1 - tile, 0)  # a partition may begin at the end of the table
            _store(partitions_ref, partition, tile, *row(kept))

        @pl.when(at_end)
        def _():
            steps = _div(jnp.maximum(problem.tiles - tile - own_end, 0) + ends - 1, ends)
            lax.fori_loop(0, steps, lambda i, _: store_tile(own_end + i * ends, _), ())

        by_request = problem.combined == batch
        is_last = is_split & (by_request | (n == count - 1))

        @pl.when(of_request if by_request else of_partition & (partition < partitions))
        def _():
            values = jnp.where(is_last, request, -1), split - jnp.where(is_split, n, 1), count
            _store(split_requests_ref, request if by_request else partition, *values)

    return kernel(
        body,
        interpret=interpret,
        reduction_bytes=4 * LANES,
        kernel_name="plan_divide",
        grid=(batch + partitions + 1 + ends,),
        grid_names=("cta",),
        num_threads=1,
        thread_name="wg",
        out_type=[_rows(partitions + 1, 1 + columns), _rows(problem.tiles, columns), _rows(problem.combined, 3)],
    )(*lengths, *compared)


def _padded(count: int) -> int:
    """`count`, rounded up to whole vectors."""
    return count + -count % LANES


def _rows(*shape: int) -> Any:
    """An array of int32 in device memory."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _smem(size: int) -> Any:
    """An array of int32 in shared memory."""
    return plgpu.SMEM((size,), jnp.int32)


def _iota(size: int) -> jax.Array:
    """0, 1, 2, ... as a vector in registers."""
    return plgpu.layout_cast(lax.iota(jnp.int32, size), plgpu.Layout.WG_STRIDED((size,), 1))


def _load(ref) -> jax.Array:
    """A vector in registers."""
    return plgpu.load(ref, layout=plgpu.Layout.WG_STRIDED(ref.shape, 1))


def _store(ref, row, *values) -> None:
    """Stores a row of a table."""
    for column, value in enumerate(values):
        ref[row, column] = value


def _fetch(ref, start, to, full) -> None:
    """Copies elements of `ref`, from `start` on, a multiple of ALIGNED, to shared memory; zeros after its end."""

    def copy(n, _):
        plgpu.copy_gmem_to_smem(ref.at[pl.ds(start + n * LANES, LANES)], to.at[pl.ds(n * LANES, LANES)], full)
        return ()

    lax.fori_loop(0, to.shape[0] // LANES, copy, ())
