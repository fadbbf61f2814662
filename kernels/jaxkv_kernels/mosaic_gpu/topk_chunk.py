"""The operations of the search in a chunk of a row: logits, or the candidates that are left, in registers of a CTA.

Logits are int32 keys in the order of float32, with -0 as 0 and every NaN above all others.  EMPTY stands for -inf, and
for elements past the end of a row.  With T threads, register 4 v + c of thread t holds element 4 T v + 4 t + c of the
chunk: vectors of four, interleaved over threads.  To Pallas, each warpgroup has an array of its own.
`interpreter/topk.py` has the counterparts for the interpreter.
"""

from itertools import batched
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from jaxkv_kernels.mosaic_gpu.ptx.block_tables import element
from jaxkv_kernels.mosaic_gpu.ptx.fragments import array, elements, splat
from jaxkv_kernels.mosaic_gpu.ptx.inline import c32, i32, ptx
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR

WARPGROUPS, LANES, WARP, VECTOR = 4, 128, 32, 4
THREADS = WARPGROUPS * LANES
WARPS = THREADS // WARP
UNIT = THREADS * VECTOR
"""The number of elements of a chunk is a multiple of this."""
EMPTY, INFINITY, NAN = -0x7F800001, 0x7F800000, 0x7FFFFFFF
COUNTERS = 4 * WARPS
"""int32 words of shared memory: a count per warp, FOUND, EXTREMES."""
FOUND, EXTREMES = 4 * WARPS, 8 * WARPS
"""The bytes at which the result of a step of the search begins, and at which two numbers per warp begin."""
BINS = UNIT
"""int32 words of shared memory for a histogram: a vector per thread.  Another word is for keys outside its range."""
ALL = EMPTY + 1, 0x7FFFFFFF - (EMPTY + 1) - (1 << 32)
"""The range of all keys but EMPTY: the lowest, and the distance of the highest from it, which has no sign."""
LOAD = (
    "{{ .reg .pred p; setp.lt.s32 p, $5, {length}; mov.b32 $0, {rest}; mov.b32 $1, {rest}; mov.b32 $2, {rest}; "
    "mov.b32 $3, {rest}; @p ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}]; }}"
)
LOAD_ONE = "{{ .reg .pred p; setp.lt.s32 p, $2, {length}; mov.b32 $0, {rest}; @p ld.global.b32 $0, [$1 + {offset}]; }}"
ZERO = "{ .reg .b32 z; mov.b32 z, 0; st.shared.v4.b32 [$0], {z, z, z, z}; }"
LOAD_BINS = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
SHIFT = f"{{ .reg .b32 n; clz.b32 n, $1; sub.s32 n, {33 - BINS.bit_length()}, n; max.s32 $0, n, 0; }}"
"""The distance within a range of BINS bins or less, shifted by this, is a bin."""
IN_RANGE = (
    "{ .reg .b32 n; sub.s32 n, $4, $0; min.u32 n, n, $1; shr.u32 n, n, $2; mad.lo.u32 n, n, 4, $3; "
    "red.shared.add.u32 [n], 1; }"
)
"""Counts a key in its bin.  Operands: the lowest key of the range, the first distance from it that is outside, SHIFT,
the first bin, the key.

Keys outside the range are counted in the bin after the last.  That is faster than a branch around the count.
"""
EQUAL_IN_RANGE = (
    "{ .reg .pred p; .reg .b32 n; not.b32 n, $5; sub.s32 n, n, $0; setp.eq.s32 p, $4, $6; selp.b32 n, n, -1, p; "
    "min.u32 n, n, $1; shr.u32 n, n, $2; mad.lo.u32 n, n, 4, $3; red.shared.add.u32 [n], 1; }"
)
"""Counts the complement of the place of a key, if the key equals another one."""
STORE = (
    "{{ .reg .pred p; .reg .b{bits} a; mov.b{bits} a, $1; setp.ge.s32 p, $2, $3; @p st.{space}.b32 [a], $2; "
    "@p st.{space}.b32 [a + {half}], $4; @p add.s{bits} a, a, 4; mov.b{bits} $0, a; }}"
)
"""Stores a key and a place, if the key is $3 or more.  Result: the address of the next key."""
KEY = (
    "{ .reg .b32 s; .reg .f32 x; add.f32 x, $1, 0f00000000; mov.b32 $0, x; shr.s32 s, $0, 31; "
    "and.b32 s, s, 0x7FFFFFFF; xor.b32 $0, s, $0; }"
)
"""The key of a float32 value.  Adding 0 turns -0 into 0, and every NaN into that whose bits are NAN."""
NUMBER: Any = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=SCALAR)


