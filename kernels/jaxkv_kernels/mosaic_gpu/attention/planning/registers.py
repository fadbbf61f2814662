"""`Vectors` in the registers of a CTA, and their tables in its shared memory."""

import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.mosaic_gpu.attention.planning import lanes
from jaxkv_kernels.mosaic_gpu.attention.planning.division import HUGE
from jaxkv_kernels.mosaic_gpu.attention.planning.lanes import LANES, WARP, WARPS

SUMS = 3
"""How many running sums a division computes."""


def padded(count: int, threads: int) -> int:
    """`count`, rounded up to a multiple of `threads`."""
    return count + -count % threads


def at_once(count: int, threads: int) -> int:
    """How many elements of candidates are evaluated at once: up to two per thread, so that loads overlap."""
    return min(padded(count, threads), 2 * threads)


class Registers:
    """`Vectors` in the registers of `warpgroups` warpgroups, and tables in shared memory.

    A vector has few registers per thread, usually one, and loops are not unrolled.  This keeps the code short,
    which matters because it runs only once.
    """

    def __init__(self, scratch, warpgroups: int = 1):
        self._scratch, self._warpgroups = scratch, warpgroups
        self._sums = 0
        """The number of running sums so far; each has its own place in the table `warps`."""

    @property
    def threads(self) -> int:
        """Threads of the CTA."""
        return self._warpgroups * LANES

    def _call(self, function, *arguments, refs, result: int | None = None):
        """`lanes.call` of a function that returns `result` registers, a scalar if that is 0, nothing if None."""
        if result is None:
            return lanes.call(function, *arguments, refs=refs, warpgroups=self._warpgroups)

        def one(*given):
            return [function(*given)]

        (found,) = lanes.call(one, *arguments, refs=refs, results=(result,), warpgroups=self._warpgroups)
        return found

    def iota(self, count):
        """See `Vectors`."""
        registers = padded(count, self.threads) // self.threads
        return self._call(lambda threads: [threads.number(n) for n in range(registers)], refs=0, result=registers)

    def tables(self, **named):
        """See `Vectors`."""
        refs = {name: self._scratch[name] for name in named}

        def store(threads, *refs_and_vectors):
            count = len(refs_and_vectors) // 2
            for ref, x in zip(refs_and_vectors[:count], refs_and_vectors[count:], strict=True):
                for n, value in enumerate(x):
                    threads.store(ref, value, threads.number(n))
            threads.barrier()

        self._call(store, *refs.values(), *named.values(), refs=len(refs))
        return refs

    def read(self, table, i):
        """See `Vectors`."""
        return self._call(lambda threads, table, i: threads.load(table, i), table, jnp.int32(i), refs=1, result=0)

    def store(self, start, *tables):
        """Stores vectors to tables, given as pairs (table, vector), from element `start` on."""
        refs, vectors = zip(*tables, strict=True)

        def store(threads, *given):
            *given, start = given
            for ref, x in zip(given[: len(refs)], given[len(refs) :], strict=True):
                for n, value in enumerate(x):
                    threads.store(ref, value, threads.number(n, start))
            threads.barrier()

        self._call(store, *refs, *vectors, start, refs=len(refs))

    def take(self, table, i):
        """See `Vectors`."""

        def take(threads, table, i):
            return [threads.load(table, n) for n in i]

        return self._call(take, table, i, refs=1, result=i.shape[0] // LANES)

    def search(self, table, count, bound, *, equal=False, slope=None):
        """See `Vectors`."""

        def search(threads, table, bound, slope=None):
            slopes = slope or [threads.constant(0)] * len(bound)
            return threads.search(table, count, bound, slopes, equal=equal)

        given = () if slope is None else (slope,)
        return self._call(search, table, bound, *given, refs=1, result=bound.shape[0] // LANES)

    def cumsum(self, *xs):
        """See `Vectors`."""
        first, warps = self._sums, WARPS * self._warpgroups
        self._sums += len(xs)

        def cumsum(threads, sums, *xs):
            def place(sum_, n, warp):
                return threads.add(warp, threads.constant(((first + sum_) * len(xs[0]) + n) * warps))

            within = [[threads.running_sum(value) for value in x] for x in xs]
            with threads.when(threads.compare("eq", threads.lane, threads.constant(WARP - 1))):
                for sum_, x in enumerate(within):
                    for n, value in enumerate(x):
                        threads.store(sums, value, place(sum_, n, threads.warp))
            threads.barrier()
            zero, found = threads.constant(0), []
            warp = threads.least(threads.lane, threads.constant(warps - 1))
            for sum_, x in enumerate(within):
                before, own = zero, []  # `before`: the sum of all registers before this one
                for n, value in enumerate(x):
                    total = threads.load(sums, place(sum_, n, warp))
                    is_lower = threads.compare("slt", threads.lane, threads.warp)
                    lower = threads.over_warp("add", threads.select(is_lower, total, zero))
                    own.append(threads.add(threads.add(value, lower), before))
                    if n + 1 < len(x):
                        is_one = threads.compare("slt", threads.lane, threads.constant(warps))
                        before = threads.add(before, threads.over_warp("add", threads.select(is_one, total, zero)))
                found.append(own)
            return found

        results = (xs[0].shape[0] // LANES,) * len(xs)
        found = lanes.call(
            cumsum, self._scratch["warps"], *xs, refs=1, results=results, warpgroups=self._warpgroups
        )  # fmt: skip
        return tuple(found) if len(xs) > 1 else found[0]

    def candidates(self, count, width, evaluate):
        """See `Vectors`."""
        names = "loads", "splits"
        none = jnp.zeros_like(self.iota(self._scratch["loads"].shape[0]))
        loads, splits = self.tables(**dict.fromkeys(names, none)).values()
        step = at_once(count * width, self.threads)

        def some(n, _):
            element = self.iota(step) + n * step
            load, split = evaluate(element)
            self.reduce(loads, splits, load, split, lax.div(element, jnp.full_like(element, width)))
            return ()

        lax.fori_loop(0, padded(count * width, step) // step, some, ())
        self.wait()
        return loads, splits

    def reduce(self, loads, splits, load, split, candidate):
        """Updates tables at the candidate of each element: with the maximum of `load`, and with the sum of `split`."""

        def reduce(threads, loads, splits, load, split, candidate):
            values = [
                (threads.over_warp("max", load[n]), threads.over_warp("add", split[n]), place)
                for n, place in enumerate(candidate)  # the same for all lanes of a warp
            ]
            with threads.when(threads.compare("eq", threads.lane, threads.constant(0))):
                for most, total, place in values:
                    threads.combine("max", loads, most, place)
                    threads.combine("add", splits, total, place)

        self._call(reduce, loads, splits, load, split, candidate, refs=2)

    def wait(self):
        """Waits for all threads of the CTA."""
        self._call(lambda threads: threads.barrier(), refs=0)

    def following(self, x):
        """See `Vectors`."""
        return self._call(
            lambda threads, x: [threads.next_lane(value) for value in x], x, refs=0, result=x.shape[0] // LANES
        )

    def first_least(self, count, cost):
        """See `Vectors`."""
        registers = padded(count, WARP) // WARP

        def by_lane(threads):  # each warp has all candidates
            return [threads.add(threads.lane, threads.constant(n * WARP)) for n in range(registers)]

        def least(threads, x):
            found = x[0]
            for value in x[1:]:
                found = threads.least(found, value)
            return threads.over_warp("min", found)

        candidate = self._call(by_lane, refs=0, result=registers)
        found = jnp.where(candidate < count, cost(jnp.minimum(candidate, count - 1)), HUGE)
        lowest = self._call(least, found, refs=0, result=0)
        return self._call(least, jnp.where(found == lowest, candidate, HUGE), refs=0, result=0)

    def load(self, ref, count, *row, start=0):
        """A vector of at least `count` elements of a row in device memory, from `start` on; 0 beyond the row's end."""
        width = ref.shape[-1]
        registers = padded(count, self.threads) // self.threads

        def load(threads, ref, start, *row):
            found = []
            for n in range(registers):
                place = threads.number(n, start)
                value = threads.load(ref, *row, threads.least(place, threads.constant(width - 1)))
                found.append(
                    threads.select(threads.compare("slt", place, threads.constant(width)), value, threads.constant(0))
                )
            return found

        return self._call(load, ref, jnp.int32(start), *row, refs=1, result=registers)

    def store_rows(self, ref, columns, start):
        """Stores columns to rows of device memory, from row `start` on; rows beyond its end are dropped."""

        def store(threads, ref, start, *columns):
            for n in range(len(columns[0])):
                row = threads.number(n, start)
                with threads.when(threads.compare("slt", row, threads.constant(ref_rows))):
                    for c, column in enumerate(columns):
                        threads.store(ref, column[n], row, threads.constant(c))

        ref_rows = ref.shape[0]
        self._call(store, ref, start, *columns, refs=1)
