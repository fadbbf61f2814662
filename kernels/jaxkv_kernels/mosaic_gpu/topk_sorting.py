"""Sorts the chosen keys of a row, largest first, equal keys by place.

A counting sort: a histogram of the range of the chosen keys gives the position at which each bin begins, the keys are
grouped by bins in shared memory, and each key is compared with those of its bin.

Where more keys than CROWDED share a bin, for example equal keys, a bitonic network sorts pairs of 64 bits instead: keys
and the complements of places.  Thread t has elements t * n to t * n + n - 1 in registers: short distances are between
registers of a thread, longer ones between lanes (shuffles), the longest between warps (shared memory).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.mosaic_gpu.ptx.block_tables import BlockTables, element, slot_of
from jaxkv_kernels.mosaic_gpu.ptx.fragments import array, elements, splat
from jaxkv_kernels.mosaic_gpu.ptx.inline import c32, i32, ptx
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR
from jaxkv_kernels.mosaic_gpu.topk_chunk import (
    EMPTY,
    LANES,
    LOAD_BINS,
    NUMBER,
    THREADS,
    VECTOR,
    WARPGROUPS,
    divided,
    of_others,
    scanned,
    shared,
    thread,
    wait_for_all,
)

LANE_BITS = 5
CROWDED = 64
"""So many comparisons per key take about half the time of the network."""
VALUE = "{ .reg .b32 s; shr.s32 s, $1, 31; and.b32 s, s, 0x7FFFFFFF; xor.b32 $0, s, $1; }"
"""The bits of the float32 value of a key."""
OFFSET = (
    "{ .reg .f32 x, y; mov.b32 x, $1; mov.b32 y, $2; sub.rn.f32 x, x, y; mul.rn.f32 x, x, 0f3B800000; mov.b32 $0, x; }"
)
"""2**-8 times the difference of two values."""
DISTANCE = (
    "{ .reg .f32 x, y; mov.b32 x, $1; mov.b32 y, $3; min.f32 x, x, y; mov.b32 y, $2; sub.rn.f32 x, x, y; "
    "mov.b32 y, $4; add.rn.f32 x, x, y; mov.b32 $0, x; }"
)
"""The bits of the distance of a value from the lowest one, plus an offset.  They are in the order of the values.

Operands: the value, the lowest and the highest one, the offset.  NaN, and values above the highest, count as that.
"""
IN_BIN = (
    "{ .reg .pred p; .reg .b32 n; setp.eq.s32 p, $2, %EMPTY; sub.s32 n, $4, $3; selp.b32 n, -1, n, p; "
    "min.u32 n, n, $5; shr.u32 n, n, $6; mad.lo.u32 $0, n, 4, $7; atom.shared.add.u32 $1, [$0], 1; }"
).replace("%EMPTY", str(EMPTY))
"""Counts a key in its bin; bin 0 has the largest keys.  Results: the address of the bin, and the count before.

