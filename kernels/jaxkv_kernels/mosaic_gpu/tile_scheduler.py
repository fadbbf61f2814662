"""The tile scheduler (split-KV): which CTA (or cluster) attends to which tokens.

A plan is computed on the device from the lengths, once for all layers of a step.

The tokens of a request are counted in steps: pairs of 64-token tiles, or single tiles for MLA calls with few rows.  By
default, the steps of all requests are laid end to end, and the line is divided into equal partitions: as many as fill
the GPU, with a CTA for each partition, tile of rows and KV head.  Several divisions are compared: into as many
partitions as fill the GPU or somewhat fewer, with and without gaps between requests, which stand for the cost of
beginning and ending a request, and one that leaves all requests whole, if there are enough partitions.  The division
with the least estimated time is used: the time of its longest partition and of combining its splits.
A batch-invariant plan splits a request by its own length alone.

A work tile is the part of a request that lies in one partition.  The work tiles of a request that was divided store
splits, which `combine` merges.

Algorithm.  For a boundary between partitions, a search for the request that it lies in returns how many steps, and
requests, precede it.  Differences between neighbouring boundaries are the loads of partitions, and boundaries inside
requests are splits.  To estimate the time of a division therefore takes one search per partition, and no comparison of
all partitions with all requests.  `Division` has this algorithm once, on vectors: of XLA (`Arrays`), or in the
registers of a CTA (`tile_scheduler_vectors.py`, which has what each thread does, in PTX).

Two small kernels compute it that way:

    check       a CTA per request: whether the request needs a block that is not in the cache (an unknown block)
    divide      one CTA of four warpgroups: the division of all requests, in registers and shared memory

Timeline of `divide`.  It starts while `check` runs (programmatic dependent launch).

    load the lengths; sizes, running sums
    per boundary between partitions of a candidate division, 1,024 at once: search for the request that it lies in,
      compute the load and the splits of the partition, reduce them per candidate
    find the candidate of least cost; begins, counts and first partitions of requests
    wait for `check`; steps that need no mask; store all of these as tables
    per work tile, 512 at once: search for its request, store its columns; store its partition and request as tables
    per partition: search for its first work tile, store its columns; requests that are split

A batch-invariant plan has no candidates.  To keep the code short, most vectors have one register per thread, and both
searches and the evaluation of candidates are loops.  A plan of 128 requests and 66 partitions takes 4.3 us on an H200;
a single warpgroup with longer vectors and unrolled loops took 7.0.

Barriers.  All threads write a table, and then wait for each other.  Every table and every running sum has its own
shared memory.
Budget.  Shared memory: 12 tables of requests, two of work tiles, three of candidates and one of sums, 4 bytes per
element: for 1,024 requests 68 KiB, or 120 KiB if the plan is batch-invariant.
Registers: requests / 512 per vector of requests, and at most 128 per thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.addressing import lengths_in_table, table_tokens
from jaxkv_kernels.mosaic_gpu.interpreter.scheduler import InterpretedRegisters
from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting, multiprocessors
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel, pdl_launch_dependents, wait_for_previous
from jaxkv_kernels.mosaic_gpu.sizes import PAIR, TILE
from jaxkv_kernels.mosaic_gpu.tile_scheduler_vectors import LANES, SUMS, WARP, WARPS, Registers, at_once, padded
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
MOST_REQUESTS, MOST_TILES = 1024, 8192
"""The most requests and work tiles for which `divide` has registers and shared memory."""
AT_ONCE = 512
"""The most work tiles, and columns of a block table, that are processed at once."""
WARPGROUPS = 4
"""Warpgroups of `divide`."""
OF_REQUESTS = (
    "sums",
    "without_gaps",
    "before",
    "counts",
    "sizes",
    "begins",
    "first",
    "keys",
    "unmasked_end",
    "first_split",
    "origin",
    "after",
)
"""Names of the tables of requests."""


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
    `by_kernel` computes the schedule by one or two kernels on a Hopper GPU (with `interpret`, in the interpreter) if
    they have room for it, otherwise by XLA, which takes several times as long.
    """
    problem = Problem(
        batch=seq_lens.size,
        partitions=partitions,
        tokens=tokens,
        step=step,
        costs=costs,
        window=window,
        ahead=ahead,
        batch_invariant=batch_invariant,
    )
    beyond = None
    if trailing is not None:
        lengths = lengths_in_table(seq_lens, block_tables, block_size)
        seq_lens = jnp.maximum(query_ranges(lengths, 1, None, ahead, trailing)[1][:, 0], 0)
        beyond = seq_lens - (lengths - trailing)
    if by_kernel and kernels_fit(problem):
        divided = divide_by_kernels(
            seq_lens, beyond, block_tables, problem, block_size=block_size, num_blocks=num_blocks, interpret=interpret
        )
        return Plan(*divided, max_splits=problem.max_splits)
    lengths = lengths_in_table(seq_lens, block_tables, block_size)
    if num_blocks is None:
        return Plan(*divide_by_xla(lengths, beyond, jnp.zeros_like(lengths), problem), max_splits=problem.max_splits)
    columns = jnp.arange(block_tables.shape[1], dtype=jnp.int32) * block_size
    seen = (columns + block_size > problem.origin(lengths, beyond)[:, None]) & (columns < lengths[:, None])
    unknown = (((block_tables < 0) | (block_tables >= num_blocks)) & seen).any(axis=1).astype(jnp.int32)
    return Plan(*divide_by_xla(lengths, beyond, unknown, problem), max_splits=problem.max_splits)


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


