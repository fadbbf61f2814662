"""Sorts the chosen keys of a row, largest first, equal keys by place.

A bitonic network.  Thread t has elements t * n to t * n + n - 1 in registers: short distances are between registers of
a thread, longer ones between lanes (shuffles), the longest between warps (shared memory).

It first sorts words of 32 bits: the leading bits of a key's distance from the smallest key, and the key's slot.  Then
it looks up keys and places, and exchanges neighbours that are in the wrong order.  If more than a few keys have equal
leading bits, that does not suffice, and it sorts pairs of 64 bits: keys and the complements of places.
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
    OTHERS,
    WARP,
    shared,
    thread,
    total,
    wait_for_all,
)

LANE_BITS = 5
# Two elements: the larger first, or the smaller first if the last operand is not 0.
EXCHANGE = {
    1: (
        "{ .reg .pred q; .reg .b32 x, y; max.u32 x, $2, $3; min.u32 y, $2, $3; setp.ne.b32 q, $4, 0; "
        "selp.b32 $0, y, x, q; selp.b32 $1, x, y, q; }"
    ),
    2: (
        "{ .reg .pred p, q; .reg .b64 a, b; .reg .b32 x<4>; mov.b64 a, {$5, $4}; mov.b64 b, {$7, $6}; "
        "setp.gt.s64 p, b, a; setp.ne.b32 q, $8, 0; xor.pred p, p, q; "
        "selp.b32 x0, $6, $4, p; selp.b32 x1, $7, $5, p; selp.b32 x2, $4, $6, p; selp.b32 x3, $5, $7, p; "
        "mov.b32 $0, x0; mov.b32 $1, x1; mov.b32 $2, x2; mov.b32 $3, x3; }"
    ),
}
# The larger of two elements; the smaller if the last operand is not 0.
TAKE = {
    1: (
        "{ .reg .pred q; .reg .b32 x, y; max.u32 x, $1, $2; min.u32 y, $1, $2; setp.ne.b32 q, $3, 0; "
        "selp.b32 $0, y, x, q; }"
    ),
    2: (
        "{ .reg .pred p, q; .reg .b64 a, b; .reg .b32 x; mov.b64 a, {$3, $2}; mov.b64 b, {$5, $4}; "
        "setp.gt.s64 p, b, a; setp.ne.b32 q, $6, 0; xor.pred p, p, q; "
        "selp.b32 x, $4, $2, p; selp.b32 $1, $5, $3, p; mov.b32 $0, x; }"
    ),
}
GREATER = (
    "{ .reg .pred p; .reg .b64 a, b; mov.b64 a, {$2, $1}; mov.b64 b, {$4, $3}; setp.gt.s64 p, a, b; "
    "selp.b32 $0, 1, 0, p; }"
)
"""Whether the first pair is the larger one."""
SHUFFLE = "shfl.sync.bfly.b32 $0, $1, $2, 31, -1;"
LOAD = "ld.shared.b32 $0, [$1 + {}];"


def layout(size: int) -> Any:
    """The layout of int32 arrays [size] in the sorting network."""
    return plgpu.Layout.WG_STRIDED((size,), 1)


def store_sorted(refs, counters, low, high, out_ref, row, k: int, tables: BlockTables | None, warpgroups: int) -> None:
    """Sorts keys and places in shared memory, and stores the places of the first `k` to a row; -1 for EMPTY.

    With `tables`, stores the slots of the places.

    `refs` are the keys, the places and memory for the words.  Their size is a power of two, at least the threads of the
    CTA.  Keys that are not EMPTY are from `low` to `high`.
    """
    network = Network(refs, warpgroups)
    words = network.sort(network.load_words(low, high))
    pairs = network.step(look_up, 2, words, (), refs[:2])
    wrong = network.count_wrong(pairs, counters)
    pairs = lax.cond(wrong > 0, lambda: network.sort(network.load()), lambda: pairs)

    table_refs = [] if tables is None else [tables.array]

    @plgpu.inline_mgpu(arg_types=([network.layout] * 2, plgpu.RefType(), [plgpu.RefType()] * len(table_refs), SCALAR))
    def run(_, arrays, ref, table_refs, row):
        own = None if tables is None else tables._replace(array=table_refs[0])
        store(arrays, ref, row.registers.item(), k, own)

    run(list(pairs), out_ref, table_refs, row)


class Network:
    """Sorts arrays in the registers of a CTA: one of unsigned numbers, or two of keys and complemented places."""

    def __init__(self, refs, warpgroups: int):
        self._refs = refs
        self._threads = warpgroups * LANES
        self.size = refs[0].shape[0]
        self._own_bits = (self.size // self._threads).bit_length() - 1
        self._of_warpgroup = self.size // warpgroups
        self.layout = layout(self._of_warpgroup)

    def step(self, own: Callable[..., Any], results: int, arrays, scalars=(), refs=()) -> tuple[Any, ...]:
        """What each thread does in `own`, which returns `results` arrays."""
        shape = plgpu.ShapeDtypeStruct((self._of_warpgroup,), jnp.dtype(jnp.int32), layout=self.layout)

        @plgpu.inline_mgpu(
            arg_types=([self.layout] * len(arrays), [SCALAR] * len(scalars), [plgpu.RefType()] * len(refs)),
            return_type=[shape] * results,
        )
        def run(_, arrays, scalars, refs):
            return own(arrays, refs, *(x.registers.item() for x in scalars))

        return tuple(run(list(arrays), list(scalars), list(refs)))

    def load(self) -> tuple[Any, ...]:
        """Keys and complements of places."""
        return self.step(self._load, 2, (), (), self._refs[:2])

    def load_words(self, low, high) -> tuple[Any, ...]:
        """A word per key."""
        return self.step(self._load_words, 1, (), (low, high), self._refs[:1])

    def count_wrong(self, pairs, counters):
        """The number of pairs of neighbours that are in the wrong order."""

        @plgpu.inline_mgpu(
            arg_types=([self.layout] * 2, plgpu.RefType()),
            return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=SCALAR),
        )
        def run(_, arrays, counters):
            return count_wrong(arrays, counters, self._threads)

        return run(list(pairs), counters)

    def sort(self, arrays) -> tuple[Any, ...]:
        """The arrays, sorted, largest first."""
        arrays = self.step(within_thread, len(arrays), arrays)
        return lax.fori_loop(self._own_bits + 1, self.size.bit_length(), self._merge, arrays)

    def _merge(self, stage, arrays):
        """Makes sorted runs of 2**stage elements."""
        stage = stage - self._own_bits
        warp_steps = jnp.maximum(stage - LANE_BITS, 0)

        def by_warps(i, arrays):
            refs = self._refs[2:] if len(arrays) == 1 else self._refs[:2]
            return self.step(self._between_warps, len(arrays), arrays, (stage, stage - 1 - i), refs)

        def by_lanes(i, arrays):
            return self.step(between_lanes, len(arrays), arrays, (stage, stage - warp_steps - 1 - i))

        arrays = lax.fori_loop(0, warp_steps, by_warps, arrays)
        arrays = lax.fori_loop(0, stage - warp_steps, by_lanes, arrays)
        return self.step(between_registers, len(arrays), arrays, (stage,))

    def _load(self, _, refs) -> Any:
        """Loads keys and complements of places.  The order does not matter yet: a warp loads consecutive elements."""
        keys, places = (self._load_all(ref, thread()) for ref in refs)
        wait_for_all()
        return _arrays([(key, arith.xori(place, c32(-1))) for key, place in zip(keys, places, strict=True)])

    def _load_words(self, _, refs, low, high) -> Any:
        """The leading bits of every key's distance from `low`, plus 1, and in the low bits its slot; 0 for EMPTY."""
        size = refs[0].type.shape[0]
        bits = size.bit_length() - 1
        code = (
            "{ .reg .pred p; .reg .b32 n, m; sub.s32 n, $2, $1; clz.b32 m, n; "
            f"sub.s32 m, {bits}, m; max.s32 m, m, 0; shr.u32 n, n, m; add.s32 n, n, 1; shr.u32 n, n, {32 - bits}; "
            "add.s32 $0, m, n; }"
        )
        shift = ptx(code, low, high, result_types=i32())
        found = []
        for n, key in enumerate(self._load_all(refs[0], thread())):
            prefix = arith.addi(arith.shrui(arith.subi(key, low), shift), c32(1))
            prefix = arith.select(arith.cmpi(arith.CmpIPredicate.eq, key, c32(EMPTY)), c32(0), prefix)
            slot = arith.addi(thread(), c32(n * self._threads))
            found.append((arith.ori(arith.shli(prefix, c32(bits)), slot),))
        return _arrays(found)

    def _between_warps(self, arrays, refs, stage, distance) -> Any:
        """Exchanges with the thread whose index differs in bit `distance`, through shared memory."""
        smaller = arith.xori(_bit(thread(), stage), _bit(thread(), distance))
        partner = arith.xori(thread(), arith.shli(c32(1), distance))
        elements = _elements(arrays)
        for ref, values in zip(refs, zip(*elements, strict=True), strict=True):
            start = element(ref, (thread(),), ref.type.shape[0])
            for n, x in enumerate(values):
                ptx(f"st.shared.b32 [$0 + {4 * self._threads * n}], $1;", start, x, has_side_effects=True)
        wait_for_all()
        others = zip(*(self._load_all(ref, partner) for ref in refs), strict=True)
        found = [_taken(own, other, smaller) for own, other in zip(elements, others, strict=True)]
        wait_for_all()
        return _arrays(found)

    def _load_all(self, ref, first) -> list[Any]:
        """Every T-th element of shared memory from `first` on, with T threads."""
        size = ref.type.shape[0]
        start = element(ref, (first,), size)
        return [
            ptx(LOAD.format(4 * self._threads * n), start, result_types=i32(), has_side_effects=True)
            for n in range(size // self._threads)
        ]


# What each thread does in the steps of the network.


def look_up(arrays, refs) -> Any:
    """The keys and complements of places of sorted words, with neighbours that are in the wrong order exchanged."""
    size = refs[0].type.shape[0]
    pairs: list[Any] = []
    for (word,) in _elements(arrays):
        slot = arith.andi(word, c32(size - 1))
        key, place = (
            ptx(LOAD.format(0), element(ref, (slot,), size), result_types=i32(), has_side_effects=True) for ref in refs
        )
        pairs.append((key, arith.xori(place, c32(-1))))
    for first in (0, 1, 0):
        for low in range(first, len(pairs) - 1, 2):
            four = ptx(EXCHANGE[2], *pairs[low], *pairs[low + 1], c32(0), result_types=[i32()] * 4)
            pairs[low], pairs[low + 1] = four[:2], four[2:]
        if first:
            _exchange_with_neighbours(pairs)
    return _arrays(pairs)


def _exchange_with_neighbours(pairs) -> None:
    """Exchanges the last element of a lane and the first of the next if they are in the wrong order."""
    following = [_shuffle("down", x, rest) for x, rest in zip(pairs[0], (-(2**31), 0), strict=True)]
    before = [_shuffle("up", x, rest) for x, rest in zip(pairs[-1], (2**31 - 1, -1), strict=True)]
    if len(pairs) == 1:
        return
    pairs[-1] = ptx(TAKE[2], *pairs[-1], *following, c32(0), result_types=[i32()] * 2)
    pairs[0] = ptx(TAKE[2], *pairs[0], *before, c32(1), result_types=[i32()] * 2)


def _shuffle(way: str, x, rest: int) -> Any:
    """The next (`down`) or previous (`up`) lane's value; `rest` if there is none."""
    end = 31 if way == "down" else 0
    code = f"{{ .reg .pred p; .reg .b32 n; shfl.sync.{way}.b32 n|p, $1, 1, {end}, -1; selp.b32 $0, n, {rest}, p; }}"
    return ptx(code, x, result_types=i32(), has_side_effects=True, convergent=True)


def count_wrong(arrays, counters, threads: int) -> Any:
    """The number of pairs of neighbours that are in the wrong order."""
    pairs = _elements(arrays)
    warps = threads // WARP
    base = arith.addi(shared(counters), c32(OTHERS))
    code = (
        "{ .reg .pred p; .reg .b32 a, w; mov.u32 w, %tid.x; shr.u32 w, w, 5; mad.lo.s32 a, w, 8, $0; "
        "mov.u32 w, %laneid; setp.eq.b32 p, w, 0; @p st.shared.v2.b32 [a], {$1, $2}; }"
    )
    ptx(code, base, *pairs[0], has_side_effects=True)
    wait_for_all()
    # The last lane compares with the next warp's first element, the last of all with nothing.
    code = (
        f"{{ .reg .pred p, q; .reg .b32 a, w, n, m; mov.u32 w, %tid.x; setp.eq.b32 q, w, {threads - 1}; "
        f"shr.u32 w, w, 5; add.s32 w, w, 1; and.b32 w, w, {warps - 1}; mad.lo.s32 a, w, 8, $2; "
        "ld.shared.v2.b32 {n, m}, [a]; "
        "mov.u32 w, %laneid; setp.eq.b32 p, w, 31; selp.b32 n, n, $3, p; selp.b32 m, m, $4, p; "
        "selp.b32 $0, 0x80000000, n, q; selp.b32 $1, 0, m, q; }"
    )
    inside = [_shuffle("down", x, 0) for x in pairs[0]]
    following = ptx(code, base, *inside, result_types=[i32()] * 2, has_side_effects=True)
    wrong = c32(0)
    for own, after in zip(pairs, [*pairs[1:], following], strict=True):
        wrong = arith.addi(wrong, ptx(GREATER, *after, *own, result_types=i32()))
    return splat(total(counters, wrong, warps))


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


def store(arrays, ref, row, k: int, tables: BlockTables | None) -> None:
    """Stores the places of the first k elements, or their slots."""
    pairs = _elements(arrays)
    first = arith.muli(thread(), c32(len(pairs)))
    start = element(ref, (row, first), k)
    for n, (key, place) in enumerate(pairs):
        empty = arith.cmpi(arith.CmpIPredicate.eq, key, c32(EMPTY))
        place = arith.select(empty, c32(-1), arith.xori(place, c32(-1)))
        if tables is not None:
            place = slot_of(tables, row, place)
        inside = arith.cmpi(arith.CmpIPredicate.slt, arith.addi(first, c32(n)), c32(k))
        ptx(f"st.global.b32 [$0 + {4 * n}], $1;", start, place, predicate=inside)


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
            width = len(elements[low])
            code = EXCHANGE[width]
            found = ptx(code, *elements[low], *elements[high], smaller, result_types=[i32()] * (2 * width))
            elements[low], elements[high] = found[:width], found[width:]


def _taken(own, other, smaller) -> Any:
    width = len(own)
    return ptx(TAKE[width], *own, *other, smaller, result_types=[i32()] * width)


def _bit(x, n) -> Any:
    return arith.andi(arith.shrui(x, n), c32(1))


def _elements(arrays) -> list[Any]:
    """The words of each element, one per array."""
    return [*zip(*(elements(x) for x in arrays), strict=True)]


def _arrays(rows) -> list[Any]:
    columns = [*zip(*rows, strict=True)]
    return [array([[word] for word in column], layout(len(column) * LANES)) for column in columns]
