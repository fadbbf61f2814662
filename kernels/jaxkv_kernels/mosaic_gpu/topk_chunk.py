"""A chunk of a row of logits in the registers of a CTA, and the operations of the search in it.

Logits are int32 keys in the order of float32, with -0 as 0 and every NaN above all others.  EMPTY stands for -inf, and
for elements past the end of a row.  Of T threads, register 4 v + c of thread t has element 4 T v + 4 t + c of the
chunk.  To Pallas, each warpgroup has an array of its own.  `interpreter/topk.py` has the counterparts for the
interpreter.
"""

from dataclasses import dataclass
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

LANES, WARP, VECTOR = 128, 32, 4
EMPTY, NAN = -0x7F800001, 0x7FC00000
MOST_WARPS = 16
COUNTERS = 4 * MOST_WARPS
"""int32 words of shared memory that the threads count with: two per warp for counts, and two for other numbers."""
OTHERS = 8 * MOST_WARPS
"""The byte at which those other numbers begin."""
LOAD = (
    "{{ .reg .pred p; setp.lt.s32 p, $5, {length}; mov.b32 $0, {rest}; mov.b32 $1, {rest}; mov.b32 $2, {rest}; "
    "mov.b32 $3, {rest}; @p ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4]; }}"
)
LOAD_ONE = "{{ .reg .pred p; setp.lt.s32 p, $2, {length}; mov.b32 $0, {rest}; @p ld.global.b32 $0, [$1]; }}"
KEY = (
    "{{ .reg .pred p; .reg .b32 s; .reg .f32 x; add.f32 x, $1, 0f00000000; setp.nan.f32 p, x, x; mov.b32 s, x; "
    "shr.s32 s, s, 31; and.b32 s, s, 0x7FFFFFFF; xor.b32 s, s, x; selp.b32 $0, {nan}, s, p; }}"
)
"""The key of a float32 value.  Adding 0 turns -0 into 0."""
_NUMBER: Any = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=SCALAR)


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


def total(counters, step, own, warps: int) -> Any:
    """The sum over the CTA of a number per thread."""
    base = shared(counters)
    parity = f"and.b32 a, {{}}, 1; mad.lo.s32 a, a, {4 * MOST_WARPS}, {{}}; "
    code = "{ .reg .pred p; .reg .b32 n, a, w, l; redux.sync.add.s32 n, $1, -1; " + parity.format("$2", "$0")
    code += OWN.format(lane=0) + "mad.lo.s32 a, w, 4, a; @p st.shared.b32 [a], n; }"
    ptx(code, base, own, step, has_side_effects=True, convergent=True)
    wait_for_all()
    code = "{ .reg .pred p; .reg .b32 n, a, l; " + parity.format("$2", "$1") + of_warps("n", "a", warps)
    code += "redux.sync.add.s32 $0, n, -1; }"
    return ptx(code, base, step, result_types=i32(), has_side_effects=True, convergent=True)


def of_warps(into: str, address: str, warps: int) -> str:
    """Loads the number of warp n to lane n; 0 in lanes that are no warp's.  Uses the registers `p` and `l`."""
    return (
        f"mov.u32 l, %laneid; setp.lt.u32 p, l, {warps}; mov.b32 {into}, 0; mad.lo.s32 l, l, 4, {address}; "
        f"@p ld.shared.b32 {into}, [l]; "
    )


def added(flags: list[Any]) -> Any:
    """How many of these predicates hold.  Four independent sums make the chain of additions shorter."""
    sums = [c32(0)] * 4
    for n, flag in enumerate(flags):
        sums[n % 4] = arith.addi(sums[n % 4], arith.extui(i32(), flag))
    return arith.addi(arith.addi(sums[0], sums[1]), arith.addi(sums[2], sums[3]))