Operands: the key, its DISTANCE, that of the highest key, the first distance after the range, SHIFT, the first
bin.  EMPTY is in the
bin after the last.
"""
LARGER_IN_BIN = (
    "{ .reg .pred p; .reg .b32 a, n, m, c; .reg .b64 x, y; mov.b64 x, {$2, $1}; mov.b32 a, $3; mov.b32 c, 0; "
    "LOOP: ld.shared.v2.b32 {n, m}, [a]; mov.b64 y, {n, m}; setp.gt.s64 p, y, x; @p add.s32 c, c, 1; "
    "add.s32 a, a, 8; setp.lt.u32 p, a, $4; @p bra LOOP; mov.b32 $0, c; }"
)
"""How many pairs of shared memory, from address $3 to $4, are larger than a key and the complement of its place."""
EXCHANGE = (
    "{ .reg .pred p, q; .reg .b64 a, b; .reg .b32 x<4>; mov.b64 a, {$5, $4}; mov.b64 b, {$7, $6}; "
    "setp.gt.s64 p, b, a; setp.ne.b32 q, $8, 0; xor.pred p, p, q; "
    "selp.b32 x0, $6, $4, p; selp.b32 x1, $7, $5, p; selp.b32 x2, $4, $6, p; selp.b32 x3, $5, $7, p; "
    "mov.b32 $0, x0; mov.b32 $1, x1; mov.b32 $2, x2; mov.b32 $3, x3; }"
)
"""Two pairs: the larger first, or the smaller first if the last operand is not 0."""
TAKE = (
    "{ .reg .pred p, q; .reg .b64 a, b; .reg .b32 x; mov.b64 a, {$3, $2}; mov.b64 b, {$5, $4}; "
    "setp.gt.s64 p, b, a; setp.ne.b32 q, $6, 0; xor.pred p, p, q; "
    "selp.b32 x, $4, $2, p; selp.b32 $1, $5, $3, p; mov.b32 $0, x; }"
)
"""The larger of two pairs; the smaller if the last operand is not 0."""
SHUFFLE = "shfl.sync.bfly.b32 $0, $1, $2, 31, -1;"
LOAD = "ld.shared.b32 $0, [$1 + {}];"


def layout(size: int) -> Any:
    """The layout of int32 arrays [size] in the sorting network."""
    return plgpu.Layout.WG_STRIDED((size,), 1)


def store_sorted(refs, counters, bins, low, high, out_ref, row, k: int, tables: BlockTables | None) -> None:
    """Sorts keys and places in shared memory, and stores the places of the first `k` to a row; -1 for EMPTY.

    With `tables`, stores the slots of the places.

    `refs` are the keys and places, which are halves of an array, and memory for as many pairs of these.  The number of
    keys is a power of two, at least the threads of the CTA.  Keys that are not EMPTY are from `low` to `high`, or those
    of infinity and NaN, and are before all others.  `bins` are 0.
    """
    sort = Sort(refs[0])
    *elements, crowded = sort.count(counters, bins, low, high)
    table_refs = [] if tables is None else [tables.array]

    def store_all(how, arrays, refs=()):
        """Stores what `how` finds: pairs and their positions."""

        @plgpu.inline_mgpu(
            arg_types=(
                [sort.layout] * len(arrays),
                [plgpu.RefType()] * len(refs),
                plgpu.RefType(),
                [plgpu.RefType()] * len(table_refs),
                SCALAR,
            )
        )
        def run(_, arrays, refs, ref, table_refs, row):
            own = None if tables is None else tables._replace(array=table_refs[0])
            store(how(arrays, refs), ref, row.registers.item(), k, own)

        run(list(arrays), list(refs), out_ref, table_refs, row)

    lax.cond(
        crowded > 0,
        lambda: store_all(in_order, sort.network(sort.load())),
        lambda: store_all(sort.ranked, elements, refs),
    )


class Sort:
    """Sorts the keys and places of a CTA: by `count` and `ranked`, or by a network."""

    def __init__(self, ref):
        self._ref = ref
        self.size = ref.shape[0] // 2
        self._own_bits = (self.size // THREADS).bit_length() - 1
        self._of_warpgroup = self.size // WARPGROUPS
        self.layout = layout(self._of_warpgroup)

    def step(self, own: Callable[..., Any], arrays, scalars=(), refs=()) -> tuple[Any, ...]:
        """What each thread does in `own`, which returns two arrays."""
        shape = plgpu.ShapeDtypeStruct((self._of_warpgroup,), jnp.dtype(jnp.int32), layout=self.layout)

        @plgpu.inline_mgpu(
            arg_types=([self.layout] * len(arrays), [SCALAR] * len(scalars), [plgpu.RefType()] * len(refs)),
            return_type=[shape] * 2,
        )
        def run(_, arrays, scalars, refs):
            return own(arrays, refs, *(x.registers.item() for x in scalars))

        return tuple(run(list(arrays), list(scalars), list(refs)))

    def load(self) -> tuple[Any, ...]:
        """Keys and complements of places."""
        return self.step(self._load, (), (), [self._ref])

    def count(self, counters, bins, low, high) -> list[Any]:
        """Counts keys in `bins`, which then become the positions at which the bins begin.

        Returns keys, places, the addresses of the keys' bins, how many keys of the bin were counted before; and 1 if a
        bin is crowded, or else 0.
        """
        shape = plgpu.ShapeDtypeStruct((self._of_warpgroup,), jnp.dtype(jnp.int32), layout=self.layout)

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR),
            return_type=[shape] * 4 + [NUMBER],
        )
        def run(_, ref, counters, bins, low, high):
            low, high = low.registers.item(), high.registers.item()
            keys, places = zip(*self._load_all(ref, thread()), strict=True)
            base, first_bin = shared(counters), shared(bins)
            # Bins have a relative width, of the distance from the lowest value: most values are near it.  The offset
            # bounds the number of powers of two.
            low, high, *values = (ptx(VALUE, key, result_types=i32()) for key in (low, high, *keys))
            offset = ptx(OFFSET, high, low, result_types=i32())
            low, high, *distances = (
                ptx(DISTANCE, value, low, high, offset, result_types=i32()) for value in (low, high, *values)
            )
            shift, last, outside = divided(arith.subi(high, low))
            counted = []
            for key, distance in zip(keys, distances, strict=True):
                operands = key, distance, high, outside, shift, first_bin
                counted.append(ptx(IN_BIN, *operands, result_types=[i32()] * 2, has_side_effects=True))
            wait_for_all()
            first = arith.muli(thread(), c32(VECTOR))
            address = arith.addi(first_bin, arith.muli(first, c32(4)))
            held = ptx(LOAD_BINS, address, result_types=[i32()] * VECTOR, has_side_effects=True)
            crowded: Any = c32(0)
            for n, own in enumerate(held):
                inside = arith.cmpi(arith.CmpIPredicate.sle, arith.addi(first, c32(n)), last)
                crowded = arith.maxsi(crowded, arith.select(inside, own, c32(0)))
            own = arith.addi(arith.addi(held[0], held[1]), arith.addi(held[2], held[3]))
            start = arith.subi(scanned(base, own, down=False), own)
            code = f"{{ .reg .pred p; setp.gt.s32 p, $1, {CROWDED}; bar.red.or.pred p, 0, p; selp.b32 $0, 1, 0, p; }}"
            crowded = ptx(code, crowded, result_types=i32(), has_side_effects=True, convergent=True)
            start = arith.addi(start, of_others(base, "ge")[0])
            starts = [start]
            for number in held:
                starts.append(arith.addi(starts[-1], number))
            ptx("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", address, *starts[:VECTOR], has_side_effects=True)
            last_thread = arith.cmpi(arith.CmpIPredicate.eq, thread(), c32(THREADS - 1))
            ptx(f"st.shared.b32 [$0 + {4 * VECTOR}], $1;", address, starts[VECTOR], predicate=last_thread)
            wait_for_all()
            pairs = zip(keys, places, counted, strict=True)
            return [*_arrays([(key, place, *others) for key, place, others in pairs]), splat(crowded)]

        return run(self._ref, counters, bins, low, high)

    def ranked(self, arrays, refs) -> Any:
        """The pairs of `count`, sorted, and their positions.  Thread t has every T-th pair from t on."""
        ref, grouped = refs
        first, found = shared(grouped), []
        for n, (key, place, bin_, before) in enumerate(_elements(arrays)):
            full = arith.cmpi(arith.CmpIPredicate.ne, key, c32(EMPTY))
            start, end = (ptx(LOAD.format(4 * n), bin_, result_types=i32(), has_side_effects=True) for n in range(2))
            found.append((key, arith.xori(place, c32(-1)), start, arith.select(full, end, start)))
            address = arith.addi(first, arith.muli(arith.addi(start, before), c32(8)))
            ptx("st.shared.v2.b32 [$0], {$1, $2};", address, found[-1][1], key, predicate=full)
        wait_for_all()
        for n, (key, place, start, end) in enumerate(found):
            addresses = (arith.addi(first, arith.muli(x, c32(8))) for x in (start, end))
            larger = ptx(LARGER_IN_BIN, key, place, *addresses, result_types=i32(), has_side_effects=True)
            empty = arith.cmpi(arith.CmpIPredicate.eq, key, c32(EMPTY))
            own = arith.addi(thread(), c32(n * THREADS))
            rank = arith.select(empty, own, arith.addi(start, larger))
            self._store_pair(element(ref, (rank,), self.size), 0, key, place)
        wait_for_all()
        pairs = self._load_all(ref, thread())
        return [(arith.addi(thread(), c32(n * THREADS)), *pair) for n, pair in enumerate(pairs)]

    def network(self, arrays) -> tuple[Any, ...]:
        """Keys and complements of places, sorted, largest first."""
        arrays = self.step(within_thread, arrays)
        return lax.fori_loop(self._own_bits + 1, self.size.bit_length(), self._merge, arrays)

    def _merge(self, stage, arrays):
        """Makes sorted runs of 2**stage elements."""
        stage = stage - self._own_bits
        warp_steps = jnp.maximum(stage - LANE_BITS, 0)

        def by_warps(i, arrays):
            return self.step(self._between_warps, arrays, (stage, stage - 1 - i), [self._ref])

        def by_lanes(i, arrays):
            return self.step(between_lanes, arrays, (stage, stage - warp_steps - 1 - i))

        arrays = lax.fori_loop(0, warp_steps, by_warps, arrays)
        arrays = lax.fori_loop(0, stage - warp_steps, by_lanes, arrays)
        return self.step(between_registers, arrays, (stage,))

    def _load(self, _, refs) -> Any:
        """Loads keys and complements of places.  The order does not matter yet: a warp loads consecutive elements."""
        return _arrays([(key, arith.xori(place, c32(-1))) for key, place in self._load_all(refs[0], thread())])

    def _between_warps(self, arrays, refs, stage, distance) -> Any:
        """Exchanges with the thread whose index differs in bit `distance`, through shared memory."""
        smaller = arith.xori(_bit(thread(), stage), _bit(thread(), distance))
        partner = arith.xori(thread(), arith.shli(c32(1), distance))
        elements, start = _elements(arrays), element(refs[0], (thread(),), self.size)
        for n, pair in enumerate(elements):
            self._store_pair(start, n * THREADS, *pair)
        wait_for_all()
        others = self._load_all(refs[0], partner)
        found = [_taken(own, other, smaller) for own, other in zip(elements, others, strict=True)]
        wait_for_all()
        return _arrays(found)

    def _store_pair(self, address, offset: int, key, place) -> None:
        """Stores a pair to the halves of shared memory, `offset` elements after the address of a key."""
        for x, half in ((key, 0), (place, self.size)):
            ptx(f"st.shared.b32 [$0 + {4 * (offset + half)}], $1;", address, x, has_side_effects=True)

    def _load_all(self, ref, first) -> list[Any]:
        """Every T-th pair of shared memory from `first` on, with T threads."""
        start = element(ref, (first,), self.size)
        return [
            [
                ptx(LOAD.format(4 * (n + half)), start, result_types=i32(), has_side_effects=True)
                for half in (0, self.size)
            ]
            for n in range(0, self.size, THREADS)
        ]


# What each thread does in the steps of the network.


def within_thread(arrays, _) -> Any:
    """All stages of the network within a thread's elements, the last of them in the thread's direction."""
    elements = _elements(arrays)
    bits = len(elements).bit_length() - 1
    for stage in range(1, bits + 1):
        _registers(elements, stage, bits, _bit(thread(), c32(0)))
    return _arrays(elements)


def between_registers(arrays, _, stage) -> Any:
    """The exchanges of a stage within a thread.  Bit `stage` of the thread's index gives the direction."""
    elements = _elements(arrays)
    bits = len(elements).bit_length() - 1
    _registers(elements, bits + 1, bits, _bit(thread(), stage))
    return _arrays(elements)