class Vectors(Protocol):
    """Vectors of int32.  They may be longer than requested; elements beyond that length are never used."""

    def iota(self, count: int) -> jax.Array:
        """0, 1, 2, ..."""

    def tables(self, **named) -> dict[str, Any]:
        """Vectors as tables for `take`, `read` and `search`."""

    def read(self, table, i) -> jax.Array:
        """table[i], a scalar."""

    def take(self, table, i) -> jax.Array:
        """table[i]; i is in range."""

    def search(self, table, count: int, bound, *, equal: bool = False, slope=None) -> jax.Array:
        """How many of the first `count` elements, which are sorted, are below `bound`; with `equal`, at most `bound`.

        With `slope`, a vector like `bound`, compares table[i] + slope * i, which is sorted as well, instead of
        table[i].
        """

    def cumsum(self, *xs) -> Any:
        """Inclusive running sums: a vector for a single argument, otherwise a tuple of vectors."""

    def candidates(
        self, count: int, width: int, evaluate: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    ) -> tuple[Any, Any]:
        """Tables [count]: the maximum of the first and the sum of the second of `evaluate`, over `width` elements each.

        `width` is a multiple of WARP.  `evaluate` maps a vector of element numbers (candidate * width + i) to two
        vectors of non-negative numbers, and may call `following`.
        """

    def following(self, x) -> jax.Array:
        """Within `evaluate`: the value of the next element.  The last of every WARP elements may get any value."""

    def first_least(self, count: int, cost: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """The number of the (first) candidate of least cost, a scalar; `cost` maps a vector of numbers to costs."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a plan is made for, in plain numbers; see `make_plan`."""

    batch: int
    partitions: int
    tokens: int
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
    def candidates(self) -> int:
        """How many divisions are compared.

        These are divisions into `fewest` to `partitions` partitions, first with gaps, then without, and, if there are
        enough partitions, one that leaves all requests whole.
        """
        return (self.partitions + 1 - self.fewest) * (1 if self.costs.overhead == 0 else 2) + self.may_be_whole

    @property
    def may_be_whole(self) -> bool:
        """Whether each request can have a partition of its own."""
        return self.batch <= self.partitions

    @property
    def boundaries(self) -> int:
        """Elements that a candidate has for the boundaries between its partitions, a multiple of WARP.

        The last of each WARP boundaries is also the first of the next ones, because a load needs two boundaries.
        """
        return WARP * -(-self.partitions // (WARP - 1))

    def origin(self, lengths, beyond):
        """The token at which the steps of a request begin; `beyond` is that of `WorkTile`."""
        if self.window is None:
            return jnp.zeros_like(lengths)
        query_ends = lengths if beyond is None else lengths - beyond
        return _div(jnp.maximum(query_ends - (self.tokens - 1) - self.window, 0), TILE) * TILE

    def hidden(self, beyond):
        """How many tokens at the end, which other query tokens see, the first query token does not see."""
        if self.ahead is None:
            return 0
        hidden = self.tokens - 1 - self.ahead
        if beyond is None:
            return max(hidden, 0)
        return jnp.maximum(beyond, -hidden) + hidden  # in this order, no sum overflows


def _div(a, b):
    """`a // b` of non-negative numbers."""
    return lax.div(*jnp.broadcast_arrays(a, jnp.asarray(b, jnp.int32)))


def _ceil_div(a, b):
    """`a / b` rounded up, at least 1."""
    return _div(jnp.maximum(a, 1) - 1, b) + 1


class Division:
    """The division of requests of `lengths`, which fit their tables; `unknown()` is 1 for those with unknown blocks.

    Lengths end at the last token that some query token sees; `beyond` is that of `WorkTile`.
    """

    def __init__(self, vectors: Vectors, problem: Problem, lengths, beyond, unknown: Callable[[], Any]):
        self._v, self._problem = vectors, problem
        request = vectors.iota(problem.batch)
        valid = request < problem.batch
        origin = problem.origin(lengths, beyond)
        keys = lengths - origin
        sizes = jnp.where(valid, _ceil_div(keys, problem.step), 0)
        sums = vectors.cumsum(sizes)
        self._of = vectors.tables(sums=sums, sizes=sizes)
        self._total = vectors.read(self._of["sums"], problem.batch - 1)
        if problem.batch_invariant:
            gap, laid_out = jnp.int32(problem.costs.overhead), jnp.int32(1)
            self._length = _ceil_div(self._total + problem.batch * gap, problem.partitions)
        else:
            gap, self._length, laid_out = self._least_cost(sizes, sums)
        begins = laid_out * (sums - sizes) + gap * request
        if problem.batch_invariant:
            counts = jnp.clip(_div(sizes, INVARIANT_TOKENS // problem.step), 1, INVARIANT_SPLITS)
            first = begins
        else:
            first = _div(begins, self._length)
            counts = _div(jnp.maximum(begins + sizes - 1, 0), self._length) - first + 1
        counts = jnp.where(valid, counts, 0)
        is_split = counts > 1
        after, first_split = vectors.cumsum(counts, jnp.where(is_split, counts, 0))
        first_split -= counts
        unmasked_end = _div(jnp.maximum(keys - problem.hidden(beyond), 0), problem.step)
        unmasked_end = jnp.where(unknown() != 0, 0, unmasked_end)
        self._of |= vectors.tables(
            before=after - counts,
            counts=counts,
            begins=begins,
            first=first,
            keys=keys,
            unmasked_end=unmasked_end,
            first_split=first_split,
            origin=origin,
            after=after,
            **({} if beyond is None else {"beyond": beyond}),
        )
        self._tiles = vectors.read(self._of["after"], problem.batch - 1)
        self._own = request, is_split, first_split, counts

    def _least_cost(self, sizes, sums):
        """The gap between requests and the length of a partition, both in steps, and whether requests lie end to end.

        If they do not (0), each begins at a partition of its own, which it does not leave: the "gap" is the length.
        """
        problem, v, costs = self._problem, self._v, self._problem.costs
        partitions, batch, overhead = problem.partitions, problem.batch, costs.overhead
        count, width, with_gaps = problem.candidates, problem.boundaries, partitions + 1 - problem.fewest

        def gap_of(candidate):
            return jnp.where(candidate < with_gaps, overhead, 0)  # without gaps, equal requests are split alike

        candidate = v.iota(count)
        used = problem.fewest + candidate - jnp.where(candidate < with_gaps, 0, with_gaps)
        length = jnp.maximum(_ceil_div(self._total + batch * gap_of(candidate), used), costs.least)
        if problem.may_be_whole:
            length = jnp.where(candidate < count - 1, length, UNDIVIDED)
        tables = v.tables(lengths=length, without_gaps=sums - sizes)

        def evaluate(element):
            candidate = _div(element, width)
            within = element - candidate * width
            boundary = within - _div(within, WARP)
            gap = gap_of(candidate)
            position = boundary * v.take(tables["lengths"], jnp.minimum(candidate, count - 1))
            started = v.search(tables["without_gaps"], batch, position, slope=gap)
            last = jnp.maximum(started - 1, 0)
            end, reached = v.take(self._of["sums"], last), position - gap * last
            inside = jnp.where((started > 0) & (reached < end), 1, 0)
            passed = jnp.where(started > 0, jnp.minimum(end, reached), 0) + overhead * started
            load = v.following(passed) - passed + overhead * inside
            if problem.may_be_whole:
                size = v.take(self._of["sizes"], jnp.minimum(boundary, batch - 1))
                own = jnp.where(boundary < batch, size + overhead, 0)
                is_divided = candidate < count - 1
                load, inside = jnp.where(is_divided, load, own), jnp.where(is_divided, inside, 0)
            real = (boundary < partitions) & (within - WARP * _div(within, WARP) < WARP - 1)
            return jnp.where(real, load, 0), jnp.where(real, inside, 0)

        loads, splits = v.candidates(count, width, evaluate)

        def cost(candidate):
            split, load = v.take(splits, candidate), v.take(loads, candidate)
            return SPLIT_COST_UNIT * load + jnp.where(split > 0, costs.combining, 0) + costs.split * split

        best = v.first_least(count, cost)
        gap, length, laid_out = gap_of(best), v.read(tables["lengths"], best), jnp.int32(1)
        if problem.may_be_whole:
            is_whole = best == count - 1
            gap, laid_out = jnp.where(is_whole, length, gap), jnp.where(is_whole, 0, laid_out)
        return gap, length, laid_out

    def work_tiles(self, tile, request=None) -> tuple[tuple[Any, ...], Any, Any]:
        """For work tiles by number: columns of `WorkTile`, partitions, and whether each is the last of its request.

        `request` has the requests of these tiles if they are known already.
        """
        problem, v, of = self._problem, self._v, self._of
        if request is None:
            request = jnp.minimum(v.search(of["after"], problem.batch, tile, equal=True), problem.batch - 1)

        def look_up(name):
            return v.take(of[name], request)

        nth, count, size, begins = tile - look_up("before"), look_up("counts"), look_up("sizes"), look_up("begins")
        if problem.batch_invariant:
            begin, end = (_div(n * size, jnp.maximum(count, 1)) for n in (nth, nth + 1))
            partition = _div(begins + begin, self._length)
        else:
            partition = look_up("first") + nth
            begin, end = (
                jnp.minimum(jnp.maximum(p * self._length - begins, 0), size) for p in (partition, partition + 1)
            )
        split = jnp.where(count > 1, look_up("first_split") + nth, -1)
        names = ("origin", "beyond") if "beyond" in of else ("origin",)
        columns = (request, begin, end, look_up("keys"), look_up("unmasked_end"), split, *map(look_up, names))
        live = tile < self._tiles
        return columns, jnp.where(live, partition, problem.partitions), live & (nth == count - 1)

    def partitions(self, ordered, requests) -> tuple[Sequence[Any], Any]:
        """Columns of `Plan.partitions`, and whether the first work tile of each is the last of its request.

        `ordered` and `requests` are tables of the work tiles' partitions and requests.
        """
        problem, v = self._problem, self._v
        first = v.search(ordered, problem.tiles, v.iota(problem.partitions + 1))
        tile = jnp.minimum(first, problem.tiles - 1)
        columns, _, last = self.work_tiles(tile, v.take(requests, tile))
        return (first, *columns), last

    def split_requests(self, request, last) -> Sequence[Any]:
        """Columns of `Plan.split_requests`.

        `request` has the requests of the first work tiles of partitions, and `last` whether these tiles are the last of
        their requests.
        """
        problem = self._problem
        if problem.combined == problem.batch:
            request, is_split, first_split, counts = self._own
            return jnp.where(is_split, request, -1), first_split, counts
        # The last split of a request is the first work tile of a partition.
        first_split, counts = (self._v.take(self._of[name], request) for name in ("first_split", "counts"))
        return jnp.where(last & (counts > 1), request, -1), first_split, counts


class Arrays:
    """`Vectors` of exactly the requested length."""

    def iota(self, count):
        """See `Vectors`."""
        return jnp.arange(count, dtype=jnp.int32)

    def tables(self, **named):
        """See `Vectors`."""
        return named

    def read(self, table, i):
        """See `Vectors`."""
        return table[i]

    def take(self, table, i):
        """See `Vectors`."""
        return table[i]

    def search(self, table, count, bound, *, equal=False, slope=None):
        """See `Vectors`."""
        if slope is None:
            side = "right" if equal else "left"
            return jnp.searchsorted(table[:count], bound, side=side, method="compare_all").astype(jnp.int32)
        values = table[:count] + slope[:, None] * jnp.arange(count, dtype=jnp.int32)
        passed = values <= bound[:, None] if equal else values < bound[:, None]
        return passed.sum(axis=1, dtype=jnp.int32)

    def cumsum(self, *xs):
        """See `Vectors`."""
        sums = tuple(map(jnp.cumsum, xs))
        return sums if len(xs) > 1 else sums[0]

    def candidates(self, count, width, evaluate):
        """See `Vectors`."""
        first, second = (x.reshape(count, width) for x in evaluate(self.iota(count * width)))
        return first.max(axis=1), second.sum(axis=1)

    def following(self, x):
        """See `Vectors`."""
        return jnp.concatenate([x[1:], x[-1:]])

    def first_least(self, count, cost):
        """See `Vectors`."""
        return jnp.argmin(cost(self.iota(count))).astype(jnp.int32)


def divide_by_xla(lengths, beyond, unknown, problem: Problem) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`partitions`, `work_tiles` and `split_requests` of a plan for `lengths` [B]; see `Division`."""
    vectors = Arrays()
    division = Division(vectors, problem, lengths, beyond, lambda: unknown)
    columns, partition, _ = division.work_tiles(vectors.iota(problem.tiles))
    partitions, last = division.partitions(partition, columns[0])
    split_requests = division.split_requests(partitions[1][:-1], last[:-1])
    return jnp.stack(partitions, axis=1), jnp.stack(columns, axis=1), jnp.stack(split_requests, axis=1)


def kernels_fit(problem: Problem) -> bool:
    """Whether the kernels have room for a plan."""
    return problem.batch <= MOST_REQUESTS and problem.tiles <= MOST_TILES


def divide_by_kernels(
    seq_lens, beyond, block_tables, problem: Problem, *, block_size: int, num_blocks: int | None, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`partitions`, `work_tiles` and `split_requests` of a plan; see `make_plan` and `Division`."""
    of_requests = [seq_lens] if beyond is None else [seq_lens, beyond]
    names = OF_REQUESTS if beyond is None else (*OF_REQUESTS, "beyond")
    checked = []
    if num_blocks is not None:
        check = partial(_check, block_size=block_size, num_blocks=num_blocks, interpret=interpret)
        checked.append(check(of_requests, block_tables, problem))
    warpgroups = 1 if interpret else WARPGROUPS  # the interpreter's vectors are arrays of one thread
    threads = warpgroups * LANES
    requests = padded(problem.batch, threads)
    boundaries = problem.candidates * problem.boundaries
    candidates = -(-padded(boundaries, at_once(boundaries, threads)) // problem.boundaries)
    step = min(padded(problem.tiles, threads), AT_ONCE)
    chunks = -(-problem.tiles // step)
    most = table_tokens(block_tables, block_size)
    columns = 6 + len(of_requests)

    def body(*refs, **scratch):
        *refs, partitions_ref, work_tiles_ref, split_requests_ref = refs
        of_requests_refs, unknown_refs = refs[: len(of_requests)], refs[len(of_requests) :]
        vectors = (InterpretedRegisters if interpret else Registers)(scratch, warpgroups)
        lengths, *more = (vectors.load(ref, problem.batch) for ref in of_requests_refs)
        lengths, beyond = jnp.clip(lengths, 0, most), more[0] if more else None

        def unknown():
            if not unknown_refs:
                return jnp.zeros_like(lengths)
            wait_for_previous(interpret=interpret)
            return vectors.load(unknown_refs[0], problem.batch)

        division = Division(vectors, problem, lengths, beyond, unknown)

        def tiles(n, _):
            start = n * step
            found, partition, _ = division.work_tiles(vectors.iota(step) + start)
            vectors.store_rows(work_tiles_ref, found, start)
            vectors.store(start, (scratch["ordered"], partition), (scratch["requests"], found[0]))
            return ()

        lax.fori_loop(0, chunks, tiles, ())
        partitions, last = division.partitions(scratch["ordered"], scratch["requests"])
        vectors.store_rows(partitions_ref, partitions, jnp.int32(0))
        vectors.store_rows(split_requests_ref, division.split_requests(partitions[1], last), jnp.int32(0))

    def table(count):
        return plgpu.SMEM((padded(count, threads),), jnp.int32)

    def rows(*shape) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    return kernel(
        body,
        interpret=interpret,
        waits=bool(checked),
        kernel_name="plan_divide",
        grid=(1,),
        grid_names=("cta",),
        num_threads=warpgroups,
        thread_name="wg",
        out_type=[rows(problem.partitions + 1, 1 + columns), rows(problem.tiles, columns), rows(problem.combined, 3)],
        scratch_types={
            **{name: table(requests) for name in names},
            **{name: table(chunks * step) for name in ("ordered", "requests")},
            **{name: table(candidates) for name in ("lengths", "loads", "splits")},
            "warps": table(SUMS * requests // threads * WARPS * warpgroups),
        },
    )(*of_requests, *checked)


def _check(
    of_requests, block_tables, problem: Problem, *, block_size: int, num_blocks: int, interpret: bool
) -> jax.Array:
    """int32 [B]: 1 for requests that need a block that is not in the cache, 0 for others."""
    most = table_tokens(block_tables, block_size)

    def body(*refs):
        *of_requests_refs, table_ref, unknown_ref = refs
        pdl_launch_dependents(of_requests_refs, interpret=interpret)
        vectors, request = (InterpretedRegisters if interpret else Registers)({}), lax.axis_index("request")
        length, *more = (ref[request] for ref in of_requests_refs)
        length = jnp.clip(length, 0, most)
        origin = problem.origin(length, more[0] if more else None)

        def columns(n, unknown):
            start = n * AT_ONCE
            block = vectors.load(table_ref, AT_ONCE, request, start=start)
            first = (vectors.iota(AT_ONCE) + start) * block_size
            seen = (first > origin - block_size) & (first < length)
            return jnp.where(seen & ((block < 0) | (block >= num_blocks)), 1, unknown)

        none = jnp.zeros_like(vectors.iota(AT_ONCE))
        needed = lax.div(jnp.maximum(length, 1) - 1, jnp.int32(block_size * AT_ONCE)) + 1
        unknown_ref[request] = jnp.max(lax.fori_loop(0, needed, columns, none))

    out: Any = jax.ShapeDtypeStruct((problem.batch,), jnp.int32)
    return kernel(
        body,
        interpret=interpret,
        reduction_bytes=4 * LANES,
        kernel_name="plan_check",
        grid=(problem.batch,),
        grid_names=("request",),
        num_threads=1,
        thread_name="wg",
        out_type=out,
    )(*of_requests, block_tables)