@dataclass(frozen=True)
class Chunks:
    """Chunks in the registers of `warpgroups` warpgroups."""

    warpgroups: int

    @property
    def threads(self) -> int:
        """Threads of the CTA."""
        return self.warpgroups * LANES

    @property
    def unit(self) -> int:
        """The number of elements of a chunk is a multiple of this."""
        return self.threads * VECTOR

    @property
    def _warps(self) -> int:
        return self.threads // WARP

    def _place(self, n: int, first) -> Any:
        """The place of the first element of the thread's vector n."""
        return arith.addi(arith.addi(first, c32(n * self.unit)), arith.muli(thread(), c32(VECTOR)))

    def load(self, ref, row, first, size: int, *, logits: bool) -> Any:
        """Elements `first` to `first + size` of a row: keys, of float32 if `logits`; EMPTY past the end."""
        length = ref.shape[1]

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR), return_type=_array(size // self.warpgroups))
        def run(_, ref, row, first):
            row, first = row.registers.item(), first.registers.item()
            rest = "0xFF800000" if logits else f"{EMPTY & 0xFFFFFFFF:#010x}"
            found: list[Any] = []
            for n in range(size // self.unit):
                place = self._place(n, first)
                if length % VECTOR == 0:
                    address = element(ref, (row, place), length)
                    code = LOAD.format(length=length, rest=rest)
                    found += ptx(code, address, place, result_types=[i32()] * 4, has_side_effects=True)
                    continue
                for c in range(VECTOR):
                    own = arith.addi(place, c32(c))
                    code = LOAD_ONE.format(length=length, rest=rest)
                    address = element(ref, (row, own), length)
                    found.append(ptx(code, address, own, result_types=i32(), has_side_effects=True))
            if logits:
                found = [ptx(KEY.format(nan=NAN), x, result_types=i32()) for x in found]
            return array([*batched(found, VECTOR)], layout(size // self.warpgroups))

        return run(ref, row, first)

    def places(self, first, size: int) -> Any:
        """The positions of the elements of a chunk that begins at `first`."""

        @plgpu.inline_mgpu(arg_types=(SCALAR,), return_type=_array(size // self.warpgroups))
        def run(_, first):
            first = first.registers.item()
            found = [arith.addi(self._place(n // VECTOR, first), c32(n % VECTOR)) for n in range(size // self.threads)]
            return array([*batched(found, VECTOR)], layout(size // self.warpgroups))

        return run(first)

    @staticmethod
    def between(low, high, share) -> Any:
        """The key of the value at fraction `share` from the value of `low` to that of `high`; EMPTY if not finite."""

        @plgpu.inline_mgpu(arg_types=(SCALAR, SCALAR, SCALAR), return_type=_NUMBER)
        def run(_, low, high, share):
            low, high, share = (x.registers.item() for x in (low, high, share))
            code = "{ .reg .pred p; .reg .b32 s; .reg .f32 x, y, z; "
            for to, key in (("x", "$1"), ("y", "$2")):
                code += f"shr.s32 s, {key}, 31; and.b32 s, s, 0x7FFFFFFF; xor.b32 s, s, {key}; mov.b32 {to}, s; "
            code += (
                "sub.f32 y, y, x; fma.rn.f32 x, y, $3, x; add.f32 x, x, 0f00000000; abs.f32 z, x; mov.b32 $0, x; "
                "shr.s32 s, $0, 31; and.b32 s, s, 0x7FFFFFFF; xor.b32 $0, $0, s; "
                f"setp.lt.f32 p, z, 0f7F800000; selp.b32 $0, $0, {EMPTY & 0xFFFFFFFF:#010x}, p; }}"
            )
            return splat(ptx(code, low, high, share, result_types=i32()))

        return run(low, high, share)

    def count(self, counters, step, keys, least) -> Any:
        """How many keys are `least` or more.  `step` selects the counters, and must alternate between even and odd."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, layout(keys.size), SCALAR), return_type=_NUMBER)
        def run(_, counters, step, keys, least):
            step, least = step.registers.item(), least.registers.item()
            keys = elements(keys)
            # Counts in float32, which is exact here: float32 additions do not share a pipe with the comparisons.
            code = "{ .reg .pred p; .reg .f32 n<4>; " + "".join(f"mov.f32 n{i}, 0f00000000; " for i in range(4))
            for i in range(len(keys)):
                code += f"setp.ge.s32 p, ${i + 2}, $1; @p add.f32 n{i % 4}, n{i % 4}, 0f3F800000; "
            code += "add.f32 n0, n0, n1; add.f32 n2, n2, n3; add.f32 n0, n0, n2; cvt.rzi.s32.f32 $0, n0; }"
            own = ptx(code, least, *keys, result_types=i32())
            return splat(total(counters, step, own, self._warps))

        return run(counters, step, keys, least)

    def count_before(self, counters, step, keys, places, key, end) -> Any:
        """How many keys equal `key` at places before `end`."""
        own = layout(keys.size)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, own, own, SCALAR, SCALAR), return_type=_NUMBER)
        def run(_, counters, step, keys, places, key, end):
            step, key, end = (x.registers.item() for x in (step, key, end))
            flags = [
                arith.andi(
                    arith.cmpi(arith.CmpIPredicate.eq, own, key), arith.cmpi(arith.CmpIPredicate.slt, place, end)
                )
                for own, place in zip(elements(keys), elements(places), strict=True)
            ]
            return splat(total(counters, step, added(flags), self._warps))

        return run(counters, step, keys, places, key, end)

    def extremes(self, counters, keys) -> Any:
        """The smallest key other than EMPTY, and the largest key.  If all are EMPTY, the former is arbitrary."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout(keys.size)), return_type=[_NUMBER] * 2)
        def run(_, counters, keys):
            least = c32(EMPTY + 1)
            low, high = c32(-1), c32(EMPTY)
            for key in elements(keys):
                # EMPTY is one below `least`, and so the largest of these unsigned differences.
                low, high = arith.minui(low, arith.subi(key, least)), arith.maxsi(high, key)
            base = arith.addi(shared(counters), c32(OTHERS))
            code = (
                "{ .reg .pred p; .reg .b32 n, m, a, w, l; redux.sync.min.u32 n, $1, -1; redux.sync.max.s32 m, $2, -1; "
                + OWN.format(lane=0)
                + "mad.lo.s32 a, w, 8, $0; @p st.shared.v2.b32 [a], {n, m}; }"
            )
            ptx(code, base, low, high, has_side_effects=True, convergent=True)
            wait_for_all()
            code = (
                f"{{ .reg .b32 n, m, l; mov.u32 l, %laneid; min.u32 l, l, {self._warps - 1}; mad.lo.s32 l, l, 8, $2; "
                "ld.shared.v2.b32 {n, m}, [l]; redux.sync.min.u32 $0, n, -1; redux.sync.max.s32 $1, m, -1; }"
            )
            low, high = ptx(code, base, result_types=[i32()] * 2, has_side_effects=True, convergent=True)
            return [splat(arith.addi(low, least)), splat(high)]

        return run(counters, keys)

    def collect(self, counters, keys, places, least, end, refs, index, slots: int) -> None:
        """Stores the keys above `least`, and those equal to it at places before `end`, with their places, in any order.

        There are at most `slots` of them.  They go to `refs` (keys, places): to part `index[1]` of row `index[0]`, or
        without `index` to shared memory.  The remaining slots become EMPTY.
        """
        own = layout(keys.size)

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), own, own, SCALAR, SCALAR, [plgpu.RefType()] * 2, [SCALAR] * len(index))
        )
        def run(_, counters, keys, places, least, end, refs, index):
            least, end, index = least.registers.item(), end.registers.item(), [i.registers.item() for i in index]
            keys, places = elements(keys), elements(places)
            chosen = []
            for key, place in zip(keys, places, strict=True):
                above = arith.cmpi(arith.CmpIPredicate.sgt, key, least)
                equal = arith.cmpi(arith.CmpIPredicate.eq, key, least)
                chosen.append(arith.ori(above, arith.andi(equal, arith.cmpi(arith.CmpIPredicate.slt, place, end))))
            own = added(chosen)
            base = arith.addi(shared(counters), c32(OTHERS))
            scan = "{ .reg .pred p, q; .reg .b32 n, a, w, l, up; mov.b32 n, $2; "
            for step in (1, 2, 4, 8, 16):
                scan += f"shfl.sync.up.b32 up|q, n, {step}, 0, -1; @q add.s32 n, n, up; "
            scan += OWN.format(lane=WARP - 1) + "mad.lo.s32 a, w, 4, $1; @p st.shared.b32 [a], n; sub.s32 $0, n, $2; }"
            wait_for_all()  # all threads have read what `extremes` stored
            before = ptx(scan, base, own, result_types=i32(), has_side_effects=True, convergent=True)
            wait_for_all()
            code = (
                "{ .reg .pred p; .reg .b32 n, w, l; "
                + of_warps("n", "$2", self._warps)
                + "redux.sync.add.s32 $1, n, -1; mov.u32 w, %tid.x; shr.u32 w, w, 5; mov.u32 l, %laneid; "
                "setp.ge.u32 p, l, w; @p mov.b32 n, 0; redux.sync.add.s32 $0, n, -1; }"
            )
            earlier, all_chosen = ptx(code, base, result_types=[i32()] * 2, has_side_effects=True, convergent=True)
            slot = arith.addi(before, earlier)
            store = "st.global.b32 [$0], $1;" if index else "st.shared.b32 [$0], $1;"
            width = ir.MemRefType(refs[0].type).shape[-1]
            if index:
                row, part = index
                index, slot = [row], arith.addi(slot, arith.muli(part, c32(slots)))
                all_chosen = arith.addi(all_chosen, arith.muli(part, c32(slots)))
                last = arith.muli(arith.addi(part, c32(1)), c32(slots))
            else:
                last = c32(slots)
            at = [element(ref, (*index, slot), width) for ref in refs]
            for flag, key, place in zip(chosen, keys, places, strict=True):
                ptx(store, at[0], key, predicate=flag)
                ptx(store, at[1], place, predicate=flag)
                at = [arith.addi(x, arith.select(flag, mgpu.c(4, x.type), mgpu.c(0, x.type))) for x in at]
            for n in range(-(-slots // self.threads)):
                slot = arith.addi(all_chosen, arith.addi(thread(), c32(n * self.threads)))
                free = arith.cmpi(arith.CmpIPredicate.slt, slot, last)
                for ref, rest in zip(refs, (EMPTY, 0), strict=True):
                    ptx(store, element(ref, (*index, slot), width), c32(rest), predicate=free)

        run(counters, keys, places, least, end, list(refs), list(index))
