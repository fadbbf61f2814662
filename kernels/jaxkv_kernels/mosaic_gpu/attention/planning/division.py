"""How a step's requests are divided among partitions: one algorithm, on vectors of XLA or of a kernel's registers.

Steps of all requests are laid end to end.  For a boundary between partitions, a search for the request that it lies in
returns how many steps, and requests, precede it.  Differences between neighbouring boundaries are the loads of
partitions, and boundaries inside requests are splits.  To estimate the time of a division therefore takes one search
per partition, and no comparison of all partitions with all requests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.mosaic_gpu.attention.config import SPLIT_COST_UNIT, SplitCosts
from jaxkv_kernels.mosaic_gpu.sizes import TILE

LOADED_AT_ONCE = 4
"""Splits that the warps of a warpgroup load at once in `combine`."""
INVARIANT_SPLITS, INVARIANT_TOKENS = 8, 1024
"""Of a batch-invariant plan: the most splits of a request, and the fewest tokens of a split."""
HUGE = 2**31 - 1
UNDIVIDED = 2**23
"""The length of a partition, in steps, in a division that leaves requests whole: more than any request has."""
WARP = 32


class Vectors(Protocol):
    """Vectors of int32.  They may be longer than requested; elements beyond that length are never used."""

    def iota(self, count: int) -> Any:
        """0, 1, 2, ..."""

    def tables(self, **named) -> dict[str, Any]:
        """Vectors as tables for `take`, `read` and `search`."""

    def read(self, table, i) -> Any:
        """table[i], a scalar."""

    def take(self, table, i) -> Any:
        """table[i]; i is in range."""

    def search(self, table, count: int, bound, *, equal: bool = False, slope=None) -> Any:
        """How many of the first `count` elements, which are sorted, are below `bound`; with `equal`, at most `bound`.

        With `slope`, a vector like `bound`, compares table[i] + slope * i, which is sorted as well, instead of
        table[i].
        """

    def cumsum(self, *xs) -> Any:
        """Inclusive running sums: a vector for a single argument, otherwise a tuple of vectors."""

    def candidates(self, count: int, width: int, evaluate: Callable[[Any], tuple[Any, Any]]) -> tuple[Any, Any]:
        """Tables [count]: the maximum of the first and the sum of the second of `evaluate`, over `width` elements each.

        `width` is a multiple of WARP.  `evaluate` maps a vector of element numbers (candidate * width + i) to two
        vectors of non-negative numbers, and may call `following`.
        """

    def following(self, x) -> Any:
        """Within `evaluate`: the value of the next element.  The last of every WARP elements may get any value."""

    def first_least(self, count: int, cost: Callable[[Any], Any]) -> Any:
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

    def origin(self, lengths):
        """The token at which the steps of a request begin."""
        if self.window is None:
            return jnp.zeros_like(lengths)
        return _div(jnp.maximum(lengths - (self.tokens - 1) - self.window, 0), TILE) * TILE


def _div(a, b):
    """`a // b` of non-negative numbers."""
    return lax.div(*jnp.broadcast_arrays(a, jnp.asarray(b, jnp.int32)))


def _ceil_div(a, b):
    """`a / b` rounded up, at least 1."""
    return _div(jnp.maximum(a, 1) - 1, b) + 1


class Division:
    """The division of requests of `lengths`, which fit their tables; `unknown()` is 1 for those with unknown blocks."""

    def __init__(self, vectors: Vectors, problem: Problem, lengths, unknown: Callable[[], Any]):
        self._v, self._problem = vectors, problem
        request = vectors.iota(problem.batch)
        valid = request < problem.batch
        origin = problem.origin(lengths)
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
        unmasked_end = _div(jnp.maximum(keys - (problem.tokens - 1), 0), problem.step)
        unmasked_end = jnp.where(unknown() != 0, 0, unmasked_end)
        self._of |= vectors.tables(
            before=after - counts, counts=counts, begins=begins, first=first, keys=keys,
            unmasked_end=unmasked_end, first_split=first_split, origin=origin, after=after,
        )  # fmt: skip
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
            place = boundary * v.take(tables["lengths"], jnp.minimum(candidate, count - 1))
            found = v.search(tables["without_gaps"], batch, place, slope=gap)
            last = jnp.maximum(found - 1, 0)
            end, reached = v.take(self._of["sums"], last), place - gap * last
            inside = jnp.where((found > 0) & (reached < end), 1, 0)
            passed = jnp.where(found > 0, jnp.minimum(end, reached), 0) + overhead * found
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
        columns = (request, begin, end, look_up("keys"), look_up("unmasked_end"), split, look_up("origin"))
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