def layout(size: int) -> Any:
    """The layout of a warpgroup's int32 arrays [size] in registers."""
    return plgpu.Layout.WG_STRIDED((size,), VECTOR)


def _array(size: int) -> Any:
    return plgpu.ShapeDtypeStruct((size,), jnp.dtype(jnp.int32), layout=layout(size))


def thread() -> Any:
    """The index of the calling thread within its CTA."""
    return mgpu.utils.thread_idx()


def wait_for_all() -> None:
    """Waits for all threads of the CTA."""
    ptx("bar.sync 0;", convergent=True)


def shared(ref) -> Any:
    """The address of shared memory as an integer."""
    return ptx("mov.b32 $0, $1;", mgpu.utils.memref_ptr(ref), result_types=i32())


OWN = "mov.u32 w, %tid.x; shr.u32 w, w, 5; mov.u32 l, %laneid; setp.eq.b32 p, l, {lane}; "
"""The index `w` of the warp, that of the lane, `l`, and whether it is `lane`."""


def of_others(address, comparison: str) -> Any:
    """The sums of the warps' words at `address`: of some warps, and of all.

    Leaves those out whose index compares with the own one as `comparison` of PTX says.
    """
    code = (
        f"{{ .reg .pred p; .reg .b32 n, w, l, a; mov.u32 l, %laneid; setp.lt.u32 p, l, {WARPS}; mov.b32 n, 0; "
        "mad.lo.s32 a, l, 4, $2; @p ld.shared.b32 n, [a]; redux.sync.add.s32 $1, n, -1; mov.u32 w, %tid.x; "
        f"shr.u32 w, w, 5; setp.{comparison}.u32 p, l, w; @p mov.b32 n, 0; redux.sync.add.s32 $0, n, -1; }}"
    )
    return ptx(code, address, result_types=[i32()] * 2, has_side_effects=True, convergent=True)


def count(keys: int) -> str:
    """PTX that counts how many of these keys are the first operand or more."""
    # In float32, which is exact here: float32 additions do not share a pipe with the comparisons.  Four sums make the
    # chain of additions shorter.
    code = "{ .reg .pred p; .reg .f32 n<4>; " + "".join(f"mov.f32 n{i}, 0f00000000; " for i in range(4))
    for i in range(keys):
        code += f"setp.ge.s32 p, ${i + 2}, $1; @p add.f32 n{i % 4}, n{i % 4}, 0f3F800000; "
    return code + "add.f32 n0, n0, n1; add.f32 n2, n2, n3; add.f32 n0, n0, n2; cvt.rzi.s32.f32 $0, n0; }"


def divided(extent) -> tuple[Any, Any, Any]:
    """How distances up to `extent` are divided into bins: SHIFT, the last bin, and the first distance after it."""
    shift = ptx(SHIFT, extent, result_types=i32())
    last = arith.shrui(extent, shift)
    return shift, last, arith.shli(arith.addi(last, c32(1)), shift)


