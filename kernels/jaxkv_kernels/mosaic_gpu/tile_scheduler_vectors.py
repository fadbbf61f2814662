"""Vectors of int32 in the registers of a CTA, and their tables in its shared memory.

The kernels of `tile_scheduler.py` compute plans on them.  Element r * threads + t of a vector is in register r of
thread t.  To Pallas, each warpgroup has its own array of its elements.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.ptx.fragments import array, elements, splat
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR

LANES, WARPS, WARP = 128, 4, 32
"""Lanes and warps of a warpgroup; lanes of a warp."""
REF = plgpu.RefType()
HUGE = 2**31 - 1
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
        """The number of running sums so far; each has its own part of the table `warps`."""

    @property
    def threads(self) -> int:
        """Threads of the CTA."""
        return self._warpgroups * LANES

    def _call(self, function, *arguments, refs, result: int | None = None):
        """`call` of a function that returns `result` registers, a scalar if that is 0, nothing if None."""
        if result is None:
            return call(function, *arguments, refs=refs, warpgroups=self._warpgroups)

        def one(*given):
            return [function(*given)]

        (returned,) = call(one, *arguments, refs=refs, results=(result,), warpgroups=self._warpgroups)
        return returned

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
            def index(sum_, n, warp):
                return threads.add(warp, threads.constant(((first + sum_) * len(xs[0]) + n) * warps))

            within = [[threads.running_sum(value) for value in x] for x in xs]
            with threads.when(threads.compare("eq", threads.lane, threads.constant(WARP - 1))):
                for sum_, x in enumerate(within):
                    for n, value in enumerate(x):
                        threads.store(sums, value, index(sum_, n, threads.warp))
            threads.barrier()
            zero, running = threads.constant(0), []
            warp = threads.least(threads.lane, threads.constant(warps - 1))
            for sum_, x in enumerate(within):
                before, own = zero, []  # `before`: the sum of all registers before this one
                for n, value in enumerate(x):
                    total = threads.load(sums, index(sum_, n, warp))
                    is_lower = threads.compare("slt", threads.lane, threads.warp)
                    lower = threads.warp_reduction("add", threads.select(is_lower, total, zero))
                    own.append(threads.add(threads.add(value, lower), before))
                    if n + 1 < len(x):
                        is_one = threads.compare("slt", threads.lane, threads.constant(warps))
                        before = threads.add(before, threads.warp_reduction("add", threads.select(is_one, total, zero)))
                running.append(own)
            return running

        results = (xs[0].shape[0] // LANES,) * len(xs)
        running = call(cumsum, self._scratch["warps"], *xs, refs=1, results=results, warpgroups=self._warpgroups)
        return tuple(running) if len(xs) > 1 else running[0]

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
                (threads.warp_reduction("max", load[n]), threads.warp_reduction("add", split[n]), index)
                for n, index in enumerate(candidate)  # the same for all lanes of a warp
            ]
            with threads.when(threads.compare("eq", threads.lane, threads.constant(0))):
                for most, total, index in values:
                    threads.combine("max", loads, most, index)
                    threads.combine("add", splits, total, index)

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
            lowest = x[0]
            for value in x[1:]:
                lowest = threads.least(lowest, value)
            return threads.warp_reduction("min", lowest)

        candidate = self._call(by_lane, refs=0, result=registers)
        costs = jnp.where(candidate < count, cost(jnp.minimum(candidate, count - 1)), HUGE)
        lowest = self._call(least, costs, refs=0, result=0)
        return self._call(least, jnp.where(costs == lowest, candidate, HUGE), refs=0, result=0)

    def load(self, ref, count, *row, start=0):
        """A vector of at least `count` elements of a row in device memory, from `start` on; 0 beyond the row's end."""
        width = ref.shape[-1]
        registers = padded(count, self.threads) // self.threads

        def load(threads, ref, start, *row):
            values = []
            for n in range(registers):
                element = threads.number(n, start)
                value = threads.load(ref, *row, threads.least(element, threads.constant(width - 1)))
                values.append(
                    threads.select(threads.compare("slt", element, threads.constant(width)), value, threads.constant(0))
                )
            return values

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


