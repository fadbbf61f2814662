"""What one lane does for the experts of a single token (`experts.py`): inline PTX."""

from jaxkv_kernels.mosaic_gpu.one_token.lanes import (
    GROUP,
    LOAD_TOKEN,
    LOAD_WEIGHT,
    START,
    WAIT,
    WARPS,
    cleared,
    declared,
    loaded,
    multiplied,
    stored,
    summed,
    vectors_of,
)
from jaxkv_kernels.mosaic_gpu.ptx.inline import constant, emit
from jaxkv_kernels.mosaic_gpu.ptx.warp import over_warp
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import LOG2E


def gate_up(refs, cta, *, ctas, dtype, choices, experts, more, inner, width, limit) -> None:
    """Stores silu(gate row) * (up row), at most `limit`, of all rows of the shared and of the chosen experts.

    `refs` are the token, the choices, gate, up, perhaps gate and up of the shared expert, and the result.
    """
    token, chosen, gate, up, *shared, out = (f"${i}" for i in range(len(refs)))
    code = [START.format(cta=len(refs), warps=WARPS), declared(("g", "u", "t"), GROUP, ("g", "u"))]
    code.append(f"add.s64 at, own, {token};\n")
    code.append(f"NEXT: setp.ge.u32 p, n, {(choices + more) * inner}; @p bra.uni DONE;\n")
    code.append(f"div.u32 slot, n, {inner}; mul.lo.u32 a, slot, {inner}; sub.u32 row, n, a;\n")
    code.append(_expert(chosen, choices, experts, more))
    code.append(f"mad.lo.u32 row, id, {inner}, row;\n")
    if shared:
        code.append("selp.b32 row, n, row, q;\n")
    code.append(f"mul.wide.u32 first, row, {2 * width}; add.s64 first, first, own; mov.b64 second, first;\n")
    for pointer, chosen_from, other in (("first", gate, shared[:1]), ("second", up, shared[1:])):
        code.append(f".reg .b64 base_{pointer}; mov.b64 base_{pointer}, {chosen_from};\n")
        code += (f"selp.b64 base_{pointer}, {matrix}, base_{pointer}, q;\n" for matrix in other)
        code.append(f"add.s64 {pointer}, {pointer}, base_{pointer};\n")
    code += cleared("g", "u")
    vectors = vectors_of(width)
    for start in range(0, len(vectors), GROUP):
        group = vectors[start : start + GROUP]
        for v in group:
            code += loaded(LOAD_WEIGHT, f"g{v - start}_", "first", v, width)
            code += loaded(LOAD_WEIGHT, f"u{v - start}_", "second", v, width)
        for v in group:
            code += loaded(LOAD_TOKEN, f"t{v - start}_", "at", v, width)
            code += multiplied(dtype, f"t{v - start}_", (f"g{v - start}_", "g"), (f"u{v - start}_", "u"))
    code += [*summed("g", "x"), *summed("u", "y")]
    if limit is not None:
        high, low = constant(limit), constant(-limit)
        code.append(f"min.f32 x, x, {high}; min.f32 y, y, {high}; max.f32 y, y, {low};\n")
    code.append(f"mul.f32 sum, x, {constant(-LOG2E)}; ex2.approx.f32 sum, sum; add.f32 sum, sum, 0f3F800000;\n")
    code.append("div.rn.f32 x, x, sum; mul.f32 x, x, y;\n")
    code += stored(dtype, "x", out)
    code.append(f"add.u32 n, n, {ctas * WARPS}; bra.uni NEXT; DONE:\n")
    emit(code, refs, cta)


def down(refs, cta, *, ctas, dtype, choices, experts, more, inner, width) -> None:
    """Stores the sum over experts of their share times the product of a row of down with their part of `gate_up`.

    `refs` are the results of `gate_up`, the choices, their shares, down, perhaps down of the shared expert, and the
    result.
    """
    hidden, chosen, shares, matrix, *shared, out = (f"${i}" for i in range(len(refs)))
    slots, vectors = choices + more, vectors_of(inner)
    ahead = 2 if len(vectors) <= 6 else 1  # as registers suffice
    sets = [f"w{i}" for i in range(ahead + 1)]
    code = [START.format(cta=len(refs), warps=WARPS), declared((*sets, "t"), len(vectors), ("w",))]
    code.append(".reg .f32 share;\n")

    def load(slot: int):
        """Loads of a row of the expert of a slot."""
        if slot < more:
            place = f"mad.lo.u32 row, n, {more}, {slot};"
            yield f"{place} mul.wide.u32 first, row, {2 * inner}; add.s64 first, first, {shared[0]};\n"
        else:
            yield f"mov.u32 slot, {slot};\n" + _expert(chosen, choices, experts, more)
            yield f"mad.lo.u32 row, id, {width}, n; mul.wide.u32 first, row, {2 * inner};\n"
            yield f"add.s64 first, first, {matrix};\n"
        yield "add.s64 first, first, own;\n"
        for v in vectors:
            yield from loaded(LOAD_WEIGHT, f"{sets[slot % len(sets)]}{v}_", "first", v, inner)

    def share(slot: int):
        """The share of a slot."""
        if slot < more:
            yield "mov.f32 share, 0f3F800000;\n"
        else:
            yield f"mov.f32 share, 0f00000000; ld.global.b32 a, [{chosen} + {4 * (slot - more)}];\n"
            yield f"setp.lt.u32 q, a, {experts}; @q ld.global.f32 share, [{shares} + {4 * (slot - more)}];\n"

    def add(slot: int):
        """Adds the product with the row of a slot."""
        yield from cleared("w")
        yield from share(slot)
        for v in vectors:
            yield from loaded(LOAD_TOKEN, f"t{v}_", "at", v, inner, slot * inner * 2)
        for v in vectors:
            yield from multiplied(dtype, f"t{v}_", (f"{sets[slot % len(sets)]}{v}_", "w"))
        # Select instead of multiplying by 0: the expert of a choice that does not exist is another one.
        yield "add.f32 x, w_even, w_odd; mul.f32 x, x, share; setp.eq.f32 q, share, 0f00000000;\n"
        yield "selp.f32 x, 0f00000000, x, q; add.f32 sum, sum, x;\n"

    code.append(f"NEXT: setp.ge.u32 p, n, {width}; @p bra.uni DONE; mov.f32 sum, 0f00000000;\n")
    for slot in range(min(ahead, slots)):
        code += load(slot)
    # Choices and weights are older than `gate_up`, on whose results this waits.
    code.append(WAIT + f"add.s64 at, own, {hidden};\n")
    for slot in range(slots):
        if slot + ahead < slots:
            code += load(slot + ahead)
        code += add(slot)
    code += over_warp("add.f32", "sum", "other")
    code += stored(dtype, "sum", out)
    code.append(f"add.u32 n, n, {ctas * WARPS}; bra.uni NEXT; DONE:\n")
    emit(code, refs, cta)


def _expert(chosen: str, choices: int, experts: int, more: int) -> str:
    """`q`: whether `slot` is one of the shared expert's; otherwise `id`: an expert, that of the choice if it exists."""
    code = f"setp.lt.u32 q, slot, {more}; sub.s32 a, slot, {more}; max.s32 a, a, 0; mul.wide.u32 first, a, 4;\n"
    return code + f"add.s64 first, first, {chosen}; ld.global.b32 id, [first]; min.u32 id, id, {experts - 1};\n"