def scanned(address, own, *, down: bool) -> Any:
    """The sum of a number per thread over the warp's lanes up to the own one, or with `down` from it on.

    The last of these sums, that over the warp, goes to the warp's word of shared memory at `address`.
    """
    way, end, last = ("down", WARP - 1, 0) if down else ("up", 0, WARP - 1)
    code = "{ .reg .pred p, q; .reg .b32 n, a, w, l, other; mov.b32 n, $2; "
    for step in (1, 2, 4, 8, 16):
        code += f"shfl.sync.{way}.b32 other|q, n, {step}, {end}, -1; @q add.s32 n, n, other; "
    code += OWN.format(lane=last) + "mad.lo.s32 a, w, 4, $1; @p st.shared.b32 [a], n; mov.b32 $0, n; }"
    return ptx(code, address, own, result_types=i32(), has_side_effects=True, convergent=True)


def _place(n: int, first) -> Any:
    """The place of the first element of the thread's vector n."""
    return arith.addi(arith.addi(first, c32(n * UNIT)), arith.muli(thread(), c32(VECTOR)))


def load_logits(ref, row, first, size: int) -> list[Any]:
    """Elements `first` to `first + size` of a row of float32 logits: keys, EMPTY past the end, and places."""

    def load(ref, row, first):
        logits = _load(ref, row, first, size, ref.type.shape[1], "0xFF800000")
        places = [arith.addi(_place(n // VECTOR, first), c32(n % VECTOR)) for n in range(len(logits))]
        return [ptx(KEY, x, result_types=i32()) for x in logits], places

    return _loaded(load, size, ref, row, first)


def load_kept(ref, row, first, size: int) -> list[Any]:
    """The same of a row that `collect` has stored."""

    def load(ref, row, first):
        length = ref.type.shape[1] // 2
        return [_load(ref, row, first, size, length, str(EMPTY), half) for half in range(2)]

    return _loaded(load, size, ref, row, first)


def load_candidates(ref) -> list[Any]:
    """What `collect` has stored to shared memory: keys and places."""
    size = ref.shape[0] // 2

    def load(ref):
        wait_for_all()
        start, halves = element(ref, (arith.muli(thread(), c32(VECTOR)),), size), []
        for first in (0, size):
            halves.append([])
            for n in range(first, first + size, UNIT):
                code = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {4 * n}];"
                halves[-1] += ptx(code, start, result_types=[i32()] * VECTOR, has_side_effects=True)
        return halves

    return _loaded(load, size, ref)


def _loaded(load, size: int, ref, *scalars) -> list[Any]:
    """The arrays of keys and places that `load` returns the elements of."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), [SCALAR] * len(scalars)), return_type=[_array(size // WARPGROUPS)] * 2
    )
    def run(_, ref, scalars):
        found = load(ref, *(x.registers.item() for x in scalars))
        return [array([*batched(words, VECTOR)], layout(size // WARPGROUPS)) for words in found]

    return run(ref, list(scalars))


def _load(ref, row, first, size: int, length: int, rest: str, half: int = 0) -> list[Any]:
    """Elements of the first `length` of a row, or with `half` of as many after these; `rest` past the end."""
    width, found = ref.type.shape[1], []
    options = {"length": length, "rest": rest, "offset": 4 * half * length}
    for n in range(size // UNIT):
        place = _place(n, first)
        if length % VECTOR == 0:
            address = element(ref, (row, place), width)
            found += ptx(LOAD.format(**options), address, place, result_types=[i32()] * VECTOR, has_side_effects=True)
            continue
        for c in range(VECTOR):
            own = arith.addi(place, c32(c))
            address = element(ref, (row, own), width)
            found.append(ptx(LOAD_ONE.format(**options), address, own, result_types=i32(), has_side_effects=True))
    return found


def clear(bins) -> None:
    """Sets all bins to 0."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_, bins):
        ptx(ZERO, _bins(bins), has_side_effects=True)
        wait_for_all()

    run(bins)


def narrow(counters, bins, keys, state) -> tuple[Any, ...]:
    """Narrows a range of keys in which the `wanted` largest are sought: to the bin that has the last of these.

    The `state` is the range, which is its lowest key and the distance to its highest, `wanted`, and how many keys
    the range has.  If that is less than `wanted`, finds the lowest bin.  Bins are 0 before and after.
    """
    own = layout(keys.size)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), own, [SCALAR] * 4), return_type=[NUMBER] * 4)
    def run(_, counters, bins, keys, state):
        return _narrow(counters, bins, IN_RANGE, [[key] for key in elements(keys)], state)

    return tuple(run(counters, bins, keys, list(state)))