def layout(count: int) -> Any:
    """The layout of a warpgroup's `count` elements, a multiple of LANES."""
    return plgpu.Layout.WG_STRIDED((count,), 1)


def call(function, *arguments, refs: int, results: tuple[int, ...] = (), warpgroups: int) -> Any:
    """Calls `function(Threads, *references, *vectors)`: the first `refs` arguments are references.

    The function receives a vector as the list of the calling thread's int32 values, one per register, and a scalar as
    an int32 value.  It returns a list with an element for each of `results`: a vector of that many registers, or
    a scalar if the number is 0.
    """
    types: list[Any] = [
        REF if n < refs else layout(x.shape[0]) if jnp.ndim(x) else SCALAR for n, x in enumerate(arguments)
    ]
    returned: Any = [
        plgpu.ShapeDtypeStruct(
            (n * LANES,) if n else (), jnp.dtype(jnp.int32), layout=layout(n * LANES) if n else SCALAR
        )
        for n in results
    ]

    @plgpu.inline_mgpu(arg_types=tuple(types), return_type=returned or None)
    def run(_, *given):
        vectors = [elements(x) if x.shape else x.registers.item() for x in given[refs:]]
        returned = function(Threads(warpgroups), *given[:refs], *vectors)
        return [
            array([[value] for value in x], layout(n * LANES)) if n else splat(x)
            for n, x in zip(results, returned or (), strict=True)
        ] or None

    # Pallas holds a vector of equal elements as a single value; the cast gives it a register per LANES elements.
    return run(
        *(
            plgpu.layout_cast(x, kind) if jnp.ndim(x) and n >= refs else x
            for n, (x, kind) in enumerate(zip(arguments, types, strict=True))
        )
    )


