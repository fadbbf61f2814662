"""Vectors of int32 in the registers of a CTA, and tables in its shared memory: what each thread does.

Element r * threads + t of a vector is in register r of thread t.  To Pallas, each warpgroup has its own array of its
elements.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.ptx.fragments import array, elements, splat
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR

LANES, WARPS, WARP = 128, 4, 32
REF = plgpu.RefType()


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
        found = function(Threads(warpgroups), *given[:refs], *vectors)
        return [
            array([[value] for value in x], layout(n * LANES)) if n else splat(x)
            for n, x in zip(results, found or (), strict=True)
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

    def load(self, ref, *place):
        """ref[place]."""
        utils, (space, address) = self._mgpu.utils, self._address(ref, place)
        return utils.inline_ptx(f"ld.{space}.b32 $0, [$1];", address, result_types=self.i32, has_side_effects=True)

    def store(self, ref, value, *place) -> None:
        """ref[place] = value."""
        space, address = self._address(ref, place)
        self._mgpu.utils.inline_ptx(f"st.{space}.b32 [$0], $1;", address, value, has_side_effects=True)

    def combine(self, kind: str, ref, value, place) -> None:
        """Atomically replaces ref[place] by its maximum ("max") or its sum ("add") with `value`."""
        space, address = self._address(ref, [place])
        self._mgpu.utils.inline_ptx(f"red.{space}.{kind}.s32 [$0], $1;", address, value, has_side_effects=True)

    def _address(self, ref, place):
        """The memory space of a reference, and the address of an element."""
        utils, (element, *inner) = self._mgpu.utils, place
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
        found = self._mgpu.utils.inline_ptx(
            " ".join(code.split()), self._address(table, [self.constant(0)])[1], *bounds, *slopes,
            result_types=[self.i32] * size, has_side_effects=True,
        )  # fmt: skip
        return list(found)

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

    def over_warp(self, kind: str, value):
        """The minimum ("min"), maximum ("max") or sum ("add") of the values of the warp's lanes."""
        ptx = f"redux.sync.{kind}.s32 $0, $1, -1;"
        return self._mgpu.utils.inline_ptx(ptx, value, result_types=self.i32, has_side_effects=True, convergent=True)