def narrow_places(counters, bins, keys, places, key, state) -> tuple[Any, ...]:
    """The same for the complements of the places of keys that equal `key`."""
    own = layout(keys.size)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), own, own, SCALAR, [SCALAR] * 4), return_type=[NUMBER] * 4
    )
    def run(_, counters, bins, keys, places, key, state):
        key, pairs = key.registers.item(), zip(elements(keys), elements(places), strict=True)
        return _narrow(counters, bins, EQUAL_IN_RANGE, [[*pair, key] for pair in pairs], state)

    return tuple(run(counters, bins, keys, places, key, list(state)))


def _narrow(counters, bins, code: str, values, state) -> list[Any]:
    low, extent, wanted, _ = (x.registers.item() for x in state)
    base, first_bin, (shift, last, outside) = shared(counters), shared(bins), divided(extent)
    for value in values:
        ptx(code, low, outside, shift, first_bin, *value, has_side_effects=True)
    wait_for_all()
    address = _bins(bins)
    held = [*ptx(LOAD_BINS, address, result_types=[i32()] * VECTOR, has_side_effects=True)]
    ptx(ZERO, address, has_side_effects=True)
    first = arith.muli(thread(), c32(VECTOR))
    for n in range(VECTOR):
        inside = arith.cmpi(arith.CmpIPredicate.sle, arith.addi(first, c32(n)), last)
        held[n] = arith.select(inside, held[n], c32(0))
    own = arith.addi(arith.addi(held[0], held[1]), arith.addi(held[2], held[3]))
    from_own = scanned(base, own, down=True)
    wait_for_all()
    from_own = arith.addi(from_own, of_others(base, "le")[0])
    above = arith.subi(from_own, own)
    # The thread whose bins have the last key that is wanted, or else the first thread.
    enough = arith.cmpi(arith.CmpIPredicate.sge, from_own, wanted)
    enough = arith.ori(enough, arith.cmpi(arith.CmpIPredicate.eq, thread(), c32(0)))
    found = arith.andi(enough, arith.cmpi(arith.CmpIPredicate.slt, above, wanted))
    in_bin, bin_ = held[-1], c32(VECTOR - 1)
    for n in reversed(range(VECTOR - 1)):
        with_bin = arith.addi(above, in_bin)
        enough = arith.cmpi(arith.CmpIPredicate.sge, with_bin, wanted)
        above = arith.select(enough, above, with_bin)
        in_bin, bin_ = arith.select(enough, in_bin, held[n]), arith.select(enough, bin_, c32(n))
    low = arith.addi(low, arith.shli(arith.addi(first, bin_), shift))
    code = f"st.shared.v4.b32 [$0 + {FOUND}], {{$1, $2, $3, $3}};"
    ptx(code, base, low, arith.subi(wanted, above), in_bin, predicate=found)
    wait_for_all()
    code = f"{{ .reg .b32 n; ld.shared.v4.b32 {{$0, $1, $2, n}}, [$3 + {FOUND}]; }}"
    low, wanted, in_bin = ptx(code, base, result_types=[i32()] * 3, has_side_effects=True)
    extent = arith.subi(arith.shli(c32(1), shift), c32(1))
    return [splat(x) for x in (low, extent, wanted, in_bin)]