def between_lanes(arrays, _, stage, distance) -> Any:
    """Exchanges with the lane whose index differs in bit `distance`."""
    smaller = arith.xori(_bit(thread(), stage), _bit(thread(), distance))
    mask = arith.shli(c32(1), distance)
    found = []
    for own in _elements(arrays):
        other = [ptx(SHUFFLE, x, mask, result_types=i32(), has_side_effects=True, convergent=True) for x in own]
        found.append(_taken(own, other, smaller))
    return _arrays(found)


def in_order(arrays, _) -> Any:
    """The pairs that the network has sorted, and their positions."""
    pairs = _elements(arrays)
    first = arith.muli(thread(), c32(len(pairs)))
    return [(arith.addi(first, c32(n)), *pair) for n, pair in enumerate(pairs)]


def store(found, ref, row, k: int, tables: BlockTables | None) -> None:
    """Stores the places of the first k pairs, or their slots, at the positions of the pairs."""
    for position, key, place in found:
        empty = arith.cmpi(arith.CmpIPredicate.eq, key, c32(EMPTY))
        place = arith.select(empty, c32(-1), arith.xori(place, c32(-1)))
        if tables is not None:
            place = slot_of(tables, row, place)
        inside = arith.cmpi(arith.CmpIPredicate.slt, position, c32(k))
        ptx("st.global.b32 [$0], $1;", element(ref, (row, position), k), place, predicate=inside)


def _registers(elements: list[Any], stage: int, bits: int, direction) -> None:
    """The exchanges of a stage over distances below 2**bits.

    Stages below `bits` alternate the direction.  In other stages, smaller elements come first if `direction` is not 0.
    """
    for distance in reversed(range(min(stage, bits))):
        for low in range(len(elements)):
            high = low | 1 << distance
            if high == low:
                continue
            smaller = direction if stage >= bits else c32(low >> stage & 1)
            found = ptx(EXCHANGE, *elements[low], *elements[high], smaller, result_types=[i32()] * 4)
            elements[low], elements[high] = found[:2], found[2:]


def _taken(own, other, smaller) -> Any:
    return ptx(TAKE, *own, *other, smaller, result_types=[i32()] * 2)


def _bit(x, n) -> Any:
    return arith.andi(arith.shrui(x, n), c32(1))


def _elements(arrays) -> list[Any]:
    """The words of each element, one per array."""
    return [*zip(*(elements(x) for x in arrays), strict=True)]


def _arrays(rows) -> list[Any]:
    columns = [*zip(*rows, strict=True)]
    return [array([[word] for word in column], layout(len(column) * LANES)) for column in columns]