class Threads:
    """Operations of the calling thread of a CTA on int32 values, and on references."""

    def __init__(self, warpgroups: int):
        from jax.experimental.mosaic import gpu as mgpu
        from jax.extend.mlir import ir
        from jax.extend.mlir.dialects import arith

        self._mgpu, self._arith, self._type = mgpu, arith, ir.MemRefType
        self.i32 = ir.IntegerType.get_signless(32)
        self.warpgroups, self.count = warpgroups, warpgroups * LANES
        self.thread = mgpu.utils.thread_idx()
        self.lane = arith.remui(self.thread, self.constant(WARP))
        self.warp = arith.divui(self.thread, self.constant(WARP))

    def constant(self, value: int):
        """An int32."""
        return self._mgpu.c(value, self.i32)

    def number(self, register: int, start=None):
        """The index of the thread's element in a register of a vector whose first element has index `start`."""
        own = self.add(self.thread, self.constant(register * self.count))
        return own if start is None else self.add(own, start)

    def add(self, a, b):
        """a + b."""
        return self._arith.addi(a, b)

    def least(self, a, b):
        """The smaller."""
        return self._arith.minsi(a, b)

    def compare(self, kind: str, a, b):
        """Whether `a` is "slt" (signed less than), "sle" (or equal), "sgt" or "eq" to `b`."""
        return self._arith.cmpi(getattr(self._arith.CmpIPredicate, kind), a, b)

    def both(self, a, b):
        """Whether both hold."""
        return self._arith.andi(a, b)

    def select(self, condition, a, b):
        """`a` where the condition holds."""
        return self._arith.select(condition, a, b)

    def load(self, ref, *index):
        """ref[index]."""
        utils, (space, address) = self._mgpu.utils, self._address(ref, index)
        return utils.inline_ptx(f"ld.{space}.b32 $0, [$1];", address, result_types=self.i32, has_side_effects=True)

    def store(self, ref, value, *index) -> None:
        """ref[index] = value."""
        space, address = self._address(ref, index)
        self._mgpu.utils.inline_ptx(f"st.{space}.b32 [$0], $1;", address, value, has_side_effects=True)

    def combine(self, kind: str, ref, value, index) -> None:
        """Atomically replaces ref[index] by its maximum ("max") or its sum ("add") with `value`."""
        space, address = self._address(ref, [index])
        self._mgpu.utils.inline_ptx(f"red.{space}.{kind}.s32 [$0], $1;", address, value, has_side_effects=True)

    def _address(self, ref, index):
        """The memory space of a reference, and the address of an element."""
        utils, (element, *inner) = self._mgpu.utils, index
        for i, size in zip(inner, self._type(ref.type).shape[1:], strict=True):
            element = self.add(self._arith.muli(element, self.constant(size)), i)
        space = "shared" if utils.is_smem_ref(ref) else "global"
        return space, utils.getelementptr(utils.memref_ptr(ref), [element], self.i32)

    def when(self, condition):
        """A context whose code runs only in threads where the condition holds."""
        return self._mgpu.utils.when(condition)

    def barrier(self) -> None:
        """Waits for all threads of the CTA."""
        self._mgpu.utils.inline_ptx("bar.sync 0;", has_side_effects=True, convergent=True)

    def search(self, table, count: int, bounds, slopes, *, equal: bool) -> list[Any]:
        """For each bound: for how many i of the first `count`, table[i] + slope * i is less than the bound.

        These values are sorted.  With `equal`, also counts values that equal the bound.  The table is in shared memory.
        One loop searches for all bounds, so that their loads overlap.  It is not unrolled, to keep the code short.
        """
        size = len(bounds)

        def each(text: str) -> str:
            """`text` once per search: `n` is its number, `b` and `s` are the operands of its bound and slope."""
            return " ".join(text.format(n=n, b=f"${size + 1 + n}", s=f"${2 * size + 1 + n}") for n in range(size))

        code = f"""{{
            .reg .pred p, again; .reg .b32 bit; {each(".reg .b32 found{n}, ahead{n}, last{n}, value{n};")}
            {each("mov.b32 found{n}, 0;")}
            mov.b32 bit, {1 << (count.bit_length() - 1)};
            step: .pragma "nounroll";
            {each(f"add.s32 ahead{{n}}, found{{n}}, bit; min.s32 last{{n}}, ahead{{n}}, {count};")}
            {each(f"add.s32 last{{n}}, last{{n}}, -1; mad.lo.s32 value{{n}}, last{{n}}, 4, ${size};")}
            {each("ld.shared.b32 value{n}, [value{n}];")}
            {
            each(f'''
                mad.lo.s32 value{{n}}, last{{n}}, {{s}}, value{{n}};
                setp.{"le" if equal else "lt"}.s32 p, value{{n}}, {{b}};
                setp.le.and.s32 p, ahead{{n}}, {count}, p;
                selp.b32 found{{n}}, ahead{{n}}, found{{n}}, p;
            ''')
        }
            shr.u32 bit, bit, 1;
            setp.ne.b32 again, bit, 0;
            @again bra step;
            {" ".join(f"mov.b32 ${n}, found{n};" for n in range(size))}
        }}"""
        counts = self._mgpu.utils.inline_ptx(
            " ".join(code.split()),
            self._address(table, [self.constant(0)])[1],
            *bounds,
            *slopes,
            result_types=[self.i32] * size,
            has_side_effects=True,
        )
        return list(counts)

    def running_sum(self, value):
        """The sum of the values of this and all lower lanes of the warp."""
        for distance in (1, 2, 4, 8, 16):
            ptx = (
                f"{{ .reg .pred p; .reg .b32 t; shfl.sync.up.b32 t|p, $1, {distance}, 0, -1; "
                "@!p mov.b32 t, 0; add.s32 $0, $1, t; }"
            )
            value = self._mgpu.utils.inline_ptx(
                ptx, value, result_types=self.i32, has_side_effects=True, convergent=True
            )
        return value

    def next_lane(self, value):
        """The value of the next lane of the warp."""
        ptx = "shfl.sync.down.b32 $0, $1, 1, 31, -1;"
        return self._mgpu.utils.inline_ptx(ptx, value, result_types=self.i32, has_side_effects=True, convergent=True)

    def warp_reduction(self, kind: str, value):
        """The minimum ("min"), maximum ("max") or sum ("add") of the values of the warp's lanes."""
        ptx = f"redux.sync.{kind}.s32 $0, $1, -1;"
        return self._mgpu.utils.inline_ptx(ptx, value, result_types=self.i32, has_side_effects=True, convergent=True)