def _bins(bins) -> Any:
    """The address of the thread's bins."""
    return arith.addi(shared(bins), arith.muli(thread(), c32(4 * VECTOR)))


def extremes(counters, keys) -> Any:
    """The smallest key other than EMPTY, and the largest of a finite value.  Without such keys, they are arbitrary."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout(keys.size)), return_type=[NUMBER] * 2)
    def run(_, counters, keys):
        least = c32(EMPTY + 1)
        low, high = c32(-1), c32(EMPTY)
        for key in elements(keys):
            # EMPTY is one below `least`, and so the largest of these unsigned differences.
            low = arith.minui(low, arith.subi(key, least))
            finite = arith.cmpi(arith.CmpIPredicate.slt, key, c32(INFINITY))
            high = arith.maxsi(high, arith.select(finite, key, c32(EMPTY)))
        base = arith.addi(shared(counters), c32(EXTREMES))
        code = (
            "{ .reg .pred p; .reg .b32 n, m, a, w, l; redux.sync.min.u32 n, $1, -1; redux.sync.max.s32 m, $2, -1; "
            + OWN.format(lane=0)
            + "mad.lo.s32 a, w, 8, $0; @p st.shared.v2.b32 [a], {n, m}; }"
        )
        ptx(code, base, low, high, has_side_effects=True, convergent=True)
        wait_for_all()
        code = (
            f"{{ .reg .b32 n, m, l; mov.u32 l, %laneid; min.u32 l, l, {WARPS - 1}; mad.lo.s32 l, l, 8, $2; "
            "ld.shared.v2.b32 {n, m}, [l]; redux.sync.min.u32 $0, n, -1; redux.sync.max.s32 $1, m, -1; }"
        )
        low, high = ptx(code, base, result_types=[i32()] * 2, has_side_effects=True, convergent=True)
        return [splat(arith.addi(low, least)), splat(high)]

    return run(counters, keys)


def collect(counters, keys, places, least, ref, index, slots: int) -> None:
    """Stores the keys from `least` on, which is above EMPTY, with their places, in any order.

    There are at most `slots` of them.  Keys go to the first half of `ref`, places to the second: to part `index[1]`
    of row `index[0]`, or without `index` to shared memory.  The remaining slots become EMPTY.
    """
    own = layout(keys.size)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), own, own, SCALAR, plgpu.RefType(), [SCALAR] * len(index)))
    def run(_, counters, keys, places, least, ref, index):
        least, index = least.registers.item(), [i.registers.item() for i in index]
        keys, places = elements(keys), elements(places)
        own = ptx(count(len(keys)), least, *keys, result_types=i32())
        base = shared(counters)
        before = arith.subi(scanned(base, own, down=False), own)
        wait_for_all()
        earlier, chosen = of_others(base, "ge")
        slot, last = arith.addi(before, earlier), c32(slots)
        space, width = ("global" if index else "shared"), ir.MemRefType(ref.type).shape[-1]
        if index:
            row, part = index
            index, first = [row], arith.muli(part, c32(slots))
            slot, chosen, last = (arith.addi(first, x) for x in (slot, chosen, last))
        address = element(ref, (*index, slot), width)
        code = STORE.format(space=space, bits=address.type.width, half=2 * width)
        for key, place in zip(keys, places, strict=True):
            address = ptx(code, address, key, least, place, result_types=address.type, has_side_effects=True)
        for n in range(-(-slots // THREADS)):
            slot = arith.addi(chosen, arith.addi(thread(), c32(n * THREADS)))
            free = arith.cmpi(arith.CmpIPredicate.slt, slot, last)
            address = element(ref, (*index, slot), width)
            for offset, rest in ((0, EMPTY), (2 * width, 0)):
                ptx(f"st.{space}.b32 [$0 + {offset}], $1;", address, c32(rest), predicate=free)

    run(counters, keys, places, least, ref, list(index))
