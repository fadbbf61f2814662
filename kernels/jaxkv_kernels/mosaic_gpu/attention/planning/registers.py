"""`Vectors` in the registers of a warpgroup, and their tables in its shared memory."""

from math import gcd

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.attention.planning import lanes
from jaxkv_kernels.mosaic_gpu.attention.planning.lanes import LANES, WARP, WARPS

CHUNK = 1280
"""The most elements of candidates that are evaluated at once: ten registers per vector."""


def padded(count: int) -> int:
    """`count`, rounded up to whole registers of the warpgroup."""
    return count + -count % LANES


def chunk(width: int) -> int:
    """How many elements to evaluate at once: whole candidates of `width` (a multiple of 32) that fill whole registers.

    At most CHUNK, unless even the smallest such number is larger.
    """
    together = LANES * width // gcd(LANES, width)
    return max(CHUNK // together, 1) * together


class Registers:
    """`Vectors` in the registers of a warpgroup, and tables in shared memory."""

    def __init__(self, scratch):
        self._scratch = scratch

    def iota(self, count):
        """See `Vectors`."""
        count = padded(count)
        return plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=lanes.layout(count))

    def tables(self, **named):
        """See `Vectors`."""
        refs = {name: self._scratch[name] for name in named}

        def store(threads, *refs_and_vectors):
            count = len(refs_and_vectors) // 2
            for ref, x in zip(refs_and_vectors[:count], refs_and_vectors[count:], strict=True):
                for n, value in enumerate(x):
                    threads.store(ref, value, threads.number(n))
            threads.barrier()

        lanes.call(store, *refs.values(), *named.values(), refs=len(refs))
        return refs

    def read(self, table, i):
        """See `Vectors`."""
        return table[i]

    def store(self, ref, x, start):
        """Stores a vector to a table, from element `start` on."""

        def store(threads, ref, x, start):
            for n, value in enumerate(x):
                threads.store(ref, value, threads.number(n, start))
            threads.barrier()

        lanes.call(store, ref, x, start, refs=1)

    def take(self, table, i):
        """See `Vectors`."""

        def take(threads, table, i):
            return [threads.load(table, n) for n in i]

        return lanes.call(take, table, i, refs=1, result=i.shape[0])

    def search(self, table, count, bound, *, equal=False):
        """See `Vectors`."""

        def search(threads, table, bound):
            found = [threads.constant(0)] * len(bound)
            for bit in reversed(range(count.bit_length())):
                for n, b in enumerate(bound):
                    ahead = threads.add(found[n], threads.constant(1 << bit))
                    last = threads.add(threads.least(ahead, threads.constant(count)), threads.constant(-1))
                    passed = threads.compare("sle" if equal else "slt", threads.load(table, last), b)
                    inside = threads.compare("sle", ahead, threads.constant(count))
                    found[n] = threads.select(threads.both(inside, passed), ahead, found[n])
            return found

        return lanes.call(search, table, bound, refs=1, result=bound.shape[0])

    def cumsum(self, x):
        """See `Vectors`."""

        def cumsum(threads, sums, x):
            within = [threads.running_sum(value) for value in x]
            with threads.when(threads.compare("eq", threads.lane, threads.constant(WARP - 1))):
                for n, value in enumerate(within):
                    place = threads.add(threads.warp, threads.constant(n * WARPS))
                    threads.store(sums, value, place)
            threads.barrier()
            before, result = threads.constant(0), []
            for n, value in enumerate(within):
                own = threads.add(value, before)
                for warp in range(WARPS):
                    total = threads.load(sums, threads.constant(n * WARPS + warp))
                    is_lower = threads.compare("sgt", threads.warp, threads.constant(warp))
                    own = threads.add(own, threads.select(is_lower, total, threads.constant(0)))
                    before = threads.add(before, total)
                result.append(own)
            threads.barrier()
            return result

        return lanes.call(cumsum, self._scratch["warps"], x, refs=1, result=x.shape[0])

    def candidates(self, kind, count, width, evaluate):
        """See `Vectors`."""
        step = chunk(width)
        names = f"loads_{kind}", f"splits_{kind}"
        none = jnp.zeros_like(self.iota(self._scratch[names[0]].shape[0]))
        loads, splits = self.tables(**dict.fromkeys(names, none)).values()

        def some(n, _):
            element = self.iota(step) + n * step
            load, split = evaluate(element)
            self.reduce(loads, splits, load, split, lax.div(element, jnp.full_like(element, width)))
            return ()

        lax.fori_loop(0, -(-count * width // step), some, ())
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
            threads.barrier()

        lanes.call(reduce, loads, splits, load, split, candidate, refs=2)

    def following(self, x):
        """See `Vectors`."""

        def following(threads, ref, x):
            for n, value in enumerate(x):
                threads.store(ref, value, threads.number(n))
            threads.barrier()
            last = threads.constant(len(x) * LANES - 1)
            one = threads.constant(1)
            found = [threads.load(ref, threads.least(threads.add(threads.number(n), one), last)) for n in range(len(x))]
            threads.barrier()
            return found

        return lanes.call(following, self._scratch["following"], x, refs=1, result=x.shape[0])

    def load(self, ref, count, *row, start=0):
        """A vector of at least `count` elements of a row in device memory, from `start` on; 0 beyond the row's end."""
        width = ref.shape[-1]

        def load(threads, ref, start, *row):
            found = []
            for n in range(padded(count) // LANES):
                place = threads.number(n, start)
                value = threads.load(ref, *row, threads.least(place, threads.constant(width - 1)))
                found.append(
                    threads.select(threads.compare("slt", place, threads.constant(width)), value, threads.constant(0))
                )
            return found

        return lanes.call(load, ref, jnp.int32(start), *row, refs=1, result=padded(count))

    def store_rows(self, ref, columns, start):
        """Stores columns to rows of device memory, from row `start` on; rows beyond its end are dropped."""

        def store(threads, ref, start, *columns):
            for n in range(len(columns[0])):
                row = threads.number(n, start)
                with threads.when(threads.compare("slt", row, threads.constant(ref_rows))):
                    for c, column in enumerate(columns):
                        threads.store(ref, column[n], row, threads.constant(c))

        ref_rows = ref.shape[0]
        lanes.call(store, ref, start, *columns, refs=1)
