"""What one lane does for the products of a normalised token (`normed.py`): inline PTX."""

from jaxkv_kernels.mosaic_gpu.one_token.lanes import (
    ALL_WARPS,
    GROUP,
    LANES,
    LOAD_TOKEN,
    LOAD_WEIGHT,
    ROUND,
    START,
    UNPACK,
    VECTOR,
    WAIT,
    WARPS,
    cleared,
    constant,
    declared,
    emit,
    loaded,
    multiplied,
    over_warp,
    summed,
    vectors_of,
)

NORM = """
.reg .b32 thread, shared; .reg .f32 scale, low, high, part;
mov.u32 thread, %tid.x; shl.b32 shared, thread, 4; add.s32 shared, shared, ${values}; mov.f32 sum, 0f00000000;
"""
MEAN = """
shr.u32 a, thread, 5; shl.b32 a, a, 2; add.s32 a, a, ${sums}; setp.eq.u32 q, lane, 0; @q st.shared.f32 [a], sum;
bar.sync 0; and.b32 a, lane, {last}; shl.b32 a, a, 2; add.s32 a, a, ${sums}; ld.shared.f32 sum, [a];
"""
LOAD_SHARED_TOKEN = "ld.shared.v4.b32 {{{r}0, {r}1, {r}2, {r}3}}, [{at} + {offset}];\n"
PACK = {"bfloat16": "cvt.rn.bf16x2.f32 {to}, high, low;\n", "float16": "cvt.rn.f16x2.f32 {to}, high, low;\n"}


def normed(refs, cta, *, dtype, rows, width, eps) -> None:
    """Stores the products of the normalised token and all matrices.

    `refs` are the token, the weights of the norm, the matrices, which have `rows` each, their results, and shared
    memory: the normalised token, and the sum of each warp.
    """
    count, total = len(rows), sum(rows)
    rounds, token, norm = -(-total // ALL_WARPS), "$0", "$1"
    sets = "w", "v"
    code = [START.format(cta=len(refs), warps=WARPS), declared((*sets, "t", "x"), GROUP, ("w",))]
    code.append(NORM.format(values=len(refs) - 2) + ".reg .b64 base, to0, to1;\n")

    def load(i: int):
        """Loads the warp's row number `i`, the last one instead of those beyond; sets where its product is stored."""
        to = f"to{i % 2}"
        yield f"add.u32 id, n, {i * ALL_WARPS}; min.u32 id, id, {total - 1};\n"
        yield f"mov.u32 row, id; mov.b64 base, $2; mov.b64 {to}, ${2 + count};\n"
        first = 0
        for matrix, size in enumerate(rows[:-1], 1):
            first += size
            yield f"setp.ge.u32 q, id, {first}; sub.u32 a, id, {first}; selp.b32 row, a, row, q;\n"
            yield f"selp.b64 base, ${2 + matrix}, base, q; selp.b64 {to}, ${2 + count + matrix}, {to}, q;\n"
        yield f"mul.wide.u32 first, row, 2; add.s64 {to}, {to}, first;\n"
        yield f"mul.wide.u32 first, row, {2 * width}; add.s64 first, first, own; add.s64 first, first, base;\n"
        for v in vectors_of(width):
            yield from loaded(LOAD_WEIGHT, f"{sets[i % 2]}{v}_", "first", v, width)

    threads, vectors = WARPS * LANES, width // VECTOR
    steps = range(-(-vectors // threads))
    for i in range(min(rounds, 2)):
        code += load(i)
    code.append(WAIT)
    for v in steps:
        code.append(f"mov.b32 x{v}_0, 0; mov.b32 x{v}_1, 0; mov.b32 x{v}_2, 0; mov.b32 x{v}_3, 0;\n")
        code.append(f"mul.wide.u32 at, thread, 16; add.s64 at, at, {token}; add.u32 a, thread, {v * threads};\n")
        text = LOAD_TOKEN.format(r=f"x{v}_", at="at", offset=v * threads * 16)
        code.append(f"setp.lt.u32 q, a, {vectors}; @q {text}")
        for i in range(4):
            for half in range(2):
                code.append(UNPACK[dtype][half].format(to="low", word=f"x{v}_{i}") + "fma.rn.f32 sum, low, low, sum;\n")
    code += over_warp("sum")
    code.append(MEAN.format(sums=len(refs) - 1, last=WARPS - 1))
    code += over_warp("sum", WARPS)
    code.append(f"fma.rn.f32 sum, sum, {constant(1 / width)}, {constant(eps)}; rsqrt.approx.f32 scale, sum;\n")
    for v in steps:
        code.append(f"mul.wide.u32 at, thread, 16; add.s64 at, at, {norm}; add.u32 a, thread, {v * threads};\n")
        code.append(f"setp.lt.u32 half, a, {vectors};\n")
        code.append("@half " + LOAD_TOKEN.format(r=f"t{v}_", at="at", offset=v * threads * 16))
        for i in range(4):
            low, high = UNPACK[dtype]
            code.append(low.format(to="low", word=f"x{v}_{i}") + high.format(to="high", word=f"x{v}_{i}"))
            code.append("mul.f32 low, low, scale; mul.f32 high, high, scale;\n" + PACK[dtype].format(to="a"))
            code.append(low.format(to="low", word="a") + high.format(to="high", word="a"))
            code.append(low.format(to="part", word=f"t{v}_{i}") + "mul.f32 low, low, part;\n")
            code.append(high.format(to="part", word=f"t{v}_{i}") + "mul.f32 high, high, part;\n")
            code.append(PACK[dtype].format(to=f"x{v}_{i}"))
        words = ", ".join(f"x{v}_{i}" for i in range(4))
        code.append(f"@half st.shared.v4.b32 [shared + {v * threads * 16}], {{{words}}};\n")
    code.append(f"bar.sync 0; shl.b32 shared, lane, 4; add.s32 shared, shared, ${len(refs) - 2};\n")
    for i in range(rounds):
        register = sets[i % 2]
        code += cleared("w")
        for v in vectors_of(width):
            code += loaded(LOAD_SHARED_TOKEN, f"t{v}_", "shared", v, width)
            code += multiplied(dtype, f"t{v}_", (f"{register}{v}_", "w"))
        code += summed("w", "x")
        code.append(f"{ROUND[dtype]} short, x; setp.eq.u32 q, lane, 0; @q st.global.b16 [to{i % 2}], short;\n")
        if i + 2 < rounds:
            code += load(i + 2)
    emit(code, refs, cta)
